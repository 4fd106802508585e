"""Merging of Hugging Face folders, tensor by tensor, and the formulas on arrays."""

from __future__ import annotations

import functools
import pathlib
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.models import safetensors_saver
from tunix.models.files import sums as file_sums, tensor_files
from tunix.models.files.stored_tensor import DTYPES, StoredTensor
from tunix.models.files.tensor_files import NewTensor
from tunix.models.gguf import tensors as gguf_tensors

_FLOATS = {DTYPES[code] for code in ("F16", "BF16", "F32", "F64")}
# Below this sine of the angle, `slerp` would divide rounding errors by each other.
_MIN_SINE = 1e-4

Arrays = Sequence[np.ndarray]
Weights = Sequence[float]


def linear(tensors: Arrays, weights: Weights) -> np.ndarray:
  """Returns the weighted sum (model soups, Wortsman et al. 2022, arXiv 2203.05482).

  Tensors of weight 0 are left out, so weights of 1 and 0 return the first one exactly.
  """
  terms = (w * x for w, x in zip(weights, tensors, strict=True) if w)
  return functools.reduce(np.add, terms)


def slerp(tensors: Arrays, t: float) -> np.ndarray:
  """Returns the point at `t` on the arc between two tensors (Shoemake 1985).

  The angle is that of the flattened tensors. Parallel and opposite tensors, and zeros,
  have no arc and are interpolated linearly.
  """
  a, b = tensors
  norms = np.linalg.norm(a) * np.linalg.norm(b)
  cosine = float(np.vdot(a, b) / norms) if norms else 1.0
  angle = np.arccos(np.clip(cosine, -1, 1))
  weights = np.array([1 - t, t])
  if np.sin(angle) > _MIN_SINE:
    weights = np.sin(weights * angle) / np.sin(angle)
  return linear(tensors, weights.tolist())


def ties(deltas: Arrays, weights: Weights, density: float) -> np.ndarray:
  """Returns the TIES merge of differences from a base (Yadav et al. 2023, 2306.01708).

  Each difference keeps its largest entries, a share of `density`. The sign of an entry
  is that of the weighted sum. The kept entries of this sign are averaged by weight.
  """
  kept = [_trimmed(delta, density) for delta in deltas]
  sign = np.sign(linear(kept, weights))
  agrees = [(np.sign(delta) == sign).astype(np.float32) for delta in kept]
  total = linear([x * agree for x, agree in zip(kept, agrees)], weights)
  count = linear(agrees, weights)
  return np.divide(total, count, out=np.zeros_like(total), where=count > 0)


def _trimmed(delta: np.ndarray, density: float) -> np.ndarray:
  """Returns a difference whose smallest entries are 0; equal ones are kept together."""
  size = np.abs(delta)
  cut = size.size - max(1, round(density * size.size))
  least = np.partition(size, cut, axis=None)[cut] if size.size else 0
  return np.where(size >= least, delta, np.float32(0))


def dare(
  deltas: Arrays, weights: Weights, density: float, seed: int | Sequence[int]
) -> np.ndarray:
  """Returns the DARE merge of differences from a base (Yu et al. 2023, 2311.03099).

  Each entry is kept with probability `density`, which is 1 - p of the paper, and
  divided by it. The result is the weighted sum; a density of 1 is task arithmetic.
  """
  rng = np.random.default_rng(seed)
  kept = [x * (rng.random(x.shape, np.float32) < density) / density for x in deltas]
  return linear(kept, weights)


def merge_folders(
  folders: Sequence[pathlib.Path],
  output: pathlib.Path,
  formula: Callable[..., np.ndarray],
  options: Mapping[str, Any],
  base: pathlib.Path | None = None,
) -> None:
  """Writes the merge of models with the same tensors.

  Memory holds a few float32 copies of one tensor of each model. Other files and the
  dtypes are those of the first model. After an error there is no output.

  Args:
    folders, output: folders of the models, and the one to write.
    formula: `linear`, `slerp`, `ties` or `dare`.
    options: its arguments besides the arrays. The name of a tensor is added to a seed.
    base: folder of the base of ties and dare.

  Raises:
    FileNotFoundError, ValueError: a folder lacks files, is quantized, or has other
      tensors than the first one. Or a merged tensor is not finite in its dtype.
  """
  places = [*folders, *([] if base is None else [base])]
  models = [_open(folder) for folder in places]
  first = models[0]
  for folder, model in zip(places[1:], models[1:]):
    _require_same([places[0], folder], [first, model])

  def read(name: str) -> np.ndarray:
    values = [np.asarray(model[name].map(), np.float32) for model in models]
    chosen = dict(options)
    if "seed" in chosen:
      chosen["seed"] = [chosen["seed"], zlib.crc32(name.encode())]
    if base is None:
      merged = formula(values, **chosen)
    else:
      merged = values[-1] + formula([x - values[-1] for x in values[:-1]], **chosen)
    with np.errstate(over="ignore"):  # infinite numbers are refused below
      merged = np.asarray(merged, first[name].dtype)
    if not np.isfinite(merged).all():
      raise ValueError(
        f"{name} of the merge has NaN or infinite numbers in {merged.dtype}; expected "
        "finite ones. Check the models, or give smaller weights"
      )
    return merged

  new = [
    NewTensor(name, x.dtype, x.shape, functools.partial(read, name))
    for name, x in first.items()
  ]
  with tensor_files.staged_folder(output) as staging:
    tensor_files.write_shards(staging, new, safetensors_saver.MAX_SHARD_BYTES)
    tensor_files.copy_companions(places[0], staging)
    shutil.copyfile(places[0] / "config.json", staging / "config.json")


def _open(folder: pathlib.Path) -> dict[str, StoredTensor]:
  """Returns the tensors of a folder, which must hold plain numbers."""
  file_sums.check(folder)
  hf = tensor_files.read_json(folder / "config.json")
  found = [x for x in ("quantization_config", "compression_config") if hf.get(x)]
  found += [x for x in (gguf_tensors.NAME,) if (folder / x).exists()]
  tensors = {} if found else tensor_files.open_folder(folder)
  found += [f"{n!r} in {x.dtype}" for n, x in tensors.items() if x.dtype not in _FLOATS]
  if found:
    raise ValueError(
      f"{folder} has {found[0]}: only weights in float32, bfloat16 or float16 are "
      "merged. Give the model before it was quantized"
    )
  return tensors


def _require_same(
  folders: Sequence[pathlib.Path], models: Sequence[Mapping[str, StoredTensor]]
) -> None:
  """Refuses two models of different architectures or tensors."""
  configs = [tensor_files.read_json(folder / "config.json") for folder in folders]
  a, b = (hf.get("model_type") for hf in configs)
  wrong = [] if a == b else [f"model_type is {a!r} and {b!r}"]
  for name in sorted(models[0].keys() | models[1].keys()):
    a, b = (x[name].shape if name in x else "missing" for x in models)
    wrong += [] if a == b else [f"{name} is {a} and {b}"]
  if wrong:
    rest = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    raise ValueError(
      f"{folders[0]} and {folders[1]} differ: {', '.join(wrong[:3])}{rest}. Give "
      "models that were trained from one base"
    )
