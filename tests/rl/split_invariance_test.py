"""Each RL loss: one global batch, one gradient, however and wherever it is cut."""

import dataclasses
import functools

import numpy as np
import pytest

from tests import drills, optimizers, toys
from tests.rl import clusters
from tunix.models import heads
from tunix.rl import policy_loss
from tunix.rl.algorithm_config import AlgorithmConfig, RolloutCorrection
from tunix.rl.common import TrainExample
from tunix.rl.trainer import Trainer

GROUP, GROUPS, PROMPT, NEW = 4, 8, 6, 8


def example(seed: int = 0, **changes) -> TrainExample:
  """Groups of random completions of different lengths; every field is there."""
  rng = np.random.default_rng(seed)
  rows = GROUP * GROUPS
  lengths = rng.integers(1, PROMPT + 1, GROUPS).repeat(GROUP)
  prompt_mask = np.arange(PROMPT) >= PROMPT - lengths[:, None]
  prompts = rng.integers(1, toys.VOCAB, (GROUPS, PROMPT)).repeat(GROUP, axis=0)
  mask = np.arange(NEW) < rng.integers(1, NEW + 1, (rows, 1))
  noise = lambda scale: (scale * rng.standard_normal((rows, NEW))).astype(np.float32)
  logps = -np.log(toys.VOCAB) + noise(0.3)
  made = TrainExample(
    prompt_ids=np.where(prompt_mask, prompts, 0).astype(np.int32),
    prompt_mask=prompt_mask,
    completion_ids=np.where(mask, rng.integers(1, toys.VOCAB, (rows, NEW)), 0).astype(
      np.int32
    ),
    completion_mask=mask,
    advantages=rng.standard_normal(rows).astype(np.float32),
    ref_per_token_logps=(logps + noise(0.2)).astype(np.float32),
    old_per_token_logps=logps.astype(np.float32),
    rollout_per_token_logps=(logps + noise(0.05)).astype(np.float32),
    returns=noise(1.0),
    old_values=noise(1.0),
    group_size=GROUP,
  )
  return dataclasses.replace(made, **changes)


def wider(whole: TrainExample) -> TrainExample:
  """The same rows with more padding on both sides."""
  left = lambda x: np.pad(x, ((0, 0), (3, 0)))
  right = lambda x: np.pad(x, ((0, 0), (0, 5)))
  names = {"prompt_ids": left, "prompt_mask": left}
  fields = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
  return dataclasses.replace(
    whole,
    **{
      name: names.get(name, right)(x)
      for name, x in fields.items()
      if getattr(x, "ndim", 0) == 2
    },
  )


def cut(whole: TrainExample, parts: int) -> list[TrainExample]:
  size = whole.rows // parts
  return [whole.take(np.arange(i * size, (i + 1) * size)) for i in range(parts)]


def trainer(parts: int, loss, model) -> Trainer:
  config = clusters.config().training_config
  made = Trainer(model, optimizers.sgd(1.0), config, "actor").with_role_loss(loss)
  made.training_config = dataclasses.replace(
    made.training_config, gradient_accumulation_steps=parts
  )
  return made


LOSSES = {
  "grpo": {},
  "sequence means": {"loss_agg_mode": "sequence-mean-token-mean"},
  "sequence sums": {"loss_agg_mode": "sequence-mean-token-sum"},
  "dr grpo": {"loss_agg_mode": "sequence-mean-token-scale"},
  "gspo": {"loss_algo": "gspo", "loss_agg_mode": "sequence-mean-token-mean"},
  "cispo": {"loss_algo": "cispo"},
  "rloo": {"loss_algo": "rloo", "loss_agg_mode": "sequence-mean-token-mean"},
  "reinforce": {"loss_algo": "reinforce"},
  "dual clip": {"epsilon_c": 3.0, "epsilon_high": 0.28},
  "entropy": {"entropy_coef": 0.1},
  "corrected kl": {"kl_corrected": True},
  "stale cispo": {"rollout_correction": RolloutCorrection(kind="cispo")},
  "dppo": {"rollout_correction": RolloutCorrection(kind="dppo-kl", threshold=0.001)},
  "corrected": {"rollout_correction": RolloutCorrection(kind="mask", level="sequence")},
}
QUICK = ("grpo",)


