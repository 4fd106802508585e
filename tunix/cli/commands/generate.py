"""`tunix generate`: continues prompts with a model and an optional adapter."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from tunix.cli.commands.parts import arguments
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.make import loading
from tunix.cli.run import folder as run_folder
from tunix.generate.engine_sampler import sampler_of
from tunix.generate.sizes import text_size
from tunix.utils import terminal, text_files


def main(argv: Sequence[str]) -> None:
  """Runs `tunix generate`.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: a number out of range, or --chat without a chat template.
  """
  args = parser().parse_args(argv)
  _check(args)
  options = arguments.sampling_options(args)
  prompts = texts = args.prompt or _read_prompts(args.prompt_file)
  folder, adapter = run_folder.export_of(args.model, args.adapter)
  tokenizer = loading.load_tokenizer(folder, adapter, args.tokenizer)
  if args.chat and not tokenizer.has_chat_template():
    raise ValueError(
      "--chat is given, but the tokenizer has no chat template; omit it, or put a "
      "chat_template.jinja into the model's folder"
    )
  model = loading.load_model(folder, adapter, args.dtype)
  if (most := getattr(model.config, "max_position", None)) is not None:
    text_size.check(texts, most, "Shorten the prompt, or choose another model")
  if args.chat:
    turns = [[{"role": "user", "content": text}] for text in texts]
    prompts = [tokenizer.apply_chat_template(turn, tokenize=True) for turn in turns]
  sampler: Any = sampler_of(model, tokenizer, frozen=True)
  steps = args.max_new_tokens
  if steps is None:
    lengths = [len(sampler.tokenize(prompt)) for prompt in prompts]
    # At least 1, so that the sampler reports prompts that are too long.
    steps = max(loading.new_tokens(model, lengths, None), 1)
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
  made = Parser("tunix generate", "continues prompts with a model")
  loading.add_model(made)
  prompts = made.add_mutually_exclusive_group(required=True)
  prompts.add_argument(
    "--prompt", metavar="TEXT", nargs="+", help="one prompt or several"
  )
  prompts.add_argument(
    "--prompt_file",
    metavar="FILE",
    help='a prompt a line, or {"prompt": text} in a .jsonl file; - is standard input',
  )
  add = made.add_argument
  add("--chat", action="store_true", help="render each prompt as a user's turn")
  arguments.add_sampling(made)
  add("--beam_size", type=int, metavar="K", help="beam search with K beams")
  add("--length_penalty", type=float, help="above 1, longer beams win more often")
  add("--stream", action="store_true", help="print one completion token by token")
  add("--json", action="store_true", help="print each completion as a line of JSON")
  return made


def _check(args: argparse.Namespace) -> None:
  arguments.check_sampling(args)
  is_one = args.prompt is not None and len(args.prompt) == 1
  if args.stream and (not is_one or args.json or (args.num_samples or 1) > 1):
    raise ValueError(
      "--stream prints one completion; give one prompt, and omit --num_samples and "
      "--json"
    )
  if args.stream and args.beam_size is not None:
    raise ValueError(
      "--stream cannot print beams, whose text changes until the end; omit --beam_size"
    )
