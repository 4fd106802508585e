"""Prompts of a teacher that reads more than the student: a demonstration, feedback.

A template has the student's prompt at {prompt}. In a conversation it is applied to the
last message, which must be the user's; the messages before it stay.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.data import image_parts, records
from tunix.data.records import Kind, Record, Text
from tunix.generate.tokenizer_adapter import TokenizerAdapter

# Further fields of a record: what its teacher reads, and the number of its teacher.
TEACHER_PROMPT, TEACHER = "teacher_prompt", "teacher"

DEMONSTRATION = (
  "{prompt}\n\nHere is an example of a good answer:\n\n{demonstration}\n\n"
  "Now give an answer of your own."
)


def check_template(name: str, template: str, places: Sequence[str]) -> None:
  """Checks that a template has every place.

  Raises:
    ValueError: a place is missing.
  """
  for place in places:
    if f"{{{place}}}" not in template:
      raise ValueError(
        f"{name} is {template!r}, without {{{place}}}. Write {{{place}}} where the "
        f"{place} goes"
      )


def filled(template: str, **texts: str) -> str:
  """Returns the template with a text at each {name}; braces of the texts stay."""
  pattern = "|".join(f"{{({name})}}" for name in texts)
  return re.sub(pattern, lambda match: texts[match[0][1:-1]], template)


def teacher_prompt(prompt: Text, template: str, **texts: str) -> Text:
  """Returns a prompt with a template applied to its text, or to its last message.

  Args:
    prompt: text or messages; unchanged.
    template: has {prompt}, and the names of `texts`. In a message with images it has
      {prompt} once, and its text stands before and after the message's parts.
    **texts: what the teacher reads in addition.

  Raises:
    ValueError: the last message is not the user's, or a message with images gets a
      template that repeats the prompt.
  """
  if isinstance(prompt, str):
    return filled(template, prompt=prompt, **texts)
  *before, last = prompt
  content = last["content"]
  if last["role"] != "user" or not isinstance(content, str | list):
    raise ValueError(
      f"the last message of the prompt has the role {last['role']!r} and the content "
      f"{type(content).__name__}; expected a text of the user, which the "
      "template of the teacher's prompt extends. Leave the record out"
    )
  if isinstance(content, str):
    content = filled(template, prompt=content, **texts)
  else:
    first, *after = template.split("{prompt}")
    if len(after) != 1:
      raise ValueError(
        f"the template of the teacher's prompt has {{prompt}} {len(after)} times and "
        "the prompt has images; expected it once. Shorten the template"
      )
    around = (filled(x, **texts) for x in (first, *after))
    content = image_parts.surrounded(content, *around)
  return [*before, {**last, "content": content}]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taught:
  """The fields of a record for its teacher.

  Attributes:
    template: the teacher's prompt, with {prompt} and {demonstration}; None: the teacher
      reads the student's prompt.
    demonstration: field of the record with the demonstration; None: its answer.
    teachers: names of the teachers, if each record names its own.
    column: field of the record with the name of its teacher.

  Raises:
    ValueError: a place of the template is missing.
  """

  template: str | None = None
  demonstration: str | None = None
  teachers: tuple[str, ...] = ()
  column: str = "teacher"

  def __post_init__(self):
    if self.template is not None:
      check_template("template", self.template, ("prompt", "demonstration"))

  def kind(self, kind: Kind, tokenizer: TokenizerAdapter | None = None) -> Kind:
    """Returns a kind whose records have the fields TEACHER_PROMPT and TEACHER too.

    Args:
      kind: the kind.
      tokenizer: the teacher's, if it is another one. Without a template it renders the
        student's prompt.
    """
    if self.template is None and not self.teachers and tokenizer is None:
      return kind

    def read(record: Any, where: str) -> Record:
      out = kind.read(record, where)
      if tokenizer is not None and image_parts.sources(out.prompt):
        raise ValueError(
          f"{where}: the record has an image, and the teacher's tokenizer differs from "
          "the student's; expected text. Leave the image out, or choose a teacher with "
          "the student's tokenizer"
        )
      own = {} if tokenizer is None else {TEACHER_PROMPT: out.prompt}
      own |= self._extra(out.prompt, record, where)
      return out._replace(extra=out.extra | own)

    settings = repr((self, tokenizer is not None))
    return dataclasses.replace(
      kind, read=read, settings=settings, teacher_tokenizer=tokenizer
    )

  def _extra(
    self, prompt: Text, record: Mapping[str, Any], where: str
  ) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if self.teachers:
      name = record.get(self.column)
      if name not in self.teachers:
        raise ValueError(
          f"{where}: {self.column!r} is {name!r}; expected the name of a teacher: "
          f"{', '.join(self.teachers)}. Correct the record"
        )
      extra[TEACHER] = self.teachers.index(name)
    if self.template is not None:
      text = self._demonstration(record, where)
      try:
        extra[TEACHER_PROMPT] = teacher_prompt(
          prompt, self.template, demonstration=text
        )
      except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return extra

  def _demonstration(self, record: Mapping[str, Any], where: str) -> str:
    """Returns the demonstration of a record.

    Raises:
      ValueError: there is none, or it is no text; begins with `where`.
    """
    if self.demonstration is None:
      answer: Any = records.read_answered(record, where).completions["completion"]
      text, name = answer if isinstance(answer, str) else answer[0]["content"], "answer"
    else:
      text, name = record.get(self.demonstration), repr(self.demonstration)
    if not isinstance(text, str) or not text.strip():
      raise ValueError(
        f"{where}: the {name} is {text!r}; expected a text, which the teacher reads as "
        "the demonstration. Add it, or leave the record out"
      )
    return text
