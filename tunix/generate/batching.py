"""The earlier place of `tunix.generate.sizes.batching`, for samplers of users."""

from tunix.generate.sizes.batching import left_padded

__all__ = ["left_padded"]
