"""Tests of tunix/utils/setting.py."""

import dataclasses

import pytest

from tunix.utils.setting import (
  Facts,
  facts_of,
  field_values,
  known_values,
  named_values,
  setting,
  shared_values,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
  plain: int = 1
  folder: str | None = setting(None, path="written", may_change=True)
  args: dict = setting(default_factory=dict, python_only=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
  plain: int = 0
  folder: str = ""
  more: int = 3


def test_facts_are_read_off_the_field():
  fields = {field.name: facts_of(field) for field in dataclasses.fields(Section)}
  assert fields == {
    "plain": Facts(),
    "folder": Facts(path="written", may_change=True),
    "args": Facts(python_only=True),
  }
  assert Section() == Section(plain=1, folder=None, args={})


def test_shared_values_are_those_of_fields_that_both_have():
  assert shared_values(Other, Section(folder="x")) == {"plain": 1, "folder": "x"}


def test_values_by_name_are_not_copied():
  section = Section(args={"a": 1})
  assert named_values(section, ("plain", "folder")) == {"plain": 1, "folder": None}
  assert known_values(section, ("plain", "folder")) == {"plain": 1}
  assert field_values(section)["args"] is section.args
  with pytest.raises(AttributeError, match="nothing"):
    known_values(section, ("nothing",))
