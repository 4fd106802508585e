"""The documentation as a site: `make docs`, every warning an error."""

import os
import pathlib
import re
import sys

from docutils import nodes

DOCS = pathlib.Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import tunix  # noqa: E402 (found from here)

project = "tunix"
author = "the tunix authors"
copyright = author
version = release = tunix.__version__

extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
  "sphinxcontrib.svgbob",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # pages link to each other's headings

autodoc_member_order = "bysource"
autodoc_default_options = {
  "members": True,
  "show-inheritance": True,
  "ignore-module-all": True,  # what is imported stands where it is written
}
autodoc_typehints = "none"  # the signatures have them
napoleon_numpy_docstring = False
highlight_language = "none"  # blocks of docstrings are tables as often as code
napoleon_use_ivar = True  # attributes are told where the class is
# Comments behind a command are no part of what is copied.
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["diagrams.css"]
html_title = f"tunix {release}"
html_copy_source = False
html_show_sphinx = False

# The navigation: (caption, pages). The pages are read as plain Markdown, too.
NAVIGATION = (
  (
    "Start",
    ["tour", "guides/command", "guides/real_models", "guides/planning", "recipes"],
  ),
  (
    "Train",
    [
      *("guides/training", "guides/preference", "guides/distillation", "guides/rl"),
      *("guides/data", "guides/rewards", "guides/runs", "guides/evaluation"),
    ],
  ),
  (
    "Extend",
    [
      *("guides/extend", "guides/extend/algorithm", "guides/extend/preference_loss"),
      *("guides/extend/reward", "guides/extend/data", "guides/extend/model"),
      *("guides/extend/distillation_strategy", "guides/extend/rollout_engine"),
      *("guides/extend/metrics_backend", "guides/extend/training_loop"),
    ],
  ),
  (
    "Models and machines",
    [
      *("guides/models", "guides/sizes", "guides/sampling", "guides/scoring"),
      *("guides/engines", "guides/placement", "guides/multi_host", "attention"),
    ],
  ),
  ("Come over", ["migration/from_trl", "migration/from_google_tunix"]),
  (
    "Reference",
    [
      *("algorithms", "api/training", "api/rl", "api/models", "api/data", "contract"),
      *("metrics", "troubleshooting", "limits"),
    ],
  ),
  (
    "How it is made",
    ["performance", "testing", "design/architecture", "design/libraries"],
  ),
)
_LINK = re.compile(r"\[([^\]]+)\]\(((?!https?:|#)[^)#\s]+)(#[^)]*)?\)")


def _toctree() -> str:
  trees = [
    "```{toctree}\n:hidden:\n:caption: " + caption + "\n\n" + "\n".join(pages) + "\n```"
    for caption, pages in NAVIGATION
  ]
  return "\n\n" + "\n\n".join(trees) + "\n"


def _inside(page: pathlib.Path):
  """Links to files beside the docs (tests, examples) become names: a site has pages."""

  def one(link: re.Match[str]) -> str:
    target = (page.parent / link[2]).resolve()
    if target.is_relative_to(DOCS):
      return link[0]
    return f"{link[1]}" if "`" in link[1] else f"`{link[1]}`"

  return one


def _read(app, name, source):
  page = DOCS / f"{name}.md"
  source[0] = _LINK.sub(_inside(page), source[0])
  if name == "index":
    source[0] += _toctree()


_SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")


def _as_text(app, what, name, obj, options, lines):
  """Docstrings are plain text with `names` and indented blocks, and no
  reStructuredText; the sections are napoleon's."""
  out, in_section, in_block = [], False, False
  for line in lines:
    indented = line.startswith(" ")
    if line.strip() and not indented:
      in_section, was_block = line.strip() in _SECTIONS, in_block
      in_block = False
      if was_block:
        out.append("")
    elif indented and not in_section and not in_block:
      out += ["", "::", ""]
      in_block = True
    out.append(line if in_block else _escaped(line))
  lines[:] = out


def _escaped(line: str) -> str:
  parts = line.split("`")
  for i in range(0, len(parts), 2):
    parts[i] = re.sub(r"([*|]|_(?=\W|$))", r"\\\1", parts[i])
    if i and parts[i][:1].isalnum():  # `Batch`es
      parts[i] = "\\ " + parts[i]
  return "``".join(parts)


def _skip(app, what, name, obj, skip, options):
  """Fields of named tuples, of which Python only says their number."""
  text = getattr(obj, "__doc__", None) or ""
  return True if text.startswith("Alias for field number") else None


def _named(app, doctree):
  """Diagrams are drawn from text, which nobody wants read aloud."""
  for image in doctree.findall(nodes.image):
    if "svgbob" in image:
      image["alt"] = "A diagram of what the text around it says."


def setup(app):
  app.connect("doctree-read", _named)
  app.connect("autodoc-skip-member", _skip)
  app.connect("source-read", _read)
  app.connect("autodoc-process-docstring", _as_text, priority=100)  # before napoleon
