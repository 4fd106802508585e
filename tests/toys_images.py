"""Tiny folders of models with images, and records with drawn pictures."""

import json
from typing import Any

import numpy as np
import tokenizers
from PIL import Image

from tests.models import checkpoints
from tests.models.images import toys as processors
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.adapters import lora_modules
from tunix.models.automodel import AutoModel

NAMES = ("gemma3", "smolvlm", "ministral3", "gemma4", "qwen3_5", "qwen3_vl")
SOFT = 79

_GEMMA3 = r"""
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\n' -}}
{%- if message.content is string -%}
{{- message.content | trim -}}
{%- else -%}
{%- for part in message.content -%}
{{- '<start_of_image>' if part.type == 'image' else part.text | trim -}}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""

# It prints parts alone.
_SMOLVLM = r"""
{{- '<|im_start|>' -}}
{%- for message in messages -%}
{{- message.role + ': ' -}}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text -}}
{%- elif part.type == 'image' -%}{{- '<image>' -}}{%- endif -%}
{%- endfor -%}
{{- '<end_of_utterance>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""

_MINISTRAL3 = r"""
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{- message.content + eos_token -}}
{%- else -%}
{{- '[INST]' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{{- '[IMG]' if part.type == 'image' else part.text -}}
{%- endfor -%}
{%- endif -%}
{{- '[/INST]' -}}
{%- endif -%}
{%- endfor -%}
"""

_GEMMA4 = r"""
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<|turn>' + role + '\n' -}}
{%- if message.content is string -%}
{{- message.content | trim -}}
{%- else -%}
{%- for part in message.content -%}
{{- '<|image|>' if part.type == 'image' else part.text | trim -}}
{%- endfor -%}
{%- endif -%}
{{- '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\n' -}}{%- endif -%}
"""

_QWEN = r"""
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

# Processor files; template; BOS; EOS; special tokens by id.
_TOYS = {
  "gemma3": (
    processors._gemma3(56, tokens=4),
    _GEMMA3,
    {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<start_of_turn>", 4: "<end_of_turn>"}
    | {77: "<start_of_image>", 78: "<end_of_image>", SOFT: "<image_soft_token>"},
  ),
  "smolvlm": (
    processors._smolvlm(48, 24, True, 4),
    _SMOLVLM,
    {0: "<pad>", 1: "<|im_start|>", 2: "<end_of_utterance>"}
    | {3: "<fake_token_around_image>", 4: "<global-img>", SOFT: "<image>"}
    | {5 + i: f"<row_{1 + i // 2}_col_{1 + i % 2}>" for i in range(4)},
  ),
  "ministral3": (
    processors._pixtral(4, 2, 24),
    _MINISTRAL3,
    {0: "<pad>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]"}
    | {77: "[IMG_BREAK]", 78: "[IMG_END]", SOFT: "[IMG]"},
  ),
  "gemma4": (
    processors._gemma4(4, 3, 8),
    _GEMMA4,
    {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<|turn>", 4: "<turn|>"}
    | {77: "<|image>", 78: "<image|>", SOFT: "<|image|>"},
  ),
}
_TOYS |= dict.fromkeys(
  ("qwen3_5", "qwen3_vl"),
  (
    processors._qwen(4, 2, 256, 600),
    _QWEN,
    {0: "<pad>", 1: "<|im_start|>", 2: "<|im_end|>"}
    | {77: "<|vision_start|>", 78: "<|vision_end|>", SOFT: "<|image_pad|>"},
  ),
)
_ROLES: dict[str, dict[str, Any]] = {
  "gemma3": {"bos_token": "<bos>", "eos_token": "<eos>"},
  "smolvlm": {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>"},
  "ministral3": {"bos_token": "<s>", "eos_token": "</s>"},
  "gemma4": {"bos_token": "<bos>", "eos_token": "<eos>"},
  "qwen3_5": {"eos_token": "<|im_end|>"},
  "qwen3_vl": {"eos_token": "<|im_end|>"},
}


def tokenizer(name):
  """A token for each character, and the special tokens of the family."""
  special = _TOYS[name][2]
  characters = list("abcdefghijklmnopqrstuvwxyz0123456789 \n:.?<>!")
  free = [i for i in range(80) if i not in special]
  vocabulary = {text: number for number, text in special.items()}
  vocabulary |= dict(zip([*characters, "<unk>"], free))
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(r"[\s\S]"), "isolated"
  )
  backend.decoder = tokenizers.decoders.Fuse()
  backend.add_special_tokens(list(special.values()))
  return TokenizerAdapter(
    backend, chat_template=_TOYS[name][1], pad_token="<pad>", **_ROLES[name]
  )


def folder(name, path):
  """A model folder with a tokenizer and the files of an image processor."""
  checkpoints.copy(f"{name}_vision", path)
  tokenizer(name).save(path)
  return processors.write(path, _TOYS[name][0])


def long_folder(name, path):
  """A folder as of `folder`, whose model has 256 positions in place of 64."""
  folder(name, path)
  values = json.loads((path / "config.json").read_text())
  sizes = values["text_config"]
  sizes["max_position_embeddings"] = 256
  if "original_max_position_embeddings" in (rope := sizes.get("rope_parameters", {})):
    rope["original_max_position_embeddings"] = 256
  (path / "config.json").write_text(json.dumps(values))
  return path


def adapted_modules(model):
  """The modules for images that PEFT adapts: not the projector of Gemma 3."""
  names = "vision_tower", "multi_modal_projector"
  paths = list(lora_modules.adaptable(model, images=True))
  return [name for name in names if any(path.startswith(name) for path in paths)]


def load(path, **options) -> Any:
  return AutoModel.from_pretrained(path, dtype="float32", images=True, **options)


def draw(path, seed, size=(20, 40)):
  """A picture of noise, and its path."""
  path.parent.mkdir(exist_ok=True, parents=True)
  levels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
  Image.fromarray(levels).save(path)
  return path


def message(text, *images):
  parts = [{"type": "image", "image": image} for image in images]
  return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def answered(*turns, answer):
  return {"messages": [*turns, {"role": "assistant", "content": answer}]}


def write_records(folder, count=8, kind="sft"):
  """A file of records with two, no or one images, whose paths are relative.

  The kinds are "sft", "pair" and "labelled".
  """
  for number in range(4):
    draw(folder / "pictures" / f"{number}.png", number)
  lines = []
  for number in range(count):
    images = [f"pictures/{(number + i) % 4}.png" for i in range((2 - number) % 3)]
    question, answer = message(f"what is {number}?", *images), f"it is {number}."
    lines.append(json.dumps(_record(kind, question, answer, number)))
  file = folder / "data.jsonl"
  file.write_text("\n".join(lines) + "\n")
  return file


def _record(kind, question, answer, number):
  if kind == "pair":
    return {"prompt": [question], "chosen": answer, "rejected": "i see nothing."}
  if kind == "labelled":
    return {"prompt": [question], "completion": answer, "label": number % 3 == 0}
  return answered(question, answer=answer)
