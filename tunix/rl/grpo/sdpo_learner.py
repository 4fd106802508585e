"""SDPO: the policy reads a hint to its own completion and teaches itself (Hübotter et
al. 2026, arXiv:2601.20802).

The hint is another completion of the group with a high reward, feedback to the failed
completion, or both. A token's advantage is log pi(y_t | hint) - log pi(y_t): it is
positive where the hint makes the token more likely. Its expected gradient is that of
KL(pi, pi with the hint) at each prefix, as in `PolicyGradientStrategy`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal, get_args

import numpy as np

from tunix.data.records import RAW_PROMPT_COLUMN
from tunix.data.turns.teacher_prompts import check_template, filled, teacher_prompt
from tunix.generate.sizes import batching
from tunix.rl.common import Rollouts, TrainExample
from tunix.rl.env.conversation import Conversation
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.metrics import Mean
from tunix.rl.rl_cluster import RLCluster
from tunix.utils import checks
from tunix.utils.metric import Metric

Teacher = Literal["average", "current"]

METRICS = (
  Metric(
    "sdpo/hinted",
    "share",
    "completions with a hint",
    "train",
    "with the algorithm sdpo",
  ),
  Metric(
    "sdpo/reverse_kl",
    "nats",
    "mean of log pi - log pi with the hint over the tokens of completions with a hint",
    "train",
    "with the algorithm sdpo, if a completion has a hint",
  ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SDPOConfig(GRPOConfig):
  """GRPOConfig with the advantages of a teacher that reads hints.

  Attributes:
    distill_weight: weight of the teacher's advantages, in [0, 1]; the advantages of the
      group have the rest. A completion without a hint has 0 from the teacher.
    success_threshold: total reward from which a completion is a hint to the others of
      its group.
    feedback: name of the feedback to a completion: a key of `StepResult.logs` of the
      last turn of its episode; without environments a column of the data. A completion
      with a reward of at least success_threshold gets none. None: no feedback.
    teacher: weights of the teacher: "average", a moving average of the policy's, or
      "current", those before the update.
    teacher_rate: share of the new weights in the average after each update.
    template: the teacher's prompt, with {prompt} and {hints}.
    solution_template: hint with another completion at {solution}.
    feedback_template: hint with the feedback at {feedback}.

  Raises:
    ValueError: a value is out of range, or a template lacks its place.
  """

  beta: float = 0.0
  distill_weight: float = 1.0
  success_threshold: float = 1.0
  feedback: str | None = None
  teacher: Teacher = "average"
  teacher_rate: float = 0.05
  template: str = "{prompt}\n\n{hints}\n\nNow answer the question correctly."
  solution_template: str = "This answer is correct:\n\n{solution}"
  feedback_template: str = "An earlier answer was wrong. Feedback to it:\n\n{feedback}"

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, distill_weight=checks.SHARE, teacher_rate=checks.SHARE)
    if self.teacher not in get_args(Teacher):
      raise ValueError(
        f"teacher is {self.teacher!r}: choose one of {', '.join(get_args(Teacher))}"
      )
    check_template("template", self.template, ("prompt", "hints"))
    check_template("solution_template", self.solution_template, ("solution",))
    check_template("feedback_template", self.feedback_template, ("feedback",))


class SDPOLearner(GRPOLearner):
  """GRPO with dense advantages from a teacher that reads hints.

  The arguments are those of RLLearner. The prompts must be texts or messages.
  """

  reads_hints = True
  algo_config: SDPOConfig

  def __init__(
    self, rl_cluster: RLCluster, algo_config: SDPOConfig, *args: Any, **options: Any
  ):
    if algo_config.teacher == "average":  # before a checkpoint is read, which has it
      rl_cluster.actor_trainer.keep_average(algo_config.teacher_rate)
    super().__init__(rl_cluster, algo_config, *args, **options)

  def _with_advantages(
    self, rollouts: Rollouts, old: np.ndarray | None = None
  ) -> TrainExample:
    weight = self.algo_config.distill_weight
    grouped = rollouts.by_row(self._group_advantages(rollouts))[:, None]
    old, dense = self._dense_advantages(rollouts)
    return self._example(rollouts, (1 - weight) * grouped + weight * dense, old)

  def _dense_advantages(
    self, rollouts: Rollouts
  ) -> tuple[np.ndarray | None, np.ndarray]:
    """Returns the policy's log-probabilities and log pi(y | hint) - log pi(y), [B, R].

    The second is 0 in rows without a hint. The first is None if no row has one.
    """
    drawn = rollouts.completion_mask
    if rollouts.episode_rows > 1:
      raise ValueError(
        f"an episode has {rollouts.episode_rows} rows, whose later ones have no prompt "
        "for a hint. Set history to keep in the settings of episodes"
      )
    hints = hints_of(rollouts, self.algo_config)
    hinted = np.array([bool(hint) for hint in hints]) & drawn.any(1)
    share = Mean(float(hinted.mean()), len(hinted))
    self._measured.append({"sdpo/hinted": share})
    if not hinted.any():
      return None, np.zeros(drawn.shape, np.float32)
    with self._phases("scoring"):
      old = self._experience.old_logps(rollouts)
      taught = self.rl_cluster.get_old_per_token_logps(
        self._with_hints(rollouts, hints, hinted),
        tile_rows=self.algo_config.exact_tile_rows,
        average=self.algo_config.teacher == "average",
      )
    counted = drawn & hinted[:, None]
    dense = np.where(counted, taught - old, 0.0).astype(np.float32)
    gap = Mean(float(-dense[counted].mean(dtype=np.float64)), int(counted.sum()))
    self._measured.append({"sdpo/reverse_kl": gap})
    return old, dense

  def _with_hints(
    self, rollouts: Rollouts, hints: list[str], hinted: np.ndarray
  ) -> Rollouts:
    """Returns the completions after the prompts of the teacher."""
    ids = [
      self._teacher_ids(rollouts, row, hints[row])
      if hinted[row]
      else rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
      for row in range(len(hints))
    ]
    width = batching.bucket(max(map(len, ids)), batching.MIN_TOKENS)
    prompts, mask = batching.left_padded(ids, len(ids), width, 0)
    # The teacher's experts are its own: they were not recorded.
    routes = {"prompt_routes": None, "completion_routes": None}
    return dataclasses.replace(rollouts, prompt_ids=prompts, prompt_mask=mask, **routes)

  def _teacher_ids(self, rollouts: Rollouts, row: int, hint: str) -> np.ndarray:
    """Returns the prompt of a row with the hint, int32 [T]."""
    cluster, template = self.rl_cluster, self.algo_config.template
    if rollouts.episodes:
      episode = rollouts.episodes[row]
      first = list(
        itertools.takewhile(lambda m: m["role"] != "assistant", episode.messages)
      )
      if not first:
        raise ValueError(
          "the environment gives token ids, and a hint is put into messages. Use an "
          "environment with texts or messages, or another algorithm"
        )
      observed: Any = teacher_prompt(first, template, hints=hint)
      if not cluster.tokenizer.has_chat_template():
        observed = observed[-1]["content"]
      tools = getattr(episode.environment, "tool_schemas", ())
      ids = Conversation(cluster.tokenizer, tools).observe(observed)
      return np.asarray(ids, np.int32)
    batch, number = rollouts.batch, row // rollouts.group_size
    prompt = batch.columns.get(RAW_PROMPT_COLUMN, batch.prompts)[number]
    if not isinstance(prompt, str) and not isinstance(prompt[0], dict):
      raise ValueError(
        "a prompt is token ids; expected a text or messages, which a hint extends. "
        "Give the prompts as text"
      )
    return cluster.ids_of(teacher_prompt(prompt, template, hints=hint))


def hints_of(rollouts: Rollouts, config: SDPOConfig) -> list[str]:
  """Returns the hint to each of the P * G completions; "" for none.

  A completion never is its own hint. Of several good ones it gets the next one in its
  group, so that the hints of a group differ.

  Raises:
    ValueError: the data has no column `config.feedback`.
  """
  size, count = rollouts.group_size, len(rollouts.text)
  good = (rollouts.totals >= config.success_threshold).ravel()
  feedback = _feedback(rollouts, config.feedback)
  hints = []
  for row in range(count):
    start = row - row % size
    others = [start + (row + step) % size for step in range(1, size)]
    solution = next((other for other in others if good[other]), None)
    parts = []
    if solution is not None:
      text = rollouts.text[solution]
      parts.append(filled(config.solution_template, solution=text))
    if feedback[row] and not good[row]:
      parts.append(filled(config.feedback_template, feedback=feedback[row]))
    hints.append("\n\n".join(parts))
  return hints


def _feedback(rollouts: Rollouts, name: str | None) -> list[str]:
  """Returns the feedback to each completion; "" for none."""
  if name is None:
    return [""] * len(rollouts.text)
  if rollouts.episodes:
    logs = [e.turns[-1].logs if e.turns else {} for e in rollouts.episodes]
    values = [log.get(name) for log in logs]
  else:
    columns = rollouts.row_prompts.extra
    if name not in columns:
      raise ValueError(
        f"feedback is {name!r} and the data has the columns {sorted(columns)}. Add the "
        "column, or leave feedback out"
      )
    values = columns[name]
  return ["" if value is None else str(value) for value in values]
