"""Optimizers and schedules by name, with what they need filled in."""

import functools
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.cli import runs
from tunix.cli import config as config_lib
from tunix.cli.make import optimizer
from tunix.cli.run.settle import settle_values
from tunix.cli.settings.training import OptimizerSettings
from tunix.models import automodel, lora
from tunix.models.automodel import AutoModel
from tunix.utils import tree

FAMILIES = ("qwen3", "gpt_oss", "gemma4", "nemotron_h", "deepseek_v3", "qwen3_5_moe")


def config(**keys):
  words = [f"--{name.replace('__', '.')}={value}" for name, value in keys.items()]
  return config_lib.load(words)


def updates(tx, grads):
  """What two steps add to parameters of 1."""
  params = jax.tree.map(jnp.ones_like, grads)
  state, out = tx.init(params), []
  for _ in range(2):
    # As one program: equal calls are traced once.
    step, state = jax.jit(tx.update)(grads, state, params)
    params = optax.apply_updates(params, step)
    out.append(step)
  return out


def assert_same(tx, expected):
  grads = {"kernel": jnp.asarray([[3.0, -4.0]])}
  for a, b in zip(updates(tx, grads), updates(expected, grads)):
    np.testing.assert_array_equal(a["kernel"], b["kernel"])


def test_default_is_adamw_behind_clipping():
  settled = settle_values(config(), 10)
  assert settled.training.learning_rate == 1e-5
  rate = optimizer.build_schedule(settled)
  expected = optax.chain(optax.clip_by_global_norm(1.0), optimizers.adamw(1e-5))
  assert_same(optimizer.build_optimizer(settled, rate), expected)


def test_max_grad_norm_scales_gradients_down_or_not():
  clipped = config(optimizer__name="sgd", training__max_grad_norm=2.5)
  expected = optax.chain(optax.clip_by_global_norm(2.5), optimizers.sgd(0.1))
  assert_same(optimizer.build_optimizer(clipped, 0.1), expected)
  free = config(optimizer__name="sgd", training__max_grad_norm="null")
  assert_same(optimizer.build_optimizer(free, 0.1), optimizers.sgd(0.1))


def test_name_and_arguments_reach_optax():
  keys = config(
    optimizer__name="sgd",
    optimizer__args__momentum=0.5,
    optimizer__args__nesterov="true",
    training__max_grad_norm="null",
  )
  expected = optimizers.sgd(0.1, momentum=0.5, nesterov=True)
  assert_same(optimizer.build_optimizer(keys, 0.1), expected)


def test_optimizers_of_contrib_are_found():
  expected = optax.contrib.ademamix(0.1)
  keys = config(optimizer__name="ademamix", training__max_grad_norm="null")
  assert_same(optimizer.build_optimizer(keys, 0.1), expected)


def stacked_model():
  """Two layers with adapters on one map, and the gradients of a step."""
  model = AutoModel.from_config(toys.model().config, seed=1)
  model = lora.apply(model, lora.LoraConfig(rank=2, targets=("up_proj",)))
  params = tree.flatten(nnx.state(model, nnx.Param))
  keys = jax.random.split(jax.random.key(0), len(params))
  grads = {
    name: jax.random.normal(key, leaf.shape)
    for key, (name, leaf) in zip(keys, params.items())
  }
  return grads


def test_muon_orthogonalises_each_layers_matrices_and_nothing_else():
  grads = stacked_model()
  keys = config(optimizer__name="muon", training__max_grad_norm="null")
  (found, _) = updates(optimizer.build_optimizer(keys, 0.1), grads)
  matrices = {n for n in grads if n.endswith(("kernel", "lora_a", "lora_b"))}
  matrices = {name for name in matrices if name.startswith("layers.")}
  assert len(matrices) == 9  # seven maps, two of an adapter
  adam = optax.contrib.muon(0.1)  # whatever has one dimension gets Adam
  for name, grad in grads.items():
    if name in matrices:  # [L, in, out]: as L runs of the plain optimizer
      expected = [updates(adam, {"w": layer})[0]["w"] for layer in grad]
    else:
      expected = updates(adam, {"w": grad.reshape(-1)})[0]["w"].reshape(grad.shape)
    np.testing.assert_allclose(found[name], np.stack(expected), rtol=1e-4, atol=1e-5)


