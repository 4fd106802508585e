"""The order of sampling and training; the learner calls it."""
