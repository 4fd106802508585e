"""Which keys each job reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tunix.cli.schema_preference import PREFERENCE_JOBS, preference_remedies
from tunix.cli.schema_rl import RL_JOBS, RL_SECTIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """Keys of a job.

  Attributes:
    sections: that it reads, of those that not all jobs do.
    unread: further keys that it does not read, and what to do instead.
  """

  sections: tuple[str, ...] = ()
  unread: Mapping[str, str] = dataclasses.field(default_factory=dict)


# What the fine-tuning of given answers alone reads.
_NOT_RL = {
  "data.max_length": "use rollout.max_prompt_length and rollout.max_tokens_to_generate",
  "data.packing": "leave it out",
  "data.scan_limit": "leave it out: every prompt is checked",
  "data.num_threads": "leave it out",
  "training.micro_batch_size": "use rl.train_micro_batch_size, which counts prompts",
}
_CRITIC = {
  "rl.critic": "ppo has a critic",
  "rl.critic_learning_rate": "ppo has a critic",
}
_VARIANT = {"algorithm.name": "variants belong to the job 'grpo'"}
_SAMPLER = {
  f"rollout.{name}": "the student samples with temperature, top_p and top_k alone"
  for name in ("eval_temperature", "min_p", "stop_strings", "engine", "engine_options")
}
_NOT_PREFERENCE = {
  "data.max_length": "use preference.max_prompt_length and max_response_length",
  "data.packing": "leave it out",
}

JOBS: dict[str, Job] = {
  "sft": Job(),
  **{
    name: Job(
      sections=("preference",), unread=_NOT_PREFERENCE | preference_remedies(name)
    )
    for name in PREFERENCE_JOBS
  },
  "distill": Job(sections=("distill", "rollout"), unread=_SAMPLER),
  "grpo": Job(sections=RL_SECTIONS, unread=_NOT_RL | _CRITIC),
  "ppo": Job(sections=RL_SECTIONS, unread=_NOT_RL | _VARIANT),
}
_OWN_SECTIONS = {section for job in JOBS.values() for section in job.sections}


def check_job(job: str, given: dict[str, Any], defaults: dict[str, Any]) -> None:
  """Refuses keys that the job does not read.

  Args:
    job: of the run.
    given, defaults: values by dotted key.

  Raises:
    ValueError: such a key, and what to use instead.
  """
  for key in defaults:
    if given[key] == defaults[key]:
      continue
    section = key.split(".")[0]
    if section in _OWN_SECTIONS and section not in JOBS[job].sections:
      owners = [name for name, other in JOBS.items() if section in other.sections]
      raise ValueError(
        f"{key} is {given[key]!r} and job is {job!r}, which has no such section: it "
        f"belongs to the job{'s' * (len(owners) > 1)} {' and '.join(owners)}"
      )
    if key in JOBS[job].unread:
      raise ValueError(
        f"{key} is {given[key]!r}, and the job {job!r} does not read it: "
        f"{JOBS[job].unread[key]}"
      )
  if job in RL_JOBS and given["data.overlong"] == "truncate":
    raise ValueError(
      "data.overlong is 'truncate', and half a prompt is another question: use 'error' "
      "or 'drop'"
    )
