"""Renders Hugging Face chat templates with jinja2 alone.

The dialect is the one `transformers` gives its templates: a sandbox, trimmed blocks,
`raise_exception`, `strftime_now`, a `tojson` that leaves HTML characters alone,
`{% break %}`, and `{% generation %}` blocks, which render as their content.
"""

from __future__ import annotations

import datetime
import functools
import json
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

# Names under which data sets carry a message's reasoning. Templates read the first,
# some older ones the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


# Names that a rendering sets itself, here or in the functions that lead here.
RESERVED_NAMES = (
  *("messages", "add_generation_prompt", "tokenize", "now", "template", "self"),
  *("strftime_now", "raise_exception"),
)


class ChatTemplateError(ValueError):
  """A template is malformed, or refuses the conversation it was given."""


def check_variables(variables: Mapping[str, Any], key: str) -> None:
  """Refuses further names for a template that cannot be passed on.

  Args:
    variables: as for `render`.
    key: what the user knows them as, for the message.

  Raises:
    ValueError: a name that rendering sets itself, or tools that are no schemas.
  """
  for name in variables:
    if name in RESERVED_NAMES:
      raise ValueError(
        f"{key}.{name} is a name that every rendering sets itself, expected none of "
        f"{', '.join(RESERVED_NAMES)}: give the template's variable another name"
      )
  tools = variables.get("tools") or []
  if not isinstance(tools, list | tuple) or not all(
    isinstance(tool, Mapping) for tool in tools
  ):
    raise ValueError(
      f"{key}.tools is {tools!r}, expected a list of JSON schemas: give "
      '[{"type": "function", "function": {"name": ..., "parameters": ...}}]'
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
  """The conversation as the text that a model reads.

  Args:
    template: jinja source, as in a tokenizer's `chat_template`.
    messages: dicts with "role", "content" and whatever else the template reads;
      keys with the value None are left out.
    add_generation_prompt: end with the header of the assistant's next turn.
    tools: JSON schemas of the tools that the model may call.
    documents: dicts with "title" and "text", for templates that quote them.
    now: the time that `strftime_now` shows; the clock's when None. Training data is
      rendered at a fixed time, or its tokens would depend on the day of the run.
    **variables: further names for the template (`bos_token`, `enable_thinking`, ...).

  Raises:
    ChatTemplateError: the template is no valid jinja, or fails, in jinja or in Python.
    TypeError: a tool is a function instead of its JSON schema.
  """
  import jinja2

  for tool in tools or ():
    if not isinstance(tool, Mapping):
      raise TypeError(
        f"tools must be JSON schemas (dicts), got {type(tool).__name__}; pass "
        '{"type": "function", "function": {"name": ..., "parameters": ...}}'
      )
  clock = functools.partial(_strftime, now)
  try:
    return _compiled(template).render(
      messages=[_clean(message) for message in messages],
      add_generation_prompt=add_generation_prompt,
      tools=tools,
      documents=documents,
      strftime_now=clock,
      **variables,
    )
  except jinja2.TemplateError as error:
    raise ChatTemplateError(
      f"the chat template refuses this conversation: {error}"
    ) from error
  # The template is a program of the user's: it may fail with any error of Python's
  # (adding text to a number, an index out of range).
  except Exception as error:
    raise ChatTemplateError(
      f"the chat template fails on this conversation ({_place(error)}"
      f"{type(error).__name__}: {error}): correct the template or the record"
    ) from error


def _place(error: Exception) -> str:
  """'line 3, ' of the template, as far as jinja says it."""
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
  return f"line {lines[-1]}, " if lines else ""


def _strftime(now: datetime.datetime | None, form: str) -> str:
  return (now or datetime.datetime.now()).strftime(form)


def _clean(message: Message) -> dict[str, Any]:
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
  import jinja2
  import jinja2.ext
  import jinja2.sandbox

  class GenerationBlock(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}: marks the assistant's text in some
    templates. Our masks come from rendering, so the block is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own form)

    def parse(self, parser: Any) -> Any:
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[GenerationBlock, jinja2.ext.loopcontrols],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = raise_exception
  return environment


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )
