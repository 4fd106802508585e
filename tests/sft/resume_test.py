"""A run that is cut and started again ends with the same bytes."""

import json
import logging
import os
import pathlib
import resource
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.sft import trainers
from tests.sft.checkpoint_manager_test import DAMAGE, truncate
from tests.sft.trainers import smalls
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.metrics_logger import JsonlBackend, MetricsLoggerOptions
from tunix.sft.peft_trainer import CheckpointOptions, PeftTrainer, TrainingConfig
from tunix.utils import tree

STEPS = 6


def make(folder, model=None, tx=None, **config):
  options: dict[str, Any] = {
    "max_steps": STEPS,
    "eval_every_n_steps": 3,
    "checkpoint_root_directory": str(folder / "checkpoints"),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=1),
    "metrics_logging_options": MetricsLoggerOptions(
      folder, backend_factories=[lambda: JsonlBackend(folder)]
    ),
    "pbar_description": None,
  }
  return PeftTrainer(
    model or trainers.tokens_only(rate=0.1),
    tx or optimizers.adam(1e-2),
    TrainingConfig(**{**options, **config}),
  )


def run(folder, data, evaluation=None, **options):
  """Trains on, to `max_steps`; returns all that a run leaves."""
  t = make(folder, **options)
  start = t.train_steps
  t.train(data, evaluation or smalls(2))
  t.close()
  state = {
    f"opt.{k}": np.array(x) for k, x in tree.flatten(t.optimizer.opt_state).items()
  }
  return (
    start,
    trainers.leaves(t.model) | state,
    (folder / "metrics.jsonl").read_bytes(),
  )


def same(a, b):
  return trainers.equal(a[1], b[1]) and a[2] == b[2]


def grain_dataset():
  grain = pytest.importorskip("grain")
  rows = trainers.small(0, rows=64)
  records = [{k: v[i] for k, v in rows.items()} for i in range(64)]
  return grain.MapDataset.source(records).seed(3).shuffle().batch(4).to_iter_dataset()


def grain_loader():
  grain = pytest.importorskip("grain")
  rows = trainers.small(0, rows=64)
  records = [{k: v[i] for k, v in rows.items()} for i in range(64)]
  sampler = grain.samplers.IndexSampler(64, shuffle=True, seed=5, num_epochs=1)
  batch = [grain.transforms.Batch(4, drop_remainder=True)]
  return grain.DataLoader(data_source=records, sampler=sampler, operations=batch)


def ragged():
  """Micro-batches whose rows grow and shrink."""
  return [trainers.small(i, rows=n) for i, n in enumerate([2, 4, 3, 6, 2, 5, 4, 3])]


SOURCES = {
  "list": (lambda: smalls(9), True),
  "generator": (lambda: iter(smalls(9)), True),
  "ragged": (ragged, True),
  "grain dataset": (grain_dataset, False),
  "grain loader": (grain_loader, False),
}


@pytest.mark.shipped
@pytest.mark.parametrize("kind", SOURCES)
def test_exact_resume(tmp_path, kind, caplog):
  source, skips = SOURCES[kind]
  whole = run(tmp_path / "whole", source())
  with caplog.at_level(logging.WARNING, logger="tunix"):
    start, *_ = run(tmp_path / "cut", source(), max_steps=3)
    assert start == 0 and "dropping" not in caplog.text
    cut = run(tmp_path / "cut", source())
  assert cut[0] == 3 and same(cut, whole)
  assert ("drawing and dropping the 3" in caplog.text) == skips
  again = run(tmp_path / "cut", source())
  assert again[0] == STEPS and same(again, whole), "a finished run stays as it is"


@pytest.mark.parametrize("kind", ["truncated data", "no item", "broken JSON"])
def test_a_damaged_checkpoint_costs_steps_and_not_bytes(tmp_path, kind, caplog):
  whole = run(tmp_path / "whole", smalls(9))
  run(tmp_path / "cut", smalls(9), max_steps=4)
  DAMAGE[kind](tmp_path / "cut" / "checkpoints" / "4")
  cut = run(tmp_path / "cut", smalls(9))
  assert cut[0] == 3 and same(cut, whole)
  assert "renamed to 4.damaged" in caplog.text
  for step in (4, 5, 6):
    truncate(tmp_path / "cut" / "checkpoints" / str(step))
  with pytest.raises(RuntimeError, match=r"none of the checkpoints \[4, 5, 6\]"):
    make(tmp_path / "cut")


