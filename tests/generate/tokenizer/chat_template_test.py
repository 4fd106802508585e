"""Templates come with a model: none may hang a command or fill the memory."""

import pytest

from tests import toys_text
from tunix.generate.tokenizer import chat_template, template_limits
from tunix.generate.tokenizer_adapter import TokenizerAdapter

CHAT = [{"role": "user", "content": "hi"}]
_DOUBLED = "{%% set n = namespace(s=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}"
_BIG = "{% set x = 'x' * 10000000 %}"


@pytest.mark.parametrize(
  "source",
  [
    "{{ 9**(9**9) }}",
    "{{ 'x' * 10**9 }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x' | indent(1000000000) }}",
    "{{ 1.5 | round(1000000000) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    _BIG + "{{ x.replace('x', x) }}",
    _BIG + "{{ ([x] * 100000) | join }}",
    _BIG + "{% set y %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
    _DOUBLED % ("'xx'", "{% set n.s = n.s + n.s %}"),
    _DOUBLED % ("'xx'", "{% set n.s = n.s ~ n.s %}"),
    _DOUBLED % ("[1]", "{% set n.s = [n.s, n.s] %}") + "{{ n.s }}",
    _DOUBLED % ("{}", "{% set n.s = dict(a=n.s, b=n.s) %}") + "{{ n.s }}",
    _DOUBLED % ("3", "{% set n.s = n.s * n.s %}"),
  ],
)
def test_values_have_a_longest_length(source):
  with pytest.raises(template_limits.ChatTemplateCostError, match=r"16,777,216|steps"):
    chat_template.render(source, CHAT)


@pytest.mark.parametrize(
  "source",
  [
    "{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "{% for a in l %}{% for b in l if false %}{% endfor %}{% endfor %}",
    "{% for a in l %}{{ 'x' in l }}{% endfor %}",
    "{% for a in l %}{{ l | sum }}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
  ],
)
def test_renderings_have_a_budget_of_steps(monkeypatch, source):
  monkeypatch.setattr(template_limits, "_MOST_STEPS", 500_000)
  with pytest.raises(
    template_limits.ChatTemplateCostError, match="500,000 steps; expec"
  ):
    chat_template.render("{% set l = range(99999) | list %}" + source, CHAT)


@pytest.mark.parametrize(
  "reading",
  [
    *("s.count('x')", "s.find('x')", "s == t", "s < t", "s is eq t", "s in [t]"),
    *("s[1:]", "[s, t].count(t)", "([s, t] * 50) | sort", "'x'.startswith(s)"),
    *(
      "s.encode()",
      "{s: 1}[t]",
      "s | trim",
      "{s: 1} | dictsort",
      "'x' | replace(s, '')",
    ),
  ],
)
def test_reading_long_texts_takes_steps(monkeypatch, reading):
  # One round reads 16 MB; with one step a round, 20 rounds would be nothing.
  monkeypatch.setattr(template_limits, "_MOST_STEPS", 500_000)
  long = "{% set s = 'ab' * 8000000 %}{% set t = 'ab' * 7999999 ~ 'ac' %}"
  with pytest.raises(template_limits.ChatTemplateCostError, match="500,000 steps"):
    chat_template.render(
      long + "{% for i in range(20) %}{% set y = " + reading + " %}{% endfor %}", CHAT
    )


def test_bounds_change_no_text(monkeypatch):
  source = """{% for m in messages %}{% for c in m.content if c in 'hi' %}{{ loop.index
    ~ c + '-' * 2 }}{% endfor %}{{ [m.role, ('a', 1)] | join(', ') }}{{ 2 ** 10
    }}{{ '%3d|' % 7 }}{{ '{:>3}'.format('x') }}{{ 'ab'.replace('a', 'c') }}{% endfor
    %}{% for a, b in {'k': 1}.items() %}{{ a }}{{ b }}{% endfor %}"""
  expected = "1h--2i--user, ('a', 1)1024  7|  xcbk1"
  assert chat_template.render(source, CHAT) == expected
  # The budget is of one rendering.
  monkeypatch.setattr(template_limits, "_MOST_STEPS", 100_000)
  long = "{% for i in range(90000) %}{% endfor %}x"
  assert {chat_template.render(long, CHAT) for _ in range(3)} == {"x"}


def test_an_error_names_the_folder_of_the_template(tmp_path):
  toys_text.chat_tokenizer("chatml").save(tmp_path)
  (tmp_path / "chat_template.jinja").write_text("{{ 9**(9**9) }}")
  adapter = TokenizerAdapter.from_pretrained(tmp_path)
  with pytest.raises(
    template_limits.ChatTemplateCostError, match=f"^{tmp_path}: the cha"
  ):
    adapter.apply_chat_template(CHAT)
