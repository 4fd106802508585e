"""The defaults of older versions, which runs that they began keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix.cli.make import optimizer
from tunix.cli.settings import keys
from tunix.cli.settings.convert import plain
from tunix.cli.settings.run import RunSettings

# Keys that older versions did not have, with the values that stand for what they did.
# A run whose config.yaml lacks such a key resumes with this value.
_FORMER = {
  "data.pad_to": "max_length",
  "data.reasoning": "keep",
  "optimizer.decay_targets": (".*",),
  "tokenizer.add_bos": True,
  "tokenizer.messages": "given",
}
# Keys of `_FORMER` that no older version has. A run that was begun since then has
# another value of one of them, unless all were given.
_NEWEST = ("optimizer.decay_targets", "tokenizer.add_bos", "tokenizer.messages")
# Keys whose default was False, with the one of today.
_FORMERLY_FALSE = {"rl.bucketed_lengths": True, "preference.shared_prompt": None}
# The former default of algorithm.num_generations, and the one of today.
_FORMER_GENERATIONS = (2, 8)


def has_all(config: RunSettings) -> bool:
  """Returns True for the settings of a run that an older version began."""
  values = keys.flatten(config)
  return all(values[key] in (_FORMER[key], plain(_FORMER[key])) for key in _NEWEST)


def restore(config: RunSettings, written: Mapping[str, Any]) -> RunSettings:
  """Returns settings with former defaults for keys that are not set.

  They apply if an older version began the run, and the file lacks the key or has the
  former default: a resumed run writes it down. The keys that were formerly False stay
  so in any folder that says False, unless another value than the default is set.

  Args:
    config: the settings.
    written: nested values of the config.yaml of a folder.
  """
  values = keys.flatten(config)

  def before(dotted: str, default: object) -> Any:
    section, _, name = dotted.partition(".")
    return (written.get(section) or {}).get(name, default)

  for dotted, now in _FORMERLY_FALSE.items():
    is_now = dotted in values and values[dotted] is now
    if is_now and before(dotted, None) is False:
      config = keys.with_value(config, dotted, False)
  # A file of an older version lacks the newest key, or a resumed run wrote all former
  # values into it.
  if "decay_targets" in (written.get("optimizer") or {}) and any(
    before(key, _FORMER[key]) not in (_FORMER[key], plain(_FORMER[key]))
    for key in _NEWEST
  ):
    return config
  for dotted, value in _FORMER.items():
    is_null = dotted in values and values[dotted] is None
    if is_null and before(dotted, value) in (value, plain(value)):
      config = keys.with_value(config, dotted, value)
  # Defaults that changed. Older versions wrote null for them, or their values.
  rate = 1e-5 if config.lora is None else 2e-4
  gives_rate = config.training.learning_rate is not None
  gives_rate |= optimizer.peak_of(config) in config.schedule.args
  if not gives_rate and before("training.learning_rate", None) in (None, rate):
    config = keys.with_value(config, "training.learning_rate", rate)
  former, now = _FORMER_GENERATIONS
  is_now = values.get("algorithm.num_generations") == now
  if is_now and before("algorithm.num_generations", None) in (None, former):
    config = keys.with_value(config, "algorithm.num_generations", former)
  return config
