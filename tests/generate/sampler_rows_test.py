"""Samples that share a prefill, limits a row, stop strings, streams, late rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import toy_ids
from tunix.generate import sampler as sampler_lib
from tunix.generate.decoders import cached, memory as memory_lib
from tunix.generate.padded import decode
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.generate.sizes import batching
from tunix.models.automodel import AutoModel
from tunix.utils import mesh as mesh_lib

DRAW = {"temperature": 20.0, "seed": 3}  # the sharp model's tokens are drawn from many


@pytest.fixture(scope="module")
def sampler():
  return Sampler(toy_ids.sharp_model(num_layers=1), toy_ids.Ids())


def lists(tokens):
  return [row.tolist() for row in tokens]


def models():
  """With our cache, with their own, and with none."""
  return {
    "ours": toy_ids.sharp_model(num_layers=1),
    "own": toy_ids.OwnCache(97),
    "tokens": toys.TokensOnly(nnx.Rngs(0)),
    "four": toys.FourArguments(nnx.Rngs(0)),
  }


@pytest.mark.parametrize("kind", ["ours", "own", "tokens", "four"])
def test_samples_of_a_prompt_are_as_many_equal_prompts(kind):
  sampler = Sampler(models()[kind], toy_ids.Ids())
  prompts = toy_ids.prompts(3, longest=10)
  options = {"return_logprobs": True, "return_logits": True, **DRAW}
  shared = sampler(prompts, 6, num_samples=3, **options)
  apart = sampler([p for p in prompts for _ in range(3)], 6, **options)
  assert lists(shared.tokens) == lists(apart.tokens) and len(shared.text) == 9
  assert len(set(shared.text[:3])) > 1  # rows of one prompt draw for themselves
  np.testing.assert_array_equal(shared.padded_prompt_tokens, apart.padded_prompt_tokens)
  for a, b in zip(shared.logits, apart.logits):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_prompts_of_a_group_are_prefilled_once():
  seen = []

  class Watched(toys.TokensOnly):
    def __call__(self, tokens):
      seen.append(tokens.shape)
      return super().__call__(tokens)

  Sampler(Watched(nnx.Rngs(0)), toy_ids.Ids())(["1 2", "3"], 4, num_samples=8, **DRAW)
  assert {rows for rows, _ in seen} == {2, 16} and seen[0][0] == 2


def test_every_prompt_has_its_own_limit(sampler):
  prompts = toy_ids.prompts(3, longest=10)
  free = sampler(prompts, 9)
  out = sampler(prompts, [2, 9, 5], num_samples=2, pad_output=True)
  assert out.tokens.shape == (6, 9)
  for row, length in enumerate([2, 2, 9, 9, 5, 5]):
    whole = free.tokens[row // 2][:length].tolist()
    assert out.tokens[row].tolist() == whole + [0] * (9 - length)
  assert out.finish_reasons == ["length"] * 6


@pytest.mark.parametrize("kind", ["ours", "own", "four"])
def test_stop_strings_end_rows(kind):
  sampler = Sampler(models()[kind], toy_ids.Ids())
  prompts = toy_ids.prompts(3, longest=10)
  options = {"return_logprobs": True, **DRAW}
  free = sampler(prompts, 40, **options)
  words = free.text[0].split()
  stop = f" {words[20]} {words[21]} "
  out = sampler(prompts, 40, stop_strings=[stop, "no such"], **options)
  end = free.text[0].index(stop)
  assert out.text[0] == free.text[0][:end] and out.text[1:] == free.text[1:]
  # The space behind the second number comes with the next token.
  count = len(free.text[0][: end + len(stop)].split()) + 1
  assert out.tokens[0].tolist() == free.tokens[0][:count].tolist()
  assert len(out.logprobs[0]) == count
  assert out.finish_reasons == ["stop", "length", "length"]
  echoed = sampler(prompts, 40, stop_strings=stop, echo=True, **options)
  assert echoed.text[0] == toy_ids.Ids().decode(prompts[0]) + " " + out.text[0]


def test_a_row_that_a_stop_string_ended_costs_few_steps_more(sampler, monkeypatch):
  steps = []
  read = sampler_lib.RowReader.read
  spy = lambda rows, out: (steps.append(int(out.steps)), read(rows, out))
  monkeypatch.setattr(sampler_lib.RowReader, "read", spy)
  free = sampler([[5, 6, 7]], 200, **DRAW)
  assert steps.pop() == 200 and not steps
  sampler([[5, 6, 7]], 200, stop_strings=[f" {free.tokens[0][30]} "], **DRAW)
  assert steps[-1] <= 32 + sampler_lib.STOP_STEPS
  assert np.diff(steps).max() <= sampler_lib.STOP_STEPS


def test_reasons(sampler):
  prompts = [[5, 6, 7]]
  free = sampler(prompts, 10, **DRAW).tokens[0].tolist()
  reason = lambda **more: sampler(prompts, 10, **DRAW, **more).finish_reasons
  assert reason() == ["length"]
  assert reason(eos_tokens=[free[4]]) == ["eos"]
  assert reason(stop_strings=f" {free[3]} ") == ["stop"]


STREAMS = {
  "plain": {},
  "drawn": {"num_samples": 3, **DRAW},
  "ends": {"stop_strings": [" 1", "9 "], "eos_tokens": [5, 6, 7], "include_eos": True},
  "logprobs": {"return_logprobs": True, "top_k": 4, **DRAW},
}


@pytest.mark.parametrize("options", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("every", [1, 7])
def test_a_stream_is_the_call_in_parts(sampler, options, every):
  prompts = toy_ids.prompts(3, longest=10)
  limits = [20, 3, 11]
  whole = sampler(prompts, limits, **options)
  parts = list(sampler.stream(prompts, limits, every=every, **options))
  for row, text in enumerate(whole.text):
    own = [part for part in parts if part.row == row]
    assert "".join(part.text for part in own) == text
    joined = np.concatenate([part.tokens for part in own])
    assert joined.tolist() == whole.tokens[row].tolist()
    reasons = [part.finish_reason for part in own]
    assert reasons == [None] * (len(own) - 1) + [whole.finish_reasons[row]]
    if whole.logprobs is not None:
      for name in ("logprobs", "sampling_logprobs"):
        found = np.concatenate([getattr(part, name) for part in own])
        np.testing.assert_allclose(found, getattr(whole, name)[row], atol=1e-5)
  assert len(parts[0].tokens) == 1 and max(len(p.tokens) for p in parts) <= every


def test_streams_refuse_at_once(sampler):
  with pytest.raises(ValueError, match=r"a stream .* beam_size and echo"):
    sampler.stream("1", 4, echo=True, beam_size=2)
  with pytest.raises(ValueError, match=r"a stream .* exact"):
    sampler.stream("1", 4, exact=True, return_logprobs=True)
  with pytest.raises(ValueError, match="every is 0"):
    sampler.stream("1", 4, every=0)
  with pytest.raises(ValueError, match="temperature is -1"):
    sampler.stream("1", 4, temperature=-1)


def test_sampling_logprobs_are_of_the_distribution_drawn_from():
  model = toys.model(num_layers=1)
  out = Sampler(model, toy_ids.Ids())(
    [[5, 6, 7]] * 4,
    6,
    temperature=0.5,
    top_k=3,
    forbidden_tokens=[1, 2],
    seed=0,
    return_logprobs=True,
    return_logits=True,
  )
  for tokens, logits, raw, drawn in zip(
    out.tokens, out.logits, out.logprobs, out.sampling_logprobs
  ):
    for i, token in enumerate(tokens):
      scaled = logits[i].astype(np.float64)
      exact = scaled[token] - np.log(np.exp(scaled).sum())
      np.testing.assert_allclose(raw[i], exact, atol=1e-5)
      scaled[[1, 2]] = -np.inf
      best = np.sort(scaled)[-3:] / 0.5
      exact = scaled[token] / 0.5 - np.log(np.exp(best).sum())
      np.testing.assert_allclose(drawn[i], exact, atol=1e-5)
  greedy = Sampler(model, toy_ids.Ids())("1", 3, return_logprobs=True)
  assert greedy.sampling_logprobs[0].tolist() == [0, 0, 0]


def test_prompts_move_when_slots_run_short():
  # Windows count in slots: a prompt that moves must keep its distances.
  model = toy_ids.sharp_model(sliding_window=5)
  prompts = toy_ids.prompts(4, longest=17)
  free = Sampler(model, toy_ids.Ids())(prompts, 13, return_logprobs=True)
  # 32 + 16 slots were needed.
  tight = Sampler(model, toy_ids.Ids(), CacheConfig(cache_size=30))
  out = tight(prompts, 13, return_logprobs=True, num_samples=2)
  assert out.text[::2] == out.text[1::2] == free.text
  for a, b in zip(out.logprobs[::2], free.logprobs):
    np.testing.assert_allclose(a, b, atol=1e-4)


def rules(rows, seed=0):
  """Drawing rules for rows of these numbers."""
  return decode.Draw(
    rows=np.asarray(rows),
    key=jax.random.key(seed),
    temperature=np.full(len(rows), 20.0, np.float32),
  )


@pytest.mark.parametrize("kind", ["ours", "window", "own"])
def test_a_row_admitted_late_is_as_alone(kind):
  model = {
    "ours": toy_ids.sharp_model(),
    "window": toy_ids.sharp_model(layer_types=("sliding", "full"), sliding_window=4),
    "own": toy_ids.OwnCache(97),
  }[kind]
  slots, steps, late = 40, 8, 5
  early = toy_ids.prompts(3, longest=10)
  comer = [7, 1, 8]

  @jax.jit
  def prefill(tokens, mask):
    return cached.prefill(model, tokens, mask, slots)

  @jax.jit
  def step(tokens, memory):
    return cached.step(model, tokens, memory)

  @jax.jit
  def admit(memory, newcomer, row):
    return memory_lib.admit(model, memory, newcomer, row)

  @jax.jit
  def choose(logits, numbers, places):
    draw = rules(np.zeros(len(early)))
    draw = decode.Draw(rows=numbers, key=draw.key, temperature=draw.temperature)
    return decode.sampling.choose(logits, draw, places)[0]

  padded = lambda prompts: batching.left_padded(prompts, len(prompts), 16, 0)
  logits, memory = prefill(*padded(early))
  numbers, places = np.arange(3), np.zeros(3, int)
  tokens = choose(logits, numbers, places)
  found: list[list[int]] = [[int(t)] for t in tokens]
  for count in range(1, late + steps):
    places = places + 1
    if count == late:  # row 1 makes room for the newcomer, which is row 9 of its call
      first, newcomer = prefill(*padded([comer]))
      memory = admit(memory, newcomer, 1)
      numbers, places = np.asarray([0, 9, 2]), np.asarray([late, 0, late])
      ended, found[1] = found[1], []
      fresh = choose(jnp.repeat(first, 3, 0), numbers, places)
      tokens = jnp.asarray(tokens).at[1].set(fresh[1])
      found[1].append(int(fresh[1]))
      places = np.asarray([late - 1, 0, late - 1])
      places = places + 1
    logits, memory = step(tokens, memory)
    tokens = choose(logits, numbers, places)
    for row in range(3):
      found[row].append(int(tokens[row]))

  sampler = Sampler(model, toy_ids.Ids())
  options = {"temperature": 20.0, "seed": 0}
  alone = sampler([*early, *[[1]] * 6, comer], late + steps, **options)
  assert found[0] == alone.tokens[0].tolist()
  assert found[2] == alone.tokens[2].tolist()
  assert ended == alone.tokens[1][:late].tolist()
  assert found[1] == alone.tokens[9][: len(found[1])].tolist()
  assert len(found[1]) == steps + 1


def on_a_mesh(axes):
  """A sampler of one device, and one of eight, with little room in the cache."""
  config = toys.config(num_layers=1)
  mesh = mesh_lib.create_mesh(axes, jax.devices()[:8])
  cache = CacheConfig(cache_size=20)
  alone = Sampler(AutoModel.from_config(config), toy_ids.Ids(), cache)
  return alone, Sampler(AutoModel.from_config(config, mesh), toy_ids.Ids(), cache)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_samples_on_a_mesh():
  prompts = toy_ids.prompts(3, longest=10)
  alone, split = on_a_mesh({"fsdp": 4, "tp": 2})
  options = {"num_samples": 2, **DRAW}
  assert split(prompts, 6, **options).text == alone(prompts, 6, **options).text


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("axes", [{"fsdp": 4, "tp": 2}, {"tp": 8}], ids=str)
def test_a_mesh_changes_nothing(axes):
  prompts = toy_ids.prompts(3, longest=10)
  alone, split = on_a_mesh(axes)
  options = {"num_samples": 2, "top_k": 20, "top_p": 0.9, **DRAW}
  assert split(prompts, 6, **options).text == alone(prompts, 6, **options).text
  beams = {"beam_size": 3, "num_samples": 2, "eos_tokens": [4, 5]}
  assert split(prompts, 6, **beams).text == alone(prompts, 6, **beams).text
  parts = lambda s: [p.text for p in s.stream(prompts, 6, stop_strings="1", **options)]
  assert parts(split) == parts(alone)


def test_only_layers_are_copied_for_decoding():
  graph, state = nnx.split(toys.model())
  opened = decode.opened(graph, state)
  before = {id(x) for x in jax.tree.leaves(state)}
  after = [id(x) in before for x in jax.tree.leaves(opened.state)]
  assert sum(after) == 3  # embedding, last norm, head
  assert len(after) > len(before)  # a stack has become a leaf a layer


@pytest.mark.parametrize("window", [1, 2, 6])  # a prompt has 6 tokens
def test_a_narrow_window_is_the_same_with_and_without_a_cache(window):
  """Greedy text and its logits, and a full pass by the definition of a window: in one
  layer a token's logits are those of the last `window` tokens alone."""
  model = toy_ids.sharp_model(
    num_layers=1, layer_types=("sliding",), sliding_window=window
  )
  prompts = [toy_ids.prompts(1, longest=6, seed=seed)[0] for seed in range(3)]
  prompts[0] = np.arange(1, 7)
  out = Sampler(model, toy_ids.Ids())(prompts, 5, return_logits=True)
  for prompt, new, logits in zip(prompts, out.tokens, out.logits):
    full = toy_ids.full_logits(model, prompt, new)
    np.testing.assert_allclose(logits, full, atol=1e-3)
    np.testing.assert_array_equal(new, full.argmax(-1))
    seen = np.concatenate([prompt, new])[:-1]
    alone = toy_ids.full_logits(model, seen[-window:], new[-1:])
    np.testing.assert_allclose(full[-1], alone[0], atol=1e-3)
