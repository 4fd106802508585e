"""Routes of token ids: tokenize, detokenize, and generate without texts."""

from __future__ import annotations

import itertools
import time
import uuid
from typing import Any

import numpy as np

from tunix.generate.tokens import Completion, Delta
from tunix.serve.http import forms
from tunix.serve.http.bodies import Answer, Call
from tunix.serve.http.errors import bad
from tunix.serve.http.fields import HARMLESS, Fields, missing
from tunix.serve.openai import logprobs
from tunix.serve.openai.chat import read_prompt
from tunix.serve.openai.context import Context
from tunix.serve.openai.logprobs import Scored
from tunix.serve.openai.running import Part, Run
from tunix.serve.openai.sampling import read_sampling, read_top

# Fields of vLLM's sampling parameters about how its server works, not what it draws.
_HARMLESS_PARAMS = HARMLESS | {
  *("flat_logprobs", "extra_args", "output_kind", "skip_clone"),
  "routed_experts_prompt_start",  # verifiers' clients send it with each further turn
}


def tokenize(call: Call, context: Context) -> Answer:
  """Returns the token ids of a text or a conversation."""
  fields = Fields(call.body)
  context.adapter(fields.text("model"))
  with_texts = fields.flag("return_token_strs")
  if fields.has("messages"):
    ids = read_prompt(fields, context).ids
  else:
    prompt = fields.text("prompt")
    if prompt is None:
      raise missing("prompt")
    ids = context.prompt_ids(prompt, fields.flag("add_special_tokens", True))
  fields.end()
  content: dict[str, Any] = {
    "count": len(ids),
    "max_model_len": context.max_tokens,
    "tokens": ids,
  }
  if with_texts:
    content["token_strs"] = [context.texts.text(token) for token in ids]
  return Answer(content=content, headers=forms.ignored_header(fields))


def detokenize(call: Call, context: Context) -> Answer:
  """Returns the text of token ids."""
  fields = Fields(call.body)
  context.adapter(fields.text("model"))
  ids = fields.wholes("tokens", context.max_tokens)
  if ids is None:
    raise missing("tokens")
  fields.end()
  try:
    text = context.tokenizer.decode(ids, skip_special_tokens=False)
  except (IndexError, KeyError, OverflowError, ValueError) as error:
    raise bad("tokens", "tokens has ids that the tokenizer does not know") from error
  return Answer(content={"prompt": text}, headers=forms.ignored_header(fields))


async def tokenizer_info(call: Call, context: Context) -> Answer:
  """Returns the special tokens and the chat template, as lm-eval asks for them."""
  tokenizer = context.tokenizer
  pad = tokenizer.pad_id()
  texts = {number: text for text, number in tokenizer.special_tokens().items()}
  return Answer(
    content={
      "tokenizer_class": "TokenizerAdapter",
      "bos_token": tokenizer.bos_token,
      "eos_token": tokenizer.eos_token,
      "pad_token": None if pad is None else texts.get(pad),
      "chat_template": tokenizer.chat_template,
    }
  )


