import pytest

from tests import toys_text
from tunix.data import chat
from tunix.data.turns import trained_spans


def conversation(turns):
  """Questions and answers, thoughts among the last ones."""
  talk = []
  for n in range(turns):
    thought = "<think>\nhm\n</think>\n\n" if n % 3 == 2 else ""
    talk += [
      {"role": "user", "content": f"how many days are in {n} weeks?"},
      {"role": "assistant", "content": f"{thought}{7 * n} days"},
    ]
  return talk


def rendered(template, turns):
  """The segments, and how many messages were rendered for them."""
  tokenizer, count = toys_text.chat_tokenizer(template), [0]

  def render(messages, add_generation_prompt):
    count[0] += len(messages)
    return tokenizer.apply_chat_template(
      messages, add_generation_prompt, now=chat.TEMPLATE_DATE
    )

  talk = conversation(turns)
  trained = [i for i, message in enumerate(talk) if message["role"] == "assistant"]
  closing = [tokenizer.eos_token, "<end_of_turn>"]
  return trained_spans.find_segments(talk, trained, render, closing), count[0]


@pytest.mark.parametrize("template", [name for name in toys_text.TEMPLATES if name])
def test_a_conversation_is_rendered_a_fixed_number_of_times(template):
  messages = [rendered(template, turns)[1] for turns in (20, 40, 80)]
  assert messages[-1] <= 9 * 160
  # Linear: what twice the turns add, they add again when they are doubled.
  assert messages[2] - messages[1] == 2 * (messages[1] - messages[0])


@pytest.mark.parametrize("template", [name for name in toys_text.TEMPLATES if name])
def test_the_segments_are_those_of_every_turn_looked_at_by_itself(
  template, monkeypatch
):
  together = rendered(template, 12)[0]
  monkeypatch.setattr(trained_spans, "_contents", lambda *_: None)
  monkeypatch.setattr(trained_spans, "_predicted_starts", lambda *_: {})
  assert rendered(template, 12)[0] == together


def test_a_template_that_counts_its_contents_is_looked_at_turn_by_turn():
  """What it writes for a message depends on all of them."""

  def render(messages, add_generation_prompt):
    size = sum(len(m["content"]) for m in messages)
    text = "".join(f"<{m['role']}>{m['content']}</s>" for m in messages)
    return f"{size % 7}{text}" + "<assistant>" * add_generation_prompt

  talk = conversation(4)
  segments, _ = trained_spans.find_segments(talk, [1, 3, 5, 7], render, ["</s>"])
  assert "".join(s.text for s in segments) == render(talk, False)
