"""What a teacher reads: templates in texts and in conversations, and bad records."""

import pytest

from tunix.data import records
from tunix.data.records import ANSWERED, PROMPTS
from tunix.data.turns.teacher_prompts import (
  DEMONSTRATION,
  TEACHER,
  TEACHER_PROMPT,
  Taught,
  filled,
  teacher_prompt,
)

TEMPLATE = "{demonstration} > {prompt}"
USER, SYSTEM = ({"role": role, "content": role[0]} for role in ("user", "system"))


def test_braces_of_texts_stay():
  text = filled("{a}{b}{c}{a", a="{b}", b=r"\1{a}")
  assert text == r"{b}\1{a}{c}{a"


def test_a_template_extends_the_last_message():
  assert teacher_prompt("p", TEMPLATE, demonstration="d") == "d > p"
  got = teacher_prompt([SYSTEM, USER], TEMPLATE, demonstration="d")
  assert got == [SYSTEM, {"role": "user", "content": "d > u"}]
  assert USER["content"] == "u"  # the student's prompt is no other


@pytest.mark.parametrize(
  ("record", "kind", "column", "want"),
  [
    ({"prompt": "p", "response": "d"}, PROMPTS, None, "d > p"),
    ({"prompt": "p", "response": "d"}, ANSWERED, None, "d > p"),
    ({"prompt": "p", "response": "r", "hint": "d"}, ANSWERED, "hint", "d > p"),
    (
      {"messages": [SYSTEM, USER, {"role": "assistant", "content": "d"}]},
      PROMPTS,
      None,
      [SYSTEM, {"role": "user", "content": "d > u"}],
    ),
  ],
)
def test_the_demonstration_is_the_answer_or_a_column(record, kind, column, want):
  taught = Taught(template=TEMPLATE, demonstration=column).kind(kind)
  read = taught.read(record, "here")
  assert read.extra[TEACHER_PROMPT] == want
  assert read.completions == kind.read(record, "here").completions
  assert taught.settings != kind.settings  # a scan with another template is another


def test_a_record_names_its_teacher():
  kind = Taught(teachers=("a", "b"), column="task").kind(PROMPTS)
  assert kind.read({"prompt": "p", "task": "b"}, "here").extra == {TEACHER: 1}
  assert Taught().kind(PROMPTS) is PROMPTS
  with pytest.raises(ValueError, match="here: 'task' is None; expected the name of"):
    kind.read({"prompt": "p"}, "here")


@pytest.mark.parametrize(
  ("record", "column", "says"),
  [
    ({"prompt": "p"}, None, "here: "),
    ({"prompt": "p", "response": " "}, None, "here: the answer is ' '"),
    ({"prompt": "p"}, "hint", "here: the 'hint' is None"),
    (
      {"messages": [USER, {"role": "tool", "content": "t"}], "hint": "d"},
      "hint",
      "here: the last message of the prompt has the role 'tool'",
    ),
  ],
)
def test_bad_records_are_refused_by_place(record, column, says):
  kind = Taught(template=DEMONSTRATION, demonstration=column).kind(PROMPTS)
  with pytest.raises(ValueError, match=says):
    kind.read(record, "here")


def test_a_template_needs_both_places():
  with pytest.raises(ValueError, match=r"without \{demonstration\}"):
    Taught(template="{prompt}")
  assert records.RAW_PROMPT_COLUMN in records._RESERVED_COLUMNS
