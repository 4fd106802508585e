"""`tunix serve`: answers OpenAI's and vLLM's HTTP requests with a model."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

from flax import nnx

from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.make import model_folders
from tunix.cli.run import folder as run_folder
from tunix.cli.settings.export import Dtype
from tunix.cli.settings.options import Section, Values
from tunix.cli.settings.run import check_cache
from tunix.data.images import ImageReader
from tunix.generate.decoders import decoders
from tunix.generate.engine import mtp, replicas
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.driver import Driver
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.replicas import Replicas
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.transformer.model import Transformer
from tunix.plan import shipped
from tunix.serve import server
from tunix.serve.settings import ServeSettings
from tunix.tinker import app as tinker_app, service as service_lib
from tunix.tinker.settings import TinkerSettings
from tunix.utils import checks, mesh as mesh_lib, optional, terminal
from tunix.utils.setting import setting

_MODEL_DRAFTS = 4  # tokens that a draft model proposes in a round
_MTP = "mtp"  # as --draft_model: the model's own layer for further tokens
_MTP_DRAFTS = 1  # the number of tokens that such a layer was trained to predict
_ADAPTER_RANKS = 64
_TINKER = "tinker_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
  """The model that is served, and its devices.

  Attributes:
    model: Hugging Face folder, GGUF file, or output_dir of a run with an export.
    adapter: NAME=FOLDER of PEFT's form; requests choose it as model NAME.
    tokenizer: folder of the tokenizer; null: that of the model.
    dtype: dtype of the computation; null: that of the checkpoint.
    weights: stores the kernels of layers in 8 bits, with a scale for each output; null:
      in the dtype of the checkpoint.
    images: loads the vision tower; null: see docs/guides/images.md. Without it,
      requests with images are refused.
    replicas: engines, each on its own devices.
    tp: devices that split the weights of a replica.
    draft_model: small model with the same tokenizer, whose tokens the model checks; or
      mtp, the layer for further tokens that the model's folder has.
    tinker: serves the Tinker training API under /api/v1.
    all_widths: compiles the programs of plain requests of every length at the start,
      instead of while the first texts run; has an effect where attention reads rows,
      the default on CPUs.
    compilation_cache: folder that keeps compiled programs, so that a later start takes
      them from there.
    compilation_cache_key: file with the key of a folder that is signed.
  """

  model: str = setting(path="read", positional=True)
  adapter: tuple[str, ...] = setting((), repeats=True)
  tokenizer: str | None = setting(None, path="read")
  dtype: Dtype | None = None
  weights: Literal["int8", "fp8"] | None = None
  images: bool | None = None
  replicas: int = 1
  tp: int = 1
  draft_model: str | None = setting(None, path="read")
  tinker: bool = False
  all_widths: bool = False
  compilation_cache: str | None = setting(None, path="written")
  compilation_cache_key: str | None = setting(None, path="read")

  def __post_init__(self):
    checks.fields(self, replicas=checks.COUNT, tp=checks.COUNT)
    check_cache(self.compilation_cache, self.compilation_cache_key)

  @property
  def name(self) -> str:
    """Last part of the folder or hub id, also of "." and ".."."""
    return os.path.basename(os.path.abspath(os.path.expanduser(self.model)))

  def adapters(self, model_name: str) -> dict[str, pathlib.Path]:
    """Returns the folder of each adapter.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: another form, or a name that is taken.
    """
    adapters: dict[str, pathlib.Path] = {}
    for text in self.adapter:
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


def main(argv: Sequence[str]) -> None:
  """Runs `tunix serve` until SIGTERM or Ctrl-C.

  Raises:
    FileNotFoundError: there is no such model, adapter, or file of options or keys.
    OSError: the address or the folder of programs cannot be used.
    ImportError: the extra `serve` is not installed.
    ValueError: a number out of range, two adapters of one name; or an address that
      other machines can reach, without an API key.
    RuntimeError: another process uses the folder of the training API, or a file in it
      is damaged.
  """
  values = parser().read(argv)
  for package in ("starlette", "uvicorn", "prometheus_client"):
    optional.require(package, "the server", "tunix[serve]")
  args = values.build(ServeOptions)
  settings = values.build(ServeSettings, model_name=args.name)
  adapters = args.adapters(settings.model_name)
  config = _config(values)
  # None: one engine on the default device, with its arrays on no mesh.
  is_one = args.replicas == args.tp == 1
  meshes = None if is_one else replicas.groups(args.replicas, args.tp)
  shipped.open_cache(args.compilation_cache, args.compilation_cache_key)
  # All that can be wrong is found before the weights are read, which takes minutes.
  server.check_address(settings)
  tinker = _tinker_settings(values)
  if tinker is not None:
    service_lib.check_files(tinker)
  folder, own = run_folder.export_of(args.model, None)
  tokenizer = model_folders.load_tokenizer(folder, own, args.tokenizer)

  def load(path: str | pathlib.Path, adapter: str | None = None) -> Transformer:
    with mesh_lib.use_mesh(meshes[0] if meshes else None):
      return model_folders.load_model(
        str(path), adapter, args.dtype, args.images, args.weights
      )

  draft = None
  if args.draft_model == _MTP:  # first, because many folders lack the layer
    with mesh_lib.use_mesh(meshes[0] if meshes else None):
      draft = mtp.from_pretrained(folder, dtype=args.dtype, quantize=args.weights)
  elif args.draft_model is not None:
    draft = load(*run_folder.export_of(args.draft_model, None))
  model = load(folder, own)
  config = _within_positions(config, values, model)
  driver, engine = _driver_of(model, tokenizer, config, meshes, draft)
  for name, place in adapters.items():
    engine.load_adapter(name, place)
  size = f"for {terminal.counted(config.slots, 'slot')} of {config.max_tokens} tokens"
  grammars = _grammars(driver.engine, tokenizer)
  engine.warm_up(
    constraints=grammars is not None,
    all_widths=args.all_widths,
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
    images=_image_reader(folder, args.images),
    # A program that starts the server reads this line from a pipe.
    on_start=lambda address: print(ready, address, flush=True),
    more=None if service is None else tinker_app.routes(service),
    on_stop=(lambda: None) if service is None else service.close,
    ends_process=True,
  )


def _driver_of(
  model: Transformer,
  tokenizer: TokenizerAdapter,
  config: EngineConfig,
  meshes: Sequence[Any] | None,
  draft: Transformer | None,
) -> tuple[Any, Any]:
  """Returns the driver of the model, and what loads adapters and compiles."""
  if meshes:
    replicated = Replicas.of_model(model, tokenizer, config, meshes, draft)
    return replicated, replicated
  engine = Engine(model, tokenizer, config, draft_model=draft)
  return Driver(engine), engine


def _tinker_settings(values: Values) -> TinkerSettings | None:
  """Returns the settings of the training service; None without `--tinker`.

  Raises:
    FileNotFoundError: there is no such file of keys.
    ValueError: the file has another form, a number is out of range, an option has no
      effect, or the model is split or copied.
  """
  args = values.build(ServeOptions)
  if not args.tinker:
    if written := values.written(_TINKER):
      raise ValueError(f"{written[0]} has no effect without --tinker; omit it")
    return None
  if args.weights is not None:
    raise ValueError(
      f"--tinker with --weights {args.weights}: the training service trains adapters "
      "on the weights of the checkpoint. Omit --weights"
    )
  if args.replicas != 1 or args.tp != 1:
    raise ValueError(
      f"--tinker with --replicas {args.replicas} and --tp {args.tp}: the training "
      "service takes one engine on one device. Leave both at 1"
    )
  return values.build(TinkerSettings, max_tokens=_config(values).max_tokens)


def _config(values: Values) -> EngineConfig:
  args = values.build(ServeOptions)
  drafts = {None: 0, _MTP: _MTP_DRAFTS}.get(args.draft_model, _MODEL_DRAFTS)
  return values.build(
    EngineConfig,
    draft_tokens=drafts,
    adapter_ranks=_ADAPTER_RANKS * (bool(args.adapter) + args.tinker),
  )


def engine_config(values: Values, model: nnx.Module) -> EngineConfig:
  """Returns the sizes of the engine that serves a model.

  Args:
    values: options of `parser`.
    model: the model, or its shapes.

  Raises:
    ValueError: a number is out of range.
  """
  return _within_positions(_config(values), values, model)


def _within_positions(
  config: EngineConfig, values: Values, model: nnx.Module
) -> EngineConfig:
  """Lowers the default of `--max_tokens` to the positions of the model.

  Raises:
    ValueError: the number was given, and the model has fewer positions.
  """
  positions = decoders.max_positions(model)
  if positions is None or config.max_tokens <= positions:
    return config
  if written := values.written("max_tokens"):
    raise ValueError(
      f"{written[0]} is {config.max_tokens}, but the model has {positions} positions: "
      "lower it"
    )
  return dataclasses.replace(config, max_tokens=positions)


def _image_reader(folder: str, images: bool | None) -> ImageReader | None:
  """Returns the reader of requests' images; None if the server reads text only."""
  reader = model_folders.image_reader(folder, images)
  try:
    _ = reader and reader.processor
  except (FileNotFoundError, ImportError, ValueError) as error:
    if images:
      raise
    print(f"requests with images are refused: {error}", flush=True)
    return None
  return reader


