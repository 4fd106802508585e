"""Strings that name functions and calls: taken apart, never evaluated."""

import pytest

from tunix.cli.utils import call_strings
from tunix.cli.utils.call_strings import CallString, parse_call_string


@pytest.mark.parametrize(
  ("text", "parts"),
  [
    ("pkg.mod", ("pkg.mod", None, (), None)),
    ("pkg.mod:fn", ("pkg.mod", "fn", (), None)),
    ("pkg.mod:fn()", ("pkg.mod", "fn", (), {})),
    ("pkg.mod:fn(name='x', n=-1)", ("pkg.mod", "fn", (), {"name": "x", "n": -1})),
    ("/a b/file.py:fn(1, [2])", ("/a b/file.py", "fn", (1, [2]), {})),
    ("exact_match", (None, "exact_match", (), None)),
    ("f(pattern='a:(b)')", (None, "f", (), {"pattern": "a:(b)"})),
  ],
)
def test_parts(text, parts):
  source, name, args, kwargs = parts
  expected = CallString(source=source, name=name, args=args, kwargs=kwargs)
  assert parse_call_string(text) == expected


@pytest.mark.parametrize(
  "text",
  [
    "pkg.mod:fn(open('x'))",
    "pkg.mod:fn(x=__import__('os'))",
    "pkg.mod:fn(",
    "pkg.mod:fn)(",
    "pkg.mod:fn(1)(2)",
    "pkg.mod:fn(**{'a': 1})",
    "pkg.mod:not a name",
    "(1)",
  ],
)
def test_what_is_no_call_of_literals_is_refused(text):
  with pytest.raises(ValueError, match=r"names no function|cannot be parsed"):
    parse_call_string(text)


def test_a_file_and_a_module_of_the_current_folder_are_loaded(tmp_path, monkeypatch):
  (tmp_path / "mine_to_load.py").write_text("def fn(x):\n  return x + 1\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path / "elsewhere")
  for source in (f"{tmp_path}/mine_to_load.py", "mine_to_load"):
    call = parse_call_string(f"{source}:fn")
    assert call_strings.load(call)(1) == 2
    assert len(call_strings.source_digest(call)) == 64


def test_a_file_that_is_called_like_a_module_is_refused(tmp_path):
  (tmp_path / "json.py").write_text("def fn(): pass\n")
  with pytest.raises(ImportError, match="rename the file"):
    call_strings.load(parse_call_string(f"{tmp_path}/json.py:fn"))
