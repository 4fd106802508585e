"""The order of sampling and training, and its journal; the learner calls it."""
