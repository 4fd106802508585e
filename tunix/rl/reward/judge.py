"""Language models as reward functions: `Judge`, `PairJudge` and `Rubric`.

Each is a reward function `fn(prompts, completions, **columns)`, async, with rewards
from 0 to 1. A row without a verdict has no reward, as if a function had failed.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from tunix.rl.reward import verdicts
from tunix.rl.reward.functions import Reasoning, after_reasoning
from tunix.rl.reward.judge_model import Answer, JudgeModel
from tunix.rl.reward.outcomes import Failed
from tunix.rl.reward.verdicts import Form

Row = Mapping[str, Any]

_FIRST = verdicts.choice({"A": 1.0, "B": 0.0, "tie": 0.5})
_SECOND = verdicts.choice({"A": 0.0, "B": 1.0, "tie": 0.5})
_RUBRIC = """\
A prompt:
{prompt}
An answer to it:
{completion}
Does the answer meet this criterion?
{criterion}"""


class Question(NamedTuple):
  """A question to the judge, and the weight of its verdict in the reward."""

  text: str
  form: Form
  material: Sequence[str]
  weight: float = 1.0


@dataclasses.dataclass(kw_only=True, eq=False)
class Asking(JudgeModel):
  """A reward function that asks a judge. Subclasses write `_plan`.

  Attributes:
    reasoning: "drop" judges the text after the reasoning, and gives 0 to a completion
      whose reasoning is not closed. "keep" judges the whole completion.
    needed: names in braces that a file of instructions must have.
  """

  reasoning: Reasoning = "drop"
  needed: ClassVar[tuple[str, ...]]

  def __post_init__(self, sampler: Any):
    super().__post_init__(sampler)
    if self.reasoning not in ("drop", "keep"):
      raise ValueError(f"reasoning is {self.reasoning!r}; expected 'drop' or 'keep'")

  def _use(self, name: str, template: str, *more: str | None) -> None:
    """Sets the name in metrics, the instructions, and columns besides their names."""
    self.__name__, self.template = pathlib.Path(name).stem, template
    names = [*verdicts.fields_of(template), *filter(None, more)]
    own = {"prompt", "completion", *self.needed}
    names = ["prompts", "completions", *(x for x in names if x not in own)]
    kind = inspect.Parameter.KEYWORD_ONLY
    columns = [inspect.Parameter(name, kind) for name in dict.fromkeys(names)]
    # By it a RewardManager knows the columns that are passed. A property of the class
    # would be read as the signature of the class.
    self.__signature__ = inspect.Signature(columns)

  async def __call__(
    self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]
  ) -> list[float | Failed]:
    """Returns one reward per row, or why it has none."""
    drops = self.reasoning == "drop"
    texts = [after_reasoning(text) if drops else text for text in completions]
    fields = {"prompt": prompts, "completion": texts, **columns}
    rows = [dict(zip(fields, values)) for values in zip(*fields.values())]
    judged = [row for row in rows if row["completion"] is not None]
    plans = [self._plan(row, judged) for row in judged]
    asked = [x.text for plan in plans if not isinstance(plan, Failed) for x in plan]
    answers = await self.asker.ask(list(dict.fromkeys(asked)))
    rewards = iter([_reward(plan, answers) for plan in plans])
    return [0.0 if row["completion"] is None else next(rewards) for row in rows]

  def _plan(self, row: Row, rows: Sequence[Row]) -> list[Question] | Failed:
    """Returns the questions about a row; all rows of the batch are `rows`."""
    raise NotImplementedError

  def _question(self, row: Row, form: Form, weight: float = 1.0) -> Question:
    names = verdicts.fields_of(self.template)
    material = [verdicts.as_text(row[name]) for name in names]
    text = verdicts.question(self.template, row, form)
    return Question(text, form, material, weight)


@dataclasses.dataclass(eq=False)
class Judge(Asking):
  """Scores each completion: the judge's number, from 0 (low) to 1 (high).

  Attributes:
    prompt: text file with the instructions. {completion} stands for the completion,
      {prompt} for the prompt, and other names in braces for columns of the data.
    scale: the lowest and the highest score that the judge may give.

  Raises:
    FileNotFoundError: there is no such file.
    ImportError, ValueError: {completion} is missing, or as for `JudgeModel`.
  """

  prompt: str
  _: dataclasses.KW_ONLY
  scale: Sequence[float] = (1, 10)
  needed = ("completion",)

  def __post_init__(self, sampler: object):
    super().__post_init__(sampler)
    if len(self.scale) != 2 or not self.scale[0] < self.scale[1]:
      raise ValueError(f"scale is {self.scale}; expected (lowest, highest) as (1, 10)")
    self._use(self.prompt, verdicts.read_template(self.prompt, self.needed))

  def _plan(self, row: Row, rows: Sequence[Row]) -> list[Question]:
    del rows
    return [self._question(row, verdicts.scale(*self.scale))]


@dataclasses.dataclass(eq=False)
class PairJudge(Asking):
  """Compares completions in pairs: the share of its comparisons that a row wins.

  Each pair is asked twice, with the positions swapped, so that a preference for a
  position cancels out. A tie counts one half.

  Attributes:
    prompt: text file with the instructions. {first} and {second} stand for the
      completions that the judge calls A and B, other names as in `Judge`.
    against: column with a text that each completion is compared with. None: completions
      are compared with all others of their prompt, G (G - 1) questions for G of them.

  Raises:
    FileNotFoundError: there is no such file.
    ImportError, ValueError: {first} or {second} is missing, or as for `JudgeModel`.
  """

  prompt: str
  _: dataclasses.KW_ONLY
  against: str | None = None
  needed = ("first", "second")

  def __post_init__(self, sampler: object):
    super().__post_init__(sampler)
    template = verdicts.read_template(self.prompt, self.needed)
    self._use(self.prompt, template, self.against)

  def _plan(self, row: Row, rows: Sequence[Row]) -> list[Question] | Failed:
    mine, prompt = row["completion"], row["prompt"]
    if self.against is not None:
      others = [row[self.against]]
    else:
      same = [x for x in rows if x["prompt"] == prompt and x is not row]
      others = [x["completion"] for x in same]
    if not others:
      return Failed("the prompt has no other completion to compare with; set against")
    return [
      self._question({**row, "first": a, "second": b}, form)
      for other in others
      for a, b, form in ((mine, other, _FIRST), (other, mine, _SECOND))
    ]


@dataclasses.dataclass(eq=False)
class Rubric(Asking):
  """Asks about each criterion of a rubric: the points of those that are met.

  The reward is the sum of the points of the criteria that a completion meets, over the
  sum of all positive points, and at least 0 (HealthBench, arXiv 2505.08775; with
  positive points the explicit aggregation of arXiv 2507.17746).

  Attributes:
    criteria: JSON file with a list of {"criterion": text, "points": number}.
    column: column of the data with such a list for each prompt, in place of `criteria`.
    prompt: text file with the instructions, with {completion} and {criterion}, other
      names as in `Judge`. None: a short one in English.

  Raises:
    FileNotFoundError: there is no such file.
    ImportError, ValueError: not exactly one of `criteria` and `column` is set, a file
      has another form, or as for `JudgeModel`.
  """

  criteria: str | None = None
  _: dataclasses.KW_ONLY
  column: str | None = None
  prompt: str | None = None
  needed = ("completion", "criterion")

  def __post_init__(self, sampler: object):
    super().__post_init__(sampler)
    given = [x for x in (self.criteria, self.column) if x is not None]
    if len(given) != 1:
      raise ValueError(f"criteria and column are {given}; expected one of them")
    file, template = self.prompt, _RUBRIC
    if file is not None:
      template = verdicts.read_template(file, self.needed)
    self._use(given[0], template, self.column)
    self.points: Any = None
    if self.criteria is not None:
      text = pathlib.Path(self.criteria).expanduser().read_text()
      self.points = _checked(json.loads(text), self.criteria)

  def _plan(self, row: Row, rows: Sequence[Row]) -> list[Question] | Failed:
    del rows
    try:
      points = self.points or _checked(row[self.column or ""], self.column)
    except ValueError as error:
      return Failed(str(error))
    return [
      self._question({**row, "criterion": text}, verdicts.YES_NO, weight)
      for text, weight in points
    ]


def costs_of(judges: Sequence[Asking]) -> dict[str, float]:
  """Returns perf/judge_*, what judges cost since the last call; {} without judges."""
  names = "perf/judge_prompt_tokens", "perf/judge_answer_tokens"
  spent = zip(*(judge.asker.take_tokens() for judge in judges))
  return {name: float(sum(tokens)) for name, tokens in zip(names, spent)}


def _checked(criteria: Any, where: str | None) -> list[tuple[str, float]]:
  """Returns (criterion, points) of a list of objects.

  Raises:
    ValueError: it has another form, or no points above 0.
  """
  try:
    points = [(str(c["criterion"]), float(c["points"])) for c in criteria]
  except (KeyError, TypeError, ValueError):
    points = []
  if not any(x > 0 for _, x in points) or not all(math.isfinite(x) for _, x in points):
    raise ValueError(
      f'{where} holds no rubric; expected a list of {{"criterion": text, "points": '
      "number}, with a number above 0"
    )
  return points


def _reward(
  plan: Sequence[Question] | Failed, answers: Mapping[str, Answer | Failed]
) -> float | Failed:
  """Returns the weighted share of a row's verdicts; the first failure if one failed."""
  if isinstance(plan, Failed):
    return plan
  total = 0.0
  for question in plan:
    answer = answers[question.text]
    if isinstance(answer, Failed):
      return answer
    if answer.finish_reason != "stop":
      why = f"the judge's answer is not finished ({answer.finish_reason})"
      return Failed(f"{why}; raise max_tokens")
    value = verdicts.read(answer.text, question.form, question.material)
    if isinstance(value, Failed):
      return value
    total += question.weight * value
  return max(0.0, total / sum(max(question.weight, 0.0) for question in plan))
