"""Fields of config.json with values of another kind: refused by name, or not read."""

import json
import math
import time

import pytest

from tests.models import checkpoints
from tunix.models import families

FOLDERS = sorted(checkpoints.GOLDEN.glob("*/config.json"))
# By the kind of the good value: values that no reader may take for it.
ODD = {
  bool: ("yes", "false", 2, [], [False], {}),
  int: ("8", 1.5, [8], {}, 2**40, 10**400, True),
  float: ("1.0", math.nan, math.inf, [1.0], {}, True, 10**400),
  str: (0, [], {}, 1.5, ""),
  list: (0, "", {}, 7),
}


def family_of(hf):
  """The family that reads the whole file, with its section of a vision tower."""
  return families.by_model_type(hf["model_type"], "vision_config" in hf or None)


def fields(table, path=()):
  for name, value in table.items():
    yield (*path, name), value
    if isinstance(value, dict):
      yield from fields(value, (*path, name))


def changed(hf, path, value):
  hf = json.loads(json.dumps(hf))
  table = hf
  for name in path[:-1]:
    table = table[name]
  table[path[-1]] = value
  return hf


@pytest.mark.parametrize("file", FOLDERS, ids=lambda file: file.parent.name)
def test_odd_values_are_refused_by_name(file):
  hf = json.loads(file.read_text())
  family = family_of(hf)
  good = family.config_from_hf(hf)
  refused = set()
  for path, value in fields(hf):
    if path[-1] in ("model_type", "query_pre_attn_scalar"):
      continue  # selects the family; a float that files write as 16
    for odd in ODD.get(type(value), ()):
      try:
        config = family.config_from_hf(changed(hf, path, odd))
      except ValueError as error:
        refused.add(path[-1])
        assert path[-1] in str(error) and "\n" not in str(error), (path, odd)
        assert len(str(error)) < 1000
      else:  # The family does not read the field.
        assert config == good, (path, odd, value)
  assert {"vocab_size", "hidden_size", "tie_word_embeddings"} <= refused


@pytest.mark.parametrize("file", FOLDERS, ids=lambda file: file.parent.name)
def test_rotary_bases_are_above_0(file):
  hf = json.loads(file.read_text())
  family = family_of(hf)
  for path, _ in fields(hf):
    if path[-1] == "rope_theta":
      for theta in (0, -1.0):
        with pytest.raises(ValueError, match=f"rope_theta is {theta}, it must be"):
          family.config_from_hf(changed(hf, path, theta))


@pytest.mark.parametrize("file", FOLDERS, ids=lambda file: file.parent.name)
def test_counts_are_bounded_before_anything_is_made_of_them(file):
  hf = json.loads(file.read_text())
  family = family_of(hf)
  for path, _ in fields(hf):
    name = path[-1]
    if name in ("num_hidden_layers", "num_experts", "num_local_experts"):
      start = time.process_time()
      try:
        family.config_from_hf(changed(hf, path, 10**9))
      except ValueError as error:
        assert f"{name} is 1000000000, " in str(error)
      # Making 10^9 of anything takes minutes and gigabytes.
      assert time.process_time() - start < 20
