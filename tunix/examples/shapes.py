"""The task of the notebook on images: to count shapes in drawn pictures.

    from tunix.examples.shapes import Shapes

    task = Shapes()
    base = {"path": task.fresh_model(), "train_tower": True}
    result = tunix.sft(model=base, data=task.lessons(6400), output_dir="run")
    print(task.accuracy(result.export))

A picture has 1 to 6 circles, squares and crosses on white. The question is "how many?",
and the answer is one digit. A SmolVLM of 0.5 million weights, tower included, learns it
from nothing on a CPU. Needs the extra `images`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import random
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers

from tunix.data.images import ImageReader
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.models.images import pillow
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.smolvlm.model import ModelConfig
from tunix.models.vision.siglip import SiglipConfig

Record = dict[str, Any]

MAX_SHAPES = 6  # shapes of a picture
CELLS, CELL = 3, 16  # cells per edge of the picture; pixels per edge of a cell
EDGE = CELLS * CELL
SOFT_TOKENS = CELLS**2  # soft tokens of a picture, one for each cell
PROMPT_LENGTH, ANSWER_LENGTH = 24, 2  # in tokens; the answer includes `<end>`

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
_SPECIAL = ("<pad>", "<begin>", "<end>", "<unk>")
_SPECIAL += ("<image>", "<fake_token_around_image>", "<global-img>")
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789? "
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# The files of a processor that makes one square of each picture.
_PROCESSOR = {
  "preprocessor_config.json": {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": EDGE},
    "max_image_size": {"longest_edge": EDGE},
    "do_image_splitting": False,
    "resample": 1,
    **_HALF,
  },
  "processor_config.json": {"processor_class": "SmolVLMProcessor"}
  | {"image_seq_len": SOFT_TOKENS},
}


def draw(rng: random.Random, count: int) -> Any:
  """Returns a Pillow image of `count` shapes in different cells."""
  picture = pillow.module("Image").new("RGB", (EDGE, EDGE), "white")
  pen = pillow.module("ImageDraw").Draw(picture)
  for cell in rng.sample(range(CELLS**2), count):
    row, column = divmod(cell, CELLS)
    color = tuple(rng.randrange(160) for _ in range(3))
    x, y = (CELL * place + rng.randrange(2, 5) for place in (column, row))
    edge = rng.randrange(8, 11)
    box = (x, y, x + edge, y + edge)
    kind = rng.randrange(3)
    if kind == 0:
      pen.ellipse(box, fill=color)
    elif kind == 1:
      pen.rectangle(box, fill=color)
    else:
      pen.line(box, fill=color, width=3)
      pen.line((x, y + edge, x + edge, y), fill=color, width=3)
  return picture


@dataclasses.dataclass(frozen=True)
class Shapes:
  """Records with drawn pictures, a fresh model, and the accuracy of answers.

  Attributes:
    folder: where pictures and models are written; None: a new temporary folder.
    seed: seed of the pictures to train on, and of the fresh model.
  """

  folder: pathlib.Path | None = None
  seed: int = 0

  @functools.cached_property
  def _home(self) -> pathlib.Path:
    return self.folder or pathlib.Path(tempfile.mkdtemp(prefix="shapes-"))

  def questions(self, count: int, *, held_out: bool = False) -> list[Record]:
    """Returns records {"prompt", "answer"} about new pictures.

    Args:
      count: number of records. A larger `count` only appends records.
      held_out: return questions about pictures that are not trained on.
    """
    # A text, since Random(-1) draws what Random(1) does.
    seed = "held_out" if held_out else f"seed_{self.seed}"
    rng, out, folder = random.Random(seed), [], self._home / seed
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
      file, shapes = folder / f"{number}.png", rng.randint(1, MAX_SHAPES)
      draw(rng, shapes).save(file)
      image = {"type": "image", "image": str(file)}
      parts = [image, {"type": "text", "text": "how many?"}]
      turn = {"role": "user", "content": parts}
      out.append({"prompt": [turn], "answer": str(shapes)})
    return out

  def lessons(self, count: int) -> list[Record]:
    """Returns records {"messages"} of the questions to train on, with their answers."""
    return [
      {"messages": [*x["prompt"], {"role": "assistant", "content": x["answer"]}]}
      for x in self.questions(count)
    ]

  @property
  def tokenizer(self) -> TokenizerAdapter:
    """A tokenizer of single characters."""
    vocabulary = [*_SPECIAL, *_CHARACTERS]
    backend = tokenizers.Tokenizer(
      tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"
      )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
      tokenizers.Regex(r"[\s\S]"), "isolated"
    )
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(list(_SPECIAL))
    return TokenizerAdapter(
      backend,
      chat_template=_TEMPLATE,
      bos_token="<begin>",
      eos_token="<end>",
      pad_token="<pad>",
    )

  def fresh_model(self) -> str:
    """Writes a model with random weights, and returns its folder."""
    folder, tokenizer = self._home / "fresh", self.tokenizer
    config = ModelConfig(
      num_layers=3,
      vocab_size=len(_SPECIAL) + len(_CHARACTERS),
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
      image_token_id=_SPECIAL.index("<image>"),
    )
    model = AutoModel.from_config(config, seed=self.seed, dtype=jnp.float32)
    save_pretrained(model, folder, hf_fields={"eos_token_id": tokenizer.eos_id()})
    tokenizer.save(folder)
    for name, content in _PROCESSOR.items():
      (folder / name).write_text(json.dumps(content))
    return str(folder)

  def answers(self, model: str, records: list[Record]) -> list[str]:
    """Returns greedy answers of the model of a folder."""
    loaded = AutoModel.from_pretrained(model, images=True, dtype=jnp.float32)
    reader, tokenizer = ImageReader(model, loaded.config), self.tokenizer
    prompts, images = [], []
    for record in records:
      text = tokenizer.apply_chat_template(record["prompt"])
      files = [record["prompt"][0]["content"][0]["image"]]
      pictures = reader.open(files, None, "a question")
      prompts.append(np.asarray(tokenizer.encode(reader.expand_text(pictures, text))))
      images.append(reader.prompt(pictures, SOFT_TOKENS))
    out = Sampler(loaded, tokenizer)(prompts, ANSWER_LENGTH, images=images)
    return out.text

  def accuracy(self, model: str, count: int = 200) -> float:
    """Returns the share of right answers to held-out questions."""
    records = self.questions(count, held_out=True)
    texts = self.answers(model, records)
    return float(np.mean([x["answer"] == y for x, y in zip(records, texts)]))


def exact_match(prompts, completions, answer):
  """Returns the rewards: 1 for the right number, else 0."""
  del prompts
  return [float(text == number) for text, number in zip(completions, answer)]
