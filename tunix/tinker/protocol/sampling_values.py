"""Values of a sampling request, checked before the request is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.run.arrays import STOP_IDS
from tunix.tinker.errors import NotServedError, TinkerError
from tunix.tinker.protocol import fields
from tunix.utils import checks

_MOST_SAMPLES = 1024  # of one request
_UNSERVED = {  # field -> what to do
  "target_prompt_logprobs": "Leave it out",
  "prompt_alt_tokens_k": "Leave it out",
  "record_stability_info": "Train with another loss_fn than stable_reinforce, such as "
  "cispo, and leave it out",
}


def check(
  args: Mapping[str, Any], prompt: np.ndarray, engine: EngineConfig, most_tokens: int
) -> dict[str, Any]:
  """Returns the arguments of a sampling request, with defaults.

  Args:
    args: fields of the request.
    prompt: ids of the prompt.
    engine: limits of the engine.
    most_tokens: see `TinkerSettings.max_request_tokens`.

  Raises:
    NotServedError: a field that this service does not have.
    TinkerError: a value that is out of range.
  """
  for name, remedy in _UNSERVED.items():
    if args.get(name):
      raise NotServedError(
        f"{name} is {str(args[name])[:80]}, which this service does not have; expected "
        f"no value. {remedy}"
      )
  most, most_tops = engine.max_tokens, engine.max_top_logprobs
  if not 1 <= prompt.size < most:
    raise TinkerError(
      f"the prompt has {prompt.size} tokens; expected 1 to {most - 1}. Shorten it"
    )
  values = args.get("sampling_params")
  params = {} if values is None else fields.table(args, "sampling_params")
  room = most - prompt.size
  top_k, top_p = params.get("top_k", -1), params.get("top_p", 1.0)
  count = fields.whole(args, "num_samples", 1, least=1, most=_MOST_SAMPLES)
  tokens = fields.whole(params, "max_tokens", room, least=1, most=most)
  tops = fields.whole(args, "topk_sample_logprobs", 0, most=most_tops)
  if count * tokens * max(1, tops) > most_tokens:
    raise TinkerError(
      f"num_samples is {count}, max_tokens {tokens} and topk_sample_logprobs {tops}; "
      f"expected a product of at most {most_tokens}. Send several requests"
    )
  return {
    "num_samples": count,
    "max_tokens": tokens,
    "temperature": params.get("temperature", 1.0),
    "top_k": None if top_k in (-1, None) else top_k,
    "top_p": None if top_p in (1, None) and top_p is not True else top_p,
    "seed": fields.whole(params, "seed", None, most=int(checks.SEED.high)),
    "prompt_logprobs": fields.flag(args, "prompt_logprobs", False),
    "topk_prompt": fields.whole(args, "topk_prompt_logprobs", 0, most=most_tops),
    "topk_sample": tops,
    "last_n": fields.whole(
      args, "prompt_logprobs_last_n", None, least=1, most=max(prompt.size - 1, 1)
    ),
    **_stops(params.get("stop")),
  }


def _stops(stop: object) -> dict[str, Any]:
  """Returns `stop_ids` and `stop_strings` of a request: a text, texts, or ids."""
  stops = [stop] if isinstance(stop, str) else stop
  if stops is None or stops == []:
    return {"stop_ids": None if stops is None else (), "stop_strings": ()}
  if isinstance(stops, list) and all(isinstance(x, str) for x in stops):
    return {"stop_ids": None, "stop_strings": tuple(stops)}
  if isinstance(stops, list) and all(fields.is_whole(x) for x in stops):
    if len(stops) > STOP_IDS:
      raise TinkerError(
        f"stop has {len(stops)} ids; expected at most {STOP_IDS}. Give fewer"
      )
    return {"stop_ids": tuple(stops), "stop_strings": ()}
  raise TinkerError(
    f"stop is {str(stop)[:80]!r}; expected a text, a list of texts or a list of ids"
  )
