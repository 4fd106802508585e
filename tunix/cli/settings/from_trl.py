"""Translates a configuration of TRL into keys of `tunix train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any

from tunix.cli.settings.spelling import ELSEWHERE

# TRL's name -> our key, of the same meaning and unit.
_SAME = {
  "output_dir": "output_dir",
  "seed": "seed",
  "run_name": "logging.run_name",
  "project": "logging.project_name",
  "model_name_or_path": "model.path",
  "lora_r": "lora.rank",
  "lora_alpha": "lora.alpha",
  "lora_dropout": "lora.dropout",
  "lora_target_modules": "lora.targets",
  "lora_modules_to_save": "lora.modules_to_save",
  "use_rslora": "lora.use_rslora",
  "use_dora": "lora.use_dora",
  "learning_rate": "training.learning_rate",
  "max_grad_norm": "training.max_grad_norm",
  "eval_steps": "training.eval_every_n_steps",
  "save_steps": "checkpoint.save_every_n_steps",
  "save_total_limit": "checkpoint.max_to_keep",
  "weight_decay": "optimizer.args.weight_decay",
  "adam_beta1": "optimizer.args.b1",
  "adam_beta2": "optimizer.args.b2",
  "adam_epsilon": "optimizer.args.eps",
  "max_length": "data.max_length",
  "packing": "data.packing",
  "label_smoothing": "preference.label_smoothing",
  "num_generations": "algorithm.num_generations",
  "num_iterations": "algorithm.num_iterations",
  "epsilon": "algorithm.epsilon",
  "delta": "algorithm.epsilon_c",
  "mask_truncated_completions": "algorithm.mask_truncated",
  "temperature": "rollout.temperature",
  "top_p": "rollout.top_p",
  "min_p": "rollout.min_p",
  "max_completion_length": "rollout.max_tokens_to_generate",
  "reward_weights": "reward.weights",
}
_ADVANTAGES = {
  **dict.fromkeys(("group", "True"), "group_normalized"),
  **dict.fromkeys(("none", "False"), "group_centered"),
  "batch": "batch_scaled",
}
_REDUCTIONS = {
  "dapo": "token-mean",
  "grpo": "sequence-mean-token-mean",
  "dr_grpo": "sequence-mean-token-scale",
  "sapo": "sequence-mean-token-mean",
  "cispo": "token-mean",
  "luspo": "sequence-mean-token-sum",
}
_LOSS_ALGOS = {"sapo": "sapo", "cispo": "cispo", "luspo": "gspo"}
# Names that need no key: the value has no effect, or is what tunix does anyway.
_NOT_NEEDED = {"bf16", "fp16", "use_peft", "dataset_train_split"}
_NOT_NEEDED |= {"assistant_only_loss", "completion_only_loss"}
# Values that ask for nothing, or for what tunix does anyway.
_NOTHING = (False, 0, "no", "none", "main", "auto", "constant", -1, [])
_BATCH = "per_device_train_batch_size", "gradient_accumulation_steps"
# Whole numbers that a translation computes with, and their least values.
_LEAST = {**dict.fromkeys((*_BATCH, "num_generations"), 1), "max_steps": -1}
_BACKENDS = ("wandb", "tensorboard")
# Defaults of TRL 1.16 that differ from ours.
_DEFAULTS = {"num_train_epochs": 3, "weight_decay": 0.0, _BATCH[0]: 8, _BATCH[1]: 1}
_LORA = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
_DEFAULTS_OF = {
  "sft": {"learning_rate": 2e-5},
  "dpo": {"learning_rate": 1e-6},
  "kto": {"learning_rate": 1e-6},
  "reward": {"learning_rate": 1e-4},
  "grpo": {
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "beta": 0.0,
    "use_bias_correction_kl": True,
  },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation:
  """The result of `translate`.

  Attributes:
    values: our keys with their values.
    names: TRL's name for each key of `values`.
    left: TRL's names without a counterpart, each with a sentence about it.
  """

  values: Mapping[str, Any]
  names: Mapping[str, str]
  left: Mapping[str, str]


def translate(
  job: str, options: Mapping[str, Any], known: Container[str]
) -> Translation:
  """Translates the options of a YAML file of `trl JOB --config FILE`.

  Args:
    job: our job; its TRL trainer reads the file.
    options: the content of the file.
    known: dotted keys of the job.
  """
  values: dict[str, Any] = {}
  names: dict[str, str] = {}
  options = {name: value for name, value in options.items() if value is not None}
  left = _differences(job, options)
  for name, least in _LEAST.items():
    if name in options and (type(options[name]) is not int or options[name] < least):
      value = options.pop(name)
      left[name] = f"{value!r} is no whole number of at least {least}"
  has_lora = options.get("use_peft", "lora_r" in options)
  defaults = _DEFAULTS | _DEFAULTS_OF.get(job, {}) | (_LORA if has_lora else {})
  if options.get("max_steps", -1) > 0:
    del defaults["num_train_epochs"]
  explicit, options = options.keys(), defaults | dict(options)
  for name, value in options.items():
    if name in _NOT_NEEDED or name in _BATCH:
      continue
    special = _SPECIAL.get(name, lambda job, value, options: {})
    ours = special(job, value, options)
    if name in _SAME:
      ours = {_SAME[name]: value}

    def is_key(key):
      return key in known or key.rpartition(".")[0] == "optimizer.args"

    ours = {key: value for key, value in ours.items() if is_key(key)}
    values |= ours
    names |= dict.fromkeys(ours, name)
    if not ours and name in explicit - left.keys() and value not in _NOTHING:
      is_ours = name in _SAME or name in _SPECIAL
      near = f"see {ELSEWHERE[name]}" if name in ELSEWHERE else "no counterpart"
      left[name] = f"no counterpart of {value!r} in the job {job}" if is_ours else near
  if not has_lora:
    values = {k: v for k, v in values.items() if not k.startswith("lora.")}
  if options.get("bf16") or options.get("fp16"):
    values.setdefault("model.dtype", "bfloat16" if options.get("bf16") else "float16")
  sizes = _batch(job, options, left)
  names |= dict.fromkeys(sizes, _BATCH[0])
  return Translation(values=values | sizes, names=names, left=left)


def _differences(job: str, options: Mapping[str, Any]) -> dict[str, str]:
  """Returns sentences about options whose default or part differs here."""
  left = {}
  if options.get("lr_scheduler_type") != "constant":
    left["lr_scheduler_type"] = (
      "set schedule.name and schedule.args; TRL's default is linear, ours constant"
    )
  if job == "sft" and not options.get("assistant_only_loss"):
    left["assistant_only_loss"] = (
      "of conversations, tunix trains the assistant's turns only, and TRL trains all "
      "turns unless this is true"
    )
  if options.get("completion_only_loss") is False:
    left["completion_only_loss"] = "tunix trains completions and never their prompts"
  trackers = _several(options.get("report_to", "none"))
  if others := [str(x) for x in trackers if x not in (*_BACKENDS, "none")]:
    left["report_to"] = f"no counterpart of {', '.join(others)}"
  return left


def _several(value: object) -> list[Any]:
  return value if isinstance(value, list) else [value]


def _batch(
  job: str, options: Mapping[str, Any], left: dict[str, str]
) -> dict[str, int]:
  """Returns the batch sizes of one device; RL counts prompts, TRL completions."""
  rows, steps = options[_BATCH[0]], options[_BATCH[1]]
  left.setdefault(
    _BATCH[0],
    "this is for one device; multiply training.global_batch_size by the number of "
    "devices",
  )
  if job not in ("grpo", "ppo"):
    sizes = {"training.global_batch_size": rows * steps}
    return sizes | {"training.micro_batch_size": rows}
  prompts = max(rows * steps // options.get("num_generations", 1), 1)
  return {"training.global_batch_size": prompts}


def _loss(job: str, value: object, options: Mapping[str, Any]) -> dict[str, Any]:
  if job in ("grpo", "ppo"):
    ours: dict[str, Any] = {"algorithm.loss_agg_mode": _REDUCTIONS.get(str(value))}
    ours["algorithm.loss_algo"] = _LOSS_ALGOS.get(str(value))
    # TRL's weight of CISPO has no lower bound, which is a distance of 1 here.
    ours["algorithm.epsilon_low"] = 1.0 if value == "cispo" else None
    return {key: value for key, value in ours.items() if value is not None}
  names = _several(value)
  return {"preference.loss": names[0]} if len(names) == 1 else {}


def _level(job: str, value: object, options: Mapping[str, Any]) -> dict[str, Any]:
  loss = options.get("loss_type", "dapo")
  if value == "token":
    return _loss(job, loss, options)
  of_completions = ("dapo", "grpo", "dr_grpo", "bnpo", "luspo")
  is_gspo = value == "sequence" and loss in of_completions
  return {"algorithm.loss_algo": "gspo"} if is_gspo else {}


def _upper(job: str, value: object, options: Mapping[str, Any]) -> dict[str, Any]:
  # TRL's bound of CISPO is that of the weight itself, ours a distance from 1.
  if options.get("loss_type") == "cispo" and isinstance(value, int | float):
    return {"algorithm.epsilon_high": value - 1}
  return {"algorithm.epsilon_high": value}


_BETAS = {
  **dict.fromkeys(("grpo", "ppo"), "algorithm.beta"),
  "orpo": "preference.lambda_orpo",
}


# TRL's name -> function from (job, value, options) to our keys; {}: no counterpart.
_SPECIAL: Mapping[str, Callable[[str, Any, Mapping[str, Any]], dict[str, Any]]] = {
  "beta": lambda job, value, options: {_BETAS.get(job, "preference.beta"): value},
  "loss_type": _loss,
  "importance_sampling_level": _level,
  "epsilon_high": _upper,
  "scale_rewards": lambda job, value, options: (
    {"algorithm.advantage_estimator": _ADVANTAGES[str(value)]}
    if str(value) in _ADVANTAGES
    else {}
  ),
  "dataset_name": lambda job, value, options: {
    "data.train": f"hf:{value}(split={options.get('dataset_train_split', 'train')!r})"
  },
  "model_revision": lambda job, value, options: (
    {} if value == "main" else {"model.revision": value}
  ),
  "max_steps": lambda job, value, options: (
    {"training.max_steps": value} if value > 0 else {}
  ),
  "num_train_epochs": lambda job, value, options: {
    # TRL's type is float.
    "data.num_epochs": int(value) if str(value).endswith(".0") else value
  },
  "shuffle_dataset": lambda job, value, options: (
    {"data.shuffle": value} if job == "grpo" else {}
  ),
  "dtype": lambda job, value, options: (
    {"model.dtype": value} if value != "auto" else {}
  ),
  "gradient_checkpointing": lambda job, value, options: (
    {"model.remat": "block"} if value else {}
  ),
  "load_in_4bit": lambda job, value, options: (
    {"model.quantize": "nf4"} if value else {}
  ),
  "load_in_8bit": lambda job, value, options: (
    {"model.quantize": "int8"} if value else {}
  ),
  "use_bias_correction_kl": lambda job, value, options: (
    {"algorithm.kl_corrected": value} if options.get("beta") else {}
  ),
  "top_k": lambda job, value, options: {"rollout.top_k": value} if value else {},
  "report_to": lambda job, value, options: {
    f"logging.{name}": True for name in _several(value) if name in _BACKENDS
  },
}
