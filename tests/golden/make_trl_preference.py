"""Makes trl_preference/ beside this file: what TRL's preference trainers compute.

Run where TRL is installed (an environment of its own: `pip install torch trl`):
`python tests/golden/make_trl_preference.py`. TRL's own trainers run `compute_loss` on a
tiny Llama model, with another one as the reference; they differ in their public options
alone. `trl.npz` holds the batches, each case's loss and the gradient of all weights (in
one array: raveled, in the order of their names), `cases.json` the options and TRL's
version, `policy` and `reference` the models.

Two batches of pairs. In `general` all lengths differ. In `even` prompts have one token
and chosen responses are equally long: there TRL's likelihood terms, which are means
over the tokens of the batch (ORPO's also over the prompts' tokens), are the means over
sequences of the papers.
"""

import importlib.metadata
import json
import pathlib
import tempfile
import types
from typing import Any

import datasets
import numpy as np
import tokenizers
import torch
import transformers
import trl
from trl.experimental import cpo, orpo

HERE = pathlib.Path(__file__).parent / "trl_preference"
VOCAB = 16
# Tokens of prompts, chosen and rejected responses.
LENGTHS = {
  "general": ((2, 1, 3, 4, 2), (3, 5, 1, 2, 4), (4, 2, 2, 5, 1)),
  "even": ((1, 1, 1, 1, 1), (4, 4, 4, 4, 4), (4, 2, 3, 5, 1)),
}
LABELS = (True, False, True, True, False)

