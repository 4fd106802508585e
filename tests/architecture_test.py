"""The layer order of docs/design/architecture.md, kept by a test.

An import points down, or sideways inside one package; never up. No cycles, no
private name across packages, heavy optional packages only in the files named
here, and `import tunix` loads nothing heavy.
"""

import ast
import functools
import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests import timings

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "tunix"

LAYERS = {
  "utils": 1,
  "perf": 1,
  "ops": 2,
  "sandbox": 2,
  "models": 3,
  "generate": 4,
  "data": 4,
  "utils.script_utils": 4.5,  # the old path of data.questions
  "sft": 5,
  "sft.dpo": 5.5,
  "report": 5.5,
  "rl": 6,
  "distillation": 6,
  "plan": 6.5,
  "serve": 7,  # beside cli, which may import it
  "tinker": 7,  # beside both; its app is over serve's
  "cli": 7,
  "examples": 8,
}

# Sideways between packages of one layer: only what the design names.
SIDEWAYS = {
  ("cli", "tunix.serve.rollouts"),
  ("cli", "tunix.serve.router"),
  ("cli", "tunix.serve.server"),
  ("cli", "tunix.serve.settings"),
  ("cli", "tunix.tinker.app"),
  ("cli", "tunix.tinker.service"),
  ("cli", "tunix.tinker.settings"),
  ("data", "tunix.generate.tokenizer.messages"),
  ("data", "tunix.generate.tokenizer_adapter"),
  ("data", "tunix.generate.answers.reasoning"),
  ("perf", "tunix.utils.metric"),
  ("tinker", "tunix.serve.app"),
  ("tinker", "tunix.serve.openai.context"),
  ("tinker", "tunix.serve.http.errors"),
  ("tinker", "tunix.serve.http.guard"),
  ("tinker", "tunix.serve.http.bodies"),
  ("tinker", "tunix.serve.settings"),
}

# Packages that cost import time or are optional, and the only files that may
# import them.
HEAVY = {
  "orbax": {
    "sft/checkpoint_manager.py",
    "sft/checkpoints/orbax_options.py",
    "utils/coordination.py",  # which has a public name for JAX's coordinator
  },
  "grain": {
    *(
      "data/pipeline.py",
      "data/batching/packing.py",
      "data/batching/buckets.py",
      "data/batching/draws.py",
      "data/batching/streams.py",
    ),
    *("data/reading/array_record.py", "data/batching/map_datasets.py"),
  },
  "qwix": set(),
  "tensorboardX": {"sft/metrics/backends.py"},
  "wandb": {"sft/metrics/backends.py"},
  "huggingface_hub": {"models/hub.py"},
  "transformers": set(),
  "torch": set(),  # by utils.optional, see generate/external/gpu_handles.py
  "tokenizers": {
    "generate/tokenizer/loading.py",
    "examples/quickstart/task.py",
    "examples/shapes.py",
  },
  "jsonschema": {"rl/reward/json_schema.py"},
  "bm25s": set(),  # by utils.optional, see rl/env/tools/search_tool.py
  "reasoning_gym": set(),  # likewise, see rl/env/adapters/reasoning_gym.py
  "verifiers": set(),  # likewise, see rl/env/adapters/verifiers.py
  "llguidance": {"generate/engine/grammar.py"},
  "xxhash": {"sft/checkpoints/checksums.py"},
  "shtab": {"cli/commands/completion.py"},
  "filelock": {"utils/folder_lock.py", "cli/make/data_sources.py"},
  "jinja2": {
    "generate/tokenizer/chat_template.py",
    "generate/tokenizer/template_sandbox.py",
  },
  "yaml": {"cli/settings/yaml_text.py"},
  "safetensors": set(),  # tests only: see models/files/tensor_files.py
  "starlette": {"serve/app.py"},
  "gguf": set(),  # likewise, see models/gguf/header.py
  "uvicorn": set(),  # by utils.optional, see serve/server.py
  "prometheus_client": set(),  # likewise, see serve/metrics.py
  "httpx": set(),  # likewise, see serve/http/hosts.py
  "openai": set(),
  "PIL": set(),  # by utils.optional, see models/images/pillow.py
  "tqdm": {"sft/progress_bar.py"},
}

STDLIB_OF_OPS = {"collections", "functools", "inspect", "math", "typing"}

FILES = sorted(PACKAGE.rglob("*.py"))


def package_of(module: str) -> str:
  """'tunix.sft.dpo.dpo_trainer' -> 'sft.dpo', the longest name in LAYERS."""
  parts = module.split(".")[1:]
  for n in range(len(parts), 0, -1):
    if ".".join(parts[:n]) in LAYERS:
      return ".".join(parts[:n])
  return ""


def module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def type_checking_lines(tree: ast.AST) -> set[int]:
  lines = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
      for child in node.body:
        lines.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
  return lines


