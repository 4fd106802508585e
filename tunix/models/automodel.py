"""Models from folders, from hub ids and from presets."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from tunix.models import families, hub, naming, safetensors_loader, tensor_files
from tunix.models.families import Family
from tunix.models.quantisation import QuantisationConfig
from tunix.models.transformer import sharding as sharding_lib
from tunix.models.transformer.config import ShardingRules, TransformerConfig
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib

_HUB_FILES = ("*.safetensors", *hub.TOKENIZER_FILES)


class AutoModel:
  """Makes models; never instantiated."""

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
    sharding: ShardingRules | None = None,
    num_scores: int | None = None,
    quantise: QuantisationConfig | str | None = None,
    family: Family | None = None,
  ) -> Transformer:
    """Loads a Hugging Face folder: `config.json` and safetensors or torch weights.

    Args:
      folder: the folder; or a hub id "owner/name", which is downloaded once.
      mesh: where the weights go, each device reading only its part; None: the mesh of
        the context, or the default device.
      revision: of a hub id: a commit, tag or branch; None: its newest commit.
      dtype: of computation, and of the weights unless `param_dtype` says otherwise;
        None: the checkpoint's own.
      param_dtype: of the weights; None: `dtype`.
      remat, scan_layers, attention, sharding: see `TransformerConfig`; None keeps its
        default.
      num_scores: make a critic or a reward model of it: the unembedding is replaced by
        a head of this many scores, fresh unless the checkpoint has one; None: what the
        checkpoint is.
      quantise: store the layers' kernels as "nf4", "int4" or "int8" (or a
        `QuantisationConfig`), each quantised when it is read, so that adapters can be
        trained on them.
      family: the kind of model; None: found by `model_type`.

    Raises:
      FileNotFoundError: no such folder or revision, no `config.json`, or weights are
        missing.
      ValueError: an unknown family or setting, a revision of a folder, damaged files,
        or a tensor that is missing, has another shape, or has no place in the model.
    """
    path = resolve_folder(folder, revision)
    config_file = path / "config.json"
    hf = tensor_files.read_json(config_file)
    try:
      family = family or families.by_model_type(hf.get("model_type"))
      config = family.config_from_hf(hf)
      tensors = _canonical(tensor_files.open_folder(path), family)
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
      sharding=sharding,
      num_scores=num_scores,
    )
    where = mesh_lib.current_mesh() if mesh is None else mesh_lib.auto(mesh)
    model = safetensors_loader.load_model(tensors, config, family, where, quantise)
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
    sharding: ShardingRules | None = None,
    num_scores: int | None = None,
    family: Family | None = None,
  ) -> Transformer:
    """A model with fresh weights, drawn on the devices that hold them.

    The weights depend on the seed, not on the mesh.

    Args:
      config: a family's ModelConfig, or the name of a preset ("qwen3_0p6b").
      mesh: see `from_pretrained`.
      seed: of the weights.
      rngs: the source of the weights' key instead of `seed`.
      dtype: of computation, and of the weights unless `param_dtype` says otherwise;
        None keeps the config's.
      param_dtype, remat, scan_layers, attention, sharding, num_scores: override the
        config.
      family: the kind of model; None: found by the config's class.

    Raises:
      ValueError: an unknown preset, or a config of no family.
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
  """A model whose arrays are shapes, laid out on a mesh: nothing is drawn or read, and
  the mesh may be of devices that are not there. Programs can be lowered with it.

  Args:
    config: a family's ModelConfig.
    mesh: its layout.
    change: makes the model what it is to be: adapters, quantisation.

  Raises:
    ValueError: a config of no family.
  """
  family = families.of_config(config)
  graph, shapes = sharding_lib.abstract(
    lambda: change(family.model_class(config, rngs=nnx.Rngs(0)))
  )
  where = sharding_lib.named_shardings(shapes, mesh)
  return nnx.merge(graph, jax.tree.map(mesh_lib.put, shapes, where))


def config_of_folder(
  folder: str | os.PathLike[str], revision: str | None = None
) -> TransformerConfig:
  """The ModelConfig that the `config.json` of a Hugging Face folder describes; its
  weights are not looked at, and may be missing.

  Raises:
    FileNotFoundError: no such folder, or no `config.json`.
    ValueError: an unknown family or setting.
  """
  config_file = resolve_folder(folder, revision) / "config.json"
  hf = tensor_files.read_json(config_file)
  try:
    family = families.by_model_type(hf.get("model_type"))
    stored = _stored_dtype(hf, family, {})
    return with_options(
      family.config_from_hf(hf),
      **dict.fromkeys(("dtype", "param_dtype"), stored),
    )
  except ValueError as error:
    raise ValueError(f"{config_file}: {error}") from error


