import enum
import types

import jax
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tunix.models import backbone, heads
from tunix.models.automodel import AutoModel
from tunix.rl import utils
from tunix.sft.steps.module_state import Skeleton
from tunix.utils import tree

TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)


def arrays(model):
  return tree.flatten(nnx.state(model, nnx.Param))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_a_critic_has_the_actors_body(tied, share, mesh_fsdp8):
  actor = AutoModel.from_config(toys.config(tie_embeddings=tied), mesh_fsdp8)
  critic = utils.create_critic_model(actor, seed=3, share=share)
  own, body = arrays(actor), arrays(critic)
  head = body.pop("score.kernel")
  assert head.shape == (32, 1) and critic.config.num_scores == 1
  assert body.keys() == own.keys() - {"lm_head.kernel"}
  for path, x in body.items():
    np.testing.assert_array_equal(x, own[path])
    assert x.sharding == own[path].sharding
    assert backbone.same_memory(x, own[path]) == share, path
  want = heads.with_scores(actor, seed=3)
  np.testing.assert_array_equal(head, arrays(want)["score.kernel"])
  other = utils.create_critic_model(actor, seed=4, share=True)
  assert np.abs(arrays(other)["score.kernel"] - head).max() > 0


def test_a_critic_of_a_lora_actor_trains_its_adapters_and_head():
  actor = toys.model(lora_rank=2)
  critic = utils.create_critic_model(actor, share=True)
  params, frozen, _ = Skeleton(critic).split(critic)
  trained = set(tree.flatten(params))
  assert "score.kernel" in trained
  assert trained - {"score.kernel"} == set(
    tree.flatten(nnx.state(actor, nnx.LoRAParam))
  )
  for path, x in tree.flatten(frozen).items():
    assert x is arrays(actor)[path]
  assert jax.eval_shape(lambda: critic(TOKENS)[0]).shape == (2, 6, 1)


# What sets heads apart: a divisor of the logits, and layers of several kinds. Every
# family gets scores in tests/models/heads_test.py.
@pytest.mark.parametrize("name", ["granite", "nemotron_h", "qwen3_5_moe"])
def test_a_critic_has_the_states_of_its_policy(name):
  actor = AutoModel.from_pretrained(checkpoints.GOLDEN / name)
  critic = utils.create_critic_model(actor)
  hidden = toys.logits(actor, TOKENS, return_hidden=True)
  # The states that give logits are divided (Granite); those that give values are not.
  hidden = np.asarray(hidden) * actor.config.logits_divisor
  want = hidden @ np.asarray(critic.score.kernel[...])
  np.testing.assert_allclose(toys.logits(critic, TOKENS), want, rtol=1e-4, atol=1e-5)
  utils.check_same_vocabulary(actor, critic, "critic")


def test_what_no_critic_is_made_of():
  with pytest.raises(TypeError, match="TokensOnly"):
    utils.create_critic_model(toys.TokensOnly(nnx.Rngs(0)))
  with pytest.raises(ValueError, match="score"):
    utils.create_critic_model(heads.with_scores(toys.model()))


class Role(enum.Enum):
  CRITIC = "critic"


def test_another_vocabulary_is_refused():
  model = lambda size: types.SimpleNamespace(config=toys.config(vocab_size=size))
  actor = model(96)
  for role in ("critic", Role.CRITIC):
    utils.check_same_vocabulary(actor, model(96), role)
    with pytest.raises(
      utils.VocabularyMismatchError,
      match="the critic has a vocabulary of 64 tokens, the actor one of 96",
    ):
      utils.check_same_vocabulary(actor, model(64), role)
  utils.check_same_vocabulary(actor, toys.TokensOnly(nnx.Rngs(0)), "reward")
