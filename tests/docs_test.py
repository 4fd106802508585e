"""Runs every snippet of README and docs.

Python blocks of a page share one namespace; `bash` blocks run in order in the same
folder, where `my-model`, `other-model`, `chat.jsonl`, `eval.jsonl`, `pairs.jsonl` and
`prompts.jsonl` stand for the reader's own, and `quickstart` for the folder of `tunix
quickstart`.
Commands of tunix in `text` and `console` blocks need chips, servers, hosts, models of
the hub, or minutes: their arguments and keys are checked, and they do not run.
A run of 20 to 99 steps takes 4. README's first two blocks are the quickstart and this
suite itself: they have their own tests.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests import forks, toys, toys_text, world
from tunix.cli import config as config_lib, main
from tunix.cli.commands.planning import serve as plan_serve
from tunix.cli.settings import spelling
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.families import FAMILIES

ROOT = pathlib.Path(__file__).parent.parent
# The site makes these pages (docs/pages.py). Their sources have tests of their own.
MADE = ("docs/examples/", "docs/tutorials/", "docs/reference/keys.md")
PAGES = sorted(
  page
  for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
  if not page.relative_to(ROOT).as_posix().startswith(MADE)
)
EXAMPLES = ROOT / "examples"
# Readers have one device, and `tunix plan` may ask for more.
ENVIRONMENT = os.environ | {"XLA_FLAGS": world.xla_flags(devices=None)}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
MANY_STEPS = re.compile(r"\bmax_steps=[2-9]\d\b")


def blocks(page: pathlib.Path) -> list[tuple[str, str]]:
  found = BLOCK.findall(page.read_text())
  if page.name == "README.md":
    bash = [i for i, (kind, _) in enumerate(found) if kind == "bash"][:2]
    found = [block for i, block in enumerate(found) if i not in bash]
  return [
    (kind, MANY_STEPS.sub("max_steps=4", code))
    for kind, code in found
    if kind in ("python", "bash")
  ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> pathlib.Path:
  """A folder with the files that the pages speak of."""
  from tunix.models import safetensors_saver

  folder = tmp_path_factory.mktemp("docs")
  tokenizer = toys_text.chat_tokenizer("chatml")
  model = toys.model(vocab_size=tokenizer.vocab_size)
  safetensors_saver.save_pretrained(model, folder / "my-model")
  tokenizer.save(folder / "my-model")
  other = TokenizerAdapter(
    toys_text.metaspace(),
    chat_template=toys_text.LLAMA2,
    bos_token="<s>",
    eos_token="</s>",
  )
  model = toys.model(vocab_size=other.vocab_size)
  safetensors_saver.save_pretrained(model, folder / "other-model")
  other.save(folder / "other-model")
  words = " ".join(toys_text.WORDS).split()
  for name, count in (("chat", 120), ("eval", 8)):
    records = [
      {"prompt": f"what is {i}?", "response": " ".join(words[i % 50 : i % 50 + 6])}
      for i in range(count)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(lines)
  more = {
    "pairs": lambda i: {"prompt": f"is {i}?", "chosen": "it is", "rejected": "the sea"},
    "prompts": lambda i: {"prompt": f"what is {i}?", "answer": "five"},
  }
  for name, record in more.items():
    lines = "".join(json.dumps(record(i)) + "\n" for i in range(8))
    (folder / f"{name}.jsonl").write_text(lines)
  quickstart = folder / "quickstart"
  for name in ("model", "sft/export"):
    shutil.copytree(folder / "my-model", quickstart / name)
  shutil.copyfile(folder / "chat.jsonl", quickstart / "train.jsonl")
  shutil.copyfile(folder / "eval.jsonl", quickstart / "eval.jsonl")
  return folder


def run(kind: str, code: str, folder: pathlib.Path) -> None:
  """One block, in a process of its own."""
  processes = forks.shared()
  path = f"{processes.shim.parent}{os.pathsep}{os.environ['PATH']}"
  task = {"kind": "-c", "program": code, "argv": []}
  is_bash = kind == "bash"
  done = subprocess.run(
    ["bash", "-euo", "pipefail", "-c", code] if is_bash else processes.command(task),
    cwd=folder,
    env=ENVIRONMENT | {"PATH": path},
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


def page_id(page: pathlib.Path) -> str:
  """The page's name; `extend/data` for a page of a folder of guides/."""
  is_nested = page.parent.parent == ROOT / "docs" / "guides"
  return f"{page.parent.name}/{page.stem}" if is_nested else page.stem.lower()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=page_id)
def test_every_snippet_runs(page, prepared, tmp_path):
  shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
  python = "".join(code for kind, code in blocks(page) if kind == "python")
  for kind, code in blocks(page):
    if kind == "bash":
      run(kind, code, tmp_path)
  if python:
    run("python", python, tmp_path)


