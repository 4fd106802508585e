"""Every key of the configuration changes something that can be seen.

A row of TABLE says what a key is set to, where to look, and which other keys the
comparison needs. What is seen there with and without the key must differ. What exactly
each key does is tested in the files beside this one.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys_text
from tests.cli import runs
from tunix.cli import (
  build,
  build_data,
  config as config_lib,
  fingerprints,
  optimizer,
  precision,
  train_main,
)
from tunix.data import pipeline
from tunix.models import safetensors_saver
from tunix.models.automodel import AutoModel
from tunix.sft import metrics_logger


def model(config):
  built = build.build_model(config, None)
  leaves = nnx.to_flat_state(nnx.state(built, nnx.Param))
  shapes = {str(path): (leaf.shape, str(leaf.dtype)) for path, leaf in leaves}
  scales = {getattr(module, "lora_scale", 1.0) for _, module in nnx.iter_modules(built)}
  drops = {getattr(module, "lora_dropout", 0) for _, module in nnx.iter_modules(built)}
  c = built.config
  return shapes, scales, drops, (c.dtype, c.remat, c.scan_layers, c.attention)


def settled_model(config):
  return model(precision.settle(config))


def preset(config):
  return None if config.model.name is None else build.preset_config(config)


def base_model(config):
  return fingerprints.of_base(config)


def tokenizer(config):
  made = build.build_tokenizer(config)
  turn = [{"role": "user", "content": "How many days"}]
  return made.vocab_size, made.apply_chat_template(turn)


def data(config):
  """Reports, steps and all batches of at most one epoch."""
  made = build_data.build_data(config, build.build_tokenizer(config))
  limit = None if config.training.max_steps is None else 2
  found = [made.reports, made.num_steps]
  for batches in (made.train, made.eval or ()):
    for number, batch in enumerate(batches):
      if number == limit:
        break
      found.append(hashlib.sha256(repr(batch).encode()).hexdigest())
  return found


def overlong(config):
  try:
    return data(config)
  except ValueError as error:
    return str(error)


def threads(config):
  seen = []
  build_dataset = pipeline.build_dataset
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      pipeline,
      "build_dataset",
      lambda *args, **options: (
        seen.append(options["num_threads"]) or build_dataset(*args, **options)
      ),
    )
    data(config)
  return seen


def updates(config):
  """What three steps of the optimizer do to a parameter."""
  config = optimizer.settle(config, 10)
  rate = optimizer.build_schedule(config)
  tx = optimizer.build_optimizer(config, rate)
  grads = {"w": jnp.asarray([[3.0, -4.0]])}
  state, found = tx.init(grads), []
  for _ in range(3):
    step, state = tx.update(grads, state, grads)
    found.append(np.asarray(step["w"]).tolist())
  return found


def trainer(config):
  settings = build.training_config(config, pathlib.Path("/out"), 0.1)
  return dataclasses.asdict(settings), config.training.micro_rows


def backends(config):
  """What would be logged to, with its settings."""
  seen = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      metrics_logger,
      "MetricsLogger",
      lambda options: seen.extend(options.backend_factories),
    )
    patch.delenv("WANDB_MODE", raising=False)
    build.build_logger(config, pathlib.Path("/out"))
  return [(getattr(f, "func", f), getattr(f, "args", ())) for f in seen]


def mesh(config):
  made = build.build_mesh(config)
  return made and dict(made.shape)


def export(config):
  return config.export_kind, precision.of_export(
    config, build.build_model(config, None)
  )


class Looked(Exception):
  """Ends a run where it begins."""


def start(config):
  """The folders of a run: its own, and that of compiled programs."""
  seen = []

  def prepare(config, folder):
    seen.append(folder.path)
    raise Looked

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train_main, "prepare", prepare)
    patch.setattr(train_main, "_keep_programs", seen.append)
    with pytest.raises((Looked, ValueError)):
      train_main.run(config)
  return seen


def loaded(config):
  return config


@dataclasses.dataclass(frozen=True)
class Row:
  """How to see a key: what it is set to, where to look, what else is set; None in
  `needs` takes a key away. Names in braces stand for files."""

  value: Any
  look: Callable[[Any], Any]
  needs: dict[str, Any] = dataclasses.field(default_factory=dict)


LORA = {"lora__rank": 2}
PRESET = {"model__path": None, "model__name": "qwen3_0p6b"}
EVAL = {"data__eval": "{eval}"}
WANDB = {"logging__wandb": "true"}
TABLE = {
  "job": Row("sft", loaded),  # there is one: see test_a_job_that_there_is_not
  "output_dir": Row("/tmp/elsewhere", start),
  "seed": Row(7, data),
  "dataset_name": Row("{train}", overlong, {"data__train": None}),
  "model.path": Row("{half}", base_model),
  "model.name": Row("qwen3_0p6b", preset, {"model__path": None}),
  "model.args": Row("{{num_layers: 3}}", preset, PRESET),
  "model.dtype": Row("bfloat16", model),
  "model.param_dtype": Row("bfloat16", settled_model),
  "model.remat": Row("block", model),
  "model.scan_layers": Row("true", model),
  "model.attention": Row("blockwise", model),
  "model.quantise": Row("nf4", model, LORA),
  "tokenizer.path": Row("{other_tokenizer}", tokenizer),
  "tokenizer.chat_template": Row("{template}", tokenizer),
  "lora.rank": Row(2, model),
  "lora.alpha": Row(6, model, LORA),
  "lora.targets": Row("[q_proj]", model, LORA),
  "lora.dtype": Row("bfloat16", model, LORA),
  "lora.dropout": Row(0.5, model, LORA),
  "lora.rslora": Row("true", model, LORA),
  "lora.dora": Row("true", model, LORA),
  "lora.rank_pattern": Row("{{q_proj: 3}}", model, LORA),
  "lora.alpha_pattern": Row("{{q_proj: 3}}", model, LORA),
  "data.train": Row("{train}", overlong),
  "data.eval": Row("{eval}", data),
  "data.max_length": Row(60, data),
  "data.packing": Row("true", data),
  "data.shuffle": Row("false", data),
  "data.num_epochs": Row(2, data),
  "data.overlong": Row("truncate", overlong, {"data__max_length": 12}),
  "data.chat": Row("false", data, {"data__train": "{plain}"}),
  "data.template_args": Row(
    "{{mark: seven seven}}", data, {"tokenizer__chat_template": "{template}"}
  ),
  "data.scan_limit": Row(3, data),
  "data.num_threads": Row(0, threads),
  "optimizer.name": Row("sgd", updates),
  "optimizer.args": Row("{{weight_decay: 0.5}}", updates),
  "schedule.name": Row("cosine_decay_schedule", updates),
  "schedule.args": Row(
    "{{decay_steps: 3}}", updates, {"schedule__name": "cosine_decay_schedule"}
  ),
  "training.learning_rate": Row(0.5, updates),
  "training.max_steps": Row(3, trainer),
  "training.global_batch_size": Row(4, data),
  "training.micro_batch_size": Row(2, trainer),
  "training.eval_batch_size": Row(2, data, EVAL),
  "training.eval_every_n_steps": Row(3, trainer, EVAL),
  "training.max_grad_norm": Row("null", updates, {"optimizer__name": "sgd"}),
  "mesh": Row("{{fsdp: 8}}", mesh),
  "checkpoint.every_n_steps": Row(5, trainer),
  "checkpoint.min_interval_secs": Row(5, trainer),
  "checkpoint.max_to_keep": Row(1, trainer),
  "checkpoint.asynchronous": Row("false", trainer),
  "logging.tensorboard": Row("false", backends),
  "logging.wandb": Row("true", backends),
  "logging.console": Row("true", backends),
  "logging.progress_bar": Row("false", trainer),
  "logging.project_name": Row("mine", backends, WANDB),
  "logging.run_name": Row("mine", backends, WANDB),
  "export.kind": Row("merged", export, LORA),
  "export.dtype": Row("bfloat16", export),
  "compilation_cache": Row("/tmp/programs", start, {"output_dir": "/tmp/elsewhere"}),
}


def test_the_table_has_exactly_the_keys_of_the_schema():
  assert set(TABLE) == set(config_lib.known_keys())


def test_a_job_that_there_is_not():
  with pytest.raises(ValueError, match="job is the text 'grpo', expected one of sft"):
    config_lib.load(["--job=grpo"])


@pytest.fixture(scope="module")
def files(model, train_file, eval_file, tmp_path_factory):
  """Names in the table -> paths; `train` is the default data under another name."""
  folder = tmp_path_factory.mktemp("keys")
  named = {"model": model, "train": train_file, "eval": eval_file}
  for name in ("plain", "template", "half", "other_tokenizer"):
    named[name] = folder / name
  named["plain"].write_text('{"prompt": "How", "response": "many"}\n' * 16)
  named["template"].write_text(
    "{% for m in messages %}{{ mark }}{{ m.content }}<|im_end|>{% endfor %}"
  )
  safetensors_saver.save_pretrained(
    AutoModel.from_pretrained(model), named["half"], dtype="bfloat16"
  )
  toys_text.chat_tokenizer("llama3").save(named["other_tokenizer"])
  return {name: str(path) for name, path in named.items()}


@pytest.mark.parametrize("key", [key for key in TABLE if key != "job"])
def test_every_key_changes_what_is_seen(key, files):
  row = TABLE[key]
  base = {"model__path": "{model}", "data__train": "{train}", "data__max_length": 48}
  name = key.replace(".", "__")
  base = base | row.needs
  base.pop(name, None)
  base = {k: v for k, v in base.items() if v is not None}

  def see(**keys):
    given = {k: str(v).format(**files) for k, v in keys.items()}
    return row.look(config_lib.load(runs.arguments(**given)))

  without = see(**base)
  assert repr(see(**base)) == repr(without)  # or the comparison says nothing
  assert repr(see(**base, **{name: row.value})) != repr(without)
