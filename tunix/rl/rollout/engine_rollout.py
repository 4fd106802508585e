"""What rollouts by an engine outside this process have in common: weights are sent,
and whether they arrived is seen in what the engine says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunix.generate.base_sampler import BaseSampler
from tunix.rl.placement import WeightSyncError
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.sampler_rollout import SamplerRollout

URL = 'the address of a running server, such as "http://localhost:8000"'
_PROBES = ((1, 2, 3, 4), (4, 3, 2, 1), (2, 2, 2, 2))
_PROBE_TOKENS = 8


class EngineRollout(SamplerRollout):
  """A sampler with `update_weights(model)`, in another process."""

  def __init__(self, sampler: BaseSampler, options: Mapping[str, Any] | None = None):
    super().__init__(sampler, options)
    self._last = ""

  def update_params(self, model: Any, version: Any) -> None:
    """Sends the weights.

    Raises:
      WeightSyncError: the policy changed, and the engine answers as before.
    """
    known = self.version
    if known is None or known.stamp != version.stamp:
      before = self._last or self.fingerprint()
      self._sampler.update_weights(model)
      self._last = self.fingerprint()
      if known is not None and self._last == before:
        raise WeightSyncError(
          f"training changed the policy (step {known.step} to {version.step}) "
          "and the engine answers as before: the weights did not reach it, or its "
          "dtype is too coarse for so small an update"
        )
    self.version = version

  def fingerprint(self) -> str:
    """Log-probs of what the engine says to a few fixed prompts."""
    out = self._sampler(
      [list(probe) for probe in _PROBES],
      _PROBE_TOKENS,
      eos_tokens=[],
      return_logprobs=True,
    )
    logps = out.logprobs if out.logprobs is not None else out.sampling_logprobs
    rows = zip(out.tokens, logps or ())
    return repr([(list(map(int, ids)), list(map(float, row))) for ids, row in rows])


def take_options(
  config: RolloutConfig,
  engine: str,
  required: Mapping[str, str],
  optional: Sequence[str],
) -> dict[str, Any]:
  """The `engine_options` of a config, which the caller may change.

  Args:
    config: holds them.
    engine: for messages.
    required: what each option is that must be there, for the message.
    optional: names of the others.

  Raises:
    ValueError: one that the engine does not have, or one that is missing.
  """
  options, known = dict(config.engine_options), (*required, *optional)
  if unknown := sorted(options.keys() - set(known)):
    raise ValueError(
      f"engine_options has {unknown[0]!r}, which {engine} does not know: choose from "
      f"{', '.join(known)}"
    )
  for name, meaning in required.items():
    if name not in options:
      raise ValueError(f"{engine} needs engine_options[{name!r}]: {meaning}")
  return options
