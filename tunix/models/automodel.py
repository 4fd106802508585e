"""Constructors of models from folders, hub ids and presets."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from tunix.models import families, hub, naming, safetensors_loader
from tunix.models.families import Family
from tunix.models.files import (
  fused_experts,
  stored_formats,
  sums as file_sums,
  tensor_files,
)
from tunix.models.files.stored_tensor import StoredTensor
from tunix.models.gguf import folder as gguf_folder, tensors as gguf_tensors
from tunix.models.quantization import QuantizationConfig
from tunix.models.transformer.config import ShardingRules, TransformerConfig
from tunix.models.transformer.hf import values as hf_values
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.shards import sharding as sharding_lib
from tunix.utils import mesh as mesh_lib

_DTYPES = "use 'float32', 'bfloat16' or 'float16'"
_HUB_FILES = ("*.safetensors", *hub.TOKENIZER_FILES)


class AutoModel:
  """Namespace of the constructors; never instantiated."""

  @staticmethod
  def from_pretrained(
    folder: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    revision: str | None = None,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    remat: str | None = None,
    scan_layers: bool | None = None,
    attention: str | None = None,
    batch_invariant: bool | None = None,
    sharding: ShardingRules | None = None,
    num_scores: int | None = None,
    quantize: QuantizationConfig | str | None = None,
    quantise: QuantizationConfig | str | None = None,
    images: bool | None = None,
    family: Family | None = None,
  ) -> Transformer:
    """Loads a Hugging Face folder: `config.json` and safetensors or torch weights.

    Args:
      folder: the folder or a GGUF file; or a hub id "owner/name", which is downloaded
        once.
      mesh: the mesh of the weights; each device reads only its part. None uses the mesh
        of the context, or the default device.
      revision: a commit, tag or branch of a hub id; None for the newest commit.
      dtype: dtype of the computation, and of the weights if `param_dtype` is None;
        None for the checkpoint's dtype.
      param_dtype: dtype of the weights; None for `dtype`.
      remat, scan_layers, attention, batch_invariant, sharding: see
        `TransformerConfig`; None keeps its default.
      num_scores: if not None, the model is a critic or a reward model: a head with
        `num_scores` outputs replaces the unembedding. The head is initialized randomly
        unless the checkpoint has one. None keeps the checkpoint's kind.
      quantize: "nf4", "int4", "int8", "fp8", "mxfp4" or a `QuantizationConfig`: the
        layers' kernels are quantized when they are read, as a base for training
        adapters. With "mxfp4" these are the experts of a mixture, and experts that the
        folder holds in MXFP4 keep their numbers.
      quantise: another name of `quantize`.
      images: True loads the vision tower of a folder that has one, False leaves it out.
        None loads it for Gemma 3 and SmolVLM. Not with `family`.
      family: the kind of model; None selects it by `model_type`.

    Raises:
      FileNotFoundError: the folder, the revision, `config.json` or weights are missing.
      ValueError: the family or a setting is unknown, `quantize` and `quantise` differ,
        a folder was given a revision, files are damaged (see `file_sums.check`), or a
        tensor is missing, has another shape, or has no place in the model.
    """
    if quantize is not None and quantise not in (None, quantize):
      raise ValueError(
        f"quantize is {quantize!r} and quantise is {quantise!r}, expected one of them: "
        "they are two names of one argument. Give quantize alone"
      )
    if images is not None and family is not None:
      raise ValueError(
        f"images is {images} and family is {family.name!r}, expected one of them: the "
        "family decides what is loaded"
      )
    path = resolve_folder(folder, revision)
    file_sums.check(path)
    config_file = path / "config.json"
    hf = tensor_files.read_json(config_file)
    try:
      family = family or families.by_model_type(hf.get("model_type"), images)
      config = family.config_from_hf(stored_formats.plain(hf))
      tensors = _canonical(open_tensors(path), family)
      tensors = stored_formats.decoded(hf, tensors)
      tensors = fused_experts.join(tensors, family.names)
      stored = _stored_dtype(hf, family, tensors)
    except ValueError as error:
      raise ValueError(f"{config_file}: {error}") from error
    config = with_options(
      config,
      dtype=dtype or stored,
      param_dtype=param_dtype or dtype or stored,
      remat=remat,
      scan_layers=scan_layers,
      attention=attention,
      batch_invariant=batch_invariant,
      sharding=sharding,
      num_scores=num_scores,
    )
    where = mesh_lib.current_mesh() if mesh is None else mesh_lib.auto(mesh)
    model = safetensors_loader.load_model(
      tensors, config, family, where, quantize or quantise
    )
    return sharding_lib.on_users_mesh(model, mesh)

  load = from_pretrained

  @staticmethod
  def from_config(
    config: TransformerConfig | str,
    mesh: Mesh | None = None,
    *,
    seed: int = 0,
    rngs: nnx.Rngs | None = None,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    remat: str | None = None,
    scan_layers: bool | None = None,
    attention: str | None = None,
    batch_invariant: bool | None = None,
    sharding: ShardingRules | None = None,
    num_scores: int | None = None,
    family: Family | None = None,
  ) -> Transformer:
    """Makes a model with random weights, each drawn on the devices that hold it.

    The weights depend on the seed and not on the mesh.

    Args:
      config: a family's ModelConfig, or the name of a preset such as "qwen3_0p6b".
      mesh: see `from_pretrained`.
      seed: seed of the weights.
      rngs: source of the weights' key, used instead of `seed`.
      dtype: dtype of the computation, and of the weights if `param_dtype` is None;
        None keeps the config's.
      param_dtype, remat, scan_layers, attention, batch_invariant, sharding, num_scores:
        override the config's fields if not None.
      family: the kind of model; None selects it by the class of the configuration.

    Raises:
      ValueError: the preset is unknown, or the config belongs to no family.
    """
    if isinstance(config, str):
      preset_family, preset = families.preset(config)
      family, config = family or preset_family, preset()
    family = family or families.of_config(config)
    config = with_options(
      config,
      dtype=dtype,
      param_dtype=param_dtype or dtype,
      remat=remat,
      scan_layers=scan_layers,
      attention=attention,
      batch_invariant=batch_invariant,
      sharding=sharding,
      num_scores=num_scores,
    )
    where = mesh_lib.current_mesh() if mesh is None else mesh_lib.auto(mesh)
    key = jax.random.key(seed) if rngs is None else rngs.params()
    if where is None:
      return family.model_class(config, rngs=nnx.Rngs(key))
    graph, draw = _initialiser(family.model_class, config, where)
    return sharding_lib.on_users_mesh(nnx.merge(graph, draw(key)), mesh)


def of_shapes(
  config: TransformerConfig,
  mesh: Mesh,
  change: Callable[[Transformer], Transformer] = lambda model: model,
) -> Transformer:
  """Makes a model whose arrays are shapes with shardings, for lowering programs.

  Nothing is drawn or read. The devices of the mesh need not exist on this machine.

  Args:
    config: a family's ModelConfig.
    mesh: the mesh of the shardings.
    change: applied to the model before it is laid out, for example to add adapters or
      to quantize it.

  Raises:
    ValueError: the config belongs to no family.
  """
  family = families.of_config(config)
  graph, shapes = sharding_lib.abstract(
    lambda: change(family.model_class(config, rngs=nnx.Rngs(0)))
  )
  where = sharding_lib.named_shardings(shapes, mesh)
  return nnx.merge(graph, jax.tree.map(mesh_lib.put, shapes, where))


def config_of_folder(
  folder: str | os.PathLike[str],
  revision: str | None = None,
  images: bool | None = None,
) -> TransformerConfig:
  """Returns the ModelConfig that the `config.json` of a Hugging Face folder describes.

  The weights are not read and may be missing. See `AutoModel.from_pretrained` for the
  arguments.

  Raises:
    FileNotFoundError: the folder or its `config.json` does not exist.
    ValueError: the family or a setting is unknown.
  """
  config_file = resolve_folder(folder, revision) / "config.json"
  hf = tensor_files.read_json(config_file)
  try:
    family = families.by_model_type(hf.get("model_type"), images)
    stored = _stored_dtype(hf, family, {})
    return with_options(
      family.config_from_hf(stored_formats.plain(hf)),
      **dict.fromkeys(("dtype", "param_dtype"), stored),
    )
  except ValueError as error:
    raise ValueError(f"{config_file}: {error}") from error


def sizes_of(
  name: str | os.PathLike[str],
  revision: str | None = None,
  images: bool | None = None,
) -> TransformerConfig:
  """Returns the ModelConfig of a folder or a hub id.

  If a preset matches the hub id (`naming.ModelNaming`) and `images` is None, nothing is
  downloaded, and the config's dtypes are bfloat16, as in these checkpoints.

  Raises:
    FileNotFoundError, ValueError: see `config_of_folder`.
  """
  path = pathlib.Path(name).expanduser()
  is_id = hub.is_id(str(name))  # else a folder, or a GGUF file here or at the hub
  is_here = path.exists() or hub.is_cached(str(name), "config.json", revision)
  if not is_id or is_here or images is not None:
    return config_of_folder(name, revision, images)
  try:
    preset = naming.ModelNaming(model_id=str(name)).model_config_id
  except ValueError:
    return config_of_folder(name, revision)
  sizes = families.preset(preset)[1]()
  return with_options(sizes, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)


def resolve_folder(
  name: str | os.PathLike[str], revision: str | None = None
) -> pathlib.Path:
  """Returns the local folder of a model: `name` itself, or the download of a hub id.

  A GGUF file has a folder in the user's cache, see `gguf.folder`.

  Args:
    name: a folder, a hub id "owner/name", or a GGUF file, here or at the hub
      ("owner/name/FILE.gguf").
    revision: a commit, tag or branch at the hub; None for the newest commit.

  Raises:
    FileNotFoundError: `name` is none of these, or the download failed.
    ImportError, ValueError: a folder or a file was given a revision, or see
      `gguf.folder.resolve`.
  """
  if (made := gguf_folder.resolve(name, revision)) is not None:
    return made
  path = pathlib.Path(name).expanduser()
  if path.is_dir():
    if revision is not None:
      raise ValueError(
        f"revision is {revision!r} and {path} is a folder, which has none: leave it "
        "out, or give a hub id 'owner/name'"
      )
    return path
  if path.exists():
    raise FileNotFoundError(
      f"{path} is a file: give the folder that holds config.json, or a GGUF file"
    )
  if not hub.is_id(str(name)):
    raise FileNotFoundError(
      f"there is no folder {path}: give a folder with config.json and *.safetensors, "
      "or a hub id 'owner/name'"
    )
  return hub.download(str(name), _HUB_FILES, revision)


def open_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
  """Returns the tensors of a model folder by their Hugging Face names.

  Raises:
    FileNotFoundError, ValueError: see `tensor_files.open_folder`,
      `gguf.tensors.open_file`.
  """
  file = folder / gguf_tensors.NAME
  if file.exists():
    return gguf_tensors.open_file(file)
  return tensor_files.open_folder(folder)


def _canonical(tensors: dict[str, Any], family: Family) -> dict[str, Any]:
  """Renames the tensors to the names of the family's table."""
  out: dict[str, Any] = {}
  for key, tensor in tensors.items():
    name = family.canonical_key(key)
    if name in out:
      raise ValueError(
        f"tensors {out[name].name!r} and {key!r} both mean {name!r}: download the "
        "folder again"
      )
    out[name] = tensor
  return out


