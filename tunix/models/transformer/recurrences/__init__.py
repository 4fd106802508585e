"""Mixers with a recurrent state: delta rule and Mamba-2."""
