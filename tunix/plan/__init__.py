"""Memory and time of a run's programs, estimated before there are chips to run them."""
