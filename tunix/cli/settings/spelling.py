"""Keys as files of earlier versions, and other libraries, spell them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunix.cli.settings.convert import Argument

# Two names of one key, both as good.
ALIASES = {
  "checkpoint.every_n_steps": "checkpoint.save_every_n_steps",
  "dataset_name": "data.train",
}

# Old spelling -> new spelling.
RENAMED = {
  "lora.rslora": "lora.use_rslora",
  "lora.dora": "lora.use_dora",
}

# Words of other libraries for what is done where nothing is said.
_DEFAULTS = {"lora.targets": "all-linear"}

# What other libraries (transformers, TRL, torchtune, axolotl, verl) call an option ->
# our key, and what to mind. They are named in the error and not taken: a value may mean
# another thing there.
ELSEWHERE = {
  "dry_run": "--dry-run",
  "print_config": "--print-config",
  "tiny": "--tiny",
  **dict.fromkeys(("lr", "actor_lr", "max_lr"), "training.learning_rate"),
  **dict.fromkeys(
    ("num_train_epochs", "epochs", "num_epochs", "total_epochs", "n_epochs"),
    "data.num_epochs",
  ),
  **dict.fromkeys(
    ("num_train_steps", "total_training_steps", "max_steps_per_epoch", "num_steps"),
    "training.max_steps",
  ),
  **dict.fromkeys(
    ("per_device_train_batch_size", "ppo_micro_batch_size", "micro_batch_size"),
    "training.micro_batch_size (rows over all devices)",
  ),
  **dict.fromkeys(
    ("batch_size", "train_batch_size"),
    "training.global_batch_size (rows of an optimizer step)",
  ),
  "gradient_accumulation_steps": (
    "training.micro_batch_size: global_batch_size / micro_batch_size micro-batches "
    "make a step"
  ),
  "per_device_eval_batch_size": "training.eval_batch_size (rows over all devices)",
  **dict.fromkeys(
    ("precision", "bf16", "fp16", "torch_dtype", "mixed_precision"), "model.dtype"
  ),
  **dict.fromkeys(
    ("max_seq_length", "max_seq_len", "sequence_len", "cutoff_len"), "data.max_length"
  ),
  "sample_packing": "data.packing",
  **dict.fromkeys(("model_name_or_path", "base_model", "pretrained"), "model.path"),
  **dict.fromkeys(("dataset", "train_file", "data_path", "train_files"), "data.train"),
  **dict.fromkeys(("eval_dataset", "validation_file", "val_files"), "data.eval"),
  **dict.fromkeys(("lora_r", "lora_rank", "r"), "lora.rank"),
  "lora_alpha": "lora.alpha",
  "modules_to_save": "lora.modules_to_save",
  **dict.fromkeys(("lora_target_modules", "target_modules"), "lora.targets"),
  **dict.fromkeys(
    ("warmup_steps", "warmup_ratio", "lr_scheduler_type", "lr_scheduler"),
    "schedule.name",
  ),
  **dict.fromkeys(("optim", "optimizer_name", "optimizer_type"), "optimizer.name"),
  "weight_decay": "optimizer.args: {weight_decay: ...}",
  **dict.fromkeys(
    ("gradient_clipping", "clip_grad_norm", "grad_clip", "max_norm"),
    "training.max_grad_norm",
  ),
  **dict.fromkeys(
    (
      "gradient_checkpointing",
      "activation_checkpointing",
      "enable_activation_checkpointing",
    ),
    "model.remat",
  ),
  **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "model.quantise"),
  **dict.fromkeys(("save_steps", "save_freq"), "checkpoint.save_every_n_steps"),
  "save_total_limit": "checkpoint.max_to_keep",
  **dict.fromkeys(
    ("early_stopping_patience", "patience", "early_stopping"), "training.best.patience"
  ),
  **dict.fromkeys(("early_stopping_threshold", "min_delta"), "training.best.min_delta"),
  **dict.fromkeys(
    ("metric_for_best_model", "best_metric", "monitor"), "training.best.metric"
  ),
  **dict.fromkeys(
    ("greater_is_better", "best_mode"), "training.best.greater_is_better"
  ),
  **dict.fromkeys(
    ("load_best_model_at_end", "save_best", "save_best_only", "keep_best"),
    "export.checkpoint: best, with training.best",
  ),
  **dict.fromkeys(
    ("resume", "resume_from_checkpoint"), "not needed: the same command resumes"
  ),
  "overwrite_output_dir": "not there: give another output_dir",
  "group_by_length": "data.length_buckets, or data.packing",
  "max_length": "data.max_length, in preferences preference.max_prompt_length",
  "remove_unused_columns": "not needed: columns that nobody reads are left alone",
  **dict.fromkeys(("val_set_size", "eval_split"), "data.eval, a file of its own"),
  **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), "optimizer.args"),
  **dict.fromkeys(("datasets", "dataset_path", "data_files"), "data.train"),
  "dataset_text_field": "data.columns: {text: ...}",
  "use_dora": "lora.use_dora",
  "use_rslora": "lora.use_rslora",
  "lora_dropout": "lora.dropout",
  "run_name": "logging.run_name",
  "wandb_project": "logging.project_name",
  "attn_implementation": "model.attention",
  "flash_attention": "model.attention",
  "chat_template": "tokenizer.chat_template",
  **dict.fromkeys(("num_generations", "rollout_n"), "algorithm.num_generations"),
  "clip_ratio": "algorithm.epsilon",
  "random_seed": "seed",
  **dict.fromkeys(("eval_steps", "test_freq"), "training.eval_every_n_steps"),
  **dict.fromkeys(("logging_steps", "report_to"), "the section logging"),
  "max_prompt_length": (
    "rollout.max_prompt_length, in preferences preference.max_prompt_length"
  ),
  **dict.fromkeys(
    ("max_completion_length", "max_new_tokens"), "rollout.max_tokens_to_generate"
  ),
  **dict.fromkeys(("reward_funcs", "reward_fn"), "reward.functions"),
  **dict.fromkeys(
    ("beta", "kl_coef"), "algorithm.beta, in preferences preference.beta"
  ),
  "tensor_parallel_size": "mesh: {tp: ...}",
  **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"), "mesh: {fsdp: ...}"),
}


def settle(
  values: dict[str, Any], origins: dict[str, str], note: Callable[[str], None]
) -> None:
  """Moves values from old keys to new ones, in place.

  Args:
    values: nested, merged from all layers.
    origins: where each dotted key was set.
    note: is told of every old key that is set.

  Raises:
    ValueError: both are set, to different values; begins with the old key.
  """
  for key, word in _DEFAULTS.items():
    section, _, name = key.partition(".")
    owner = values.get(section)
    if isinstance(owner, dict) and _plain(owner.get(name)) == word:
      owner[name] = None
  for old, new in (ALIASES | RENAMED).items():
    value = _take(values, old)
    if _plain(value) is None:
      continue
    section, _, name = new.partition(".")
    owner = values.setdefault(section, {})
    if not isinstance(owner, dict):  # which is refused where sections are read
      continue
    already = _plain(owner.get(name))
    if already not in (None, _plain(value)):
      raise ValueError(
        f"{old} is {_plain(value)!r} and {new} {already!r}, two names of one setting: "
        "give one of them"
      )
    owner[name] = value
    origins[new] = origins[old]
    if old in RENAMED:
      note(f"{origins[old]}: {old} is called {new} now")


def _take(values: dict[str, Any], key: str) -> Any:
  section, _, name = key.rpartition(".")
  owner = values.get(section) if section else values
  return owner.pop(name, None) if isinstance(owner, dict) else None


def _plain(value: Any) -> Any:
  return value.value if isinstance(value, Argument) else value
