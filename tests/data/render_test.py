import numpy as np
import pytest

from tests import toys_text
from tunix.data import chat, rows
from tunix.data.chat import Rendered
from tunix.data.render import tokenise
from tunix.data.rows import fit_apart as fit

PLAIN = toys_text.chat_tokenizer(None)
CHAT = toys_text.chat_tokenizer("chatml")


def text(tokenizer, ids):
  return tokenizer.decode(ids, skip_special_tokens=False)


def test_plain_text_has_one_bos_and_ends_with_eos():
  made = tokenise("How many", [" days", " weeks"], PLAIN)
  assert text(PLAIN, made.prompt) == "<s>How many"
  assert [text(PLAIN, r) for r in made.completions] == [" days</s>", " weeks</s>"]
  assert all(mask.all() for mask in made.masks)
  assert made.prompt.dtype == made.completions[0].dtype == np.int32


@pytest.mark.parametrize("template", [*toys_text.TEMPLATES])
def test_the_borders_are_those_of_fine_tuning(template):
  tokenizer = toys_text.chat_tokenizer(template)
  made = tokenise("How many days", ["seven", "five of them"], tokenizer)
  for response, answer in zip(made.completions, ("seven", "five of them")):
    record = {"prompt": "How many days", "response": answer}
    example = chat.render(record, tokenizer)
    whole = np.concatenate([made.prompt, response])
    np.testing.assert_array_equal(whole, example.tokens[: len(whole)])
    assert not example.mask[len(whole) :].any()
    assert example.prompt_length == len(made.prompt)


@pytest.mark.parametrize("template", [None, *toys_text.TEMPLATES])
def test_a_prompt_alone_is_that_of_a_response(template):
  tokenizer = toys_text.chat_tokenizer(template)
  given = ["How many days"]
  if template is not None:
    given.append([{"role": "user", "content": given[0], "train": False}])
  for prompt in given:
    alone = tokenise(prompt, [], tokenizer)
    assert alone[1:3] == ((), ())
    np.testing.assert_array_equal(
      alone.prompt, tokenise(prompt, ["seven"], tokenizer).prompt
    )


def test_a_response_of_several_turns_scores_the_models_own():
  turns = [
    {"role": "assistant", "content": "five"},
    {"role": "user", "content": "Think"},
    {"role": "assistant", "content": "seven"},
  ]
  made = tokenise("How many days", [turns], CHAT)
  response, mask = made.completions[0], made.masks[0]
  assert text(CHAT, response[mask == 1]) == "five<|im_end|>seven<|im_end|>"
  assert "Think" in text(CHAT, response[mask == 0])


def test_chat_can_be_refused():
  made = tokenise("How", ["many"], CHAT, chat=False)
  assert text(CHAT, made.prompt) == "How"


def test_token_ids_stay_as_they_are():
  made = tokenise([5, 6], [np.asarray([7, 8]), []], None)
  assert [a.tolist() for a in (made.prompt, *made.completions)] == [[5, 6], [7, 8], []]
  assert [mask.tolist() for mask in made.masks] == [[1, 1], []]


@pytest.mark.parametrize(
  ("prompt", "responses", "tokenizer", "message"),
  [
    ("", ["a"], CHAT, "the prompt is empty and the tokenizer has no BOS"),
    ([], [[3]], None, "the prompt is empty, so that no token"),
    ([3], ["a"], CHAT, "token ids but a completion is not"),
    ("a", ["b"], None, "text needs a tokenizer"),
  ],
)
def test_what_cannot_be_tokenised(prompt, responses, tokenizer, message):
  with pytest.raises(ValueError, match=f"^here: .*{message}"):
    tokenise(prompt, responses, tokenizer, where="here", chat=False)


def test_a_template_that_looks_ahead_is_refused():
  template = (
    "{% for m in messages %}{{ messages|length }}{{ m.content }}<|im_end|>{% endfor %}"
  )
  tokenizer = toys_text.chat_tokenizer("chatml")
  tokenizer = type(tokenizer)(
    toys_text.bpe(), chat_template=template, eos_token="<|im_end|>", pad_token="<pad>"
  )
  long = [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}]
  with pytest.raises(ValueError, match="prints the prompt differently"):
    tokenise("q", ["x", long], tokenizer)


def made(prompt, *responses):
  ids = tuple(np.asarray(r, np.int32) for r in responses)
  return Rendered(
    np.asarray(prompt, np.int32), ids, tuple(np.ones_like(r) for r in ids)
  )


def lists(answered):
  return [part.tolist() for part in (answered.prompt, *answered.completions)]


def test_fit_keeps_the_end_of_the_prompt_and_the_beginning_of_the_response():
  answered = made([1, 2, 3, 4], [5, 6, 7], [8])
  cut = fit(answered, max_prompt_length=2, max_completion_length=2)
  assert cut is not None
  assert lists(cut) == [[3, 4], [5, 6], [8]]
  assert [len(mask) for mask in cut.masks] == [2, 1]
  with_bos = fit(answered, max_prompt_length=3, max_completion_length=9, bos_id=1)
  assert lists(with_bos) == [[1, 3, 4], [5, 6, 7], [8]]
  assert lists(answered)[0] == [1, 2, 3, 4]  # not written to


def test_fit_within_the_limits_changes_nothing():
  answered = made([1, 2], [3])
  for limits in ((2, 1), (None, None)):
    options = dict(zip(("max_prompt_length", "max_completion_length"), limits))
    assert fit(answered, **options, overlong="error") is answered


def test_fit_by_policy():
  answered = made([1, 2], [3, 4, 5])
  limits = {"max_prompt_length": 2, "max_completion_length": 2}
  assert fit(answered, **limits, overlong="drop") is None
  with pytest.raises(ValueError, match="the completion has 3 tokens and max_compl"):
    fit(answered, **limits, overlong="error")


def test_stacking():
  ids, mask = rows.stack_prompts([np.asarray([1, 2]), np.asarray([])], 3, 9)
  assert ids.tolist() == [[9, 1, 2], [9, 9, 9]]
  assert mask.tolist() == [[0, 1, 1], [0, 0, 0]]
  some, own = [np.asarray([1, 2]), np.asarray([])], [np.asarray([0, 1]), np.asarray([])]
  ids, mask = rows.stack_completions(some, own, 3, 9)
  assert ids.tolist() == [[1, 2, 9], [9, 9, 9]]
  assert mask.tolist() == [[0, 1, 0], [0, 0, 0]]
