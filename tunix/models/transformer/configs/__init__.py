"""Parts of `tunix.models.transformer.config`."""
