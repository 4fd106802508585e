"""What the preference tests share: pairs of tokens, small trainers."""

from typing import Any

import grain
import numpy as np
from flax import nnx

from tests import optimizers, toys
from tunix.data.batches import PAIR
from tunix.data.batching import buckets
from tunix.data.chat import Rendered
from tunix.data.rows import SideBySide
from tunix.sft.dpo.kto_trainer import KTOConfig, KTOTrainer
from tunix.sft.dpo.preference_config import PreferenceConfig
from tunix.sft.dpo.preference_trainer import PreferenceTrainer
from tunix.sft.dpo.reward_trainer import RewardConfig, RewardTrainer

CONFIGS: dict[Any, Any] = {
  PreferenceTrainer: PreferenceConfig,
  KTOTrainer: KTOConfig,
  RewardTrainer: RewardConfig,
}


def model(seed: int = 0, **options: Any) -> Any:
  """A toy of one layer: half of what these tests cost is compiling."""
  return toys.model(seed, num_layers=1, **options)


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


def shared(batch: dict[str, np.ndarray], rows: int, parts: int = 1) -> Any:
  """The pairs of a batch in micro-batches whose sequences share rows."""
  real = lambda name, part, i: batch[f"{name}_{part}"][i][batch[f"{name}_mask"][i] == 1]
  pair = lambda part, i: tuple(real(name, part, i) for name in PAIR)
  width = lambda name: batch[f"{name}_ids"].shape[1]
  layout = SideBySide(
    max_prompt_length=width("prompt"), max_completion_length=width("chosen")
  )
  count = len(batch["prompt_ids"])
  records = [
    Rendered(real("prompt", "ids", i), pair("ids", i), pair("mask", i))
    for i in range(count)
  ]
  stream = grain.MapDataset.source(records).to_iter_dataset()
  size = count // parts
  return list(
    buckets.batch_pairs(
      stream,
      [],
      size,
      parts,
      layout=layout,
      pad_id=0,
      first=0,
      count=rows,
      shared_rows=rows,
      own=slice(0, size),
    )
  )


def cut(batch: dict[str, np.ndarray], parts: int) -> list[dict[str, np.ndarray]]:
  split = {name: np.split(x, parts) for name, x in batch.items()}
  return [{name: x[i] for name, x in split.items()} for i in range(parts)]


def with_padding(batch: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
  """The batch with rows of zeros behind it."""
  pad = lambda x: np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))
  return {name: pad(x) for name, x in batch.items()}


def trainer(
  policy: Any = None, ref: Any = None, kind: Any = PreferenceTrainer, **options: Any
) -> Any:
  """Plain SGD; keywords are the config's."""
  policy = model() if policy is None else policy
  known = next(x for x in CONFIGS if issubclass(kind, x))
  config = CONFIGS[known](pbar_description=None, **options)
  if known is RewardTrainer:
    return kind(policy, optimizers.sgd(0.1), config)
  return kind(policy, ref, optimizers.sgd(0.1), config)


@nnx.jit
def _outputs(model, tokens):
  return model(tokens)[0]


def outputs(model: Any, batch: Any, answer: str) -> list[tuple[np.ndarray, np.ndarray]]:
  """For every row: what the model gives at each token of prompt and answer (logits or
  scores), and the answer's tokens. Rows stand alone, padded on the right."""
  rows = []
  for ids, mask, own, own_mask in zip(
    *(
      batch[f"{name}_{part}"] for name in ("prompt", answer) for part in ("ids", "mask")
    )
  ):
    rows.append((ids[mask == 1], own[own_mask == 1]))
  width = batch["prompt_ids"].shape[1] + batch[f"{answer}_ids"].shape[1]
  tokens = np.zeros((len(rows), width), np.int32)
  for line, both in zip(tokens, rows):
    joined = np.concatenate(both)
    line[: len(joined)] = joined
  out = np.asarray(_outputs(model, tokens), np.float64)
  return [(x[: len(p) + len(r)], r) for x, (p, r) in zip(out, rows)]


def logps(model: Any, batch: dict[str, np.ndarray], answer: str) -> np.ndarray:
  """Summed log-probabilities of answers, from plain logits."""
  sums = []
  for logits, response in outputs(model, batch, answer):
    line = logits[-len(response) - 1 : -1]
    line = line - line.max(axis=-1, keepdims=True)
    table = line - np.log(np.exp(line).sum(axis=-1, keepdims=True))
    sums.append(table[np.arange(len(response)), response].sum())
  return np.asarray(sums)
