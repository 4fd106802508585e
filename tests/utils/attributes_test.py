import dataclasses

import pytest

from tunix.utils import attributes


@dataclasses.dataclass
class _Part:
  size: int = 1
  names: list[str] = dataclasses.field(default_factory=list)
  limit: int | None = None


def test_attributes_by_name():
  part = _Part(size=3)
  assert attributes.of(part, ("size", "limit")) == {"size": 3, "limit": None}
  assert attributes.known(part, ("size", "limit")) == {"size": 3}
  with pytest.raises(AttributeError, match="nothing"):
    attributes.known(part, ("nothing",))


def test_fields_are_not_copied():
  part = _Part(names=["a"])
  values = attributes.of_fields(part)
  assert values == {"size": 1, "names": ["a"], "limit": None}
  assert values["names"] is part.names
