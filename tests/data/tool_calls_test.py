"""Tool calls are trained, under templates with the structure of those of many models.

The templates are our own. The variables `open` and `close` stand around the text of each
assistant's turn. They print nothing unless a test gives them a value, and then show what
must be trained.
"""

import json
import random
import re

import numpy as np
import pytest

from tests import toys_text
from tunix.data import chat, show, spans
from tunix.data.records import SFT
from tunix.generate.tokenizer_adapter import TokenizerAdapter

# Prints the call instead of the content, and ends it with a token of its own.
LLAMA31 = r"""
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{{ open }}
{%- if call.name == 'search' %}
{{- '<|python_tag|>' + call.name + '.call(' }}
{%- for key, value in call.arguments | items %}
{{- key + '="' ~ value ~ '"' }}{{ ', ' if not loop.last }}
{%- endfor %}
{{- ')' }}
{%- else %}
{{- '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}' }}
{%- endif %}
{{- CALL_END }}{{ close }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{{- message.content | tojson }}{{ '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if message.role == 'assistant' %}{{ open }}{% endif %}
{{- message.content | trim }}{{ '<|eot_id|>' }}
{%- if message.role == 'assistant' %}{{ close }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
LLAMA32 = LLAMA31.replace("CALL_END", "'<|eot_id|>'")
LLAMA31 = LLAMA31.replace("CALL_END", "'<|eom_id|>'")

# Prints the calls after the content; joins the results of tools in one turn.
QWEN25 = r"""
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}{{ tools | tojson }}
{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}{{ open }}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n' if message.content or not loop.first }}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}{{ close }}{{ '\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# Shows the thinking of turns after the last question.
QWEN3 = QWEN25.replace(
  "{{ open }}{{ message.content }}",
  r"""{{ open }}
{%- if loop.index0 > ns.last and (loop.last or message.reasoning_content) %}
{{- '<think>\n' }}{{ message.reasoning_content }}{{ '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}""",
)
QWEN3 = (
  r"""
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
"""
  + QWEN3.lstrip("\n")
)

# Switches a mode by the system turn, and shows thinking in every turn.
SMOLLM3 = QWEN25.replace(
  "{{ open }}{{ message.content }}",
  r"""{{ open }}
{%- if message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n' }}
{%- endif %}
{{- message.content | trim }}""",
)

