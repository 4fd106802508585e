"""A small tokenizer and chat templates, for tests that need text.

The templates are our own, written in the manner of those that models use; each has
one habit that breaks naive masking (see TEMPLATES).
"""

import functools
import json

import tokenizers

from tunix.generate.tokenizer_adapter import TokenizerAdapter

WORDS = """
The river runs slowly past the old mill, and the miller counts his sacks of flour.
A student asks: what is the sum of two and three? The teacher answers that it is five.
Please write a short poem about the sea. The sea is wide, the sea is deep, it sings
the sailors into sleep. How many days are in a week? There are seven days in a week.
You are a helpful assistant who answers briefly and in plain words. Think before you
answer: first read the question, then reason step by step, and say what you know.
def add(a, b): return a + b  # adds two numbers; print(add(1, 2)) shows 3
User: hello there! Assistant: hello, how can I help you today? Thank you very much.
""".strip().splitlines()

# One turn after the other, nothing clever. Ends every turn with <|im_end|>.
CHATML = r"""
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# Writes BOS itself, trims contents, shows a date.
LLAMA3 = r"""
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- if messages[0].role == 'system' -%}
{%- set ns.system = messages[0].content | trim -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' -}}
{{- 'Today is ' + strftime_now('%d %b %Y') + '\n\n' + ns.system + '<|eot_id|>' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' -}}
{{- message.content | trim -}}{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}
"""

# Drops the thinking of turns before the last question; puts an empty think block into
# the last answer when it has none. Renders calls of tools behind the content.
QWEN3 = r"""
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\n# Tools\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'assistant' -%}
{%- set thought = message.reasoning_content if message.reasoning_content else '' -%}
{%- if not thought and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -}}
{%- else -%}
{{- content -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}
{%- endfor -%}
{%- else -%}
{{- content -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\n\n</think>\n\n' -}}
{%- endif -%}
{%- endif -%}
"""

# Merges the system turn into the first question, names the assistant "model", trims,
# and refuses turns that do not alternate.
GEMMA = r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
{%- set intro = messages[0]['content'] + '\n\n' -%}
{%- set turns = messages[1:] -%}
{%- else -%}
{%- set intro = '' -%}
{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate user/assistant') }}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\n' + (intro if loop.first else '') }}
{{- message['content'] | trim }}{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

# No header for the answer, white space around it, every turn trimmed; BOS before each
# question; refuses a system turn.
LLAMA2 = r"""
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- raise_exception('there is no system turn here') -}}
{%- elif message.role == 'user' -%}
{{- bos_token + '[INST] ' + message.content.strip() + ' [/INST]' -}}
{%- else -%}
{{- ' ' + message.content.strip() + ' ' + eos_token -}}
{%- endif -%}
{%- endfor -%}
"""

# Closes no turn with a token of its own.
PLAIN = r"""
{%- for message in messages -%}
{{ message.role + ': ' + message.content + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}
"""

# name -> template, BOS, EOS
TEMPLATES = {
  "chatml": (CHATML, None, "<|im_end|>"),
  "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
  "qwen3": (QWEN3, None, "<|im_end|>"),
  "gemma": (GEMMA, "<bos>", "<eos>"),
  "llama2": (LLAMA2, "<s>", "</s>"),
  "plain": (PLAIN, "<s>", "</s>"),
  None: (None, "<s>", "</s>"),
}

SPECIAL = [
  *("<pad>", "<s>", "</s>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
  *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>"),
  *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
]

# The hyphen, and what else people and models write for a minus.
MINUSES = "-\u2212\u2013\ufe63\uff0d"


@functools.lru_cache(maxsize=1)
def _tokenizer_json() -> str:
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=512,
    special_tokens=SPECIAL,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(WORDS, trainer)
  tokenizer.add_tokens(["<think>", "</think>"])
  return tokenizer.to_str()


def bpe() -> tokenizers.Tokenizer:
  """A byte-level BPE tokenizer of its own, 514 tokens."""
  return tokenizers.Tokenizer.from_str(_tokenizer_json())


def metaspace() -> tokenizers.Tokenizer:
  """In the manner of Llama 2: puts a space before every text; has <s> and </s>."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
  tokenizer.normalizer = tokenizers.normalizers.Sequence(
    [
      tokenizers.normalizers.Prepend("▁"),
      tokenizers.normalizers.Replace(" ", "▁"),
    ]
  )
  tokenizer.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace("▁", " "),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
      tokenizers.decoders.Strip(content=" ", left=1),
    ]
  )
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=400,
    special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
    show_progress=False,
    max_token_length=6,
  )
  tokenizer.train_from_iterator(WORDS, trainer)
  # The trainer knows fixed tokens only as special ones; bytes are plain text.
  source = json.loads(tokenizer.to_str())
  source["added_tokens"] = source["added_tokens"][:3]
  return tokenizers.Tokenizer.from_str(json.dumps(source))


@functools.lru_cache(maxsize=16)
def chat_tokenizer(template: str | None = "chatml") -> TokenizerAdapter:
  """An adapter with one of TEMPLATES, its BOS and EOS; None: no chat template."""
  source, bos, eos = TEMPLATES[template]
  return TokenizerAdapter(
    bpe(),
    chat_template=source,
    bos_token=bos or "",
    eos_token=eos,
    pad_token="<pad>",
  )
