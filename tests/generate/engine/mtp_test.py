"""The layer that predicts further tokens: its tensors, and the drafts of the engine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.generate import toy_ids
from tests.models import checkpoints
from tunix.generate.engine import mtp
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.models import families, safetensors_saver
from tunix.models.automodel import AutoModel
from tunix.models.files import tensor_files

NAMES = ("deepseek_v3", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe")
SIZES = {
  "slots": 3, "max_tokens": 64, "page_tokens": 4, "rounds": 4, "prefill_tokens": 8,
}  # fmt: skip


def one_layer(family, config):
  """A model of the family whose only layer is of the kind of the MTP layer."""
  return mtp._family(family, family.mtp.of(2)).config_from_hf(config)


@functools.cache
def made(name, root):
  """A folder with an MTP layer, and the tensors of the layer as a model of its own.

  The layer is drawn as a model of one layer, and saved under that model's names.
  """
  folder = checkpoints.copy(name, root / name)
  hf = tensor_files.read_json(folder / "config.json")
  family = families.by_model_type(hf["model_type"])
  config = one_layer(family, hf)
  layer = AutoModel.from_config(config, seed=7, family=family)
  safetensors_saver.save_pretrained(layer, root / f"{name}_layer")
  names = family.mtp.of(family.config_from_hf(hf).num_layers)
  own = checkpoints.tensors(root / f"{name}_layer")
  rng, width = np.random.default_rng(3), config.embed_dim
  of_layer = {
    key.replace("model.layers.0.", names.layer): value
    for key, value in own.items()
    if key.startswith("model.layers.0.")
  }
  join = rng.normal(size=(width, 2 * width)).astype(np.float32) / width**0.5
  more = {
    f"{names.join}.weight": join,
    **{
      f"{key}.weight": rng.normal(1, 0.1, width).astype(np.float32)
      for key in (names.embed_norm, names.hidden_norm, names.norm)
    },
  }
  whole = checkpoints.tensors(folder)
  checkpoints.rewrite(folder, whole | of_layer | more)
  checkpoints.change_config(folder, **{family.mtp.count: 1})
  return folder, own, more, names


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return tmp_path_factory.mktemp("mtp")


def rms(x, scale, config):
  x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
  return x * (config.norm_offset + scale)


def drafting(name, root):
  """The logits of the layer for tokens and hidden states, written plainly."""
  folder, _, more, names = made(name, root)
  model = AutoModel.from_pretrained(folder, dtype="float32")
  layer = AutoModel.from_pretrained(root / f"{name}_layer", dtype="float32")
  layer.embed_tokens, layer.lm_head = model.embed_tokens, model.lm_head
  layer.norm.scale[...] = jnp.asarray(more[f"{names.norm}.weight"])
  c = layer.config

  def logits(tokens):
    """[T, V], the first of them without a hidden state before it."""
    hidden = np.asarray(model(tokens[None], return_hidden=True)[0][0], np.float64)
    before = np.concatenate([np.zeros((1, c.embed_dim)), hidden[:-1]])
    table = np.asarray(model.embed_tokens.embedding[...], np.float64)
    parts = [
      rms(table[tokens], more[f"{names.embed_norm}.weight"], c),
      rms(before, more[f"{names.hidden_norm}.weight"], c),
    ]
    x = np.concatenate(parts, axis=1) @ more[f"{names.join}.weight"].T
    x = jnp.asarray(x[None], jnp.float32)
    return np.asarray(layer(tokens[None], input_embeddings=x)[0][0])

  return model, logits


@pytest.mark.parametrize("name", NAMES)
def test_the_layer_is_read_and_the_model_without_it(name, root):
  folder, *_ = made(name, root)
  model, logits = drafting(name, root)
  plain = AutoModel.from_pretrained(checkpoints.GOLDEN / name, dtype="float32")
  for a, b in zip(
    jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(plain)), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  draft = mtp.from_pretrained(folder, dtype="float32")
  assert draft.config.num_layers == 1
  tokens = np.random.default_rng(1).integers(1, model.config.vocab_size, 12)
  hidden = model(tokens[None], return_hidden=True)[0]
  before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
  x = draft.embed_after(tokens[None], before)
  got = np.asarray(draft(tokens[None], input_embeddings=x)[0][0])
  np.testing.assert_allclose(got, logits(tokens), atol=2e-5 * np.abs(got).max())


def ask(prompt, tokens, **rules):
  return EngineRequest(prompt=prompt, max_tokens=tokens, stop_ids=(), **rules)


def counted(logits, prompt, row):
  """Drafts that a lonely greedy request offers, one a round, and how many are right."""
  tokens = np.concatenate([prompt, row])
  likely = np.argmax(logits(tokens), axis=1)
  offered = right = 0
  at, last = len(prompt), len(tokens) - 1
  while at < last:
    has_room = at + 1 < last  # no draft counts after the last token
    is_right = has_room and bool(likely[at] == tokens[at + 1])
    offered, right = offered + has_room, right + is_right
    at += 1 + is_right
  return offered, right


@pytest.mark.parametrize(
  ("name", "attention"),
  [("glm4_moe_lite", "rows"), ("qwen3_5", "gather"), ("qwen3_5_moe", "rows")],
)
def test_drafts_are_those_of_the_layer(name, root, attention):
  """Each first draft reads the hidden states of the model at all tokens before."""
  model, logits = drafting(name, root)
  draft = mtp.from_pretrained(made(name, root)[0], dtype="float32")
  config = EngineConfig(**SIZES, draft_tokens=1, attention=attention)
  plain = Engine(model, toy_ids.Ids(), EngineConfig(**SIZES, attention=attention))
  engine = Engine(model, toy_ids.Ids(), config, draft_model=draft)
  rng, total = np.random.default_rng(2), 0
  for length in (1, 5, 22):
    prompt = rng.integers(1, model.config.vocab_size, length)
    before = engine.stats()
    [[wanted]] = plain.run([ask(prompt, 24)])
    [[row]] = engine.run([ask(prompt, 24)])
    np.testing.assert_array_equal(row.tokens, wanted.tokens)
    now = engine.stats()
    found = [
      getattr(now, x) - getattr(before, x)
      for x in ("model_draft_tokens", "model_accepted_tokens")
    ]
    assert found == [*counted(logits, prompt, row.tokens)]
    total += found[1]
  assert total


class Even:
  """A constraint that allows even tokens only."""

  def __init__(self, vocab_size):
    self._mask = np.full(-(-vocab_size // 32), 0x55555555, np.uint32)

  def matcher(self):
    return self

  def mask(self):
    return self._mask

  def accept(self, token):
    pass


@pytest.mark.parametrize(
  ("name", "source"),
  [("glm4_moe_lite", "mtp"), ("qwen3_5", "mtp"), ("qwen3_5", "lookup")],
)
def test_no_token_changes(name, source, root):
  """Groups, shared prefixes, constraints, and more requests than slots and pages."""
  folder, *_ = made(name, root)
  model = AutoModel.from_pretrained(folder, dtype="float32")
  rng, vocab = np.random.default_rng(4), model.config.vocab_size
  common = rng.integers(1, vocab, 17)
  drawn = {"temperature": 1.0, "seed": 3, "logprobs": True}
  requests = [
    # Of two tokens, which prompt lookup and a random layer guess at times.
    ask(common, 18, logit_bias={5: 30.0, 6: 30.0}, **drawn),
    ask(common, 14, num_samples=3, **drawn),
    ask(np.concatenate([common, rng.integers(1, vocab, 4)]), 9),
    ask(rng.integers(1, vocab, 30), 20),
  ]
  bound = ask(rng.integers(1, vocab, 7), 6, constraint=Even(vocab))
  sizes = {**SIZES, "cache_tokens": 88}
  plain = Engine(model, toy_ids.Ids(), EngineConfig(**sizes))
  draft = mtp.from_pretrained(folder, dtype="float32") if source == "mtp" else None
  config = EngineConfig(**sizes, draft_tokens=3)
  engine = Engine(model, toy_ids.Ids(), config, draft_model=draft)
  if draft is None:
    engine._drafts.use_only("lookup")
  for some in (requests, [*requests[:2], bound]):
    for rows, others in zip(engine.run(some), plain.run(some), strict=True):
      for one, other in zip(rows, others, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        if one.logprobs is not None:
          np.testing.assert_allclose(one.logprobs, other.logprobs, atol=5e-5)
    engine.audit()
  stats = engine.stats()
  assert 0 < stats.accepted_tokens < stats.draft_tokens and stats.preemptions
  drafts = stats.draft_tokens if source == "mtp" else 0
  assert stats.model_draft_tokens == drafts


def test_samples_of_a_request_and_constraints_leave_true_hidden_states(
  root, monkeypatch
):
  """What the layer reads next is what the model has at these tokens, or unknown."""
  folder, *_ = made("glm4_moe_lite", root)
  model = AutoModel.from_pretrained(folder, dtype="float32")
  vocab = model.config.vocab_size
  hidden_of = jax.jit(lambda tokens: model(tokens, return_hidden=True)[0])
  config = EngineConfig(**SIZES, draft_tokens=1)
  draft = mtp.from_pretrained(folder, dtype="float32")
  engine = Engine(model, toy_ids.Ids(), config, draft_model=draft)
  rules = {"temperature": 1.0, "num_samples": 3}
  engine.submit(ask(np.arange(1, 23), 20, **rules), streams=False)
  forgotten = []
  monkeypatch.setattr(engine._device.draft, "_forget", forgotten.append)
  bound = ask(np.arange(3, 10), 4, constraint=Even(vocab))
  seen, late = 0, False
  while engine.step():
    kept, running = engine._device.draft._seen, engine._scheduler.running
    for slot, s in enumerate(running if kept is not None else ()):
      first = int(kept[1][slot])
      if s is None or not s.is_decoding:
        continue
      if first < 0:  # constraints leave hidden states out
        assert late
        continue
      row = np.pad(s.known, (0, SIZES["max_tokens"] - len(s.known)))
      hidden = np.asarray(hidden_of(row[None])[0, first : s.computed])
      found = np.asarray(kept[0][slot, : len(hidden)])
      np.testing.assert_allclose(found, hidden[: len(found)], atol=1e-4)
      seen += 1
    if seen > 6 and not late:
      engine.submit(bound, streams=False)
      late = True
    # The samples go on from the state that their first token was drawn from.
    assert late or not forgotten
  assert seen > 9 and late


def test_a_layer_that_the_configuration_does_not_count_is_refused(tmp_path):
  folder = checkpoints.copy("glm4_moe_lite", tmp_path / "more")
  layers = tensor_files.read_json(folder / "config.json")["num_hidden_layers"]
  values = checkpoints.tensors(folder)
  key = f"model.layers.{layers}.input_layernorm.weight"
  values[key] = values["model.norm.weight"]
  checkpoints.rewrite(folder, values)
  with pytest.raises(
    ValueError, match=r"the checkpoint has the tensors 'model\.layers"
  ):
    AutoModel.from_pretrained(folder)


def test_what_has_no_such_layer_is_refused(root, tmp_path):
  folder, *_ = made("qwen3_5", root)
  with pytest.raises(ValueError, match="family 'qwen3', which has no layer that"):
    mtp.from_pretrained(checkpoints.GOLDEN / "qwen3")
  with pytest.raises(ValueError, match="num_nextn_predict_layers is 0; expected 1"):
    mtp.from_pretrained(checkpoints.GOLDEN / "glm4_moe_lite")
  bare = checkpoints.copy("glm4_moe_lite", tmp_path / "bare")
  checkpoints.change_config(bare, num_nextn_predict_layers=1)
  with pytest.raises(ValueError, match=r"has no tensor model\.layers\.\d\.\*, though"):
    mtp.from_pretrained(bare)
  checkpoints.change_config(bare, mtp_use_dedicated_embeddings=True)
  with pytest.raises(ValueError, match="mtp_use_dedicated_embeddings is true"):
    mtp.from_pretrained(bare)
  draft = mtp.from_pretrained(folder)
  other = AutoModel.from_config(draft.config, seed=1, dtype="float32")
  wide = AutoModel.from_config(
    dataclasses.replace(draft.config, embed_dim=2 * draft.config.embed_dim)
  )
  config = EngineConfig(**SIZES, draft_tokens=1)
  with pytest.raises(ValueError, match=r"hidden states of \d+ numbers"):
    Engine(wide, toy_ids.Ids(), config, draft_model=draft)
  assert Engine(other, toy_ids.Ids(), config, draft_model=draft)
