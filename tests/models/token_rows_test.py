"""Embeddings of new tokens: first numbers, training, adapters and merged models."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models.lora_test import state
from tunix.models import backbone, heads, lora, new_tokens, safetensors_saver
from tunix.models.adapters import token_rows
from tunix.models.automodel import AutoModel
from tunix.models.files import tensor_files

V = toys.VOCAB
IDS = (V - 1, V)  # a row that the embedding has, and one that it grows by
TOKENS = np.array([[1, V, 2, V - 1, 5, V]], np.int32)
TIED = pytest.mark.parametrize("tied", [True, False])


def moved(tied, **changes):
  """A base model, and one whose adapter and rows are away from their first values."""
  base = new_tokens.with_rows(toys.model(tie_embeddings=tied, **changes), IDS)
  options = {"rank": 2, "targets": ("q_proj",), "trainable_token_indices": IDS}
  adapted = lora.apply(base, lora.LoraConfig(**options))
  graph, trained, rest = nnx.split(adapted, nnx.LoRAParam, ...)
  return base, nnx.merge(graph, jax.tree.map(lambda x: x + 0.1, trained), rest)


def tables(model):
  """The embedding and the unembedding as [V, D]."""
  head = model.lm_head
  rest = [] if head is None else [np.asarray(head.kernel[...]).T]
  return [np.asarray(model.embed_tokens.embedding[...]), *rest]


@TIED
def test_new_rows_are_the_mean_of_the_old_ones(tied):
  old = toys.model(tie_embeddings=tied)
  new = new_tokens.with_rows(old, IDS)
  assert (old.config.vocab_size, new.config.vocab_size) == (V, V + 1)
  for before, after in zip(tables(old), tables(new), strict=True):
    np.testing.assert_array_equal(after[: V - 1], before[: V - 1])
    mean = before[: V - 1].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(after[V - 1 :], np.stack([mean, mean]), atol=1e-7)
  assert new_tokens.with_rows(old, ()) is old
  assert new_tokens.with_rows(old, [V - 1]).config.vocab_size == V


def test_new_rows_are_laid_out_like_the_old_ones(mesh_fsdp8):
  config = toys.config(tie_embeddings=False)
  model = new_tokens.with_rows(AutoModel.from_config(config, mesh_fsdp8), IDS)
  options = {"rank": 2, "targets": ("q_proj",), "trainable_token_indices": IDS}
  adapted = lora.apply(model, lora.LoraConfig(**options))
  dim = config.embed_dim // 8
  shards = {n: x.addressable_shards[0].data.shape for n, x in state(adapted).items()}
  assert shards["embed_tokens.embedding"] == (V + 1, dim)
  assert shards["lm_head.kernel"] == (dim, V + 1)
  assert shards["token_rows.lora_input"] == shards["token_rows.lora_output"] == (2, dim)


@TIED
def test_training_moves_the_rows_and_nothing_else_of_the_tables(tied):
  base, adapted = moved(tied)
  merged = lora.merge(adapted)
  for before, after in zip(tables(base), tables(merged), strict=True):
    np.testing.assert_array_equal(after[: V - 1], before[: V - 1])
    np.testing.assert_allclose(after[V - 1 :], before[V - 1 :] + 0.1, atol=1e-6)
  for old, new in zip(tables(adapted), tables(base), strict=True):
    np.testing.assert_array_equal(old, new)  # the frozen tables
  got = toys.logits(adapted, TOKENS)
  np.testing.assert_allclose(got, toys.logits(merged, TOKENS), atol=1e-5)
  # A loss takes the unembedding instead of the logits.
  hidden = toys.logits(adapted, TOKENS, return_hidden=True)
  table, layout = adapted.unembedding()
  table = table.T if layout.transposed else table
  np.testing.assert_allclose(hidden @ table, got, atol=1e-5)
  below = toys.logits(backbone.reference_of(adapted), TOKENS)
  np.testing.assert_array_equal(below, toys.logits(base, TOKENS))


@TIED
def test_gradients_of_the_rows_are_those_of_the_merged_tables(tied):
  _, adapted = moved(tied)

  def gradients(model, kind):
    graph, trained, rest = nnx.split(model, kind, ...)

    def loss(trained):
      model = nnx.merge(graph, trained, rest)
      hidden, _ = model(jnp.asarray(TOKENS), return_hidden=True)
      table, layout = model.unembedding()
      logits = hidden @ (table.T if layout.transposed else table)
      return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., V])

    return nnx.merge(graph, jax.jit(jax.grad(loss))(trained), rest)

  rows = token_rows.of(gradients(adapted, nnx.LoRAParam)).values()
  whole = tables(gradients(lora.merge(adapted), nnx.Param))
  for got, expected in zip(rows, whole, strict=True):
    np.testing.assert_allclose(got[...], expected[list(IDS)], atol=1e-6)


@TIED
def test_adapter_and_merged_export_keep_the_rows(tied, tmp_path):
  _, adapted = moved(tied)
  lora.save_adapter(adapted, tmp_path / "adapter")
  config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
  ids = list(IDS)
  expected = ids if tied else {"embed_tokens": ids, "lm_head": ids}
  assert config["trainable_token_indices"] == expected
  file = tmp_path / "adapter" / "adapter_model.safetensors"
  prefix, tensor = "base_model.model.", ".token_adapter.trainable_tokens_delta"
  names = {n for n in tensor_files.read_header(file) if "token" in n.split(".")[-1]}
  modules = ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
  assert names == {prefix + module + tensor for module in modules}
  # The base lacks the token V.
  back = lora.load_adapter(toys.model(tie_embeddings=tied), tmp_path / "adapter")
  want = toys.logits(adapted, TOKENS)
  np.testing.assert_array_equal(toys.logits(back, TOKENS), want)
  assert lora.config_of(back).trainable_token_indices == IDS
  safetensors_saver.save_pretrained(adapted, tmp_path / "merged")
  merged = AutoModel.from_pretrained(tmp_path / "merged")
  assert merged.config.vocab_size == V + 1
  np.testing.assert_allclose(toys.logits(merged, TOKENS), want, atol=1e-5)


def test_tables_that_were_trained_whole_have_the_new_rows(tmp_path):
  base = new_tokens.with_rows(toys.model(tie_embeddings=False), IDS)
  options = {"targets": ("q_proj",), "modules_to_save": ("embed_tokens", "lm_head")}
  adapted = lora.apply(base, lora.LoraConfig(rank=2, **options))
  lora.save_adapter(adapted, tmp_path / "adapter")
  back = lora.load_adapter(toys.model(tie_embeddings=False), tmp_path / "adapter")
  for got, expected in zip(tables(back), tables(base), strict=True):
    np.testing.assert_array_equal(got, expected)


def test_list_of_peft_leaves_an_untied_head_frozen(tmp_path):
  _, adapted = moved(False)
  adapted.token_rows.lora_output = nnx.data(None)
  lora.save_adapter(adapted, tmp_path / "adapter")
  file = tmp_path / "adapter" / "adapter_config.json"
  config = json.loads(file.read_text())
  assert config["trainable_token_indices"] == {"embed_tokens": list(IDS)}
  config["trainable_token_indices"] = list(IDS)
  file.write_text(json.dumps(config))
  back = lora.load_adapter(toys.model(tie_embeddings=False), tmp_path / "adapter")
  assert list(token_rows.of(back)) == ["token_rows.lora_input"]


def test_critic_has_no_rows_of_an_unembedding():
  _, adapted = moved(False)
  assert list(token_rows.of(heads.with_scores(adapted))) == ["token_rows.lora_input"]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"trainable_token_indices": (V,)}, r"is \[96\]; expected different ids from 0"),
    ({"trainable_token_indices": (3, 3)}, r"is \[3, 3\]; expected different ids"),
    (
      {"trainable_token_indices": (3,), "modules_to_save": ("lm_head",)},
      "modules_to_save has lm_head, which trains all rows",
    ),
  ],
)
def test_rows_that_cannot_be_trained(options, message):
  with pytest.raises(ValueError, match=message):
    lora.apply(toys.model(tie_embeddings=False), lora.LoraConfig(rank=2, **options))


def test_refused_ids():
  with pytest.raises(ValueError, match="has the id 0; expected an id above 0"):
    new_tokens.with_rows(toys.model(), [0])
  with pytest.raises(ValueError, match="has 10000000000 and the model has 96 tokens"):
    token_rows.with_room(toys.model(), (10**10,))
