"""qwix's adapters on our models as they come: stacked, scanned, under remat."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.models import checkpoints
from tests.models.lora_test import state, widen
from tunix.models.automodel import AutoModel
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

qwix = pytest.importorskip("qwix")
# qwix uses names that flax deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)


def adapt(model, **options):
  provider = qwix.LoraProvider(
    module_path=".*q_proj|.*up_proj|.*down_proj", rank=2, alpha=4.0, **options
  )
  return qwix.apply_lora_to_model(
    model, provider, rngs=nnx.Rngs(0), **model.get_model_input()
  )


def reference(adapted, model):
  """The same adapters, added by hand to the stacked kernels: alpha / rank is 2."""
  graph, weights = nnx.split(model)
  copied = nnx.merge(graph, weights, copy=True)
  added = state(adapted, nnx.LoRAParam)
  for name in ("attn.q_proj", "mlp.up_proj", "mlp.down_proj"):
    a, b = (added[f"layers.{name}.kernel_lora_{side}"] for side in "ab")
    part, module = name.split(".")
    kernel = getattr(getattr(copied.layers, part), module).kernel
    kernel.set_value(kernel[...] + 2.0 * a @ b)
  return copied


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
  "changes",
  [{"scan_layers": True, "remat": "block"}, {"scan_layers": False}],
  ids=str,
)
def test_every_kernel_of_a_stacked_model_is_adapted_and_trained(changes):
  model = toys.model(**changes)
  before = state(model)
  adapted = adapt(model)
  np.testing.assert_array_equal(adapted(TOKENS)[0], model(TOKENS)[0])
  shapes = {k: v.shape for k, v in state(adapted, nnx.LoRAParam).items()}
  assert shapes == {
    "layers.attn.q_proj.kernel_lora_a": (2, 32, 2),
    "layers.attn.q_proj.kernel_lora_b": (2, 2, 32),
    "layers.mlp.up_proj.kernel_lora_a": (2, 32, 2),
    "layers.mlp.up_proj.kernel_lora_b": (2, 2, 64),
    "layers.mlp.down_proj.kernel_lora_a": (2, 64, 2),
    "layers.mlp.down_proj.kernel_lora_b": (2, 2, 32),
  }
  layers = state(adapted, nnx.LoRAParam)["layers.attn.q_proj.kernel_lora_a"]
  assert np.abs(layers[0] - layers[1]).max() > 0.01, "each layer has its own draw"
  for path, value in before.items():
    assert state(adapted)[path] is value, "the base is shared"
  widen(adapted)
  want = reference(adapted, model)(TOKENS)[0]
  assert checkpoints.relative(adapted(TOKENS)[0], want) < 1e-5
  assert checkpoints.relative(model(TOKENS)[0], want) > 0.01

  start = {k: np.asarray(v) for k, v in state(adapted, nnx.LoRAParam).items()}
  trainer = PeftTrainer(adapted, optimizers.sgd(1.0), TrainingConfig(max_steps=1))
  trainer.train([toys.batch(0)])
  for path, value in state(trainer.model, nnx.LoRAParam).items():
    for layer in range(2):
      assert np.abs(value[layer] - start[path][layer]).max() > 0, (path, layer)


def test_unstacked_with_remat():
  model = toys.model(remat="block").unstack()
  adapted = adapt(model)
  assert len(state(adapted, nnx.LoRAParam)) == 2 * 2 * 3
  np.testing.assert_array_equal(adapted(TOKENS)[0], model(TOKENS)[0])


@pytest.mark.slow
@pytest.mark.ci
def test_adapters_lie_like_their_kernels(mesh_fsdp4_tp2):
  model = AutoModel.from_config(toys.config(), mesh_fsdp4_tp2)
  with jax.set_mesh(mesh_fsdp4_tp2):
    adapted = adapt(model)
  found = state(adapted, nnx.LoRAParam)
  # q_proj [L, D, NH] is split (fsdp, tp): A [L, D, r] along D, B [L, r, NH] along NH.
  part = {k: v.addressable_shards[0].data.shape for k, v in found.items()}
  assert part["layers.attn.q_proj.kernel_lora_a"] == (2, 32 // 4, 2)
  assert part["layers.attn.q_proj.kernel_lora_b"] == (2, 2, 32 // 2)
