"""Placement of the decoder's arrays on a mesh."""
