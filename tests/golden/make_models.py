"""Makes the committed models beside this file, with transformers and PEFT.

Run where the `parity` extra is installed: `python tests/golden/make_models.py`. Each
folder holds a tiny random model in several safetensors files, a PEFT adapter, and
`expected.npz` with what transformers and PEFT compute in float32:

  tokens, mask [3, 20]       left-padded rows; mask is 1 on valid tokens
  logits, adapted [3, 20, V] with padding masked and positions counted from the first
                             valid token; padded places are zero
"""

import json
import pathlib

import numpy as np
import peft
import torch
import transformers

HERE = pathlib.Path(__file__).parent
VOCAB = 48
COMMON = {
  "vocab_size": VOCAB,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "max_position_embeddings": 128,
  # Wide, so that attention and rotary angles matter for the logits.
  "initializer_range": 0.4,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "pad_token_id": 0,
}
LLAMA31_ROPE = {
  "rope_type": "llama3",
  "rope_theta": 500.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}


def llama3p1():
  config = transformers.LlamaConfig(
    **COMMON, rms_norm_eps=1e-5, rope_parameters=LLAMA31_ROPE
  )
  return transformers.LlamaForCausalLM(config)


def llama3p2_tied():
  config = transformers.LlamaConfig(
    **COMMON,
    rms_norm_eps=1e-5,
    rope_parameters=LLAMA31_ROPE | {"factor": 32.0},
    tie_word_embeddings=True,
  )
  return transformers.LlamaForCausalLM(config)


def qwen3():
  config = transformers.Qwen3Config(
    **COMMON, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}
  )
  return transformers.Qwen3ForCausalLM(config)


def inputs():
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, VOCAB, (3, 20)).astype(np.int32)
  mask = np.ones_like(tokens)
  for row, padding in enumerate((0, 4, 11)):
    mask[row, :padding] = 0
    tokens[row, :padding] = 0
  return tokens, mask


def logits(model, tokens, mask):
  positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
  with torch.no_grad():
    out = model(
      input_ids=torch.tensor(tokens, dtype=torch.long),
      attention_mask=torch.tensor(mask, dtype=torch.long),
      position_ids=torch.tensor(positions, dtype=torch.long),
    ).logits
  return (out.float().numpy() * mask[..., None]).astype(np.float32)


def legacy_spelling(folder):
  """`config.json` as the real Llama folders have it."""
  hf = json.loads((folder / "config.json").read_text())
  rope = hf.pop("rope_parameters")
  hf["rope_theta"] = rope.pop("rope_theta")
  hf["rope_scaling"] = rope
  hf["torch_dtype"] = hf.pop("dtype")
  (folder / "config_legacy.json").write_text(json.dumps(hf, indent=2) + "\n")


def randomise(module, part, draw):
  """Fresh values for what would start as ones or zeros and hide mistakes."""
  for name, value in module.named_parameters():
    if part in name:
      draw(value)


def main():
  for seed, build in enumerate((llama3p1, llama3p2_tied, qwen3)):
    torch.manual_seed(seed)
    folder = HERE / build.__name__
    model = build().eval()
    randomise(model, "norm", lambda x: torch.nn.init.uniform_(x, 0.5, 1.5))
    model.save_pretrained(folder, max_shard_size="12KB")
    if build is llama3p1:
      legacy_spelling(folder)
    tokens, mask = inputs()
    plain = logits(model, tokens, mask)
    config = peft.LoraConfig(
      r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    adapted = peft.get_peft_model(model, config).eval()
    randomise(adapted, "lora_", lambda x: torch.nn.init.normal_(x, std=0.2))
    adapted.save_pretrained(folder / "adapter")
    (folder / "adapter" / "README.md").unlink(missing_ok=True)
    np.savez_compressed(
      folder / "expected.npz",
      tokens=tokens,
      mask=mask,
      logits=plain,
      adapted=logits(adapted, tokens, mask),
    )


if __name__ == "__main__":
  main()
