"""The table of what each family is tested for, in docs/guides/models.md.

`python -m tests.models.support_table` writes it. A cell is read from the lists of cases
that the tests run, so a family that is taken from a list loses its mark.
"""

import ast
import json
import pathlib
from collections.abc import Iterable

import yaml

from tests.models import (
  checkpoints,
  family_layouts_test,
  family_smoke_test,
  odd_models,
)
from tunix.models import families, naming

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "models.md"
BEGIN, END = "<!-- support -->\n", "<!-- end of support -->\n"
HEAD = (
  "| family | golden | odd sizes | training | devices | TPU | recipe |\n"
  "|---|---|---|---|---|---|---|\n"
)


def of_presets(presets: Iterable[str]) -> set[str]:
  return {families.preset(name)[0].name for name in presets}


def golden() -> set[str]:
  """Families with a committed folder of `transformers`, see parity_test.py."""
  types = [
    json.loads((checkpoints.GOLDEN / name / "config.json").read_text())["model_type"]
    for name in checkpoints.NAMES
  ]
  return {families.by_model_type(kind).name for kind in types}


def compiled() -> set[str]:
  """Families that tpu_aot_test.py compiles; it is read, because it needs libtpu."""
  tree = ast.parse((ROOT / "tests" / "models" / "tpu_aot_test.py").read_text())
  (found,) = (
    node.value
    for node in tree.body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED"
  )
  return of_presets(ast.literal_eval(found))


def recipes() -> set[str]:
  paths = []
  for file in (ROOT / "examples" / "recipes").glob("*.yaml"):
    model = yaml.safe_load(file.read_text())["model"]
    paths.append(naming.ModelNaming(model["path"]).model_config_id)
  return of_presets(paths)


def table() -> str:
  columns = [
    golden(),
    set(odd_models.FAMILIES),
    of_presets((*family_smoke_test.IN_CI, *family_smoke_test.SLOW)),
    of_presets(family_layouts_test.PRESETS),
    compiled(),
    recipes(),
  ]
  rows = [
    [f"`{name}`", *("yes" if name in column else "" for column in columns)]
    for name in sorted(families.FAMILIES)
  ]
  return HEAD + "".join("| " + " | ".join(row) + " |\n" for row in rows)


def page() -> str:
  """The page with the table as it should be."""
  text = PAGE.read_text()
  before, after = text.split(BEGIN)[0], text.split(END)[1]
  return before + BEGIN + table() + END + after


if __name__ == "__main__":
  PAGE.write_text(page())
