"""Teachers that are the student, one of several models, or of another tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from flax import nnx

from tunix.models import calling
from tunix.utils import checks

Weights = Literal["average", "current"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfTeacher:
  """The student as its own teacher, which reads more than the student.

  Give it in place of the teacher, with "teacher_prompts" in every batch. This is
  self-distillation fine-tuning (SDFT, arXiv:2601.19897) if these prompts have a
  demonstration. With a separate copy of the first weights as the teacher, and the
  reference answer in its prompt, it is OPSD (arXiv:2601.18734).

  A LogitStrategy without `distill_top_k` builds the teacher's logits of the whole
  vocabulary, because the unembedding of this teacher changes in each step.

  Attributes:
    weights: "average", a moving average of the student's weights, as in the paper; or
      "current", the weights at each step, which need no further memory.
    rate: share of the new weights in the average after each update, in [0, 1].

  Raises:
    ValueError: a value is out of range.
  """

  weights: Weights = "average"
  rate: float = 0.05

  def __post_init__(self):
    if self.weights not in get_args(Weights):
      raise ValueError(
        f"weights is {self.weights!r}: choose one of {', '.join(get_args(Weights))}"
      )
    checks.fields(self, rate=checks.SHARE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTeacher:
  """A teacher with another tokenizer, which is compared with the student by text.

  The teacher reads the student's completion in tokens of its own. It needs a
  `PolicyGradientStrategy`, and prompts in its own tokens and chat template:
  "teacher_prompts" in every batch, texts or the teacher's ids.

  Attributes:
    model: the teacher.
    tokenizer: its tokenizer: a TokenizerAdapter, or a tokenizer that one can wrap.
  """

  model: nnx.Module
  tokenizer: Any

  @property
  def models(self) -> dict[str, nnx.Module]:
    """The model, in the form of `Teachers.models`."""
    return {"": self.model}


class Teachers:
  """Several teachers by name; each row of a batch names its own.

  This is multi-teacher on-policy distillation (MOPD, MiMo-V2-Flash, arXiv:2601.02780),
  which joins models that were trained for one domain each. A batch has the column
  "teachers" with names. All teachers of a micro-batch score all of its rows.

  A LogitStrategy without `distill_top_k` builds the logits of the whole vocabulary,
  because the unembeddings of the teachers differ.

  Args:
    models: modules by name, with one vocabulary.

  Raises:
    ValueError: there is no model, or the sizes of the vocabularies differ.
  """

  def __init__(self, models: Mapping[str, nnx.Module]):
    self.models = dict(models)
    sizes = {name: calling.vocab_size(model) for name, model in self.models.items()}
    known = {size for size in sizes.values() if size is not None}
    if not self.models or len(known) > 1:
      raise ValueError(
        f"the vocabulary sizes of the teachers are {sizes}; expected one or more "
        "models with the student's vocabulary. Leave the others out"
      )
    self.vocab_size = next(iter(known), None)

  def numbers(self, names: Any, rows: int) -> np.ndarray:
    """Returns the number of each row's teacher, int32 [B].

    Args:
      names: name of each row's teacher; None if the batch has none.
      rows: B.

    Raises:
      ValueError: names are missing or unknown.
    """
    known = list(self.models)
    if names is None or len(names) != rows:
      count = "no names" if names is None else f"{len(names)} names"
      raise ValueError(
        f"the batch has {rows} prompts and {count} of teachers. Add one of "
        f'{", ".join(known)} for each prompt under "teachers"'
      )
    if unknown := sorted(set(map(str, names)) - set(known)):
      raise ValueError(
        f"a row has the teacher {unknown[0]!r}; expected one of {', '.join(known)}. "
        "Correct the column, or add the teacher"
      )
    return np.asarray([known.index(str(name)) for name in names], np.int32)
