"""`tunix chat`: talks with a model; /reset forgets what was said, /exit ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tunix.cli.build import loading
from tunix.cli.commands.arguments import (
  Parser,
  add_sampling,
  check_sampling,
  sampling_options,
)
from tunix.cli.run import folder as run_folder
from tunix.generate.sampler import Sampler

Messages = list[dict[str, str]]


def main(argv: Sequence[str]) -> None:
  """Runs `tunix chat`. A line of standard input is a turn; replies go to standard
  output as they come. Ctrl-C ends a reply, and the program between two replies.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: a number out of range, or a tokenizer without a chat template.
  """
  args = _parse(argv)
  check_sampling(args)
  model, adapter = run_folder.export_of(args.model, args.adapter)
  tokenizer = loading.load_tokenizer(model, adapter, args.tokenizer)
  start: Messages = [{"role": "system", "content": args.system}] if args.system else []
  # A missing template, or one that knows no system, is said before weights are read.
  tokenizer.apply_chat_template([*start, {"role": "user", "content": "Hello"}])
  sampler = Sampler(loading.load_model(model, adapter, args.dtype), tokenizer)
  said = list(start)
  for text in _turns():
    if text == "/exit":
      return
    if text == "/reset":
      said = list(start)
      continue
    turn = {"role": "user", "content": text}
    answer = _reply(sampler, [*said, turn], args.max_new_tokens, sampling_options(args))
    if answer is not None:
      said += [turn, {"role": "assistant", "content": answer}]


def _turns() -> Iterator[str]:
  """What the user says, line by line; the prompt sign is for terminals."""
  while True:
    if sys.stdin.isatty():
      print("> ", end="", file=sys.stderr, flush=True)
    if not (line := sys.stdin.readline()):
      return
    if text := line.strip():
      yield text


def _reply(
  sampler: Sampler, messages: Messages, most: int | None, options: dict[str, Any]
) -> str | None:
  """Prints the model's turn and returns it; None: the conversation is too long."""
  prompt = sampler.tokenizer.apply_chat_template(messages, tokenize=True)
  steps = loading.new_tokens(sampler.transformer, [len(prompt)], most)
  if steps < 1:
    print(
      f"the conversation has {len(prompt)} tokens, more than the model has positions: "
      "/reset, or say less",
      file=sys.stderr,
    )
    return None
  parts: list[str] = []
  try:
    for part in sampler.stream([prompt], steps, every=1, **options):
      print(part.text, end="", flush=True)
      parts.append(part.text)
  except KeyboardInterrupt:
    pass  # what was said until then stays in the conversation
  print(flush=True)
  return "".join(parts)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = Parser("tunix chat", (__doc__ or "").split(":", 1)[1].strip())
  loading.add_model(parser)
  parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
  add_sampling(parser, samples=False)
  parser.set_defaults(max_new_tokens=None)
  return parser.parse_args(argv)
