"""Parts that several answers have: reasons, usage, options of a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tunix.generate.engine.request import Ticket
from tunix.serve.http.fields import Fields

_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort"}


def finish_reason(reason: str | None) -> str | None:
  """Returns OpenAI's word for why a completion ended; "abort" is vLLM's."""
  return None if reason is None else _REASONS.get(reason, reason)


def usage(tickets: Sequence[Ticket], completion_tokens: int) -> dict[str, Any]:
  """Returns `usage`. A prompt counts once, however many completions it has."""
  prompt_tokens = sum(len(ticket.request.prompt) for ticket in tickets)
  return {
    "prompt_tokens": prompt_tokens,
    "completion_tokens": completion_tokens,
    "total_tokens": prompt_tokens + completion_tokens,
    "prompt_tokens_details": {
      "cached_tokens": sum(ticket.cached_tokens for ticket in tickets)
    },
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOptions:
  """The form in which an answer is sent.

  Attributes:
    streams: as events while it grows.
    with_usage: end the stream with an event that has the usage.
  """

  streams: bool
  with_usage: bool


def read_stream(fields: Fields) -> StreamOptions:
  """Takes `stream` and `stream_options`."""
  streams = fields.flag("stream")
  options = Fields(fields.object("stream_options"), "stream_options.")
  with_usage = options.flag("include_usage")
  options.neutral(continuous_usage_stats=(False,))
  options.raw("include_obfuscation")  # padding of OpenAI's, without a meaning here
  options.end()
  return StreamOptions(streams=streams, with_usage=with_usage)


def ignored_header(fields: Fields) -> dict[str, str]:
  """Returns the header that names accepted fields without an effect."""
  names = ", ".join(fields.ignored)
  return {"x-ignored-fields": names} if names else {}
