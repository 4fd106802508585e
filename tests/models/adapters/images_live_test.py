"""PEFT and we compute the same with one adapter folder of a model with a tower.

Runs where the `parity` extra is installed; images_test.py runs everywhere.
"""

import jax
import numpy as np
import pytest

from tests import toys_images
from tests.models import checkpoints
from tests.models.vision import seeing
from tests.models.vision.vision_models_live_test import make
from tunix.models import lora
from tunix.models.adapters import lora_modules
from tunix.models.automodel import AutoModel

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

# Gemma 3 has the tower of SmolVLM.
NAMES = [name for name in toys_images.NAMES if name != "gemma3"]
# Of towers, what is neither a layer nor the projector.
OUTSIDE = ("patch_embed", "embeddings", "input_proj")


def logits(adapted):
  """The logits of an adapted model of transformers."""
  model = adapted.get_base_model().eval()
  _, inputs, counts = make.inputs(model)
  tokens, mask = make.rows(counts)
  with torch.no_grad():
    return make.logits(model, inputs, tokens, mask).numpy() * mask[..., None]


@pytest.mark.parametrize("name", NAMES)
def test_adapters_on_towers_and_projectors(name, tmp_path):
  folder = checkpoints.GOLDEN / f"{name}_vision"
  want = dict(np.load(folder / "expected.npz"))
  model = AutoModel.from_pretrained(folder, dtype="float32", images=True)
  kind = getattr(make.transformers, f"{make.GOLDEN[name][0]}ForConditionalGeneration")

  def theirs():
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return kind.from_pretrained(folder, **options)

  def ours(adapted):
    return seeing.valid(seeing.loss_and_gradients(adapted, want)[0], want)

  targets = ("q_proj", *toys_images.adapted_modules(model))
  adapted = lora.apply(model, lora.LoraConfig(rank=2, alpha=4, targets=targets))
  for number, linear in enumerate(lora_modules.adapted(adapted).values()):
    b = jax.random.normal(jax.random.key(number), linear.lora_b.shape) / 8
    linear.lora_b.set_value(b)
  assert checkpoints.relative(ours(model), ours(adapted)) > 0.1
  lora.save_adapter(adapted, tmp_path / "ours")
  read = peft.PeftModel.from_pretrained(theirs(), tmp_path / "ours")
  assert checkpoints.relative(logits(read), ours(adapted)) < 1e-5
  images = ("vision", "visual", "connector", "projector", "embed_vision")
  modules = [
    path
    for path, module in theirs().named_modules()
    if isinstance(module, torch.nn.Linear)
    and (path.endswith("q_proj") or any(part in path for part in images))
    and not any(part in path for part in OUTSIDE)
  ]
  config = peft.LoraConfig(r=3, target_modules=modules, init_lora_weights=False)
  made = peft.get_peft_model(theirs(), config).eval()
  made.save_pretrained(tmp_path / "theirs")
  loaded = lora.load_adapter(model, tmp_path / "theirs")
  assert checkpoints.relative(ours(loaded), logits(made)) < 1e-5
