"""Makes the committed tiny multimodal Gemma 3 beside this file, with transformers.

Run where the `parity` extra is installed: `python tests/golden/make_gemma3_vision.py`.
The weights are stored in bfloat16 to stay small; all below is computed in float32 from
them, with eager attention. `gemma3_vision/expected.npz` holds

  images [4, 56, 56, 3]      uint8; the model reads x / 127.5 - 1
  tokens, mask [3, 26]       row 0 has two images; row 1 none, left-padded; row 2 two
                             that touch (one run of 8 for attention), left-padded
  patches [4, 16, 16]        of the vision tower
  features [4, 4, 64]        of the projector
  logits [3, 26, 80]         padding masked, positions counted from the first valid
                             token; padded places are zero
  cotangent [4, 4, 64]       of the features, for the next
  tower_grad/KEY             d sum(features * cotangent) / d tensor, tower and projector
  loss                       mean of -log p(next token) over pairs of valid neighbors
                             whose second is no image token
  grad_names, grad_norms     of every tensor, of that loss

Tensors are named as in the published checkpoints. The sliding window, 3 tokens, is
shorter than an image's 4: within an image the last token does not see the first there.
"""

import pathlib
import re

import numpy as np
import torch
import transformers
from safetensors import torch as st

HERE = pathlib.Path(__file__).parent
VOCAB, BOI, EOI, IMAGE = 80, 77, 78, 79
SIZE, PER_IMAGE = 56, 4
LENGTH = 26


def build():
  text = transformers.Gemma3TextConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    query_pre_attn_scalar=16,
    max_position_embeddings=128,
    sliding_window=3,
    layer_types=["sliding_attention", "full_attention"],
    # Wide, so that attention matters for the logits.
    initializer_range=0.2,
  )
  vision = transformers.SiglipVisionConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    patch_size=14,
    image_size=SIZE,
    vision_use_head=False,
  )
  config = transformers.Gemma3Config(
    text_config=text,
    vision_config=vision,
    mm_tokens_per_image=PER_IMAGE,
    boi_token_index=BOI,
    eoi_token_index=EOI,
    image_token_index=IMAGE,
    initializer_range=0.2,
  )
  config._attn_implementation = "eager"
  return transformers.Gemma3ForConditionalGeneration(config).eval()


def randomise(model):
  """Fresh values for what would start as ones or zeros and hide mistakes."""
  for name, value in model.named_parameters():
    if "norm" in name or name.endswith("bias"):
      torch.nn.init.normal_(value, std=0.3)
      if "layer_norm" in name or "post_layernorm" in name:
        value.data += 1.0 if name.endswith("weight") else 0.0
    if "mm_input_projection" in name:
      torch.nn.init.normal_(value, std=0.5)


def inputs():
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (4, SIZE, SIZE, 3), dtype=np.uint8)
  tokens = rng.integers(3, BOI, (3, LENGTH)).astype(np.int32)
  mask = np.ones_like(tokens)
  image = [BOI, *[IMAGE] * PER_IMAGE, EOI]
  tokens[0, 2:8] = image
  tokens[0, 12:18] = image
  tokens[2, 8 : 10 + 2 * PER_IMAGE] = [BOI, *[IMAGE] * (2 * PER_IMAGE), EOI]
  for row, padding in ((1, 5), (2, 3)):
    mask[row, :padding] = 0
    tokens[row, :padding] = 0
  return images, tokens, mask


def pixels(images):
  scaled = images.astype(np.float32) / np.float32(127.5) - 1
  return torch.tensor(scaled.transpose(0, 3, 1, 2))


def logits(model, images, tokens, mask):
  positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
  long = lambda x: torch.tensor(x, dtype=torch.long)
  return model(
    input_ids=long(tokens),
    pixel_values=pixels(images),
    attention_mask=long(mask),
    position_ids=long(positions),
    token_type_ids=long(tokens == IMAGE),
  ).logits


def loss(logits, tokens, mask):
  pairs = (mask[:, 1:] * mask[:, :-1]).astype(bool) & (tokens[:, 1:] != IMAGE)
  nats = torch.nn.functional.cross_entropy(
    logits[:, :-1].transpose(1, 2),
    torch.tensor(tokens[:, 1:], dtype=torch.long),
    reduction="none",
  )
  return nats[torch.tensor(pairs)].mean()


def published_name(name):
  """Of a parameter in memory."""
  name = re.sub(r"^model\.vision_tower\.", "vision_tower.vision_model.", name)
  name = re.sub(r"^model\.language_model\.", "language_model.model.", name)
  return re.sub(r"^model\.multi_modal", "multi_modal", name)


def gradients(model, value):
  model.zero_grad()
  value.backward()
  return {
    published_name(name): p.grad.numpy().copy()
    for name, p in model.named_parameters()
    if p.grad is not None
  }


def expected(model):
  images, tokens, mask = inputs()
  out = model.model.get_image_features(pixels(images))
  features = out.pooler_output
  cotangent = np.random.default_rng(1).normal(size=features.shape).astype(np.float32)
  tower = gradients(model, (features * torch.tensor(cotangent)).sum())
  values = logits(model, images, tokens, mask)
  nats = loss(values, tokens, mask)
  norms = {k: np.linalg.norm(v) for k, v in gradients(model, nats).items()}
  arrays = {
    "images": images,
    "tokens": tokens,
    "mask": mask,
    "patches": out.last_hidden_state.detach().numpy(),
    "features": features.detach().numpy(),
    "logits": values.detach().numpy() * mask[..., None].astype(np.float32),
    "cotangent": cotangent,
    "loss": nats.detach().numpy(),
    "grad_names": np.array(sorted(norms)),
    "grad_norms": np.array([norms[k] for k in sorted(norms)], np.float32),
  }
  return arrays | {f"tower_grad/{key}": value for key, value in tower.items()}


def publish(folder):
  """Renames the tensors: a model made from a config is saved without
  "vision_model.", which the published checkpoints have."""
  file = folder / "model.safetensors"
  renamed = {
    re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", key): value
    for key, value in st.load_file(file).items()
  }
  st.save_file(renamed, file, metadata={"format": "pt"})
  file.chmod(0o644)


def main():
  torch.manual_seed(0)
  folder = HERE / "gemma3_vision"
  model = build()
  randomise(model)
  model.to(torch.bfloat16).save_pretrained(folder)
  publish(folder)
  # Read back: `model.float()` would keep rotary frequencies rounded to bfloat16.
  model = transformers.Gemma3ForConditionalGeneration.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  np.savez_compressed(folder / "expected.npz", **expected(model))


if __name__ == "__main__":
  main()
