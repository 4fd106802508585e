"""The `Modelfile` with which `ollama create` imports a GGUF file."""

from __future__ import annotations

import datetime
import json

from tunix.generate.tokenizer_adapter import TokenizerAdapter

# Texts that no chat template contains.
_SYSTEM, _ANSWER = "(-system-)", "(-answer-)"
_QUESTIONS = "(-question-1-)", "(-question-2-)"
_DAYS = datetime.datetime(2001, 2, 3), datetime.datetime(2004, 5, 6)


def modelfile(tokenizer: TokenizerAdapter, base: str, adapter: str | None) -> str:
  """Returns a Modelfile.

  Args:
    tokenizer: the tokenizer, whose end tokens stop an answer.
    base: path of the model.
    adapter: path of the adapter file; None: there is none.
  """
  lines = ["# ollama create NAME -f Modelfile", f"FROM {base}"]
  if adapter is not None:
    lines.append(f"ADAPTER {adapter}")
  if (template := go_template(tokenizer)) is not None:
    lines.append(f'TEMPLATE """{template}"""')
  for end in tokenizer.eos_ids():
    text = tokenizer.decode([end], skip_special_tokens=False)
    lines.append(f'PARAMETER stop "{text}"')
  return "\n".join([*lines, ""])


def go_template(tokenizer: TokenizerAdapter) -> str | None:
  """Returns the chat template in the language of Ollama's templates.

  Ollama knows some chat templates by their source. Of any other it would send the last
  question alone. The texts between the messages are found by rendering a conversation.

  Returns:
    The template, for messages of the roles system, user and assistant. None if there is
    no chat template, or one whose texts depend on more than the order of the messages.
  """
  turns = [("user", _QUESTIONS[0]), ("assistant", _ANSWER), ("user", _QUESTIONS[1])]
  plain = _between(tokenizer, turns)
  if plain is None:
    return None
  to_answer, end = _literal(plain[1]), _literal(plain[3])
  if to_answer != end:
    is_last = "{{ if eq (len (slice $.Messages $i)) 1 }}"
    to_answer = f"{is_last}{end}{{{{ else }}}}{to_answer}{{{{ end }}}}"
  parts = [
    _set(":=", plain[0]),
    "{{ range $i, $message := .Messages }}",
    '{{ if eq .Role "user" }}{{ $before }}{{ .Content }}',
    to_answer,
    _set("=", plain[2]),
    '{{ else if eq .Role "assistant" }}{{ .Content }}',
  ]
  system = _between(tokenizer, [("system", _SYSTEM), *turns])
  if system is not None and system[2:] == plain[1:]:
    parts += [
      '{{ else if eq .Role "system" }}',
      _literal(system[0]),
      "{{ .Content }}",
      _set("=", system[1]),
    ]
  template = "".join([*parts, "{{ end }}", "{{ end }}"])
  return None if '"""' in template else template


def _set(sign: str, text: str) -> str:
  """Returns the action that sets the text before the next question."""
  return f"{{{{ $before {sign} {_quoted(text)} }}}}"


def _literal(text: str) -> str:
  """Returns the action that writes a text."""
  return f"{{{{ {_quoted(text)} }}}}"


def _between(
  tokenizer: TokenizerAdapter, turns: list[tuple[str, str]]
) -> list[str] | None:
  """Returns the texts before, between and after the contents of a conversation.

  BOS is left out if llama.cpp puts it there itself. The result is None if the template
  refuses the conversation, changes its contents or shows the date.
  """
  if not tokenizer.has_chat_template():
    return None
  messages = [{"role": role, "content": content} for role, content in turns]
  try:
    text, later = (tokenizer.apply_chat_template(messages, now=x) for x in _DAYS)
  except ValueError:  # some templates have no system message
    return None
  if text != later or any(text.count(content) != 1 for _, content in turns):
    return None
  if tokenizer.add_bos and tokenizer.bos_token:
    text = text.removeprefix(tokenizer.bos_token)
  parts = []
  for _, content in turns:
    before, _, text = text.partition(content)
    parts.append(before)
  return [*parts, text]


def _quoted(text: str) -> str:
  """Returns a string literal of the template language."""
  return json.dumps(text, ensure_ascii=False)
