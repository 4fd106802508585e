"""`tunix train`, killed around every kind of change that it makes to its files, ends
with the names and the bytes of an untouched run."""

import json

import pytest

from tests import kill_plan, toys_images
from tests.cli import runs

SHORT = {
  "training__max_steps": 4,
  "training__global_batch_size": 4,
  "training__learning_rate": "1e-2",
  "checkpoint__every_n_steps": 1,
  "checkpoint__max_to_keep": 2,
  "logging__tensorboard": "false",
}
IMAGES = {"data__max_length": 112, "lora__rank": 2}
PROMPTS = {
  "reward__functions": "length(target=12)",
  "rollout__max_prompt_length": 48,
  "rollout__max_tokens_to_generate": 4,
  "algorithm__num_generations": 2,
  "samples__every_n_rollouts": 1,
}
JOBS = {
  "sft": {"data__max_length": 48},
  "sft, the best": {
    "data__max_length": 48,
    "training__eval_every_n_steps": 1,
    "training__best__patience": 9,
    "export__checkpoint": "best",
  },
  "dpo": {
    "preference__max_prompt_length": 32,
    "preference__max_response_length": 16,
    "lora__rank": 2,
  },
  "distill": {"data__max_length": 48, "distill__top_k": 5},
  "grpo": PROMPTS,
  "ppo": {k: v for k, v in PROMPTS.items() if k != "algorithm__num_generations"},
}
# Kept apart, since they change no other files: killed at random instants.
OTHERS = {
  "sft, stopped early": {
    "data__max_length": 48,
    "training__eval_every_n_steps": 1,
    "training__best__metric": "loss",
    "training__best__greater_is_better": "true",  # step 1, long before the end
    "training__best__patience": 6,
    "export__checkpoint": "best",
  },
  "sft, offloaded": {"data__max_length": 48, "training__offload_optimizer": "true"},
  "sft, images": IMAGES,
  "dpo, images": IMAGES | {"preference__max_prompt_length": 88},
  "grpo, gdpo": PROMPTS
  | {
    "reward__functions": "[length(target=12), length(target=40)]",
    "reward__weights": "[1, 3]",
    "algorithm__decoupled_rewards": "true",
    "algorithm__num_generations": 4,
    "training__eval_every_n_steps": 2,
  },
}
LONGER = {"training__max_steps": 12, "checkpoint__every_n_steps": 2}


def plan(job, model, folder, changes=None, **options):
  """The plan of a job's run: four steps, a checkpoint after each."""
  records = []
  for i in range(16):
    question, answer = runs.QUESTIONS[i % len(runs.QUESTIONS)]
    record = {"prompt": f"{question} {i}"}
    if job in ("grpo", "ppo"):
      record["answer"] = answer
    elif job == "dpo":
      record |= {"chosen": answer, "rejected": f"{i}"}
    else:
      record["response"] = answer
    records.append(record)
  data = folder / "records.jsonl"
  data.write_text("".join(json.dumps(x) + "\n" for x in records))
  root = folder / "root"
  name, _, keeps = job.partition(", ")
  if keeps == "images":
    model = toys_images.folder("smolvlm", folder / "model")
    data = toys_images.write_records(folder, 16, "pair" if name == "dpo" else "sft")
  keys = {"job": name, "model__path": model, "data__train": data, **SHORT}
  keys |= {**JOBS, **OTHERS}[job] | (changes or {})
  if keeps:
    keys["data__eval"] = data
  if job == "distill":
    keys |= {"distill__teacher": model, "distill__cache": root / "cache"}
  argv = ["train", *runs.arguments(**keys, output_dir=root / "out")]
  return kill_plan.KillPlan(argv, root, **options)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_every_kind_of_change_may_be_the_last(job, model, tmp_path):
  # The files inside a checkpoint are orbax's, and the same in every job.
  skip = None if job == "sft" else r"checkpoints/#\.[^/]+/"
  assert plan(job, model, tmp_path, skip=skip).check() > 40


@pytest.mark.slow
@pytest.mark.ci
def test_a_sample_of_them(model, tmp_path):
  assert plan("sft, the best", model, tmp_path, most=3, seed=1).check() == 3


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft, the best", *OTHERS])
def test_random_instants(job, model, tmp_path, rounds=8):
  plan(job, model, tmp_path, changes=LONGER, seed=1).check_instants(rounds)
  result = json.loads((tmp_path / "root/out/result.json").read_text())
  if job == "sft, stopped early":
    assert (result["ended_by"], result["steps"]) == ("early_stopping", 7)
    assert result["best"]["step"] == result["export_step"] == 1
  else:
    assert result["steps"] == 12


@pytest.mark.slow
@pytest.mark.ci
def test_a_sample_of_random_instants(model, tmp_path):
  test_random_instants("sft, stopped early", model, tmp_path, rounds=2)
