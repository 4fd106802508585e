"""What the distillation tests share: a student, a teacher that knows something."""

from typing import Any

import jax
import numpy as np

from tests import optimizers, toys
from tests.generate.toy_ids import Ids
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.on_policy_trainer import (
  OnPolicyConfig,
  OnPolicyDistillationTrainer,
)
from tunix.distillation.strategies import LogitStrategy


def fresh_student(seed: int = 0, **changes: Any):
  """The smallest of toys: compiling is what these tests cost."""
  return toys.model(seed, **{"num_layers": 1, **changes})


def teacher(seed: int = 1, **changes: Any):
  """Wider and deeper than the student, and sure of its words."""
  sizes = {"num_layers": 2, "embed_dim": 48, **changes}
  out = toys.model(seed, **sizes)
  out.lm_head.kernel.set_value(out.lm_head.kernel[...] * 20)
  return out


def trainer(
  strategy: Any = None,
  *,
  student: Any = None,
  known: Any = None,
  rate: float = 1e-2,
  **config: Any,
) -> DistillationTrainer:
  return DistillationTrainer(
    fresh_student() if student is None else student,
    teacher() if known is None else known,
    LogitStrategy() if strategy is None else strategy,
    optimizers.adam(rate),
    TrainingConfig(**{"pbar_description": None, **config}),
  )


def prompts(seed: int = 0, rows: int = 4) -> dict[str, Any]:
  """A batch of prompts and completions, as ids."""
  rng = np.random.default_rng(seed)
  draw = lambda most: rng.integers(1, toys.VOCAB, rng.integers(1, most + 1)).tolist()
  return {
    "prompts": [draw(8) for _ in range(rows)],
    "completions": [draw(6) for _ in range(rows)],
  }


def logps(model: Any, prompt: list[int], completion: Any) -> np.ndarray:
  """log p of all words before each token of the completion, [C, V], in one row.

  Rows are padded on the right to one length, so that a model has one program.
  """
  tokens = np.zeros((1, 64), np.int32)
  whole = [*prompt, *completion]
  tokens[0, : len(whole)] = whole
  words = np.asarray(jax.nn.log_softmax(toys.logits(model, tokens)[0]))
  return words[len(prompt) - 1 : len(whole) - 1]


def on_policy(
  strategy: Any,
  *,
  student: Any = None,
  known: Any = None,
  tokenizer: Any = None,
  kind: type[OnPolicyDistillationTrainer] = OnPolicyDistillationTrainer,
  **config: Any,
):
  return kind(
    fresh_student() if student is None else student,
    teacher() if known is None else known,
    strategy,
    optimizers.adam(1e-2),
    OnPolicyConfig(
      **{
        "pbar_description": None,
        "max_prompt_length": 8,
        "max_completion_length": 6,
        **config,
      }
    ),
    tokenizer=tokenizer or Ids(),
  )