def named_dtype(hf: Mapping[str, Any]) -> Any:
  """Returns the dtype that `config.json` names, or None.

  A model with a vision tower may name it in its `text_config` alone.

  Raises:
    ValueError: the dtype is unknown, or no layer computes in it.
  """
  text = hf.get("text_config")
  tables = (hf, text) if isinstance(text, Mapping) else (hf,)
  names = ("dtype", "torch_dtype")
  spelled = (hf_values.text(table, name, "") for table in tables for name in names)
  named = next(filter(None, spelled), None)
  if named is None:
    return None
  try:
    dtype = jnp.dtype(named)
  except TypeError as error:
    raise ValueError(f"dtype {named!r} is unknown: {_DTYPES}") from error
  if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1:
    raise ValueError(f"dtype {named!r} is no dtype to compute in: {_DTYPES}")
  return dtype


def _stored_dtype(
  hf: dict[str, Any], family: Family, tensors: Mapping[str, StoredTensor]
) -> Any:
  """Returns the checkpoint's dtype: the one in config.json, else its first weight's."""
  named = named_dtype(hf)
  if named is not None:
    return named
  entry = family.names.get("embed_tokens.embedding")
  first = tensors.get(entry.key) if entry else next(iter(tensors.values()), None)
  return jnp.dtype(jnp.float32) if first is None else first.dtype