@pytest.mark.parametrize(
  "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LOSSES]
)
def test_policy_losses(name, mesh_fsdp8):
  config = AlgorithmConfig(num_generations=GROUP, beta=0.1, **LOSSES[name])
  loss = functools.partial(
    policy_loss.policy_loss, config=config, temperature=0.9, max_tokens=NEW
  )
  whole = example()
  drills.check_split_invariance(
    lambda parts: trainer(parts, loss, clusters.model()),
    whole,
    cut,
    packed=wider(whole),
    meshes=(mesh_fsdp8,),
  )


def test_a_corrected_k3_has_the_gradient_of_k2():
  whole = example(advantages=np.zeros(GROUP * GROUPS, np.float32))
  whole = dataclasses.replace(whole, old_per_token_logps=None)  # on-policy

  def gradients(**changes):
    config = AlgorithmConfig(num_generations=GROUP, beta=1.0, **changes)
    loss = functools.partial(
      policy_loss.policy_loss, config=config, temperature=1.0, max_tokens=NEW
    )
    return drills.gradients(trainer(1, loss, clusters.model()), [whole])

  want = gradients(kl_method="k2")
  drills.assert_same_gradients(gradients(kl_corrected=True), want, tolerance=1e-5)
  with pytest.raises(AssertionError):
    drills.assert_same_gradients(gradients(), want, tolerance=1e-2)
  with pytest.raises(ValueError, match="kl_corrected is True and beta is 0"):
    AlgorithmConfig(beta=0.0, kl_corrected=True)


def test_prompts_shared_or_not():
  config = AlgorithmConfig(num_generations=GROUP, beta=0.1)
  loss = functools.partial(
    policy_loss.policy_loss, config=config, temperature=1.0, max_tokens=NEW
  )
  whole = example()
  alone = dataclasses.replace(whole, group_size=1)
  made = trainer(1, loss, clusters.model())
  got, want = (drills.gradients(made, [x]) for x in (whole, alone))
  drills.assert_same_gradients(got, want, tolerance=2e-6)


@pytest.mark.slow
def test_both_axes_of_a_mesh(mesh_fsdp4_tp2):
  config = AlgorithmConfig(num_generations=GROUP, beta=0.1)
  loss = functools.partial(
    policy_loss.policy_loss, config=config, temperature=0.9, max_tokens=NEW
  )
  drills.check_split_invariance(
    lambda parts: trainer(parts, loss, toys.model()),
    example(),
    cut,
    meshes=(mesh_fsdp4_tp2,),
  )


@pytest.mark.slow
def test_the_critics_loss(mesh_fsdp8):
  loss = functools.partial(policy_loss.critic_loss, clip=0.2)
  whole = example(group_size=1)
  drills.check_split_invariance(
    lambda parts: trainer(parts, loss, heads.with_scores(clusters.model())),
    whole,
    cut,
    packed=wider(whole),
    meshes=(mesh_fsdp8,),
  )


def test_what_is_watched_is_a_mean_over_all_tokens():
  """Micro-batches of different lengths, under a reduction by sequences."""
  config = AlgorithmConfig(
    num_generations=GROUP, beta=0.1, loss_agg_mode="sequence-mean-token-mean"
  )
  loss = functools.partial(
    policy_loss.policy_loss, config=config, temperature=1.0, max_tokens=NEW
  )
  found = []
  for parts in (1, 4):
    made = trainer(parts, loss, clusters.model())
    made.update([example()], parts, skip_jit=False)
    made.flush()
    found.append(made.metrics_logger.get_metric("actor", "kl", "train"))
  np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
