"""Fields of a request that say how tokens are drawn."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from tunix.generate.drawing import stops
from tunix.generate.drawing.params import SamplingParams
from tunix.generate.engine.request import Constraint, EngineRequest
from tunix.generate.engine.run import arrays
from tunix.serve.http.errors import bad
from tunix.serve.http.fields import Fields, is_whole, shown
from tunix.serve.openai.context import Context, as_prompt

# Fields of the field's other servers that this one does not have. Only values without
# an effect are accepted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "frequency_penalty": (0,),
  "presence_penalty": (0,),
  "repetition_penalty": (1,),
  "length_penalty": (1,),
  "use_beam_search": (False,),
  "min_tokens": (0,),
  "include_stop_str_in_output": (False,),
  "spaces_between_special_tokens": (True,),
  "bad_words": ([],),
  "allowed_token_ids": (None,),
  "truncate_prompt_tokens": (None,),
  "logits_processors": (None,),
  "thinking_token_budget": (None,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """The rules of a call's completions.

  Attributes:
    n: completions of each prompt.
    params: the rules of drawing and ending.
    options: further fields of `EngineRequest`.
  """

  n: int
  params: SamplingParams
  options: dict[str, Any]

  def request(self, prompt: Any, max_tokens: int, **options: object) -> EngineRequest:
    """Returns the request of one prompt.

    Raises:
      ApiError: 400 if the options contradict each other.
    """
    with _refusals():
      return EngineRequest.of(
        self.params,
        prompt=as_prompt(prompt),
        max_tokens=max_tokens,
        num_samples=self.n,
        **{**self.options, **options},
      )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
  """Raises the errors of rules and requests as ApiErrors, with status 400."""
  try:
    yield
  except (TypeError, ValueError) as error:
    raise bad(None, str(error), "invalid_request") from error


def read_sampling(fields: Fields, context: Context, prompts: int = 1) -> Sampling:
  """Takes the fields of sampling.

  Args:
    fields: fields of the request.
    context: the server.
    prompts: number of prompts of the call.

  Raises:
    ApiError: 400 for a wrong field.
  """
  n = fields.whole("n", 1, low=1)
  most = context.settings.max_choices
  if n * prompts > most:
    raise bad(
      fields.name("n"),
      f"{prompts} prompts with n={n} are {n * prompts} completions, and this server "
      f"takes {most} in a request. Send several requests",
    )
  fields.neutral(best_of=(n, None), **_NEUTRAL)
  seed = fields.whole("seed", low=-(2**63), high=2**64 - 1)
  with _refusals():
    params = SamplingParams(
      **_read_filters(fields),
      seed=None if seed is None else seed % 2**32,
      eos_tokens=_read_stop_ids(fields, context),
      stop_strings=_read_stops(fields),
    )
  options = {
    "logit_bias": _read_bias(fields),
    "priority": fields.whole("priority", 0, low=-(2**31)),
    "constraint": read_constraint(fields, context),
  }
  return Sampling(n=n, params=params, options=options)


def _read_filters(fields: Fields) -> dict[str, Any]:
  temperature = fields.number("temperature", 1.0)
  top_p, min_p = fields.number("top_p", 1.0, high=1), fields.number("min_p", 0, high=1)
  top_k = fields.whole("top_k", 0, low=-1)
  if top_p == 0:
    raise bad("top_p", "top_p is 0, expected a number above 0 and up to 1")
  if temperature == 0:  # the most likely token passes every filter
    return {"temperature": 0.0}
  filters = {
    "top_p": None if top_p == 1 else top_p,
    "min_p": min_p or None,
    "top_k": top_k if top_k > 0 else None,
  }
  return {"temperature": temperature, **filters}


def _read_stops(fields: Fields) -> tuple[str, ...]:
  texts = fields.texts("stop", stops.MOST)
  try:
    stops.check(texts, fields.name("stop"))
  except ValueError as error:
    raise bad(fields.name("stop"), str(error), "invalid_value") from error
  return texts


def _read_stop_ids(fields: Fields, context: Context) -> tuple[int, ...] | None:
  """Returns the ids that end a completion; None: those of the tokenizer."""
  more = fields.wholes("stop_token_ids", arrays.STOP_IDS) or []
  ignores = fields.flag("ignore_eos")
  if not more and not ignores:
    return None
  ends = () if ignores else context.tokenizer.eos_ids()
  return tuple(dict.fromkeys((*ends, *more)))


def _read_bias(fields: Fields) -> dict[int, float]:
  bias, biases = {}, fields.object("logit_bias")
  if len(biases) > arrays.BIASES:
    raise bad(
      "logit_bias",
      f"logit_bias has {len(biases)} ids, expected at most {arrays.BIASES}",
      "invalid_value",
    )
  for key, value in biases.items():
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_id = key.isascii() and key.isdigit() and len(key) < 11
    if not (is_id and is_number and -100 <= value <= 100):
      raise bad(
        "logit_bias",
        f"logit_bias has the entry {shown(key)}: {shown(value)}, expected a token id "
        "and a number from -100 to 100",
        "invalid_value",
      )
    bias[int(key)] = float(value)
  return bias


def read_constraint(fields: Fields, context: Context) -> Constraint | None:
  """Takes `response_format` and `structured_outputs`.

  Raises:
    ApiError: 400 if a constraint is malformed, cannot be enforced, or this server has
      no constraints.
  """
  methods = (
    _response_format(fields.object("response_format")),
    _structured_outputs(fields.object("structured_outputs")),
  )
  constraints = [method for method in methods if method is not None]
  if len(constraints) > 1:
    raise bad("response_format", "response_format and structured_outputs are both set")
  if not constraints:
    return None
  if context.grammars is None:
    raise bad(
      "response_format",
      "this server has no constraints: it was started without the extra 'grammar'. "
      "Leave response_format out",
      "unsupported_parameter",
    )
  name, *values = constraints[0]
  try:
    return getattr(context.grammars, name)(*values)
  except (TypeError, ValueError) as error:
    raise bad("response_format", str(error), "invalid_constraint") from error


def _response_format(form: dict[str, Any]) -> tuple[Any, ...] | None:
  """Returns the method of `Grammars` and its arguments."""
  if not form:
    return None
  fields = Fields(form, "response_format.")
  kind = fields.text("type")
  method: tuple[Any, ...] | None = None
  if kind == "json_object":
    method = ("json_object",)
  elif kind == "json_schema":
    inner = Fields(fields.object("json_schema"), "response_format.json_schema.")
    for name in ("name", "description"):
      inner.text(name)
    inner.flag("strict")  # a schema is always enforced
    method = ("json_schema", inner.raw("schema"))
    inner.end()
  elif kind == "regex":
    method = ("regex", fields.raw("regex"))
  elif kind != "text":
    raise bad(
      "response_format.type",
      f"response_format.type is {shown(kind)}, expected text, json_object, "
      "json_schema or regex",
      "invalid_value",
    )
  fields.end()
  return method


def _structured_outputs(form: dict[str, Any]) -> tuple[Any, ...] | None:
  """Returns the method of `Grammars` and its arguments."""
  if not form:
    return None
  fields = Fields(form, "structured_outputs.")
  kinds = {"json": "json_schema", "regex": "regex", "choice": "choice"}
  forms: list[tuple[Any, ...]] = [
    (kinds[key], fields.raw(key)) for key in kinds if fields.has(key)
  ]
  if fields.flag("json_object"):
    forms.append(("json_object",))
  fields.end()
  if len(forms) != 1:
    raise bad(
      "structured_outputs",
      f"structured_outputs has {len(forms)} constraints, expected one of json, regex, "
      "choice and json_object",
    )
  return forms[0]


def read_top(fields: Fields, field: str, context: Context) -> int | None:
  """Takes a number of most likely tokens.

  Raises:
    ApiError: 400 if it is no integer, or more than the engine has.
  """
  most = getattr(context.engine.config, "max_top_logprobs", 20)
  value = fields.raw(field)
  if value is None or (is_whole(value) and 0 <= value <= most):
    return value
  name = fields.name(field)
  raise bad(
    name,
    f"{name} is {shown(value)}, expected an integer from 0 to {most}",
    "invalid_value",
  )
