"""`tunix train`, killed at awkward moments, ends with the bytes of an untouched run."""

import importlib.util
import json
import pathlib
import random

import jax.numpy as jnp
import pytest

from tests import drills, toys_images, toys_text
from tests.cli import runs
from tunix.models import safetensors_saver
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.models.transformer.config import RopeConfig

STEPS = 40
# The arithmetic must not be what the drill costs: a larger model proves no more.
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SCALING = {
  "factor": 8.0,
  "high_freq_factor": 4.0,
  "low_freq_factor": 1.0,
  "original_max_position_embeddings": 64,
}


def write_llama3p1(folder: pathlib.Path) -> None:
  """A folder of Llama 3.1's form with random weights in several files: written by
  transformers where that is installed, else by our own saver."""
  tokenizer = toys_text.chat_tokenizer("chatml")
  if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
    import torch
    import transformers

    torch.manual_seed(0)
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}
    model = transformers.LlamaForCausalLM(
      transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_id(),
        rope_parameters=rope,
        **SIZES,
        **HEADS,
      )
    )
    model.save_pretrained(folder, max_shard_size="50KB")
  else:
    config = ModelConfig(
      num_layers=SIZES["num_hidden_layers"],
      vocab_size=tokenizer.vocab_size,
      embed_dim=SIZES["hidden_size"],
      hidden_dim=SIZES["intermediate_size"],
      num_heads=HEADS["num_attention_heads"],
      num_kv_heads=HEADS["num_key_value_heads"],
      head_dim=HEADS["head_dim"],
      max_position=512,
      rope=RopeConfig(
        theta=500000.0, scaling="llama3", factor=8.0, original_max_position=64
      ),
    )
    safetensors_saver.save_pretrained(
      AutoModel.from_config(config, seed=0, dtype=jnp.float32),
      folder,
      hf_fields={"eos_token_id": tokenizer.eos_id()},
      max_shard_bytes=50_000,
    )
  assert len(list(folder.glob("*.safetensors"))) > 1
  tokenizer.save(folder)


def write_records(file: pathlib.Path, count: int, seed: int) -> None:
  """Chat records of one to three turns over a small vocabulary."""
  dice = random.Random(seed)
  words = " ".join(toys_text.WORDS).split()
  lines = []
  for i in range(count):
    messages = []
    for turn in range(dice.randint(1, 3)):
      start = dice.randrange(len(words))
      question = f"what follows {words[start]}? {i} {turn}"
      answer = " ".join(words[start + 1 :][: dice.randint(2, 9)]) or "nothing"
      messages.append({"role": "user", "content": question})
      messages.append({"role": "assistant", "content": answer})
    lines.append(json.dumps({"messages": messages}))
  file.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
  folder = tmp_path_factory.mktemp("drill")
  write_llama3p1(folder / "model")
  write_records(folder / "train.jsonl", 240, seed=1)
  write_records(folder / "eval.jsonl", 40, seed=2)
  return {
    "model__path": folder / "model",
    "data__train": folder / "train.jsonl",
    "data__eval": folder / "eval.jsonl",
    "data__max_length": 64,
    "data__overlong": "truncate",
    "training__max_steps": STEPS,
    "training__global_batch_size": 8,
    "training__micro_batch_size": 4,
    "training__eval_every_n_steps": 10,
    "training__learning_rate": "3e-3",
    "checkpoint__every_n_steps": 4,
  }


@pytest.mark.slow
@pytest.mark.parametrize(
  ("changes", "kills", "learned"),  # learned: nats
  [
    pytest.param({"lora__rank": 8}, 1, 0.03, id="lora", marks=pytest.mark.ci),
    pytest.param({"data__packing": "true"}, 3, 0.5, id="full-packed"),
    pytest.param({}, 2, 0.5, id="full"),
  ],
)
def test_killed_runs_of_the_command_resume_exactly(
  inputs, tmp_path, changes, kills, learned
):
  keys = inputs | changes

  weights = "adapter_model" if "lora__rank" in changes else "model"
  drill = drills.KillDrill(
    command=runs.training(keys),
    resumed=r"resuming after step (\d+)",
    files=("logs/metrics.jsonl", f"export/{weights}.safetensors"),
  )
  drill.check(tmp_path, random_kills=kills)
  losses = runs.metrics(tmp_path / "whole")
  assert sorted(losses) == list(range(1, STEPS + 1))
  assert losses[STEPS]["loss"] < losses[1]["loss"] - learned
  evaluations = runs.metrics(tmp_path / "whole", "eval")
  assert sorted(evaluations) == list(range(0, STEPS + 1, 10))
  assert evaluations[STEPS]["loss"] < evaluations[0]["loss"] - learned


