import pytest

from tunix.sft import hooks


class OnlyEnd:
  """What a user may pass: no base class, one method."""

  def on_train_end(self, trainer):
    return f"end of {trainer}"


class Counting(hooks.TrainingHooks):
  def on_train_step_end(self, trainer, train_step, train_loss):
    return train_step, train_loss


class TrainOnly(hooks.DataHooks):
  def load_next_train_batch(self, trainer):
    return "batch"


def test_call_runs_what_is_there_and_skips_the_rest():
  assert hooks.call(OnlyEnd(), "on_train_end", "t") == "end of t"
  assert hooks.call(OnlyEnd(), "on_train_start", "t") is None
  assert hooks.call(Counting(), "on_train_step_end", "t", 3, 0.5) == (3, 0.5)
  assert hooks.call(None, "on_train_start", "t") is None


def test_a_method_that_is_not_overridden_is_not_provided():
  assert hooks.provides(TrainOnly(), "load_next_train_batch")
  assert not hooks.provides(TrainOnly(), "load_next_eval_batch")
  assert not hooks.provides(hooks.TrainingHooks(), "on_train_start")


def test_an_attribute_of_the_object_counts():
  base = hooks.TrainingHooks()
  assert not hooks.provides(base, "on_train_start")
  plain = type("Plain", (), {})()
  plain.on_train_start = lambda trainer: "seen"
  assert hooks.call(plain, "on_train_start", "t") == "seen"


@pytest.mark.parametrize(
  ("method", "arguments"),
  [
    ("on_train_start", ()),
    ("on_train_end", ()),
    ("on_train_step_start", ()),
    ("on_train_step_end", (1, 0.5)),
    ("on_eval_step_start", ()),
    ("on_eval_step_end", (0.5,)),
  ],
)
def test_the_base_class_does_nothing(method, arguments):
  assert getattr(hooks.TrainingHooks(), method)("trainer", *arguments) is None
