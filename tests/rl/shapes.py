"""Counts shapes in drawn pictures: python -m tests.rl.shapes --seeds 0 1 2 --plot FILE.

    [picture]how many?     3

A picture has 1 to 6 circles, squares and crosses. A SmolVLM of 0.5 million weights,
tower included, is trained from nothing on CPU: first by fine-tuning until it answers
about half of the questions, then by GRPO, whose reward is 1 for the right number, else
0. The accuracy is that of greedy answers to 200 held-out pictures.
"""

import argparse
import json
import pathlib
import random
import tempfile
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from PIL import Image, ImageDraw

from tests import optimizers
from tests.models.images import toys as processors
from tests.rl import learning
from tunix.data.images import ImageReader
from tunix.data.pipeline import build_dataset
from tunix.data.questions import build_prompts
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.smolvlm.model import ModelConfig
from tunix.models.vision.siglip import SiglipConfig
from tunix.rl.config import ClusterConfig, RLTrainingConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.metrics_logger import Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

MOST = 6  # shapes of a picture
CELLS, CELL = 3, 16  # cells of an edge, pixels of a cell
EDGE = CELLS * CELL
SOFT = CELLS**2  # soft tokens of a picture, one for each cell
HELD_OUT = 200

SFT_STEPS, SFT_ROWS, SFT_RATE = 200, 32, 1e-3
GRPO_STEPS, PROMPTS, GENERATIONS, GRPO_RATE = 100, 32, 8, 3e-4
PROMPT_LENGTH, ANSWER_LENGTH = 24, 2  # tokens; the answer's with its EOS

_TEMPLATE = r"""
{%- for message in messages -%}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{{- '<image>' if part.type == 'image' else part.text -}}
{%- endfor -%}
{%- endif -%}
{%- if message.role == 'assistant' -%}{{- '<end>' -}}{%- endif -%}
{%- endfor -%}
"""


def draw(numbers: random.Random, count: int) -> Image.Image:
  """Draws a picture of `count` shapes in different cells."""
  picture = Image.new("RGB", (EDGE, EDGE), "white")
  pen = ImageDraw.Draw(picture)
  for cell in numbers.sample(range(CELLS**2), count):
    row, column = divmod(cell, CELLS)
    color = tuple(numbers.randrange(160) for _ in range(3))
    x, y = (CELL * place + numbers.randrange(2, 5) for place in (column, row))
    edge = numbers.randrange(8, 11)
    box = (x, y, x + edge, y + edge)
    kind = numbers.randrange(3)
    if kind == 0:
      pen.ellipse(box, fill=color)
    elif kind == 1:
      pen.rectangle(box, fill=color)
    else:
      pen.line(box, fill=color, width=3)
      pen.line((x, y + edge, x + edge, y), fill=color, width=3)
  return picture


def records(folder: pathlib.Path, seed: int, count: int) -> list[dict]:
  """Questions about new pictures, {"prompt", "answer"}."""
  numbers, out = random.Random(seed), []
  folder.mkdir(parents=True, exist_ok=True)
  for number in range(count):
    file, shapes = folder / f"{seed}_{number}.png", numbers.randint(1, MOST)
    draw(numbers, shapes).save(file)
    parts = [
      {"type": "image", "image": str(file)},
      {"type": "text", "text": "how many?"},
    ]
    out.append({"prompt": [{"role": "user", "content": parts}], "answer": str(shapes)})
  return out


def taught(record: dict) -> dict:
  answer = {"role": "assistant", "content": record["answer"]}
  return {"messages": [*record["prompt"], answer]}


def write_model(folder: pathlib.Path, seed: int) -> pathlib.Path:
  """A model with random weights, its tokenizer and its image processor."""
  special = ["<pad>", "<begin>", "<end>", "<unk>"]
  special += ["<image>", "<fake_token_around_image>", "<global-img>"]
  words = [*special, *"abcdefghijklmnopqrstuvwxyz0123456789? "]
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(
      {word: i for i, word in enumerate(words)}, unk_token="<unk>"
    )
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(r"[\s\S]"), "isolated"
  )
  backend.decoder = tokenizers.decoders.Fuse()
  backend.add_special_tokens(special)
  tokenizer = TokenizerAdapter(
    backend,
    chat_template=_TEMPLATE,
    bos_token="<begin>",
    eos_token="<end>",
    pad_token="<pad>",
  )
  config = ModelConfig(
    num_layers=3,
    vocab_size=len(words),
    embed_dim=96,
    hidden_dim=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=24,
    max_position=128,
    vision=SiglipConfig(
      num_layers=2,
      embed_dim=64,
      hidden_dim=128,
      num_heads=4,
      patch_size=CELL,
      image_size=EDGE,
    ),
    shuffle=1,
    image_token_id=words.index("<image>"),
  )
  model = AutoModel.from_config(config, seed=seed, dtype=jnp.float32)
  save_pretrained(model, folder, hf_fields={"eos_token_id": tokenizer.eos_id()})
  tokenizer.save(folder)
  return processors.write(folder, processors._smolvlm(EDGE, EDGE, False, SOFT))


def load(folder: pathlib.Path):
  """A model whose tower is trained, too, and its reader of images."""
  model: Any = AutoModel.from_pretrained(folder, dtype=jnp.float32)
  model.train_tower()
  return model, ImageReader(folder, model.config)


