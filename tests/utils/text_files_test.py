"""Only a line feed ends a line, and a byte order mark is no text, in every reader."""

import json

import pytest

from tunix.cli.commands import generate
from tunix.cli.make import loading
from tunix.cli.settings import yaml_text
from tunix.generate.tokenizer import files as tokenizer_files
from tunix.rl.env.tools import search_tool
from tunix.serve import settings as serve_settings
from tunix.tinker.settings import read_keys
from tunix.utils import text_files

ODD = "a\u2028b\x85c\fd\ve\x1cf\rg"


@pytest.mark.parametrize(
  ("text", "lines"),
  [
    ("", []),
    ("\n", [""]),
    ("a", ["a"]),
    ("a\n", ["a"]),
    ("a\r\n\r\nb\r\n", ["a", "", "b"]),
    (f"{ODD}\n{ODD}", [ODD, ODD]),
  ],
)
def test_lines(text, lines):
  assert text_files.lines(text) == lines


@pytest.mark.parametrize(
  ("read", "text", "value"),
  [
    (generate._read_prompts, f"{ODD}\n\n{ODD}\r\n", [ODD, ODD]),
    (read_keys, "ann tml-a\n", {"ann": "tml-a"}),
    (serve_settings.read_key, "secret\n", "secret"),
    (yaml_text.read_file, f"a: {json.dumps(ODD)}\n", {"a": ODD}),
    (loading._read_template, ODD, ODD),
    (tokenizer_files._read_template, f"{ODD}\r\n", f"{ODD}\n"),
    (search_tool._read, f"{json.dumps(ODD, ensure_ascii=False)}\n", [ODD]),
  ],
)
def test_readers(tmp_path, read, text, value):
  file = tmp_path / "a.txt"
  file.write_bytes(("\ufeff" + text).encode())
  name = file if read in (read_keys, search_tool._read) else str(file)
  assert read(name) == value
  file.write_bytes(b"\xff")
  with pytest.raises(
    ValueError, match=r"a\.txt is no (UTF-8 text|JSON) \('utf-8' codec"
  ):
    read(name)
