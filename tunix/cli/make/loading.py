"""Loads the models and the tokenizer that a configuration names."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from tunix.cli.make import model_folders, objects
from tunix.cli.settings.run import ModelSettings, RunSettings
from tunix.cli.settings.spelling import did_you_mean
from tunix.data.images import ImageReader
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel, families, lora, new_tokens, quantization
from tunix.models.automodel import AutoModel
from tunix.models.transformer.model import Transformer
from tunix.models.vision.model import VisionLanguageModel
from tunix.utils import text_files
from tunix.utils.setting import named_values, shared_values

_log = logging.getLogger(__name__)

_NO_MODEL = (
  "model.path is not set. Give --model.path=FOLDER, or --model.name=PRESET to start "
  "from scratch"
)


@dataclasses.dataclass(frozen=True)
class ModelLoader:
  """Loads the models and the tokenizer that a configuration names.

  Attributes:
    config: settings of the run.
    mesh: devices of the models; None: one device. Shapes need a mesh.
    of_shapes: makes shapes in place of weights. Of a folder only `config.json` is read,
      and a hub id is not downloaded (see `automodel.sizes_of`).
  """

  config: RunSettings
  mesh: Mesh | None = None
  of_shapes: bool = False

  def check(self) -> None:
    """Refuses a model that does not exist, before anything takes time.

    A hub id is downloaded.

    Raises:
      FileNotFoundError: there is no such folder or hub id.
      ValueError: no model is named, or an unknown preset or field of a preset.
    """
    source = self.config.model
    if source.name is not None:
      self._preset()
    elif objects.is_name(source.path):
      self._check_object()
    elif source.path is not None:
      model_folders.check("model.path", source.path)
      self.folder()
    else:
      raise ValueError(_NO_MODEL)
    if source.train_tower and not hasattr(self.sizes(), "image_sizes"):
      raise ValueError(
        "model.train_tower is true and the model is loaded without a vision tower. Set "
        "model.images=true for a model that has one, or leave model.train_tower out"
      )

  def folder(self) -> pathlib.Path:
    """Returns the folder of `model.path`; a hub id is downloaded.

    Raises:
      FileNotFoundError: there is no such folder, hub id or revision.
      ValueError: a revision is given for a folder.
    """
    source = self.config.model
    assert source.path is not None
    try:
      return automodel.resolve_folder(source.path, source.revision)
    except ValueError as error:
      raise ValueError(f"model.{error}") from error

  def tokenizer(self) -> TokenizerAdapter:
    """Loads the tokenizer, with the chat template of the configuration if it names one.

    Raises:
      FileNotFoundError: there is no such folder or template file.
      ValueError: no folder is named, its files are damaged, or the template is no text.
    """
    settings, model = self.config.tokenizer, self.config.model
    source = settings.path or model.path
    if source is None:
      raise ValueError(
        "tokenizer.path is not set. model.name starts from scratch, so name the folder "
        "of a tokenizer"
        if model.name
        else _NO_MODEL
      )
    if objects.is_name(source) and settings.path is None:
      raise ValueError(
        f"tokenizer.path is not set and model.path is {source}, an object, which has "
        "no tokenizer. Give tokenizer=, a TokenizerAdapter or a folder"
      )
    options: dict[str, Any] = {
      "template_args": settings.template_args,
      "add_bos": settings.add_bos,
      "add_tokens": settings.add_tokens,
    }
    if settings.chat_template is not None:
      options["chat_template"] = _read_template(settings.chat_template)
    if objects.is_name(source):
      loaded = TokenizerAdapter(objects.get(source), **options)
    else:
      revision = model.revision if source == model.path else None
      loaded = model_folders.named_tokenizer(
        "tokenizer.path", source, revision=revision, **options
      )
    return TokenizerAdapter(loaded, message_form=settings.messages)

  def sizes(self) -> Any:
    """Returns the ModelConfig of the model, with the options of the configuration.

    Raises:
      FileNotFoundError, ValueError: as for `model`.
    """
    source = self.config.model
    if source.name is not None:
      sizes = self._preset()
    elif objects.is_name(source.path):
      return objects.get(source.path).config
    elif source.path is not None:
      sizes = automodel.sizes_of(source.path, source.revision, source.images)
    else:
      raise ValueError(_NO_MODEL)
    sizes = _with_options(sizes, self._options())
    if not (ids := self._new_ids()):
      return sizes
    size = max(sizes.vocab_size, max(ids) + 1)
    return dataclasses.replace(sizes, vocab_size=size)

  def image_reader(self) -> ImageReader | None:
    """Returns the reader of records with images; None if only text is read."""
    source = self.config.model
    if not self.config.reads_images or source.path is None:
      return None
    return model_folders.image_reader(source.path, source.images, source.revision)

  def _new_ids(self) -> tuple[int, ...]:
    """Returns the ids of the tokens that were added to the tokenizer."""
    settings = self.config.tokenizer
    if settings.add_tokens or objects.is_name(settings.path):
      return tuple(self.tokenizer().added_tokens.values())
    return ()

  def model(self) -> Transformer:
    """Loads the model that is trained, or makes a fresh one, and adds the adapters.

    Raises:
      FileNotFoundError, ValueError: as for `AutoModel` and `lora.apply`.
    """
    source = self.config.model
    if self.of_shapes:
      assert self.mesh is not None

      def change(model):
        return self._adapted(self._quantized(model))

      return automodel.of_shapes(self.sizes(), self.mesh, change)
    options = self._options()
    if source.name is not None:
      seed = self.config.seed
      model = AutoModel.from_config(self._preset(), self.mesh, seed=seed, **options)
      return self._adapted(self._quantized(model))
    if objects.is_name(source.path):
      held = objects.get(source.path)
      return held if lora.config_of(held) else self._adapted(held)
    options |= {"revision": source.revision, "quantize": source.quantize}
    options["images"] = source.images
    return self._adapted(
      AutoModel.from_pretrained(source.path or "", self.mesh, **options)
    )

  def reference(self, path: str | None) -> Any:
    """Loads the reference model of the policy.

    Args:
      path: folder of the reference; None: the policy before its first step, also when
        the run is resumed.

    Returns:
      The model; None if the policy without its adapters is the reference.

    Raises:
      FileNotFoundError, ValueError: as for `AutoModel`.
    """
    if path is not None:
      source = self.config.model
      return self.load(path, dtype=source.dtype, images=source.images)
    source = self.config.model.path
    if objects.is_name(source) and lora.config_of(objects.get(source)):
      return nnx.clone(objects.get(source))  # its adapters are part of the policy
    # Modules that are trained whole overwrite the weights that a reference needs.
    if self.config.lora is not None and not self.config.lora.modules_to_save:
      return None
    # A second load is a copy; an object is trained in place.
    model = self.model()
    return nnx.clone(model) if objects.is_name(source) else model

  def load(
    self, path: str, *, images: bool | None = None, **options: Any
  ) -> Transformer:
    """Loads a further model: a reference, a teacher, a critic or a reward model.

    `model.images` holds for it too, if it has a tower.

    Args:
      path: folder or hub id.
      images: see `AutoModel.from_pretrained`.
      **options: options of AutoModel.

    Raises:
      FileNotFoundError, ValueError: as for `AutoModel`.
    """
    if objects.is_name(path):
      return objects.get(path)
    images = self.config.model.images
    if images and model_folders.image_reader(self._local(path), images) is None:
      images = None
    if not self.of_shapes:
      return AutoModel.from_pretrained(path, self.mesh, images=images, **options)
    assert self.mesh is not None
    sizes = _with_options(automodel.sizes_of(path, images=images), options)
    return automodel.of_shapes(sizes, self.mesh)

  def _local(self, path: str) -> str:
    """Returns the folder of a hub id; in a plan the id, which is not downloaded."""
    return path if self.of_shapes else str(automodel.resolve_folder(path))

  def _check_object(self) -> None:
    """Refuses an object that is no model of ours, and settings that nothing reads.

    Raises:
      ValueError: names the key, and the call that makes the model.
    """
    source = self.config.model
    assert source.path is not None
    model = objects.get(source.path)
    if not isinstance(model, Transformer):
      raise ValueError(
        f"model.path is {source.path}; expected a model of AutoModel. Train "
        "a module of your own with PeftTrainer or RLCluster"
      )
    if source != ModelSettings(path=source.path):
      changed = shared_values(ModelSettings, source)
      unread = [n for n, v in changed.items() if v and n != "path"]
      raise ValueError(
        f"model.{unread[0]} is {changed[unread[0]]!r} and model.path is "
        f"{source.path}, which is loaded already. Give it to "
        "AutoModel.from_pretrained instead"
      )
    if tokens := self.config.tokenizer.add_tokens:
      raise ValueError(
        f"tokenizer.add_tokens is {list(tokens)} and model.path is {source.path}, "
        "which is loaded already. Call tunix.generate.new_tokens.add_tokens(model, "
        "tokenizer, tokens), and give the model and the tokenizer that it returns"
      )
    if not self.config.fits_adapter and model.config.num_scores != 1:
      raise ValueError(
        f"model.path is {source.path} without a head of one score. Load it with "
        "AutoModel.from_pretrained(..., num_scores=1)"
      )

  def _preset(self) -> Any:
    """Returns the preset `model.name` with the fields of `model.args`.

    Raises:
      ValueError: an unknown preset, an unknown field, or a field out of range.
    """
    name, args = self.config.model.name, self.config.model.args
    assert name is not None
    if "/" in name:
      raise ValueError(
        f"model.name is {name!r}, a hub id or a folder; expected a preset, which "
        f"starts from scratch. Give --model.path={name}"
      )
    family, preset = families.preset(name)
    names = [field.name for field in dataclasses.fields(family.config_class)]
    for arg in args:
      if arg not in names:
        remedy = did_you_mean(arg, names, f"fields are {', '.join(names)}")
        raise ValueError(f"model.args.{arg} is no field of {name}: {remedy}")
    try:
      return preset(**args)
    except (TypeError, ValueError) as error:
      raise ValueError(f"model.args: {error}; correct that field") from error

  def _options(self) -> dict[str, Any]:
    names = ["dtype", "param_dtype", "remat", "scan_layers"]
    names += ["attention", "batch_invariant"]
    options = named_values(self.config.model, names)
    # The job reward trains a head of one score.
    options["num_scores"] = None if self.config.fits_adapter else 1
    return options

  def _quantized(self, model: Transformer) -> Transformer:
    method = self.config.model.quantize
    return model if method is None else quantization.quantize(model, method)

  def _adapted(self, model: Transformer) -> Transformer:
    """Adds the embeddings of new tokens, which an object has already, and adapters.

    Unfreezes the tower if the configuration says so.
    """
    if self.config.model.train_tower:
      assert isinstance(model, VisionLanguageModel)  # see `check`
      model.train_tower()
    ids, config = self._new_ids(), self.config.lora
    if not objects.is_name(self.config.model.path):
      model = self._with_rows(model, ids)
    if config is None:
      return model
    trains_all = {"embed_tokens", "lm_head"} <= {*(config.modules_to_save or ())}
    if ids and not trains_all:
      rows = {*config.trainable_token_indices, *ids}
      config = dataclasses.replace(config, trainable_token_indices=tuple(sorted(rows)))
    try:
      return lora.apply(model, config, seed=self.config.seed)
    except ValueError as error:
      raise ValueError(f"lora: {error}; change its targets or patterns") from error

  def _with_rows(self, model: Transformer, ids: tuple[int, ...]) -> Transformer:
    tokens, size = self.config.tokenizer.add_tokens, model.config.vocab_size
    try:
      out = new_tokens.with_rows(model, ids)
    except ValueError as error:
      raise ValueError(f"tokenizer.add_tokens: {error}") from error
    if tokens:
      grown = out.config.vocab_size - size
      _log.info(
        "tokenizer.add_tokens: %d of %d tokens are new; the embedding has %d more rows",
        *(len(ids), len(tokens), grown),
      )
    return out


def _read_template(name: str) -> str:
  file = pathlib.Path(name).expanduser()
  if not file.is_file():
    raise FileNotFoundError(
      f"tokenizer.chat_template {name!r}: no such file; give a file of jinja source"
    )
  try:
    return text_files.read(file)
  except ValueError as error:
    raise ValueError(f"tokenizer.chat_template: {error}") from error


def _with_options(sizes: object, options: dict[str, Any]) -> Any:
  """Returns a ModelConfig with options as AutoModel applies them to a checkpoint."""
  if options.get("param_dtype") is None:
    options = {**options, "param_dtype": options.get("dtype")}
  return automodel.with_options(sizes, **options)


def check_vocabulary(model: Transformer, tokenizer: TokenizerAdapter) -> None:
  """Refuses a tokenizer with ids beyond the model's embedding table.

  Raises:
    ValueError: names both sizes.
  """
  if tokenizer.vocab_size > model.config.vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} ids and the model has "
      f"{model.config.vocab_size}, so they belong to two models. Set tokenizer.path to "
      "the model's own"
    )
