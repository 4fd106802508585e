import json

import numpy as np
import pytest

from tests import toys_text
from tunix.data import chat
from tunix.data.records import SFT
from tunix.data.rows import OneRow
from tunix.data.source import Source
from tunix.generate.tokenizer_adapter import TokenizerAdapter

SYSTEM = {"role": "system", "content": "You are brief."}
TALK = [
  {"role": "user", "content": " hello there "},
  {"role": "assistant", "content": "<think>\nhm\n</think>\n\n hello "},
  {"role": "user", "content": "how many days?"},
  {"role": "assistant", "content": " seven\n"},
]
ALL = [name for name in toys_text.TEMPLATES if name]


def trained(example, tokenizer):
  """Texts of the runs of trained tokens."""
  borders = np.flatnonzero(np.diff(example.mask)) + 1
  parts = zip(np.split(example.tokens, borders), np.split(example.mask, borders))
  return [tokenizer.decode(t, skip_special_tokens=False) for t, m in parts if m[0]]


def render(messages, tokenizer, **kwargs):
  return chat.render({"messages": messages}, tokenizer, **kwargs)


EXPECTED = {
  "chatml": ["<think>\nhm\n</think>\n\n hello <|im_end|>", " seven\n<|im_end|>"],
  "llama3": ["<think>\nhm\n</think>\n\n hello<|eot_id|>", "seven<|eot_id|>"],
  # Earlier thinking is gone, and the empty block that the template writes is learned.
  "qwen3": [" hello <|im_end|>", "<think>\n\n</think>\n\n seven\n<|im_end|>"],
  "gemma": ["<think>\nhm\n</think>\n\n hello<end_of_turn>", "seven<end_of_turn>"],
  "llama2": [" <think>\nhm\n</think>\n\n hello </s>", " seven </s>"],
  # No token closes a turn; the end of the last one is learned as EOS.
  "plain": ["<think>\nhm\n</think>\n\n hello ", " seven\n</s>"],
}


@pytest.mark.parametrize("template", ALL)
def test_the_assistants_turns_and_their_ends_are_trained(template):
  tokenizer = toys_text.chat_tokenizer(template)
  messages = TALK if template == "llama2" else [SYSTEM, *TALK]
  example = render(messages, tokenizer)
  assert trained(example, tokenizer) == EXPECTED[template]
  full = tokenizer.apply_chat_template(messages, False, now=chat.TEMPLATE_DATE)
  shown = tokenizer.decode(example.tokens, skip_special_tokens=False)
  assert shown == (full.rstrip() + "\n</s>" if template == "plain" else full)
  if tokenizer.bos_id() is not None and template != "llama2" and template != "plain":
    assert example.tokens.tolist().count(tokenizer.bos_id()) == 1
    assert example.tokens[0] == tokenizer.bos_id()


@pytest.mark.parametrize("template", ALL)
def test_the_prompt_is_what_generation_starts_from(template):
  tokenizer = toys_text.chat_tokenizer(template)
  messages = [{"role": "user", "content": "how many days?"}]
  example = chat.render({"prompt": "how many days?", "response": "seven"}, tokenizer)
  prompt = tokenizer.apply_chat_template(messages, True, now=chat.TEMPLATE_DATE)
  assert example.tokens[: example.prompt_length].tolist() == tokenizer.encode(prompt)
  assert example.mask[: example.prompt_length].sum() == 0
  as_list = {"prompt": messages, "response": "seven"}
  again = chat.render(as_list, tokenizer)
  np.testing.assert_array_equal(again.tokens, example.tokens)
  np.testing.assert_array_equal(again.mask, example.mask)


# How each template shows the contents of an earlier and of the last answer.
SHOWN = {
  "chatml": ("{0}<|im_end|>", "{0}<|im_end|>"),
  "llama3": ("{1}<|eot_id|>", "{1}<|eot_id|>"),
  "qwen3": ("{0}<|im_end|>", "<think>\n\n</think>\n\n{2}<|im_end|>"),
  "gemma": ("{1}<end_of_turn>", "{1}<end_of_turn>"),
  "llama2": (" {1} </s>", " {1} </s>"),
  "plain": ("{0}", "{0}</s>"),
}


@pytest.mark.parametrize("template", ALL)
@pytest.mark.parametrize("content", ["", "a", "user", "\n", "how many days?", "a a a"])
def test_contents_that_repeat_their_surroundings(template, content):
  tokenizer = toys_text.chat_tokenizer(template)
  question = {"role": "user", "content": content or "?"}
  answer = {"role": "assistant", "content": content}
  example = render([question, answer, question, answer], tokenizer)
  forms = (content, content.strip(), content.lstrip("\n"))
  wanted = [shown.format(*forms) for shown in SHOWN[template]]
  assert trained(example, tokenizer) == [text for text in wanted if text]


