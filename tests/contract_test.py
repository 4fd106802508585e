"""docs/contract.md: every name is there, with its arguments and a test of it."""

import importlib
import inspect
import pathlib
import re
from typing import Any

import pytest

import tunix
from tests import metrics_table

ROOT = pathlib.Path(__file__).parent.parent
SECTION = re.compile(r"^## (.*)$")
ROW = re.compile(r"^\| (.+) \| \[(tests/[^\]]*)\]\(\.\./(.*)\) \|$")


def rows():
  """(package or "", name, arguments, test) of every row."""
  package, out = "", []
  for line in (ROOT / "docs" / "contract.md").read_text().splitlines():
    if found := SECTION.match(line):
      package = found[1].strip("`")
    elif found := ROW.match(line):
      name, _, arguments = found[1].strip("`").partition("(")
      assert found[2] == found[3]
      listed = [a for a in arguments.rstrip(")").split(", ") if a]
      out.append((package, name, listed, found[2]))
  return out


def found(name) -> Any:
  parts = name.split(".")
  for count in range(len(parts), 0, -1):
    try:
      value = importlib.import_module(".".join(parts[:count]))
    except ModuleNotFoundError as error:
      if not name.startswith(str(error.name)):
        raise
      continue
    for part in parts[count:]:
      value = getattr(value, part)
    return value
  raise AssertionError(name)


def sources(test):
  place = ROOT / test
  files = sorted(place.glob("*_test.py")) if place.is_dir() else [place]
  assert files, f"{test} is gone"
  return "\n".join(file.read_text() for file in files)


NAMES = [row for row in rows() if row[0] not in ("Metrics", "Files")]


def test_nothing_fell_out_of_the_table():
  assert len(NAMES) > 170 and len(rows()) > len(NAMES) + 10


@pytest.mark.parametrize(("package", "name", "arguments", "test"), NAMES)
def test_a_name(package, name, arguments, test):
  top = "tunix" if package.startswith("From") else package
  value = found(f"{top}.{name}")
  if arguments:
    known = inspect.signature(value).parameters
    assert [a for a in arguments if a not in known] == []
  text, last = sources(test), name.rpartition(".")[2]
  assert text
  if last.startswith("_") and not last.startswith("__"):
    assert f"def {last}(" in text  # a method to override, and the test does


def test_the_metrics_that_users_know_are_those_declared():
  known = {
    prefix + metric.name
    for module, table, prefix in metrics_table.places()
    for metric in metrics_table.declared(module, table)
    if metric.known_as
  }
  listed = {name for package, name, _, _ in rows() if package == "Metrics"}
  assert listed == known | {"tokens_per_sec"}


@pytest.mark.parametrize(
  ("name", "base"),
  [
    ("ORPOTrainer", "DPOTrainer"),
    *((f"{kind}Trainer", "PeftTrainer") for kind in ("DPO", "Distillation", "KTO")),
    *((f"{kind}Learner", "GRPOLearner") for kind in ("DrGRPO", "DAPO")),
    *((f"{kind}Learner", "RLLearner") for kind in ("GRPO", "PPO", "RLOO")),
  ],
)
def test_a_class_is_of_the_kind_that_users_subclass(name, base):
  assert issubclass(getattr(tunix, name), getattr(tunix, base))
