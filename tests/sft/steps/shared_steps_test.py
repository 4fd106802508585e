"""A second trainer traces nothing, and what was dropped is freed."""

import dataclasses
import gc
import weakref

import jax
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.rl import clusters
from tests.sft import trainers
from tests.sft.dpo import preferences
from tunix.sft.losses import next_token_loss
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.sft.steps import shared_steps

SCALE = 1.0


def scaled_loss(model, **fields):
  """A user's loss, whose trace depends on a global variable."""
  out = next_token_loss(model, **fields)
  return out._replace(total=SCALE * out.total)


class Wider(nnx.Module):
  """A user's module around one of ours."""

  def __init__(self):
    self.inner = toys.model(num_layers=1)

  def __call__(self, tokens, positions=None, cache=None, attention_mask=None):
    return self.inner(tokens, positions, cache, attention_mask)


def sft(seed=0, *, tx=None, loss=None, model=None, **changes):
  model = toys.model(seed, num_layers=1, **changes) if model is None else model
  trainer = PeftTrainer(
    model, optimizers.sgd(0.1) if tx is None else tx, TrainingConfig()
  )
  return trainer if loss is None else trainer.with_loss_fn(loss)


def step(trainer, seed=0):
  with trainers.compilations(fresh=False) as names:
    loss = float(trainer.train_step(toys.batch(seed)))
    trainer.eval_step(toys.batch(seed))
  trainer.close()
  return loss, names.count("jit(step)")


@pytest.fixture(autouse=True)
def nothing_kept():
  shared_steps.clear()
  yield
  shared_steps.clear()


def test_a_second_trainer_compiles_no_step_and_learns_from_its_own_weights():
  first, compiled = step(sft())
  assert compiled == 2  # training and evaluation
  assert step(sft()) == (first, 0)
  second, compiled = step(sft(seed=1))
  assert compiled == 0 and second != first
  shared_steps.clear()
  assert step(sft(seed=1)) == (second, 2)


def test_the_rate_in_the_settings_makes_one_optimizer():
  config = TrainingConfig(learning_rate=0.1)
  build = lambda: PeftTrainer(toys.model(num_layers=1), training_config=config)
  first, _ = step(build())
  assert step(build()) == (first, 0)


@pytest.mark.parametrize(
  "changes",
  [
    {"tx": optimizers.sgd(0.2)},
    {"hidden_dim": 32},
    {"lora_rank": 2},
    {"norm_eps": 1e-3},
  ],
  ids=lambda changes: next(iter(changes)),
)
def test_another_optimizer_or_structure_is_compiled(changes):
  step(sft())
  _, compiled = step(sft(**changes))
  assert compiled > 0


def test_a_users_loss_is_traced_by_every_trainer(monkeypatch):
  first, compiled = step(sft(loss=scaled_loss))
  assert compiled == 2
  monkeypatch.setitem(globals(), "SCALE", 2.0)
  second, compiled = step(sft(loss=scaled_loss))
  assert compiled == 2
  assert second == pytest.approx(2 * first)


def test_a_users_module_is_traced_by_every_trainer():
  assert step(sft(model=Wider()))[1] == 2
  assert step(sft(model=Wider()))[1] == 2


def test_pairs_and_policies_share_steps():
  pairs = lambda: preferences.trainer(ref=preferences.model(1))
  grpo = clusters.grpo
  for build, run in (
    (pairs, lambda t: t.train_step(preferences.pairs())),
    (grpo, lambda t: t.train(clusters.prompts(1))),
  ):
    counts = []
    for _ in range(2):
      with trainers.compilations(fresh=False) as names:
        run(build())
      counts.append(names.count("jit(step)"))
    assert counts[0] > 0 and counts[1] == 0


def test_a_dropped_trainer_leaves_no_weights():
  trainer = sft()
  step(trainer)
  held = [weakref.ref(x) for x in jax.tree.leaves(nnx.state(trainer.model))]
  held += [weakref.ref(trainer), weakref.ref(trainer.model)]
  del trainer
  gc.collect()
  assert not any(ref() is not None for ref in held)


def test_the_programs_of_old_trainers_are_freed():
  model = toys.model(num_layers=1)
  trainer = sft(model=model)
  built = weakref.ref(trainer._state._train_step(skip_jit=False))
  trainer.close()
  del trainer
  for rate in range(shared_steps.MOST):
    gc.collect()
    assert built() is not None
    trainer = sft(model=model, tx=optimizers.sgd(10.0 + rate))
    trainer._state._train_step(skip_jit=False)
    trainer.close()
  gc.collect()
  assert built() is None


@dataclasses.dataclass(frozen=True)
class Users:
  size: int = 1


@pytest.mark.parametrize(
  ("value", "expected"),
  [
    (1.5, True),
    ((1, "a", None), True),
    (jax.nn.silu, True),
    (next_token_loss, True),
    (toys.config(), True),
    (scaled_loss, False),
    (lambda x: x, False),
    (Users(), False),
    ([1], False),
    (shared_steps.Call.of(next_token_loss, scale=1.0), True),
    (shared_steps.Call.of(next_token_loss, scale=[1.0]), False),
    (shared_steps.Call.of(scaled_loss), False),
  ],
)
def test_what_can_be_compared(value, expected):
  assert shared_steps.is_comparable(value) is expected


@dataclasses.dataclass
class Unhashable:
  """A user's optimizer, an object with the two functions of optax."""

  inner: object

  def init(self, params):
    return self.inner.init(params)

  def update(self, updates, state, params=None):
    return self.inner.update(updates, state, params)


def test_an_optimizer_without_a_hash_trains():
  first, _ = step(sft())
  assert step(sft(tx=Unhashable(optimizers.sgd(0.1))))[0] == first
