"""Batch-invariant models: the engine's log-probs have the bits of the trainer's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import scored
from tests.generate.toy_ids import Ids
from tunix.generate import scoring
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine_sampler import EngineSampler, sampler_of
from tunix.models import quantization
from tunix.models.automodel import AutoModel
from tunix.models.transformer.attention.layer import Attention
from tunix.models.transformer.config import DeltaNetConfig, fields_by_type
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib

# The compiler decides about the bits of products.
pytestmark = pytest.mark.shipped

SIZES = {"embed_dim": 64, "hidden_dim": 160, "num_heads": 6, "head_dim": 16}
GEMMA = {
  "norms": "both",
  "norm_offset": 1.0,
  "activation": "gelu_tanh",
  "scale_embeddings": True,
  "tie_embeddings": True,
  "attention_softcap": 5.0,
  "final_softcap": 3.0,
  "layer_types": ("sliding", "full"),
  "sliding_window": 7,
}
QWEN = {"qk_norm": "head", "qkv_bias": True, "num_heads": 2, "attention_sinks": True}
QWEN |= {"head_dim": 32}  # XLA multiplies few rows by 32 columns in another order
KINDS = {
  "gemma_bfloat16": {**GEMMA, "dtype": jnp.bfloat16},
  "qwen_lora": {**QWEN, "num_layers": 1, "lora_rank": 4},
}


def prompts(longest: int) -> list[list[int]]:
  """Prompts of mixed lengths, of which some begin as others."""
  draw = np.random.default_rng(0)
  sizes = 1, 5, 17, longest, 2, 30
  out = [draw.integers(3, toys.VOCAB, size).tolist() for size in sizes]
  return [*out, out[3][: longest // 2] + out[1], out[2]]


def differing(model, sampler, longest, temperature=0.7, rows=slice(None)) -> int:
  """Draws completions, and counts tokens with other log-probs in training."""
  texts = [" ".join(map(str, ids)) for ids in prompts(longest)]
  steps = [9, 3, 14, 6, 11, 20, 8, 12]
  out = sampler(
    texts, steps, temperature=temperature, seed=1, num_samples=2, return_logprobs=True
  )
  ids = [row for row in prompts(longest) for _ in range(2)]
  batch = scored.batch(list(zip(ids, out.tokens))[rows], longest + 9, 20)
  have = out.sampling_logprobs[rows]

  @nnx.jit
  def train(model, *arrays):
    def loss(model):
      scores = scoring.score_completions(model, *arrays, temperature=temperature)
      return jnp.sum(scores.logps), scores.logps

    return nnx.value_and_grad(loss, has_aux=True)(model)

  (_, logps), _ = train(model, *batch)
  logps = np.asarray(logps)
  return sum(int(np.sum(x != y[: len(x)])) for x, y in zip(have, logps))


@scored.has_compared_bits
@pytest.mark.parametrize("name", KINDS)
def test_the_engine_scores_as_the_trainer(name):
  model = toys.model(**{**SIZES, **KINDS[name]}, batch_invariant=True)
  assert differing(model, EngineSampler(model, Ids(), slots=3), 40) == 0


@scored.has_compared_bits
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_several_blocks_of_keys_and_single_rows(dtype):
  model = toys.model(
    **SIZES, num_layers=1, dtype=jnp.dtype(dtype), batch_invariant=True
  )
  sampler = EngineSampler(model, Ids(), slots=16)
  assert differing(model, sampler, 290, temperature=1.0) == 0
  assert differing(model, sampler, 290, temperature=1.0, rows=slice(3, 4)) == 0


ON = {"batch_invariant": True}
TIED = {"tie_embeddings": True, "dtype": jnp.bfloat16}


@pytest.fixture(params=[{}, TIED], ids=["float32", "bfloat16_tied"])
def on_mesh(request):
  mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  config = toys.config(**SIZES, num_layers=1, **request.param, batch_invariant=True)
  model = AutoModel.from_config(config, mesh)
  with mesh_lib.use_mesh(mesh):
    yield model


@scored.has_compared_bits
def test_a_mesh_changes_no_bit(on_mesh):
  sampler = sampler_of(on_mesh, Ids())
  assert isinstance(sampler, EngineSampler)
  assert differing(on_mesh, sampler, 40) == 0


@pytest.mark.parametrize("gather", [False, "split"])
def test_a_mesh_needs_whole_weights(gather, on_mesh):
  for make in (Engine, EngineSampler):
    with pytest.raises(ValueError, match=f"gather_weights is {gather!r} and the mod"):
      make(on_mesh, Ids(), gather_weights=gather)


def test_one_device_takes_every_layout():
  model = toys.model(batch_invariant=True)
  assert EngineSampler(model, Ids(), gather_weights=False).gather_weights is False


def test_layers_of_one_type_are_refused():
  fields = fields_by_type(
    linear={"mixer": DeltaNetConfig(num_heads=4, num_key_heads=2)}
  )
  with pytest.raises(ValueError, match="mixer is DeltaNetConfig"):
    toys.config(layer_types=("linear", "full"), type_fields=fields, **ON)


@pytest.mark.parametrize(
  "changes",
  [{}, {"lora_rank": 2}, {"moe": scored.MODELS["moe"]["moe"]}, {"attention": "plain"}]
  + [{"dtype": jnp.float16}],
  ids=lambda x: "".join(x),
)
def test_exact_mode_sets_it_in_its_own_copy(changes, monkeypatch):
  seen, set_it = [], Transformer.set_invariant_if_possible

  def watched(model):
    set_it(model)
    nodes = [x for _, x in nnx.iter_graph(model) if isinstance(x, nnx.Module)]
    flags = [x.invariant for x in nodes if hasattr(x, "invariant")]
    flags += [
      x.implementation == "invariant" for x in nodes if isinstance(x, Attention)
    ]
    assert {*flags} == {model.config.batch_invariant}
    seen.append(model.config.batch_invariant)

  monkeypatch.setattr(Transformer, "set_invariant_if_possible", watched)
  model = toys.model(**changes)
  rows = scored.batch(scored.sequences(4))
  nnx.eval_shape(lambda m: scoring.score_completions(m, *rows, tile_rows=2), model)
  assert {*seen} == {"moe" not in changes and not {"attention", "dtype"} & {*changes}}
  assert not model.config.batch_invariant


@pytest.mark.parametrize("method", ["int8", "nf4"])
def test_quantized_models_stay_as_they_are(method):
  model = quantization.quantize(toys.model(), method)
  model.set_invariant_if_possible()
  assert not model.config.batch_invariant


def test_other_models_differ():
  model = toys.model(**SIZES, num_layers=1)
  assert differing(model, EngineSampler(model, Ids(), slots=3), 40) > 0


def test_other_platforms_are_refused(monkeypatch):
  model = toys.model(batch_invariant=True)
  monkeypatch.setattr(mesh_lib, "context_platform", lambda: "gpu")
  with pytest.raises(ValueError, match="batch_invariant is True and the model runs on"):
    model(jnp.zeros((1, 2), jnp.int32))


def test_pages_and_shared_prompts_are_refused():
  model = toys.model(batch_invariant=True)
  config = EngineConfig(max_tokens=32, attention="gather")
  with pytest.raises(ValueError, match="expected 'auto' or 'rows'"):
    Engine(model, Ids(), config)
  with pytest.raises(ValueError, match="without batch_invariant"):
    rows = scored.batch(scored.sequences(4, copies=2))
    scoring.score_completions(model, *rows, group_size=2)


@pytest.mark.parametrize(
  "changes", [scored.MODELS["moe"], {"attention": "plain"}], ids=["moe", "plain"]
)
def test_other_layers_are_refused(changes):
  with pytest.raises(ValueError, match="with batch_invariant; expected"):
    toys.config(**changes, batch_invariant=True)
