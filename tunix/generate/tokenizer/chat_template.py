"""Renders Hugging Face chat templates with jinja2 alone.

The dialect is that of `transformers`: a sandbox, trimmed blocks, `raise_exception`,
`strftime_now`, a `tojson` that keeps HTML characters, `{% break %}`, and
`{% generation %}` blocks, which mark the text that is trained.

A template is a program that comes with a model. Its work is bounded: every round of a
loop, call and operation takes one step of a budget, and long values take more.
"""

from __future__ import annotations

import datetime
import functools
import json
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.generate.tokenizer import template_limits as limits, template_sandbox
from tunix.generate.tokenizer.files import ChatTemplates
from tunix.generate.tokenizer.template_limits import ChatTemplateError
from tunix.utils import checks

Message = Mapping[str, Any]

# Keys under which data sets store a message's reasoning. Most templates read the first,
# some older ones the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

# Names that `render` or its callers set in every rendering.
RESERVED_NAMES = (
  *("messages", "add_generation_prompt", "tokenize", "now", "template", "self"),
  *("strftime_now", "raise_exception", "generation_marks"),
)

# Words of jinja's expressions, which cannot be the name of a variable.
_JINJA_WORDS = (
  *("true", "false", "none", "True", "False", "None"),
  *("and", "or", "not", "in", "is", "if", "else"),
)

_TOOL_SCHEMA = '{"type": "function", "function": {"name": ..., "parameters": ...}}'


def check_variables(variables: Mapping[str, Any], key: str) -> None:
  """Refuses template variables that `render` cannot pass on.

  Args:
    variables: as for `render`.
    key: configuration key of the variables, for the message.

  Raises:
    ValueError: a reserved name, or tools that are no schemas.
  """
  for name in variables:
    if name in RESERVED_NAMES:
      raise ValueError(
        f"{key}.{name} is a name that every rendering sets itself, expected none of "
        f"{', '.join(RESERVED_NAMES)}: give the template's variable another name"
      )
  tools = variables.get("tools") or []
  if not isinstance(tools, list | tuple) or not all(map(_is_schema, tools)):
    raise ValueError(
      f"{key}.tools is {tools!r}, expected a list of JSON schemas: give "
      f"[{_TOOL_SCHEMA}]"
    )


def with_defaults(
  template: ChatTemplates, variables: Mapping[str, Any]
) -> ChatTemplates:
  """Returns a template that sets variables which a rendering leaves undefined.

  The variables become part of the source, so every program that reads the template of
  an exported model renders with them. A rendering that gives a variable overrides it.

  Args:
    template: jinja source, or sources by name.
    variables: values of JSON by name, as `check_defaults` accepts them.
  """
  if not isinstance(template, str):
    return {name: f"{with_defaults(x, variables)}" for name, x in template.items()}
  # A copy through JSON makes lists of tuples. Literals of Python are literals of jinja.
  plain = json.loads(json.dumps(dict(variables)))
  lines = [
    f"{{% if {name} is not defined or {name} is none %}}"
    f"{{% set {name} = {value!r} %}}{{% endif %}}\n"
    for name, value in plain.items()
  ]
  return "".join(lines) + template  # jinja drops each line break after a block


def check_defaults(variables: Mapping[str, Any], key: str) -> None:
  """Refuses variables that `with_defaults` cannot write into a template.

  Args:
    variables: as for `with_defaults`.
    key: configuration key or argument of the variables, for the message.

  Raises:
    ValueError: a reserved name, a name that jinja cannot set, tools or documents, or a
      value that JSON does not have.
  """
  check_variables(variables, key)
  for name, value in variables.items():
    if name in ("tools", "documents"):
      raise ValueError(
        f"{key}.{name} is set; expected variables of the template such as "
        f"enable_thinking. Give {name} with each record, or in data.template_args"
      )
    if not name.isidentifier() or name in _JINJA_WORDS:
      raise ValueError(
        f"{key} has the name {name!r}; expected the name of a jinja variable. Give "
        "the name that the template reads"
      )
    try:
      json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
      raise ValueError(
        f"{key}.{name} is {value!r}; expected text, a number, true, false, null, or "
        "lists and mappings of them. Change the value"
      ) from error


