"""Makes the committed tiny models of images and text beside this file.

Run where the `parity` extra is installed: `python tests/golden/make_vision_models.py`,
with names of models to make these alone.
The weights are stored in bfloat16 to stay small; all below is computed in float32 from
them (Qwen3.5: in float64), with eager attention. NAME/expected.npz holds

  images, or values and grid   what the model reads, see `inputs`
  tokens, mask [3, 20]         row 0 has two images; row 1 none, left-padded; row 2 one
  features [K, D]              vectors of all soft tokens
  logits [3, 20, 80]           padding masked; padded places are zero
  loss                         mean of -log p(next token) over pairs of valid neighbors
                               whose second is no image token
  grad/KEY                     gradient of the loss for every tensor, named in memory
"""

import contextlib
import copy
import pathlib
import sys

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
VOCAB, LENGTH, IMAGE = 80, 20, 79
TEXT = {
  "vocab_size": VOCAB,
  "hidden_size": 16,
  "intermediate_size": 20,
  "num_hidden_layers": 1,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "initializer_range": 0.3,
  "pad_token_id": 0,
}
TOWER = {
  "hidden_size": 12,
  "intermediate_size": 20,
  "num_hidden_layers": 2,
  "num_attention_heads": 3,
  "patch_size": 4,
  "initializer_range": 0.3,
}
SIGLIP = TOWER | {"image_size": 24}
YARN = {
  "rope_type": "yarn",
  "rope_theta": 100.0,
  "factor": 4.0,
  "original_max_position_embeddings": 16,
  "llama_4_scaling_beta": 0.5,
}
MINISTRAL = TEXT | {"head_dim": 6, "rope_parameters": YARN}
QWEN_TOWER = {
  "hidden_size": 16,
  "intermediate_size": 20,
  "depth": 3,
  "num_heads": 2,
  "patch_size": 4,
  "out_hidden_size": 16,
  "num_position_embeddings": 25,
  "initializer_range": 0.3,
}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
QWEN3 = TEXT | {"head_dim": 8, "rope_parameters": MROPE, "num_hidden_layers": 3}
QWEN3_5 = QWEN3 | {
  "num_hidden_layers": 2,
  "head_dim": 16,
  "rope_parameters": MROPE | {"partial_rotary_factor": 0.5},
  "layer_types": ["linear_attention", "full_attention"],
  "linear_key_head_dim": 4,
  "linear_value_head_dim": 6,
  "linear_num_key_heads": 2,
  "linear_num_value_heads": 4,
}
# Patches of the images; both edges are multiples of the merged squares.
GRID = ((4, 2), (2, 6), (4, 4))

# Name -> (name of the classes in `transformers`, fields of the text model, of the tower
# and of the whole).
GOLDEN = {
  "smolvlm": ("SmolVLM", TEXT, SIGLIP, {"scale_factor": 3}),
  "ministral3": ("Mistral3", MINISTRAL, TOWER, {}),
  "qwen3_5": ("Qwen3_5", QWEN3_5, QWEN_TOWER, {}),
  "qwen3_vl": (
    "Qwen3VL",
    QWEN3,
    QWEN_TOWER | {"deepstack_visual_indexes": [0, 2]},
    {},
  ),
}
# Further odd ones, which only vision_models_live_test.py makes.
ODD = {
  "one layer, tied": (
    "SmolVLM",
    TEXT | {"num_key_value_heads": 1},
    SIGLIP | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8},
    {"scale_factor": 1, "tie_word_embeddings": True},
  ),
  "idefics3": (
    "Idefics3",
    TEXT | {"num_hidden_layers": 3, "attention_bias": True, "head_dim": 6},
    SIGLIP | {"image_size": 16, "layer_norm_eps": 1e-3, "patch_size": 2},
    {"scale_factor": 4},
  ),
  "squares of three, biases": (
    "Mistral3",
    MINISTRAL | {"num_hidden_layers": 2},
    TOWER
    | {"num_attention_heads": 1, "hidden_act": "silu", "num_hidden_layers": 1}
    | {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}},
    {"spatial_merge_size": 3, "multimodal_projector_bias": True},
  ),
  "no merging, tied": (
    "Mistral3",
    MINISTRAL,
    TOWER | {"patch_size": 2, "hidden_size": 16, "num_attention_heads": 2},
    {
      "spatial_merge_size": 1,
      "tie_word_embeddings": True,
      "projector_hidden_act": "silu",
    },
  ),
  "Qwen3.5, tied, squares of three": (
    "Qwen3_5",
    QWEN3_5 | {"num_key_value_heads": 1, "layer_types": ["full_attention"] * 2},
    QWEN_TOWER | {"depth": 1, "num_heads": 1, "spatial_merge_size": 3},
    {"tie_word_embeddings": True},
  ),
  "Qwen3.5, mixture, no merging": (
    "Qwen3_5Moe",
    QWEN3_5
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    | {"shared_expert_intermediate_size": 12},
    QWEN_TOWER
    | {"spatial_merge_size": 1, "patch_size": 2, "num_position_embeddings": 4}
    | {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}},
    {},
  ),
  "Qwen3-VL, tied, one feature": (
    "Qwen3VL",
    QWEN3 | {"num_hidden_layers": 1, "num_key_value_heads": 4, "attention_bias": True},
    QWEN_TOWER | {"deepstack_visual_indexes": [1], "depth": 2},
    {"tie_word_embeddings": True},
  ),
  "Qwen3-VL, features of all layers, YaRN": (
    "Qwen3VL",
    QWEN3
    | {"num_hidden_layers": 2, "rms_norm_eps": 1e-3, "num_key_value_heads": 1}
    | {
      "rope_parameters": MROPE
      | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    },
    QWEN_TOWER
    | {"deepstack_visual_indexes": [0, 1], "depth": 2, "num_position_embeddings": 49},
    {},
  ),
}


