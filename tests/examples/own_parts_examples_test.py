"""Examples of loops and data of one's own, and of several processes."""

import json
import re

import grain
import jax
import numpy as np
import pytest

from tests import processes
from tests.examples import loading
from tunix.sft.metrics_logger import Mode
from tunix.utils.mesh import create_mesh


def test_a_loop_by_hand_goes_on_where_it_stopped(tmp_path):
  by_hand = loading.example("by_hand")
  curves = {}
  with jax.set_mesh(create_mesh({"fsdp": 8})):
    for folder, steps in (("whole", 8), ("parts", 4), ("parts", 8)):
      first, logger = by_hand.run(tmp_path / folder, steps)
      curves[folder, steps] = logger.get_metric_history("", "loss", Mode.TRAIN)
  assert first == 4
  whole = curves["whole", 8]
  assert len(whole) == 8 and whole[-1] < whole[0]
  np.testing.assert_array_equal(curves["parts", 4], whole[:4])
  np.testing.assert_array_equal(curves["parts", 8], whole[4:])
  assert list((tmp_path / "whole/profile").rglob("*.xplane.pb"))


@pytest.fixture(scope="module")
def data():
  return loading.example("grain_data")


def test_a_pipeline_has_a_place(data):
  batches = iter(data.pipeline(data.RECORDS, 32, num_epochs=1))
  first, place = next(batches), batches.get_state()
  assert {name: value.shape for name, value in first.items()} == {
    "input_tokens": (32, 4),
    "input_mask": (32, 4),
    "label": (32,),
  }
  second = next(batches)
  batches.set_state(place)
  np.testing.assert_array_equal(next(batches)["input_tokens"], second["input_tokens"])


def test_each_process_reads_its_share(data):
  shares = []
  for number in range(4):
    shard = grain.sharding.ShardOptions(number, 4, drop_remainder=True)
    batches = list(data.loader(data.RECORDS, 5, 1, shard))
    shares.append({tuple(row) for batch in batches for row in batch["input_tokens"]})
  assert [len(share) for share in shares] == [25] * 4
  assert len(set.union(*shares)) == len(data.RECORDS)


def test_a_module_of_prompts_is_found_by_name(data):
  file = loading.EXAMPLES / "grain_data.py"
  prompts = data.get_dataset_from_module(f"{file}:create_dataset(add=5)", data.Chat())
  assert len(prompts) == 3
  assert prompts[2] == {"prompts": "user: What is 2 + 5?\n", "answer": "7"}


def test_an_example_of_several_processes_runs_in_one(tmp_path):
  losses = loading.example("several_processes").train(tmp_path, 3)
  assert len(losses) == 3 and losses[-1] < losses[0]


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path):
  program = loading.EXAMPLES / "several_processes.py"
  coordinator = f"localhost:{processes.free_port()}"
  running = [
    processes.start(program, 4, coordinator, 2, rank, "--output", tmp_path)
    for rank in range(2)
  ]
  processes.finish(*running)
  first, second = (process.texts()[0] for process in running)
  assert "2 processes, 8 devices: loss " in first and "loss" not in second
  log = (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()
  assert {json.loads(line)["step"] for line in log} == set(range(1, 9))
  assert {path.name for path in (tmp_path / "checkpoints").iterdir()} >= {"4", "8"}


def test_the_table_of_tasks_names_what_is_there():
  readme = (loading.EXAMPLES / "README.md").read_text()
  named = re.findall(r"`(\w+\.py)`, `(\w+)`(?: and `(\w+)`)?", readme)
  assert len(named) >= 10
  for file, *names in named:
    text = (loading.EXAMPLES / file).read_text()
    assert all(name in text for name in names), (file, names)
  for target in re.findall(r"\]\((?!http)([^)#]+)", readme):
    assert (loading.EXAMPLES / target).exists(), target
