import pytest

from tunix.sft import hooks


class TrainOnly(hooks.DataHooks):
  def load_next_train_batch(self, trainer):
    return "batch"


def test_a_method_that_is_not_overridden_is_no_callback():
  found = hooks.callbacks(hooks.DataHooks, TrainOnly())
  assert found["load_next_train_batch"]("trainer") == "batch"
  assert found["load_next_eval_batch"] is None
  names = {name for name in dir(hooks.TrainingHooks) if name.startswith("on_")}
  for nothing in (None, hooks.TrainingHooks(), object()):
    found = hooks.callbacks(hooks.TrainingHooks, nothing)
    assert found == dict.fromkeys(names)


def test_an_attribute_of_the_object_counts():
  plain = type("Plain", (), {})()
  plain.on_train_start = lambda trainer: "seen"
  found = hooks.callbacks(hooks.TrainingHooks, plain)
  assert found["on_train_start"]("trainer") == "seen"


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


@pytest.mark.parametrize(
  ("kind", "name", "nearest"),
  [
    (hooks.TrainingHooks, "on_step_end", "on_eval_step_end"),
    (hooks.TrainingHooks, "on_train_begin", "on_train_end"),
    (hooks.DataHooks, "load_train_batch", "load_next_train_batch"),
  ],
)
def test_a_misspelt_hook_is_refused_with_the_nearest_one(kind, name, nearest):
  for base in (kind, object):
    mine = type("Mine", (base,), {name: lambda self, trainer: None})()
    with pytest.raises(ValueError, match=f"{name}, .* nearest hook is {nearest}"):
      hooks.callbacks(kind, mine)


def test_other_methods_are_fine():
  methods = {"_on_flush": print, "load_state": print, "step": print, "on_top": 3}
  mine = type("Mine", (hooks.TrainingHooks,), methods)()
  assert not any(hooks.callbacks(hooks.TrainingHooks, mine).values())
