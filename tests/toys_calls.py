"""Chat templates with tool calls, with the structure of those of many models.

The templates are our own. The variables `open` and `close` stand around the text of
each assistant's turn. They print nothing unless a test gives them a value, and then
show what must be trained.
"""

from tests import toys_text
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

# The arguments of a call are tagged texts.
QWEN35 = QWEN25.replace(
  r"""{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}""",
  r"""{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\n' ~ value ~ '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}""",
)

# Shows the thinking of turns after the last question.
QWEN3 = QWEN25.replace(
  "{{ open }}{{ message.content }}",
  r"""{{ open }}
{%- if loop.index0 > ns.last and (loop.last or message.reasoning_content) %}
{{- '<think>\n' }}{{ message.reasoning_content }}{{ '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}""",
)
QWEN3 = r"""
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
""" + QWEN3.lstrip("\n")

# Shows the thinking of every turn.
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
{%- if message.role in ('user', 'assistant') and not message.tool_calls %}
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

# Joins the arguments of calls as texts, and prints calls only next to no content.
DEEPSEEK_V3 = (
  DEEPSEEK.replace(
    "{%- if message.tool_calls %}\n{{- message.content }}",
    "{%- if message.content is none %}",
  )
  .replace("+ call.function.name + '\\n```json\\n' }}", "+ call.function.name")
  .replace(
    "{{- call.function.arguments | tojson }}{{ '\\n```<call_end>' }}",
    "+ '\\n```json\\n' + call.function.arguments + '\\n```<call_end>' }}",
  )
)

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

GLM47 = GLM4.replace(
  r"""{{- '\n<tool_call>' + call.function.name + '\n' }}
{{- call.function.arguments | tojson }}{{ '\n</tool_call>' }}""",
  r"""{{- '<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments | items %}
{{- '<arg_key>' + key + '</arg_key><arg_value>' ~ value ~ '</arg_value>' }}
{%- endfor %}
{{- '</tool_call>' }}""",
)

# Two tokens close each turn of the assistant; the next header begins with a third.
COMMAND = r"""
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|turn|><|bot|>' }}{{ open }}
{%- if message.tool_calls %}
{%- if message.reasoning_content or message.content %}
{{- '<|think|>' + (message.reasoning_content or message.content) + '<|/think|>' }}
{%- endif %}
{{- '<|action|>[' }}
{%- for call in message.tool_calls %}
{{- '{"tool_name": "' + call.function.name + '", "parameters": ' }}
{{- call.function.arguments | tojson }}{{ '}' }}{{ ', ' if not loop.last }}
{%- endfor %}
{{- ']<|/action|><|/turn|>' }}
{%- else %}
{{- '<|response|>' + message.content + '<|/response|><|/turn|>' }}
{%- endif %}
{{- close }}
{%- elif message.role == 'tool' %}
{{- '<|turn|><|system|><|result|>' + message.content + '<|/result|><|/turn|>' }}
{%- else %}
{{- '<|turn|><|' + message.role + '|>' + message.content + '<|/turn|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|><|bot|>' }}{% endif %}
"""

# Roles between two tokens; the calls are a list after a token; tools have a turn.
GRANITE3 = r"""
{%- if tools %}
{{- '<|start_of_role|>available_tools<|end_of_role|>' }}{{ tools | tojson }}
{{- '<|end_of_text|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- set role = 'tool_response' if message.role == 'tool' else message.role %}
{{- '<|start_of_role|>' + role + '<|end_of_role|>' }}
{%- if role == 'assistant' %}{{ open }}{% endif %}
{%- if message.tool_calls %}
{{- '<|tool_call|>[' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}' }}{{ ', ' if not loop.last }}
{%- endfor %}{{ ']' }}
{%- else %}{{ message.content }}
{%- endif %}
{{- '<|end_of_text|>' }}{% if role == 'assistant' %}{{ close }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_of_role|>assistant<|end_of_role|>' }}
{%- endif %}
"""

