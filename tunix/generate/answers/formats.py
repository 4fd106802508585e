"""The forms of tool calls in all families (Qwen, Llama, Gemma, ...): one record each.

A new form is a record of `FORMATS` and its reader. The server, episodes, the settings
and the command read this table alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from tunix.generate.answers import gemma_calls, harmony, marked_calls, xml_calls
from tunix.generate.answers.llama_calls import PYTHON_TAG, Llama3Reader
from tunix.generate.answers.marked_calls import MarkedReader, Marks
from tunix.generate.answers.pieces import Reader
from tunix.generate.answers.reasoning import PlainReader

# Names of the tools, or a mapping from them to the JSON schemas of their arguments.
# Forms that print texts without quotes look up the types there.
Tools = Collection[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolFormat:
  """A form of tool calls.

  Attributes:
    name: name in settings.
    reader: takes the tools and returns a reader of one answer.
    marks: parts of a call that are special tokens in some vocabularies. The text of an
      answer keeps them.
    template_marks: texts that only chat templates with this form contain.
    expectation: what belongs behind the opening mark of a call, for errors.
    has_channels: answers have a form without tools too, which the reader takes off.
  """

  name: str
  reader: Callable[[Tools], Reader]
  marks: tuple[str, ...] = ()
  template_marks: tuple[str, ...] = ()
  expectation: str = "JSON with the name of a tool and an object of its arguments"
  has_channels: bool = False

  def problem(self, mark: str) -> str:
    """Describes a call that could not be read; `mark` is its opening mark."""
    reason = f"after {mark} expected {self.expectation}"
    return f"a call of a tool could not be read: {reason}"


def _between(name: str, *blocks: Marks, **facts: Any) -> ToolFormat:
  """Returns a form whose calls stand between marks; `facts` are its other fields."""
  marks = [mark for x in blocks for mark in (x.opening, x.closing) if mark]
  facts = {"marks": tuple(marks), "template_marks": (blocks[0].opening,), **facts}
  return ToolFormat(name=name, reader=lambda tools: MarkedReader(*blocks), **facts)


_PYTHON_LINES = "lines name(argument=value, ...)"

# The first form whose template mark occurs in a template is that of the model. Several
# forms stand between <tool_call> tags, so the more special ones come before hermes.
_TABLE = (
  _between("mistral", marked_calls.MISTRAL, marks=marked_calls.MISTRAL_MARKS),
  ToolFormat(
    name="qwen3_coder",
    reader=xml_calls.qwen3_coder_reader,
    marks=xml_calls.QWEN_MARKS,
    template_marks=(xml_calls.QWEN_FUNCTION,),
    expectation="<function=name>, <parameter=key>value</parameter> and </function>",
  ),
  ToolFormat(
    name="glm4",
    reader=xml_calls.glm4_reader,
    marks=xml_calls.GLM_MARKS,
    template_marks=(xml_calls.GLM_KEY,),
    expectation="a name, <arg_key>key</arg_key> and <arg_value>value</arg_value>",
  ),
  _between("deepseek_v3", xml_calls.DEEPSEEK, marks=xml_calls.DEEPSEEK_MARKS),
  _between(
    *("gemma4", gemma_calls.GEMMA),
    marks=gemma_calls.GEMMA_MARKS,
    expectation="call:name{key:value} and <tool_call|>",
  ),
  _between("hermes", marked_calls.HERMES),
  ToolFormat(
    name="llama3",
    reader=Llama3Reader,
    marks=(PYTHON_TAG,),
    template_marks=('"parameters":', PYTHON_TAG),
  ),
  ToolFormat(
    name="harmony",
    reader=lambda tools: harmony.HarmonyReader(),
    marks=harmony.MARKS,
    template_marks=(harmony.CHANNEL + "final",),
    expectation=f"{harmony.MESSAGE} and a JSON object of its arguments",
    has_channels=True,
  ),
  _between("granite", marked_calls.GRANITE),
  _between("olmo3", marked_calls.OLMO, expectation=_PYTHON_LINES),
  _between(
    *("phi4_mini", marked_calls.GRANITE, marked_calls.PHI),
    template_marks=(marked_calls.PHI_TOOLS_END,),
  ),
  # SmolLM3's template has the marks of hermes, the form of its other tools.
  _between(
    *("smollm3_code", marked_calls.SMOLLM3_CODE),
    template_marks=(),
    expectation=f"{_PYTHON_LINES}, or print(name(...))",
  ),
  ToolFormat(name="none", reader=lambda tools: PlainReader()),
)
FORMATS = {form.name: form for form in _TABLE}


def format_of(template: Any) -> str:
  """Returns the name of the form that a chat template shows, or "none".

  Args:
    template: jinja source, or sources by name, or None.
  """
  source = template if isinstance(template, str) else "".join((template or {}).values())
  names = (x.name for x in _TABLE if any(mark in source for mark in x.template_marks))
  return next(names, "none")


def format_for(template: object, tools: Tools, name: str = "auto") -> ToolFormat:
  """Returns the form in which the answers to a prompt are read.

  Args:
    template: see `format_of`.
    tools: tools that the prompt shows.
    name: key of `FORMATS`, or "auto" to read it off the template.
  """
  form = FORMATS[format_of(template) if name == "auto" else name]
  return form if tools or form.has_channels else FORMATS["none"]
