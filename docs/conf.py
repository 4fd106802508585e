"""The documentation as a site: `make docs`, every warning an error."""

import os
import pathlib
import re
import sys

from docutils import nodes

DOCS = pathlib.Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pages  # noqa: E402 (the import path is set above)

import tunix  # noqa: E402

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
myst_enable_extensions = ["attrs_inline", "deflist", "colon_fence"]

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
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"tunix {release}"
html_copy_source = False
html_show_sphinx = False

# The navigation: (caption, pages). The pages are read as plain Markdown, too.
NAVIGATION = (
  ("Start", ["install", "quickstart", "choose"]),
  ("Tutorials", ["tutorials/index", "examples/index"]),
  (
    "Trainers",
    [
      *("trainers/sft", "trainers/dpo", "trainers/orpo", "trainers/kto"),
      *("trainers/reward", "trainers/distill", "trainers/on_policy_distill"),
      *("trainers/grpo", "trainers/ppo"),
    ],
  ),
  (
    "Guides",
    [
      *(
        "guides/command",
        "guides/data",
        "guides/rewards",
        "guides/judges",
        "guides/training",
      ),
      *("guides/preference", "guides/distillation", "guides/rl", "guides/agents"),
      *("guides/tools", "guides/async", "guides/runs", "logs"),
      *("guides/evaluation", "using_a_model", "guides/models", "guides/images"),
      "guides/laptop",
    ],
  ),
  (
    "Your own parts",
    [
      *("guides/extend", "guides/extend/reward", "guides/extend/data"),
      *("guides/extend/model", "guides/extend/algorithm"),
      *("guides/extend/preference_loss", "guides/extend/distillation_strategy"),
      *("guides/extend/metrics_backend", "guides/extend/rollout_engine"),
      "guides/extend/training_loop",
    ],
  ),
  (
    "Chips and scale",
    [
      *("guides/real_models", "guides/planning", "guides/placement"),
      *("guides/multi_host", "guides/sampling", "guides/engine", "guides/serving"),
      "guides/tinker",
      *("guides/engines", "guides/scoring"),
      *("guides/sizes", "attention"),
    ],
  ),
  ("Recipes", ["recipes"]),
  ("Help", ["troubleshooting", "faq", "glossary"]),
  (
    "Reference",
    [
      *("reference/keys", "metrics", "algorithms", "contract"),
      *("api/training", "api/rl", "api/models", "api/data"),
    ],
  ),
  ("Coming from", ["migration/from_trl", "migration/from_google_tunix"]),
  (
    "Design and limits",
    [
      *("tour", "design/architecture", "design/libraries"),
      *("performance", "testing", "limits", "security"),
    ],
  ),
)
# A code block, which does not change, or a link to a file.
_LINK = re.compile(
  r"^(?P<fence>`{3,})[^\n]*\n.*?^(?P=fence)`*\s*$"
  r"|\[(?P<text>[^\]]+)\]\((?P<path>(?!https?:|#|data:)[^)#\s]+)(?P<anchor>#[^)]*)?\)",
  re.M | re.S,
)
_MADE_FROM = pages.made_from()  # the page of a file
_FILE_OF = {page: path for path, page in _MADE_FROM.items()}
# Pages that list made pages, with the names of those.
_BELOW = {
  "tutorials/index": r"tutorials/\d",
  "examples/index": r"examples/(?!index)\w+$",
  "recipes": "examples/recipes/",
}


def _toctree() -> str:
  trees = [
    "```{toctree}\n:hidden:\n:caption: " + caption + "\n\n" + "\n".join(names) + "\n```"
    for caption, names in NAVIGATION
  ]
  return "\n\n" + "\n\n".join(trees) + "\n"


def _inside(name: str):
  """Returns the replacement of the links of a page.

  A link to a file that has a page becomes a link to this page. A link to another file
  beside the docs becomes the name of the file, because a site has pages only.
  """
  page = DOCS / f"{name}.md"
  written = _FILE_OF.get(name, page)

  def one(link: re.Match[str]) -> str:
    if link["fence"]:
      return link[0]
    target = (written.parent / link["path"]).resolve()
    if target in _MADE_FROM:
      target = DOCS / f"{_MADE_FROM[target]}.md"
    if target.is_relative_to(DOCS):
      path = os.path.relpath(target, page.parent)
      return f"[{link['text']}]({path}{link['anchor'] or ''})"
    return link["text"] if "`" in link["text"] else f"`{link['text']}`"

  return one


def _read(app, name, source):
  source[0] = _LINK.sub(_inside(name), source[0])
  if name == "index":
    source[0] += _toctree()
  elif name in _BELOW:
    listed = "\n".join(f"/{page}" for page in _FILE_OF if re.match(_BELOW[name], page))
    source[0] += f"\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"


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
  """Gives diagrams a short text for screen readers, instead of their characters."""
  for image in doctree.findall(nodes.image):
    if "svgbob" in image:
      image["alt"] = "A diagram of what the text around it says."


def setup(app):
  pages.write()
  app.connect("doctree-read", _named)
  app.connect("autodoc-skip-member", _skip)
  app.connect("source-read", _read)
  app.connect("autodoc-process-docstring", _as_text, priority=100)  # before napoleon
