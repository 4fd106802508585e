"""The pure steps, on a linear model whose gradients are known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import optimizers
from tunix.ops.reductions import WeightedSum, weighted_sum
from tunix.sft.steps.module_state import Skeleton
from tunix.sft.steps.train_step import (
  Group,
  examples_in,
  injected_learning_rate,
  make_eval_step,
  make_gradient,
  make_train_step,
  weigh,
)


class Line(nnx.Module):
  """y = w x, with a counter and dropout as mutable parts."""

  def __init__(self, rate=0.0):
    self.w = nnx.Param(jnp.array(2.0))
    self.calls = nnx.Variable(jnp.array(0))
    self.dropout = nnx.Dropout(rate, rngs=nnx.Rngs(0))

  def __call__(self, x):
    self.calls[...] += 1
    return self.dropout(self.w[...] * x)


def weighted_loss(model, batch):
  return weighted_sum(model(batch["x"]), batch["m"])


def mean_loss(model, batch):
  return jnp.mean(model(batch["x"])), {"double": 2 * jnp.mean(model(batch["x"]))}


def batch(x, m=None):
  x = np.asarray(x, np.float32)
  return {"x": x, "m": np.ones_like(x) if m is None else np.asarray(m, np.float32)}


def group(*batches, weights=None):
  weights = [1.0] * len(batches) if weights is None else weights
  return Group(batches, np.asarray(weights, np.float32))


def run(loss, groups, rate=0.0, tx=None):
  skeleton = Skeleton(model := Line(rate))
  params, frozen, rest = skeleton.split(model)
  tx = tx or optimizers.sgd(0.1)
  step = jax.jit(make_train_step(skeleton, loss, tx))
  return step(params, tx.init(params), rest, frozen, groups)


def test_one_update_by_hand():
  # loss = w * mean(x), so the gradient is mean(x) = 2 and w becomes 2 - 0.1 * 2.
  params, _, rest, metrics = run(weighted_loss, [group(batch([1, 2, 3]))])
  np.testing.assert_allclose(params["w"], 1.8, rtol=1e-6)
  assert float(metrics.loss) == 4 and float(metrics.weight) == 3
  assert float(metrics.grad_norm) == 2 and int(rest["calls"]) == 1
  assert metrics.learning_rate is None


def test_micro_batches_are_summed_and_divided_once():
  # (1 + 2 + 3 + 10) / 4 = 4, and not the mean of means (2 + 10) / 2 = 6.
  parts = [batch([1, 2, 3]), batch([10, 99, 99], [1, 0, 0])]
  params, _, rest, metrics = run(weighted_loss, [group(*parts)])
  np.testing.assert_allclose(params["w"], 2 - 0.1 * 4, rtol=1e-6)
  assert float(metrics.loss) == 8 and float(metrics.weight) == 4
  assert int(rest["calls"]) == 2


def test_sums_of_float64_stay_float64():
  with jax.enable_x64(True):
    skeleton = Skeleton(model := Line())
    model.w.set_value(jnp.array(2.0, jnp.float64))
    params, frozen, rest = skeleton.split(model)
    wide = [{k: v.astype(np.float64) for k, v in batch([x]).items()} for x in (1, 3)]
    gradient = make_gradient(skeleton, weighted_loss)
    found = gradient(params, rest, frozen, [group(*wide)])
  assert found["w"].dtype == np.float64 and float(found["w"]) == 2


def test_groups_of_different_shapes_add_up():
  groups = [group(batch([1, 2, 3])), group(batch([10]), batch([4]))]
  params, _, rest, _ = run(weighted_loss, groups)
  np.testing.assert_allclose(params["w"], 2 - 0.1 * 4, rtol=1e-6)
  assert int(rest["calls"]) == 3


def test_scalars_are_weighted_by_example_and_so_is_aux():
  # Means 2 (3 examples) and 10 (1 example): (3 * 2 + 10) / 4 = 4.
  params, _, _, metrics = run(mean_loss, [group(batch([1, 2, 3])), group(batch([10]))])
  np.testing.assert_allclose(params["w"], 2 - 0.1 * 4, rtol=1e-6)
  assert float(metrics.loss) == 8 and float(metrics.weight) == 4
  assert float(metrics.aux["double"]) == 16


def test_aux_with_weights_of_its_own_is_divided_by_them():
  def loss(model, batch):
    total = jnp.sum(batch["x"])
    return weighted_loss(model, batch), {
      "own": WeightedSum(total, total / 2),
      "never": WeightedSum(total * 0, total * 0),
    }

  for groups in (
    [group(batch([1, 3])), group(batch([10]))],
    [group(batch([1]), batch([13]))],
  ):
    *_, metrics = run(loss, groups)
    assert (float(metrics.aux["own"]), float(metrics.aux["never"])) == (2, 0)


@pytest.mark.parametrize("count", [1, 2])
def test_a_filler_leaves_no_trace(count):
  real = [batch([1, 2, 3])] * count
  filler = batch([np.nan, np.nan, np.nan])
  plain = run(weighted_loss, [group(*real)])
  filled = run(weighted_loss, [group(*real, filler, weights=[1] * count + [0])])
  for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(filled)):
    np.testing.assert_array_equal(
      *(
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in (a, b)
      )
    )


def test_nothing_trained_gives_a_zero_gradient():
  params, _, _, metrics = run(weighted_loss, [group(batch([1, 2], [0, 0]))])
  assert float(params["w"]) == 2 and float(metrics.loss) == 0


def test_the_gradient_is_what_the_optimizer_gets():
  skeleton = Skeleton(model := Line())
  gradient = make_gradient(skeleton, weighted_loss)
  params, frozen, rest = skeleton.split(model)
  out = gradient(params, rest, frozen, [group(batch([1, 5]))])
  assert float(out["w"]) == 3


def test_bfloat16_gradients_are_summed_in_float32():
  # 256 + 1 + 1 is 256 in bfloat16 when added one by one.
  model = Line()
  model.w.set_value(jnp.array(1.0, jnp.bfloat16))
  skeleton = Skeleton(model)
  params, frozen, rest = skeleton.split(model)

  def loss(model, batch):
    return WeightedSum(jnp.sum(model.w[...] * batch["x"]), jnp.float32(1 / 3))

  parts = [batch([256]), batch([4]), batch([4])]
  out = make_gradient(skeleton, loss)(params, rest, frozen, [group(*parts)])
  assert out["w"].dtype == jnp.bfloat16 and float(out["w"]) == 264


def test_eval_has_dropout_off_and_changes_nothing():
  skeleton = Skeleton(model := Line(0.9))
  params, frozen, rest = skeleton.split(model)
  step = make_eval_step(skeleton, lambda m, b: (weighted_loss(m, b), {"a": 3.0}))
  result, aux = step(params, rest, frozen, batch([1, 2, 3]))
  assert float(result.total) == 12 and float(result.weight) == 3
  assert (float(aux["a"].total), float(aux["a"].weight)) == (9, 3)
  assert int(rest["calls"]) == 0
  assert not model.dropout.deterministic


def test_dropout_draws_anew_in_every_micro_batch():
  many = batch(np.ones(200))
  _, _, rest, once = run(weighted_loss, [group(many)], rate=0.5)
  _, _, after, twice = run(weighted_loss, [group(many, many)], rate=0.5)
  assert float(once.loss) != float(twice.loss)
  assert int(rest["dropout"]["rngs"]["count"]) == 1
  assert int(after["dropout"]["rngs"]["count"]) == 2


def test_injected_learning_rate():
  tx = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1.0, 0.0, 4))
  *_, metrics = run(weighted_loss, [group(batch([1]))], tx=tx)
  assert float(metrics.learning_rate) == 1
  assert injected_learning_rate(optimizers.adam(1.0).init({"w": jnp.ones(1)})) is None


def test_what_a_loss_may_return():
  data = {"scale": np.float32(1), "x": np.ones((5, 2))}
  assert examples_in(data) == 5
  (total, weight), aux = weigh(jnp.float32(2), data)
  assert (float(total), float(weight), aux) == (10, 5, {})
  # Of aux, scalars get the loss's weight and sums keep their own.
  own = WeightedSum(3, 4)
  assert weigh((WeightedSum(1, 2), {"a": 5, "b": own}), data) == (
    WeightedSum(1, 2),
    {"a": WeightedSum(10, 2), "b": own},
  )
  # The mean over no example is NaN, and must not reach what it is added to.
  (total, weight), _ = weigh(jnp.float32(np.nan), {"x": np.ones((0, 2))})
  assert (float(total), float(weight)) == (0, 0)
  with pytest.raises(TypeError, match=r"array of shape \(2,\)"):
    weigh(jnp.ones(2), data)
  with pytest.raises(TypeError, match="returned 3 values"):
    weigh((1.0, 2.0, 3.0), data)
  with pytest.raises(TypeError, match="no array with a batch dimension"):
    weigh(1.0, {"scale": np.float32(1)})
