"""The wire of Tinker: fields, values and bytes."""
