"""`tunix generate`: continues prompts with a model, and an adapter if one is given."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from tunix.cli.build import loading
from tunix.cli.commands.arguments import (
  Parser,
  add_sampling,
  check_sampling,
  sampling_options,
)
from tunix.cli.run import folder as run_folder
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter


def main(argv: Sequence[str]) -> None:
  """Runs `tunix generate`.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: a number out of range, or --chat without a chat template.
  """
  args = _parse(argv)
  _check(args)
  texts = args.prompt or _read_prompts(args.prompt_file)
  folder, adapter = run_folder.export_of(args.model, args.adapter)
  tokenizer = loading.load_tokenizer(folder, adapter, args.tokenizer)
  if args.chat and not tokenizer.has_chat_template():
    raise ValueError(
      "--chat is given and the tokenizer has no chat template: leave it out, or put "
      "a chat_template.jinja into the model's folder"
    )
  prompts = [_as_chat(text, tokenizer) if args.chat else text for text in texts]
  sampler = Sampler(loading.load_model(folder, adapter, args.dtype), tokenizer)
  steps = args.max_new_tokens
  if steps is None:
    lengths = [len(sampler.tokenize(prompt)) for prompt in prompts]
    # 1 where nothing fits: the sampler says so.
    steps = max(loading.new_tokens(sampler.transformer, lengths, None), 1)
  if args.stream:
    for part in sampler.stream(prompts, steps, every=1, **sampling_options(args)):
      print(part.text, end="", flush=True)
    print()
    return
  output = sampler(prompts, max_generation_steps=steps, **sampling_options(args))
  for row, text in enumerate(output.text):
    prompt = texts[row // (args.num_samples or 1)]
    if args.json:
      ended = output.finish_reasons[row]
      record = {"prompt": prompt, "completion": text, "finish_reason": ended}
      print(json.dumps(record, ensure_ascii=False))
      continue
    if len(output.text) > 1:
      print(f"--- {prompt}")
    print(text)


def _read_prompts(name: str) -> list[str]:
  """The prompts of a file, one a line; blank lines are none.

  Raises:
    ValueError: there is none, or a line of a .jsonl file is no {"prompt": text}.
    OSError: the file cannot be read.
  """
  if name == "-":
    text = sys.stdin.read()
  else:
    text = pathlib.Path(name).expanduser().read_text("utf-8")
  lines = [(i, x) for i, x in enumerate(text.splitlines(), 1) if x.strip()]
  if not lines:
    raise ValueError(f"--prompt_file {name} holds no prompt: write one a line")
  if not name.endswith(".jsonl"):
    return [line for _, line in lines]
  prompts = []
  for number, line in lines:
    try:
      record = json.loads(line)
    except json.JSONDecodeError as error:
      raise ValueError(f"{name}:{number} is no JSON ({error}): correct it") from error
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
      raise ValueError(f'{name}:{number} is no {{"prompt": "text"}}: correct it')
    prompts.append(prompt)
  return prompts


def _as_chat(text: str, tokenizer: TokenizerAdapter) -> str:
  return tokenizer.apply_chat_template([{"role": "user", "content": text}])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = Parser("tunix generate", (__doc__ or "").split(":", 1)[1].strip())
  loading.add_model(parser)
  prompts = parser.add_mutually_exclusive_group(required=True)
  prompts.add_argument("--prompt", metavar="TEXT", nargs="+", help="one or several")
  prompts.add_argument(
    "--prompt_file",
    metavar="FILE",
    help='a prompt a line; of a .jsonl file {"prompt": text}; - is standard input',
  )
  parser.add_argument("--chat", action="store_true", help="prompts are a user's turns")
  add_sampling(parser)
  parser.set_defaults(max_new_tokens=None)
  parser.add_argument(
    "--beam_size", type=int, metavar="K", help="search with K beams, nothing is drawn"
  )
  parser.add_argument(
    "--length_penalty", type=float, help="above 1, longer beams win more often"
  )
  parser.add_argument(
    "--stream", action="store_true", help="print text as it comes; one completion"
  )
  parser.add_argument(
    "--json", action="store_true", help="a JSON object a completion, one a line"
  )
  return parser.parse_args(argv)


def _check(args: argparse.Namespace) -> None:
  check_sampling(args)
  many = args.prompt is None or len(args.prompt) > 1
  if args.stream and (many or args.json or (args.num_samples or 1) > 1):
    raise ValueError(
      "--stream prints one completion: give one prompt, no samples, no --json"
    )
  if args.stream and args.beam_size is not None:
    raise ValueError("--stream cannot show beams, whose text changes to the end")
