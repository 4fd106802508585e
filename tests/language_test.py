"""The opening rule of docstrings, and one spelling (CONTRIBUTING.md)."""

import ast
import pathlib
import re

PACKAGE = pathlib.Path(__file__).parent.parent / "tunix"

# A docstring says what a thing does ("Returns ...") or what it is ("A batch of ...").
# One that opens with a preposition or a question word makes its reader guess both.
OPENINGS = {
  *("of", "by", "with", "from", "for", "to", "in", "on", "at"),
  *("what", "whether", "how", "where", "when", "which", "who", "why"),
}


def first_lines(path: pathlib.Path):
  """Yields (line number, first line) of every docstring of a file."""
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, kinds) and (text := ast.get_docstring(node)):
      yield getattr(node, "lineno", 1), text.splitlines()[0]


def test_docstrings_open_with_a_verb_or_a_noun():
  wrong = []
  for path in sorted(PACKAGE.rglob("*.py")):
    for number, line in first_lines(path):
      if line.split(maxsplit=1)[0].strip("\"'`,.:;").lower() in OPENINGS:
        wrong.append(f"{path.relative_to(PACKAGE)}:{number}: {line}")
  assert not wrong, f"{len(wrong)} docstrings:\n" + "\n".join(wrong)


# Pages and help are in American spelling. Names of the code may be older.
BRITISH = re.compile(
  r"\b\w*(?:(?:quanti|normali|initiali|tokeni|recogni|minimi|materiali|generali|optimi)"
  r"s(?:e|ed|es|er|ing|ation)|utilisation|colour\w*|labell(?:ed|ing)|honour\w*|"
  r"neighbour\w*|centr(?:ed|ing)|favour\w*|behaviour\w*|learnt|towards)\b",
  re.I,
)


def test_pages_and_help_have_one_spelling():
  root = PACKAGE.parent
  pages = [root / "README.md", root / "CHANGELOG.md", *(root / "docs").rglob("*.md")]
  made = {root / "docs" / x for x in ("examples", "tutorials", "reference", "_build")}
  pages = [page for page in pages if not made & {*page.parents}]  # may be old
  for page in (*pages, PACKAGE / "cli" / "base_config.yaml"):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
    text = re.sub(r"\S+[/.]\S+", "", text)  # keys and paths
    found = BRITISH.findall(text)
    assert not found, f"{page.relative_to(root)}: {found}"
