"""Work of the Tinker service: training and sampling."""