def test_an_unmarked_turn_is_not_trained():
  tokenizer = toys_text.chat_tokenizer("chatml")
  for mark in ({"weight": 0}, {"train": False}):
    messages = [TALK[0], {**TALK[1], **mark}, *TALK[2:]]
    example = render(messages, tokenizer)
    assert trained(example, tokenizer) == [" seven\n<|im_end|>"]
    everything = render(TALK, tokenizer)
    np.testing.assert_array_equal(example.tokens, everything.tokens)
  messages = [*TALK[:3], {**TALK[3], "weight": 1, "train": True}]
  assert len(trained(render(messages, tokenizer), tokenizer)) == 2


def test_tool_calls_and_reasoning_are_trained():
  tokenizer = toys_text.chat_tokenizer("qwen3")
  call = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "hm",
    "tool_calls": [{"function": {"name": "f", "arguments": {"n": 1}}}],
  }
  messages = [TALK[0], call, {"role": "tool", "content": "3"}, TALK[3]]
  tools = [{"name": "f"}]
  example = chat.render({"messages": messages, "tools": tools}, tokenizer)
  body = '{"name": "f", "arguments": {"n": 1}}'
  assert trained(example, tokenizer) == [
    f"<think>\nhm\n</think>\n\n\n<tool_call>\n{body}\n</tool_call><|im_end|>",
    "<think>\n\n</think>\n\n seven\n<|im_end|>",
  ]
  shown = tokenizer.decode(example.tokens, skip_special_tokens=False)
  assert '# Tools\n{"name": "f"}' in shown


def test_template_arguments_reach_the_template():
  tokenizer = toys_text.chat_tokenizer("qwen3")
  off = render(TALK, tokenizer, template_kwargs={"enable_thinking": False})
  # The prompt now brings the empty block, so it is not learned.
  assert trained(off, tokenizer)[-1] == " seven\n<|im_end|>"


def test_tools_of_a_record_win_over_those_for_all():
  tokenizer = toys_text.chat_tokenizer("qwen3")
  everywhere = {"tools": [{"name": "all"}]}

  def shown(**record):
    record = {"messages": TALK, **record}
    example = chat.render(record, tokenizer, template_kwargs=everywhere)
    return tokenizer.decode(example.tokens, skip_special_tokens=False)

  assert '# Tools\n{"name": "all"}' in shown()
  assert '# Tools\n{"name": "all"}' in shown(tools=None)
  assert '# Tools\n{"name": "own"}' in shown(tools=[{"name": "own"}])
  assert '"all"' not in shown(tools=[{"name": "own"}])
  assert "# Tools" not in shown(tools=[])


@pytest.mark.parametrize(
  ("variables", "message"),
  [
    ({"now": 1}, r"template_kwargs\.now is a name that every rendering sets itself"),
    ({"messages": []}, r"template_kwargs\.messages is a name"),
    ({"add_generation_prompt": True}, "add_generation_prompt is a name"),
    ({"tokenize": True}, "tokenize is a name"),
    ({"template": "a"}, "template is a name"),
    ({"self": 1}, "self is a name"),
    ({"strftime_now": 1}, "strftime_now is a name"),
    ({"tools": "f"}, r"template_kwargs\.tools is 'f', expected a list of JSON schemas"),
    ({"tools": ["f"]}, r"template_kwargs\.tools is \['f'\], expected a list"),
  ],
)
def test_names_that_a_template_cannot_be_given(variables, message):
  records = [{"messages": TALK}]
  with pytest.raises(ValueError, match=message):
    Source(
      records=records,
      kind=SFT,
      tokenizer=toys_text.chat_tokenizer("qwen3"),
      layout=OneRow(max_length=64),
      template_kwargs=variables,
    )


FAILING = [
  ("{{ 'a' + 1 }}", "line 1, TypeError: can only concatenate str"),
  ("\n\n{{ messages[0]['content'][99] + 1 }}", "refuses .* no element 99"),
  ("\n{{ 'a'.encode('zz') }}", "line 2, LookupError: unknown encoding"),
  ("\n\n{{ 1 // 0 }}", "line 3, ZeroDivisionError"),
  ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
]


@pytest.mark.parametrize("template, message", FAILING)
def test_any_failure_of_a_template_names_record_and_line(template, message):
  tokenizer = TokenizerAdapter(
    toys_text.bpe(), chat_template=template, eos_token="</s>"
  )
  with pytest.raises(ValueError, match=rf"data\.jsonl:3: .*({message})") as caught:
    render(TALK, tokenizer, where="data.jsonl:3")
  assert "\n" not in str(caught.value)


