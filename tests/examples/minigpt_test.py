"""examples/minigpt.py, as its readers run it, in seconds."""

import dataclasses
import re

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


@pytest.fixture(scope="module")
def text():
  return loading.example("minigpt_text")


def test_the_tokenizer_gives_texts_back(text):
  lines = [
    *text.texts(text.story, 5000, seed=5),
    *text.texts(text.speech, 5000, seed=5),
  ]
  tokenizer = text.Words(lines)
  for line in [*lines, "Zebras, 42 of them!\nOne more."]:
    assert tokenizer.decode(tokenizer.encode(line)) == line
  assert tokenizer.decode(tokenizer.encode("a\N{SNOWMAN}b")) == "ab"
  assert tokenizer.vocab_size % 64 == 0


def test_rare_words_are_written_in_characters(text):
  tokenizer = text.Words(["the cat and the hat"] * 3 + ["the dodo"], most=5)
  assert len(tokenizer.encode("the cat")) == 2
  assert len(tokenizer.encode("dodo")) == 4


def test_texts_have_the_size_that_was_asked_for(text):
  size = sum(map(len, text.texts(text.story, 10_000, seed=0)))
  assert 10_000 <= size < 10_500


def test_stories_differ_and_their_helpers_fit_the_place(text):
  stories = text.texts(text.story, 60_000, seed=0)
  assert len(set(stories)) == len(stories)
  for each in stories:
    ponds = [helper in each for helper in ("frog", "otter")]
    assert any(ponds) == ("into the pond" in each)


@pytest.mark.parametrize("separator", ["\n\n", "\n \n\n", "<|endoftext|>\n"])
def test_a_file_is_split_into_its_texts(text, tmp_path, separator):
  path = tmp_path / "tales.txt"
  path.write_text(separator.join(("A tale.\nOf two lines.", "Another.", "")))
  assert text.read_texts(path) == ["A tale.\nOf two lines.", "Another."]


def test_a_long_text_becomes_several_rows(example, text):
  line = " ".join(["word"] * 25)
  tokenizer = text.Words([line])
  (batch,) = example.rows(tokenizer, [line], 3, 10, 1)
  tokens = [t for row in batch["input_tokens"] for t in row]
  assert sorted(batch["input_mask"].sum(1)) == [6, 10, 10]
  assert tokens.count(tokenizer.encode(" word")[0]) == 24


# The first of these tests to run pays for all of them.
uses_runs = pytest.mark.long


def one_device():
  return jax.make_mesh(
    (1, 1),
    ("batch", "model"),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
    devices=jax.devices()[:1],
  )


@pytest.fixture(scope="module")
def runs(example, tmp_path_factory):
  """What the tutorial gives on 4 x 2 devices under both forms, and on one device."""
  folder = tmp_path_factory.mktemp("minigpt")
  meshes = {
    "set_mesh": example.new_mesh(),
    "with": example.new_mesh(),
    "one": one_device(),
  }
  return {
    name: example.run(
      example.TINY, folder / name, mesh, "with" if name == "with" else "set_mesh"
    )
    for name, mesh in meshes.items()
  }, folder


@uses_runs
def test_both_trainings_learn(runs):
  for out in runs[0].values():
    assert out["pretrained"][0] > 4 and out["pretrained"][-1] < 1.6
    assert out["lora"][-1] < 0.6 * out["lora"][0]


@uses_runs
def test_the_mesh_and_its_form_change_nothing(runs):
  for name in ("set_mesh", "with"):
    # Steps of Adam carry rounding along: the first are equal, the last nearly. The
    # adapters begin with the weights of the last.
    for part, first in {"pretrained": 1e-3, "lora": 1e-2}.items():
      got, want = runs[0][name][part], runs[0]["one"][part]
      np.testing.assert_allclose(got[0], want[0], rtol=first)
      np.testing.assert_allclose(got, want, rtol=0.1)


@uses_runs
def test_matrices_are_split(runs):
  model = runs[0]["set_mesh"]["model"]
  block = model.transformer_blocks[0]
  shard = lambda x: x.addressable_shards[0].data.shape
  assert shard(block.mha.query.kernel[...]) == (32, 1, 16)  # of two heads
  assert shard(block.linear2.kernel[...]) == (32, 32)  # of 64 rows


@uses_runs
def test_attention_is_adapted_and_the_base_is_shared(runs):
  out = runs[0]["with"]
  adapters = nnx.to_flat_state(nnx.state(out["adapted"], nnx.LoRAParam))
  names = {".".join(map(str, path[2:])) for path, _ in adapters}
  assert {"mha.query.kernel_lora_a", "mha.out.kernel_lora_b"} <= names
  assert len(adapters) == (6 + 1) * 2  # matrices of the block, output; A and B


@uses_runs
def test_the_texts_change_their_style(runs):
  out = runs[0]["one"]
  assert out["new"]["pretrained"] == 0 and out["new"]["lora"] > 0.2
  assert re.search("named|lived", out["texts"]["pretrained"])


def test_files_take_the_place_of_the_grammar(example, tmp_path):
  tales, verse = tmp_path / "tales.txt", tmp_path / "verse.txt"
  tales.write_text("\n\n".join(["Hop hop hop, said the frog."] * 64))
  verse.write_text("\n\n".join(["Hop no more, o weary toad!"] * 64))
  settings = dataclasses.replace(example.TINY, num_epochs=8, lora_max_steps=6)
  out = example.run(settings, tmp_path, one_device(), text=tales, style=verse)
  assert out["texts"]["pretrained"].startswith("Hop")
  assert out["pretrained"][-1] < 0.5 * out["pretrained"][0]
  assert out["lora"][-1] < out["lora"][0]


@uses_runs
def test_a_profile_is_written(runs):
  assert list((runs[1] / "one" / "profile").rglob("*.xplane.pb"))
