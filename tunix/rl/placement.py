"""The earlier place of `tunix.rl.weights.placement`, for rollout engines of users."""

from tunix.rl.weights.placement import copy_weights

__all__ = ["copy_weights"]
