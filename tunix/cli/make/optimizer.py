"""Builds optimizers and schedules of optax from their names and arguments."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tunix.cli.settings import rates
from tunix.cli.settings.run import RunSettings
from tunix.cli.settings.spelling import did_you_mean
from tunix.models.adapters import lora_modules
from tunix.sft.config import Schedule
from tunix.sft.steps import shared_steps
from tunix.utils import tree

# Names of schedule arguments: the rate at its peak, the number of steps, and the first
# and last rate.
_RATES = ("peak_value", "init_value", "value")
_LENGTHS = ("decay_steps", "transition_steps")
_ZEROS = ("init_value", "end_value")

# Fields of the decoder's modules that hold matrices.
_MATRICES = ("kernel", "lora_a", "lora_b")
# Weight decay moves them as the Trainer of `transformers` does: embeddings too, but no
# norms and biases.
_DECAY_TARGETS = (*_MATRICES, "conv_kernel", "embedding")
_ALL = (".*",)
# Arguments of optax's optimizers: the decay, and the function that chooses what decays.
_DECAYS = ("weight_decay", "weight_decay_rate")
_ADAM_DECAY = "adam_weight_decay"  # of the parameters that Muon does not train
_DECAY_MASKS = ("mask", "weight_decay_mask")


class Arguments:
  """Keyword arguments that are equal if they are equal JSON; others never are.

  Args:
    values: the arguments by name, as YAML has them.
  """

  def __init__(self, values: Mapping[str, Any]):
    self.values = dict(values)
    try:  # the text tells 1 from 1.0, which give different programs
      self._key: Any = json.dumps(self.values, sort_keys=True)
    except TypeError:  # a function, which may have changed
      self._key = object()

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Arguments) and self._key == other._key

  def __hash__(self) -> int:
    return hash(self._key)


def peak_of(config: RunSettings) -> str | None:
  """Returns the argument of the schedule that `training.learning_rate` sets, or None.

  Raises:
    ValueError: an unknown schedule.
  """
  name = config.schedule.name
  return None if name is None else next(x for x in _RATES if x in _parameters(name))


def _parameters(schedule: str) -> Mapping[str, inspect.Parameter]:
  function = _lookup("schedule.name", schedule, _schedules())
  return inspect.signature(function).parameters


def settle_rate(
  config: RunSettings, num_steps: int | None
) -> tuple[float, dict[str, Any]]:
  """Returns the learning rate and the arguments of the schedule, with defaults.

  The peak (or first) value of a schedule is `training.learning_rate`, its length is the
  length of the run, and required first and last values are 0.

  Args:
    config: settings of the run.
    num_steps: optimizer steps of the run; None if not known in advance.

  Raises:
    ValueError: an unknown schedule or argument, or an argument without a default.
  """
  rate: Any = config.training.learning_rate
  default = rates.rate_of(config).default
  name, args = config.schedule.name, dict(config.schedule.args)
  peak = peak_of(config)
  if name is None or peak is None:
    return default if rate is None else rate, args
  parameters = _parameters(name)
  _check_names(f"schedule {name}", "schedule.args", args, parameters)
  if rate is not None and args.setdefault(peak, rate) != rate:
    raise ValueError(
      f"training.learning_rate is {rate} and schedule.args.{peak} is {args[peak]}, two "
      "names of one setting. Give one of them"
    )
  args.setdefault(peak, default)
  for parameter in _missing(parameters, args):
    if parameter in _ZEROS:
      args[parameter] = 0.0
    elif parameter in _LENGTHS and num_steps is not None:
      args[parameter] = num_steps
    else:
      is_length = parameter in _LENGTHS
      why = " (the number of steps is not known)" if is_length else ""
      raise ValueError(
        f"schedule {name} needs {parameter}{why}: give schedule.args.{parameter}"
        + (", or training.max_steps" if is_length else "")
      )
  return args[peak], args


def build_schedule(config: RunSettings) -> float | Schedule:
  """Returns the learning rate of a settled configuration: a number, or a schedule.

  Raises:
    ValueError: optax refuses the arguments.
  """
  if config.schedule.name is None:
    assert config.training.learning_rate is not None
    return config.training.learning_rate
  return _schedule_of(config.schedule.name, Arguments(config.schedule.args))


@functools.lru_cache(maxsize=shared_steps.MOST)
def _schedule_of(name: str, args: Arguments) -> Schedule:
  """Returns one object for equal settings, which are then one optimizer's."""
  make = _lookup("schedule.name", name, _schedules())
  try:
    schedule = make(**args.values)
    jax.eval_shape(schedule, jnp.zeros((), jnp.int32))
  except (TypeError, ValueError, AttributeError) as error:
    raise ValueError(
      f"schedule {name} refuses {args.values}: {error}; correct schedule.args"
    ) from error
  return schedule


