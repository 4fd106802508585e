"""Logs, records and replays of the routes of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tunix.models.automodel import AutoModel
from tunix.models.transformer.config import MoEConfig
from tunix.models.transformer.experts import routing
from tunix.utils import tree

TOKENS = np.arange(1, 25, dtype=np.int32).reshape(2, 12)
MASK = np.ones((2, 12), np.int32)
MASK[0, :5] = 0


def model(seed=0, **changes):
  """A mixture whose routers prefer some experts."""
  moe = MoEConfig(num_experts=5, experts_per_token=2, hidden_dim=12)
  made = toys.model(seed, moe=moe, **changes)
  for path, value in tree.flatten(nnx.state(made)).items():
    if "router" in path:
      made.layers.mlp.router.kernel.set_value(20 * value)
  return made


def losses(made, **options):
  """The balance loss of a call, and its gradients."""
  graph, state = nnx.split(made)

  def loss(state):
    made = nnx.merge(graph, state)
    with routing.logged(made) as logs:
      made(TOKENS, **options)
      sums = logs.sums()
    return sums.balance_loss() + 0.1 * sums.z_loss(), sums

  (value, sums), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
  return value, sums, tree.flatten(gradient)


def test_sums_of_all_layers():
  made = model()
  _, sums, gradient = losses(made)
  assert float(sums.tokens) == 2 * TOKENS.size
  assert float(sums.choices.sum()) == 4 * TOKENS.size
  np.testing.assert_allclose(sums.probabilities.sum(), sums.tokens, rtol=1e-6)
  for path in ("layers.mlp.router.kernel", "embed_tokens.embedding"):
    assert np.any(gradient[path])
  assert made.router_log is None


@pytest.mark.parametrize(
  "options", [{"scan_layers": True}, {"remat": "block"}], ids=str
)
def test_scanned_and_recomputed_layers_have_the_same_losses(options):
  want, _, theirs = losses(model())
  got, _, ours = losses(model(**options))
  np.testing.assert_allclose(got, want, rtol=1e-6)
  for path, gradient in ours.items():
    np.testing.assert_allclose(gradient, theirs[path], atol=1e-6, err_msg=path)


def test_padding_does_not_count():
  _, sums, _ = losses(model(), segment_ids=MASK)
  assert float(sums.tokens) == 2 * MASK.sum()
  visible = jnp.asarray(checkpoints.visible(MASK))
  _, masked, _ = losses(model(), attention_mask=visible)
  assert float(masked.tokens) == 2 * MASK.sum()


def test_calls_add_up():
  made = model(num_layers=1)
  with routing.logged(made) as logs:
    made(TOKENS)
    once = logs.sums()
    made(TOKENS[:, :4])
    both = logs.sums()
  assert float(both.tokens) == float(once.tokens) + 8


def test_devices_have_the_same_losses(mesh_fsdp4_tp2):
  config = model(num_layers=1).config
  want, _, _ = losses(AutoModel.from_config(config))
  graph, state = nnx.split(AutoModel.from_config(config, mesh_fsdp4_tp2))

  @jax.jit
  def sums(state):
    made = nnx.merge(graph, state)
    with routing.logged(made) as logs:
      made(np.concatenate([TOKENS, TOKENS]))
      return logs.sums()

  with jax.set_mesh(mesh_fsdp4_tp2):
    got = sums(state)
  np.testing.assert_allclose(got.balance_loss() + 0.1 * got.z_loss(), want, rtol=1e-5)


def record(made, tokens=TOKENS, **options):
  with routing.logged(made, records=True) as logs:
    out, cache = made(tokens, **options)
    return out, cache, logs[0].choice[...]


def test_replay_uses_the_experts_of_another_model():
  # Two routers disagree. With the routes of the first one replayed, the second model
  # computes what it does with the first one's router choices.
  first, second = model(), model(1)
  _, _, choice = record(first)
  own, _, others = record(second)
  assert np.mean(choice != others) > 0.1
  replayed, _, used = record(second, expert_choice=choice)
  np.testing.assert_array_equal(used, choice)
  assert checkpoints.relative(replayed, own) > 1e-3
  again = second(TOKENS, expert_choice=others)[0]
  np.testing.assert_allclose(again, own, atol=1e-6)


def test_training_and_sampling_agree_where_their_routes_differ():
  # Sampling, here in two calls with a cache, used experts that the routers would not
  # choose. Its record, replayed in one call without a cache, gives the same logits.
  made = model(num_layers=2)
  numbers = np.random.default_rng(0).random((2, 2, 6, 5)).argsort(-1)[..., :2]
  numbers = jnp.asarray(numbers, jnp.int32)
  cache, sampled, recorded = made.init_cache(2, 6), [], []
  for part in (slice(0, 4), slice(4, 6)):
    out, cache, choice = record(
      made, TOKENS[:, part], cache=cache, expert_choice=numbers[:, :, part]
    )
    sampled.append(out)
    recorded.append(choice)
  choice = jnp.concatenate(recorded, axis=2)
  np.testing.assert_array_equal(choice, numbers)
  sampled = jnp.concatenate(sampled, axis=1)
  replayed = made(TOKENS[:, :6], expert_choice=choice)[0]
  assert checkpoints.relative(replayed, sampled) < 1e-6
  assert checkpoints.relative(made(TOKENS[:, :6])[0], sampled) > 0.01


def test_nonsense_is_refused():
  choice = jnp.zeros((2, 2, 12, 3), jnp.int32)
  with pytest.raises(ValueError, match=r"expert_choice has shape .*, \(2, 2, 12, 2\)"):
    model()(TOKENS, expert_choice=choice)
  with pytest.raises(ValueError, match="expected None for a model without experts"):
    toys.model()(TOKENS, expert_choice=choice)
