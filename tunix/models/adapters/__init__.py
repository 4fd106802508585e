"""Adapters as files and as modules; `tunix.models.lora` calls it."""
