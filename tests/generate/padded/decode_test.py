"""Cached decoding against whole forward passes; when the loop ends; meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import toy_ids
from tunix.generate.decoders import cached, recompute
from tunix.generate.padded import decode
from tunix.generate.sampler import Sampler
from tunix.generate.sizes import batching
from tunix.models import lora
from tunix.models.automodel import AutoModel
from tunix.utils import mesh as mesh_lib


def run(model, prompts, *, limits, eos=(), width=16, until=16):
  """Greedy tokens by the two programs, at most `until`."""
  tokens, mask = batching.left_padded(prompts, len(limits), width, 0)
  rules = decode.Rules(
    limits=np.asarray(limits),
    eos=batching.id_list(eos),
    draw=decode.Draw(rows=np.arange(len(limits)), key=jax.random.key(0)),
  )
  plan = decode.Plan(slots=width + 16, columns=16)
  opened = decode.opened(*nnx.split(model))
  start = decode.Prompts(tokens=tokens, mask=mask)
  out, memory = decode.start(*opened, start, rules, plan)
  return decode.advance(*opened, rules, out, memory, until)[0]


def test_the_graph_is_hashed_once_and_equals_that_of_an_equal_model(monkeypatch):
  first, other = (decode.opened(*nnx.split(toys.model())) for _ in range(2))
  assert first.graph == other.graph and hash(first.graph) == hash(other.graph)
  deeper = decode.opened(*nnx.split(toys.model(num_layers=3))).graph
  assert deeper != first.graph
  monkeypatch.setattr(nnx.GraphDef, "__hash__", None)
  assert hash(first.graph) == hash(other.graph)
  assert nnx.merge(*first).config == toys.model().config


@pytest.mark.parametrize("changes", [{}, {"scan_layers": True}, {"qk_norm": "head"}])
def test_cached_steps_equal_full_forward(changes):
  model = toys.model(**changes)
  prompts = toy_ids.prompts(3, longest=10)
  tokens, mask = batching.left_padded(prompts, 3, 12, 0)
  following = np.random.default_rng(1).integers(0, toys.VOCAB, (3, 5))
  graph, state = nnx.split(model)
  prefill = jax.jit(lambda s, *a: cached.prefill(nnx.merge(graph, s), *a, 20))
  step = jax.jit(lambda s, *a: cached.step(nnx.merge(graph, s), *a))
  logits, memory = prefill(state, tokens, mask)
  found = [logits]
  for column in following.T[:-1]:
    logits, memory = step(state, column, memory)
    found.append(logits)
  for row, prompt in enumerate(prompts):
    expected = toy_ids.full_logits(model, prompt, following[row])
    np.testing.assert_allclose(np.stack(found, 1)[row], expected, atol=2e-6)


def test_recomputing_steps_equal_full_forward():
  for model in (toys.FourArguments(nnx.Rngs(0)), toys.TokensOnly(nnx.Rngs(0))):
    prompts = toy_ids.prompts(3, longest=10)
    tokens, mask = batching.left_padded(prompts, 3, 12, 0)
    following = np.random.default_rng(1).integers(0, toys.VOCAB, (3, 5))
    start = (jnp.asarray(tokens), jnp.asarray(mask), 17)
    logits, memory = recompute.prefill(model, *start)
    found = [logits]
    for column in following.T[:-1]:
      logits, memory = recompute.step(model, jnp.asarray(column), memory)
      found.append(logits)
    for row, prompt in enumerate(prompts):
      ids = jnp.asarray([[*prompt, *following[row]]])
      n = ids.shape[1]
      causal = jnp.tril(jnp.ones((1, n, n), bool))
      given = () if isinstance(model, toys.TokensOnly) else (None, causal)
      given = (jnp.arange(n)[None], *given) if given else ()
      out = model(ids, *given)
      out = out[0] if isinstance(out, tuple) else out
      expected = out[0, len(prompt) - 1 : -1]
      np.testing.assert_allclose(np.stack(found, 1)[row], expected, atol=1e-5)


def test_the_loop_ends_when_every_row_is_done():
  model = toy_ids.sharp_model()
  prompts = toy_ids.prompts(2, longest=10)
  free = run(model, prompts, limits=[16, 16])
  assert int(free.steps) == 16 and not free.stopped.any()
  # The token that row 0 gives at its fourth place ends it there at the latest.
  eos = int(free.tokens[0, 3])
  ends = [
    row.index(eos) + 1 if eos in row else 16 for row in np.asarray(free.tokens).tolist()
  ]
  stopped = run(model, prompts, limits=[16, 16], eos=[eos])
  assert stopped.lengths.tolist() == ends and int(stopped.steps) == max(ends)
  alone = run(model, prompts[:1], limits=[16], eos=[eos])
  assert int(alone.steps) == ends[0] <= 4 and bool(alone.stopped[0])


def test_the_loop_ends_at_a_number_of_steps():
  model = toy_ids.sharp_model()
  prompts = toy_ids.prompts(2, longest=10)
  free = run(model, prompts, limits=[16, 16])
  some = run(model, prompts, limits=[16, 3], until=5)
  assert int(some.steps) == 5 and some.lengths.tolist() == [5, 3]
  assert some.done.tolist() == [False, True]
  np.testing.assert_array_equal(some.tokens[0, :5], free.tokens[0, :5])


def test_rows_have_limits_of_their_own():
  model = toy_ids.sharp_model()
  prompts = toy_ids.prompts(3, longest=10)
  out = run(model, prompts, limits=[2, 5, 0])
  assert out.lengths.tolist() == [2, 5, 0] and int(out.steps) == 5
  free = run(model, prompts, limits=[16, 16, 16])
  np.testing.assert_array_equal(out.tokens[1, :5], free.tokens[1, :5])


def test_only_the_last_position_is_unembedded():
  model = toys.model()
  shapes = []

  class Watched(type(model)):
    def logits(self, hidden):
      shapes.append(hidden.shape)
      return super().logits(hidden)

  watched = Watched(model.config, rngs=nnx.Rngs(0))
  run(watched, toy_ids.prompts(2, longest=10), limits=[4, 4])
  assert len(shapes) >= 2 and {shape[:2] for shape in shapes} == {(2, 1)}


def test_a_model_with_its_own_cache():
  # Prompt 3 1: 3*1 + 1*2 = 5; then 5 + 5*3 = 20; 20 + 20*4 = 100 -> 100 - 97 = 3;
  # 100 + 3*5 = 115 -> 18. Padding, masks and positions must all be right for it.
  sampler = Sampler(toy_ids.OwnCache(97), toy_ids.Ids())
  out = sampler(["3 1", "2 2 2 2 2 2 2"], 4)
  assert out.text[0] == "5 20 3 18"
  assert out.text[1].startswith("56 ")  # 2 * (1 + ... + 7)


def test_bfloat16():
  model = toys.model(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  logits, memory = cached.prefill(
    model, jnp.ones((1, 4), int), jnp.ones((1, 4), bool), 8
  )
  assert logits.dtype == jnp.float32 and memory.cache.k[0].dtype == jnp.bfloat16
  prompts = toy_ids.prompts(3, longest=10)
  out = Sampler(model, toy_ids.Ids())(prompts, 8, return_logprobs=True)
  for prompt, tokens, logps in zip(prompts, out.tokens, out.logprobs):
    full = toy_ids.full_logits(model, prompt, tokens)
    best = full.max(-1) - np.take_along_axis(full, tokens[:, None], -1)[:, 0]
    assert best.max() < 0.02  # two roundings of bfloat16 at these logits
    exact = jax.nn.log_softmax(full)[np.arange(8), tokens]
    np.testing.assert_allclose(logps, exact, atol=0.02)


def test_adapters_are_sampled_with():
  model = toys.model(lora_rank=4)
  prompts = toy_ids.prompts(3, longest=10)
  found = Sampler(model, toy_ids.Ids())(prompts, 6, return_logits=True)
  merged = Sampler(lora.merge(model), toy_ids.Ids())(prompts, 6, return_logits=True)
  for a, b in zip(found.logits, merged.logits):
    np.testing.assert_allclose(a, b, atol=1e-5)


def under_set_mesh(mesh):
  return jax.set_mesh(mesh)


def under_with(mesh):
  return mesh


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
  ("axes", "context"),
  [
    ({"fsdp": 4, "tp": 2}, None),
    ({"fsdp": 4, "tp": 2}, under_set_mesh),
    ({"fsdp": 4, "tp": 2}, under_with),
    ({"tp": 8}, None),
  ],
)
def test_a_mesh_changes_no_token(axes, context):
  prompts = toy_ids.prompts(3, longest=10)
  options = {"temperature": 1.0, "seed": 3, "return_logprobs": True}
  config = toys.config()
  alone = Sampler(AutoModel.from_config(config), toy_ids.Ids())(prompts, 6, **options)
  mesh = mesh_lib.create_mesh(axes, jax.devices()[:8])
  sampler = Sampler(AutoModel.from_config(config, mesh), toy_ids.Ids())
  if context is None:
    found = sampler(prompts, 6, **options)
  else:
    with context(mesh):
      found = sampler(prompts, 6, **options)
  assert found.text == alone.text
  np.testing.assert_allclose(
    np.stack(found.logprobs), np.stack(alone.logprobs), atol=1e-5
  )


def test_a_model_off_the_mesh_in_its_context():
  prompts = toy_ids.prompts(3, longest=10)
  sampler = Sampler(toy_ids.sharp_model(), toy_ids.Ids())
  alone = sampler(prompts, 6)
  with jax.set_mesh(mesh_lib.create_mesh({"fsdp": 8}, jax.devices()[:8])):
    assert sampler(prompts, 6).text == alone.text
