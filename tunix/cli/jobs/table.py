"""The jobs of `tunix train`, by the key `job`; a run without it has the first."""

from __future__ import annotations

from tunix.cli.jobs import distill, kto, preference, rl, sft
from tunix.cli.jobs.job import Job

JOBS: dict[str, Job] = {
  "sft": sft.SFT,
  "dpo": preference.DPO,
  "orpo": preference.ORPO,
  "kto": kto.KTO,
  "reward": preference.REWARD,
  "distill": distill.DISTILL,
  "grpo": rl.GRPO,
  "ppo": rl.PPO,
}
