"""Weights of a decode loop: whole before it, and gathered no more inside of it."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests import toys
from tests.generate import toy_ids
from tunix.generate.decoders import layout
from tunix.generate.padded import decode
from tunix.generate.sizes import batching
from tunix.models.automodel import AutoModel
from tunix.models.transformer.config import MoEConfig
from tunix.perf.chips import Chip
from tunix.perf.hlo_text import Program
from tunix.plan import collectives
from tunix.utils import mesh as mesh_lib

ROWS, WIDTH, STEPS = 8, 16, 4
SMALLEST = (
  4 * 32 * 16
)  # bytes of the smallest matrix, k_proj; a step's [B, 1, D] is 1024


@pytest.fixture(scope="module")
def split(mesh_fsdp4_tp2):
  model = AutoModel.from_config(toys.config(num_layers=1), mesh_fsdp4_tp2)
  return model, *nnx.split(model)


def decoded(split, mesh, gather):
  """(greedy tokens, collectives of the token loop)."""
  model, graph, state = split
  tokens, mask = batching.left_padded(toy_ids.prompts(ROWS, longest=10), ROWS, WIDTH, 0)
  rules = decode.Rules(
    limits=np.full(ROWS, STEPS, np.int32),
    eos=batching.id_list(()),
    draw=decode.Draw(rows=np.arange(ROWS), key=jax.random.key(0)),
  )
  plan = decode.Plan(slots=WIDTH + STEPS, columns=STEPS)
  prompts = decode.Prompts(tokens=tokens, mask=mask)
  with mesh_lib.use_mesh(mesh):
    where = layout.for_decoding(model, state, gather)
    graph, state = decode.opened(graph, state, where)
    out, memory = decode.start(graph, state, prompts, rules, plan)
    until = np.int32(STEPS)
    lowered = decode.advance.lower(graph, state, rules, out, memory, until)
    compiled = lowered.compile()
    found = compiled(state, rules, out, memory, until)[0].tokens
  program = Program(compiled.as_text(), is_compiled=True)
  return np.asarray(found), collectives.read(program, mesh.size if mesh else 1)


def of_weights(found):
  return [x for x in found if x.kind == "all-gather" and x.bytes >= SMALLEST]


def test_a_decode_step_gathers_no_weight(split, mesh_fsdp4_tp2):
  as_trained, every_step = decoded(split, mesh_fsdp4_tp2, False)
  assert of_weights(every_step)
  for gather in (True, "split"):
    tokens, none = decoded(split, mesh_fsdp4_tp2, gather)
    assert not of_weights(none)
    np.testing.assert_array_equal(tokens, as_trained)
  # Activations of all rows instead: after the table, o and down, and between products
  # and rows.
  sums = [x.shape for x in none if x.kind == "all-reduce"]
  assert sums == [f"f32[{ROWS},1,32]"] * 3
  assert sum(x.kind == "all-to-all" for x in none) >= 5  # q, k, v, o and the logits


def test_which_weights_are_laid_out_anew(split, monkeypatch):
  model, _, state = split
  whole = layout.for_decoding(model, state, True)
  found = whole.leaves
  specs = dict(zip((x.sharding.spec for x in jax.tree.leaves(state)), found))
  assert specs[P(None, "fsdp", "tp")].spec == P(None, None, "tp")
  assert specs[P("tp", "fsdp")].spec == P("tp", None)
  assert specs[P(None, None)] is None  # norms are whole
  turned = layout.for_decoding(model, state, "split")
  specs = dict(zip((x.sharding.spec for x in jax.tree.leaves(state)), turned.leaves))
  assert specs[P(None, "fsdp", "tp")].spec == P(None, None, ("tp", "fsdp"))
  assert specs[P("tp", "fsdp")].spec == P(("tp", "fsdp"), None)
  assert (whole.step, turned.step) == ((), ("fsdp",))
  assert layout.for_decoding(model, state, False) is None
  assert layout.for_decoding(model, state, None) is None  # nobody knows what fits
  chip = lambda size: Chip(kind="toy", flops=1.0, memory_bytes=size)
  takes = sum(x.size * 4 // 2 for x in jax.tree.leaves(state) if x.ndim > 1)
  for size, step in ((5 * takes, ()), (3 * takes, ("fsdp",))):
    monkeypatch.setattr(layout, "chip_of", lambda device, size=size: chip(size))
    assert layout.for_decoding(model, state, None).step == step
  monkeypatch.setattr(layout, "chip_of", lambda device: chip(takes / 2))
  assert layout.for_decoding(model, state, None) is None


def test_experts_that_ep_splits_stay_where_they_are():
  mesh = mesh_lib.create_mesh({"fsdp": 2, "ep": 4})
  experts = MoEConfig(num_experts=8, experts_per_token=2, hidden_dim=16)
  config = toys.config(num_layers=1, moe=experts)
  model = AutoModel.from_config(config, mesh)
  tokens, found = decoded((model, *nnx.split(model)), mesh, True)
  # Along ep, what each device's experts make of the tokens goes to whose they are; left
  # to XLA, every device has the rows of all experts (and on TPUs the weights of all).
  assert [x.group for x in found if x.kind == "reduce-scatter"] == [4]
  rows = 4 * ROWS * experts.experts_per_token * 32
  assert not [x for x in found if x.kind == "all-reduce" and x.bytes >= rows]
  alone = AutoModel.from_config(config)
  with_all = decoded((alone, *nnx.split(alone)), None, False)[0]
  np.testing.assert_array_equal(tokens, with_all)
