"""Describes memory, first batch, rewards and folder for `tunix train --dry-run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from tunix.cli.jobs.rl_settings import RLRun
from tunix.cli.make import optimizer, rewards
from tunix.cli.run.folder import RunFolder
from tunix.cli.run.prepare import Prepared, trained_of
from tunix.cli.settings.run import RunSettings
from tunix.data import show
from tunix.generate.sizes import capacity
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.transformer.model import Transformer
from tunix.rl.pipeline import PROMPTS
from tunix.utils import tree

# Columns that may hold a right answer; the first one in the data is rewarded.
_ANSWERS = ("answer", "response", "solution", "completion")


def describe_start(run: Prepared, model: Transformer) -> str:
  """Describes the start of a run, without starting it.

  Args:
    run: the prepared run; nothing is written into its folder.
    model: shapes in place of weights.

  Raises:
    ValueError: a record cannot be trained on.
    RuntimeError: a reward function fails on the first record.
  """
  batch = next(iter(run.data.train))
  trained = trained_of(run.config, model)
  lines = [_memory(trained, model, run.optimizer), _decay(run.config, trained)]
  lines.append(_first(batch, run.tokenizer))
  if isinstance(run.config, RLRun):
    lines += _rewards(run.config, batch)
  lines.append(_state(run.config, run.folder))
  return "\n".join(line for line in lines if line)


def _decay(config: RunSettings, trained: nnx.State) -> str:
  """Describes what weight decay moves, by the last parts of names."""
  names = tree.flatten(trained)
  decays = optimizer.decay_of(config, names)
  if not decays:
    return ""

  def fields(names):
    return ", ".join(sorted({".".join(x.split(".")[-2:]) for x in names}))

  parts = [
    f"weight decay {value:g} moves {fields(moved) or 'nothing'}"
    for value, moved in decays.items()
  ]
  moved = set().union(*decays.values())
  rest = fields(set(names) - moved) if moved else ""
  return "; ".join(parts) + (f", and not {rest}" if rest else "")


def _memory(
  trained: nnx.State, model: Transformer, tx: optax.GradientTransformation
) -> str:
  """Describes the memory that is held all the time, without activations."""
  moments = jax.eval_shape(tx.init, trained)
  sizes = {
    "weights": _bytes(nnx.state(model, (nnx.Param, nnx.LoRAParam))),
    "gradients": _bytes(trained),
    "optimizer": _bytes(moments),
  }
  parts = ", ".join(f"{name} {_readable(size)}" for name, size in sizes.items())
  return (
    f"memory: {parts}; activations (`tunix plan` counts them) and other models "
    "(references, teachers, critics) come on top; available: "
    f"{_readable(capacity.memory_bytes())}"
  )


def _bytes(tree: object) -> int:
  leaves = jax.tree.leaves(tree)
  return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _readable(size: int) -> str:
  return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def _first(batch: Mapping[str, Any], tokenizer: TokenizerAdapter) -> str:
  """Describes the shapes of a micro-batch, and its first row as text."""
  if PROMPTS in batch:
    return f"first prompt:\n{batch[PROMPTS][0]}"
  shapes = ", ".join(f"{name} {np.shape(x)}" for name, x in batch.items())
  pairs = "prompt_ids" in batch
  text = (show.describe_completions if pairs else show.describe_batch)(
    batch, tokenizer, rows=1
  )
  return f"a micro-batch: {shapes}\nits first row, trained between « and »:\n{text}"


def _rewards(config: RLRun, batch: Mapping[str, Any]) -> list[str]:
  """Calls the reward functions on two completions of the first record.

  With two, a function that returns one value for a whole batch is found.
  """
  manager = rewards.build_rewards(config.reward)
  if manager is None:
    return []
  row = {name: [values[0]] for name, values in batch.items() if name != PROMPTS}
  completion = next((str(row[name][0]) for name in _ANSWERS if name in row), "")
  with manager:
    both = {name: values * 2 for name, values in row.items()}
    output = manager.compute([batch[PROMPTS][0]] * 2, [completion] * 2, both)
  if problems := output.problems():
    raise RuntimeError(
      "reward.functions fail on two rows of the first record with the completion "
      f"{completion!r}: "
      f"{'; '.join(problems)}"
    )
  values = ", ".join(f"{name} {x[0]:g}" for name, x in output.by_function.items())
  return [f"rewards of the completion {completion!r}: {values}"]


def _state(config: RunSettings, folder: RunFolder) -> str:
  if folder.result(config) is not None:
    return f"{folder.path}: this run is finished; nothing would be trained"
  if steps := folder.steps():
    return f"{folder.path}: would resume after step {steps[-1]}"
  return f"{folder.path}: would begin a new run; nothing was written"
