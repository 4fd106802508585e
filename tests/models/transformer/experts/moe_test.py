"""Experts: two implementations that must agree, and routing by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.models import checkpoints
from tests.sft import trainers
from tunix.models import families
from tunix.models.automodel import AutoModel
from tunix.models.transformer.config import MoEConfig
from tunix.sft.steps.module_state import trained_variables
from tunix.utils import tree

TOKENS = np.arange(1, 25, dtype=np.int32).reshape(2, 12)


def model(implementation, **changes):
  moe = {"num_experts": 5, "experts_per_token": 2, "hidden_dim": 12} | changes
  return toys.model(moe=MoEConfig(**moe, implementation=implementation))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_ragged_equals_dense(normalise, k):
  def run(implementation):
    made = model(implementation, normalise=normalise, experts_per_token=k)
    graph, state = nnx.split(made)
    loss = lambda state: jnp.mean(nnx.merge(graph, state)(TOKENS)[0] ** 2)
    return toys.logits(made, TOKENS), tree.flatten(jax.jit(jax.grad(loss))(state))

  (ragged, ours), (dense, theirs) = run("ragged"), run("dense")
  assert checkpoints.relative(ragged, dense) < 1e-6
  for path, gradient in theirs.items():
    assert np.linalg.norm(ours[path] - gradient) <= 1e-5 * max(
      np.linalg.norm(gradient), 1e-6
    ), path


def test_routing_by_hand():
  moe = model("ragged", num_experts=3).unstack().layers[0].mlp
  moe.router.kernel.set_value(
    jnp.zeros((32, 3)).at[0].set(jnp.log(jnp.array([6, 3, 1])))
  )
  x = jnp.zeros((1, 32)).at[0, 0].set(1.0)
  weights, chosen = moe.route(x)
  np.testing.assert_array_equal(chosen, [[0, 1]])
  np.testing.assert_allclose(weights, [[6 / 9, 3 / 9]], rtol=1e-6)
  moe.config = dataclasses.replace(moe.config, normalise=False)
  np.testing.assert_allclose(moe.route(x)[0], [[0.6, 0.3]], rtol=1e-6)


def test_sigmoid_routing_by_hand():
  moe = MoEConfig(
    num_experts=6,
    experts_per_token=2,
    hidden_dim=8,
    routing="sigmoid",
    groups=3,
    groups_used=1,
    scale=2.5,
  )
  moe = toys.model(moe=moe).unstack().layers[0].mlp
  odds = jnp.array([9.0, 0.01, 3.0, 1.0, 4.0, 0.25])  # sigmoid(log odds) is p
  moe.router.kernel.set_value(jnp.zeros((32, 6)).at[0].set(jnp.log(odds)))
  x = jnp.zeros((1, 32)).at[0, 0].set(1.0)
  # Sums of the groups: 0.91, 0.75 + 0.5, 0.8 + 0.2. The second one is used.
  weights, chosen = moe.route(x)
  np.testing.assert_array_equal(chosen, [[2, 3]])
  np.testing.assert_allclose(weights, 2.5 * np.array([[0.6, 0.4]]), rtol=1e-5)
  # The correction chooses the third group, and does not weigh.
  moe.correction.set_value(jnp.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.7]))
  weights, chosen = moe.route(x)
  np.testing.assert_array_equal(chosen, [[5, 4]])
  np.testing.assert_allclose(weights, 2.5 * np.array([[0.2, 0.8]]), rtol=1e-5)


def test_the_correction_is_not_trained():
  made = model("ragged", routing="sigmoid")
  trainer = trainers.trainer(made, optimizers.adamw(0.1, weight_decay=0.1))
  made.layers.mlp.correction.set_value(jnp.ones((2, 5)))
  trainer.train([toys.batch(0, rows=2, length=8)])
  assert "layers.mlp.correction" not in trained_variables(made)
  np.testing.assert_array_equal(trainer.model.layers.mlp.correction[...], 1.0)


@pytest.mark.parametrize("gate", [False, True])
def test_the_shared_mlp_is_added(gate, mesh_fsdp4_tp2):
  made = model("ragged", shared_hidden_dim=6, shared_gate=gate)
  layer = made.unstack().layers[0].mlp
  x = jax.random.normal(jax.random.key(0), (2, 4, 32))
  shared = layer.shared(x)
  if gate:
    shared = shared * jax.nn.sigmoid(layer.shared_gate(x))
  both = layer(x)
  layer.shared = None
  np.testing.assert_allclose(both, layer(x) + shared, rtol=1e-5, atol=1e-6)
  want = made(TOKENS)[0]
  split = AutoModel.from_config(made.config, mesh_fsdp4_tp2)
  with jax.set_mesh(mesh_fsdp4_tp2):
    got = jax.jit(lambda: split(np.repeat(TOKENS, 2, 0))[0])()
  np.testing.assert_allclose(got[::2], want, rtol=1e-4, atol=1e-5)


def test_experts_split_over_a_mesh(mesh_fsdp4_tp2):
  config = model("ragged").config
  want = AutoModel.from_config(config)(TOKENS)[0]
  made = AutoModel.from_config(config, mesh_fsdp4_tp2)
  kernel = made.layers.mlp.experts.gate_proj.kernel[...]
  assert kernel.shape == (2, 5, 32, 12) and not kernel.is_fully_replicated
  with jax.set_mesh(mesh_fsdp4_tp2):
    got = jax.jit(lambda: made(np.repeat(TOKENS, 2, 0))[0])()
  np.testing.assert_allclose(got[::2], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"experts_per_token": 6}, "experts_per_token is 6; expected 1 to 5"),
    ({"hidden_dim": 0}, "hidden_dim is 0: it must be a whole number of at least 1"),
    ({"groups": 5}, "groups is 5 with 'softmax' routing"),
    ({"groups": 2, "routing": "sigmoid"}, "expected a divisor of num_experts 5"),
    ({"groups": 5, "routing": "sigmoid"}, "at least two experts in a group"),
    ({"routing": "best"}, "routing is 'best'"),
    ({"shared_gate": True}, "shared_hidden_dim None"),
    ({"implementation": "fast"}, "implementation 'fast' must be"),
  ],
)
def test_nonsense_is_refused(changes, message):
  fields = {"num_experts": 5, "experts_per_token": 2, "hidden_dim": 12} | changes
  with pytest.raises(ValueError, match=message):
    MoEConfig(**fields)


def test_fields_of_a_mixture():
  hf = {"model_type": "qwen3_moe", "hidden_size": 32, "num_attention_heads": 4}
  hf |= {"num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 48}
  hf |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
  read = families.FAMILIES["qwen3"].config_from_hf
  assert read(hf).moe == MoEConfig(
    num_experts=4, experts_per_token=2, hidden_dim=8, normalise=False
  )
  assert read(hf | {"mlp_only_layers": [0]}).moe.dense_layers == (0,)
  assert read(hf | {"decoder_sparse_step": 2}).moe.dense_layers == (0,)
