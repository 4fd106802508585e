"""Greedy completions and their log-probs against `transformers`, live."""

import numpy as np
import pytest

from tests.generate import toy_ids
from tunix.generate.sampler import Sampler
from tunix.models.automodel import AutoModel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, ROWS, STEPS = 128, 16, 32
SIZES = {
  "vocab_size": VOCAB,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "max_position_embeddings": 256,
  # Wide weights, so that no two tokens are equally likely but for rounding.
  "initializer_range": 0.3,
}


def their_model(kind):
  torch.manual_seed(0)
  if kind == "llama":
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config).eval()
  config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=False)
  return transformers.Qwen3ForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_equals_transformers(kind, tmp_path):
  theirs = their_model(kind)
  theirs.save_pretrained(tmp_path)
  prompts = toy_ids.prompts(ROWS, longest=40, vocab=VOCAB)
  ours = Sampler(AutoModel.from_pretrained(tmp_path), toy_ids.Ids())
  out = ours(prompts, STEPS, return_logprobs=True)

  width = max(map(len, prompts))
  tokens = np.zeros((ROWS, width), np.int64)
  mask = np.zeros((ROWS, width), np.int64)
  for row, prompt in enumerate(prompts):
    tokens[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
  with torch.no_grad():
    found = theirs.generate(
      torch.tensor(tokens),
      attention_mask=torch.tensor(mask),
      max_new_tokens=STEPS,
      do_sample=False,
      eos_token_id=None,
      pad_token_id=0,
      return_dict_in_generate=True,
      output_logits=True,
    )
  expected = found.sequences[:, width:].numpy()
  np.testing.assert_array_equal(np.stack(out.tokens), expected)
  logps = torch.log_softmax(torch.stack(found.logits, 1), -1)
  logps = torch.gather(logps, 2, torch.tensor(expected)[..., None])[..., 0]
  np.testing.assert_allclose(np.stack(out.logprobs), logps.numpy(), atol=1e-4)
