"""SDPO: who gets which hint, and the advantages that its teacher gives."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.distillation import trainers as distillation
from tests.rl import clusters
from tests.rl.env import toy_envs
from tests.sft import trainers as sft
from tunix.data.records import RAW_PROMPT_COLUMN
from tunix.ops import policy_gradient
from tunix.rl.common import Rollouts
from tunix.rl.env.episode import Episode, Turn
from tunix.rl.grpo.sdpo_learner import SDPOConfig, SDPOLearner, hints_of
from tunix.rl.pipeline import PromptBatch, prompt_batch
from tunix.rl.reward.outcomes import Failed, Value
from tunix.rl.reward.rewards import RewardOutput


def rollouts(rewards, columns=None, **changes) -> Rollouts:
  """Two prompts with three completions each, "c0" to "c5"; None is a failed reward."""
  outcomes = [Failed("x") if r is None else Value(r) for r in rewards]
  nothing = np.zeros((6, 1), np.int32)
  return Rollouts(
    batch=PromptBatch(prompts=["p0", "p1"], columns=columns or {}, number=0),
    text=[f"c{i}" for i in range(6)],
    finish_reasons=["eos"] * 6,
    prompt_ids=nothing,
    prompt_mask=nothing > 0,
    completion_ids=nothing,
    completion_mask=nothing > 0,
    rollout_logps=nothing.astype(np.float32),
    group_size=3,
    rewards=RewardOutput(outcomes={"f": outcomes}),
    scores=np.zeros((2, 3)),
    **changes,
  )


@pytest.mark.parametrize(
  ("rewards", "want"),
  [
    # Nobody is the hint to itself; the others take the next good one in the group.
    ([1, 0, 0, 0, 0, 0], ["", "c0", "c0", "", "", ""]),
    ([1, 0, 1, 0, 1, 0], ["c2", "c2", "c0", "c4", "", "c4"]),
    # A completion without a reward is no hint, and can have one.
    ([None, 1, 0.9, None, None, 1], ["c1", "", "c1", "c5", "c5", ""]),
  ],
)
def test_hints_are_the_good_completions_of_the_group(rewards, want):
  config = SDPOConfig(num_generations=3, **clusters.HINTS)
  assert hints_of(rollouts(rewards), config) == want


def test_feedback_goes_to_failed_completions_alone():
  config = SDPOConfig(num_generations=3, feedback="note", **clusters.HINTS)
  given = rollouts([1, 0, 0, 0, 0, 0], {"note": ["{hints} n0", None]})
  both = "c0\n\n{hints} n0"  # braces of a text stay
  assert hints_of(given, config) == ["", both, both, "", "", ""]
  with pytest.raises(ValueError, match="feedback is 'note' and the data has"):
    hints_of(rollouts([0] * 6), config)


def test_feedback_of_an_environment_is_a_log_of_the_last_turn():
  def episode(row):
    turns = [object.__new__(Turn) for _ in range(row % 3)]
    for number, turn in enumerate(turns):
      object.__setattr__(turn, "logs", {"note": f"n{row}.{number}"})
    return Episode(turns=turns)

  config = SDPOConfig(num_generations=3, feedback="note", **clusters.HINTS)
  given = rollouts([0] * 6, episodes=[episode(row) for row in range(6)])
  assert hints_of(given, config) == ["", "n1.0", "n2.1", "", "n4.0", "n5.1"]


def learner(*, rewards=clusters.even, algorithm=None, env=None, **options):
  settings = {"num_generations": 4, "success_threshold": 0.6, **clusters.HINTS}
  config = SDPOConfig(**(settings | (algorithm or {})))
  return SDPOLearner(clusters.cluster(**options), config, rewards, env=env)


def token_logps(model, prompt, completion) -> np.ndarray:
  words = distillation.logps(model, prompt, completion)
  return words[np.arange(len(completion)), completion]


@pytest.mark.parametrize(
  ("weight", "column"),
  [
    pytest.param(1.0, False, id="teacher", marks=pytest.mark.slow),
    pytest.param(0.25, True, id="both"),
  ],
)
def test_advantages_are_what_the_hint_changes(weight, column):
  """A_t = w (log pi(y_t | hint) - log pi(y_t)) + (1 - w) A of the group."""
  made = learner(algorithm={"distill_weight": weight})
  batch = clusters.prompts(1)[0]
  raw = [text + " 9 9" for text in batch["prompts"]]
  if column:  # a prompt before its template, which reward functions do not get
    batch[RAW_PROMPT_COLUMN] = raw
  seen = made._rollouts(prompt_batch(batch))
  hints = hints_of(seen, made.algo_config)
  assert 0 < sum(map(bool, hints)) < len(hints)
  example, model = made._with_advantages(seen), made.rl_cluster.actor
  grouped = made._group_advantages(seen)
  ids = lambda text: [int(word) for word in text.split()]
  for row, hint in enumerate(hints):
    drawn = seen.completion_mask[row]
    completion = seen.completion_ids[row][drawn]
    prompt = batch["prompts"][row // 4]
    own = raw[row // 4] if column else prompt
    want = np.full(len(completion), (1 - weight) * grouped[row])
    if hint:
      taught = token_logps(model, ids(f"{own} {hint}"), completion)
      want += weight * (taught - token_logps(model, ids(prompt), completion))
    np.testing.assert_allclose(example.advantages[row][drawn], want, atol=3e-5)
  logged = {name: mean for part in made._measured for name, mean in part.items()}
  assert logged["sdpo/hinted"].value == np.mean([bool(hint) for hint in hints])
  assert "sdpo/reverse_kl" in logged
  assert RAW_PROMPT_COLUMN not in seen.row_prompts.extra


@pytest.mark.slow
def test_hints_go_into_the_first_message_of_an_episode():
  """Of three turns in one row: the actions count, the observations are read."""
  settings = {"success_threshold": 2.0, "feedback": "said"}
  made = learner(rewards=None, algorithm=settings, env=toy_envs.Echo)
  batch = {"prompts": ["3 5", "7"]}
  seen = made._rollouts(prompt_batch(batch))
  hints = hints_of(seen, made.algo_config)
  example, model = made._with_advantages(seen), made.rl_cluster.actor
  checked = 0
  for row, hint in enumerate(hints):
    drawn = seen.completion_mask[row]
    whole = seen.completion_ids[row][: np.flatnonzero(drawn)[-1] + 1]
    prompt, hint = (
      [int(word) for word in text.split()]
      for text in (batch["prompts"][row // 4], hint)
    )
    taught = token_logps(model, prompt + hint, whole)
    gain = (taught - token_logps(model, prompt, whole))[drawn[: len(whole)]]
    np.testing.assert_allclose(example.advantages[row][drawn], gain, atol=3e-5)
    checked += len(whole) > drawn.sum() and bool(hint)
  assert checked


@pytest.mark.slow
def test_an_environment_of_ids_is_refused():
  made = learner(rewards=None, algorithm={"feedback": "said"}, env=toy_envs.Ids)
  with pytest.raises(ValueError, match="the environment gives token ids"):
    made._generate_and_compute_advantage(prompt_batch({"prompts": ["3 5"]}))


def test_the_expected_gradient_is_that_of_the_reverse_kl():
  """Over all completions of two tokens of a policy with a vocabulary of 5.

  The policy of the second token depends on the first. The gradient is that of the sum
  of KL(pi, teacher) at each prefix, where the prefixes' probabilities are constants.
  """
  shapes = [(5,), (5, 5)]
  draw = lambda seed: [
    jax.random.normal(key, shape)
    for key, shape in zip(jax.random.split(jax.random.key(seed), 2), shapes)
  ]
  policy, teacher = ([jax.nn.log_softmax(x) for x in draw(seed)] for seed in (0, 1))
  words = jnp.stack(jnp.meshgrid(jnp.arange(5), jnp.arange(5), indexing="ij"), -1)
  y = words.reshape(25, 2)
  pick = lambda logps: jnp.stack([logps[0][y[:, 0]], logps[1][y[:, 0], y[:, 1]]], 1)
  dense = pick(teacher) - pick(policy)
  weights = jnp.exp(pick(policy).sum(1))

  def expected(logits):
    logps = pick([jax.nn.log_softmax(x) for x in logits])
    ratio = policy_gradient.log_ratio(logps, pick(policy), jnp.ones((25, 2)))
    loss = policy_gradient.clipped_loss(ratio, dense, clip_low=0.2, clip_high=0.2)
    return jnp.sum(weights[:, None] * loss.values)

  def divergence(logits):
    q = [jax.nn.log_softmax(x) for x in logits]
    each = [jnp.sum(jnp.exp(a) * (a - b), -1) for a, b in zip(q, teacher)]
    return each[0] + jnp.sum(jnp.exp(policy[0]) * each[1])

  got, want = (
    jax.jit(jax.grad(expected))(draw(0)),
    jax.jit(jax.grad(divergence))(draw(0)),
  )
  for a, b in zip(got, want):
    np.testing.assert_allclose(a, b, atol=1e-6)


def weights(made):
  return sft.leaves(made.rl_cluster.actor)


def test_a_run_without_hints_has_no_dense_advantages():
  """Nothing is learnt from the teacher, and the group's advantages stay."""
  made = learner(algorithm={"success_threshold": 2.0})
  example = made._with_advantages(made._rollouts(prompt_batch(clusters.prompts(1)[0])))
  assert not example.advantages.any()


