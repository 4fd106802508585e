from typing import NamedTuple

import numpy as np
import pytest

from tests import toys_text
from tunix.data import chat
from tunix.data.batches import BadRow, tokenise_row
from tunix.data.rows import SideBySide
from tunix.sft.dpo.dpo_trainer import DataInput, process_dpo_record

TEXT = toys_text.chat_tokenizer(None)  # <s> and </s>, no chat template


def limits(prompt, completion):
  return SideBySide(max_prompt_length=prompt, max_completion_length=completion)


WIDE = limits(60, 40)
ASK = [{"role": "user", "content": "what is the sum"}]

ANSWER, TOOL = ({"role": r, "content": "five"} for r in ("assistant", "tool"))
# Conversations that part where the user speaks.
PARTING = [
  [*ASK, ANSWER, {"role": "user", "content": text}, ANSWER] for text in ("one", "two")
]


class Row(NamedTuple):
  prompt: list
  completions: tuple
  masks: tuple
  cut: tuple


def row(prompt, answers, tokenizer=TEXT, limits=WIDE):
  """As a trainer has it: within the limits, as lists."""
  full = tokenise_row(prompt, answers, tokenizer, "row 7")
  fitted = limits.fit(full, "truncate", tokenizer.bos_id())
  lists = lambda arrays: tuple(array.tolist() for array in arrays)
  cut = (
    len(fitted.prompt) < len(full.prompt),
    any(map(lambda a, b: len(a) < len(b), fitted.completions, full.completions)),
  )
  return Row(
    fitted.prompt.tolist(), lists(fitted.completions), lists(fitted.masks), cut
  )


def test_text_has_bos_in_front_and_eos_behind():
  got = row("how many days", [" are in a week", " seven"])
  bos, eos = TEXT.bos_id(), TEXT.eos_id()
  assert got.prompt == [bos, *TEXT.encode("how many days")]
  assert got.completions[0] == [*TEXT.encode_continuation(" are in a week"), eos]
  assert got.completions[1] == [*TEXT.encode_continuation(" seven"), eos]
  assert bos not in got.completions[0] + got.completions[1]
  assert got.cut == (False, False)


def test_a_long_prompt_keeps_its_end_and_its_bos():
  prompt = "the river runs slowly past the old mill"
  whole = row(prompt, [" a", " b"]).prompt
  got = row(prompt, [" a", " b"], limits=limits(5, 40))
  assert got.prompt == [whole[0], *whole[-4:]]
  assert got.cut == (True, False)
  assert row(prompt, [" a", " b"], limits=limits(1, 40)).prompt == whole[-1:]


def test_a_cut_answer_learns_no_end():
  got = row("say", [" the sea is wide the sea is deep", " a"], limits=limits(9, 3))
  assert (
    got.completions[0]
    == TEXT.encode_continuation(" the sea is wide the sea is deep")[:3]
  )
  assert got.completions[1][-1] == TEXT.eos_id()
  assert got.cut == (False, True)


@pytest.mark.parametrize("template", ["chatml", "llama3", "qwen3", "gemma", "llama2"])
def test_messages_go_through_the_template(template):
  tokenizer = toys_text.chat_tokenizer(template)
  got = row(ASK, ["five", "six"], tokenizer)
  prompt = tokenizer.apply_chat_template(
    ASK, True, tokenize=True, now=chat.TEMPLATE_DATE
  )
  if template == "qwen3":  # what the template puts before the answer is learned too
    assert got.completions[0][0] == tokenizer.encode("<think>")[0]
  assert got.prompt == prompt
  text = tokenizer.decode(got.completions[0], skip_special_tokens=False)
  closing = "<end_of_turn>" if template == "gemma" else tokenizer.eos_token
  assert "five" in text and text.strip().endswith(closing)


