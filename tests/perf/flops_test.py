import itertools
import types

import pytest

from tunix.perf import flops


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 3)])
@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_attended_pairs(length, causal, window):
  pairs = [
    (q, k)
    for q, k in itertools.product(range(length), repeat=2)
    if not causal or (k <= q and (window is None or q - k < window))
  ]
  found = flops.attended_pairs(length, causal=causal, window=window)
  assert found == len(pairs)


def test_attention_flops():
  # 2 sequences of 3 and 1 tokens: 6 + 1 pairs; each head and layer: q.k and w*v,
  # a multiply and an add per width.
  found = flops.attention_flops([3, 1], num_layers=2, num_heads=4, head_dim=8)
  assert found == 7 * 2 * 4 * 8 * 4


def test_a_step_costs_three_forward_passes_and_lora_about_two():
  forward = flops.decoder_flops(1000, 10, attention=50.0)
  assert forward == 2 * 1000 * 10 + 50
  assert flops.train_flops(1000, 10, attention=50.0) == 3 * forward
  # LoRA of 20 parameters on 1000: 2 + 2 for all of them, 2 for the factors.
  lora = flops.train_flops(1020, 10, attention=50.0, trained_matmul_params=20)
  assert lora == 4 * 1020 * 10 + 2 * 20 * 10 + 150


def test_formula_agrees_with_the_lowered_program():
  import jax
  import jax.numpy as jnp

  from tunix.perf import hlo_flops

  def loss(params, x):
    hidden = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]
    return jax.nn.log_softmax(hidden @ params["head"]).sum()

  params = {"layers": jnp.ones((6, 8, 8)), "head": jnp.ones((8, 32))}
  lowered = jax.jit(jax.grad(loss)).lower(params, jnp.ones((5, 8)))
  size = 6 * 8 * 8 + 8 * 32
  assert hlo_flops.count_flops(lowered).flops == flops.train_flops(size, 5)


@pytest.mark.parametrize(
  ("kind", "tflops"),
  [
    ("TPU v4", 275),
    ("TPU v5 lite", 197),
    ("TPU v5", 459),
    ("TPU v5p", 459),
    ("TPU v6 lite", 918),
    ("TPU7x", 1153.5),
    ("NVIDIA A100-SXM4-80GB", 312),
    ("NVIDIA H100 80GB HBM3", 989.4),
    ("NVIDIA H100 PCIe", 756),
    ("NVIDIA H200", 989.4),
    ("NVIDIA B200", 2250),
  ],
)
def test_peaks(kind, tflops):
  device = types.SimpleNamespace(device_kind=kind)
  assert flops.peak_flops(device) == flops.peak_flops(kind) == tflops * 1e12


def test_mfu():
  devices = ["TPU v4", "TPU v4"]
  assert flops.mfu(275e12, 1.0, devices) == 0.5
  assert flops.mfu(1.0, 1.0, ["TPU v4", "cpu"]) is None
  assert flops.mfu(1.0, 1.0, []) is None
  with pytest.raises(ValueError, match=r"seconds is 0\.0"):
    flops.mfu(1.0, 0.0, devices)


def test_nonsense_is_refused():
  with pytest.raises(ValueError, match="window is 0"):
    flops.attended_pairs(4, window=0)
  with pytest.raises(ValueError, match="trained_matmul_params is 11"):
    flops.train_flops(10, 1, trained_matmul_params=11)