def _grammars(engine: Engine, tokenizer: TokenizerAdapter) -> Any:
  """Returns the builder of constraints; None without the extra `grammar`."""
  from tunix.generate.engine import grammar

  try:
    return grammar.Grammars(tokenizer, engine.vocab_size, tokenizer.eos_ids())
  except ImportError:
    return None


def parser(
  prog: str = "tunix serve",
  description: str = "answers HTTP requests of OpenAI's and vLLM's form",
  *more: Section,
) -> Parser:
  """Returns the parser of the arguments; `more` are sections of another command."""
  engine = {
    "max_tokens": f"{EngineConfig.max_tokens}, or the positions of the model",
    "draft_tokens": (
      f"{_MODEL_DRAFTS} with --draft_model, {_MTP_DRAFTS} with {_MTP}, else 0"
    ),
    "adapter_ranks": f"{_ADAPTER_RANKS} for --adapter, and as many for --tinker",
  }
  name, tokens = (
    {"model_name": "the name of the folder"},
    {"max_tokens": "--max_tokens"},
  )
  return Parser(
    prog,
    description,
    *more,
    Section(ServeOptions),
    # No route returns the experts of a token.
    Section(EngineConfig, without=("record_routes", "record_head"), defaults=engine),
    Section(ServeSettings, defaults=name),
    Section(TinkerSettings, _TINKER, defaults=tokens),
  )