# Calls in Python's syntax after the content; the last answer ends with another token.
OLMO3 = r"""
{%- if tools %}{{ '<|im_start|>system\n<functions>' }}{{ tools | tojson }}
{{- '</functions><|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}{{ open }}{{ message.content }}
{%- if message.tool_calls %}{{ '<function_calls>' }}
{%- for call in message.tool_calls %}
{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments | items %}
{{- key + '=' }}{{ value | tojson }}{{ ', ' if not loop.last }}
{%- endfor %}{{ ')' }}{{ '\n' if not loop.last }}
{%- endfor %}{{ '</function_calls>' }}
{%- endif %}
{{- eos_token if loop.last else '<|im_end|>' }}{{ close }}
{{- '\n' if not loop.last }}
{%- else %}
{%- set role = 'environment' if message.role == 'tool' else message.role %}
{{- '<|im_start|>' + role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# Each call has a mark and its name before its arguments; shows all reasoning.
MINISTRAL3 = r"""
{{- bos_token }}
{%- if tools %}
{{- '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}
{{- open }}
{%- if message.reasoning_content %}
{{- '[THINK]' + message.reasoning_content + '[/THINK]' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
{{- call.function.arguments | tojson }}
{%- endfor %}
{{- eos_token }}{{ close }}
{%- endif %}
{%- endfor %}
"""

GEMMA3 = toys_text.GEMMA.replace(
  "{{- message['content'] | trim }}{{ '<end_of_turn>\\n' }}",
  "{{- open if role == 'model' }}{{ message['content'] | trim }}{{ '<end_of_turn>' }}"
  "{{- close if role == 'model' }}{{ '\\n' }}",
)

# A call ends with the header of its result, and the answer goes on in the same turn.
GEMMA4 = r"""
{%- macro show(value) %}
{%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is mapping %}{{ '{' }}
{%- for key, inner in value | items %}{{ key + ':' }}{{ show(inner) }}
{{- ',' if not loop.last }}{% endfor %}{{ '}' }}
{%- else %}{{ value | tojson }}
{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}
{{- '<|turn>system\n<|tool>' }}{{ tools | tojson }}{{ '<tool|><turn|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|tool_response>response:tool' }}{{ show({'value': message.content}) }}
{{- '<tool_response|>' }}
{%- elif message.role == 'assistant' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|turn>model\n' }}
{%- endif %}
{{- open }}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name }}{{ show(call.function.arguments) }}
{{- '<tool_call|>' }}
{%- endfor %}
{{- '<turn|>' if not message.tool_calls }}{{ close }}
{{- '\n' if not message.tool_calls }}
{%- else %}{{ '<|turn>' + message.role + '\n' + message.content + '<turn|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
{{- '<|turn>model\n' }}
{%- endif %}
"""

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
  "deepseek_v3": (DEEPSEEK_V3, "<s>", "</s>", "system parallel text"),
  "granite3": (GRANITE3, "", "<|end_of_text|>", "system parallel"),
  "ministral3": (MINISTRAL3, "<s>", "</s>", "system parallel beside text thinking"),
  "glm4": (GLM4, "", "<|endoftext|>", "system parallel beside text"),
  "command": (COMMAND, "<s>", "<|/turn|>", "system parallel beside text"),
  "gemma3": (GEMMA3, "<bos>", "<eos>", "system no_calls"),
}
# Their templates take only objects as arguments, and print them in other forms than
# JSON.
UNLIKE_JSON = {
  "olmo3": (OLMO3, "", "<|endoftext|>", "system parallel beside text"),
  "qwen35": (QWEN35, "", "<|im_end|>", "system parallel beside text"),
  "glm47": (GLM47, "", "<|endoftext|>", "system parallel beside text"),
  "gemma4": (GEMMA4, "<bos>", "<turn|>", "system parallel beside text"),
}
SPECIAL = [
  *("<|eom_id|>", "<|python_tag|>", "<|end|>", "<|user|>", "<|system|>", "<|tool|>"),
  *("<|assistant|>", "<|tool_call|>", "<|/tool_call|>", "<|observation|>", "<|call|>"),
  *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
  *("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<User>", "<Assistant>"),
  *("<calls_begin>", "<call_begin>", "<call_sep>", "<call_end>", "<calls_end>"),
  *("<outputs_begin>", "<output_begin>", "<output_end>", "<outputs_end>"),
  *(
    "[gMASK]",
    "<sop>",
    "<|turn|>",
    "<|/turn|>",
    "<|bot|>",
    "<|action|>",
    "<|/action|>",
  ),
  *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "[ARGS]"),
  *("[THINK]", "[/THINK]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
  *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
  *("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
  *("<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>", "<channel|>"),
  *("<|response|>", "<|/response|>", "<|result|>", "<|/result|>"),
]


def raw_tokenizer():
  raw = toys_text.bpe()
  raw.add_special_tokens(SPECIAL)
  return raw


def tokenizer_of(name):
  source, bos, eos, _ = {**TEMPLATES, **UNLIKE_JSON}[name]
  return TokenizerAdapter(
    raw_tokenizer(), chat_template=source, bos_token=bos, eos_token=eos
  )
