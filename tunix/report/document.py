"""An HTML page that needs nothing besides its own file: no network and no library.

A page is data: sections, each with a title and parts. `report_page.html` holds the
style and the script that draws them. Texts are data too, so no text of a run can become
markup.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

_PLACE = "/*DATA*/"  # in the template

Part = dict[str, Any]


def html(title: str, sections: Sequence[Part]) -> str:
  """Returns the page.

  Args:
    title: the title of the browser's window.
    sections: what `section` returns, in order.
  """
  files = importlib.resources.files("tunix.report")
  template = (files / "report_page.html").read_text()
  data = json.dumps({"title": title, "sections": list(sections)})
  # JSON is ASCII here; without "<" no text can end the script element that holds it.
  return template.replace(_PLACE, data.replace("<", "\\u003c"))


def section(title: str, *parts: Part) -> Part:
  """Returns a section; the first section of a page has the page's heading."""
  return {"title": title, "parts": list(parts)}


def text(content: str, *, style: str = "", colour: int | None = None) -> Part:
  """Returns a paragraph.

  Args:
    content: the text.
    style: classes of the page's style: `soft`, `note` or none.
    colour: number of the line colour that is shown in front of it; None: no colour.
  """
  part = {"kind": "text", "text": content, "style": style}
  return part if colour is None else part | {"colour": colour}


def table(
  head: Sequence[str], rows: Sequence[Sequence[str]], *, folded: str = ""
) -> Part:
  """Returns a table.

  Args:
    head: the names of the columns; all of them "" for a table without a head.
    rows: cells; the first of a row names the row.
    folded: the summary behind which the table is folded; "" shows it at once.
  """
  return {"kind": "table", "head": head, "rows": rows, "folded": folded}


def clipped(value: object, longest: int) -> Any:
  """Returns a value as it is, or the first `longest` characters of its JSON."""
  content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
  if len(content) <= longest:
    return value
  return f"{content[:longest]} ... ({len(content) - longest:,} characters more)"