class GenerateJob:
  """A call of /inference/v1/generate; see `calls.Job`."""

  def __init__(self, call: Call, context: Context):
    fields = Fields(call.body)
    self._context = context
    self.model = fields.text("model", context.settings.model_name)
    adapter = context.adapter(self.model)
    ids = fields.wholes("token_ids")
    if ids is None:
      raise missing("token_ids")
    if not fields.has("sampling_params"):
      raise missing("sampling_params")
    params = Fields(fields.object("sampling_params"), "sampling_params.")
    priority = fields.whole("priority", 0, low=-(2**31))
    self.id = fields.text("request_id") or uuid.uuid4().hex
    self._mode = fields.text("output_mode", "tokens")
    if self._mode not in ("tokens", "text"):
      raise bad(
        "output_mode", f"output_mode is {self._mode!r}, expected tokens or text"
      )
    self._with_ids = fields.flag("return_token_ids")
    self.stream = forms.read_stream(fields)
    fields.neutral(
      features=(None,),
      content_parts=(None,),
      kv_transfer_params=(None,),
      ec_transfer_params=(None,),
    )
    fields.end()
    sampling = read_sampling(params, context)
    self._top = read_top(params, "logprobs", context)
    self._prompt_top = read_top(params, "prompt_logprobs", context)
    max_tokens = params.whole("max_tokens", low=1)
    for name in ("detokenize", "skip_special_tokens"):
      params.flag(name)  # ids are the answer, with or without their text
    params.end(_HARMLESS_PARAMS)
    fields.ignored += params.ignored
    self.headers = forms.ignored_header(fields)
    self._ids, self._created, self._tokens = ids, int(time.time()), 0
    self._begun: set[int] = set()
    self.requests = [
      sampling.request(
        ids,
        context.room(ids, max_tokens),
        adapter=adapter,
        logprobs=self._top is not None,
        top_logprobs=max(self._top or 0, self._prompt_top or 0),
        prompt_logprobs=self._prompt_top is not None,
        priority=priority,
      )
    ]

  def answer(self, run: Run, rows: list[list[Completion]]) -> Any:
    choices = [self._choice(i, whole) for i, whole in enumerate(rows[0])]
    content = {
      "request_id": self.id,
      "created": self._created,
      "model": self.model,
      "output_mode": self._mode,
      "choices": choices,
      "usage": forms.usage(run.tickets, self._tokens),
      "prompt_logprobs": self._prompt_logprobs(run),
    }
    return content | ({"prompt_token_ids": self._ids} if self._with_ids else {})

  def chunks(self, run: Run, part: Part) -> list[Any]:
    choice = self._choice(part.delta.sample, part.delta)
    chunk = self._chunk([choice])
    if not self._begun:
      if self._with_ids:
        chunk["prompt_token_ids"] = self._ids
      if self._prompt_top is not None:
        chunk["prompt_logprobs"] = self._prompt_logprobs(run)
    self._begun.add(part.delta.sample)
    return [chunk]

  def last_chunks(self, run: Run) -> list[Any]:
    if not self.stream.with_usage:
      return []
    return [self._chunk([]) | {"usage": forms.usage(run.tickets, self._tokens)}]

  def _chunk(self, choices: list[Any]) -> dict[str, Any]:
    return {
      "request_id": self.id,
      "output_mode": self._mode,
      "choices": choices,
      "usage": None,
    }

  def _choice(self, index: int, grown: Delta | Completion) -> dict[str, Any]:
    tokens = grown.ids.tolist()
    self._tokens += len(tokens)
    choice: dict[str, Any] = {
      "index": index,
      "token_ids": tokens,
      "logprobs": None,
      "finish_reason": forms.finish_reason(grown.finish_reason),
      "weight_versions": spans(_numbers(grown.versions)),
    }
    if self._mode == "text":
      choice["text"] = grown.text
    if self._top is not None:
      choice["logprobs"] = self._logprobs(Scored.of(grown, self._top))
      choice["sampling_logprobs"] = [
        max(logprobs.LOWEST, x) for x in _numbers(grown.sampling_logps)
      ]
    return choice

  def _logprobs(self, scored: Scored) -> dict[str, Any]:
    if self._mode == "text":
      return logprobs.chat_form(scored, self._context.texts, as_ids=False)
    return logprobs.token_form(scored)

  def _prompt_logprobs(self, run: Run) -> Any:
    scores = run.tickets[0].prompt_scores
    if self._prompt_top is None or scores is None:
      return None
    rest = Scored.of(scores, self._prompt_top)
    return logprobs.prompt_form(
      Scored(self._ids[:1], [None]) + rest, self._context.texts
    )


def _numbers(column: np.ndarray | None) -> list[Any]:
  """Returns the numbers of a column; a delta without tokens may lack it."""
  return [] if column is None else column.tolist()


def spans(versions: list[int]) -> list[dict[str, Any]]:
  """Returns the runs of equal versions, as half-open ranges of token numbers.

  Args:
    versions: version of the weights that drew each token.
  """
  runs, start = [], 0
  for version, group in itertools.groupby(versions):
    end = start + sum(1 for _ in group)
    runs.append({"version": str(version), "start": start, "end": end})
    start = end
  return runs