def build(kind, text, tower, fields):
  prefix, text_type = (
    ("Mistral3", "Ministral3") if kind == "Mistral3" else (kind, "Llama")
  )
  text_type = f"{kind}Text" if kind.startswith("Qwen") else text_type
  vision = "Pixtral" if kind == "Mistral3" else prefix
  image = {"image_token_index" if kind == "Mistral3" else "image_token_id": IMAGE}
  tied = fields.get("tie_word_embeddings", False)
  config = getattr(transformers, f"{prefix}Config")(
    text_config=getattr(transformers, f"{text_type}Config")(
      **text, tie_word_embeddings=tied
    ).to_dict(),
    vision_config=getattr(transformers, f"{vision}VisionConfig")(**tower).to_dict(),
    **{"tie_word_embeddings": False} | image | fields,
  )
  config._attn_implementation = "eager"
  model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
  for name, value in model.named_parameters():
    if "norm" in name or name.endswith("bias") or "ln_pre" in name:
      torch.nn.init.normal_(value, std=0.3)
      value.data += 0.0 if name.endswith("bias") or adds_one(kind, name) else 1.0
    if name.endswith("A_log"):  # as slow decays as in odd_models_live_test.py
      torch.nn.init.uniform_(value, -3, 0.5)
  return model


def adds_one(kind, name):
  """True for a norm that multiplies by 1 + weight."""
  in_text = "language_model" in name and "linear_attn" not in name
  return kind.startswith("Qwen3_5") and in_text


