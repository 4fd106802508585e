"""Environments of verifiers that have `rollout`: `ToolEnv`, `MultiTurnEnv` and others.

These are the environments of verifiers before 0.3, which 0.3 still has. Tasks of 0.3
draw by the server, see docs/guides/serving.md.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

from tunix.rl.env.adapters.openai_client import ClientEnvironment
from tunix.rl.env.env import EnvError
from tunix.utils.optional import require


class VerifiersEnvironment(ClientEnvironment):
  """A rollout of an environment of verifiers, as an `Env`.

  The environment draws through a client of OpenAI that reaches the policy, and its
  rubric gives the reward at the end.

  Args:
    environment: a `verifiers.Environment`, which many episodes may share.
    row: a row of its data: "prompt" (messages), and "answer", "info" or "task" if its
      rubric reads them.
  """

  def __init__(self, environment: Any, row: Mapping[str, Any]):
    super().__init__(self._rollout)
    self._environment = environment
    self._row = {"example_id": 0, **row}

  async def _rollout(self, client: Any) -> tuple[float, dict[str, Any]]:
    rollout = self._environment.rollout
    state = await rollout(dict(self._row), _client_of(client), "policy", {})
    if state.get("error") is not None:
      raise EnvError(f"the rollout failed: {state['error']!r}")
    score = self._environment.rubric.score_rollout
    takes_limit = "score_sem" in inspect.signature(score).parameters
    await score(
      state, **({"score_sem": contextlib.AsyncExitStack()} if takes_limit else {})
    )
    return float(state["reward"]), dict(state["metrics"] or {})


def _client_of(client: object) -> Any:
  """Returns the client in the form of the installed version."""
  verifiers = require("verifiers", "an environment of verifiers", "verifiers")
  if not hasattr(verifiers, "Client"):  # before 0.2
    return client
  purpose = "an environment of verifiers"
  module = "verifiers.clients.openai_chat_completions_client"
  clients = require(module, purpose, "'verifiers[all]'")
  return clients.OpenAIChatCompletionsClient(client)
