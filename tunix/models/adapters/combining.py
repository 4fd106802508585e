"""Merging of PEFT's LoRA folders of one base, without the base."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix.models.adapters import config as adapter_config, files
from tunix.models.adapters.stacks import TensorAdapter
from tunix.models.adapters.whole_files import PREFIX
from tunix.models.files import sums as file_sums, tensor_files

# Settings whose tensors cannot be joined along the rank.
_NOT_JOINED = (
  *("use_dora", "modules_to_save", "target_parameters"),
  "trainable_token_indices",
)
_SELECTORS = ("exclude_modules", "layers_to_transform", "layers_pattern")


def merge_adapters(
  folders: Sequence[pathlib.Path], output: pathlib.Path, weights: Sequence[float]
) -> None:
  """Writes the adapter whose change of the base is the weighted sum of the changes.

  A1 and A2 are joined along the rank, and so are w1 s1 B1 and w2 s2 B2 with the scales
  s. The product is exact, w1 s1 B1 A1 + w2 s2 B2 A2, in float32. The ranks add up.
  Other fields and files are those of the first folder. Weights of 0 are left out.

  Raises:
    FileNotFoundError, ValueError: a file is missing, an adapter is not plain LoRA, or
      the adapters belong to models of different sizes.
  """
  used = [(w, *_read(folder)) for w, folder in zip(weights, folders, strict=True) if w]
  parts = []
  for name in dict.fromkeys(name for _, _, adapters in used for name in adapters):
    own = [(w, adapters[name]) for w, _, adapters in used if name in adapters]
    sizes = {(x.a.shape[0], x.b.shape[1]) for _, x in own}
    if len(sizes) > 1:
      raise ValueError(
        f"{name} has the sizes {sorted(sizes)}: give adapters of one base"
      )
    a = np.concatenate([np.float32(x.a) for _, x in own], axis=1)
    b = np.concatenate([np.float32(w * x.scale) * np.float32(x.b) for w, x in own])
    parts.append(TensorAdapter(name, a, b, None, 1.0))
  config = _config([peft for _, peft, _ in used], parts)
  with tensor_files.staged_folder(output) as staging:
    tensors = [tensor for part in parts for tensor in files.new_tensors(part)]
    tensor_files.write_file(staging / files.WEIGHTS_FILE, tensors)
    tensor_files.copy_companions(folders[0], staging)
    (staging / files.CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def _read(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, TensorAdapter]]:
  """Returns `adapter_config.json` of a folder and its adapters by module."""
  file_sums.check(folder)
  file = folder / files.CONFIG_FILE
  peft = tensor_files.read_json(file)
  adapter_config.require_readable(file, peft)
  tensors = tensor_files.read_header(folder / files.WEIGHTS_FILE)
  names = {files.module_name(key.removeprefix(PREFIX)): None for key in tensors}
  if {f"{name}.weight" for name in names}.issuperset(
    peft.get("target_parameters") or ()
  ):
    peft.pop("target_parameters", None)  # see `files.dense_maps`
  if field := next((x for x in _NOT_JOINED if peft.get(x)), None):
    raise ValueError(
      f"{file}: {field} is {peft[field]!r:.80}; expected plain LoRA. Merge each "
      "adapter into its base (`tunix export --kind merged`), then merge the models"
    )
  adapter_config.require_exact(file, peft)
  adapters = {}
  for name in names:
    keys = files.factor_keys(name, use_dora=False)
    shapes = [tensors[key].shape for key in keys if key in tensors]
    if [len(shape) for shape in shapes] != [2, 2]:
      raise ValueError(f"{folder}: {name} is not a pair of matrices lora_A and lora_B")
    size = (shapes[0][1], shapes[1][0])
    sizes = adapter_config.rank_alpha(peft, name)
    adapters[name] = files.read_tensor_adapter(name, keys, size, sizes, tensors, peft)
  return peft, adapters


def _config(
  configs: Sequence[dict[str, Any]], parts: list[TensorAdapter]
) -> dict[str, Any]:
  """Returns the first configuration with the merged ranks and modules."""
  targets = [peft.get("target_modules") for peft in configs]
  ends = {x for target in targets if isinstance(target, list) for x in target}
  # Without other selectors, lists of ends of names together select all modules.
  are_ends = all(isinstance(target, list) for target in targets)
  are_ends &= not any(peft.get(field) for peft in configs for field in _SELECTORS)
  return {
    **configs[0],
    **files.sizes_of(parts, rslora=False),
    **dict.fromkeys(_SELECTORS),
    "target_modules": sorted(ends if are_ends else {part.name for part in parts}),
    "use_rslora": False,
    **({"target_parameters": dense} if (dense := files.dense_maps(parts)) else {}),
  }
