"""Optimizers and schedules by their optax names."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tunix.cli.settings.run import RunSettings
from tunix.sft.config import Schedule
from tunix.utils import tree

FULL_RATE = 1e-5
LORA_RATE = 2e-4

# What a schedule calls the rate at its height, and its length.
_RATES = ("peak_value", "init_value", "value")
_LENGTHS = ("decay_steps", "transition_steps")
_ZEROS = ("init_value", "end_value")

# Fields of the decoder's modules that hold matrices.
_MATRICES = ("kernel", "lora_a", "lora_b")


def settle(config: RunSettings, num_steps: int | None) -> RunSettings:
  """The configuration with learning rate and schedule arguments written out.

  A schedule's peak (or first) value is `training.learning_rate`, its length the run's,
  and what it needs besides of first and last values is 0.

  Args:
    config: of the run.
    num_steps: optimizer steps of the run; None: not known beforehand.

  Raises:
    ValueError: an unknown schedule or argument, or one that cannot be filled in.
  """
  rate: Any = config.training.learning_rate
  if config.schedule.name is None:
    return _with_rate(config, _default_rate(config) if rate is None else rate)
  name, args = config.schedule.name, dict(config.schedule.args)
  parameters = inspect.signature(
    _lookup("schedule.name", name, _schedules())
  ).parameters
  _check_names(f"schedule {name}", "schedule.args", args, parameters)
  height = next(parameter for parameter in _RATES if parameter in parameters)
  if rate is not None and args.setdefault(height, rate) != rate:
    raise ValueError(
      f"training.learning_rate is {rate} and schedule.args.{height} {args[height]}, "
      "two names of one setting: give one of them"
    )
  args.setdefault(height, _default_rate(config))
  for parameter in _missing(parameters, args):
    if parameter in _ZEROS:
      args[parameter] = 0.0
    elif parameter in _LENGTHS and num_steps is not None:
      args[parameter] = num_steps
    else:
      why = " (the number of steps is not known)" if parameter in _LENGTHS else ""
      raise ValueError(
        f"schedule {name} needs {parameter}{why}: give schedule.args.{parameter}"
        + (", or training.max_steps" if why else "")
      )
  schedule = dataclasses.replace(config.schedule, args=args)
  return _with_rate(dataclasses.replace(config, schedule=schedule), args[height])


def build_schedule(config: RunSettings) -> float | Schedule:
  """The learning rate of a settled configuration: a number or a function of the step.

  Raises:
    ValueError: optax refuses the arguments.
  """
  if config.schedule.name is None:
    assert config.training.learning_rate is not None
    return config.training.learning_rate
  make = _lookup("schedule.name", config.schedule.name, _schedules())
  try:
    schedule = make(**config.schedule.args)
    jax.eval_shape(schedule, jnp.zeros((), jnp.int32))
  except (TypeError, ValueError, AttributeError) as error:
    raise ValueError(
      f"schedule {config.schedule.name} refuses {config.schedule.args}: {error}; "
      "correct schedule.args"
    ) from error
  return schedule


def build_optimizer(
  config: RunSettings, learning_rate: float | Schedule
) -> optax.GradientTransformation:
  """The optimizer, behind gradient clipping when that is asked for.

  Raises:
    ValueError: an unknown optimizer or argument, or one that needs more than gradients
      (a closure of the loss, for example).
  """
  name, args = config.optimizer.name, config.optimizer.args
  make = _lookup("optimizer.name", name, _optimizers())
  parameters = inspect.signature(make).parameters
  _check_names(f"optimizer {name}", "optimizer.args", args, parameters)
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
      f"optimizer {name} cannot be used with {config.optimizer.args}: {error}; correct "
      "optimizer.args or choose another optimizer"
    ) from error
  if config.training.max_grad_norm is None:
    return tx
  return optax.chain(optax.clip_by_global_norm(config.training.max_grad_norm), tx)


def build_critic_optimizer(
  config: RunSettings, critic_rate: float | None
) -> optax.GradientTransformation:
  """The same for a critic: at `critic_rate` (`rl.critic_learning_rate`) where that is
  set, instead of `training.learning_rate`; a schedule is scaled as a whole.

  Raises:
    ValueError: see `build_optimizer`, or a schedule of rate 0 that cannot be scaled.
  """
  rate = build_schedule(config)
  if critic_rate is None:
    return build_optimizer(config, rate)
  if not callable(rate):
    return build_optimizer(config, critic_rate)
  if not config.training.learning_rate:
    raise ValueError(
      f"rl.critic_learning_rate is {critic_rate} and the schedule's rate 0, which "
      "cannot be scaled to it: give training.learning_rate"
    )
  scale = critic_rate / float(config.training.learning_rate)  # pyright: ignore[reportArgumentType]
  return build_optimizer(config, lambda step: scale * rate(step))


def muon_matrices(params: Any) -> Any:
  """For optax's Muon: which axes of each parameter are one matrix; None: use Adam.

  The kernels and adapters of the layers are matrices, each layer's on its own: they
  lie stacked as [L, in, out]. Left to itself, optax goes by the number of dimensions
  and would take the stacked norms [L, D], the embedding and the head instead.
  """

  def axes(path: Any, _: Any) -> Any:
    *parents, field = tree.path_name(path).split(".")
    is_matrix = "layers" in parents and field in _MATRICES
    return optax.contrib.MuonDimensionNumbers(-2, -1) if is_matrix else None

  return jax.tree_util.tree_map_with_path(axes, params)


def _rehearse(tx: optax.GradientTransformation) -> None:
  """Traces one update as the trainer does it, so that misfits show at once."""

  def update(params):
    return tx.update(params, tx.init(params), params)

  # No arrays: a plan's mesh is of devices that are not here.
  of = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
  layers = {"q_proj": {"kernel": of(2, 3, 4)}, "norm": of(2, 3)}
  jax.eval_shape(update, {"layers": layers, "embedding": of(5, 3)})


def _default_rate(config: RunSettings) -> float:
  return FULL_RATE if config.lora is None else LORA_RATE


def _with_rate(config: RunSettings, rate: float) -> RunSettings:
  training = dataclasses.replace(config.training, learning_rate=rate)
  return dataclasses.replace(config, training=training)


def _missing(
  parameters: Mapping[str, inspect.Parameter], args: Mapping[str, Any]
) -> list[str]:
  return [
    name
    for name, parameter in parameters.items()
    if name not in args and parameter.default is parameter.empty
  ]


def _schedules() -> dict[str, Callable[..., Any]]:
  """optax's schedules that have a rate among their arguments."""
  functions = {
    name: f for name, f in vars(optax.schedules).items() if inspect.isfunction(f)
  }
  return {
    name: f
    for name, f in functions.items()
    if set(_RATES) & set(inspect.signature(f).parameters)
  }


def _optimizers() -> dict[str, Callable[..., Any]]:
  """optax's functions of a learning rate; its own before those of contrib."""
  optimizers = {}
  for module in (optax.contrib, optax):
    for name, f in vars(module).items():
      public = inspect.isfunction(f) and not name.startswith(("_", "scale_by_"))
      if public and "learning_rate" in inspect.signature(f).parameters:
        optimizers[name] = f
  return optimizers


def _lookup(
  key: str, name: str, known: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
  if name in known:
    return known[name]
  near = difflib.get_close_matches(name, known, n=1)
  remedy = (
    f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(known))}"
  )
  raise ValueError(f"{key} {name!r} is unknown to optax: {remedy}")


def _check_names(
  owner: str, key: str, args: Mapping[str, Any], parameters: Mapping[str, Any]
) -> None:
  for name in args:
    if name not in parameters:
      known = [p for p in parameters if p != "learning_rate"]
      near = difflib.get_close_matches(name, known, n=1)
      remedy = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
      raise ValueError(f"{key}.{name} is no argument of {owner}: {remedy}")
