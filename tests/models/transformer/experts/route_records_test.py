"""The form of recorded routes, and their replay by the decoder and by scoring."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tests.models.transformer.experts.routing_test import MASK, TOKENS, model, record
from tunix.generate import scoring
from tunix.models import families
from tunix.models.transformer.config import MoEConfig
from tunix.models.transformer.experts import route_records
from tunix.models.transformer.experts.route_records import RouteForm

RNG = np.random.default_rng(0)


def routes_of(form, *tokens):
  """Random distinct experts of each token."""
  order = RNG.random((*tokens, len(form.layers), form.num_experts)).argsort(-1)
  return (order[..., : form.experts_per_token] + 1).astype(form.dtype)


def test_a_record_has_one_number_for_each_expert_of_a_token():
  form = RouteForm(layers=(1, 3), num_layers=4, experts_per_token=2, num_experts=255)
  assert form.dtype == np.uint8 and form.token_bytes == 4
  choice = jnp.arange(4 * 3 * 5 * 2).reshape(4, 3, 5, 2)
  packed = form.packed(choice)
  assert packed.shape == (3, 5, 2, 2) and packed.dtype == np.uint8
  # Layer 1 begins at 30, layer 3 at 90; a record has 1 more.
  np.testing.assert_array_equal(packed[0, 0], [[31, 32], [91, 92]])
  again = form.expert_choice(packed)
  np.testing.assert_array_equal(again[1], choice[1])
  assert np.all(again[0] == -1) and np.all(form.expert_choice(form.empty(1, 1)) == -1)
  wide = RouteForm(layers=(0,), num_layers=1, experts_per_token=8, num_experts=256)
  assert wide.dtype == np.uint16 and wide.token_bytes == 16


@pytest.mark.parametrize(
  "preset, layers, size",
  [("nemotron3_nano_30b_a3b", 23, 138), ("glm4p7_flash", 46, 184)],
)
def test_layers_without_experts_have_no_record(preset, layers, size):
  config = families.preset(preset)[1]()
  form = route_records.form_of(types.SimpleNamespace(config=config))
  assert len(form.layers) == layers and form.token_bytes == size
  with pytest.raises(ValueError, match="has no experts whose routes can be recorded"):
    route_records.form_of(toys.TokensOnly(nnx.Rngs(0)))


def test_the_router_chooses_where_nothing_is_recorded():
  graph, state = nnx.split(model(1))

  @jax.jit
  def run(state, choice):
    return record(nnx.merge(graph, state), expert_choice=choice)[::2]

  none = np.full((2, 2, 12, 2), -1)
  want, own = run(state, none)
  theirs = (own + 1) % 5
  some = np.where(np.arange(12)[:, None] < 6, theirs, -1)
  got, used = run(state, some)
  np.testing.assert_array_equal(used[:, :, :6], theirs[:, :, :6])
  # No earlier token changes the input of the first layer's router.
  np.testing.assert_array_equal(used[0, :, 6:], own[0, :, 6:])
  assert checkpoints.relative(got, want) > 1e-3
  plain = jax.jit(lambda state: nnx.merge(graph, state)(TOKENS)[0])(state)
  np.testing.assert_allclose(want, plain, atol=1e-6)


@pytest.fixture(scope="module")
def scored():
  """A model, four padded rows with random routes, and their plain replay."""
  made = model()
  form = route_records.form_of(made)
  prompts = np.repeat(TOKENS[:, :5], 2, axis=0)
  mask = np.ones((4, 5), bool)
  mask[:2, :2] = False
  completions = RNG.integers(1, 90, (4, 6)).astype(np.int32)
  inside = np.arange(6) < np.array([[6], [3], [5], [1]])
  before = np.repeat(routes_of(form, 2, 5), 2, axis=0) * mask[..., None, None]
  after = routes_of(form, 4, 6) * inside[..., None, None]
  rows = (prompts, mask, completions, inside)
  routes = {"prompt_routes": before, "completion_routes": after}
  lengths = mask.sum(1)
  tokens, experts = np.zeros((4, 11), np.int32), form.empty(4, 11)
  for i, n in enumerate(lengths):  # the rows without padding in front
    tokens[i, : n + 6] = [*prompts[i, mask[i]], *completions[i]]
    experts[i, : n + 6] = [*before[i, mask[i]], *after[i]]
  graph, state = nnx.split(made)

  @jax.jit
  def logps(state):
    choice = form.expert_choice(jnp.asarray(experts))
    return jax.nn.log_softmax(nnx.merge(graph, state)(tokens, expert_choice=choice)[0])

  all_logps = logps(state)
  want = np.zeros((4, 6), np.float32)
  for i, j in np.argwhere(inside):
    want[i, j] = all_logps[i, lengths[i] + j - 1, completions[i, j]]
  return made, rows, routes, want


@pytest.mark.parametrize("options", [{}, {"group_size": 2}, {"tile_rows": 2}], ids=str)
def test_scores_replay_the_routes_of_padded_rows(scored, options):
  made, rows, routes, want = scored
  graph, state = nnx.split(made)

  @jax.jit
  def score(state, routes):
    return scoring.score_completions(
      nnx.merge(graph, state), *rows, **routes, **options
    ).logps

  got, own = score(state, routes), score(state, {})
  np.testing.assert_allclose(got, want, atol=1e-5)
  assert np.abs(got - own).max() > 1e-3


def test_gradients_flow_to_the_router_through_the_weights(scored):
  made, rows, routes, _ = scored
  graph, state = nnx.split(made)

  @jax.jit
  @jax.grad
  def gradient(state):
    scores = scoring.score_completions(nnx.merge(graph, state), *rows, **routes)
    return scores.logps.sum()

  router = gradient(state)["layers"]["mlp"]["router"]["kernel"].get_value()
  assert np.all(np.any(router, axis=1))  # in each layer


def test_routes_of_other_tokens_or_models_are_refused(scored):
  made, rows, routes, _ = scored
  with pytest.raises(ValueError, match=r"\[None, \(4, 6\)\]; expected \(4, 5\)"):
    scoring.score_completions(
      made, *rows, completion_routes=MASK[:1].repeat(4, 0)[:, :6, None, None]
    )
  other = toys.model(
    num_layers=1, moe=MoEConfig(num_experts=5, experts_per_token=3, hidden_dim=8)
  )
  with pytest.raises(ValueError, match=r"expected \[rows, tokens, 1, 3\]"):
    scoring.score_completions(other, *rows, **routes)