PHI4 = r"""
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' %}{{ open }}{% endif %}
{%- if message.tool_calls %}
{{- '<|tool_call|>' }}{{ message.tool_calls | tojson }}{{ '<|/tool_call|>' }}
{%- else %}{{ message.content }}{% endif %}
{{- '<|end|>' }}
{%- if message.role == 'assistant' %}{{ close }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

# Calls have ids, which the results repeat; refuses turns that do not alternate.
MISTRAL = r"""
{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}
{%- if (message.role == 'user') != (ns.count % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{%- set ns.count = ns.count + 1 %}
{%- endif %}
{%- if message.role == 'user' %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' }}{{ message.content }}{{ ', "call_id": "' }}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
{{- open }}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}
{%- set text = call.function | tojson %}
{{- text[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
{%- endfor %}
{{- ']' + eos_token }}{{ close }}
{%- else %}
{{- open }}{{ ' ' + message.content | trim + eos_token }}{{ close }}
{%- endif %}
{%- endfor %}
"""

# Channels. Thinking before an earlier final answer is dropped; results of tools need a
# call before them and show its name; the last answer ends with another token.
GPT_OSS = r"""
{%- set ns = namespace(name='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}
{{- raise_exception('content and thinking') }}
{%- endif %}
{%- set later = namespace(final=false) %}
{%- for other in messages[loop.index:] %}
{%- if other.role == 'assistant' and not other.tool_calls %}
{%- set later.final = true %}
{%- endif %}
{%- endfor %}
{%- set thought = message.content or message.thinking %}
{{- '<|start|>assistant' }}{{ open }}
{%- if thought and not later.final %}
{{- '<|channel|>analysis<|message|>' + thought + '<|end|><|start|>assistant' }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{%- set ns.name = call.name %}
{{- ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}{{ close }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant' }}{{ open }}
{%- if loop.last and message.thinking %}
{{- '<|channel|>analysis<|message|>' + message.thinking }}
{{- '<|end|><|start|>assistant' }}
{%- endif %}
{{- '<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}{{ close }}
{%- elif message.role == 'tool' %}
{%- if not ns.name %}{{ raise_exception('no call before the result') }}{% endif %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson }}{{ '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

# Special tokens end each call; the answer to a tool has no header.
DEEPSEEK = r"""
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<User>' + message.content }}
{%- elif message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<outputs_begin>' }}{% endif %}
{{- '<output_begin>' + message.content + '<output_end>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<outputs_end>' }}{% endif %}
{%- else %}
{{- '<Assistant>' if loop.previtem.role != 'tool' }}{{ open }}
{%- if message.tool_calls %}
{{- message.content }}{{ '<calls_begin>' }}
{%- for call in message.tool_calls %}
{{- '<call_begin>function<call_sep>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments | tojson }}{{ '\n```<call_end>' }}
{%- endfor %}
{{- '<calls_end>' }}
{%- else %}{{ message.content.split('</think>')[-1] }}
{%- endif %}
{{- eos_token }}{{ close }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
{{- '<Assistant>' }}
{%- endif %}
"""

# The header of the next turn ends a turn; EOS ends the last one.
GLM4 = r"""
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
{%- set after = loop.previtem is defined and loop.previtem.role == 'assistant' %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- close if after }}{{ '\n<tool_response>' + message.content + '</tool_response>' }}
{%- else %}
{{- '<|' + message.role + '|>' }}{{ close if after }}
{%- if message.role == 'assistant' %}{{ open }}{% endif %}
{{- '\n' + message.content if message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>' + call.function.name + '\n' }}
{{- call.function.arguments | tojson }}{{ '\n</tool_call>' }}
{%- endfor %}
{{- close if loop.last and message.role == 'assistant' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

GEMMA3 = toys_text.GEMMA.replace(
  "{{- message['content'] | trim }}{{ '<end_of_turn>\\n' }}",
  "{{- open if role == 'model' }}{{ message['content'] | trim }}{{ '<end_of_turn>' }}"
  "{{- close if role == 'model' }}{{ '\\n' }}",
)

# name -> template, BOS, EOS, what the template accepts
TEMPLATES = {
  "llama31": (LLAMA31, "<|begin_of_text|>", "<|eot_id|>", "system"),
  "llama32": (LLAMA32, "<|begin_of_text|>", "<|eot_id|>", "system"),
  "qwen25": (QWEN25, "", "<|im_end|>", "system parallel beside text"),
  "qwen3": (QWEN3, "", "<|im_end|>", "system parallel beside text thinking"),
  "smollm3": (SMOLLM3, "", "<|im_end|>", "system parallel beside text thinking"),
  "phi4": (PHI4, "", "<|end|>", "system parallel beside text"),
  "mistral": (MISTRAL, "<s>", "</s>", "parallel beside text"),
  "gpt_oss": (GPT_OSS, "", "<|return|>", "system beside text thinking"),
  "deepseek": (DEEPSEEK, "<s>", "</s>", "system parallel beside text"),
  "glm4": (GLM4, "", "<|endoftext|>", "system parallel beside text"),
  "gemma3": (GEMMA3, "<bos>", "<eos>", "system no_calls"),
}
SPECIAL = [
  *("<|eom_id|>", "<|python_tag|>", "<|end|>", "<|user|>", "<|system|>", "<|tool|>"),
  *("<|assistant|>", "<|tool_call|>", "<|/tool_call|>", "<|observation|>", "<|call|>"),
  *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
  *("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<User>", "<Assistant>"),
  *("<calls_begin>", "<call_begin>", "<call_sep>", "<call_end>", "<calls_end>"),
  *("<outputs_begin>", "<output_begin>", "<output_end>", "<outputs_end>"),
  *("[gMASK]", "<sop>"),
]
WITH_CALLS = [name for name, entry in TEMPLATES.items() if "no_calls" not in entry[3]]
MARKS = {"open": "\ue010", "close": "\ue011"}


def raw_tokenizer():
  raw = toys_text.bpe()
  raw.add_special_tokens(SPECIAL)
  return raw


def tokenizer_of(name):
  source, bos, eos, _ = TEMPLATES[name]
  return TokenizerAdapter(
    raw_tokenizer(), chat_template=source, bos_token=bos, eos_token=eos
  )


def text(rng):
  words = " ".join(toys_text.WORDS).split()
  extra = ['{"a": 1}}', "}", "\n", "user", "assistant", "<tool_call>", '"']
  chosen = [rng.choice(extra if rng.random() < 0.2 else words) for _ in range(4)]
  return " ".join(chosen).strip() or "yes"


def arguments(rng, accepts):
  if "text" in accepts and rng.random() < 0.2:
    return json.dumps({"a": text(rng)})
  value = rng.choice([1, "", text(rng), {"b": [1, {}]}, None])
  return rng.choice([{}, {"a": value}, {"a": 1, "name": value}])


def answers(rng, accepts):
  """Messages from one question to its answer."""
  messages = []
  for _ in range(rng.choice([0, 1, 1, 2]) if "no_calls" not in accepts else 0):
    count = rng.choice([1, 2, 3]) if "parallel" in accepts else 1
    calls = [
      {
        "id": f"{rng.randrange(10**9):09d}",
        "type": "function",
        "function": {
          "name": rng.choice(["add", "f", "search"]),
          "arguments": arguments(rng, accepts),
        },
      }
      for _ in range(count)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    if "beside" in accepts and rng.random() < 0.4:
      message["content"] = text(rng)
    elif "thinking" in accepts and rng.random() < 0.6:
      message["reasoning_content"] = text(rng)
    results = [
      {"role": "tool", "content": text(rng), "tool_call_id": call["id"]}
      for call in calls
    ]
    messages += [message, *results]
  last = {"role": "assistant", "content": text(rng) if rng.random() < 0.9 else ""}
  if "thinking" in accepts and rng.random() < 0.5:
    last["reasoning_content"] = text(rng)
  return [*messages, last]


def conversation(rng, accepts, rounds=None):
  messages = []
  if "system" in accepts and rng.random() < 0.5:
    messages.append({"role": "system", "content": text(rng)})
  for _ in range(rounds or rng.choice([1, 1, 2, 3, 5])):
    messages += [{"role": "user", "content": text(rng)}, *answers(rng, accepts)]
  for message in messages:
    if message["role"] == "assistant" and rng.random() < 0.1:
      message["weight"] = 0
  messages[-1].pop("weight", None)
  return messages


def expected(messages, tokenizer, **variables):
  """The rendered conversation, and the text of each trained turn."""
  visible = [{k: v for k, v in m.items() if k != "weight"} for m in messages]

  def render(**marks):
    return tokenizer.apply_chat_template(
      visible, False, now=chat.TEMPLATE_DATE, **variables, **marks
    )

  turns = re.findall("\ue010(.*?)\ue011", render(**MARKS), re.DOTALL)
  weights = [m.get("weight", 1) for m in messages if m["role"] == "assistant"]
  assert len(turns) == len(weights)
  return render(), [turn for turn, weight in zip(turns, weights) if weight]


def runs(row, tokenizer):
  """Texts of the runs of trained tokens."""
  borders = np.flatnonzero(np.diff(row.mask)) + 1
  parts = zip(np.split(row.tokens, borders), np.split(row.mask, borders))
  return [tokenizer.decode(t, skip_special_tokens=False) for t, m in parts if m[0]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_is_trained_once_and_nothing_else(name):
  tokenizer, accepts = tokenizer_of(name), TEMPLATES[name][3]
  for seed in range(40):
    rng = random.Random(f"{name} {seed}")
    messages = conversation(rng, accepts)
    tools = [{"type": "function", "function": {"name": "add"}}]
    full, turns = expected(messages, tokenizer, tools=tools)
    row = chat.render({"messages": messages, "tools": tools}, tokenizer)
    if name == "glm4":
      full, turns[-1] = full + "<|endoftext|>", turns[-1] + "<|endoftext|>"
    assert tokenizer.decode(row.tokens, skip_special_tokens=False) == full
    found = runs(row, tokenizer)
    assert found == turns, (seed, messages)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_call_ends_with_its_token(name):
  tokenizer = tokenizer_of(name)
  call = {"function": {"name": "f", "arguments": {"n": 1}}, "id": "123456789"}
  messages = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [call]},
  ]
  row = chat.render({"messages": messages}, tokenizer)
  ends = {"llama31": "<|eom_id|>", "gpt_oss": "<|call|>"}
  [trained] = runs(row, tokenizer)
  assert trained.rstrip().endswith(ends.get(name, TEMPLATES[name][2]))
  assert '"n": 1' in trained and "f" in trained


@pytest.mark.parametrize("name", WITH_CALLS)
def test_long_conversations_with_calls_are_rendered_a_fixed_number_of_times(name):
  tokenizer = tokenizer_of(name)

  def count(rounds):
    messages, calls = [], [0]
    for n in range(rounds):
      call = {"function": {"name": "f", "arguments": {"n": n}}, "id": "123456789"}
      messages += [
        {"role": "user", "content": f"a {n}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"{n}", "tool_call_id": "123456789"},
        {"role": "assistant", "content": f"it is {n}"},
      ]

    def render(some, add_generation_prompt):
      calls[0] += 1
      return tokenizer.apply_chat_template(
        some, add_generation_prompt, now=chat.TEMPLATE_DATE
      )

    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    closing = list(tokenizer.special_tokens())
    spans.find_segments(messages, turns, render, closing)
    return calls[0]

  assert count(8) == count(16) <= 24


def test_a_turn_of_which_nothing_is_printed_is_an_error():
  tokenizer = tokenizer_of("gemma3")
  call = {"function": {"name": "f", "arguments": {"n": 1}}}
  messages = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "", "tool_calls": [call]},
  ]
  with pytest.raises(
    ValueError, match=r"d\.jsonl:3: the chat template prints no text.*messages\[3\] \(tool"
  ):
    chat.render({"messages": messages}, tokenizer, where="d.jsonl:3")
  messages[3]["train"] = False
  assert runs(chat.render({"messages": messages}, tokenizer), tokenizer) == [
    "b<end_of_turn>"
  ]


def test_a_conversation_that_begins_with_a_call():
  tokenizer = tokenizer_of("llama32")
  call = {"function": {"name": "f", "arguments": {"n": 1}}}
  messages = [
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "b"},
  ]
  row = chat.render({"messages": messages}, tokenizer)
  assert runs(row, tokenizer) == expected(messages, tokenizer)[1]


def test_show_without_a_model_marks_what_is_trained():
  call = {"function": {"name": "f", "arguments": {"n": 1}}}
  messages = [
    {"role": "user", "content": "a"},
    {
      "role": "assistant",
      "content": "let me see",
      "reasoning_content": "hm",
      "tool_calls": [call],
    },
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "b"},
  ]
  shown = show.describe_record(SFT.read({"messages": messages}, "w"))
  marked = re.findall("«(.*?)»", shown, re.DOTALL)
  row = chat.render({"messages": messages}, tokenizer_of("smollm3"))
  trained = runs(row, tokenizer_of("smollm3"))
  assert len(marked) == len(trained) == 2
  for piece in ("hm", "let me see", '"n": 1'):
    assert piece in marked[0] and piece in trained[0]


@pytest.mark.parametrize("name", ["llama31", "qwen25", "qwen3", "mistral", "deepseek"])
def test_generation_marks_of_transformers_give_the_same_text(name):
  transformers = pytest.importorskip("transformers")
  source, bos, eos, accepts = TEMPLATES[name]
  marked = source.replace("{{- open }}", "{{ open }}")
  marked = marked.replace("{{ open }}", "{% generation %}")
  marked = marked.replace("{{- close }}", "{{ close }}")
  marked = marked.replace("{{ close }}", "{% endgeneration %}")
  if name == "llama31":  # a block must open and close in one branch
    marked = marked.replace(
      "{%- if message.role == 'assistant' %}{% generation %}{% endif %}\n"
      "{{- message.content | trim }}{{ '<|eot_id|>' }}\n"
      "{%- if message.role == 'assistant' %}{% endgeneration %}{% endif %}",
      "{%- if message.role == 'assistant' %}{% generation %}"
      "{{- message.content | trim }}{{ '<|eot_id|>' }}{% endgeneration %}"
      "{%- else %}{{ message.content | trim }}{{ '<|eot_id|>' }}{% endif %}",
    )
  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_object=raw_tokenizer(), bos_token=bos or None, eos_token=eos
  )
  theirs.chat_template = marked
  tokenizer = tokenizer_of(name)
  for seed in range(10):
    messages = conversation(random.Random(f"{name} {seed}"), accepts)
    messages = [{k: v for k, v in m.items() if k != "weight"} for m in messages]
    out = theirs.apply_chat_template(
      messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    ids, mask = np.asarray(out["input_ids"]), np.asarray(out["assistant_masks"])
    row = chat.render({"messages": messages}, tokenizer)
    assert tokenizer.decode(ids[mask != 0], skip_special_tokens=False) == "".join(
      runs(row, tokenizer)
    )
