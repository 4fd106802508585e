"""Other spellings of keys: of earlier versions and of other libraries."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from tunix.cli.settings.convert import without_text

# Second names of keys, as good as the first.
ALIASES = {
  "checkpoint.every_n_steps": "checkpoint.save_every_n_steps",
  "dataset_name": "data.train",
  "model.quantise": "model.quantize",
}

# Old spelling -> new spelling.
RENAMED = {
  "lora.rslora": "lora.use_rslora",
  "lora.dora": "lora.use_dora",
}

# Defaults of earlier versions, which stand in files of all keys.
FORMER_DEFAULTS = {
  "preference.max_prompt_length": 512,
  "preference.max_response_length": 512,
  "preference.shared_prompt": False,
  "rl.bucketed_lengths": False,
}

# Values of other libraries that mean the default of a key.
_DEFAULTS = {"lora.targets": "all-linear"}

# Our key, with advice -> names of the option in transformers, TRL, torchtune, axolotl
# and verl. The error about such a name gives our key. The value is not taken over: it
# may mean another thing here.
_FOREIGN = {
  "--dry-run": "dry_run",
  "--print-config": "print_config",
  "--tiny": "tiny",
  "training.learning_rate": "lr actor_lr max_lr",
  "data.num_epochs": "num_train_epochs epochs num_epochs total_epochs n_epochs",
  "training.max_steps": (
    "num_train_steps total_training_steps max_steps_per_epoch num_steps"
  ),
  "training.micro_batch_size (rows over all devices)": (
    "per_device_train_batch_size ppo_micro_batch_size micro_batch_size"
  ),
  "training.global_batch_size (rows of an optimizer step)": (
    "batch_size train_batch_size"
  ),
  (
    "training.micro_batch_size: global_batch_size / micro_batch_size micro-batches "
    "make a step"
  ): "gradient_accumulation_steps",
  "training.eval_batch_size (rows over all devices)": "per_device_eval_batch_size",
  "model.dtype": "precision bf16 fp16 torch_dtype mixed_precision",
  "data.max_length": "max_length max_seq_length max_seq_len sequence_len cutoff_len",
  "data.packing": "sample_packing",
  "model.path": "model_name_or_path base_model pretrained",
  "data.train": (
    "dataset train_dataset train_file data_path train_files datasets dataset_path "
    "data_files"
  ),
  "data.eval": "eval_dataset validation_file val_files",
  "lora.rank": "lora_r lora_rank r",
  "lora.alpha": "lora_alpha",
  "lora.modules_to_save": "modules_to_save",
  "lora.targets": "lora_target_modules target_modules",
  "schedule.name": "warmup_steps warmup_ratio lr_scheduler_type lr_scheduler",
  "optimizer.name": "optim optimizer_name optimizer_type",
  "optimizer.args: {weight_decay: ...}": "weight_decay",
  "training.max_grad_norm": "gradient_clipping clip_grad_norm grad_clip max_norm",
  "model.remat": (
    "gradient_checkpointing activation_checkpointing enable_activation_checkpointing"
  ),
  "model.quantize": "load_in_4bit load_in_8bit",
  "checkpoint.save_every_n_steps": (
    "save_steps save_freq save_every save_interval checkpoint_every checkpoint_steps "
    "checkpoint_interval"
  ),
  "checkpoint.max_to_keep": "save_total_limit",
  "training.best.patience": "early_stopping_patience patience early_stopping",
  "training.best.min_delta": "early_stopping_threshold min_delta",
  "training.best.metric": "metric_for_best_model best_metric monitor",
  "training.best.greater_is_better": "greater_is_better best_mode",
  "export.checkpoint: best, with training.best": (
    "load_best_model_at_end save_best save_best_only keep_best"
  ),
  "not needed: the same command resumes": "resume resume_from_checkpoint",
  "not there: give another output_dir": "overwrite_output_dir",
  "data.length_buckets, or data.packing": "group_by_length",
  "not needed: unused columns are ignored": "remove_unused_columns",
  "data.eval, a file of its own": "val_set_size eval_split",
  "optimizer.args": "adam_beta1 adam_beta2 adam_epsilon",
  "data.columns: {text: ...}": "dataset_text_field",
  "lora.use_dora": "use_dora",
  "lora.use_rslora": "use_rslora",
  "lora.dropout": "lora_dropout",
  "logging.run_name": "run_name",
  "logging.project_name": "wandb_project",
  "model.attention": "attn_implementation flash_attention",
  "tokenizer.chat_template": "chat_template",
  "tokenizer.path": "processing_class tokenizer_name_or_path",
  "algorithm.num_generations": "num_generations rollout_n",
  "algorithm.epsilon": "clip_ratio",
  "seed": "random_seed",
  "training.eval_every_n_steps": "eval_steps test_freq eval_every eval_interval",
  "the section logging": "logging_steps",
  (
    "logging.tensorboard, logging.wandb or logging.console, which are all backends; "
    "another one is a class in Python, see docs/guides/extend/metrics_backend.md"
  ): (
    "report_to log_with loggers backend backends trackio mlflow comet comet_ml neptune "
    "clearml swanlab aim dvclive"
  ),
  "rollout.max_prompt_length, in preferences preference.max_prompt_length": (
    "max_prompt_length"
  ),
  "distill.teacher": "teacher_model teacher_model_name_or_path teacher_path",
  "rollout.max_tokens_to_generate": "max_new_tokens",
  "rollout.max_tokens_to_generate, in preferences preference.max_response_length": (
    "max_completion_length"
  ),
  "reward.functions": "reward_funcs reward_fn",
  "algorithm.beta, in preferences preference.beta": "beta kl_coef",
  "mesh: {tp: ...}": "tensor_parallel_size",
  "mesh: {fsdp: ...}": "fsdp fsdp_config deepspeed",
}
# Name in another library -> our key, with advice.
ELSEWHERE = {name: ours for ours, names in _FOREIGN.items() for name in names.split()}


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
  """Returns the advice about an unknown name: the nearest known one, or `otherwise`."""
  near = difflib.get_close_matches(name, known, n=1)
  return f"did you mean {near[0]}?" if near else otherwise


def by_words(key: str, known: Iterable[str]) -> str | None:
  """Returns the known key that shares the most words with `key`; None below two.

  `training.checkpoint_every` is `checkpoint.save_every_n_steps`: a word of the name may
  be the section, and the section itself is no evidence.
  """
  words = set(key.rpartition(".")[2].split("_"))
  shared = {name: len(words & set(re.split(r"[._]", name))) for name in known}

  # Of several keys, one of the training, and the one with the fewest further words.
  def of_training(name):
    return not name.startswith("eval.")

  best = max(shared, key=lambda name: (shared[name], of_training(name), -len(name)))
  return best if shared[best] > 1 else None


def rename_old_keys(
  values: dict[str, Any], origins: dict[str, str], note: Callable[[str], None]
) -> None:
  """Moves values from aliases and old keys to the keys of today, in place.

  Args:
    values: nested values, merged from all layers.
    origins: layer that set each dotted key.
    note: function that is called with a sentence about every old key.

  Raises:
    ValueError: an old and a new key have different values; begins with the old key.
  """
  for key, word in _DEFAULTS.items():
    section, _, name = key.partition(".")
    owner = values.get(section)
    if isinstance(owner, dict) and without_text(owner.get(name)) == word:
      owner[name] = None
  for old, new in (ALIASES | RENAMED).items():
    value = _take(values, old)
    if without_text(value) is None:
      continue
    section, _, name = new.partition(".")
    owner = values.setdefault(section, {})
    if not isinstance(owner, dict):  # refused later, where sections are built
      continue
    existing = without_text(owner.get(name))
    if existing not in (None, without_text(value)):
      raise ValueError(
        f"{old} is {without_text(value)!r} and {new} {existing!r}, two names of one "
        "setting. Give one of them"
      )
    owner[name] = value
    origins[new] = origins[old]
    if old in RENAMED:
      note(f"{origins[old]}: {old} is called {new} now")


def _take(values: dict[str, Any], key: str) -> Any:
  section, _, name = key.rpartition(".")
  owner = values.get(section) if section else values
  return owner.pop(name, None) if isinstance(owner, dict) else None
