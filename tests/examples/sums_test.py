"""The task of the notebooks: its records, its template, and what counts as right."""

import numpy as np
import pytest

from tunix.data import chat
from tunix.examples import sums


@pytest.fixture(scope="module")
def task():
  return sums.Sums()


def test_held_out_sums_are_not_trained(task):
  prompts = [{r["prompt"] for r in part} for part in (task.train, task.held_out)]
  assert not prompts[0] & prompts[1]
  assert len(prompts[0] | prompts[1]) == 100
  assert task.held_out[0] == {
    "prompt": "2+3=",
    "response": "[5]",
    "answer": 5,
  }
  real = sums.Sums(tiny=False)
  assert len(real.held_out) == 64 and len(real.train) == 8750
  assert "in brackets, like [7]" in real.train[0]["prompt"]


def test_rows_prompts_and_answers_have_no_reasoning(task):
  for record in (*task.train, *task.held_out):
    row = chat.render(record, task.tokenizer)
    prompt = chat.render_completion(record["prompt"], None, task.tokenizer).prompt
    np.testing.assert_array_equal(row.prompt, prompt)
    shown = task.tokenizer.decode(prompt, skip_special_tokens=False)
    assert shown == f"<user>{record['prompt']}<end><assistant><think></think>"
    assert task.tokenizer.decode(row.completions[0]) == record["response"]
    assert len(prompt) <= task.max_prompt_length
    assert len(row.tokens) <= task.max_length


def test_rollouts_read_the_tokens_of_training_rows(task):
  prompt = task.held_out[0]["prompt"]
  turn = [{"role": "user", "content": prompt}]
  text = task.tokenizer.apply_chat_template(turn)
  ids = chat.render_completion(prompt, None, task.tokenizer).prompt
  # A sampler begins the ids of a text with BOS, if the tokenizer has it.
  np.testing.assert_array_equal(task.tokenizer.tokenize(text, add_eos=False), ids)


def test_the_template_asks_for_reasoning_without_the_option(task):
  turn = [{"role": "user", "content": "1+1="}]
  text = task.tokenizer.apply_chat_template(turn, enable_thinking=True)
  assert text.endswith("<assistant>")


def test_accuracy_compares_the_whole_answer(task, monkeypatch):
  given = [r["response"] for r in task.held_out]
  given[0] += "]"
  monkeypatch.setattr(sums.Sums, "answers", lambda *_: given)
  assert task.accuracy("model") == 12 / 13
  assert task.accuracy("model", lambda a, b: "none") == 0.0