def sizes_of(
  name: str | os.PathLike[str], revision: str | None = None
) -> TransformerConfig:
  """The ModelConfig of a folder or a hub id, for which nothing is downloaded where a
  preset is made like it (`naming.ModelNaming`); it is in bfloat16 then, as those are
  at the hub.

  Raises:
    FileNotFoundError, ValueError: see `config_of_folder`.
  """
  path = pathlib.Path(name).expanduser()
  here = path.exists() or hub.is_cached(str(name), "config.json", revision)
  if here or not hub.is_id(str(name)):
    return config_of_folder(name, revision)
  try:
    preset = naming.ModelNaming(model_id=str(name)).model_config_id
  except ValueError:
    return config_of_folder(name, revision)
  sizes = families.preset(preset)[1]()
  return with_options(sizes, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)


def resolve_folder(
  name: str | os.PathLike[str], revision: str | None = None
) -> pathlib.Path:
  """The local folder of a model: `name` itself, or its download if it is a hub id.

  Args:
    name: a folder, or "owner/name".
    revision: of a hub id: a commit, tag or branch; None: its newest commit.

  Raises:
    FileNotFoundError: there is no such folder and it is no hub id, or the download
      failed.
    ValueError: a revision of a folder.
  """
  path = pathlib.Path(name).expanduser()
  if path.is_dir():
    if revision is not None:
      raise ValueError(
        f"revision is {revision!r} and {path} is a folder, which has none: leave it "
        "out, or give a hub id 'owner/name'"
      )
    return path
  if path.exists():
    raise FileNotFoundError(f"{path} is a file: give the folder that holds config.json")
  if not hub.is_id(str(name)):
    raise FileNotFoundError(
      f"there is no folder {path}: give a folder with config.json and *.safetensors, "
      "or a hub id 'owner/name'"
    )
  return hub.download(str(name), _HUB_FILES, revision)


def _canonical(tensors: dict[str, Any], family: Family) -> dict[str, Any]:
  """The tensors under the names of the family's table."""
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


def _stored_dtype(hf: dict[str, Any], family: Family, tensors: Any) -> Any:
  """The checkpoint's dtype: what config.json says, else its first weight's."""
  named = hf.get("dtype") or hf.get("torch_dtype")
  if named is not None:
    try:
      return jnp.dtype(named)
    except TypeError as error:
      raise ValueError(
        f"dtype {named!r} is unknown: use 'float32', 'bfloat16' or 'float16'"
      ) from error
  entry = family.names.get("embed_tokens.embedding")
  first = tensors.get(entry.key) if entry else next(iter(tensors.values()), None)
  return jnp.dtype(jnp.float32) if first is None else first.dtype


def with_options(config: Any, **options: Any) -> Any:
  """The config with the options that were chosen.

  Raises:
    ValueError: a config of one's own has no field for one of them.
  """
  if not isinstance(config, TransformerConfig):
    return _with_own_options(config, options)
  for name in ("dtype", "param_dtype"):
    if options[name] is not None:
      options[name] = jnp.dtype(options[name])
  chosen = {name: value for name, value in options.items() if value is not None}
  return dataclasses.replace(config, **chosen)


def _with_own_options(config: Any, options: dict[str, Any]) -> Any:
  """A user's config; what it does not say about dtypes is its own affair."""
  fields = {f.name for f in dataclasses.fields(config)}
  chosen = {}
  for name, value in options.items():
    if value is None:
      continue
    if name in fields:
      is_dtype = name in ("dtype", "param_dtype")
      chosen[name] = jnp.dtype(value) if is_dtype else value
    elif name not in ("dtype", "param_dtype"):
      raise ValueError(
        f"{name} is {value!r}, and {type(config).__name__} has no such field: leave it "
        "out, or give the config one"
      )
  return dataclasses.replace(config, **chosen)


# Compiling the draws costs seconds; a program that makes several equal models (a policy
# and its critic) pays once.
@functools.lru_cache(maxsize=8)
def _initialiser(
  model_class: Callable[..., Transformer], config: TransformerConfig, mesh: Mesh
) -> tuple[Any, Callable[[jax.Array], Any]]:
  """(graph, function from a key to the weights, drawn where they belong)."""

  def build(key: jax.Array) -> Transformer:
    return model_class(config, rngs=nnx.Rngs(key))

  graph, shapes = sharding_lib.abstract(lambda: build(jax.random.key(0)))
  where = sharding_lib.named_shardings(shapes, mesh)
  return graph, jax.jit(lambda key: nnx.state(build(key)), out_shardings=where)
