"""Rows into batches; `tunix.data.pipeline` and `batches` call it."""
