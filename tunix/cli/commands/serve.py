"""`tunix serve`: answers OpenAI's and vLLM's HTTP requests with a model."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from tunix.cli.commands.parts import arguments
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.make import loading
from tunix.cli.run import folder as run_folder
from tunix.generate.decoders import decoders
from tunix.generate.engine import replicas
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.driver import Driver
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.replicas import Replicas
from tunix.serve import server
from tunix.serve.settings import TOOL_FORMATS, ServeSettings
from tunix.tinker import app as tinker_app, service as service_lib
from tunix.tinker.settings import TinkerSettings, read_keys
from tunix.utils import env, mesh as mesh_lib, optional, text_files

KEY = "TUNIX_API_KEY"
_MAX_TOKENS = 2048
_MODEL_DRAFTS = 4  # tokens that a draft model proposes in a round


def main(argv: Sequence[str]) -> None:
  """Runs `tunix serve` until SIGTERM or Ctrl-C.

  Raises:
    FileNotFoundError: there is no such model, adapter or key file.
    OSError: the address cannot be used.
    ImportError: the extra `serve` is not installed.
    ValueError: a number out of range, two adapters of one name; or an address that
      other machines can reach, without an API key.
    RuntimeError: another process uses the folder of the training API, or a file in it
      is damaged.
  """
  args = parser().parse_args(argv)
  for package in ("starlette", "uvicorn", "prometheus_client"):
    optional.require(package, "the server", "tunix[serve]")
  settings = _settings(args)
  adapters = _adapters(args, settings.model_name)
  config = _config(args, len(adapters))
  # None: one engine on the default device, with its arrays on no mesh.
  is_one = args.replicas == args.tp == 1
  meshes = None if is_one else replicas.groups(args.replicas, args.tp)
  # All that can be wrong is found before the weights are read, which takes minutes.
  server.check_address(settings)
  tinker = _tinker_settings(args)
  if tinker is not None:
    service_lib.check_files(tinker)
  folder, own = run_folder.export_of(args.model, None)
  tokenizer = loading.load_tokenizer(folder, own, args.tokenizer)

  def load(path: Any, adapter: Any = None) -> Any:
    with mesh_lib.use_mesh(meshes[0] if meshes else None):
      return loading.load_model(str(path), adapter, args.dtype)

  model = load(folder, own)
  config = _within_positions(config, args, model)
  driver, engine = _driver_of(args, model, tokenizer, config, meshes, load)
  for name, place in adapters.items():
    engine.load_adapter(name, place)
  size = f"for {config.slots} slots of {config.max_tokens} tokens"
  grammars = _grammars(driver.engine, tokenizer)
  engine.warm_up(
    constraints=grammars is not None,
    on_part=lambda n, m: print(f"compiling {n} of {m} {size}", flush=True),
  )
  ready = f"serving {settings.model_name} at"
  service = None
  if tinker is not None:
    driver.start()
    service = service_lib.Service(
      model,
      tinker,
      name=settings.model_name,
      driver=driver,
      tokenizer_name=args.tokenizer or args.model,
    )
  server.serve(
    driver,
    settings,
    grammars=grammars,
    # Adapters in training belong to the base that the service was started with.
    load_model=load if service is None else None,
    # A program that starts the server reads this line from a pipe.
    on_start=lambda address: print(ready, address, flush=True),
    more=None if service is None else tinker_app.routes(service),
    on_stop=(lambda: None) if service is None else service.close,
    ends_process=True,
  )


def _driver_of(
  args: argparse.Namespace,
  model: Any,
  tokenizer: Any,
  config: EngineConfig,
  meshes: Sequence[Any] | None,
  load: Callable[..., Any],
) -> tuple[Any, Any]:
  """Returns the driver of the model, and what loads adapters and compiles."""
  draft = None
  if args.draft_model is not None:
    draft = load(*run_folder.export_of(args.draft_model, None))
  if meshes:
    replicated = Replicas.of_model(model, tokenizer, config, meshes, draft)
    return replicated, replicated
  engine = Engine(model, tokenizer, config, draft_model=draft)
  return Driver(engine), engine


def _tinker_settings(args: argparse.Namespace) -> TinkerSettings | None:
  """Returns the settings of the training service; None without `--tinker`.

  Raises:
    FileNotFoundError: there is no such file of keys.
    ValueError: the file has another form, or the model is split or copied.
  """
  if not args.tinker:
    return None
  if args.replicas != 1 or args.tp != 1:
    raise ValueError(
      f"--tinker with --replicas {args.replicas} and --tp {args.tp}: the training "
      "service takes one engine on one device. Leave both at 1"
    )
  file = args.tinker_keys
  return TinkerSettings(
    root=pathlib.Path(args.tinker_root).expanduser(),
    keys={} if file is None else read_keys(pathlib.Path(file).expanduser()),
    max_tokens=_MAX_TOKENS if args.max_tokens is None else args.max_tokens,
  )


def _settings(args: argparse.Namespace) -> ServeSettings:
  root = args.checkpoint_root
  return ServeSettings(
    host=args.host,
    port=args.port,
    api_key=read_key(args.api_key_file),
    model_name=args.name or _name_of(args.model),
    checkpoint_root=None if root is None else pathlib.Path(root).expanduser(),
    tool_format=args.tool_format,
    max_concurrent=args.max_concurrent,
    max_queue=args.max_queue,
    proxies=tuple(args.proxy or ()),
    drain_timeout=args.drain_timeout,
  )


def read_key(file: str | None) -> str | None:
  """Returns the API key of the file or, without one, of the environment.

  It is no argument of its own: every user of a machine can list arguments.
  """
  if file is None:
    return env.value(KEY)
  return text_files.read(file).strip()


def _name_of(model: str) -> str:
  """Returns the last part of a folder or a hub id, also of "." and ".."."""
  return os.path.basename(os.path.abspath(os.path.expanduser(model)))


def _adapters(args: argparse.Namespace, model_name: str) -> dict[str, pathlib.Path]:
  """Returns the folder of each adapter."""
  adapters: dict[str, pathlib.Path] = {}
  for text in args.adapter or ():
    name, _, folder = text.partition("=")
    if not name or not folder:
      raise ValueError(f"--adapter is {text!r}, expected NAME=FOLDER")
    if name in (model_name, *adapters):
      raise ValueError(
        f"--adapter is {text!r}, but {name!r} is the name of the model or of another "
        "adapter: give each one its own name, or rename the model with --name"
      )
    adapters[name] = pathlib.Path(folder).expanduser()
    if not adapters[name].is_dir():
      raise FileNotFoundError(f"--adapter is {text!r}, and there is no such folder")
  return adapters


def _config(args: argparse.Namespace, adapters: int) -> EngineConfig:
  ranks, drafts = args.adapter_ranks, args.draft_tokens
  if drafts is None:
    drafts = 0 if args.draft_model is None else _MODEL_DRAFTS
  if ranks is None:
    ranks = 64 * (bool(adapters) + args.tinker)
  return EngineConfig(
    slots=args.slots,
    max_tokens=_MAX_TOKENS if args.max_tokens is None else args.max_tokens,
    cache_tokens=args.cache_tokens,
    rounds=args.rounds,
    draft_tokens=drafts,
    adapter_ranks=ranks,
  )


def engine_config(args: argparse.Namespace, model: Any) -> EngineConfig:
  """Returns the sizes of the engine that serves a model.

  Args:
    args: arguments of `parser`.
    model: the model, or its shapes.

  Raises:
    ValueError: a number is out of range.
  """
  config = _config(args, len(args.adapter or ()))
  return _within_positions(config, args, model)


def _within_positions(
  config: EngineConfig, args: argparse.Namespace, model: Any
) -> EngineConfig:
  """Lowers the default of `--max_tokens` to the positions of the model.

  Raises:
    ValueError: the number was given, and the model has fewer positions.
  """
  positions = decoders.max_positions(model)
  if positions is None or config.max_tokens <= positions:
    return config
  if args.max_tokens is not None:
    raise ValueError(
      f"--max_tokens is {args.max_tokens}, but the model has {positions} positions: "
      "lower it"
    )
  return dataclasses.replace(config, max_tokens=positions)


def _grammars(engine: Any, tokenizer: Any) -> Any:
  """Returns the builder of constraints; None without the extra `grammar`."""
  from tunix.generate.engine import grammar

  try:
    return grammar.Grammars(tokenizer, engine.vocab_size, tokenizer.eos_ids())
  except ImportError:
    return None


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser("tunix serve", "answers HTTP requests of OpenAI's and vLLM's form")
  add = made.add_argument
  add("model", metavar="MODEL", help="Hugging Face folder, or output_dir of a run")
  add(
    "--adapter",
    metavar="NAME=FOLDER",
    action="append",
    help="PEFT folder; requests choose it as model NAME. May be given several times",
  )
  add("--tokenizer", metavar="FOLDER", help="default: the model's")
  add("--dtype", choices=("float32", "bfloat16", "float16"))
  add("--name", help="name of the model in requests; default: that of its folder")
  add("--host", default="127.0.0.1", help="any other than a local one needs a key")
  add("--port", type=int, default=8000, help="0: a free one, which is printed")
  add(
    "--api_key_file",
    metavar="FILE",
    help=f"file with the API key; default: the variable {KEY}, else no key",
  )
  add("--replicas", type=int, default=1, help="engines, each on its own devices")
  add("--tp", type=int, default=1, help="devices that split a replica's weights")
  add("--slots", type=int, default=8, help="completions that run at the same time")
  add(
    "--max_tokens",
    type=int,
    help=f"tokens of a prompt and its completion; default: {_MAX_TOKENS}, or the "
    "positions of the model",
  )
  add("--cache_tokens", type=int, help="tokens of the cache; default: all slots full")
  add(
    "--rounds", type=int, default=16, help="most tokens between two parts of a stream"
  )
  add(
    "--draft_tokens",
    type=int,
    help="drafts of a round, by prompt lookup or --draft_model; 0: none. Default: "
    f"{_MODEL_DRAFTS} with --draft_model, else 0",
  )
  add(
    "--draft_model",
    metavar="FOLDER",
    help="small model with the same tokenizer, whose tokens the model checks",
  )
  add("--adapter_ranks", type=int, help="ranks of all adapters together; default 64")
  add(
    "--tinker", action="store_true", help="serve the Tinker training API under /api/v1"
  )
  add(
    "--tinker_root",
    metavar="FOLDER",
    default="tinker",
    help="files of the training API: runs, checkpoints, requests; default: tinker",
  )
  add(
    "--tinker_keys",
    metavar="FILE",
    help="file with a line NAME KEY for each tenant of the training API; keys begin "
    "with tml-",
  )
  add("--tool_format", choices=TOOL_FORMATS, default="auto", help="form of tool calls")
  add("--checkpoint_root", metavar="FOLDER", help="where new weights may be read")
  add("--max_concurrent", type=int, default=64, help="requests that run")
  arguments.add_admission(made)
  return made
