"""How arrays of the decoder lie on a mesh."""