# Options of DPOConfig.
DPO = {
  "sigmoid": {"loss_type": ["sigmoid"], "beta": 0.3},
  "hinge": {"loss_type": ["hinge"], "beta": 0.2},
  "ipo": {"loss_type": ["ipo"], "beta": 0.4},
  "exo_pair": {"loss_type": ["exo_pair"], "beta": 0.3, "label_smoothing": 0.1},
  "nca_pair": {"loss_type": ["nca_pair"], "beta": 0.3},
  "robust": {"loss_type": ["robust"], "beta": 0.3, "label_smoothing": 0.2},
  "bco_pair": {"loss_type": ["bco_pair"], "beta": 0.3},
  "sppo_hard": {"loss_type": ["sppo_hard"], "beta": 0.3},
  "aot": {"loss_type": ["aot"], "beta": 0.3},
  "aot_smoothed": {"loss_type": ["aot"], "beta": 0.3, "label_smoothing": 0.1},
  "aot_unpaired": {"loss_type": ["aot_unpaired"], "beta": 0.3},
  "aot_unpaired_smoothed": {
    **{"loss_type": ["aot_unpaired"], "beta": 0.3, "label_smoothing": 0.1},
  },
  "apo_zero": {"loss_type": ["apo_zero"], "beta": 0.3},
  "apo_down": {"loss_type": ["apo_down"], "beta": 0.3},
  "discopop": {"loss_type": ["discopop"], "beta": 0.1},
  "discopop_warm": {"loss_type": ["discopop"], "beta": 0.1, "discopop_tau": 0.8},
  "sigmoid_norm": {"loss_type": ["sigmoid_norm"], "beta": 0.7},
}
# Options of CPOConfig, whose batch is `even` where it has a likelihood term.
CPO = {
  "cpo": {"loss_type": "sigmoid", "beta": 0.3, "cpo_alpha": 0.8},
  "cpo_smoothed": {
    **{"loss_type": "sigmoid", "beta": 0.3, "cpo_alpha": 0.8, "label_smoothing": 0.1},
  },
  "cpo_without_likelihood": {"loss_type": "sigmoid", "beta": 0.3, "cpo_alpha": 0.0},
  "simpo": {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0, "simpo_gamma": 1.2},
  "simpo_smoothed": {
    **{"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0, "simpo_gamma": 0.3},
    "label_smoothing": 0.2,
  },
}
# Options of ORPOConfig: beta is the weight of the odds ratio. Batch `even`.
ORPO = {"orpo": {"beta": 0.1}, "orpo_strong": {"beta": 2.0}}
# Options of KTOConfig. The responses are those of `general`: chosen, then rejected.
KTO = {
  "kto": {"beta": 0.3},
  "kto_weighted": {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.4},
}
# Options of RewardConfig, and whether the pairs have margins.
REWARD = {
  "bradley_terry": ({}, False),
  "margin": ({}, True),
  "centred": ({"center_rewards_coefficient": 0.05}, True),
}


def cases() -> dict[str, dict[str, Any]]:
  """By name: TRL's trainer, its options and the batch."""
  of = lambda kind, options, batch: {
    "trainer": kind,
    "options": options,
    "batch": batch,
  }
  found = {name: of("dpo", options, "general") for name, options in DPO.items()}
  for name, options in CPO.items():
    found[name] = of("cpo", options, "even" if options["cpo_alpha"] else "general")
  found |= {name: of("orpo", options, "even") for name, options in ORPO.items()}
  return found | {name: of("kto", options, "general") for name, options in KTO.items()}


def make_models(folder: pathlib.Path, seed: int) -> None:
  """A policy and a reference near it, with a tokenizer."""
  config = transformers.LlamaConfig(
    **{"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 12},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"initializer_range": 0.5, "pad_token_id": 0, "bos_token_id": 1},
    **{"eos_token_id": 1, "max_position_embeddings": 64},
  )
  torch.manual_seed(seed)
  model = transformers.LlamaForCausalLM(config)
  words = {word: i for i, word in enumerate(["<pad>", "<eos>", *"abcdefghijklmn"])}
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>"))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
  )
  for name in ("reference", "policy"):
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    with torch.no_grad():
      for value in model.parameters():
        value += 0.15 * torch.randn_like(value)


def inputs(seed: int) -> dict[str, np.ndarray]:
  """Random tokens: prompts [B, P] padded on the left, responses on the right."""
  rng, arrays = np.random.default_rng(seed), {}
  for name, lengths in LENGTHS.items():
    parts = zip(("prompt", "chosen", "rejected"), lengths, strict=True)
    for part, sizes in parts:
      size, counts = max(sizes), np.array(sizes)[:, None]
      places = np.arange(size)
      mask = places >= size - counts if part == "prompt" else places < counts
      ids = np.where(mask, rng.integers(2, VOCAB, mask.shape), 0)
      arrays[f"{name}/{part}_ids"] = ids.astype(np.int32)
      arrays[f"{name}/{part}_mask"] = mask.astype(np.int32)
  size = len(LABELS)
  for name in ("chosen", "rejected", "margin"):
    arrays[f"rewards/{name}"] = rng.normal(size=size).astype(np.float32)
  return arrays


def joined(
  batch: dict, name: str, part: str, shift: int = 0
) -> dict[str, torch.Tensor]:
  """Prompts and responses in one row, padded on the right.

  Args:
    shift: the response is that of the row so many places further on.
  """
  get = lambda key: batch[f"{name}/{key}"]
  rows = []
  for i, prompt in enumerate(get("prompt_ids")):
    j = (i + shift) % len(LABELS)
    before = prompt[get("prompt_mask")[i] == 1]
    after = get(f"{part}_ids")[j][get(f"{part}_mask")[j] == 1]
    rows.append((before, after))
  size = max(len(a) + len(b) for a, b in rows)
  ids = np.zeros((len(rows), size), np.int64)
  mask, completion = np.zeros_like(ids), np.zeros_like(ids)
  for i, (before, after) in enumerate(rows):
    end = len(before) + len(after)
    ids[i, :end] = np.concatenate([before, after])
    mask[i, :end], completion[i, len(before) : end] = 1, 1
  named = {"input_ids": ids, "attention_mask": mask, "completion_mask": completion}
  return {key: torch.tensor(x) for key, x in named.items()}


def stacked(first: dict, second: dict) -> dict[str, torch.Tensor]:
  """The rows of both, padded to one length."""
  size = max(x["input_ids"].shape[1] for x in (first, second))
  pad = lambda x: torch.nn.functional.pad(x, (0, size - x.shape[1]))
  return {key: torch.cat([pad(first[key]), pad(second[key])]) for key in first}


def dpo_inputs(batch, name):
  return stacked(*(joined(batch, name, part) for part in ("chosen", "rejected")))


def cpo_inputs(batch, name):
  found = {}
  for part in ("chosen", "rejected"):
    row = joined(batch, name, part)
    labels = row["input_ids"].masked_fill(row["completion_mask"] == 0, -100)
    found |= {f"{part}_input_ids": row["input_ids"], f"{part}_labels": labels}
    found[f"{part}_attention_mask"] = row["attention_mask"]
  return found


def kto_inputs(batch, name):
  """Chosen responses are rows of their own, and so are rejected ones."""
  found = dpo_inputs(batch, name)
  others = [joined(batch, name, part, shift=1) for part in ("chosen", "rejected")]
  found |= {f"KL_{key}": x for key, x in stacked(*others).items()}
  return found | {"label": torch.tensor(LABELS + LABELS[::-1])}


TRAINERS = {
  "dpo": (trl.DPOTrainer, trl.DPOConfig, dpo_inputs),
  "kto": (trl.KTOTrainer, trl.KTOConfig, kto_inputs),
  "cpo": (cpo.CPOTrainer, cpo.CPOConfig, cpo_inputs),
  "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig, cpo_inputs),
}


def config(kind, options):
  return kind(
    **{"output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False},
    **{"report_to": "none", "gradient_checkpointing": False},
    per_device_train_batch_size=len(LABELS),
    **options,
  )


def loss(case: dict, batch: dict, folder: pathlib.Path) -> tuple[float, np.ndarray]:
  """(loss, gradient of all weights) as TRL has them."""
  make, kind, rows = TRAINERS[case["trainer"]]
  load = lambda name: transformers.AutoModelForCausalLM.from_pretrained(
    folder / name, dtype=torch.float32
  )
  pair = {"prompt": "a b", "chosen": " c", "rejected": " d"}
  single = {"prompt": "a b", "completion": " c"}
  data = [pair] * 5
  if case["trainer"] == "kto":
    data = [{**single, "label": label} for label in LABELS]
  reference = (
    {"ref_model": load("reference")} if case["trainer"] in ("dpo", "kto") else {}
  )
  made = make(
    model=load("policy"),
    args=config(kind, case["options"]),
    train_dataset=datasets.Dataset.from_list(data),
    processing_class=transformers.AutoTokenizer.from_pretrained(folder / "policy"),
    **reference,
  )
  made.model.train()
  value = made.compute_loss(made.model, rows(batch, case["batch"]))
  value.backward()
  weights = sorted(made.model.named_parameters())
  return float(value.detach()), np.concatenate(
    [x.grad.numpy().ravel() for _, x in weights]
  )


class Rewards(torch.nn.Module):
  """A reward model that is a list of rewards: chosen, then rejected."""

  def __init__(self, rewards):
    super().__init__()
    self.rewards = torch.nn.Parameter(torch.tensor(rewards))

  def forward(self, **_):
    return types.SimpleNamespace(logits=self.rewards[:, None])


def reward_loss(name: str, batch: dict, folder: pathlib.Path):
  """(loss, gradient in the rewards [2 B])."""
  options, margin = REWARD[name]
  pair = {"chosen": "a b", "rejected": "a c"}
  made = trl.RewardTrainer(
    model=str(folder / "policy"),
    args=config(trl.RewardConfig, options),
    train_dataset=datasets.Dataset.from_list([pair] * 5),
  )
  rewards = [batch[f"rewards/{part}"] for part in ("chosen", "rejected")]
  model = Rewards(np.concatenate(rewards))
  given = {"attention_mask": torch.ones(1)}
  if margin:
    given["margin"] = torch.tensor(batch["rewards/margin"])
  value = made.compute_loss(model, given)
  value.backward()
  return float(value.detach()), model.rewards.grad.numpy()


def main() -> None:
  HERE.mkdir(exist_ok=True)
  make_models(HERE, 0)
  batch = inputs(0)
  arrays: dict[str, Any] = {f"batch/{name}": x for name, x in batch.items()}
  for name, case in cases().items():
    arrays[f"loss/{name}"], arrays[f"gradient/{name}"] = loss(case, batch, HERE)
  for name in REWARD:
    found = reward_loss(name, batch, HERE)
    arrays[f"reward_loss/{name}"], arrays[f"reward_gradient/{name}"] = found
  np.savez_compressed(HERE / "trl.npz", **arrays)
  versions = {p: importlib.metadata.version(p) for p in ("trl", "torch")}
  written = {"cases": cases(), "rewards": REWARD, "versions": versions}
  (HERE / "cases.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
  main()