# Arguments that are no keys.
FLAGS = {
  "train": re.compile(r" --(?:tiny|dry-run)(?= |$)"),
  "plan": re.compile(
    r" --(?:fit|json|markdown|mesh [a-z]+=\S+|(?:topology|ship|ship-key) \S+)(?= |$)"
  ),
}
# A configuration of the reader, or an ellipsis for further keys.
OF_READERS = re.compile(r"\b(?:RECIPE|run\.yaml|mine\.yaml)\b| \.\.\.(?= |$)")
RECIPE = EXAMPLES / "recipes" / "qwen2p5_0p5b_grpo.yaml"


def shown_commands(page: pathlib.Path) -> Iterator[list[str]]:
  """Yields the words of each command of tunix in `text` and `console` blocks."""
  for kind, code in BLOCK.findall(page.read_text()):
    lines = iter(code.replace("\\\n", " ").splitlines())
    for line in lines if kind in ("text", "console") else ():
      if found := re.match(r"(?:[A-Z_]+=\S+ )*tunix (.*)", line):
        text = found[1]
        while text.count("'") % 2:  # a value over several lines
          text += next(lines)
        if (flags := FLAGS.get(text.partition(" ")[0])) is not None:
          text = flags.sub("", text)
        text = OF_READERS.sub(lambda m: "" if m[0][0] == " " else str(RECIPE), text)
        yield [word for word in shlex.split(text, comments=True) if word != "&"]


def check_command(command: str, *words: str) -> None:
  """Parses the arguments of a command as the command does.

  Raises:
    ValueError: an argument or a key is wrong.
  """
  if command == "plan" and words[0] == "serve":
    plan_serve.parser().read(words[1:])
  elif command in ("train", "plan"):
    config_lib.load(words)
  else:
    parser = main._load(command).parser()
    rest = parser.parse_known_intermixed_args(words)[1]
    assert not rest or command == "rollouts", rest


@pytest.mark.parametrize(
  "page", [p for p in PAGES if any(shown_commands(p))], ids=page_id
)
def test_commands_that_do_not_run_have_right_arguments(page):
  for words in shown_commands(page):
    check_command(*words)


def test_wrong_arguments_of_shown_commands_are_found():
  for line in ("train --model=m", "serve m --prot 1", "trian", "replay a --tu b"):
    with pytest.raises((ValueError, AssertionError)):
      check_command(*line.split())


def test_readme_begins_with_the_two_commands():
  bash = [code for kind, code in BLOCK.findall((ROOT / "README.md").read_text())]
  assert bash[0].splitlines()[-1] == "tunix quickstart"
  assert bash[1].splitlines() == ["python -m pip install -e '.[test]'", "make check"]


def test_readme_is_short_and_counts_the_families():
  readme = (ROOT / "README.md").read_text()
  assert len(readme.splitlines()) <= 170
  for page in (ROOT / "README.md", ROOT / "docs" / "choose.md"):
    counted = re.findall(r"(\d+) families", page.read_text())
    assert counted == [str(len(FAMILIES))], page.name


def test_pages_and_examples_use_no_old_spelling_of_a_key():
  """Old names of keys are accepted, and taught nowhere."""
  old = [key.split(".") for key in spelling.ALIASES | spelling.RENAMED if "." in key]
  uses = "|".join(rf"{section}\.{name}|(?<!\w){name} ?[:=]" for section, name in old)
  pattern = re.compile(rf"(?<![\w.])(?:{uses})(?!\w)")
  assert pattern.search("checkpoint: {every_n_steps: 2}")
  assert pattern.search("--checkpoint.every_n_steps=2")
  examples = [
    p for e in ("md", "py", "yaml", "ipynb") for p in EXAMPLES.rglob(f"*.{e}")
  ]
  help_texts = [ROOT / "tunix" / "cli" / "base_config.yaml"]
  found = {
    f"{path.relative_to(ROOT)}: {use[0]}"
    for path in (*PAGES, *examples, *help_texts)
    for use in pattern.finditer(path.read_text())
  }
  assert not found


def test_links_between_pages_lead_somewhere():
  headings = {page: anchors(page) for page in PAGES}
  for page in PAGES:
    links = re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)]+))?\)", page.read_text())
    for target, anchor in links:
      path = (page.parent / target).resolve() if target else page
      assert path.exists(), f"{page.name} links to {target}"
      if anchor and path in headings:
        assert anchor in headings[path], f"{page.name} links to {target}#{anchor}"


def anchors(page: pathlib.Path) -> set[str]:
  """Returns the anchors of a page's headings, as GitHub and the site make them."""
  text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
  titles = re.findall(r"^#+ (.*)$", text, re.M)
  return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}