def build_optimizer(
  config: RunSettings, learning_rate: float | Schedule
) -> optax.GradientTransformation:
  """Builds the optimizer, after gradient clipping if `training.max_grad_norm` is set.

  Args:
    config: settled settings of the run.
    learning_rate: number or schedule.

  Raises:
    ValueError: an unknown optimizer or argument, or an optimizer that needs more than
      gradients, such as the loss as a function.
  """
  return _optimizer_of(
    config.optimizer.name,
    Arguments(config.optimizer.args),
    config.optimizer.decay_targets,
    learning_rate,
    config.training.max_grad_norm,
  )


@functools.lru_cache(maxsize=shared_steps.MOST)
def _optimizer_of(
  name: str,
  arguments: Arguments,
  decay_targets: tuple[str, ...] | None,
  learning_rate: float | Schedule,
  max_grad_norm: float | None,
) -> optax.GradientTransformation:
  """Returns one object for equal settings, so that trainers share compiled steps."""
  args = arguments.values
  make = _lookup("optimizer.name", name, _optimizers())
  parameters = inspect.signature(make).parameters
  _check_names(f"optimizer {name}", "optimizer.args", args, parameters)
  mask = _decay_mask(name)
  if decay_targets is not None and decay_targets != _ALL:
    if mask is None:
      raise ValueError(
        f"optimizer.decay_targets is {list(decay_targets)} and optimizer {name} "
        "cannot choose which parameters decay. Leave it out, or use adamw"
      )
    if args.get(_ADAM_DECAY):
      raise ValueError(
        f"optimizer.args.{_ADAM_DECAY} is {args[_ADAM_DECAY]} and "
        f"optimizer.decay_targets is {list(decay_targets)}: the Adam part of {name} "
        "cannot choose which parameters decay. Leave it out, or set "
        "optimizer.decay_targets to ['.*']"
      )
    args = {mask: functools.partial(_decays, decay_targets)} | args
  if name == "muon":
    args = {"muon_weight_dimension_numbers": muon_matrices} | args
  missing = _missing(parameters, {"learning_rate": None, **args})
  if missing:
    raise ValueError(
      f"optimizer {name} needs {missing[0]}: give optimizer.args.{missing[0]}"
    )
  try:
    tx = make(learning_rate=learning_rate, **args)
    _rehearse(tx)
  except (TypeError, ValueError, AttributeError) as error:
    raise ValueError(
      f"optimizer {name} cannot be used with {arguments.values}: {error}; correct "
      "optimizer.args or choose another optimizer"
    ) from error
  if max_grad_norm is None:
    return tx
  return optax.chain(optax.clip_by_global_norm(max_grad_norm), tx)


def settle_decay(config: RunSettings) -> tuple[str, ...] | None:
  """Returns `optimizer.decay_targets` with its default; None: nothing can be chosen."""
  settings = config.optimizer
  if settings.decay_targets is not None or _decay_mask(settings.name) is None:
    return settings.decay_targets
  return _DECAY_TARGETS


def decay_of(config: RunSettings, names: Iterable[str]) -> dict[float, list[str]]:
  """Returns the names of the parameters that decay, by their weight decay.

  A weight decay of 0 is missing.

  Args:
    config: settled settings of the run.
    names: dotted names of the trained parameters.

  Raises:
    ValueError: a target that is no default matches no parameter.
  """
  settings, names = config.optimizer, list(names)
  targets = _ALL if settings.decay_targets is None else settings.decay_targets
  for target in targets:
    is_unused = not any(lora_modules.hits(target, name) for name in names)
    if is_unused and target not in _DECAY_TARGETS:
      raise ValueError(
        f"optimizer.decay_targets has {target!r}, which matches no parameter; expected "
        f"last parts or regular expressions of names such as {names[0]}"
      )
  parameters = inspect.signature(_optimizers()[settings.name]).parameters
  chosen = [name for name in names if _is_hit(name, targets)]
  parts = {argument: chosen for argument in _DECAYS if argument in parameters}
  if _ADAM_DECAY in parameters:
    parts = {argument: list(filter(_is_matrix, chosen)) for argument in parts}
    parts[_ADAM_DECAY] = [name for name in names if not _is_matrix(name)]
  patterns: dict[float, list[str]] = {}
  for argument, moved in parts.items():
    if value := settings.args.get(argument, parameters[argument].default):
      patterns.setdefault(value, []).extend(moved)
  return patterns


