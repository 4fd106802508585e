"""What a compiled train step sends, a layer: weights and their gradients, and of the
optimizer's state nothing."""

import numpy as np

from tests import optimizers, toys
from tunix.models import automodel
from tunix.models.transformer.config import MoEConfig
from tunix.perf.hlo_text import Program
from tunix.plan import collectives
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.utils import mesh as mesh_lib

LAYERS, ROWS, LENGTH = 5, 8, 16
D, F, N, K = 32, 64, 32, 16  # widths of toys.config: model, hidden, queries, keys
MATRICES = [(D, N), (D, K), (D, K), (N, D), (D, F), (D, F), (F, D)]


def sent(axes, **changes):
  """Collectives of a train step from shapes: those of each layer, and those outside.

  The layers are scanned, so that what every layer does counts LAYERS times.
  """
  mesh = mesh_lib.create_mesh(axes)
  config = toys.config(num_layers=LAYERS, remat="block", scan_layers=True, **changes)
  tokens = np.ones((ROWS, LENGTH), np.int32)
  batch = {"input_tokens": tokens, "input_mask": tokens}
  with mesh_lib.use_mesh(mesh):
    model = automodel.of_shapes(config, mesh)
    rows = tuple(axis for axis in ("fsdp",) if axis in axes)
    options = TrainingConfig(max_steps=1, data_sharding_axis=rows)
    trainer = PeftTrainer(model, optimizers.adamw(1e-3), options)
    text = trainer.lower_train_step(batch).compile().as_text()
  found = collectives.read(Program(text, is_compiled=True), mesh.size)
  assert {one.count for one in found} == {1, LAYERS}
  return [
    [one for one in found if (one.count == LAYERS) == inside]
    for inside in (True, False)
  ]


def gathers(found):
  return sorted(one.shape for one in found if one.kind == "all-gather")


def shapes(sizes):
  return sorted(f"f32[{a},{b}]" for a, b in sizes)


def test_fsdp_gathers_each_weight_of_a_layer_twice_and_nothing_else():
  layer, outside = sent({"fsdp": 8})
  # For the forward pass, and for the backward one with what it computes again.
  assert gathers(layer) == shapes(2 * MATRICES)
  assert {one.kind for one in layer} == {"all-gather", "all-reduce"}
  (reduced,) = (one for one in layer if one.kind == "all-reduce")
  assert reduced.bytes >= 4 * sum(a * b for a, b in MATRICES)  # their gradients
  # Beside the layers the unembedding and the ids: no moments, no updated weights.
  assert gathers(outside) == [f"f32[{D},{toys.VOCAB}]", f"s32[{ROWS},{LENGTH}]"]


def test_tp_adds_up_activations_and_gathers_its_own_half_of_each_weight():
  layer, outside = sent({"fsdp": 4, "tp": 2})
  halves = [(a, b // 2) for a, b in MATRICES if a == D and b != D]
  halves += [(D, N // 2), (N // 2, D), (F // 2, D)]
  assert gathers(layer) == shapes(2 * halves)
  activations = f"f32[{ROWS // 4},{LENGTH},{D}]"
  sums = [one.shape for one in layer if one.group == 2]
  # Forward: after o and down, the former again; backward: before q, k, v, gate and up.
  assert sum(shape.count(activations) for shape in sums) == 3 + 5
  assert gathers(outside) == [f"f32[{D},{toys.VOCAB // 2}]", f"s32[{ROWS},{LENGTH}]"]


def test_cp_gathers_keys_and_values_and_no_activations():
  layer, outside = sent({"cp": 8})
  heads = [f"f32[{ROWS},{LENGTH},2,8]"] * 2  # keys and values of all tokens
  assert gathers(layer) == sorted(shapes(2 * MATRICES) + 2 * heads)
  # Queries are exchanged, and outputs: two pieces of a token each, folded.
  piece = f"f32[{ROWS},{LENGTH // 16},4,8]"
  moved = [one.shape for one in layer if one.kind == "collective-permute"]
  assert moved == [piece] * 2 * (2 + 2 + 2)  # forward, again, and their cotangents
  assert gathers(outside) == [f"f32[{D},{toys.VOCAB}]"]


def test_ep_sends_tokens_and_gathers_no_expert_of_others():
  moe = MoEConfig(num_experts=8, experts_per_token=2, hidden_dim=F)
  layer, outside = sent({"fsdp": 2, "ep": 4}, moe=moe)
  along_ep = [(one.kind, one.shape) for one in layer if one.group == 4]
  tokens, own = (f"f32[{ROWS * LENGTH // parts},{D}]" for parts in (2, 8))
  # Forward, again in the backward pass, and the gradient of handing the sums out; the
  # other way round with the sums. What else goes along ep is which expert, how much.
  assert along_ep.count(("all-gather", tokens)) == 3
  assert along_ep.count(("reduce-scatter", own)) == 2
  # Experts are gathered over fsdp alone, those of a device; all else over both axes.
  experts = [one for one in layer + outside if f",{F}" in one.shape]
  assert experts and all(one.group == 2 for one in experts)
  assert {f"f32[{D},{N}]", f"f32[{D},8]"} <= set(gathers(layer))
  assert f"f32[{ROWS},{LENGTH},8]" not in gathers(layer), "tokens are routed at home"