def inputs(model):
  """Returns what our model reads, and the arguments of theirs."""
  rng = np.random.default_rng(0)
  config = model.config
  patch = config.vision_config.patch_size
  if config.model_type.startswith("qwen"):
    return qwen_inputs(rng, patch, config.vision_config.spatial_merge_size)
  if config.model_type == "mistral3":
    merged = config.spatial_merge_size
    grid = np.array(GRID, np.int32) // 2 * merged
    sizes = grid * patch
    edge = sizes.max(0)
    pixels = rng.uniform(-1, 1, (len(grid), 3, *edge)).astype(np.float32)
    values = [patches(x[:, :h, :w], patch) for x, (h, w) in zip(pixels, sizes)]
    ours = {"values": np.concatenate(values), "grid": grid}
    theirs = {"image_sizes": torch.tensor(sizes), "pixel_values": torch.tensor(pixels)}
    return ours, theirs, (grid // merged).prod(1)
  size = config.vision_config.image_size
  pixels = rng.uniform(-1, 1, (3, 3, size, size)).astype(np.float32)
  per_image = (size // patch // config.scale_factor) ** 2
  theirs = {"pixel_values": torch.tensor(pixels)[None]}
  return {"images": pixels.transpose(0, 2, 3, 1)}, theirs, [per_image] * 3


def qwen_inputs(rng, patch, merged):
  """The patches in squares; for theirs, twice and with the channel first."""
  sizes = np.array(GRID, np.int32) // 2 * merged
  grid = np.insert(sizes, 0, 1, axis=1)
  count = sizes.prod(1).sum()
  pixels = rng.uniform(-1, 1, (count, patch, patch, 3)).astype(np.float32)
  ours = {"values": pixels.reshape(count, -1), "grid": grid}
  frames = np.stack([pixels.transpose(0, 3, 1, 2)] * 2, axis=2).reshape(count, -1)
  theirs = {
    "pixel_values": torch.tensor(frames),
    "image_grid_thw": torch.tensor(grid, dtype=torch.long),
  }
  return ours, theirs, (sizes // merged).prod(1)


def patches(image, edge):
  """[3, Y, X] -> [P, edge * edge * 3], row by row."""
  _, height, width = image.shape
  x = image.reshape(3, height // edge, edge, width // edge, edge)
  return x.transpose(1, 3, 2, 4, 0).reshape(-1, edge * edge * 3)


def rows(counts):
  """Returns tokens and mask of three rows with 2, 0 and 1 images of `counts` tokens."""
  rng = np.random.default_rng(1)
  tokens = rng.integers(3, IMAGE, (3, LENGTH)).astype(np.int32)
  mask = np.ones_like(tokens)
  starts = ((0, 2), (0, 4 + counts[0]), (2, 7))
  for (row, start), count in zip(starts, counts):
    assert start + count < LENGTH
    tokens[row, start : start + count] = IMAGE
  for row, padding in ((1, 5), (2, 3)):
    mask[row, :padding] = 0
    tokens[row, :padding] = 0
  return tokens, mask


def loss(logits, tokens, mask):
  pairs = (mask[:, 1:] * mask[:, :-1]).astype(bool) & (tokens[:, 1:] != IMAGE)
  nats = torch.nn.functional.cross_entropy(
    logits[:, :-1].transpose(1, 2),
    torch.tensor(tokens[:, 1:], dtype=torch.long),
    reduction="none",
  )
  return nats[torch.tensor(pairs)].mean()


def logits(model, theirs, tokens, mask):
  positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
  long = lambda x: torch.tensor(x, dtype=torch.long)
  if model.config.model_type.startswith("qwen"):  # it finds the three axes itself
    own = {"mm_token_type_ids": long(tokens == IMAGE)}
  else:
    own = {"position_ids": long(positions)}
  return model(
    input_ids=long(tokens), attention_mask=long(mask), **own, **theirs
  ).logits


@contextlib.contextmanager
def everything_in_float64():
  """Makes torch compute in float64 where the code of a model asks for float32."""
  names = (torch, "float32"), (torch, "float"), (torch.Tensor, "float")
  before = [getattr(*name) for name in names]
  for name, value in zip(names, (torch.float64, torch.float64, torch.Tensor.double)):
    setattr(*name, value)
  try:
    yield
  finally:
    for name, value in zip(names, before):
      setattr(*name, value)


def expected(model):
  if not model.config.model_type.startswith("qwen3_5"):
    return computed(model)
  # In float32 the chunks of its recurrence lose up to 4e-5 of a gradient.
  model.set_experts_implementation("eager")  # the grouped product has no float64
  with everything_in_float64():
    exact = computed(copy.deepcopy(model).double())
  return {
    name: x.astype(np.float32) if x.dtype == np.float64 else x
    for name, x in exact.items()
  }


def computed(model):
  ours, theirs, counts = inputs(model)
  tokens, mask = rows(counts)
  features = model.model.get_image_features(**theirs).pooler_output
  values = logits(model, theirs, tokens, mask)
  nats = loss(values, tokens, mask)
  model.zero_grad()
  nats.backward()
  grads = {
    f"grad/{name}": value.grad.numpy().copy()
    for name, value in model.named_parameters()
    if value.grad is not None
  }
  return {
    **ours,
    "tokens": tokens,
    "mask": mask,
    "features": torch.cat(list(features)).detach().numpy(),
    "logits": values.detach().numpy() * mask[..., None].astype(np.float32),
    "loss": nats.detach().numpy(),
    **grads,
  }


def make(case, folder):
  """Writes a model and returns what it computes in float32."""
  torch.manual_seed(0)
  model = build(*case)
  model.to(torch.bfloat16).save_pretrained(folder)
  (folder / "model.safetensors").chmod(0o644)
  # Read back: `model.float()` would keep rotary frequencies rounded to bfloat16.
  model = type(model).from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  )
  return expected(model.eval())


def main():
  for name, case in GOLDEN.items():
    if sys.argv[1:] and name not in sys.argv[1:]:
      continue
    folder = HERE / f"{name}_vision"
    np.savez_compressed(folder / "expected.npz", **make(case, folder))


if __name__ == "__main__":
  main()