def fine_tuned(folder: pathlib.Path, seed: int, steps: int) -> pathlib.Path:
  """Trains the random model of `folder`; the result is in `folder`."""
  model, reader = load(folder)
  tokenizer = TokenizerAdapter.from_pretrained(folder)
  schedule = optax.warmup_cosine_decay_schedule(0.0, SFT_RATE, 20, SFT_STEPS)
  config = TrainingConfig(max_steps=steps, pbar_description=None)
  trainer = PeftTrainer(model, optimizers.adamw(schedule), config)
  lessons = records(folder / "lessons", 1000 + seed, steps * SFT_ROWS)
  trainer.train(
    build_dataset(
      [taught(record) for record in lessons],
      tokenizer,
      images=reader,
      image_tokens=SOFT,
      batch_size=SFT_ROWS,
      max_length=PROMPT_LENGTH,
    )
  )
  trained: Any = trainer.model
  save_pretrained(trained, folder, hf_fields={"eos_token_id": tokenizer.eos_id()})
  return folder


def learner(folder: pathlib.Path, seed: int, steps: int, reward) -> GRPOLearner:
  """GRPO from the model of `folder`."""
  model, reader = load(folder)
  schedule = optax.warmup_cosine_decay_schedule(0.0, GRPO_RATE, 10, max(steps, 11))
  sampling = RolloutConfig(
    max_prompt_length=PROMPT_LENGTH, max_tokens_to_generate=ANSWER_LENGTH, seed=seed
  )
  cluster = RLCluster(
    actor=model,
    tokenizer=TokenizerAdapter.from_pretrained(folder),
    images=reader,
    cluster_config=ClusterConfig(
      training_config=RLTrainingConfig(
        actor_optimizer=optimizers.adam(schedule),
        max_steps=steps,
        pbar_description=None,
      ),
      rollout_config={
        Mode.TRAIN: sampling,
        Mode.EVAL: RolloutConfig(
          max_prompt_length=PROMPT_LENGTH,
          max_tokens_to_generate=ANSWER_LENGTH,
          temperature=0.0,
        ),
      },
    ),
  )
  config = GRPOConfig(num_generations=GENERATIONS, beta=0.0, pass_threshold=1.0)
  return GRPOLearner(cluster, config, reward)


def prompts(folder: pathlib.Path, seed: int, count: int, size: int):
  """Batches of questions about new pictures."""
  model = AutoModel.from_pretrained(folder, dtype=jnp.float32)
  return build_prompts(
    records(folder / "questions", seed, count),
    TokenizerAdapter.from_pretrained(folder),
    images=ImageReader(folder, model.config),
    batch_size=size,
    max_prompt_length=PROMPT_LENGTH,
  )


def right(prompts, completions, answer):
  del prompts
  return [float(text == number) for text, number in zip(completions, answer)]


def accuracy(folder: pathlib.Path) -> float:
  """The share of held-out questions that greedy answers have right."""
  return _accuracy(learner(folder, 0, 1, right), folder)


def _accuracy(trained: GRPOLearner, folder: pathlib.Path) -> float:
  held_out = prompts(folder, 7, HELD_OUT, HELD_OUT)
  return trained.evaluate(held_out)["pass@1"]


def run(folder: pathlib.Path, seed: int, sft: int, steps: int) -> dict:
  """Fine-tunes and runs GRPO; returns accuracies, and the rewards of every step."""
  start = time.process_time()
  write_model(folder, seed)
  out: dict = {"seed": seed, "random": accuracy(folder)}
  fine_tuned(folder, seed, sft)
  out["fine_tuned"] = accuracy(folder)
  out["sft_cpu_s"] = round(time.process_time() - start)
  print(json.dumps(out), flush=True)
  if not steps:
    return out
  curve, start = [], time.process_time()

  def reward(prompts, completions, answer):
    found = right(prompts, completions, answer)
    if len(found) == PROMPTS * GENERATIONS:  # not in the evaluation
      curve.append(float(np.mean(found)))
    return found

  trained = learner(folder, seed, steps, reward)
  trained.train(prompts(folder, 2000 + seed, steps * PROMPTS, PROMPTS))
  out["grpo"] = _accuracy(trained, folder)
  trained.close()
  return {**out, "grpo_cpu_s": round(time.process_time() - start), "curve": curve}


def main() -> None:
  options = argparse.ArgumentParser(description=__doc__)
  options.add_argument("--seeds", type=int, nargs="+", default=[0])
  options.add_argument("--sft", type=int, default=SFT_STEPS, help="steps, of 200")
  options.add_argument("--steps", type=int, default=GRPO_STEPS, help="of GRPO")
  options.add_argument("--plot", type=pathlib.Path, help="a PNG to write")
  given, curves = options.parse_args(), []
  for seed in given.seeds:
    with tempfile.TemporaryDirectory() as folder:
      result = run(pathlib.Path(folder), seed, given.sft, given.steps)
    curves.append(result.pop("curve", []))
    print(json.dumps({**result, "mean_of_10": learning.marks(curves[-1] or [0.0])}))
  if given.plot:
    learning.plot({"grpo": curves}, given.plot, (0.0, 1.0))


if __name__ == "__main__":
  main()