def with_options(config: Any, **options: Any) -> Any:
  """Returns the configuration with all options that are not None replaced.

  A dtype is ignored if the configuration of a user's model has no field for it.

  Raises:
    ValueError: the configuration has no field for another option.
  """
  fields = {f.name for f in dataclasses.fields(config)}
  replaced = {}
  for name, value in options.items():
    is_dtype = name in ("dtype", "param_dtype")
    if value is None or (is_dtype and name not in fields):
      continue
    if name not in fields:
      raise ValueError(
        f"{name} is {value!r}, and {type(config).__name__} has no such field: leave it "
        "out, or give the config one"
      )
    replaced[name] = jnp.dtype(value) if is_dtype else value
  return dataclasses.replace(config, **replaced)


@functools.lru_cache(maxsize=8)
def _initialiser(
  model_class: Callable[..., Transformer], config: TransformerConfig, mesh: Mesh
) -> tuple[Any, Callable[[jax.Array], Any]]:
  """Returns the graph, and a compiled function that draws the weights from a key.

  The function draws each weight on the devices that hold it.
  """

  def build(key: jax.Array) -> Transformer:
    return model_class(config, rngs=nnx.Rngs(key))

  graph, shapes = sharding_lib.abstract(lambda: build(jax.random.key(0)))
  where = sharding_lib.named_shardings(shapes, mesh)
  return graph, jax.jit(lambda key: nnx.state(build(key)), out_shardings=where)
