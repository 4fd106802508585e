"""Pure functions over arrays: losses, log-probabilities, masks, reductions."""