def test_the_parts_of_a_run(tmp_path):
  class Noting(PeftTrainer):
    def custom_checkpoint_metadata(self):
      return {"steps": self.train_steps}

  t = Noting(
    trainers.tokens_only(rate=0.1),
    optimizers.adam(1e-2),
    TrainingConfig(
      checkpoint_root_directory=str(tmp_path), gradient_accumulation_steps=2
    ),
  )
  t.train(smalls(3))
  t.close()
  folder = tmp_path / "2"
  items = {p.name for p in folder.iterdir() if p.is_dir()}
  assert items == {
    *("model_params", "model_rest", "optimizer_state"),
    *("progress", "custom_metadata", "checksums"),
  }
  files = [p.read_text() for p in (folder / "progress").rglob("*") if p.is_file()]
  (progress,) = (json.loads(text) for text in files if "train_steps" in text)
  assert progress["counts"]["train_steps"] == 2
  assert progress["counts"]["iter_steps"] == 3
  assert progress["data"] == [{"drawn": 3}]
  m = CheckpointManager(tmp_path)
  model = trainers.tokens_only(1, rate=0.1)
  assert m.maybe_restore(model) == (2, {"steps": 2})
  assert trainers.equal(trainers.leaves(model), trainers.leaves(t.model))


def test_lora_runs_save_only_lora(tmp_path):
  model = toys.model(lora_rank=2)
  t = make(tmp_path, model, max_steps=1)
  t.train([toys.batch(0)])
  t.close()
  base = toys.model(lora_rank=2)
  other = make(tmp_path, base)
  assert other.train_steps == 1
  names = set(tree.flatten(other._module.params))
  assert names == set(tree.flatten(nnx.state(model, nnx.LoRAParam)))
  assert trainers.equal(trainers.leaves(model), trainers.leaves(base))
  m = CheckpointManager(tmp_path / "checkpoints")
  m.restore(again := toys.model(lora_rank=2), restore_only_lora_params=True)
  kind = nnx.LoRAParam
  assert trainers.equal(trainers.leaves(again, kind), trainers.leaves(model, kind))


def test_saving_and_restoring_by_hand(tmp_path):
  t = make(tmp_path, checkpointing_options=CheckpointOptions(save_every_n_steps=100))
  assert not t.restore_checkpoint()
  t.train_step(trainers.small(0))
  assert t.save_checkpoint() and not t.save_checkpoint(), "a step is saved once"
  kept = trainers.leaves(t.model)
  t._run._checkpoints.wait()
  t.train_step(trainers.small(1))
  assert t.restore_checkpoint() and t.train_steps == 1
  assert trainers.equal(kept, trainers.leaves(t.model))
  t.train_step(trainers.small(1))
  t.close()  # saves what is not saved yet
  assert make(tmp_path).train_steps == 2
  with pytest.raises(RuntimeError, match="is closed"):
    t.train(smalls(4))
  none = PeftTrainer(trainers.tokens_only(), optimizers.sgd(1), TrainingConfig())
  none.train_step(trainers.small(0))
  assert not none.save_checkpoint() and not none.restore_checkpoint()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (
      {"model": lambda: trainers.tokens_only(vocab=97, rate=0.1)},
      r"\[96, 16\] in it and float32\[97",
    ),
    (
      {"model": lambda: toys.FourArguments(nnx.Rngs(0))},
      r"\(model_rest\): it also has dropout",
    ),
    ({"tx": lambda: optimizers.sgd(1.0)}, r"\(optimizer_state\): it also has 0.count"),
    (
      {"tx": lambda: optimizers.sgd(1.0, momentum=0.9)},
      r"\(optimizer_state\): 0.trace.* not in it",
    ),
  ],
)
def test_other_settings_are_refused_and_nothing_is_renamed(tmp_path, options, message):
  run(tmp_path, smalls(2), max_steps=1)
  with pytest.raises(ValueError, match=message):
    make(tmp_path, **{name: build() for name, build in options.items()})
  assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]


