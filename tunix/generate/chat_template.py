"""Renders Hugging Face chat templates with jinja2 alone.

The dialect is that of `transformers`: a sandbox, trimmed blocks, `raise_exception`,
`strftime_now`, a `tojson` that keeps HTML characters, `{% break %}`, and
`{% generation %}` blocks, which render as their content.
"""

from __future__ import annotations

import datetime
import functools
import json
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

# Keys under which data sets store a message's reasoning. Most templates read the first,
# some older ones the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

# Names that `render` or its callers set in every rendering.
RESERVED_NAMES = (
  *("messages", "add_generation_prompt", "tokenize", "now", "template", "self"),
  *("strftime_now", "raise_exception"),
)

_TOOL_SCHEMA = '{"type": "function", "function": {"name": ..., "parameters": ...}}'


class ChatTemplateError(ValueError):
  """A template is malformed, or fails on a conversation."""


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


def render(
  template: str,
  messages: Sequence[Message],
  *,
  add_generation_prompt: bool = False,
  tools: Sequence[Mapping[str, Any]] | None = None,
  documents: Sequence[Mapping[str, Any]] | None = None,
  now: datetime.datetime | None = None,
  **variables: Any,
) -> str:
  """Renders a conversation to the text that a model reads.

  Args:
    template: jinja source, as in a tokenizer's `chat_template`.
    messages: dicts with "role", "content" and further keys that the template reads;
      keys with the value None are left out.
    add_generation_prompt: end with the header of the assistant's next turn.
    tools: JSON schemas of the tools that the model may call.
    documents: dicts with "title" and "text", for templates that quote them.
    now: time that `strftime_now` shows; None: the present time. Training data is
      rendered with a fixed time, so that tokens do not depend on the day of the run.
    **variables: further names for the template (`bos_token`, `enable_thinking`, ...).

  Raises:
    ChatTemplateError: the template is no valid jinja, or fails, in jinja or in Python.
    TypeError: a tool is a function instead of its JSON schema.
  """
  import jinja2

  for tool in tools or ():
    if not _is_schema(tool):
      raise TypeError(
        f"tools has a {type(tool).__name__}, expected JSON schemas (dicts): pass "
        f"{_TOOL_SCHEMA}"
      )
  try:
    return _compiled(template).render(
      messages=[_clean(message) for message in messages],
      add_generation_prompt=add_generation_prompt,
      tools=tools,
      documents=documents,
      strftime_now=lambda form: (now or datetime.datetime.now()).strftime(form),
      **variables,
    )
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


def _is_schema(tool: Any) -> bool:
  return isinstance(tool, Mapping)


def _place(error: Exception) -> str:
  """Returns "line 3, " if jinja reports the line of the template, else ""."""
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
  return f"line {lines[-1]}, " if lines else ""


def _clean(message: Message) -> dict[str, Any]:
  """Drops keys with the value None, and stores reasoning under both common names."""
  cleaned = {key: value for key, value in message.items() if value is not None}
  for key in _REASONING_KEYS:
    if key in cleaned:
      return {"thinking": cleaned[key], **cleaned, "reasoning_content": cleaned[key]}
  return cleaned


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> Any:
  import jinja2

  try:
    return _environment().from_string(template)
  except jinja2.TemplateSyntaxError as error:
    raise ChatTemplateError(
      f"the chat template is no valid jinja (line {error.lineno}): {error.message}"
    ) from error


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
  import jinja2.ext
  import jinja2.sandbox

  class GenerationBlock(jinja2.ext.Extension):
    """The tag {% generation %}...{% endgeneration %}, rendered as its content.

    Some templates mark the assistant's text with it. Loss masks come from rendering
    prefixes of the conversation, which needs no mark.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja's form)

    def parse(self, parser: Any) -> Any:
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes <, >, & and ', which tool schemas may hold.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[GenerationBlock, jinja2.ext.loopcontrols],
  )
  environment.filters["tojson"] = to_json
  environment.globals["raise_exception"] = raise_exception
  return environment
