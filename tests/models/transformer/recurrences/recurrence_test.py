"""Recurrent mixers in every kind of call: all of them are the same rows alone."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests import toys, toys_text
from tests.models.checkpoints import relative, visible
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.generate.sampler import Sampler
from tunix.models.transformer.config import (
  DeltaNetConfig,
  Mamba2Config,
  fields_by_type,
)
from tunix.models.transformer.shared_prompt import SharedPrompt
from tunix.utils import tree

VOCAB = 600
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (2, 12)).astype(np.int32)
MAMBA = Mamba2Config(num_heads=4, head_dim=6, state_dim=5, groups=2, least_step=0.01)
DELTA = DeltaNetConfig(num_heads=4, num_key_heads=2, head_dim=5, key_dim=6)


@functools.cache
def model():
  """Layers of one part each, as in Nemotron 3: two recurrent, two MLPs, attention."""
  made = toys.model(
    vocab_size=VOCAB,
    num_layers=5,
    layer_types=("linear", "none", "linear", "none", "nope"),
    type_fields=fields_by_type(
      linear={"mixer": MAMBA, "parts": "mixer"},
      none={"parts": "mlp"},
      nope={"parts": "mixer"},
    ),
    gated_mlp=False,
    activation="relu2",
  )
  # A convolution without a bias, and steps that are all alike, would hide mistakes.
  mixer, key = made.layers["linear"].attn, jax.random.key(3)
  for name in ("conv_kernel", "conv_bias", "dt_bias", "skip"):
    key, use = jax.random.split(key)
    parameter = getattr(mixer, name)
    parameter.set_value(jax.random.normal(use, parameter.shape))
  return made


@functools.cache
def logits():
  return np.asarray(toys.logits(model(), TOKENS))


def test_token_by_token_through_the_cache():
  unstacked = model().unstack()
  call = nnx.jit(lambda model, tokens, cache: model(tokens, cache=cache))
  first, cache = call(unstacked, TOKENS[:, :4], unstacked.init_cache(2, 12))
  steps = [np.asarray(first)]
  for t in range(4, 12):
    step, cache = call(unstacked, TOKENS[:, t : t + 1], cache)
    steps.append(np.asarray(step))
  assert relative(np.concatenate(steps, 1), logits()) < 1e-5


def test_packed_rows_are_rows_alone():
  segments = np.array([[1] * 5 + [2] * 5 + [0] * 2], np.int32)
  got = np.asarray(toys.logits(model(), TOKENS[:1], segment_ids=segments))
  alone = [
    toys.logits(model(), TOKENS[:1, part]) for part in (slice(0, 5), slice(5, 10))
  ]
  assert relative(got[:, :10], np.concatenate(alone, 1)) < 1e-5


def test_padding_at_the_left_changes_nothing():
  padded = np.concatenate([np.full((2, 3), 7, np.int32), TOKENS], 1)
  mask = np.ones_like(padded)
  mask[:, :3] = 0
  got = toys.logits(model(), padded, attention_mask=visible(mask))
  assert relative(got[:, 3:], logits()) < 1e-5


def test_completions_of_one_prompt_do_not_see_each_other():
  layout = SharedPrompt(prompt=4, copies=2)
  row = np.concatenate([TOKENS[0, :4], TOKENS[0, 4:8], TOKENS[1, 4:8]])[None]
  got = np.asarray(toys.logits(model(), row, shared_prompt=layout))
  assert relative(got[:, :8], logits()[:1, :8]) < 1e-5
  other = np.concatenate([TOKENS[0, :4], TOKENS[1, 4:8]])[None]
  assert relative(got[:, 8:], toys.logits(model(), other)[:, 4:]) < 1e-5


def test_the_engine_and_the_padded_sampler_draw_what_dense_logits_say():
  prompts = [TOKENS[0, :9], TOKENS[1, :4]]
  steps, want = 6, []
  call = nnx.jit(lambda model, tokens: model(tokens)[0])
  for prompt in prompts:
    tokens = np.zeros((1, len(prompt) + steps), np.int32)
    tokens[0, : len(prompt)] = prompt
    for at in range(len(prompt), tokens.shape[1]):
      tokens[0, at] = np.argmax(call(model(), tokens)[0, at - 1])
    want.append(tokens[0, len(prompt) :].tolist())
  tokenizer = toys_text.chat_tokenizer()
  sizes = EngineConfig(slots=2, max_tokens=32, prefill_tokens=16)
  requests = [
    EngineRequest(prompt=prompt, max_tokens=steps, stop_ids=()) for prompt in prompts
  ]
  drawn = Engine(model(), tokenizer, sizes).run(requests)
  assert [done[0].tokens.tolist() for done in drawn] == want
  out = Sampler(model(), tokenizer)(prompts, [steps, steps], eos_tokens=[])
  assert [np.asarray(tokens).tolist() for tokens in out.tokens] == want


def test_gradients_of_a_scanned_model():
  graph, state = nnx.split(model())
  loss = lambda state: (nnx.merge(graph, state)(TOKENS)[0] ** 2).mean()
  gradients = tree.flatten(jax.jit(jax.grad(loss))(state))
  for path, gradient in gradients.items():
    assert np.isfinite(gradient).all() and np.any(gradient), path


def test_a_decoding_step_costs_the_same_at_every_position():
  def cost(size, **fields):
    """Returns the work and the traffic of a step with room for `size` tokens."""
    one = toys.model(num_layers=1, **fields)
    graph, state = nnx.split(one)
    cache = jax.eval_shape(lambda: one.init_cache(2, size))
    call = lambda state, tokens, cache: nnx.merge(graph, state)(tokens, cache=cache)
    program = jax.jit(call).lower(state, TOKENS[:, :1], cache)
    found = program.cost_analysis()
    return found["flops"], found["bytes accessed"]

  for mixer in MAMBA, DELTA:
    fields = fields_by_type(linear={"mixer": mixer})
    recurrent = {"layer_types": ("linear",), "type_fields": fields}
    assert cost(64, **recurrent) == cost(4096, **recurrent)
  assert cost(4096)[1] > 10 * cost(64)[1]  # attention reads the row


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"layer_types": ("linear", "full")}, "linear layers and type_fields no mixer"),
    ({"layer_types": ("loop", "full")}, r"layer_types has \['loop'\]"),
    ({"parts": "none"}, "parts 'none' must be one of"),
  ],
)
def test_wrong_layers_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    toys.model(**fields)


def test_heads_must_divide_into_groups():
  with pytest.raises(ValueError, match="groups is 3; expected a divisor"):
    Mamba2Config(num_heads=4, head_dim=6, state_dim=5, groups=3)