def _decay_mask(name: str) -> str | None:
  """Returns the argument of an optimizer that chooses what decays, or None."""
  parameters = inspect.signature(_lookup("optimizer.name", name, _optimizers()))
  return next((x for x in _DECAY_MASKS if x in parameters.parameters), None)


def _decays(targets: tuple[str, ...], params: object) -> Any:
  """Returns True for each parameter that decays, in the form of `params`."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: _is_hit(tree.path_name(path), targets), params
  )


def _is_hit(name: str, targets: tuple[str, ...]) -> bool:
  return any(lora_modules.hits(target, name) for target in targets)


def build_critic_optimizer(
  config: RunSettings, critic_rate: float | None
) -> optax.GradientTransformation:
  """Builds the optimizer of a critic.

  Args:
    config: settled settings of the run.
    critic_rate: learning rate that replaces `training.learning_rate`; a schedule is
      scaled to it as a whole. None: the rate of the policy.

  Raises:
    ValueError: as for `build_optimizer`; or the policy's rate is 0, so that its
      schedule cannot be scaled.
  """
  rate = build_schedule(config)
  if critic_rate is None:
    return build_optimizer(config, rate)
  if not callable(rate):
    return build_optimizer(config, critic_rate)
  if not config.training.learning_rate:
    raise ValueError(
      f"rl.critic_learning_rate is {critic_rate} and the schedule's rate is 0, which "
      "cannot be scaled. Give training.learning_rate"
    )
  scale = critic_rate / float(config.training.learning_rate)  # pyright: ignore[reportArgumentType]
  return build_optimizer(config, lambda step: scale * rate(step))


def muon_matrices(params: object) -> Any:
  """Returns, for optax's Muon, the axes of each parameter's matrix; None means Adam.

  The kernels and adapters of all layers are stacked as [L, in, out], and the last two
  axes of each are a matrix. optax's default goes by the number of dimensions and would
  choose the stacked norms [L, D], the embedding and the head instead.

  Args:
    params: parameters as a pytree.
  """

  def axes(path: jax.tree_util.KeyPath, _: object) -> Any:
    is_matrix = _is_matrix(tree.path_name(path))
    return optax.contrib.MuonDimensionNumbers(-2, -1) if is_matrix else None

  return jax.tree_util.tree_map_with_path(axes, params)


def _is_matrix(name: str) -> bool:
  *parents, field = name.split(".")
  return "layers" in parents and field in _MATRICES


def _rehearse(tx: optax.GradientTransformation) -> None:
  """Traces one update as the trainer does it, so that errors show before the run."""

  def update(params):
    return tx.update(params, tx.init(params), params)

  # Shapes, because the devices of a plan's mesh need not exist.
  def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)

  layers = {"q_proj": {"kernel": shape(2, 3, 4)}, "norm": shape(2, 3)}
  jax.eval_shape(update, {"layers": layers, "embedding": shape(5, 3)})


def _missing(
  parameters: Mapping[str, inspect.Parameter], args: Mapping[str, Any]
) -> list[str]:
  return [
    name
    for name, parameter in parameters.items()
    if name not in args and parameter.default is parameter.empty
  ]


def _schedules() -> dict[str, Callable[..., Any]]:
  """Returns optax's schedules with a rate among their arguments, by name."""
  return {
    name: function
    for name, function in vars(optax.schedules).items()
    if inspect.isfunction(function)
    and set(_RATES) & set(inspect.signature(function).parameters)
  }


def _optimizers() -> dict[str, Callable[..., Any]]:
  """Returns optax's functions of a learning rate; optax wins over optax.contrib."""
  return {
    name: function
    for module in (optax.contrib, optax)
    for name, function in vars(module).items()
    if inspect.isfunction(function)
    and not name.startswith(("_", "scale_by_"))
    and "learning_rate" in inspect.signature(function).parameters
  }


def _lookup(
  key: str, name: str, functions: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
  if name in functions:
    return functions[name]
  remedy = did_you_mean(name, functions, f"use one of {', '.join(sorted(functions))}")
  raise ValueError(f"{key} {name!r} is unknown to optax: {remedy}")


def _check_names(
  owner: str, key: str, args: Mapping[str, Any], parameters: Mapping[str, Any]
) -> None:
  names = [name for name in parameters if name != "learning_rate"]
  for name in args:
    if name not in parameters:
      remedy = did_you_mean(name, names, f"it takes {', '.join(names)}")
      raise ValueError(f"{key}.{name} is no argument of {owner}: {remedy}")
