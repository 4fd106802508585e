"""Model FLOPs by formula, and how near they come to what a device can do.

A matrix of P parameters costs 2 P FLOPs for each token in the forward pass (a
multiply and an add), as much again in the backward pass for the gradient of its input,
and as much again for its own gradient, if it is trained: 6 P, the rule of Kaplan et
al. 2020 (arXiv:2001.08361, section 2.1). Attention adds two products of queries
with keys and of weights with values (PaLM, arXiv:2204.02311, appendix B). Work that
rematerialisation repeats is no model FLOP.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tunix.perf.chips import chip_of


def peak_flops(device: Any) -> float | None:
  """Dense bfloat16 FLOP/s of a device; None if it is not in the table (every CPU).

  Args:
    device: a `jax.Device`, or the text of its `device_kind`.
  """
  chip = chip_of(device)
  return None if chip is None else chip.flops


def mfu(flops: float, seconds: float, devices: Iterable[Any]) -> float | None:
  """Model FLOPs utilisation, between 0 and 1.

  Args:
    flops: model FLOPs of a step, on all devices together.
    seconds: duration of the step.
    devices: the devices it ran on.

  Returns:
    flops / (seconds * sum of peaks); None without a device or if a peak is unknown.

  Raises:
    ValueError: `seconds` is not positive.
  """
  if seconds <= 0:
    raise ValueError(f"seconds is {seconds}, it must be positive")
  peaks = [peak_flops(device) for device in devices]
  known = [peak for peak in peaks if peak is not None]
  if not peaks or len(known) < len(peaks):
    return None
  return flops / (seconds * math.fsum(known))


def attended_pairs(length: int, *, causal: bool = True, window: int | None = None):
  """Pairs (query, key) that attention computes in one sequence.

  Args:
    length: tokens of the sequence.
    causal: whether a query sees no later key.
    window: keys that a query sees at most, itself included; None for all.

  Raises:
    ValueError: a window without causal attention, or below 1.
  """
  if window is not None and (window < 1 or not causal):
    raise ValueError(f"window is {window}: it must be at least 1, and causal=True")
  if not causal:
    return length * length
  reach = length if window is None else min(window, length)
  return reach * (reach + 1) // 2 + (length - reach) * reach


def attention_flops(
  lengths: Iterable[int],
  *,
  num_layers: int,
  num_heads: int,
  head_dim: int,
  causal: bool = True,
  window: int | None = None,
) -> float:
  """Forward FLOPs of attention's two products: 4 N H per layer, query and key.

  Args:
    lengths: tokens of each sequence (of each segment, for packed rows).
    num_layers: layers of this kind; call it once for each kind of window.
    num_heads: query heads.
    head_dim: width of a head.
    causal: whether a query sees no later key.
    window: keys that a query sees at most; None for all.
  """
  pairs = sum(attended_pairs(n, causal=causal, window=window) for n in lengths)
  return 4.0 * num_layers * num_heads * head_dim * pairs


def decoder_flops(matmul_params: int, tokens: int, *, attention: float = 0.0) -> float:
  """FLOPs of a forward pass: 2 P per token, and attention.

  Args:
    matmul_params: parameters that multiply every token: all matrices and the output
      head (once, also when tied), not the embedding table; of experts the active ones.
    tokens: tokens of all sequences.
    attention: what `attention_flops` gives for the same sequences.
  """
  return 2.0 * matmul_params * tokens + attention


def train_flops(
  matmul_params: int,
  tokens: int,
  *,
  attention: float = 0.0,
  trained_matmul_params: int | None = None,
) -> float:
  """FLOPs of a training step: forward, gradients of activations and of weights.

  4 P + 2 P_trained per token, and three times attention. With LoRA, P counts the
  base and the factors, P_trained the factors: about two thirds of full training.

  Args:
    matmul_params: as for `decoder_flops`, LoRA factors included.
    tokens: tokens of all sequences of the step.
    attention: what `attention_flops` gives for the same sequences.
    trained_matmul_params: those of them that are trained; all when None.

  Raises:
    ValueError: more parameters are trained than there are.
  """
  trained = matmul_params if trained_matmul_params is None else trained_matmul_params
  if trained > matmul_params:
    raise ValueError(
      f"trained_matmul_params is {trained}, more than matmul_params {matmul_params}: "
      "the latter counts LoRA factors, too"
    )
  forward = decoder_flops(matmul_params, tokens, attention=attention)
  return 2 * forward + 2.0 * trained * tokens + attention
