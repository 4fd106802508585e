"""`tunix chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from tunix.cli.commands.parts import pictures
from tunix.cli.commands.parts.arguments import ModelOptions, Parser, Sampling
from tunix.cli.commands.parts.chat_server import (
  ChatServer,
  Messages,
  Part,
  Unanswered,
  image_part,
  key_of,
)
from tunix.cli.make import model_folders
from tunix.cli.run import folder as run_folder
from tunix.cli.settings.options import Section
from tunix.generate.engine_sampler import sampler_of
from tunix.generate.external.rows import EngineError
from tunix.utils import terminal
from tunix.utils.setting import known_values, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(Sampling, ModelOptions):
  """The model, or its server, and the options of sampling.

  Attributes:
    model: Hugging Face folder, GGUF file, or output_dir of a run with an export. With
      `url` a name on the server; null: its first.
    url: server with OpenAI's routes, such as http://127.0.0.1:8000, in place of a
      folder.
    api_key_env: variable that has the server's API key.
    system: the system turn.
    images: loads the vision tower; null: see docs/guides/images.md. With it, the line
      `/image FILE` puts an image before the text of the next turn.
  """

  model: str | None = setting(None, path="read")
  url: str | None = None
  api_key_env: str | None = None
  system: str | None = None
  images: bool | None = None

  def __post_init__(self):
    super().__post_init__()
    if self.url is None:
      if self.model is None:
        raise ValueError("--model is missing: give a folder, or a server with --url")
      if self.api_key_env is not None:
        raise ValueError("--api_key_env needs --url: a local model has no key")
      return
    for name in known_values(self, ("adapter", "tokenizer", "dtype", "images")):
      raise ValueError(
        f"--{name} and --url exclude each other: the server has loaded its model. "
        "Choose one of its models, or adapters, by --model NAME"
      )


# Returns an image file as a part of a message; raises ImportError, OSError, ValueError.
Opened = Callable[[str], dict[str, Any]]

_IMAGE = "/image"

# Streams the reply to a conversation.
Replies = Callable[[Messages], Generator[Part, None, None]]


def main(argv: Sequence[str]) -> None:
  """Runs `tunix chat`.

  A line of standard input is a user's turn, or a command that begins with "/". Replies
  are streamed to standard output. Ctrl-C ends a reply; between two replies it ends the
  program.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: a number out of range, options that exclude each other, a tokenizer
      without a chat template, or a server that refuses the key.
    EngineError: the server of `--url` gives no answer.
  """
  args = parser().read(argv).build(ChatOptions)
  start: Messages = [{"role": "system", "content": args.system}] if args.system else []
  replies, opened = _local(args, start) if args.url is None else _remote(args)
  messages, images = list(start), []
  for text in _turns():
    if text == "/exit":
      return
    if text == "/reset":
      messages, images = list(start), []
      continue
    if text.split()[0] == _IMAGE:
      images += _image(text.removeprefix(_IMAGE).strip(), opened)
      continue
    parts = [*images, {"type": "text", "text": text}]
    turn = {"role": "user", "content": parts if images else text}
    answer = _reply(replies, [*messages, turn])
    images = []  # of a turn without a reply, too: the images may be the cause
    if answer is not None:
      messages += [turn, {"role": "assistant", "content": answer}]


def _image(file: str, opened: Opened) -> list[dict[str, Any]]:
  """Returns the image as a part of a message; none, and a line, if it is unusable."""
  try:
    if not file:
      raise ValueError("/image has no file; expected /image FILE")
    return [opened(file)]
  except (ImportError, OSError, ValueError) as error:
    print(terminal.shown(f"{error}; no image was added", sys.stderr), file=sys.stderr)
    return []


def _local(args: ChatOptions, start: Messages) -> tuple[Replies, Opened]:
  """Loads a model into this process."""
  assert args.model is not None
  model, adapter = run_folder.export_of(args.model, args.adapter)
  tokenizer = model_folders.load_tokenizer(model, adapter, args.tokenizer)
  # Fails before the weights are read if there is no template, or no system turn in it.
  tokenizer.apply_chat_template([*start, {"role": "user", "content": "Hello"}])
  loaded = model_folders.load_model(model, adapter, args.dtype, args.images)
  reader = model_folders.image_reader(model, args.images)
  # The cache of the conversation is kept: a turn prefills only what is new.
  sampler: Any = sampler_of(loaded, tokenizer, frozen=True)

  def replies(messages: Messages) -> Generator[Part, None, None]:
    try:
      prompt, images = pictures.conversation(reader, messages, sampler.tokenizer)
    except ValueError as error:
      raise Unanswered(str(error)) from error
    options = args.options if images is None else args.options | {"images": [images]}
    steps = model_folders.new_tokens(
      sampler.transformer, [len(prompt)], args.max_new_tokens
    )
    if steps < 1:
      raise Unanswered(
        f"the conversation has {len(prompt)} tokens, more than the model has "
        "positions; type /reset or a shorter message"
      )
    for part in sampler.stream([prompt], steps, every=1, **options):
      yield Part(part.text)

  def opened(file: str) -> dict[str, Any]:
    part = {"type": "image", "image": os.path.expanduser(file)}
    pictures.reading(reader).open([part["image"]], None, "/image")
    return part

  return replies, opened


def _remote(args: ChatOptions) -> tuple[Replies, Opened]:
  """Connects to a server."""
  options = args.options
  if args.max_new_tokens is not None:
    options["max_new_tokens"] = args.max_new_tokens
  assert args.url is not None
  server = ChatServer(args.url, args.model, key_of(args.api_key_env), options)
  if sys.stdin.isatty():
    name = terminal.shown(server.model, sys.stderr)
    print(f"talking to {name} at {args.url}", file=sys.stderr)
  return server.stream, image_part


def _turns() -> Iterator[str]:
  """Yields the lines of standard input that are not blank."""
  while True:
    if sys.stdin.isatty():
      print("> ", end="", file=sys.stderr, flush=True)
    if not (line := sys.stdin.readline()):
      return
    if text := line.strip():
      yield text


def _reply(replies: Replies, messages: Messages) -> str | None:
  """Prints the model's turn and returns it; None: there is none."""
  content: list[str] = []
  is_printed = False
  parts = replies(messages)
  try:
    for part in parts:
      print(terminal.shown(part.text), end="", flush=True)
      is_printed = True
      if part.is_content:
        content.append(part.text)
  except KeyboardInterrupt:
    is_printed = True  # the conversation keeps the part of the reply that was printed
  except (Unanswered, EngineError) as error:
    if is_printed:
      print(flush=True)
    # A person can send the turn again; a script must see the failure.
    if isinstance(error, EngineError) and not sys.stdin.isatty():
      raise
    print(terminal.shown(str(error), sys.stderr), file=sys.stderr)
    return None
  finally:
    parts.close()  # so that a server learns of Ctrl-C
  print(flush=True)
  return "".join(content)


def parser() -> Parser:
  """Returns the parser of the arguments."""
  about = (
    "talks to a model; /image FILE adds an image to the next turn, /reset starts a new "
    "conversation, /exit ends"
  )
  return Parser("tunix chat", about, Section(ChatOptions))
