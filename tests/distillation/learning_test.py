"""Distillation is worth something: margins on a chain of words (see learning.py)."""

import pytest

from tests.distillation import learning


@pytest.fixture(scope="module")
def known():
  return learning.teacher()
