"""Qwen3-VL: images and text."""