MATRICES = {
  "embed_tokens.embedding": (5, 3),
  "layers.attn.q_proj.kernel": (2, 3, 4),
  "layers.attn.q_proj.lora_a": (2, 3, 1),
}
VECTORS = {"layers.attn.q_proj.bias": (2, 4), "norm.scale": (3,)}
SHAPES = {name: np.ones(shape) for name, shape in (MATRICES | VECTORS).items()}


def moved_by_decay(grads=SHAPES, **keys):
  """Returns the names of the parameters that change at a gradient of 0."""
  settled = settle_values(config(training__max_grad_norm="null", **keys), 10)
  tx = optimizer.build_optimizer(settled, 1.0)
  (found, _) = updates(tx, jax.tree.map(jnp.zeros_like, grads))
  moved = {name for name, x in tree.flatten(found).items() if np.any(x)}
  told = optimizer.decay_of(settled, tree.flatten(grads))
  assert set().union(*told.values()) == moved
  return moved


@pytest.mark.parametrize("make", [dict, tree.nest])
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_weight_decay_moves_no_norms_and_no_biases(name, make):
  moved = lambda **keys: moved_by_decay(make(SHAPES), optimizer__name=name, **keys)
  assert moved() == MATRICES.keys()
  assert moved(optimizer__decay_targets="[.*]") == SHAPES.keys()
  some = moved(optimizer__decay_targets="[q_proj.bias, 'embed.*']")
  assert some == {"layers.attn.q_proj.bias", "embed_tokens.embedding"}


def test_every_parameter_of_every_family_is_a_matrix_or_not():
  """The default goes by names; matrices of layers have 3 dimensions, or more."""
  mesh = jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))
  settled = settle_values(config(), 10)
  for name in FAMILIES:
    folder = pathlib.Path("tests/golden") / name
    model = automodel.of_shapes(automodel.config_of_folder(folder), mesh)
    params = tree.flatten(nnx.state(model, nnx.Param))
    (moved,) = optimizer.decay_of(settled, params).values()
    for name, x in params.items():
      is_matrix = x.ndim - ("layers" in name.split(".")) > 1 and "bias" not in name
      assert is_matrix == (name in moved), name


def test_optimizers_without_a_choice_have_none():
  settled = settle_values(config(optimizer__name="sgd"), 10)
  assert settled.optimizer.decay_targets is None
  assert moved_by_decay(optimizer__name="sgd") == set()
  former = {"optimizer__name": "novograd", "optimizer__args__weight_decay": 0.1}
  assert moved_by_decay(**former, optimizer__decay_targets="[.*]") == SHAPES.keys()
  args = {"optimizer__args__weight_decay_rate": 0.1}
  assert moved_by_decay(optimizer__name="adafactor", **args) == MATRICES.keys()


def test_weight_decay_of_muon_and_of_its_adam_part():
  moved = functools.partial(moved_by_decay, optimizer__name="muon")
  kernel, adapter = "layers.attn.q_proj.kernel", "layers.attn.q_proj.lora_a"
  both = {"optimizer__args__weight_decay": 0.1}
  assert moved(**both) == {kernel, adapter}
  assert moved(**both, optimizer__decay_targets="[kernel]") == {kernel}
  adam = {"optimizer__args__adam_weight_decay": 0.2}
  every = {"optimizer__decay_targets": "[.*]"}
  assert moved(**adam, **every) == SHAPES.keys() - {kernel, adapter}
  assert moved(**both, **adam, **every) == SHAPES.keys()
  with pytest.raises(ValueError, match=r"adam_weight_decay is 0.2 and .*to \['.*'\]"):
    moved(**adam)


def test_an_empty_list_of_targets_decays_nothing():
  settled = settle_values(config(optimizer__decay_targets="[]"), 10)
  assert optimizer.decay_of(settled, SHAPES) == {1e-4: []}


def test_a_target_that_matches_nothing_is_named():
  settled = settle_values(config(optimizer__decay_targets="[kernle]"), 10)
  with pytest.raises(ValueError, match=r"has 'kernle', which matches no parameter"):
    optimizer.decay_of(settled, SHAPES)


