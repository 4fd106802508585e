"""GRPO in one file: the sampler, scoring and ops of tunix, and a readable loop.

    python examples/rl_loop.py

A model with random weights learns to sort two digits. The reward of an answer is the
share of digits in the right place:

    73=     37

The model answers each prompt several times. Answers that are better than the others to
the same prompt become more likely (Shao et al. 2024, arXiv:2402.03300). The script
takes about a minute on a laptop's CPU. `tunix.rl` has the same loop with checkpoints,
evaluation, several models and meshes; see examples/grpo.py.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tunix.generate import scoring
from tunix.generate.sampler import Sampler
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.ops import advantages, kl, policy_gradient, reductions

PROMPTS = 32  # in one step
GROUP = 8  # completions of each prompt
UPDATES = 2  # with the same completions
PROMPT_TOKENS, NEW_TOKENS = 4, 3
TEMPERATURE = 1.0
CLIP = 0.2  # the ratio to the sampling policy is clipped to 1 - CLIP and 1 + CLIP
BETA = 0.001  # weight of the KL divergence from the reference


class Characters:
  """A tokenizer with the methods that the sampler needs."""

  letters = "<>=0123456789"  # "<" is BOS, ">" is EOS

  def encode(self, text, **_):
    return [self.letters.index(letter) for letter in text]

  def decode(self, ids, **_):
    return "".join(self.letters[int(i)] for i in ids)

  def bos_id(self):
    return 0

  def eos_id(self):
    return 1

  def pad_id(self):
    return 1


def new_model(seed):
  """Returns a model of two layers and 13 tokens."""
  config = ModelConfig(
    num_layers=2,
    vocab_size=len(Characters.letters),
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    tie_embeddings=True,
  )
  return AutoModel.from_config(config, seed=seed)


def new_prompts(rng):
  """Returns prompts of two random digits and "="."""
  digits = rng.integers(0, 10, (PROMPTS, 2))
  return [f"{a}{b}=" for a, b in digits]


def reward(prompt, completion):
  """Returns the share of right digits; 0 for an answer of another length."""
  right = "".join(sorted(prompt.rstrip("=")))
  if len(completion) != len(right):
    return 0.0
  return sum(a == b for a, b in zip(completion, right)) / len(right)


def as_rows(token_lists, width, *, left):
  """Returns ids and mask, int32 and bool [B, width], padded on one side."""
  ids = np.zeros((len(token_lists), width), np.int32)
  mask = np.zeros((len(token_lists), width), bool)
  for i, tokens in enumerate(token_lists):
    where = slice(width - len(tokens), width) if left else slice(len(tokens))
    ids[i, where], mask[i, where] = tokens, True
  return ids, mask


def log_probs(model, rows):
  """Returns the log-probabilities of the completions' tokens, float32 [B, R].

  The prompt of a group is computed once for all its rows.
  """
  names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
  return scoring.score_completions(
    model, *(rows[n] for n in names), group_size=GROUP, temperature=TEMPERATURE
  ).logps


def loss_fn(model, rows):
  """Returns the loss of GRPO, a mean over the tokens of all completions."""
  logps, mask = log_probs(model, rows), rows["completion_mask"]
  ratio = policy_gradient.log_ratio(logps, rows["old_logps"], mask)
  clipped = policy_gradient.clipped_loss(
    ratio, rows["advantages"], clip_low=CLIP, clip_high=CLIP
  )
  divergence = kl.k3(logps, rows["ref_logps"])
  values = clipped.values + BETA * divergence
  return reductions.aggregate(values, mask, "token-mean").mean()


def rollout(sampler, prompts, seed):
  """Samples completions; returns texts and the rows of the update, group by group."""
  out = sampler(
    prompts,
    NEW_TOKENS,
    PROMPT_TOKENS,
    temperature=TEMPERATURE,
    num_samples=GROUP,  # with one prefill for each prompt
    seed=seed,
    include_eos=True,  # EOS is trained too
    return_logprobs=True,
  )
  prompt_tokens = [sampler.tokenize(p) for p in prompts for _ in range(GROUP)]
  prompt_ids, prompt_mask = as_rows(prompt_tokens, PROMPT_TOKENS, left=True)
  completion_ids, completion_mask = as_rows(out.tokens, NEW_TOKENS, left=False)
  old_logps = np.zeros(completion_ids.shape, np.float32)
  for row, logps in zip(old_logps, out.sampling_logprobs):
    row[: len(logps)] = logps
  return out.text, {
    "prompt_ids": prompt_ids,
    "prompt_mask": prompt_mask,
    "completion_ids": completion_ids,
    "completion_mask": completion_mask,
    "old_logps": old_logps,
  }


def train(steps, seed=0, learning_rate=2e-3, log=print):
  """Trains; returns the mean reward of every step."""
  model, reference = new_model(seed), new_model(seed)
  sampler = Sampler(model, Characters())
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
  opt_state = optimizer.init(nnx.state(model, nnx.Param))
  score = nnx.jit(log_probs)

  @nnx.jit
  def update(model, opt_state, rows):
    loss, grads = nnx.value_and_grad(loss_fn)(model, rows)
    params = nnx.state(model, nnx.Param)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    nnx.update(model, optax.apply_updates(params, updates))
    return loss, opt_state

  rng, curve = np.random.default_rng(seed), []
  for step in range(steps):
    prompts = new_prompts(rng)
    texts, rows = rollout(sampler, prompts, jax.random.key(step))
    repeated = [prompt for prompt in prompts for _ in range(GROUP)]
    rewards = jnp.asarray([reward(p, text) for p, text in zip(repeated, texts)])
    # The reward minus the mean of the group, in standard deviations of the group.
    relative = advantages.group_normalized(rewards.reshape(PROMPTS, GROUP))
    rows["advantages"] = relative.reshape(-1)
    rows["ref_logps"] = score(reference, rows)
    for _ in range(UPDATES):
      _, opt_state = update(model, opt_state, rows)
    curve.append(float(rewards.mean()))
    if step % 20 == 0 or step == steps - 1:
      log(f"step {step:4}  reward {curve[-1]:.3f}  {prompts[0]}{texts[0]}")
  return curve


def main():
  parser = argparse.ArgumentParser(description="see the top of the file")
  parser.add_argument("--steps", type=int, default=100)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  curve = train(args.steps, args.seed)
  first, last = np.mean(curve[:10]), np.mean(curve[-10:])
  print(f"mean reward of the first ten steps {first:.2f}, of the last ten {last:.2f}")


if __name__ == "__main__":
  main()
