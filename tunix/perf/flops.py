"""Model FLOPs by formula, and the utilization of devices that follows from them.

A matrix of P parameters costs 2 P FLOPs for each token in the forward pass (a
multiply and an add), as much again in the backward pass for the gradient of its input,
and as much again for its own gradient, if it is trained: 6 P, the rule of Kaplan et
al. 2020 (arXiv:2001.08361, section 2.1). Attention adds two products of queries
with keys and of weights with values (PaLM, arXiv:2204.02311, appendix B). Work that
rematerialization repeats does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tunix.perf.chips import chip_of


def peak_flops(device: Any) -> float | None:
  """Returns the dense bfloat16 FLOP/s of a device; None for a device not in the table.

  CPUs are not in the table.

  Args:
    device: a `jax.Device`, or the text of its `device_kind`.
  """
  chip = chip_of(device)
  return None if chip is None else chip.flops


def mfu(flops: float, seconds: float, devices: Iterable[Any]) -> float | None:
  """Returns the model FLOPs utilization (MFU), between 0 and 1.

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
    raise ValueError(f"seconds is {seconds}; expected a positive number")
  peaks = [peak_flops(device) for device in devices]
  rates = [peak for peak in peaks if peak is not None]
  if not peaks or len(rates) < len(peaks):
    return None
  return flops / (seconds * math.fsum(rates))


def attended_pairs(length: int, *, causal: bool = True, window: int | None = None):
  """Counts the (query, key) pairs that attention computes in one sequence.

  Args:
    length: tokens of the sequence.
    causal: if True, a query sees no later key.
    window: most keys that a query sees, its own included; None: all.

  Raises:
    ValueError: a window without causal attention, or below 1.
  """
  if window is not None and (window < 1 or not causal):
    raise ValueError(
      f"window is {window} and causal is {causal}; expected a window of at least 1 and "
      "causal=True"
    )
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
  """Returns the forward FLOPs of attention: 4 N H per layer and (query, key) pair.

  Args:
    lengths: tokens of each sequence (of each segment, for packed rows).
    num_layers: layers of this kind; call it once for each kind of window.
    num_heads: query heads.
    head_dim: width of a head.
    causal: if True, a query sees no later key.
    window: most keys that a query sees; None: all.
  """
  pairs = sum(attended_pairs(n, causal=causal, window=window) for n in lengths)
  return 4.0 * num_layers * num_heads * head_dim * pairs


def decoder_flops(matmul_params: int, tokens: int, *, attention: float = 0.0) -> float:
  """Returns the FLOPs of a forward pass: 2 P per token, plus attention.

  Args:
    matmul_params: parameters that multiply every token: all matrices and the output
      head (once, even if tied), but not the embedding table. Of experts only the active
      ones count.
    tokens: tokens of all sequences.
    attention: result of `attention_flops` for the same sequences.
  """
  return 2.0 * matmul_params * tokens + attention


def train_flops(
  matmul_params: int,
  tokens: int,
  *,
  attention: float = 0.0,
  trained_matmul_params: int | None = None,
) -> float:
  """Returns the FLOPs of a training step: forward pass and both gradients.

  4 P + 2 P_trained per token, and three times attention. With LoRA, P counts the
  base and the factors, P_trained the factors: about two thirds of full training.

  Args:
    matmul_params: as for `decoder_flops`, LoRA factors included.
    tokens: tokens of all sequences of the step.
    attention: result of `attention_flops` for the same sequences.
    trained_matmul_params: how many of them are trained; None: all.

  Raises:
    ValueError: `trained_matmul_params` is larger than `matmul_params`.
  """
  trained = matmul_params if trained_matmul_params is None else trained_matmul_params
  if trained > matmul_params:
    raise ValueError(
      f"trained_matmul_params is {trained}; expected at most matmul_params, which is "
      f"{matmul_params}. Count LoRA factors in matmul_params, too"
    )
  forward = decoder_flops(matmul_params, tokens, attention=attention)
  return 2 * forward + 2.0 * trained * tokens + attention