def test_muon_sees_the_same_in_a_tree_and_takes_its_arguments():
  grads = tree.nest(stacked_model())
  keys = config(
    optimizer__name="muon", optimizer__args__ns_steps=2, training__max_grad_norm="null"
  )
  (found, _) = updates(optimizer.build_optimizer(keys, 0.1), grads)
  kernel = grads["layers"]["attn"]["q_proj"]["kernel"]
  plain = optax.contrib.muon(0.1, ns_steps=2)
  expected = [updates(plain, {"w": layer})[0]["w"] for layer in kernel]
  np.testing.assert_allclose(
    found["layers"]["attn"]["q_proj"]["kernel"], expected, rtol=1e-4, atol=1e-5
  )


def test_lora_has_its_own_default_rate():
  assert settle_values(config(lora__rank=2), 10).training.learning_rate == 2e-4


def test_schedule_takes_rate_and_length_from_the_run():
  keys = config(
    schedule__name="warmup_cosine_decay_schedule",
    schedule__args__warmup_steps=2,
    training__learning_rate=0.1,
  )
  settled = settle_values(keys, 10)
  schedule = optimizer.build_schedule(settled)
  expected = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
  for step in range(12):
    assert float(schedule(step)) == float(expected(step))
  assert settled.schedule.args["decay_steps"] == 10


def test_a_linear_schedule_ends_at_zero_unless_told():
  keys = config(schedule__name="linear_schedule", training__learning_rate=0.4)
  schedule = optimizer.build_schedule(settle_values(keys, 4))
  np.testing.assert_allclose([schedule(i) for i in range(5)], [0.4, 0.3, 0.2, 0.1, 0])


def test_the_schedule_may_bring_the_rate():
  keys = config(
    schedule__name="cosine_decay_schedule",
    schedule__args__init_value=0.3,
    schedule__args__decay_steps=7,
  )
  settled = settle_values(keys, None)
  assert settled.training.learning_rate == 0.3
  assert settle_values(settled, None) == settled


def test_constant_without_a_schedule():
  settled = settle_values(config(training__learning_rate=0.2), None)
  assert optimizer.build_schedule(settled) == 0.2


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"schedule__name": "cosine_decay"}, "did you mean cosine_decay_schedule"),
    ({"schedule__name": "join_schedules"}, "unknown to optax"),
    ({"schedule__name": "cosine_decay_schedule"}, "give schedule.args.decay_steps, or"),
    (
      {"schedule__name": "warmup_cosine_decay_schedule"},
      "needs warmup_steps: give schedule.args.warmup_steps",
    ),
    (
      {"schedule__name": "linear_schedule", "schedule__args__decay_step": 3},
      "schedule.args.decay_step is no argument",
    ),
    (
      {
        "schedule__name": "cosine_decay_schedule",
        "schedule__args__init_value": 0.3,
        "training__learning_rate": 0.1,
      },
      "two names of one setting",
    ),
  ],
)
def test_schedules_that_cannot_be_made(keys, message):
  with pytest.raises(ValueError, match=message):
    settle_values(config(**keys), None)


def test_values_that_a_schedule_refuses():
  keys = config(
    schedule__name="warmup_cosine_decay_schedule", schedule__args__warmup_steps=20
  )
  with pytest.raises(ValueError, match=r"correct schedule\.args"):
    optimizer.build_schedule(settle_values(keys, 10))


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"optimizer__name": "adamww"}, "did you mean adamw"),
    ({"optimizer__name": "clip"}, "unknown to optax"),
    ({"optimizer__args__weight_deacy": 1}, "did you mean weight_decay"),
    ({"optimizer__name": "lbfgs"}, "choose another optimizer"),
    ({"optimizer__name": "dpsgd"}, "needs l2_norm_clip"),
    ({"optimizer__args__b1": "high"}, "optimizer adamw cannot be used with"),
    (
      {"optimizer__name": "sgd", "optimizer__decay_targets": "[kernel]"},
      r"decay_targets is \['kernel'\] and optimizer sgd cannot choose which",
    ),
    ({"optimizer__decay_targets": "[(]"}, r"decay_targets '\(' is no regular expr"),
  ],
)
def test_optimizers_that_cannot_be_used(keys, message):
  with pytest.raises(ValueError, match=message):
    optimizer.build_optimizer(config(**keys), 0.1)


def test_help_and_page_have_the_default_weight_decay():
  default = inspect.signature(optax.adamw).parameters["weight_decay"].default
  page = runs.ROOT / "docs" / "guides" / "command.md"
  for text in (OptimizerSettings.__doc__, page.read_text()):
    [shown] = re.findall(r"(?:adamw is|in optax:) (\d+e-\d+)", text)
    assert float(shown) == default
