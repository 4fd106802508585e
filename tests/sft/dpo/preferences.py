"""What the preference tests share: pairs of tokens, small trainers."""

from typing import Any

import jax
import numpy as np
import optax

from tests import toys
from tunix.sft.dpo.preference_config import PreferenceConfig
from tunix.sft.dpo.preference_trainer import PreferenceTrainer


def row_of(rng, count: int, width: int, left: bool) -> tuple[list[int], list[int]]:
  tokens, empty = rng.integers(1, toys.VOCAB, count).tolist(), [0] * (width - count)
  ones = [1] * count
  return (empty + tokens, empty + ones) if left else (tokens + empty, ones + empty)


def columns(seed: int, rows: int, names: dict[str, int]) -> dict[str, np.ndarray]:
  """Random rows of different lengths; prompts on the right side of their columns."""
  rng = np.random.default_rng(seed)
  out: dict[str, np.ndarray] = {}
  for name, width in names.items():
    counts = rng.integers(2, width + 1, rows)
    made = [row_of(rng, count, width, name == "prompt") for count in counts]
    for part, values in zip(("ids", "mask"), zip(*made)):
      out[f"{name}_{part}"] = np.asarray(values, np.int32)
  return out


def pairs(seed: int = 0, rows: int = 4, prompt: int = 6, response: int = 5) -> Any:
  """A batch of pairs as a dict of token columns."""
  widths = {"prompt": prompt, "chosen": response, "rejected": response}
  return columns(seed, rows, widths)


def labelled(seed: int = 0, rows: int = 4, prompt: int = 6, response: int = 5) -> Any:
  """A batch of KTO rows as a dict of token columns."""
  out = columns(seed, rows, {"prompt": prompt, "completion": response})
  out["labels"] = np.random.default_rng(seed).random(rows) < 0.5
  return out


def cut(batch: dict[str, np.ndarray], parts: int) -> list[dict[str, np.ndarray]]:
  split = {name: np.split(x, parts) for name, x in batch.items()}
  return [{name: x[i] for name, x in split.items()} for i in range(parts)]


def with_padding(batch: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
  """The batch with rows of zeros behind it."""
  pad = lambda x: np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))
  return {name: pad(x) for name, x in batch.items()}


def trainer(
  model: Any = None, ref: Any = None, kind: Any = PreferenceTrainer, **options: Any
) -> Any:
  """Plain SGD; keywords are the config's."""
  model = toys.model() if model is None else model
  config = kind.config_type(pbar_description=None, **options)
  if config.__class__ is PreferenceConfig and not config.spec.needs_reference:
    ref = None
  return kind(model, ref, optax.sgd(0.1), config)


def logps(model: Any, batch: dict[str, np.ndarray], answer: str) -> np.ndarray:
  """Summed log-probabilities of answers, row by row from plain logits."""
  out = []
  for row in range(len(batch["prompt_ids"])):
    take = lambda name: batch[f"{name}_ids"][row][batch[f"{name}_mask"][row] == 1]
    prompt, response = take("prompt"), take(answer)
    tokens = np.concatenate([prompt, response])
    logits = np.asarray(model(tokens[None])[0][0], np.float64)
    table = logits - np.asarray(jax.nn.logsumexp(logits, axis=-1))[:, None]
    at = np.arange(len(prompt) - 1, len(tokens) - 1)
    out.append(table[at, response].sum())
  return np.asarray(out)
