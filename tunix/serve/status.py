"""Routes about the server itself: models, health, metrics and the page."""

from __future__ import annotations

import pathlib
from typing import Any

from tunix.generate.engine.request import EngineDead
from tunix.serve.http.bodies import Answer, Call
from tunix.serve.http.errors import ApiError
from tunix.serve.openai.context import Context
from tunix.serve.openai.running import check_alive

_PAGE = pathlib.Path(__file__).parent / "status_page.html"
# The page has its script and style inside, and speaks with this server alone.
_PAGE_HEADERS = {
  "Content-Security-Policy": (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
  ),
  "X-Content-Type-Options": "nosniff",
}


async def models(call: Call, context: Context) -> Answer:
  """Lists the model and its adapters."""
  names = (context.settings.model_name, *context.adapters)
  return Answer(
    content={"object": "list", "data": [_card(context, name) for name in names]}
  )


async def model(call: Call, context: Context) -> Answer:
  """Returns one model."""
  name = call.query["model"]
  context.adapter(name)
  return Answer(content=_card(context, name))


def _card(context: Context, name: str) -> dict[str, Any]:
  base = context.settings.model_name
  return {
    "id": name,
    "object": "model",
    "created": context.created,
    "owned_by": "tunix",
    "max_model_len": context.max_tokens,
    "parent": None if name == base else base,
  }


async def health(call: Call, context: Context) -> Answer:
  """Returns 200 while the engine, or at least one of several, runs."""
  return state(_problem(context), context.driver.degraded)


async def ready(call: Call, context: Context) -> Answer:
  """Returns 200 while new requests are served at once."""
  problem = _problem(context)
  if problem is None and context.gate.is_draining:
    problem = "the server is shutting down"
  if problem is None and context.driver.is_paused:
    problem = "the engine is paused"
  return state(problem, context.driver.degraded)


def _problem(context: Context) -> str | None:
  try:
    check_alive(context.driver)
  except EngineDead as error:
    return str(error)
  return None


def state(problem: str | None, degraded: str | None) -> Answer:
  """Returns the answer of a probe.

  Args:
    problem: why nothing is served; None: something is.
    degraded: why a part does not serve; None: all parts do.
  """
  if problem is not None:
    return Answer(status=503, content={"status": "unavailable", "reason": problem})
  if degraded is not None:
    return Answer(content={"status": "degraded", "reason": degraded})
  return Answer(content={"status": "ok"})


async def metrics(call: Call, context: Context) -> Answer:
  """Returns the metrics for Prometheus."""
  return Answer(content=context.metrics.text(), media_type=context.metrics.media_type)


async def page(call: Call, context: Context) -> Answer:
  """Returns the web page."""
  if not _PAGE.is_file():
    raise ApiError(404, "this installation has no page: use the routes below /v1")
  return Answer(
    content=_PAGE.read_bytes(),
    media_type="text/html; charset=utf-8",
    headers=_PAGE_HEADERS,
  )
