"""Optimizers that are one object for equal arguments.

Trainers share compiled steps only if they have the same optimizer object (see
`tunix/sft/steps/shared_steps.py`), so tests take their optimizers from here.
"""

import functools

import optax

adam = functools.lru_cache(maxsize=None, typed=True)(optax.adam)
adamw = functools.lru_cache(maxsize=None, typed=True)(optax.adamw)
sgd = functools.lru_cache(maxsize=None, typed=True)(optax.sgd)
