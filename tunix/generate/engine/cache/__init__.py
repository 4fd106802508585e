"""Keys, values and states of the running sequences, in device memory."""
