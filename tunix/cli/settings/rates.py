"""The learning rates of the jobs: their defaults, and the bands that pages advise."""

from __future__ import annotations

from typing import NamedTuple

from tunix.cli.settings.run import RunSettings


class Rate(NamedTuple):
  """The default of a learning rate, and the band around it that is usual."""

  default: float
  low: float
  high: float

  def __str__(self) -> str:
    default, low, high = map(readable, self)
    return f"{low} to {high} (default {default})"


class Rates(NamedTuple):
  """The learning rates of a job, for all weights and for adapters."""

  whole: Rate
  adapters: Rate

  def __str__(self) -> str:
    return f"{self.whole} for all weights, {self.adapters} for adapters"


# A larger rate leaves the reference within some steps.
_PAIRS = Rates(Rate(1e-6, 5e-7, 5e-6), Rate(1e-5, 5e-6, 5e-5))
_RL = Rates(Rate(1e-6, 1e-6, 5e-6), Rate(1e-5, 1e-5, 1e-4))

RATES: dict[str, Rates] = {
  "sft": Rates(Rate(1e-5, 5e-6, 2e-5), Rate(2e-4, 1e-4, 2e-4)),
  "dpo": _PAIRS,
  "orpo": Rates(Rate(5e-6, 5e-6, 1e-5), Rate(1e-4, 5e-5, 2e-4)),
  "kto": _PAIRS,
  "reward": Rates(Rate(1e-5, 5e-6, 2e-5), Rate(1e-4, 5e-5, 2e-4)),
  "distill": Rates(Rate(1e-5, 1e-5, 1e-4), Rate(1e-4, 1e-5, 1e-4)),
  "grpo": _RL,
  "ppo": _RL,
}


def rate_of(config: RunSettings) -> Rate:
  """Returns the rate for what a run trains."""
  rates = RATES[config.job]
  return rates.whole if config.lora is None else rates.adapters


def describe(*jobs: str) -> str:
  """Returns the rates of jobs as a sentence; those of one job without its name."""
  if len(jobs) == 1:
    return f"Usual rates: {RATES[jobs[0]]}."
  names: dict[Rates, list[str]] = {}
  for job in jobs:
    names.setdefault(RATES[job], []).append(job)
  parts = (f"{', '.join(jobs)}: {rates}" for rates, jobs in names.items())
  return f"Usual values by job: {'; '.join(parts)}."


def readable(rate: float) -> str:
  """Returns a rate of two digits as text, such as 2e-4."""
  digits, exponent = f"{rate:.1e}".split("e")
  return f"{float(digits):g}e{int(exponent)}"