@pytest.mark.slow
def test_killed_runs_with_images_resume_exactly(inputs, tmp_path):
  records = toys_images.write_records(tmp_path, count=64)
  keys = inputs | {
    "model__path": toys_images.folder("smolvlm", tmp_path / "model"),
    "data__train": records,
    "data__eval": records,
    "data__max_length": 96,
    "lora__rank": 4,
    "lora__targets": "[all-linear, vision_tower]",
  }

  drill = drills.KillDrill(
    command=runs.training(keys),
    resumed=r"resuming after step (\d+)",
    files=("logs/metrics.jsonl", "export/adapter_model.safetensors"),
  )
  drill.check(tmp_path, random_kills=9)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("job", "images", "kills"),
  [("grpo", False, 2), ("ppo", False, 2), ("grpo", True, 4)],
)
def test_killed_runs_of_rl_resume_exactly(inputs, tmp_path, job, images, kills):
  prompts, model = tmp_path / "prompts.jsonl", inputs["model__path"]
  lines = [{"prompt": f"what follows {i}?", "answer": str(i)} for i in range(64)]
  if images:
    model = toys_images.folder("smolvlm", tmp_path / "model")
    for i, line in enumerate(lines):
      toys_images.draw(tmp_path / f"{i}.png", i)
      line["prompt"] = [toys_images.message(f"{i}?", *[f"{i}.png"] * (i % 2))]
  prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
  keys = {
    "job": job,
    "model__path": model,
    "data__train": prompts,
    "data__eval": prompts,
    "reward__functions": "length(target=12)",
    "rollout__max_prompt_length": 48,
    "rollout__max_tokens_to_generate": 8,
    "algorithm__beta": 0.05,
    "algorithm__num_generations": 4,
    "rl__mini_batch_size": 2,
    "rl__shuffle_seed": 0,
    "samples__every_n_rollouts": 2,
    "training__max_steps": 24,
    "training__global_batch_size": 4,
    "training__eval_every_n_steps": 8,
    "training__eval_batch_size": 32,
    "training__learning_rate": "1e-3",
    "checkpoint__every_n_steps": 4,
  }

  drill = drills.KillDrill(
    command=runs.training(keys),
    resumed=r"resuming after step (\d+)",
    files=(
      "logs/metrics.jsonl",
      "export/model.safetensors",
      "samples/000010.jsonl",
      "samples/index.html",
    ),
  )
  drill.check(tmp_path, random_kills=kills)


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    pytest.param({"lora__rank": 8}, id="lora"),
    pytest.param({"preference__loss": "bco_pair"}, id="full-coupled"),
    pytest.param({"preference__reference_logps": "logps"}, id="logps"),
    pytest.param({"job": "kto"}, id="kto"),
  ],
)
def test_killed_runs_of_preferences_resume_exactly(inputs, tmp_path, changes):
  dice, words = random.Random(3), " ".join(toys_text.WORDS).split()
  some = lambda: " ".join(dice.choices(words, k=dice.randint(2, 9)))
  lines = []
  for i in range(64):
    pair = {"prompt": f"what follows {i}?", "chosen": some(), "rejected": some()}
    if changes.get("job") == "kto":
      label = {"completion": pair.pop("chosen"), "label": i % 2 == 0}
      pair = {"prompt": pair["prompt"], **label}
    lines.append(json.dumps(pair))
  (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
  keys = {
    "job": "dpo",
    "model__path": inputs["model__path"],
    "data__train": tmp_path / "pairs.jsonl",
    "data__eval": tmp_path / "pairs.jsonl",
    "data__overlong": "truncate",
    "preference__max_prompt_length": 32,
    "preference__max_response_length": 16,
    "training__max_steps": 24,
    "training__global_batch_size": 8,
    "training__micro_batch_size": 4,
    "training__eval_every_n_steps": 8,
    "training__learning_rate": "1e-3",
    "checkpoint__every_n_steps": 4,
    **changes,
  }
  if "preference__reference_logps" in keys:
    keys["preference__reference_logps"] = tmp_path / "logps"

  weights = "adapter_model" if "lora__rank" in changes else "model"
  drill = drills.KillDrill(
    command=runs.training(keys),
    resumed=r"resuming after step (\d+)",
    files=("logs/metrics.jsonl", f"export/{weights}.safetensors"),
  )
  drill.check(tmp_path, random_kills=2)
  metrics = runs.metrics(tmp_path / "whole")
  assert sorted(metrics) == list(range(1, 25))
