"""Makes trl_rl/ beside this file: what TRL's GRPO and RLOO trainers compute.

Run where TRL is installed (an environment of its own: `pip install torch trl`):
`python tests/golden/make_trl_rl.py`. TRL's own code runs, on real trainers of a tiny
model that differ in their public options alone:

  losses      `compute_loss` on a policy that is a table of logits [B, R, V], so that
              the gradient in the logits is TRL's
  advantages  a trainer's own batch of completions with rewards from a list (nan: the
              reward function gave None)
  weights     likewise with log-probabilities as an engine would have reported them

`trl.npz` holds the arrays, `cases.json` the options and TRL's version.
"""

import functools
import importlib.metadata
import json
import math
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

HERE = pathlib.Path(__file__).parent / "trl_rl"
ROWS, GROUP, TOKENS, VOCAB = 6, 3, 5, 11
LENGTHS = (5, 2, 4, 1, 3, 5)

# TRL multiplies the KL term with the ratio, unless it is told not to.
PLAIN_KL = {"use_bias_correction_kl": False}

# Options of GRPOConfig, or of RLOOConfig where the name begins with rloo. "on_policy"
# is ours: no log-probabilities of an older policy are given.
LOSSES = {
  "grpo": {"loss_type": "grpo"},
  "bnpo": {"loss_type": "bnpo"},
  "dr_grpo": {"loss_type": "dr_grpo"},
  "dapo": {"loss_type": "dapo"},
  "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
  "cispo_tight": {"loss_type": "cispo", "epsilon_high": 1.1},
  "sapo": {"loss_type": "sapo"},
  "sapo_apart": {
    **{"loss_type": "sapo", "sapo_temperature_pos": 0.5},
    "sapo_temperature_neg": 3.0,
  },
  "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
  "gspo_token_mean": {"loss_type": "dapo", "importance_sampling_level": "sequence"},
  "gspo_cispo": {
    **{"loss_type": "cispo", "importance_sampling_level": "sequence"},
    "epsilon_high": 1.1,
  },
  "clip_higher": {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.4},
  "two_sided": {"loss_type": "grpo", "epsilon": 0.1, "delta": 1.3},
  "two_sided_sequence": {
    **{"loss_type": "dr_grpo", "importance_sampling_level": "sequence"},
    **{"epsilon": 0.05, "delta": 1.1},
  },
  "kl_grpo": {"loss_type": "grpo", "beta": 0.3, **PLAIN_KL},
  "kl_dapo": {"loss_type": "dapo", "beta": 0.3, **PLAIN_KL},
  "kl_dr_grpo": {"loss_type": "dr_grpo", "beta": 0.3, **PLAIN_KL},
  "kl_cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.3, **PLAIN_KL},
  "kl_corrected": {"loss_type": "dapo", "beta": 0.3},
  "entropy": {"loss_type": "bnpo", "entropy_coef": 0.2},
  "on_policy": {"loss_type": "dapo", "beta": 0.3},
  "rloo": {},
  "rloo_clip_higher": {"epsilon": 0.1, "epsilon_high": 0.9},
}
SCORES = {
  "group": {"scale_rewards": "group"},
  "none": {"scale_rewards": "none"},
  "batch": {"scale_rewards": "batch"},
  "rloo": {},
  "rloo_normalized": {"normalize_advantages": True},
}
WEIGHTS = {
  f"{level}_{kind}": {
    "vllm_importance_sampling_mode": f"{level}_{kind}",
    "vllm_importance_sampling_clip_max": high,
    **({"vllm_importance_sampling_clip_min": low} if kind == "mask" else {}),
  }
  for level, low, high in (("token", 0.7, 1.3), ("sequence", 0.3, 1.5))
  for kind in ("truncate", "mask")
}


class Table(torch.nn.Module):
  """A policy that is its logits [B, R, V], whatever tokens come in."""

  def __init__(self, logits):
    super().__init__()
    self.logits = torch.nn.Parameter(torch.tensor(logits))

  def forward(self, input_ids, **_):
    logps = torch.log_softmax(self.logits, -1)
    completions = input_ids[:, -logps.shape[1] :]
    picked = torch.gather(logps, 2, completions[..., None])[..., 0]
    return types.SimpleNamespace(
      log_probs=picked, entropy=-(logps.exp() * logps).sum(-1)
    )


@functools.cache
def folder() -> str:
  """A tiny random model with a tokenizer; a trainer loads its reference from it."""
  path = tempfile.mkdtemp()
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=1,
  )
  transformers.LlamaForCausalLM(config).save_pretrained(path)
  words = {word: i for i, word in enumerate(["<pad>", "<eos>", *"abcdefghi"])}
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>"))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
  ).save_pretrained(path)
  return path


