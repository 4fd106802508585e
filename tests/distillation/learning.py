"""What distillation is worth on a chain of words:

  python -m tests.distillation.learning

The next word is drawn from a distribution of the two words before it. A 4-layer teacher
has seen much of the chain; a 2-layer student gets 64 rows. What counts is the
student's excess: its cross-entropy on new rows less the chain's own entropy, or, of
what it writes itself, the mean of its log-probability less the chain's. Both in nats.
"""

import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests import optimizers, toys
from tests.generate.toy_ids import Ids
from tunix.distillation.distillation_trainer import DistillationTrainer
from tunix.distillation.on_policy_trainer import (
  OnPolicyConfig,
  OnPolicyDistillationTrainer,
)
from tunix.distillation.strategies import LogitStrategy, PolicyGradientStrategy
from tunix.generate.sampler import Sampler
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

WORDS, LENGTH, PROMPT = 24, 24, 4
TEACHER_STEPS, STEPS, ROWS, KNOWN = 400, 240, 8, 64
QUIET: dict[str, Any] = {"pbar_description": None}
# Log-probability of a word by the two before it; word 0 is padding.
CHAIN = np.log(
  np.random.default_rng(0).dirichlet(np.full(WORDS, 0.15), (WORDS, WORDS)) + 1e-4
)
CHAIN -= np.log(np.exp(CHAIN).sum(-1, keepdims=True))


def rows(seed: int, count: int) -> np.ndarray:
  """int32 [count, LENGTH] of the chain, words from 1 up."""
  rng = np.random.default_rng(seed)
  out = rng.integers(0, WORDS, (count, LENGTH))
  for t in range(2, LENGTH):
    p = np.exp(CHAIN[out[:, t - 2], out[:, t - 1]])
    out[:, t] = (p.cumsum(-1) < rng.random((count, 1))).sum(-1).clip(max=WORDS - 1)
  return (out + 1).astype(np.int32)


def batch(tokens: np.ndarray) -> dict[str, np.ndarray]:
  mask = np.ones_like(tokens)
  mask[:, :2] = 0
  return {"input_tokens": tokens, "input_mask": mask}


def chain_logps(tokens: np.ndarray) -> np.ndarray:
  """[B, LENGTH - 2] log-probability of each word from the third on."""
  x = np.clip(tokens - 1, 0, WORDS - 1)
  return CHAIN[x[:, :-2], x[:, 1:-1], x[:, 2:]]


def model(layers: int, width: int, seed: int):
  return toys.model(
    seed,
    num_layers=layers,
    vocab_size=WORDS + 1,
    embed_dim=width,
    hidden_dim=3 * width,
    head_dim=width // 4,
  )


def student():
  return model(2, 32, 1)


def teacher():
  out = model(4, 64, 0)
  tx = optimizers.adam(optax.cosine_decay_schedule(3e-3, TEACHER_STEPS))
  data = (batch(rows(1000 + i, 32)) for i in range(TEACHER_STEPS))
  PeftTrainer(out, tx, TrainingConfig(**QUIET)).train(data)
  return out


def excess(who) -> float:
  """Cross-entropy on 256 new rows, less that of the chain itself."""
  tokens = rows(1, 256)
  nll = _nll(*nnx.split(who), tokens)
  return float(np.mean(nll + chain_logps(tokens)))


@functools.partial(jax.jit, static_argnums=0)
def _nll(graph, state, tokens):
  logits, _ = nnx.merge(graph, state)(tokens[:, :-1])
  logps = jax.nn.log_softmax(logits)[:, 1:]
  return -jnp.take_along_axis(logps, tokens[:, 2:, None], -1)[..., 0]


def strangeness(who) -> float:
  """Of 256 rows that it goes on from prompts: mean of its own log-probability less the
  chain's, an estimate of the reverse KL by word."""
  prompts = list(rows(2, 256)[:, :PROMPT])
  new = LENGTH - PROMPT
  out = Sampler(who, Ids())(
    prompts,
    new,
    temperature=1.0,
    seed=0,
    eos_tokens=(),
    forbidden_tokens=[0],
    return_logprobs=True,
    pad_output=True,
  )
  whole = np.concatenate([np.stack(prompts), np.asarray(out.tokens)], axis=1)
  return float(np.mean(out.logprobs - chain_logps(whole)[:, PROMPT - 2 :]))


def tx(rate: float = 3e-3):
  return optimizers.adam(optax.cosine_decay_schedule(rate, STEPS))


def parts():
  """The few rows that there are, over and over."""
  fixed = rows(3, KNOWN)
  for i in range(STEPS):
    yield fixed[(np.arange(ROWS) + i * ROWS) % KNOWN]


def alone() -> float:
  """Trained on the rows themselves."""
  who = student()
  data = (batch(part) for part in parts())
  PeftTrainer(who, tx(), TrainingConfig(**QUIET)).train(data)
  return excess(who)


def distilled(known) -> float:
  """The same rows, with the teacher."""
  who = student()
  data = (batch(part) for part in parts())
  strategy = LogitStrategy(temperature=1.0, alpha=0.9)
  trainer = DistillationTrainer(who, known, strategy, tx(), TrainingConfig(**QUIET))
  trainer.train(data)
  trainer.close()
  return excess(who)


# name -> (strategy, share of the steps that the student writes)
POLICIES = {
  "off-policy": (
    lambda: LogitStrategy(temperature=1.0, alpha=1.0, divergence="reverse_kl"),
    0.0,
  ),
  "on-policy": (
    lambda: LogitStrategy(temperature=1.0, alpha=1.0, divergence="reverse_kl"),
    1.0,
  ),
  "gkd": (
    lambda: LogitStrategy(temperature=1.0, alpha=1.0, divergence="jsd", beta=0.5),
    0.5,
  ),
  "policy-gradient": (PolicyGradientStrategy, 1.0),
}


def on_policy(known, name: str) -> float:
  """The same rows; only their prompts where the student writes."""
  make, share = POLICIES[name]
  who = student()
  config = OnPolicyConfig(
    max_prompt_length=PROMPT,
    max_completion_length=LENGTH - PROMPT,
    on_policy_fraction=share,
    **QUIET,
  )
  trainer = OnPolicyDistillationTrainer(
    who, known, make(), tx(), config, tokenizer=Ids()
  )

  trainer.train(
    {"prompts": part[:, :PROMPT], "completions": part[:, PROMPT:]} for part in parts()
  )
  trainer.close()
  return strangeness(who)


def main() -> None:
  def tell(name, run):
    start = time.process_time()
    value = run()
    spent = round(time.process_time() - start)
    if isinstance(value, float):
      print(json.dumps({"run": name, "nats": round(value, 3), "cpu_s": spent}))
    return value

  known = tell("teacher", teacher)
  tell("teacher's excess", lambda: excess(known))
  tell("alone", alone)
  tell("distilled", lambda: distilled(known))
  for name in POLICIES:
    tell(name, lambda n=name: on_policy(known, n))


if __name__ == "__main__":
  main()