def test_half_a_surrogate_pair_names_the_place():
  record = json.loads('{"prompt": "a", "response": "b \\ud800"}')
  tokenizer = toys_text.chat_tokenizer("chatml")
  for is_chat in (True, False):
    with pytest.raises(ValueError, match=r"d\.jsonl:3: the text holds \\ud800, half"):
      chat.render(record, tokenizer, where="d.jsonl:3", chat=is_chat)
  whole = json.loads('{"prompt": "a", "response": "\\ud83d\\ude00"}')
  assert chat.render(whole, tokenizer).mask.any()


def test_the_date_is_fixed():
  tokenizer = toys_text.chat_tokenizer("llama3")
  shown = tokenizer.decode(render(TALK, tokenizer).tokens)
  assert "Today is 26 Jul 2024" in shown


def test_plain_prompts_texts_and_the_chat_switch():
  tokenizer = toys_text.chat_tokenizer("llama2")
  record = {"prompt": "hello", "response": " there"}
  plain = chat.render(record, tokenizer, chat=False)
  bos, eos = tokenizer.bos_id(), tokenizer.eos_id()
  hello, there = tokenizer.encode("hello"), tokenizer.encode(" there")
  assert plain.tokens.tolist() == [bos, *hello, *there, eos]
  assert plain.mask.tolist() == [0] + [0] * len(hello) + [1] * (len(there) + 1)
  assert plain.prompt_length == 1 + len(hello)
  bare = toys_text.chat_tokenizer(None)
  np.testing.assert_array_equal(chat.render(record, bare).tokens, plain.tokens)
  text = chat.render({"text": "hello there"}, tokenizer)
  assert text.tokens.tolist() == [bos, *tokenizer.encode("hello there"), eos]
  assert text.mask.tolist() == [0] + [1] * (len(text.tokens) - 1)
  framed = chat.render({"text": "<s>hello there</s>"}, tokenizer)
  np.testing.assert_array_equal(framed.tokens, text.tokens)
  np.testing.assert_array_equal(framed.mask, text.mask)
  # Without a BOS, the first token of a text has nothing to be predicted from.
  no_bos = chat.render({"text": "hello there"}, toys_text.chat_tokenizer("chatml"))
  assert no_bos.mask.tolist() == [0] + [1] * (len(no_bos.tokens) - 1)


def test_pieces_join_for_tokenizers_that_put_a_space_first():
  tokenizer = TokenizerAdapter(toys_text.metaspace(), chat_template=toys_text.LLAMA2)
  example = render([TALK[2], TALK[3]], tokenizer)
  text = "<s>[INST] how many days? [/INST] seven </s>"
  assert example.tokens.tolist() == tokenizer.encode(text)
  prompt = tokenizer.encode("<s>[INST] how many days? [/INST]")
  assert example.tokens[: example.prompt_length].tolist() == prompt


ERRORS = [
  (
    "chatml",
    {"messages": [TALK[0]]},
    r"no turn has the role 'assistant' \(roles: user",
  ),
  ("chatml", {"messages": [TALK[0], {**TALK[1], "weight": 0}]}, "every assistant turn"),
  ("llama2", {"messages": [SYSTEM, *TALK]}, "refuses .* there is no system turn here"),
  (None, {"messages": TALK}, "needs a chat template, and the tokenizer has none"),
  (None, {"prompt": [TALK[0]], "response": "a"}, "needs a chat template"),
  ("chatml", {"question": "a"}, "found fields 'question'"),
]


@pytest.mark.parametrize("template, record, message", ERRORS)
def test_errors_name_the_place(template, record, message):
  tokenizer = toys_text.chat_tokenizer(template)
  with pytest.raises(ValueError, match=r"data\.jsonl:3: .*" + message):
    chat.render(record, tokenizer, where="data.jsonl:3")


def test_errors_of_the_tokenizer():
  silent = TokenizerAdapter(toys_text.bpe(), chat_template="nothing")
  with pytest.raises(ValueError, match="prints no text of the assistant's turns"):
    render(TALK, silent)
  with pytest.raises(ValueError, match="and chat is False"):
    render(TALK, toys_text.chat_tokenizer("chatml"), chat=False)
  with pytest.raises(ValueError, match="no chat template; pass chat_template"):
    render(TALK, toys_text.chat_tokenizer(None), chat=True)
  endless = TokenizerAdapter(toys_text.bpe(), eos_token="")
  with pytest.raises(ValueError, match="no end-of-sequence token"):
    chat.render({"text": "a"}, endless)
