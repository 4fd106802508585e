"""Reading a standard library: what is taken from a file, and what is not."""

import pytest

from tunix.cli.quickstart.stdlib import Function, Passage, read_stdlib

_SHAPES = '''\
"""About shapes."""

import math


class Circle:
  """A round shape."""

  def area(self, unit: str = "m", /, *scales: float, digits=2, **more) -> float:
    """Return the area. In square units.

    More about it.
    """
    return math.pi

  def silent(self):
    return None


if math.pi > 3:

  async def later():
    """Wait for a
    shape
    """
'''


@pytest.fixture
def library(tmp_path):
  (tmp_path / "_shapes.py").write_text(_SHAPES)
  many = "\n\n".join(f'def f{i}(x):\n  """Return x {i}."""' for i in range(200))
  (tmp_path / "pack").mkdir()
  (tmp_path / "pack" / "many.py").write_text(many)
  (tmp_path / "broken.py").write_text("def (:\n")
  (tmp_path / "_pyio.py").write_text('"""The Python half of io."""\n')
  (tmp_path / "test").mkdir()
  (tmp_path / "test" / "much.py").write_text(many)
  return tmp_path


def by_name(library) -> dict[str, Function]:
  return {f.name: f for f in read_stdlib(library)[0]}


def test_a_function_is_described_by_its_source(library):
  area = by_name(library)["area"]
  assert area.signature == "def area(self, unit, /, *scales, digits, **more)"
  assert area.arguments == ("self", "unit", "scales", "digits", "more")
  assert area.summary == "Return the area."
  assert area.module == "shapes"
  assert area.doc == "Return the area. In square units.\n\nMore about it."


def test_functions_in_branches_count_and_sentences_span_lines(library):
  assert by_name(library)["later"].summary == "Wait for a shape"


def test_what_has_no_docstring_is_left_out(library):
  assert "silent" not in by_name(library)


def test_test_folders_and_broken_files_are_skipped(library):
  modules = [f.module for f in read_stdlib(library)[0]]
  assert modules.count("pack") == 200
  assert set(modules) == {"pack", "shapes"}


def test_classes_and_modules_give_passages(library):
  assert read_stdlib(library)[1] == [
    Passage(module="io", text="The Python half of io."),
    Passage(module="shapes", text="About shapes."),
    Passage(module="shapes", text="class Circle:\nA round shape."),
  ]


def test_a_library_without_sources_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="0 documented functions, at least 200"):
    read_stdlib(tmp_path)
