"""examples/minigpt.py, as its readers run it, in seconds."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.examples import loading

# qwix uses names that flax deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def example():
  return loading.example("minigpt")


def test_the_tokenizer_knows_both_ways_to_speak(example):
  tokenizer = example.Words()
  for make in (example.story, example.speech):
    for text in example.texts(make, 2000, seed=5):
      assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.vocab_size % 64 == 0


def test_texts_have_the_size_that_was_asked_for(example):
  size = sum(map(len, example.texts(example.story, 10_000, seed=0)))
  assert 10_000 <= size < 10_500


@pytest.fixture(scope="module")
def runs(example, tmp_path_factory):
  """What the tutorial gives on 4 x 2 devices under both forms, and on one device."""
  folder = tmp_path_factory.mktemp("minigpt")
  one = jax.make_mesh(
    (1, 1),
    ("batch", "model"),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
    devices=jax.devices()[:1],
  )
  meshes = {"set_mesh": example.new_mesh(), "with": example.new_mesh(), "one": one}
  return {
    name: example.run(
      example.TINY, folder / name, mesh, "with" if name == "with" else "set_mesh"
    )
    for name, mesh in meshes.items()
  }, folder


def test_both_trainings_learn(runs):
  for out in runs[0].values():
    assert out["pretrained"][0] > 4 and out["pretrained"][-1] < 0.7
    assert out["lora"][-1] < 0.6 * out["lora"][0]


def test_the_mesh_and_its_form_change_nothing(runs):
  for name in ("set_mesh", "with"):
    # Steps of Adam carry rounding along: the first are equal, the last nearly.
    for part in ("pretrained", "lora"):
      got, want = runs[0][name][part], runs[0]["one"][part]
      np.testing.assert_allclose(got[0], want[0], rtol=1e-3)
      np.testing.assert_allclose(got, want, rtol=0.1)


def test_matrices_are_split(runs):
  model = runs[0]["set_mesh"]["model"]
  block = model.transformer_blocks[0]
  shard = lambda x: x.addressable_shards[0].data.shape
  assert shard(block.mha.query.kernel[...]) == (32, 1, 16)  # of two heads
  assert shard(block.linear2.kernel[...]) == (32, 32)  # of 64 rows


def test_attention_is_adapted_and_the_base_is_shared(runs):
  out = runs[0]["with"]
  adapters = nnx.to_flat_state(nnx.state(out["adapted"], nnx.LoRAParam))
  names = {".".join(map(str, path[2:])) for path, _ in adapters}
  assert {"mha.query.kernel_lora_a", "mha.out.kernel_lora_b"} <= names
  assert len(adapters) == 2 * 6 * 2  # blocks, matrices, A and B


def test_the_texts_change_their_style(runs, example):
  texts = runs[0]["one"]["texts"]
  assert example.share_of_play(texts["pretrained"]) == 0
  assert "there was a little" in texts["pretrained"]
  assert example.share_of_play(texts["lora"]) > 0.2


def test_a_profile_is_written(runs):
  assert list((runs[1] / "one" / "profile").rglob("*.xplane.pb"))
