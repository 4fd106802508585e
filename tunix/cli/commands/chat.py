"""`tunix chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tunix.cli.build import loading
from tunix.cli.commands import arguments
from tunix.cli.commands.arguments import Parser
from tunix.cli.run import folder as run_folder
from tunix.generate.engine_sampler import sampler_of
from tunix.utils import terminal

Messages = list[dict[str, str]]


def main(argv: Sequence[str]) -> None:
  """Runs `tunix chat`.

  A line of standard input is a user's turn. Replies are streamed to standard output.
  Ctrl-C ends a reply; between two replies it ends the program.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: a number out of range, or a tokenizer without a chat template.
  """
  args = parser().parse_args(argv)
  arguments.check_sampling(args)
  options = arguments.sampling_options(args)
  model, adapter = run_folder.export_of(args.model, args.adapter)
  tokenizer = loading.load_tokenizer(model, adapter, args.tokenizer)
  start: Messages = [{"role": "system", "content": args.system}] if args.system else []
  # Fails before the weights are read if there is no template, or no system turn in it.
  tokenizer.apply_chat_template([*start, {"role": "user", "content": "Hello"}])
  loaded = loading.load_model(model, adapter, args.dtype)
  # The cache of the conversation is kept: a turn prefills only what is new.
  sampler = sampler_of(loaded, tokenizer, frozen=True)
  messages = list(start)
  for text in _turns():
    if text == "/exit":
      return
    if text == "/reset":
      messages = list(start)
      continue
    turn = {"role": "user", "content": text}
    answer = _reply(sampler, [*messages, turn], args.max_new_tokens, options)
    if answer is not None:
      messages += [turn, {"role": "assistant", "content": answer}]


def _turns() -> Iterator[str]:
  """Yields the lines of standard input that are not blank."""
  while True:
    if sys.stdin.isatty():
      print("> ", end="", file=sys.stderr, flush=True)
    if not (line := sys.stdin.readline()):
      return
    if text := line.strip():
      yield text


def _reply(
  sampler: Any,
  messages: Messages,
  max_new_tokens: int | None,
  options: dict[str, Any],
) -> str | None:
  """Prints the model's turn and returns it; None: the conversation is too long."""
  prompt = sampler.tokenizer.apply_chat_template(messages, tokenize=True)
  steps = loading.new_tokens(sampler.transformer, [len(prompt)], max_new_tokens)
  if steps < 1:
    print(
      f"the conversation has {len(prompt)} tokens, more than the model has positions; "
      "type /reset or a shorter message",
      file=sys.stderr,
    )
    return None
  parts: list[str] = []
  try:
    for part in sampler.stream([prompt], steps, every=1, **options):
      print(terminal.shown(part.text), end="", flush=True)
      parts.append(part.text)
  except KeyboardInterrupt:
    pass  # the conversation keeps the part of the reply that was printed
  print(flush=True)
  return "".join(parts)


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser(
    "tunix chat", "talks to a model; /reset starts a new conversation, /exit ends"
  )
  loading.add_model(made)
  made.add_argument("--system", metavar="TEXT", help="the system turn")
  arguments.add_sampling(made, samples=False)
  return made
