import pytest

from tunix.sft import hooks


class TrainOnly(hooks.DataHooks):
  def load_next_train_batch(self, trainer):
    return "batch"


def test_a_method_that_is_not_overridden_is_not_provided():
  assert hooks.provides(TrainOnly(), "load_next_train_batch")
  assert not hooks.provides(TrainOnly(), "load_next_eval_batch")
  assert not hooks.provides(hooks.TrainingHooks(), "on_train_start")


def test_an_attribute_of_the_object_counts():
  base = hooks.TrainingHooks()
  assert not hooks.provides(base, "on_train_start")
  plain = type("Plain", (), {})()
  plain.on_train_start = lambda trainer: "seen"
  assert hooks.provides(plain, "on_train_start")


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
