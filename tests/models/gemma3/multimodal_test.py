"""A whole Gemma 3 with images against what transformers computed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import checkpoints
from tests.models.gemma3 import towers
from tunix.models import families, lora
from tunix.models.automodel import AutoModel
from tunix.models.gemma3 import multimodal
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer import params
from tunix.ops.masks import next_token_targets, positions_from_mask
from tunix.ops.vocabulary.logprobs import weighted_nll
from tunix.utils import tree

GOLDEN = checkpoints.GOLDEN / "gemma3_vision"


@pytest.fixture(scope="module")
def want():
  with np.load(GOLDEN / "expected.npz") as arrays:
    return dict(arrays)


def load(**options):
  return AutoModel.from_pretrained(GOLDEN, dtype=jnp.float32, **options)


def arguments(want):
  return {
    "positions": positions_from_mask(jnp.asarray(want["mask"])),
    "attention_mask": checkpoints.visible(want["mask"]),
    "images": towers.golden_pixels(want),
  }


def valid(logits, want):
  return np.asarray(logits) * want["mask"][..., None]


@pytest.mark.parametrize("scan", [True, False])
def test_logits(want, scan):
  model = load(scan_layers=scan)
  assert isinstance(model, multimodal.MultimodalGemma3)
  logits, _ = model(want["tokens"], **arguments(want))
  expected = valid(want["logits"], want)
  assert checkpoints.relative(valid(logits, want), expected) < 1e-5
  blank = arguments(want) | {"images": 0 * towers.golden_pixels(want)}
  logits, _ = model(want["tokens"], **blank)
  assert checkpoints.relative(valid(logits, want), expected) > 1e-3


def test_images_by_row_and_prefill_into_a_cache(want):
  model, given = load(), arguments(want)
  pixels = given["images"]
  blank = np.zeros_like(pixels[:2])
  by_row = np.stack([pixels[:2], blank, pixels[2:]])
  logits, _ = model(want["tokens"], **given | {"images": by_row})
  expected = valid(want["logits"], want)
  assert checkpoints.relative(valid(logits, want), expected) < 1e-5

  length = want["tokens"].shape[1]
  mask = np.pad(given["attention_mask"], ((0, 0), (0, 0), (0, 4)))
  cache = model.init_cache(3, length + 4)
  logits, cache = model(want["tokens"], given["positions"], cache, mask, images=pixels)
  assert checkpoints.relative(valid(logits, want), expected) < 1e-5


@pytest.mark.shipped
def test_gradients(want):
  model, given = load(), arguments(want)
  graph, state = nnx.split(model)
  tokens = jnp.asarray(want["tokens"])
  soft = model.config.image_tokens.soft
  weights = want["mask"][:, 1:] * want["mask"][:, :-1] * (want["tokens"][:, 1:] != soft)
  scored = jnp.pad(jnp.asarray(weights, jnp.float32), ((0, 0), (0, 1)))

  def loss(state):
    merged = nnx.merge(graph, state)
    hidden, _ = merged(tokens, **given, return_hidden=True)
    table, layout = merged.unembedding()
    targets = next_token_targets(jnp.where(tokens == soft, 0, tokens))
    return weighted_nll(hidden, table, targets, scored, layout) / weights.sum()

  value, gradients = jax.jit(jax.value_and_grad(loss))(state)
  assert abs(float(value) - float(want["loss"])) < 1e-5 * float(want["loss"])
  norms = dict(zip(want["grad_names"].tolist(), want["grad_norms"].tolist()))
  names = families.FAMILIES["gemma3_multimodal"].names
  typical = np.median(list(norms.values()))
  for path, gradient in tree.flatten(gradients).items():
    place = params.place(names, path, model.config)
    parts = np.asarray(gradient).reshape(len(place.keys), -1)
    for key, part in zip(place.keys, parts):
      # The bias of all keys has no gradient but rounding.
      size = typical if "k_proj.bias" in key else norms[key]
      assert abs(np.linalg.norm(part) - norms.pop(key)) <= 1e-3 * size, key
  assert not norms


def test_there_and_back(want, tmp_path):
  model = load()
  save_pretrained(model, tmp_path / "out", source=GOLDEN)
  back = AutoModel.from_pretrained(tmp_path / "out")
  assert back.config == model.config
  original, saved = checkpoints.tensors(GOLDEN), checkpoints.tensors(tmp_path / "out")
  assert sorted(saved) == sorted(original)
  for key, value in original.items():
    np.testing.assert_array_equal(saved[key], value.astype(np.float32), err_msg=key)


def test_text_alone_and_adapters(want):
  model = load()
  adapted = lora.apply(model, lora.LoraConfig(rank=2, targets=("q_proj",)))
  paths = tree.flatten(nnx.state(adapted, nnx.LoRAParam))
  assert sorted(paths) == ["layers.attn.q_proj.lora_a", "layers.attn.q_proj.lora_b"]
  tokens = np.arange(1, 9, dtype=np.int32)[None]
  with_groups, _ = model(tokens, groups=np.array([[0, 0, 1, 1, 1, 0, 0, 0]]))
  plain, _ = model(tokens)
  assert plain.shape == (1, 8, model.config.vocab_size)
  assert np.abs(with_groups[0, 2] - plain[0, 2]).max() > 1e-4
  np.testing.assert_allclose(with_groups[0, :2], plain[0, :2], rtol=1e-5, atol=1e-5)
  with pytest.raises(ValueError, match="cannot be combined with input_embeddings"):
    model(tokens, images=np.zeros((1, 56, 56, 3)), groups=tokens)


def test_sizes_with_and_without_sight():
  seeing = multimodal.MultimodalConfig.gemma3_4b()
  assert seeing.vision.num_layers == 27
  assert families.of_config(seeing).name == "gemma3_multimodal"
  blind = families.FAMILIES["gemma3"].config_class.gemma3_4b()
  assert families.of_config(blind).name == "gemma3"


@pytest.mark.parametrize("inner", [True, False, None])
@pytest.mark.parametrize("outer", [True, False, None])
def test_the_outer_flag_says_whether_the_table_is_tied(outer, inner):
  hf = json.loads((GOLDEN / "config.json").read_text())
  hf["tie_word_embeddings"], hf["text_config"]["tie_word_embeddings"] = outer, inner
  if outer is None:
    del hf["tie_word_embeddings"]
  config = families.by_model_type("gemma3").config_from_hf(hf)
  assert config.tie_embeddings == (outer is not False)


def test_a_critic_that_sees(tmp_path):
  critic = load(num_scores=1)
  save_pretrained(critic, tmp_path / "out")
  hf = json.loads((tmp_path / "out" / "config.json").read_text())
  assert hf["architectures"] == ["Gemma3ForSequenceClassification"]
  assert len(hf["id2label"]) == 1
  assert "score.weight" in checkpoints.tensors(tmp_path / "out")
  assert AutoModel.from_pretrained(tmp_path / "out").config == critic.config
