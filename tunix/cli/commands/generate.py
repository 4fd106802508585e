"""`tunix generate`: continues prompts with a model and an optional adapter."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from tunix.cli.commands.parts import pictures
from tunix.cli.commands.parts.arguments import ModelOptions, Parser, Samples
from tunix.cli.make import model_folders
from tunix.cli.run import folder as run_folder
from tunix.cli.settings.options import Section
from tunix.generate.engine_sampler import sampler_of
from tunix.generate.sizes import text_size
from tunix.models import calling
from tunix.utils import terminal, text_files
from tunix.utils.setting import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(Samples, ModelOptions):
  """The model, the prompts and the options of sampling.

  Attributes:
    model: Hugging Face folder, GGUF file, or output_dir of a run with an export.
    prompt: one prompt or several.
    prompt_file: a prompt a line, or {"prompt": text} in a .jsonl file; "-" is standard
      input.
    chat: renders each prompt as a user's turn.
    image: image file before the text of each turn; needs `chat`.
    beam_size: number of beams of a beam search; null: no beams.
    length_penalty: above 1, longer beams win more often.
    stream: prints one completion token by token.
    json: prints each completion as a line of JSON.
  """

  model: str = setting(path="read")
  prompt: tuple[str, ...] = ()
  prompt_file: str | None = setting(None, path="read")
  chat: bool = False
  image: tuple[str, ...] = setting((), repeats=True)
  beam_size: int | None = None
  length_penalty: float | None = None
  stream: bool = False
  json: bool = False

  def __post_init__(self):
    super().__post_init__()
    if bool(self.prompt) == (self.prompt_file is not None):
      raise ValueError(
        f"expected --prompt or --prompt_file, found {'both' if self.prompt else 'none'}"
        "; give one of them"
      )
    if self.image and not self.chat:
      raise ValueError(
        "--image is given without --chat; add it: the chat template says where an "
        "image stands"
      )
    several = len(self.prompt) != 1 or (self.num_samples or 1) > 1
    if self.stream and (several or self.json):
      raise ValueError(
        "--stream prints one completion; give one prompt, and omit --num_samples and "
        "--json"
      )
    if self.stream and self.beam_size is not None:
      raise ValueError(
        "--stream cannot print beams, whose text changes until the end; omit "
        "--beam_size"
      )


def main(argv: Sequence[str]) -> None:
  """Runs `tunix generate`.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: a number out of range, or --chat without a chat template.
  """
  args = parser().read(argv).build(GenerateOptions)
  options = args.options
  texts = [*args.prompt]
  if args.prompt_file is not None:
    texts = _read_prompts(args.prompt_file)
  prompts: list[Any] = texts
  folder, adapter = run_folder.export_of(args.model, args.adapter)
  tokenizer = model_folders.load_tokenizer(folder, adapter, args.tokenizer)
  if args.chat and not tokenizer.has_chat_template():
    raise ValueError(
      "--chat is given, but the tokenizer has no chat template; omit it, or put a "
      "chat_template.jinja into the model's folder"
    )
  if args.image:
    prompts, options["images"] = pictures.prompts_with_images(
      folder, args.image, texts, tokenizer
    )
  elif args.chat:
    turns = [[{"role": "user", "content": text}] for text in texts]
    prompts = [tokenizer.apply_chat_template(turn, tokenize=True) for turn in turns]
  model = model_folders.load_model(
    folder, adapter, args.dtype, images=True if args.image else None
  )
  if (most := calling.config_value(model, "max_position")) is not None:
    text_size.check(texts, most, "Shorten the prompt, or choose another model")
  sampler: Any = sampler_of(model, tokenizer, frozen=True)
  steps = args.max_new_tokens
  if steps is None:
    lengths = [len(sampler.tokenize(prompt)) for prompt in prompts]
    # At least 1, so that the sampler reports prompts that are too long.
    steps = max(model_folders.new_tokens(model, lengths, None), 1)
  if args.stream:
    for part in sampler.stream(prompts, steps, every=1, **options):
      print(terminal.shown(part.text), end="", flush=True)
    print()
    return
  output = sampler(prompts, max_generation_steps=steps, **options)
  for row, text in enumerate(output.text):
    prompt = texts[row // (args.num_samples or 1)]
    if args.json:
      reason = output.finish_reasons[row]
      record = {"prompt": prompt, "completion": text, "finish_reason": reason}
      print(terminal.shown(json.dumps(record, ensure_ascii=False)))
      continue
    if len(output.text) > 1:
      print(terminal.shown(f"--- {prompt}"))
    print(terminal.shown(text))


def _read_prompts(name: str) -> list[str]:
  """Reads the prompts of a file, one in each line that is not blank.

  Args:
    name: a text file, a .jsonl file of {"prompt": text}, or "-" for standard input.

  Raises:
    ValueError: there is no prompt, or a line of a .jsonl file is not {"prompt": text}.
    OSError: the file cannot be read.
  """
  if name == "-":
    text = sys.stdin.read().removeprefix("\ufeff")
  else:
    text = text_files.read(name)
  lines = [(i, x) for i, x in enumerate(text_files.lines(text), 1) if x.strip()]
  if not lines:
    raise ValueError(f"--prompt_file is {name}, which is empty; write a prompt a line")
  if not name.endswith(".jsonl"):
    return [line for _, line in lines]
  prompts = []
  for number, line in lines:
    try:
      record = json.loads(line)
    except json.JSONDecodeError as error:
      raise ValueError(f"{name}:{number} is not JSON ({error}); correct it") from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
      raise ValueError(f'{name}:{number} is not {{"prompt": "text"}}; correct it')
    prompts.append(prompt)
  return prompts


def parser() -> Parser:
  """Returns the parser of the arguments."""
  return Parser(
    "tunix generate", "continues prompts with a model", Section(GenerateOptions)
  )
