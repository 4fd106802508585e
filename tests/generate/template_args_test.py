"""Variables of a chat template that a tokenizer brings to every rendering."""

import pytest

from tests import toys_text
from tunix.generate.tokenizer import chat_template
from tunix.generate.tokenizer_adapter import TokenizerAdapter

CHAT = [{"role": "user", "content": "hi"}]
VALUES = {
  "text": "a%}b'\"\n{{",
  "number": -1.5e-7,
  "flag": True,
  "nothing": None,
  "several": (1, {"key": [False]}),
}


def test_values_reach_the_template_as_they_are():
  source = "".join(f"{{{{ {name} | tojson }}}};" for name in VALUES)
  given = chat_template.with_defaults(source, VALUES)
  expected = chat_template.render(source, CHAT, **VALUES)
  assert chat_template.render(given, CHAT) == expected
  assert chat_template.render(given, CHAT, number=3).split(";")[1] == "3"


@pytest.mark.parametrize("name", [name for name in toys_text.TEMPLATES if name])
def test_a_variable_that_a_template_does_not_read_changes_no_text(name):
  plain = toys_text.chat_tokenizer(name)
  given = TokenizerAdapter(plain, template_args={"unread": 1})
  assert given.apply_chat_template(CHAT) == plain.apply_chat_template(CHAT)


def test_white_space_at_the_beginning_and_macros():
  source = (
    "\n  {% macro f() %}{{ e }}{% endmacro %} a{% for i in [1] %}{{ f() }}{% endfor %}"
  )
  plain = chat_template.render(source, CHAT, e=5)
  assert plain.endswith(" a5")
  assert (
    chat_template.render(chat_template.with_defaults(source, {"e": 5}), CHAT) == plain
  )


def test_adapters_merge_and_save_their_variables(tmp_path):
  source = "{{ a }} {{ b }}"
  inner = TokenizerAdapter(
    toys_text.bpe(), chat_template=source, template_args={"a": 1, "b": 2}
  )
  outer = TokenizerAdapter(inner, template_args={"b": 3})
  assert inner.apply_chat_template(CHAT) == "1 2"
  assert outer.apply_chat_template(CHAT) == "1 3"
  assert outer.apply_chat_template(CHAT, a=0) == "0 3"
  outer.save(tmp_path)
  saved = TokenizerAdapter.from_pretrained(tmp_path)
  assert saved.apply_chat_template(CHAT) == "1 3"
  again = TokenizerAdapter.from_pretrained(tmp_path, template_args={"a": 4})
  assert again.apply_chat_template(CHAT) == "4 3"


def test_templates_by_name_and_renderers_of_objects():
  named = {"default": "{{ a }}", "tool_use": "tools {{ a }}"}
  adapter = TokenizerAdapter(
    toys_text.bpe(), chat_template=named, template_args={"a": 1}
  )
  assert adapter.apply_chat_template(CHAT) == "1"
  assert adapter.apply_chat_template(CHAT, tools=[{}]) == "tools 1"

  class Renderer:
    bos_id = eos_id = pad_id = 1
    encode = decode = None

    def apply_chat_template(self, messages, *, a, b=0, **_):
      return f"{a} {b}"

  adapter = TokenizerAdapter(Renderer(), template_args={"a": 1})
  assert adapter.apply_chat_template(CHAT, b=2) == "1 2"


@pytest.mark.parametrize(
  ("variables", "error"),
  [
    ({"tools": []}, r"template_args\.tools is set; expected variables of the templ"),
    ({"messages": 1}, r"template_args\.messages is a name that every rendering sets"),
    ({"in": 1}, "template_args has the name 'in'; expected the name of a jinja"),
    ({"a b": 1}, "template_args has the name 'a b'; expected the name of a jinja"),
    ({"x": float("nan")}, r"template_args\.x is nan; expected text, a number"),
    ({"x": {1}}, r"template_args\.x is \{1\}; expected text, a number"),
  ],
)
def test_variables_that_no_template_can_have(variables, error):
  with pytest.raises(ValueError, match=error):
    TokenizerAdapter(toys_text.bpe(), template_args=variables)