def test_the_average_teaches_and_not_the_current_weights():
  """A rate of 0 keeps the first weights as the teacher's."""
  first, made = learner().rl_cluster.actor, learner(algorithm={"teacher_rate": 0.0})
  made.train(clusters.prompts(1))
  batch = clusters.prompts(1)[0]
  seen = made._rollouts(prompt_batch(batch))
  hints, example = hints_of(seen, made.algo_config), made._with_advantages(seen)
  row = next(row for row, hint in enumerate(hints) if hint)
  completion = seen.completion_ids[row][seen.completion_mask[row]]
  prompt = [int(word) for word in batch["prompts"][row // 4].split()]
  hint = [int(word) for word in hints[row].split()]
  want = token_logps(first, [*prompt, *hint], completion)
  want -= token_logps(made.rl_cluster.actor, prompt, completion)
  got = example.advantages[row][seen.completion_mask[row]]
  np.testing.assert_allclose(got, want, atol=3e-5)


@pytest.mark.slow
def test_going_on_from_a_checkpoint_has_the_same_average(tmp_path):
  finals = []
  for folder, parts in (("whole", [3]), ("cut", [2, 3])):
    for steps in parts:
      made = learner(
        algorithm={"teacher_rate": 0.3},
        max_steps=steps,
        checkpoint_root_directory=str(tmp_path / folder),
      )
      made.train(clusters.prompts(3))
      average = made.rl_cluster.actor_trainer.averaged()
      finals.append({"average": sft.leaves(average), "actor": weights(made)})
      made.close()
  whole, two, three = finals
  assert all(sft.equal(whole[name], three[name]) for name in whole)
  assert not sft.equal(whole["average"], two["average"])


@pytest.mark.parametrize(
  ("settings", "says"),
  [
    ({"distill_weight": 1.5}, "distill_weight is 1.5"),
    ({"teacher": "old"}, "teacher is 'old'"),
    ({"template": "{prompt}"}, "without {hints}"),
    ({"solution_template": "x"}, "without {solution}"),
  ],
)
def test_wrong_settings_are_refused(settings, says):
  with pytest.raises(ValueError, match=says):
    SDPOConfig(**settings)


def test_prompts_that_no_hint_extends_are_refused():
  made: Any = types.SimpleNamespace(algo_config=SDPOConfig(), rl_cluster=None)
  given = rollouts([1] * 6, {RAW_PROMPT_COLUMN: [[3, 4], [5]]})
  with pytest.raises(ValueError, match="a prompt is token ids"):
    SDPOLearner._teacher_ids(made, given, 0, "hint")
