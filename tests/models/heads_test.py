import jax
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tunix.models import heads, lora
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained
from tunix.utils import tree

TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)


def leaves(model):
  return tree.flatten(nnx.state(model))


@pytest.mark.parametrize("name", checkpoints.some_as_shipped("gemma3"))
def test_every_family_becomes_a_critic_and_comes_back(name, tmp_path):
  source = checkpoints.GOLDEN / name
  critic = AutoModel.from_pretrained(source, num_scores=2)
  assert critic.lm_head is None
  # The numbers of scores are in tests/rl/utils_test.py, and of Gemma 3 here.
  assert jax.eval_shape(lambda: critic(TOKENS)[0]).shape == (2, 6, 2)
  if name == "gemma3":
    hidden = toys.logits(critic, TOKENS, return_hidden=True)
    want = np.asarray(hidden) @ np.asarray(critic.score.kernel[...])
    np.testing.assert_allclose(toys.logits(critic, TOKENS), want, rtol=1e-4, atol=1e-5)
  save_pretrained(critic, tmp_path / "out", source=source)
  assert "score.weight" in checkpoints.tensors(tmp_path / "out")
  back = AutoModel.from_pretrained(tmp_path / "out")
  assert back.config == critic.config
  for path, value in leaves(critic).items():
    np.testing.assert_array_equal(leaves(back)[path], value, err_msg=path)


def test_scores_on_a_model_in_memory(mesh_fsdp8):
  model = lora.apply(AutoModel.from_config(toys.config(), mesh_fsdp8), toys_lora())
  critic = heads.with_scores(model, seed=3)
  assert (
    toys.logits(critic, TOKENS).shape == (2, 6, 1)
    and toys.logits(model, TOKENS).shape[-1] > 1
  )
  shared = leaves(model)
  for path, value in leaves(critic).items():
    if not path.startswith("score"):
      assert shared[path] is value, path
  assert leaves(critic)["score.kernel"].sharding.num_devices == 8
  again = heads.with_scores(model, seed=4)
  assert (
    np.abs(leaves(again)["score.kernel"] - leaves(critic)["score.kernel"]).max() > 0
  )


def toys_lora():
  return lora.LoraConfig(rank=2)


def test_what_a_scoring_model_is_not():
  critic = heads.with_scores(toys.model())
  with pytest.raises(ValueError, match="num_scores is 1, so the model has scores"):
    critic.unembedding()
  with pytest.raises(ValueError, match=r"has a head of 1 score\(s\) already"):
    heads.with_scores(critic)
  with pytest.raises(ValueError, match="num_scores is 0"):
    heads.with_scores(toys.model(), 0)


def test_last_scores():
  scores = np.arange(8.0).reshape(2, 4, 1)
  mask = np.array([[1, 1, 0, 0], [0, 1, 1, 1]])
  np.testing.assert_array_equal(heads.last_scores(scores, mask), [[1.0], [7.0]])
  assert jax.jit(heads.last_scores)(scores, mask * 0)[1, 0] == 4.0
