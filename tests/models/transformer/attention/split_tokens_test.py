"""Rows whose tokens are split over devices: attention, losses, scores and gradients are
those of one device."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models.transformer import attention_cases as cases
from tunix.generate import scoring
from tunix.generate.decoders import layout
from tunix.models import automodel
from tunix.models.transformer.attention import (
  fused,
  paths as attention_paths,
  split_tokens,
)
from tunix.models.transformer.attention.split_tokens import Split
from tunix.models.transformer.config import MoEConfig, ShardingRules
from tunix.sft.losses import next_token_loss
from tunix.utils import mesh as mesh_lib, tree

RULES = ShardingRules()


def make_mesh(axes):
  return mesh_lib.create_mesh(axes, jax.devices()[: math.prod(axes.values())])


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_folded_pieces_have_the_same_work(shards):
  split = Split(axis="cp", shards=shards, tokens=6 * shards, folded=True)
  slots = split.slots()
  assert sorted(slots.ravel()) == list(range(6 * shards))
  # Queries at slot t see t + 1 keys. A first and a last piece: 0, 1, 2 and the like.
  assert len(set(np.sum(slots + 1, axis=1))) == 1
  assert {0, 1, 2, 6 * shards - 1} <= set(slots[0])
  in_order = Split(axis="cp", shards=shards, tokens=6 * shards, folded=False)
  np.testing.assert_array_equal(in_order.slots()[1], np.arange(6, 12))


@pytest.mark.parametrize(
  ("path", "kind", "length", "options"),
  [
    ("blockwise", "causal", 32, {}),  # folded
    ("blockwise", "segments groups", 32, {"window": 5, "softcap": 3.0}),
    ("plain", "segments groups", 32, {}),  # folded
    ("plain", "cache mask groups", 32, {"window": 9}),  # a prompt
    ("plain", "segments", 12, {}),  # in order: no two pieces a device
    ("blockwise", "causal", 30, {}),  # does not divide: every device, all of it
  ],
)
def test_attention_equals_plain(path, kind, length, options):
  case = cases.case(kind, 3, length=length, **options)
  attend = functools.partial(attention_paths.attend, implementation=path, rules=RULES)
  with jax.set_mesh(make_mesh({"fsdp": 2, "cp": 4})):
    got = cases.value_and_grads(case, attend)
  cases.assert_equal(got, cases.plain(case))


def test_rows_that_do_not_divide_are_spoken_of(caplog):
  def said(length, **changes):
    case = cases.case("causal", 0, length=length)
    visible = dataclasses.replace(case.visible, **changes)
    with jax.set_mesh(make_mesh({"cp": 8})):
      assert split_tokens.split_of(case.query, visible, None, RULES) is None
    return caplog.text

  assert not said(1) and not said(
    20, aligned=False
  )  # a token that is decoded; a prompt
  assert "rows of 20 tokens do not divide over the 8 devices" in said(20)


def test_decoding_takes_weights_whole_along_cp():
  mesh = make_mesh({"fsdp": 2, "cp": 2, "tp": 2})
  model = automodel.of_shapes(toys.config(), mesh)
  leaves = jax.tree.leaves(nnx.state(model))
  assert {"fsdp", "cp", "tp"} == axes_of(leaves)
  whole = layout.for_decoding(model, nnx.state(model), True)
  assert {"tp"} == axes_of([SimpleNamespace(sharding=x) for x in whole.leaves if x])


def axes_of(leaves):
  entries = [entry for x in leaves for entry in x.sharding.spec if entry is not None]
  return {name for x in entries for name in ((x,) if isinstance(x, str) else x)}


@pytest.mark.parametrize(
  ("kind", "length", "options"),
  [
    ("causal", 304, {}),  # folded, and 152 are no whole blocks
    ("segments", 256, {"window": 70, "softcap": 2.0}),
  ],
)
def test_splash_equals_plain(kind, length, options):
  case = cases.case(kind, 1, length=length, head_dim=128, rows=1, **options)

  def attend(query, key, value, visible, scale, softcap, window):
    split = split_tokens.split_of(query, visible, window, RULES)
    assert split is not None and split.folded == (window is None)
    kernel = functools.partial(fused.splash, interpret=True)
    run = lambda *share, sinks: kernel(
      *share, scale, softcap, window, split, sinks=sinks
    )
    return split_tokens.attend(run, query, key, value, visible, split, RULES)

  with jax.set_mesh(make_mesh({"cp": 2})):
    got = cases.value_and_grads(case, attend)
  cases.assert_equal(got, cases.plain(case))


def test_cudnn_refuses_split_tokens():
  case = cases.case("causal", 0, length=16)
  with (
    jax.set_mesh(make_mesh({"cp": 8})),
    pytest.raises(ValueError, match="cudnn"),
  ):
    attention_paths.attend(
      case.query, case.key, case.value, case.visible, implementation="cudnn"
    )


def test_scores_are_those_of_one_device():
  model = toys.model()
  rng = np.random.default_rng(0)
  ids = rng.integers(1, toys.VOCAB, (4, 16), dtype=np.int32)
  mask = np.ones((4, 8), bool)
  mask[0, :3] = False  # of a prompt, on the left
  rows = ids[:, :8], mask, ids[:, 8:], mask[:, ::-1]

  def scores(axes):
    mesh = make_mesh(axes)
    graph, state = nnx.split(model)
    with jax.set_mesh(mesh):
      run = lambda state: scoring.score_completions(
        nnx.merge(graph, state), *rows, entropy=True
      )
      return jax.device_get(jax.jit(run)(state))

  for got, want in zip(scores({"fsdp": 2, "cp": 4}), scores({"fsdp": 1})):
    assert np.all(want[mask[:, ::-1]] != 0)
    np.testing.assert_allclose(got, want, atol=2e-6)


FORMS = {
  "full": {"remat": "block"},
  "sliding": {
    "layer_types": ("full", "sliding"),
    "sliding_window": 9,
    "attention_softcap": 5.0,
    "attention": "blockwise",
    "scan_layers": True,
  },
  "experts": {"moe": MoEConfig(num_experts=8, experts_per_token=3, hidden_dim=24)},
}


@functools.cache
def learnt(form, axes):
  """{name: array}: the loss of packed rows, and its gradient."""
  mesh = make_mesh(dict(axes))
  with jax.set_mesh(mesh):
    model = toys.model(**FORMS[form])
    graph, state = nnx.split(model)
    batch = toys.packed(toys.batch(0))

    def loss(state):
      out = next_token_loss(nnx.merge(graph, state), **batch)
      return out.total / out.weight

    value, gradient = jax.jit(jax.value_and_grad(loss))(state)
  return {"loss": float(value), **tree.flatten(mesh_lib.to_host(gradient))}


@pytest.mark.parametrize(
  ("form", "axes"),
  [
    ("full", {"cp": 8}),
    ("sliding", {"cp": 8}),
    ("sliding", {"fsdp": 2, "cp": 4}),
    ("sliding", {"dp": 2, "cp": 2, "tp": 2}),
    ("experts", {"ep": 2, "cp": 4}),
    ("experts", {"ep": 4, "cp": 2}),
    ("experts", {"fsdp": 2, "ep": 2, "cp": 2}),
    ("experts", {"cp": 2, "ep": 2, "tp": 2}),
  ],
  ids=str,
)
def test_gradients_are_those_of_one_device(form, axes):
  want, got = (learnt(form, tuple(x.items())) for x in ({"fsdp": 1}, axes))
  assert got.keys() == want.keys() and len(want) > 5
  for name, value in want.items():
    gap = np.linalg.norm(got[name] - value) / np.linalg.norm(value)
    assert gap < 1e-5, (name, gap)
