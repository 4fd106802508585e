"""The public place of `tunix.rl.weights.reshard`."""

from tunix.rl.weights.reshard import (
  reshard_arrays,
  reshard_model_to_mesh,
  reshard_pytree,
)

__all__ = ["reshard_arrays", "reshard_model_to_mesh", "reshard_pytree"]
