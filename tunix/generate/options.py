"""The earlier place of `tunix.generate.drawing.options`, for samplers of users."""

from tunix.generate.drawing.options import SamplingOptions

__all__ = ["SamplingOptions"]
