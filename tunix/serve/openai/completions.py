"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from tunix.generate.tokens import Completion, Delta, Tokens
from tunix.serve.http import forms
from tunix.serve.http.bodies import Call
from tunix.serve.http.errors import bad
from tunix.serve.http.fields import Fields, is_ids, missing, shown
from tunix.serve.openai import logprobs
from tunix.serve.openai.context import Context, new_id
from tunix.serve.openai.logprobs import Scored
from tunix.serve.openai.running import Part, Run
from tunix.serve.openai.sampling import read_sampling, read_top

_DEFAULT_TOKENS = 16  # OpenAI's


class CompletionJob:
  """A call of the route; see `calls.Job`."""

  def __init__(self, call: Call, context: Context):
    fields = Fields(call.body)
    self._context = context
    self.model = fields.text("model", context.settings.model_name)
    adapter = context.adapter(self.model)
    self._prompts = _read_prompts(fields, context)
    sampling = read_sampling(fields, context, len(self._prompts))
    self._echo, self._top = fields.flag("echo"), read_top(fields, "logprobs", context)
    self._prompt_top = read_top(fields, "prompt_logprobs", context)
    self._as_ids = fields.flag("return_tokens_as_token_ids")
    self._with_ids = fields.flag("return_token_ids")
    self.stream = forms.read_stream(fields)
    max_tokens = fields.whole("max_tokens")
    fields.neutral(suffix=("",), skip_special_tokens=(True,))
    self.id = fields.text("request_id") or new_id("cmpl")
    fields.end()
    self.headers = forms.ignored_header(fields)
    if max_tokens == 0 and not self._echo:
      raise bad("max_tokens", "max_tokens is 0, which needs echo: true, or at least 1")
    # The engine draws at least one token, which an answer with max_tokens 0 leaves out.
    self._only_prompt = max_tokens == 0
    scores_prompt = self._prompt_top is not None or (
      self._echo and self._top is not None
    )
    self._n, self._created = sampling.n, int(time.time())
    self.requests = [
      sampling.request(
        ids,
        self._room(ids, max_tokens),
        adapter=adapter,
        logprobs=self._top is not None,
        top_logprobs=max(self._top or 0, self._prompt_top or 0),
        prompt_logprobs=scores_prompt,
      )
      for ids, _ in self._prompts
    ]
    # State of a stream, by choice that has begun.
    self._offsets: dict[int, logprobs.Offsets] = {}
    self._tokens = 0

  def _room(self, ids: list[int], max_tokens: int | None) -> int:
    """Returns the number of tokens to ask the engine for."""
    if max_tokens is None:
      return min(_DEFAULT_TOKENS, self._context.room(ids, None))
    return self._context.room(ids, max(1, max_tokens))

  def answer(self, run: Run, rows: list[list[Completion]]) -> Any:
    choices = []
    for number, row in enumerate(rows):
      for sample, whole in enumerate(row):
        choices.append(self._choice(run, number, sample, whole, is_first=True))
    return {
      **self._head(),
      "choices": choices,
      "usage": forms.usage(run.tickets, self._tokens),
    }

  def chunks(self, run: Run, part: Part) -> list[Any]:
    sample = part.delta.sample
    is_first = part.request * self._n + sample not in self._offsets
    choice = self._choice(run, part.request, sample, part.delta, is_first=is_first)
    usage = {"usage": None} if self.stream.with_usage else {}
    return [{**self._head(), "choices": [choice], **usage}]

  def last_chunks(self, run: Run) -> list[Any]:
    if not self.stream.with_usage:
      return []
    usage = forms.usage(run.tickets, self._tokens)
    return [{**self._head(), "choices": [], "usage": usage}]

  def _head(self) -> dict[str, Any]:
    return {
      "id": self.id,
      "object": "text_completion",
      "created": self._created,
      "model": self.model,
    }

  def _choice(
    self,
    run: Run,
    number: int,
    sample: int,
    grown: Delta | Completion,
    is_first: bool,
  ) -> dict[str, Any]:
    """Returns one of `choices`, for all of a completion or a part of it."""
    index = number * self._n + sample
    ids, prompt_text = self._prompts[number]
    echoes = self._echo and is_first
    tokens = [] if self._only_prompt else grown.ids.tolist()
    self._tokens += len(tokens)
    text = (self._prompt_text(ids, prompt_text) if echoes else "") + (
      "" if self._only_prompt else grown.text
    )
    reason = forms.finish_reason(grown.finish_reason)
    choice: dict[str, Any] = {
      "index": index,
      "text": text,
      "logprobs": None,
      "finish_reason": "length" if self._only_prompt and reason else reason,
    }
    offsets = self._offsets.setdefault(index, logprobs.Offsets(self._context.texts))
    if self._top is not None:
      choice["logprobs"] = self._logprobs(run, number, grown, echoes, offsets)
    if self._with_ids:
      choice["token_ids"] = tokens
      choice["prompt_token_ids"] = ids if is_first else None
    if self._prompt_top is not None and is_first:
      scored = self._scored_prompt(run, number, self._prompt_top)
      choice["prompt_logprobs"] = logprobs.prompt_form(scored, self._context.texts)
    return choice

  def _logprobs(
    self,
    run: Run,
    number: int,
    grown: Tokens,
    echoes: bool,
    offsets: logprobs.Offsets,
  ) -> dict[str, Any]:
    top = self._top or 0
    scored = Scored([], [])
    if echoes:
      scored = self._scored_prompt(run, number, top)
    if not self._only_prompt:
      scored += Scored.of(grown, top)
    return logprobs.completion_form(
      scored,
      self._context.texts,
      has_top=top > 0,
      as_ids=self._as_ids,
      offsets=offsets,
    )

  def _scored_prompt(self, run: Run, number: int, top: int) -> Scored:
    scores = run.tickets[number].prompt_scores
    assert scores is not None  # the engine scores a prompt before its first delta
    return Scored(self._prompts[number][0][:1], [None]) + Scored.of(scores, top)

  def _prompt_text(self, ids: list[int], text: str | None) -> str:
    return self._context.tokenizer.decode(ids) if text is None else text


def _read_prompts(
  fields: Fields, context: Context
) -> list[tuple[list[int], str | None]]:
  """Takes `prompt`: a text, texts, token ids, or lists of token ids.

  Returns:
    Token ids of each prompt, and its text if it was given as text.
  """
  prompt, adds = fields.raw("prompt"), fields.flag("add_special_tokens", True)
  if prompt is None:
    raise missing("prompt")
  items = [prompt] if isinstance(prompt, str) or is_ids(prompt) else prompt
  if not isinstance(items, list) or not items or prompt == []:
    raise _wrong(prompt)
  most = context.settings.max_choices
  if len(items) > most:
    raise bad("prompt", f"{len(items)} prompts, and this server takes {most} at once")
  texts = [item for item in items if isinstance(item, str)]
  if len(texts) == len(items):
    context.check_size(texts, "prompt")  # all, before the first is tokenized
    return [(context.prompt_ids(text, adds), text) for text in texts]
  lists = [item for item in items if isinstance(item, list) and is_ids(item)]
  if len(lists) == len(items):
    return [(ids, None) for ids in lists]
  raise _wrong(prompt)


def _wrong(prompt: object) -> Exception:
  return bad(
    "prompt",
    f"prompt is {shown(prompt)}, expected a text, a list of texts, a list of token ids "
    "or a list of lists of token ids",
    "invalid_value",
  )
