"""Ministral 3, and the text models of Mistral 3."""
