"""Chat templates with `{% generation %}` blocks: the blocks are trained."""

import random

import numpy as np
import pytest

from tests import toys_text
from tests.data.tool_calls_test import conversation, runs
from tests.toys_calls import TEMPLATES, raw_tokenizer
from tunix.data import chat
from tunix.generate.tokenizer_adapter import TokenizerAdapter

HEAD = """
{%- for message in messages %}
{%- if message.role != 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}
"""
TAIL = """
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
OPEN = "{{- '<|im_start|>assistant\\n' }}"
TALK = [
  {"role": "system", "content": "be brief"},
  {"role": "user", "content": "how many days?"},
  {"role": "assistant", "content": "seven", "reasoning_content": "hm"},
  {"role": "user", "content": "and two weeks?"},
  {"role": "assistant", "content": "twice that"},
]
# name -> assistant's branch, the text that is trained of TALK, run by run
MARKED = {
  "with its end": (
    OPEN + "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\\n' }}",
    ["seven<|im_end|>", "twice that<|im_end|>"],
  ),
  "without its end": (
    OPEN + "{%- generation -%}{{ message.content }}{%- endgeneration -%}"
    "{{ '<|im_end|>\\n' }}",
    ["seven", "twice that"],
  ),
  "with its header": (
    "{% generation %}"
    + OPEN
    + "{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}",
    [f"<|im_start|>assistant\n{text}<|im_end|>\n" for text in ("seven", "twice that")],
  ),
  "in pieces": (
    OPEN + "{% if message.reasoning_content %}<think>"
    "{% generation %}{{ message.reasoning_content }}{% endgeneration %}</think>"
    "{% endif %}{% generation %}{{ message.content }}{% endgeneration %}\n"
    "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
    ["hm", "seven<|im_end|>", "twice that<|im_end|>"],
  ),
  "with variables": (
    "{% set text = 'no' %}" + OPEN + "{% generation %}{% set text = message.content %}"
    "{{ text if loop.last else text | upper }}{% endgeneration %}"
    "{{ text + '<|im_end|>\\n' }}",
    ["SEVEN", "twice that"],
  ),
}


def tokenizer_of(branch):
  return TokenizerAdapter(
    toys_text.bpe(), chat_template=HEAD + branch + TAIL, eos_token="<|im_end|>"
  )


def trained(branch, messages=TALK):
  tokenizer = tokenizer_of(branch)
  return runs(chat.render({"messages": messages}, tokenizer), tokenizer)


def theirs(template, messages, raw, **tokens):
  """What transformers trains: the ids, the mask and the text of the trained tokens."""
  transformers = pytest.importorskip("transformers")
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **tokens)
  tokenizer.chat_template = template
  out = tokenizer.apply_chat_template(
    messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
  )
  return np.asarray(out["input_ids"]), np.asarray(out["assistant_masks"])


@pytest.mark.parametrize("name", MARKED)
def test_the_blocks_are_trained_and_nothing_else(name):
  branch, expected = MARKED[name]
  tokenizer = tokenizer_of(branch)
  row = chat.render({"messages": TALK}, tokenizer)
  assert runs(row, tokenizer) == expected
  full = tokenizer.apply_chat_template(TALK, False)
  assert tokenizer.decode(row.tokens, skip_special_tokens=False) == full


@pytest.mark.parametrize("name", MARKED)
def test_ids_and_mask_are_those_of_transformers(name):
  branch, _ = MARKED[name]
  ids, mask = theirs(HEAD + branch + TAIL, TALK, toys_text.bpe())
  row = chat.render({"messages": TALK}, tokenizer_of(branch))
  np.testing.assert_array_equal(row.tokens, ids)
  np.testing.assert_array_equal(row.mask, mask)


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "smollm3", "mistral", "deepseek"])
def test_calls_and_thoughts_are_those_of_transformers(name):
  source, bos, eos, accepts = TEMPLATES[name]
  marked = source
  for variable, block in (("open", "generation"), ("close", "endgeneration")):
    for form in (f"{{{{- {variable} }}}}", f"{{{{ {variable} }}}}"):
      marked = marked.replace(form, f"{{% {block} %}}")
  ours = TokenizerAdapter(
    raw_tokenizer(), chat_template=marked, bos_token=bos, eos_token=eos
  )
  assert ours.marks_generation()
  tokens = {"bos_token": bos or None, "eos_token": eos}
  for seed in range(8):
    messages = conversation(random.Random(f"{name} {seed}"), accepts)
    messages = [{k: v for k, v in m.items() if k != "weight"} for m in messages]
    ids, mask = theirs(marked, messages, raw_tokenizer(), **tokens)
    row = chat.render({"messages": messages}, ours)
    assert ours.decode(row.tokens, skip_special_tokens=False) == ours.decode(
      ids, skip_special_tokens=False
    )
    # Ours cuts the text where training begins; theirs trains a token across the border.
    assert "".join(runs(row, ours)) == ours.decode(
      ids[mask != 0], skip_special_tokens=False
    )


def test_turns_that_are_not_trained_keep_their_blocks_out():
  for name, (branch, expected) in MARKED.items():
    for mark in ({"weight": 0}, {"train": False}):
      talk = [*TALK[:2], {**TALK[2], **mark}, *TALK[3:]]
      assert trained(branch, talk) == expected[-1:], name
    # The assistant's turns of a prompt are context.
    tokenizer = tokenizer_of(branch)
    row = chat.render_completion(TALK[:4], "twice that", tokenizer)
    assert runs(row, tokenizer) == expected[-1:], name


def test_only_blocks_of_the_template_count():
  quoted = "{# {% generation %} #}" + OPEN + "{{ message.content + '<|im_end|>\\n' }}"
  assert not tokenizer_of(quoted).marks_generation()
  assert trained(quoted) == ["seven<|im_end|>", "twice that<|im_end|>"]
  # Characters that might stand for a mark are text where the conversation holds them.
  odd = [TALK[1], {"role": "assistant", "content": "a\U000f0000b\U000f0001"}]
  branch, _ = MARKED["without its end"]
  assert trained(branch, odd) == ["a\U000f0000b\U000f0001"]


def test_blocks_within_blocks_and_macros():
  nested = (
    OPEN + "{% generation %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
  )
  assert trained(nested) == MARKED["with its end"][1]
  macro = (
    "{% macro say(text) %}{% generation %}{{ text }}{% endgeneration %}{% endmacro %}"
    + OPEN
    + "{{ say(message.content) + '<|im_end|>\\n' }}"
  )
  assert trained(macro) == MARKED["without its end"][1]


ONLY_LAST = (
  OPEN + "{% if loop.last %}{% generation %}{{ message.content }}{% endgeneration %}"
  "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}"
)
CHANGED = (
  OPEN + "{% set text %}{% generation %}{{ message.content }} {% endgeneration %}"
  "{% endset %}{{ text | length ~ text }}"
)
CALL = {"function": {"name": "f", "arguments": {"n": 1}}}
CONTENT_OR_CALLS = (
  OPEN + "{{ (message.tool_calls or []) | tojson }}{% if not message.tool_calls %}"
  "{% generation %}{{ message.content }}{% endgeneration %}{% endif %}<|im_end|>"
)
CALLED = [
  TALK[1],
  {"role": "assistant", "content": "", "tool_calls": [CALL]},
  {"role": "tool", "content": "7"},
  TALK[4],
]


@pytest.mark.parametrize(
  ("branch", "messages", "message"),
  [
    (ONLY_LAST, TALK, r"none of them holds content of messages\[2\]: these would not"),
    (CONTENT_OR_CALLS, CALLED, r"none of them holds tool calls of messages\[1\]"),
    (CHANGED, TALK, "changes the text of a {% generation %} block after"),
    ("{% generation %}", TALK, "no valid jinja"),
    (OPEN + "{% generation %}{% endgeneration %}", TALK, "content of messages"),
  ],
)
def test_blocks_that_would_train_nothing_are_refused(branch, messages, message):
  with pytest.raises(ValueError, match=r"d\.jsonl:3: .*" + message):
    chat.render({"messages": messages}, tokenizer_of(branch), where="d.jsonl:3")


def test_blocks_may_leave_out_calls_and_hold_empty_turns():
  branch = "{{ (message.tool_calls or []) | tojson }}" + MARKED["with its end"][0]
  talk = [CALLED[0], {**CALLED[1], "content": "let me see"}, CALLED[2], TALK[2]]
  assert trained(branch, talk) == ["let me see<|im_end|>", "seven<|im_end|>"]
  talk[1] = {"role": "assistant", "content": ""}
  assert trained(branch, talk) == ["<|im_end|>", "seven<|im_end|>"]


def test_a_block_of_several_turns_is_trained_as_a_whole_or_refused():
  template = """
  {%- for message in messages if message.role != 'assistant' %}
  {{- '<|im_start|>' + message.content + '<|im_end|>' }}
  {%- endfor %}
  {%- generation %}
  {%- for message in messages if message.role == 'assistant' %}
  {{- message.content + '<|im_end|>' }}
  {%- endfor %}
  {%- endgeneration %}
  """
  tokenizer = TokenizerAdapter(
    toys_text.bpe(), chat_template=template, eos_token="<|im_end|>"
  )
  row = chat.render({"messages": TALK}, tokenizer)
  assert runs(row, tokenizer) == ["seven<|im_end|>twice that<|im_end|>"]
  talk = [*TALK[:4], {**TALK[4], "weight": 0}]
  with pytest.raises(ValueError, match=r"holds messages\[2\], which is trained, and"):
    chat.render({"messages": talk}, tokenizer)
