"""What workers of the Tinker service do: training and sampling."""
