"""The Modelfile: its template writes what the chat template writes."""

import json
import re

import pytest

from tests import toys_text
from tunix.cli.make import ollama


def go(template, messages):
  """Runs the part of Go's templates that is used, in Python."""
  words = re.findall(r"{{ (.*?) }}", template)
  assert "".join(f"{{{{ {word} }}}}" for word in words) == template
  lines, depth = ["before, out = None, []"], 0
  for word in words:
    message = {"$before": "before", ".Content": "m['content']"}
    if word.startswith("range"):
      line, after = "for i, m in enumerate(messages):", 1
    elif found := re.fullmatch(r'(else )?if eq .Role (".*")', word):
      depth -= bool(found[1])
      line, after = f"{'el' if found[1] else ''}if m['role'] == {found[2]}:", 1
    elif word == "if eq (len (slice $.Messages $i)) 1":
      line, after = "if len(messages[i:]) == 1:", 1
    elif word == "else":
      depth, line, after = depth - 1, "else:", 1
    elif word == "end":
      line, after = "pass", -1
    elif found := re.fullmatch(r"\$before :?= (.*)", word):
      line, after = f"before = {json.loads(found[1])!r}", 0
    else:
      value = message.get(word) or repr(json.loads(word))
      line, after = f"out.append({value})", 0
    lines.append("  " * depth + line)
    depth += after
  found = {"messages": messages}
  exec("\n".join(lines), found)
  return "".join(found["out"])


def turns(*contents, system=None):
  first = [] if system is None else [{"role": "system", "content": system}]
  roles = ("user", "assistant") * len(contents)
  return first + [{"role": r, "content": c} for r, c in zip(roles, contents)]


@pytest.mark.parametrize("name", ["chatml", "qwen3", "gemma", "llama2", "plain"])
@pytest.mark.parametrize("system", [None, "be kind"])
def test_the_template_writes_what_the_chat_template_writes(name, system):
  tokenizer = toys_text.chat_tokenizer(name)
  template = ollama.go_template(tokenizer)
  for contents in (["a"], ["a", "b", "c"], ["a", "b", "c", "d", "e"]):
    messages = turns(*contents, system=None if name == "llama2" else system)
    want = tokenizer.apply_chat_template(messages)
    bos = tokenizer.bos_token if tokenizer.add_bos else None
    assert go(template, messages) == want.removeprefix(bos or "")


@pytest.mark.parametrize("name", ["llama3", None])
def test_no_template_for_one_that_shows_the_date_and_for_none(name):
  tokenizer = toys_text.chat_tokenizer(name)
  assert ollama.go_template(tokenizer) is None
  assert "TEMPLATE" not in ollama.modelfile(tokenizer, "./x.gguf", None)


def test_a_modelfile():
  tokenizer = toys_text.chat_tokenizer("chatml")
  lines = ollama.modelfile(tokenizer, "/base", "./a.gguf").splitlines()
  assert lines[1:3] == ["FROM /base", "ADAPTER ./a.gguf"]
  assert lines[3].startswith('TEMPLATE """{{ $before := "<|im_start|>user\\n" }}')
  assert lines[4:] == ['PARAMETER stop "<|im_end|>"']
