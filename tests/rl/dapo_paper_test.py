"""DAPO with dynamic sampling against a loop of its own, written from the paper.

Nothing but the model, the completions and optax is shared with the learner: Algorithm 1
of arXiv:2503.14476 over equation 8, in plain NumPy and JAX. Where the paper is silent
it does what docs/algorithms.md says.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.rl import clusters
from tests.sft import trainers
from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutOutput

G, SIZE, ITERATIONS, RATE, LOW, HIGH = 4, 3, 2, 0.02, 0.2, 0.28


def draw(prompt, visit, sample):
  """The completion of a prompt that is sampled for the `visit`-th time. Prompts whose
  number is divisible by 3 are always solved."""
  ids = [int(word) for word in prompt.split()]
  rng = np.random.default_rng([zlib.crc32(prompt.encode()), visit, sample])
  tokens = rng.integers(2, toys.VOCAB, rng.integers(1, 7))
  if ids[0] % 3 == 0:
    tokens[0] &= ~1
    tokens[0] = max(tokens[0], 2)
  return tokens.astype(np.int32)


def reward(tokens):
  """1 where the first token is even."""
  return float(tokens[0] % 2 == 0)


class Scripted(BaseRollout):
  """Says what `draw` says."""

  def __init__(self, model, tokenizer, config):
    del tokenizer, config
    self._model, self._visits = model, {}

  def generate(
    self, prompts, rollout_config, *, num_generations=1, seed=None, first_prompt=0
  ):
    del rollout_config, seed, first_prompt
    rows, told = [], []
    for prompt in prompts:
      visit = self._visits[prompt] = self._visits.get(prompt, -1) + 1
      rows += [draw(prompt, visit, g) for g in range(num_generations)]
      told += [np.array(prompt.split(), np.int32)] * num_generations
    return RolloutOutput(
      text=[" ".join(map(str, row)) for row in rows],
      tokens=rows,
      prompt_tokens=told,
      logprobs=[np.zeros(len(row), np.float32) for row in rows],
      finish_reasons=["length"] * len(rows),
      version=self.version,
    )

  def update_params(self, model, version):
    self._model, self.version = model, version

  def pad_id(self):
    return 0

  def eos_id(self):
    return clusters.EOS

  def model(self):
    return self._model


def batches_of_the_paper(data):
  """The buffer of every step: groups of (prompt, completions, rewards).

  Lines 4 to 9: batches of prompts are drawn, in order, until the buffer holds N groups
  whose rewards differ. What is beyond N waits, and is sampled by the next policy first;
  when the prompts end, a step makes do with what there is.
  """
  visits, waiting, rest = {}, [], [batch["prompts"] for batch in data]
  while waiting or rest:
    buffer = []
    while len(buffer) < SIZE and (waiting or rest):
      prompts, waiting = (waiting, []) if waiting else (rest.pop(0), [])
      for prompt in prompts:
        visit = visits[prompt] = visits.get(prompt, -1) + 1
        rows = [draw(prompt, visit, g) for g in range(G)]
        rewards = [reward(row) for row in rows]
        if 0 < sum(rewards) < G:
          buffer.append((prompt, rows, rewards))
    buffer, beyond = buffer[:SIZE], buffer[SIZE:]
    waiting = [prompt for prompt, _, _ in beyond]
    if buffer:
      yield buffer


def loop_of_the_paper(model, data):
  """The weights after all steps, and how many groups each of them had."""
  graph, params, rest = nnx.split(model, nnx.Param, ...)

  @jax.jit
  def row_logps(params, rows):
    logps = jax.nn.log_softmax(nnx.merge(graph, params, rest)(rows)[0][:, :-1])
    return jnp.take_along_axis(logps, rows[:, 1:, None], axis=2)[:, :, 0]

  @jax.jit
  def update(params, state, rows, inside, advantages, old):
    def objective(params):
      ratio = jnp.exp(row_logps(params, rows) - old)
      clipped = jnp.clip(ratio, 1 - LOW, 1 + HIGH)
      gain = jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
      # Equation 8: every token of the buffer weighs the same, however many groups.
      return -jnp.sum(jnp.where(inside, gain, 0)) / jnp.sum(inside)

    updates, state = tx.update(jax.grad(objective)(params), state, params)
    return optax.apply_updates(params, updates), state

  tx = optimizers.adam(RATE)
  state, sizes = tx.init(params), []
  for buffer in batches_of_the_paper(data):
    sizes.append(len(buffer))
    rows = np.zeros((SIZE * G, 16), np.int32)
    inside = np.zeros((SIZE * G, 15), bool)
    advantages = np.zeros(SIZE * G, np.float32)
    for i, (prompt, completions, rewards) in enumerate(buffer):
      ids = [int(word) for word in prompt.split()]
      for g, tokens in enumerate(completions):
        at, end = i * G + g, len(ids) + len(tokens)
        rows[at, :end] = [*ids, *tokens]
        inside[at, len(ids) - 1 : end - 1] = True
        spread = np.std(rewards, ddof=1)
        advantages[at] = (rewards[g] - np.mean(rewards)) / (spread + 1e-6)
    old = row_logps(params, rows)
    for _ in range(ITERATIONS):
      params, state = update(params, state, rows, inside, advantages, old)
  return nnx.merge(graph, params, rest), sizes


@pytest.fixture(scope="module")
def data():
  return clusters.prompts(6, size=SIZE, seed=3)


def test_the_learner_is_the_loop_of_the_paper(data):
  want, sizes = loop_of_the_paper(clusters.model(), data)
  assert len(sizes) >= 3 and set(sizes[:-1]) == {SIZE}
  assert sizes[-1] < SIZE  # the last step is incomplete
  config = DAPOConfig(num_generations=G, num_iterations=ITERATIONS)
  learner = DAPOLearner(
    clusters.cluster(actor_optimizer=optimizers.adam(RATE), rollout_engine=Scripted),
    config,
    lambda prompts, completions, **columns: [
      reward([int(word) for word in text.split()]) for text in completions
    ],
  )
  start = trainers.leaves(clusters.model())
  learner.train(data)
  assert learner.train_steps == ITERATIONS * len(sizes)
  got, want = trainers.leaves(learner.rl_cluster.actor), trainers.leaves(want)
  for name, value in want.items():
    moved = np.abs(value - start[name]).max()
    np.testing.assert_allclose(got[name], value, atol=1e-3 * moved + 1e-6, err_msg=name)