def render(
  template: str,
  messages: Sequence[Message],
  *,
  add_generation_prompt: bool = False,
  tools: Sequence[Mapping[str, Any]] | None = None,
  documents: Sequence[Mapping[str, Any]] | None = None,
  now: datetime.datetime | None = None,
  generation_marks: tuple[str, str] = ("", ""),
  **variables: object,
) -> str:
  """Renders a conversation to the text that a model reads.

  Args:
    template: jinja source, as in a tokenizer's `chat_template`.
    messages: dicts with "role", "content" and further keys that the template reads.
      Keys with the value None are left out, except "content" beside "tool_calls".
    add_generation_prompt: end with the header of the assistant's next turn.
    tools: JSON schemas of the tools that the model may call.
    documents: dicts with "title" and "text", for templates that quote them.
    now: time that `strftime_now` shows; None: the present time. Training data is
      rendered with a fixed time, so that tokens do not depend on the day of the run.
    generation_marks: texts to print before and after each `{% generation %}` block.
    **variables: further names for the template (`bos_token`, `enable_thinking`, ...).

  Raises:
    ChatTemplateError: the template is no valid jinja, or fails, in jinja or in Python.
    TypeError: a tool is a function instead of its JSON schema.
  """
  import jinja2

  for tool in tools or ():
    if not _is_schema(tool):
      raise TypeError(
        f"tools has {checks.type_of(tool)}, expected JSON schemas (dicts): pass "
        f"{_TOOL_SCHEMA}"
      )
  limits.BUDGET.steps = 0
  try:
    return _compiled(template).render(
      messages=[_clean(message) for message in messages],
      add_generation_prompt=add_generation_prompt,
      tools=tools,
      documents=documents,
      strftime_now=lambda form: (now or datetime.datetime.now()).strftime(form),
      generation_marks=generation_marks,
      **variables,
    )
  except ChatTemplateError:
    raise
  except jinja2.TemplateError as error:
    raise ChatTemplateError(
      f"the chat template refuses this conversation: {error}"
    ) from error
  # A template is a program of the user and may raise any Python error, for example a
  # TypeError for the sum of text and a number.
  except Exception as error:
    raise ChatTemplateError(
      f"the chat template fails on this conversation ({_place(error)}"
      f"{type(error).__name__}: {error}): correct the template or the record"
    ) from error


def marks_generation(template: str) -> bool:
  """Returns True if the template has `{% generation %}` blocks.

  Raises:
    ChatTemplateError: the template is no valid jinja.
  """
  # Only the blocks read this name: templates that call it themselves do not exist.
  return "generation_marks" in _variables(template)


def reads_tools(template: str) -> bool:
  """Returns True if the template reads the variable `tools`.

  Raises:
    ChatTemplateError: the template is no valid jinja.
  """
  return "tools" in _variables(template)


@functools.lru_cache(maxsize=32)
def _variables(template: str) -> set[str]:
  """Returns the names that a rendering gives to a template."""
  import jinja2.meta

  _compiled(template)
  return jinja2.meta.find_undeclared_variables(
    template_sandbox.environment().parse(template)
  )


def _is_schema(tool: object) -> bool:
  return isinstance(tool, Mapping)


def _place(error: Exception) -> str:
  """Returns "line 3, " if jinja reports the line of the template, else ""."""
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
  return f"line {lines[-1]}, " if lines else ""


def _clean(message: Message) -> dict[str, Any]:
  """Drops keys with the value None, and stores reasoning under both common names."""
  # Some templates print the calls of a turn only if its content is none.
  needed = ("content",) if message.get("tool_calls") else ()
  cleaned = {k: v for k, v in message.items() if v is not None or k in needed}
  for key in _REASONING_KEYS:
    if key in cleaned:
      return {"thinking": cleaned[key], **cleaned, "reasoning_content": cleaned[key]}
  return cleaned


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> Any:
  import jinja2

  try:
    return template_sandbox.environment().from_string(template)
  except jinja2.TemplateSyntaxError as error:
    raise ChatTemplateError(
      f"the chat template is no valid jinja (line {error.lineno}): {error.message}"
    ) from error