def trainer(name: str, options: dict, rewards=None):
  """A trainer of the tiny model whose reward function returns the list."""
  rloo = name.startswith("rloo")
  common = {
    **{"per_device_train_batch_size": ROWS, "num_generations": GROUP},
    **{"max_completion_length": TOKENS, "use_cpu": True, "bf16": False},
    **{"report_to": "none", "gradient_checkpointing": False},
    "model_init_kwargs": {"dtype": "float32"},
  }
  made = (trl.RLOOTrainer if rloo else trl.GRPOTrainer)(
    model=folder(),
    reward_funcs=lambda **_: rewards,
    args=(trl.RLOOConfig if rloo else trl.GRPOConfig)(
      output_dir=tempfile.mkdtemp(), **common, **options
    ),
    train_dataset=datasets.Dataset.from_list([{"prompt": "a b"}] * ROWS),
  )
  made.model.train()
  made.current_gradient_accumulation_steps = 1
  return made


def inputs(seed: int) -> dict[str, np.ndarray]:
  """A random batch; the older policies are near enough for some ratios to be kept."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(ROWS, TOKENS, VOCAB))
  mask = np.arange(TOKENS) < np.array(LENGTHS)[:, None]
  ids = rng.integers(0, VOCAB, (ROWS, TOKENS))
  near = rng.normal(size=(2, ROWS, TOKENS)) * 0.25
  logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  picked = np.take_along_axis(logps, ids[..., None], 2)[..., 0]
  arrays = {
    **{"logits": logits, "advantages": rng.normal(size=ROWS)},
    **{"old_logps": picked + near[0], "ref_logps": picked + 2 * near[1]},
  }
  return {
    **{name: x.astype(np.float32) for name, x in arrays.items()},
    **{"mask": mask.astype(np.int32), "ids": ids.astype(np.int32)},
  }


def loss(name: str, options: dict, batch: dict) -> tuple[float, np.ndarray]:
  """(loss, gradient in the logits) as TRL has them."""
  made, policy = trainer(name, options), Table(batch["logits"])
  given = {
    "prompt_ids": torch.ones(ROWS, 2, dtype=torch.long),
    "prompt_mask": torch.ones(ROWS, 2, dtype=torch.long),
    "completion_ids": torch.tensor(batch["ids"], dtype=torch.long),
    "completion_mask": torch.tensor(batch["mask"], dtype=torch.long),
    "advantages": torch.tensor(batch["advantages"]),
    "ref_per_token_logps": torch.tensor(batch["ref_logps"]),
    "num_items_in_batch": torch.tensor(batch["mask"].sum()),
  }
  if name != "on_policy":
    given["old_per_token_logps"] = torch.tensor(batch["old_logps"])
    given["old_logps"] = torch.tensor((batch["old_logps"] * batch["mask"]).sum(1))
  value = made.compute_loss(policy, given)
  (gradient,) = torch.autograd.grad(value, [policy.logits])
  return float(value.detach()), gradient.numpy()


def rewards(seed: int) -> np.ndarray:
  """[P, G] with one missing."""
  found = np.random.default_rng(seed).normal(size=(ROWS // GROUP, GROUP))
  found[1, 2] = math.nan
  return found.astype(np.float32)


def score(name: str, options: dict, rewards: np.ndarray) -> np.ndarray:
  """Advantages [P, G] of these rewards."""
  given = [None if math.isnan(x) else x for x in rewards.ravel().tolist()]
  made = trainer(name, options, given)
  rows = [{"prompt": "a b"}] * ROWS
  found = made._generate_and_score_completions(rows)
  return found["advantages"].numpy().reshape(rewards.shape)


def weight(name: str, options: dict, seed: int) -> dict[str, np.ndarray]:
  """The weights of a batch, with the two log-probabilities they are made from."""
  made = trainer(name, options, [float(i) for i in range(ROWS)])
  generate, rng = made._generate, np.random.default_rng(seed)

  def with_logps(prompts):
    drawn = list(generate(prompts))
    # Ids, completions, mask of tools, texts, then what an engine reports.
    drawn[4] = [list(rng.normal(size=len(ids)) * 0.3 - 2.4) for ids in drawn[1]]
    made.use_vllm = True  # from here on: what follows makes the weights
    return tuple(drawn)

  made._generate = with_logps
  found = made._generate_and_score_completions([{"prompt": "a b"}] * ROWS)
  return {
    "logps": found["old_per_token_logps"].numpy(),
    "rollout_logps": found["sampling_per_token_logps"].numpy(),
    "mask": found["completion_mask"].numpy().astype(np.int32),
    "weights": found["importance_sampling_ratio"].numpy(),
  }


def main() -> None:
  batch, given = inputs(0), rewards(0)
  arrays: dict[str, Any] = {f"batch/{name}": x for name, x in batch.items()}
  arrays["rewards"] = given
  for name, options in LOSSES.items():
    arrays[f"loss/{name}"], arrays[f"gradient/{name}"] = loss(name, options, batch)
  for name, options in SCORES.items():
    arrays[f"advantages/{name}"] = score(name, options, given)
  for name, options in WEIGHTS.items():
    for part, x in weight(name, options, 0).items():
      arrays[f"weights/{name}/{part}"] = x
  HERE.mkdir(exist_ok=True)
  np.savez_compressed(HERE / "trl.npz", **arrays)
  cases = {"losses": LOSSES, "scores": SCORES, "weights": WEIGHTS}
  cases["versions"] = {p: importlib.metadata.version(p) for p in ("trl", "torch")}
  (HERE / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
  main()
