"""Logits of real-format checkpoints against what transformers and PEFT computed.

The expected values are committed (tests/golden); parity_live_test.py compares with the
installed torch libraries.
"""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import checkpoints
from tunix.models import lora
from tunix.models.automodel import AutoModel
from tunix.models.transformer.config import RopeConfig
from tunix.models.transformer.dense.layers import FrozenParam
from tunix.ops.masks import next_token_targets, positions_from_mask
from tunix.ops.vocabulary.logprobs import weighted_nll
from tunix.utils import tree

# 1e-6 was reached.
TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
# Sums of terms that cancel: 1.02e-4 on a processor without AVX-512.
CANCELLING_TOLERANCE = {"layers.linear.attn.dt_bias": 3e-4}


@nnx.jit
def call(model, tokens, **options):
  return model(tokens, **options)


def run(model, want):
  mask = want["mask"]
  logits, _ = call(
    model,
    want["tokens"],
    positions=positions_from_mask(jnp.asarray(mask)),
    attention_mask=checkpoints.visible(mask),
  )
  return np.asarray(logits) * mask[..., None]


@pytest.mark.parametrize("name", checkpoints.some_as_shipped("gemma3"))
def test_logits_of_left_padded_rows(name):
  model = AutoModel.from_pretrained(checkpoints.GOLDEN / name)
  assert model.config.dtype == jnp.float32
  want = checkpoints.expected(name)
  assert checkpoints.relative(run(model, want), want["logits"]) < TOLERANCE


@pytest.mark.parametrize("name", checkpoints.some_as_shipped("gemma3", "qwen3_moe"))
def test_gradients_of_the_loss(name):
  # Scanned, while the other tests run the layers unrolled.
  folder = checkpoints.GOLDEN / name
  model = AutoModel.from_pretrained(folder, scan_layers=True)
  gradients = nnx.state(AutoModel.from_pretrained(folder / "gradients"))
  theirs = tree.flatten(jax.device_get(gradients))  # NumPy compiles nothing below
  want = checkpoints.expected(name)
  graph, state = nnx.split(model)
  weights = want["mask"] * np.roll(want["mask"], 1, axis=1)
  weights[:, 0] = 0

  def loss(state):
    hidden, _ = nnx.merge(graph, state)(
      want["tokens"],
      positions=positions_from_mask(jnp.asarray(want["mask"])),
      attention_mask=checkpoints.visible(want["mask"]),
      return_hidden=True,
    )
    table, layout = nnx.merge(graph, state).unembedding()
    target = next_token_targets(jnp.asarray(want["tokens"]))
    scored = jnp.roll(jnp.asarray(weights, jnp.float32), -1, axis=1)
    return weighted_nll(hidden, table, target, scored, layout) / weights.sum()

  ours = tree.flatten(jax.device_get(jax.jit(jax.grad(loss))(state)))
  assert ours.keys() == theirs.keys()
  frozen = tree.flatten(nnx.state(model, FrozenParam))  # buffers in transformers
  for path, gradient in ours.items():
    if path in frozen or not np.any(theirs[path]):
      assert path in frozen or not np.any(gradient), path
      continue
    bound = CANCELLING_TOLERANCE.get(path, GRADIENT_TOLERANCE)
    assert checkpoints.relative(gradient, theirs[path]) < bound, path


@pytest.mark.parametrize("name", checkpoints.NAMES)
def test_adapter_written_by_peft(name):
  folder = checkpoints.GOLDEN / name
  model = AutoModel.from_pretrained(folder)
  adapted = lora.load_adapter(model, folder / "adapter")
  want = checkpoints.expected(name)
  assert checkpoints.relative(want["adapted"], want["logits"]) > 0.1
  assert checkpoints.relative(run(adapted, want), want["adapted"]) < TOLERANCE
  merged = lora.merge(adapted)
  assert checkpoints.relative(run(merged, want), want["adapted"]) < TOLERANCE


def test_both_spellings_of_scaled_rope(tmp_path):
  folder = checkpoints.copy("llama3p1", tmp_path / "legacy")
  shutil.copyfile(folder / "config_legacy.json", folder / "config.json")
  new = AutoModel.from_pretrained(checkpoints.GOLDEN / "llama3p1")
  old = AutoModel.from_pretrained(folder)
  assert new.config == old.config
  assert new.config.rope == RopeConfig(
    theta=500.0,
    scaling="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=32,
  )
  want = checkpoints.expected("llama3p1")
  assert checkpoints.relative(run(old, want), want["logits"]) < TOLERANCE


@pytest.mark.parametrize("scaling", [None, "linear"])
def test_scaling_of_rope_matters(scaling):
  model = AutoModel.from_pretrained(checkpoints.GOLDEN / "llama3p1")
  rope = dataclasses.replace(model.config.rope, scaling=scaling)
  model.config = dataclasses.replace(model.config, rope=rope)
  want = checkpoints.expected("llama3p1")
  assert checkpoints.relative(run(model, want), want["logits"]) > 0.01


@pytest.mark.parametrize("name", checkpoints.NAMES)
def test_token_by_token_through_the_cache(name):
  model = AutoModel.from_pretrained(checkpoints.GOLDEN / name).unstack()
  want = checkpoints.expected(name)
  tokens, logits = want["tokens"][:1], want["logits"][:1]
  cache = model.init_cache(1, 24)
  first, cache = call(model, tokens[:, :12], cache=cache)
  steps = [np.asarray(first)]
  for t in range(12, tokens.shape[1]):
    step, cache = call(model, tokens[:, t : t + 1], cache=cache)
    steps.append(np.asarray(step))
  assert checkpoints.relative(np.concatenate(steps, 1), logits) < TOLERANCE


@pytest.mark.parametrize("name", checkpoints.NAMES)
def test_packed_rows_equal_separate_rows(name):
  model = AutoModel.from_pretrained(checkpoints.GOLDEN / name)
  want = checkpoints.expected(name)
  valid = want["mask"].astype(bool)
  rows = [tokens[keep] for tokens, keep in zip(want["tokens"], valid)]
  packed = np.concatenate(rows)[None]
  segments = np.concatenate([np.full(len(r), i + 1) for i, r in enumerate(rows)])
  logits, _ = call(model, packed, segment_ids=segments[None].astype(np.int32))
  assert checkpoints.relative(logits[0], want["logits"][valid]) < TOLERANCE