def test_an_answer_may_be_a_message_or_a_conversation():
  tokenizer = toys_text.chat_tokenizer("chatml")
  plain = row(ASK, ["five", "six"], tokenizer)
  turn = lambda text: {"role": "assistant", "content": text}
  assert row(ASK, [turn("five"), [turn("six")]], tokenizer) == plain
  whole = [[*ASK, turn("five")], [*ASK, turn("six")]]
  assert row(None, whole, tokenizer) == plain
  assert row(ASK, whole, tokenizer) == plain  # the prompt twice is the prompt
  assert row(tuple(ASK), [tuple(answer) for answer in whole], tokenizer) == plain
  assert row(ASK, whole[:1], tokenizer).prompt == plain.prompt


def test_an_answer_of_several_turns_scores_the_assistants():
  tokenizer = toys_text.chat_tokenizer("chatml")
  turn = lambda role, text: {"role": role, "content": text}
  turns = [turn("assistant", "five"), turn("user", "Think"), turn("assistant", "six")]
  got = row(ASK, [turns, "five"], tokenizer)
  ids, mask = np.asarray(got.completions[0]), np.asarray(got.masks[0])
  scored = tokenizer.decode(ids[mask == 1], skip_special_tokens=False)
  assert scored == "five<|im_end|>six<|im_end|>"
  assert all(got.masks[1])


@pytest.mark.parametrize(
  ("prompt", "answers", "message"),
  [
    ("hi", ["", " b"], "row 7: a completion is empty"),
    ("hi", [" a", " \n"], "row 7: a completion is empty"),
    ("hi", [[{"role": "assistant", "content": "x"}], " b"], "the prompt is a text"),
    (None, ["a", "b"], 'row 7: no "prompt", and "chosen" and "rejected"'),
    (ASK, [[*ASK, *ASK], "b"], '"chosen" is a whole conversation'),
    (ASK, [3, "b"], '"chosen" is an int, expected a text, a message or'),
    (
      ASK,
      ["b", {"role": "assistant", "content": [{"type": "text", "text": "x"}]}],
      r'row 7: "rejected"\[0\]: "content" is a list, expected a string',
    ),
    ([{"role": "user", "content": [3]}], ["a", "b"], r'"prompt"\[0\]: "content" is'),
    (None, PARTING, "differ in a turn of the role 'user' before the assistant's first"),
    (
      ASK,
      [[TOOL, ANSWER], "b"],
      "one completion has turns before the assistant's first",
    ),
    ([{"role": "user", "content": "other"}], PARTING, 'do not begin with "prompt"'),
  ],
)
def test_bad_rows_are_named(prompt, answers, message):
  with pytest.raises(ValueError, match=message):
    row(prompt, answers, toys_text.chat_tokenizer("chatml"))


def test_an_empty_prompt_needs_bos():
  assert row("", [" a", " b"]).prompt == [TEXT.bos_id()]
  with pytest.raises(ValueError, match="the prompt is empty"):
    row("", ["a", "b"], toys_text.chat_tokenizer("chatml"))


def test_records_of_one_pair_and_of_many():
  one = process_dpo_record(
    {"prompt": "hi", "chosen": " five", "rejected": " six", "margin": 2.0}, TEXT, 6, 4
  )
  assert one.prompt_ids.shape == (6,) and one.chosen_ids.shape == (4,)
  assert one.prompt_mask.tolist()[-1] == 1 and one.prompt_mask.tolist()[0] == 0
  assert one.chosen_mask.tolist()[0] == 1
  assert one.margins == 2.0 and one.weights is None
  many = process_dpo_record(
    DataInput(prompts=["hi"], chosen_responses=[" five"], rejected_responses=[" six"]),
    TEXT,
    6,
    4,
  )
  np.testing.assert_array_equal(many.prompt_ids[0], one.prompt_ids)
  np.testing.assert_array_equal(many.rejected_ids[0], one.rejected_ids)
  assert many.weights.tolist() == [1.0]
  chat_record = {"prompt": ASK, "chosen": "five", "rejected": "six"}
  tokenizer = toys_text.chat_tokenizer("chatml")
  assert process_dpo_record(chat_record, tokenizer, 20, 8).prompt_ids.shape == (20,)
  with pytest.raises(BadRow, match="are equal"):
    process_dpo_record({**chat_record, "rejected": "five"}, tokenizer, 20, 8)
