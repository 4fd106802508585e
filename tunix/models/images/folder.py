"""The image processor that the files of a model folder describe."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from tunix.models.files.tensor_files import read_json
from tunix.models.images import pillow
from tunix.models.images.patches import Gemma4, Pixtral, Qwen3VL
from tunix.models.images.processor import Processor
from tunix.models.images.squares import Gemma3, SmolVLM

# `image_processor_type` in the files, without the endings of its implementations.
PROCESSORS: Mapping[str, type[Processor]] = {
  "Gemma3ImageProcessor": Gemma3,
  "Gemma4ImageProcessor": Gemma4,
  "Idefics3ImageProcessor": SmolVLM,
  "PixtralImageProcessor": Pixtral,
  "Qwen2VLImageProcessor": Qwen3VL,
  "SmolVLMImageProcessor": SmolVLM,
}

# Field -> its key in the files, with dots between levels. Keys of families that open
# with "processor." are at the top level of processor_config.json.
_KEYS: Mapping[str, str] = {
  "mean": "image_mean",
  "std": "image_std",
  "scale": "rescale_factor",
  "resample": "resample",
}

# Key -> the values with which a processor works. An absent key is accepted.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
  "do_resize": (True, None),
  "do_rescale": (True, None),
  "do_center_crop": (False, None),
  "do_convert_rgb": (True, None),
  "min_pixels": (None,),
  "max_pixels": (None,),
}

# Fields whose key may be absent or null.
_OPTIONAL = {
  *("scale", "resample", "split", "pan_and_scan"),
  *("min_crop_size", "max_num_crops", "min_ratio"),
}


def read_processor(folder: str | os.PathLike[str]) -> Processor:
  """Returns the image processor of a Hugging Face model folder.

  Args:
    folder: a folder with processor_config.json, preprocessor_config.json or both.

  Raises:
    FileNotFoundError: the folder has neither file.
    ImportError: Pillow is not installed.
    ValueError: the files describe a processor that is not offered, or lack a number.
  """
  pillow.module("Image")  # Fails before a job has loaded its model.
  numbers = _read(pathlib.Path(folder))
  kind = str(numbers.get("image_processor_type"))
  family = PROCESSORS.get(kind.removesuffix("Fast").removesuffix("Pil"))
  if family is None:
    raise ValueError(
      f"image_processor_type is {kind!r}; expected one of {', '.join(PROCESSORS)}. Use "
      "a model of one of these families"
    )
  for key, accepted in _SUPPORTED.items():
    if numbers.get(key) not in accepted:
      raise ValueError(
        f"{key} is {numbers[key]!r}; expected {accepted[0]!r}. Other images than the "
        "model's own processor makes would reach the model"
      )
  return family(**_settings(family, numbers))


def _read(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the image processor's numbers, and the others under "processor"."""
  names = "processor_config.json", "preprocessor_config.json"
  files = {
    name: read_json(folder / name) for name in names if (folder / name).is_file()
  }
  if not files:
    raise FileNotFoundError(
      f"{folder} has neither {names[0]} nor {names[1]}: copy both from the model with "
      "images that the folder was made from"
    )
  processor = files.get(names[0], {})
  return {
    **(processor.get("image_processor") or files.get(names[1], {})),
    "processor": processor,
  }


def _settings(family: type[Processor], numbers: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of a family's processor."""
  settings: dict[str, Any] = {}
  for field, key in {**_KEYS, **family.KEYS}.items():
    value = _look_up(numbers, key)
    if value is not None:
      settings[field] = tuple(value) if isinstance(value, list) else value
    elif field not in _OPTIONAL:
      file = "processor_config.json" if key.startswith("processor.") else "the files"
      raise ValueError(
        f"{file} of {family.__name__}'s processor must have "
        f"{key.removeprefix('processor.')}: copy the files from the original model"
      )
  if _look_up(numbers, "size.width") != _look_up(numbers, "size.height"):
    raise ValueError(f"size is {numbers['size']}; expected a square")
  if not numbers.get("do_normalize", True):
    settings |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
  return settings


def _look_up(numbers: Any, key: str) -> Any:
  for part in key.split("."):
    numbers = numbers.get(part) if isinstance(numbers, Mapping) else None
  return numbers