@functools.cache
def imports(path: pathlib.Path) -> list[tuple[str, list[str], int]]:
  """(module, names, lineno) of every import that runs."""
  tree = ast.parse(path.read_text())
  skip = type_checking_lines(tree)
  found = []
  for node in ast.walk(tree):
    if getattr(node, "lineno", 0) in skip:
      continue
    if isinstance(node, ast.Import):
      found += [(alias.name, [], node.lineno) for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
      found.append((node.module or "", [a.name for a in node.names], node.lineno))
  return found


def internal_imports(path: pathlib.Path):
  """Modules of ours that `path` imports: `from tunix.a import b` names tunix.a.b
  when that is a file."""
  for module, names, line in imports(path):
    if module.split(".")[0] != "tunix":
      continue
    for name in names or [""]:
      full = f"{module}.{name}" if name else module
      target = ROOT / pathlib.Path(*full.split("."))
      is_module = target.with_suffix(".py").exists() or target.is_dir()
      yield full if is_module else module, name, line


def test_imports_point_down():
  wrong = []
  for path in FILES:
    if path.parent == PACKAGE:
      continue  # tunix/__init__.py names everything, lazily
    here = package_of(module_name(path))
    assert here, f"{path} belongs to no layer: add its package to LAYERS"
    for module, name, line in internal_imports(path):
      there = package_of(module)
      if not there or there == here:
        continue
      where = f"{path.relative_to(ROOT)}:{line}: {here} (layer {LAYERS[here]})"
      if LAYERS[there] >= LAYERS[here] and (here, module) not in SIDEWAYS:
        wrong.append(f"{where} imports {module} ({LAYERS[there]})")
      if name.startswith("_"):
        wrong.append(f"{where} imports the private name {name} of {module}")
  assert not wrong, "\n".join(wrong)


def test_heavy_packages_stay_in_their_files():
  wrong = []
  for path in FILES:
    inside = str(path.relative_to(PACKAGE))
    for module, _, line in imports(path):
      allowed = HEAVY.get(module.split(".")[0])
      if allowed is not None and inside not in allowed:
        wrong.append(f"{inside}:{line} imports {module}; only {sorted(allowed)} may")
  assert not wrong, "\n".join(wrong)


def test_ops_needs_nothing_of_ours_but_ops():
  for path in (PACKAGE / "ops").glob("*.py"):
    for module, _, line in imports(path):
      root = module.split(".")[0]
      allowed = {"jax", "jaxtyping", "__future__", *STDLIB_OF_OPS}
      ours = "tunix.ops", "tunix.utils.metric"  # the second: declared at the formula
      assert root in allowed or module.startswith(ours), (
        f"{path.name}:{line} imports {module}"
      )


def graph_of_imports() -> dict[str, set[str]]:
  return {
    module_name(p): {
      m for m, _, _ in internal_imports(p) if m != module_name(p) and m != "tunix"
    }
    for p in FILES
  }


def check_acyclic(graph: dict[str, set[str]]) -> None:
  state: dict[str, int] = {}

  def visit(node, trail):
    state[node] = 1
    for nxt in graph.get(node, ()):
      assert state.get(nxt) != 1, " -> ".join([*trail, node, nxt])
      if nxt not in state:
        visit(nxt, [*trail, node])
    state[node] = 2

  for node in graph:
    if node not in state:
      visit(node, [])


def only_repeats(path: pathlib.Path) -> bool:
  """True for a thin module, which only gives names of other modules."""
  body = ast.parse(path.read_text()).body
  return all(
    isinstance(node, ast.Import | ast.ImportFrom | ast.Assign)
    or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    for node in body
  ) and any(isinstance(node, ast.ImportFrom) for node in body)


def test_no_import_cycles():
  check_acyclic(graph_of_imports())


def test_no_cycles_among_the_modules_and_folders_of_a_folder():
  """Each folder is taken for one module."""
  thin = {module_name(p) for p in FILES if only_repeats(p)}
  graph = {a: to for a, to in graph_of_imports().items() if a not in thin}
  folders = {module_name(p.parent / "__init__.py") for p in FILES}
  for folder in folders:
    size = len(folder.split(".")) + 1

    def room(module, folder=folder, size=size):
      inside = module.startswith(folder + ".")
      return ".".join(module.split(".")[:size]) if inside else None

    rooms: dict[str, set[str]] = {}
    for module, imported in graph.items():
      if (here := room(module)) is not None:
        there = {room(m) for m in imported} - {None, here}
        rooms.setdefault(here, set()).update(there)
    check_acyclic(rooms)


def test_folders_are_small_and_say_what_they_are_for():
  for folder in {path.parent for path in FILES}:
    modules = [p for p in folder.glob("*.py") if p.name != "__init__.py"]
    count = sum(not only_repeats(p) for p in modules)
    assert count <= 16, f"{folder} has {count} modules: make a folder for some of them"
    door = folder / "__init__.py"
    is_family = (folder / "model.py").is_file()
    assert is_family or ast.get_docstring(ast.parse(door.read_text())), door


# JAX imports these by itself where they are installed.
BY_JAX = {"yaml", "filelock"}

STATEMENTS = (
  "import tunix",
  "from tunix.sft import metrics_logger",
  "from tunix.sft import peft_trainer",
)


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
  """The packages that are there after each of STATEMENTS, one after the other."""
  code = "import sys, json"
  for statement in STATEMENTS:
    code += f"\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
  ).stdout
  return {
    statement: {name.split(".")[0] for name in json.loads(line)}
    for statement, line in zip(STATEMENTS, out.splitlines(), strict=True)
  }


def test_import_tunix_is_light(loaded):
  heavy = {"jax", "numpy", "flax", "optax", *HEAVY}
  assert not heavy & loaded["import tunix"]


def test_logging_loads_no_logger_before_a_value_is_sent(loaded):
  packages = {*HEAVY, "humanize", "flax"} - BY_JAX
  assert not packages & loaded["from tunix.sft import metrics_logger"]


def test_import_of_the_trainer_loads_no_optional_package(loaded):
  there = loaded["from tunix.sft import peft_trainer"]
  assert "jax" in there
  assert not (set(HEAVY) - BY_JAX) & there


def test_every_lazy_name_resolves():
  import tunix

  for name in tunix.__all__:
    assert getattr(tunix, name) is not None
  with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
    _ = tunix.Nothing


def test_timed_tests_are_there():
  slow = timings.SLOW.read_text().splitlines()
  for name in {*timings.read(), *slow}:
    file, function = re.fullmatch(r"(tests/[\w/]+\.py)::(\w+)(?:\[.*)?", name).groups()
    assert f"def {function}(" in (ROOT / file).read_text(), name
