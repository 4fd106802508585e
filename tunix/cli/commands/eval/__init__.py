"""`tunix eval`: likelihoods, pairs, and rewards of completions."""
