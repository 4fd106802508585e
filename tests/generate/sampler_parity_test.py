"""What `transformers` generates: the committed goldens, and live where torch is."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

from tests.generate import toy_ids
from tunix.generate.sampler import Sampler
from tunix.models.automodel import AutoModel

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
TINY = ["llama3p1", "qwen3"]
VOCAB = 128
SIZES = {
  "vocab_size": VOCAB,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "max_position_embeddings": 256,
  # Wide weights, so that few pairs of tokens are nearly equally likely.
  "initializer_range": 0.3,
}
CLOSE = 1e-4  # nats between the two best tokens: what rounding may swap


def beams(sampler, case):
  """Ours for a case of `make_generation.beam_case`."""
  out = sampler(
    case["prompts"],
    case["steps"],
    beam_size=case["beams"],
    num_samples=case["best"],
    length_penalty=case["penalty"],
    eos_tokens=case["eos"],
    include_eos=True,
  )
  return [row.tolist() for row in out.tokens]


@pytest.mark.parametrize("name", TINY)
def test_goldens(name):
  sampler = Sampler(AutoModel.from_pretrained(GOLDEN / name), toy_ids.Ids())
  golden = json.loads((GOLDEN / name / "generation.json").read_text())
  greedy = golden["greedy"]
  out = sampler(
    greedy["prompts"], 24, eos_tokens=[], return_logprobs=True, pad_output=True
  )
  np.testing.assert_array_equal(out.tokens, greedy["tokens"])
  np.testing.assert_allclose(out.logprobs, greedy["logps"], atol=1e-4)
  for case in golden["beams"][:4]:
    assert beams(sampler, case) == case["found"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_all_golden_beams(name):
  sampler = Sampler(AutoModel.from_pretrained(GOLDEN / name), toy_ids.Ids())
  cases = json.loads((GOLDEN / name / "generation.json").read_text())["beams"]
  assert len(cases) == 10
  for case in cases:
    assert beams(sampler, case) == case["found"]


@pytest.fixture(scope="module")
def maker():
  """The script that makes the goldens."""
  pytest.importorskip("torch")
  pytest.importorskip("transformers")
  file = GOLDEN / "make_generation.py"
  spec = importlib.util.spec_from_file_location(file.stem, file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def pair(maker, kind, folder):
  """A random model of theirs, and our sampler of it."""
  transformers = maker.transformers
  maker.torch.manual_seed(0)
  if kind == "llama":
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    theirs = transformers.LlamaForCausalLM(config).eval()
  else:
    config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=False)
    theirs = transformers.Qwen3ForCausalLM(config).eval()
  theirs.generation_config.eos_token_id = None
  theirs.save_pretrained(folder)
  return theirs, Sampler(AutoModel.from_pretrained(folder), toy_ids.Ids())


def compare_greedy(maker, kind, folder, rows, steps):
  theirs, ours = pair(maker, kind, folder)
  prompts = toy_ids.prompts(rows, longest=40, vocab=VOCAB)
  tokens, logps, margins = maker.greedy(theirs, [p.tolist() for p in prompts], steps)
  out = ours(prompts, steps, eos_tokens=[], return_logprobs=True, pad_output=True)
  same = out.tokens == tokens
  # From a swap of two nearly equal tokens on, a row is another text.
  before = np.cumprod(same, axis=1, dtype=bool)
  firsts = [
    (row, int(same[row].argmin())) for row in range(rows) if not same[row].all()
  ]
  print(
    f"{kind}: {rows} rows of {steps} tokens, {(margins < CLOSE).sum()} near-ties, "
    f"rows that differ: {[(r, c, float(margins[r, c])) for r, c in firsts]}"
  )
  assert all(margins[place] < CLOSE for place in firsts)
  assert len(firsts) <= (margins < CLOSE).sum()
  assert before.mean() > 0.95
  np.testing.assert_allclose(out.logprobs[before], logps[before], atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_equals_transformers(kind, tmp_path, maker):
  compare_greedy(maker, kind, tmp_path, 16, 32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_long_greedy_equals_transformers(kind, tmp_path, maker):
  compare_greedy(maker, kind, tmp_path, 64, 128)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_beams_equal_transformers(kind, tmp_path, maker):
  theirs, ours = pair(maker, kind, tmp_path)
  for number in range(10, 20):
    case = maker.beam_case(number, VOCAB)
    assert beams(ours, case) == maker.search(theirs, case), case


@pytest.mark.parametrize("name", TINY)
def test_goldens_are_what_transformers_gives(name, maker):
  load = maker.transformers.AutoModelForCausalLM.from_pretrained
  model = load(GOLDEN / name).eval()
  model.generation_config.eos_token_id = None
  golden = json.loads((GOLDEN / name / "generation.json").read_text())
  tokens, logps, _ = maker.greedy(model, golden["greedy"]["prompts"], 24)
  assert tokens.tolist() == golden["greedy"]["tokens"]
  np.testing.assert_allclose(logps, golden["greedy"]["logps"], atol=1e-5)
  for number, case in enumerate(golden["beams"]):
    assert case == {**maker.beam_case(number), "found": case["found"]}
    assert maker.search(model, case) == case["found"]
