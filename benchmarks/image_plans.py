"""Plans recipes with images: python -m benchmarks.image_plans [NAME ...]

The model of a recipe is a preset, which reads text alone. Here its config.json also has
the vision tower, with the sizes that `transformers` has for an absent field, and every
row has images. Prints a JSON line for each recipe. Needs libtpu, but no TPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import tempfile
import time
from typing import Any

from tunix.cli import config as config_lib
from tunix.cli.commands import plan
from tunix.cli.make import loading
from tunix.models import families

_RECIPES = pathlib.Path(__file__).parent.parent / "examples" / "recipes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
  """A recipe with images.

  Attributes:
    model_type: of the model with its tower.
    topology: the chips of the recipe.
    image_tokens: soft tokens of the images of a row.
    tower: contents of `vision_config`.
    processor: contents of `preprocessor_config.json`.
  """

  model_type: str
  topology: str
  image_tokens: int
  tower: dict[str, Any]
  processor: dict[str, Any]


_PLANS = {
  "gemma4_e4b_sft_lora": _Plan(
    model_type="gemma4",
    topology="v5e:2x4",
    image_tokens=560,  # two pictures
    tower={"model_type": "gemma4_vision"},
    processor={
      "image_processor_type": "Gemma4ImageProcessor",
      "patch_size": 16,
      "pooling_kernel_size": 3,
      "max_soft_tokens": 280,
      "do_normalize": False,
      "image_mean": [0.0] * 3,
      "image_std": [1.0] * 3,
    },
  ),
  "qwen3p5_27b_sft_lora": _Plan(
    model_type="qwen3_5",
    topology="v5e:4x4",
    image_tokens=1024,  # a picture of 1024 x 1024 pixels
    tower={"model_type": "qwen3_5_vision", "out_hidden_size": 5120},
    processor={
      "image_processor_type": "Qwen2VLImageProcessor",
      "patch_size": 16,
      "merge_size": 2,
      "temporal_patch_size": 2,
      "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
      "image_mean": [0.5] * 3,
      "image_std": [0.5] * 3,
    },
  ),
}


def planned(name: str) -> dict[str, Any]:
  """Returns the figures of a recipe with its images."""
  given = _PLANS[name]
  recipe = config_lib.load([str(_RECIPES / f"{name}.yaml")])
  sizes = loading.ModelLoader(recipe).sizes()
  with tempfile.TemporaryDirectory() as folder:
    whole = {
      "model_type": given.model_type,
      "text_config": families.of_config(sizes).config_to_hf(sizes),
      "vision_config": given.tower,
    }
    for file, content in (("config", whole), ("preprocessor_config", given.processor)):
      pathlib.Path(folder, f"{file}.json").write_text(json.dumps(content))
    model = dataclasses.replace(recipe.model, path=folder, images=True)
    data = dataclasses.replace(recipe.data, packing=False)  # rows with images are not
    config = dataclasses.replace(recipe, model=model, data=data)
    start = time.process_time()
    made = plan.plan(config, given.topology, image_tokens=given.image_tokens)
  return {
    "recipe": name,
    "chips": given.topology,
    "image_tokens": given.image_tokens,
    "peak_gib": round(made.peak_bytes / 2**30, 2),
    "step_s": round(made.step_seconds or 0.0, 2),
    "fits": made.fits,
    "plan_cpu_s": round(time.process_time() - start),
  }


def main() -> None:
  """Prints a line for each recipe."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {[*_PLANS]}")
  names = parser.parse_args().names
  if unknown := set(names) - set(_PLANS):
    parser.error(f"NAME is {sorted(unknown)}; expected some of {[*_PLANS]}")
  for name in names or _PLANS:
    print(json.dumps(planned(name)), flush=True)


if __name__ == "__main__":
  main()