def test_a_checkpoint_of_a_module_alone_is_no_run(tmp_path):
  m = CheckpointManager(tmp_path / "checkpoints")
  model = trainers.tokens_only(rate=0.1)
  m.save(1, model)
  m.close()
  with pytest.raises(ValueError, match=r"\(optimizer_state\): .* is not in it"):
    make(tmp_path)
  m = CheckpointManager(tmp_path / "other" / "checkpoints")
  m.save(
    1, model, optimizers.adam(1e-2).init(nnx.state(model, nnx.Param).to_pure_dict())
  )
  m.close()
  with pytest.raises(ValueError, match="was not written by a trainer"):
    make(tmp_path / "other")


def test_resume_on_another_mesh(tmp_path, mesh_fsdp8):
  data = smalls(3, rows=8)
  whole = run(tmp_path / "whole", data, data[:1], model=trainers.wide(), max_steps=3)
  run(tmp_path / "cut", data, data[:1], model=trainers.wide(), max_steps=2)
  with jax.set_mesh(mesh_fsdp8):
    cut = run(tmp_path / "cut", data, data[:1], model=trainers.wide(), max_steps=3)
  assert cut[0] == 2
  for name, value in whole[1].items():
    np.testing.assert_allclose(cut[1][name], value, atol=2e-3, err_msg=name)
  again = run(tmp_path / "cut", data, data[:1], model=trainers.wide(), max_steps=3)
  assert again[0] == 3 and trainers.equal(again[1], cut[1])


def test_bfloat16_is_resumed_exactly(tmp_path):
  def bf16():
    model = trainers.tokens_only()
    for _, node in nnx.iter_graph(model):
      if isinstance(node, nnx.Param):
        node.set_value(node.get_value().astype("bfloat16"))
    return model

  whole = run(tmp_path / "whole", smalls(6), model=bf16())
  run(tmp_path / "cut", smalls(6), model=bf16(), max_steps=3)
  cut = run(tmp_path / "cut", smalls(6), model=bf16())
  assert cut[0] == 3 and same(cut, whole)
  assert cut[1]["out.kernel"].dtype == "bfloat16"


FULL_DISK = """
import resource, signal, sys
from tests.sft import trainers
from tests.sft.resume_test import CheckpointOptions, make, pathlib
folder, (limit, asynchronous) = pathlib.Path(sys.argv[1]), map(int, sys.argv[2:])
options = CheckpointOptions(save_every_n_steps=2, asynchronous=bool(asynchronous))
model = trainers.tokens_only(rate=0.1, vocab=4096)
t = make(folder, model, checkpointing_options=options)
class Full:
  def on_train_step_end(self, trainer, train_step, train_loss):
    if train_step == 3 and limit:
      trainer._run._checkpoints.wait()
      signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
      resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
  t.with_training_hooks(Full()).train(trainers.smalls(6))
  t.close()
except OSError as error:
  print("OSError:", error)
  sys.exit(7)
"""


@pytest.mark.parametrize("asynchronous", [0, 1])
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, asynchronous):
  def start(limit):
    command = [sys.executable, "-c", FULL_DISK, tmp_path, str(limit), str(asynchronous)]
    root = pathlib.Path(__file__).parent.parent.parent
    return subprocess.run(command, cwd=root, capture_output=True, text=True)

  failed = start(20_000)
  assert failed.returncode == 7, failed.stdout + failed.stderr
  assert "OSError: a checkpoint could not be written" in failed.stdout
  assert len(failed.stdout.strip().splitlines()) == 1
  root = tmp_path / "checkpoints"
  assert "2" in os.listdir(root) and "4" not in os.listdir(root)
  finished = start(0)
  assert finished.returncode == 0, finished.stderr
  assert {"2", "4", "6"} <= set(os.listdir(root))
  assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
  losses = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(x)["step"] for x in losses if '"train"' in x] == [1, 2, 3, 4, 5, 6]
