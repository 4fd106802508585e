"""Makes the committed tiny models of images and text beside this file.

Run where the `parity` extra is installed: `python tests/golden/make_vision_models.py`,
with names of models to make these alone.
The weights are stored in bfloat16 to stay small; all below is computed in float32 from
them, with eager attention; Gemma 4 and Qwen3.5 in float64. NAME/expected.npz holds

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
from unittest import mock

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
# Tiny models of Gemma 4 amplify rounding: norms of short vectors, such as those of the
# layers' gates. With this epsilon and the seeds below, float32 loses less than 1e-5.
KINDS = ["sliding_attention", "full_attention"] * 2
GEMMA = TEXT | {
  "num_hidden_layers": 4,
  "layer_types": KINDS,
  "head_dim": 4,
  "global_head_dim": 6,
  "rms_norm_eps": 0.1,
  "sliding_window": 3,
  "hidden_size_per_layer_input": 0,
  "use_bidirectional_attention": "vision",
}
# Vectors for every layer, and layers that read the keys of earlier ones.
VECTORS = {
  "hidden_size_per_layer_input": 5,
  "vocab_size_per_layer_input": VOCAB,
  "num_kv_shared_layers": 2,
  "pad_token_id": 2,
}
EXPERTS = {
  "enable_moe_block": True,
  "num_experts": 4,
  "top_k_experts": 2,
  "moe_intermediate_size": 6,
  "attention_k_eq_v": True,
  "num_global_key_value_heads": 1,
}
GEMMA_TOWER = TOWER | {
  "num_key_value_heads": 3,
  "head_dim": 4,
  "position_embedding_size": 12,
  "rms_norm_eps": 0.05,
}
CLIPPED, STANDARD = {"use_clipped_linears": True}, {"standardize": True}
TIED = {"tie_word_embeddings": True, "initializer_range": 0.3}
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
# and of the whole, with the seed of the weights).
GOLDEN = {
  "smolvlm": ("SmolVLM", TEXT, SIGLIP, {"scale_factor": 3}),
  "ministral3": ("Mistral3", MINISTRAL, TOWER, {}),
  "gemma4": (
    "Gemma4",
    GEMMA | VECTORS,
    GEMMA_TOWER | CLIPPED | STANDARD,
    TIED | {"seed": 2},
  ),
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
  "experts, keys as values": (
    "Gemma4",
    GEMMA | EXPERTS | {"final_logit_softcapping": 5.0},
    GEMMA_TOWER | STANDARD | {"pooling_kernel_size": 4, "num_hidden_layers": 1},
    TIED,
  ),
  "causal images, wide layers": (
    "Gemma4",
    GEMMA
    | VECTORS
    | {"use_bidirectional_attention": None, "use_double_wide_mlp": True},
    GEMMA_TOWER | CLIPPED | {"pooling_kernel_size": 2},
    TIED | {"seed": 3},
  ),
  "few layers, untied": (
    "Gemma4",
    GEMMA
    | {"num_hidden_layers": 2, "layer_types": KINDS[:2], "sliding_window": 1}
    | {"hidden_size_per_layer_input": 3, "vocab_size_per_layer_input": VOCAB},
    GEMMA_TOWER
    | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 12}
    | {"patch_size": 2, "hidden_activation": "silu"}
    | {"rope_parameters": {"rope_type": "axial", "rope_theta": 20.0}},
    {"initializer_range": 0.3, "seed": 1},
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
    | {
      "spatial_merge_size": 1,
      "patch_size": 2,
      "num_position_embeddings": 4,
      "depth": 1,
    }
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
  text_type = {"Mistral3": "Ministral3"}.get(kind, "Llama")
  text_type = f"{kind}Text" if kind.startswith(("Qwen", "Gemma4")) else text_type
  vision = "Pixtral" if kind == "Mistral3" else kind
  image = {"image_token_index" if kind == "Mistral3" else "image_token_id": IMAGE}
  tied = fields.get("tie_word_embeddings", False)
  config = getattr(transformers, f"{kind}Config")(
    text_config=getattr(transformers, f"{text_type}Config")(
      **text, tie_word_embeddings=tied
    ).to_dict(),
    vision_config=getattr(transformers, f"{vision}VisionConfig")(**tower).to_dict(),
    **{"tie_word_embeddings": False} | image | fields,
  )
  config._attn_implementation = "eager"
  model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
  for name, value in model.named_parameters():
    if "norm" in name or name.endswith("bias") or "ln_pre" in name:
      torch.nn.init.normal_(value, std=0.3)
      value.data += 0.0 if name.endswith("bias") or adds_one(kind, name) else 1.0
    if name.endswith("position_embedding_table"):
      torch.nn.init.normal_(value, std=0.3)
    if name.endswith("A_log"):  # as slow decays as in odd_models_live_test.py
      torch.nn.init.uniform_(value, -3, 0.5)
  for name, value in model.named_buffers():
    if limits := BUFFERS.get(name.rpartition(".")[2]):
      torch.nn.init.uniform_(value, *limits)
  return model


# The buffers that folders hold, and limits of their values.
BUFFERS = {
  "layer_scalar": (0.5, 1.5),
  "std_bias": (-1.0, 1.0),
  "std_scale": (0.5, 1.5),
  "input_min": (-1.0, -0.5),
  "input_max": (0.5, 1.0),
  "output_min": (-1.0, -0.5),
  "output_max": (0.5, 1.0),
}


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
  if config.model_type in ("mistral3", "gemma4"):
    is_gemma = config.model_type == "gemma4"
    merged = (
      config.vision_config.pooling_kernel_size
      if is_gemma
      else config.spatial_merge_size
    )
    grid = np.array(GRID, np.int32) // 2 * merged
    sizes = grid * patch
    edge = sizes.max(0)
    pixels = rng.uniform(-1, 1, (len(grid), 3, *edge)).astype(np.float32)
    values = [patches(x[:, :h, :w], patch) for x, (h, w) in zip(pixels, sizes)]
    ours = {"values": np.concatenate(values), "grid": grid}
    theirs = {"image_sizes": torch.tensor(sizes), "pixel_values": torch.tensor(pixels)}
    if is_gemma:
      theirs = padded(values, grid)
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


def padded(values, grid):
  """The patches of each image and their (column, row), padded to those of the largest.

  Padding has the place (-1, -1).
  """
  longest = max(map(len, values))
  pixels = [np.pad(x, ((0, longest - len(x)), (0, 0))) for x in values]
  places = np.full((len(grid), longest, 2), -1)
  for place, (rows, columns) in zip(places, grid):
    index = np.arange(rows * columns)
    place[: len(index)] = np.stack([index % columns, index // columns], -1)
  return {
    "pixel_values": torch.tensor(np.stack(pixels)),
    "image_position_ids": torch.tensor(places),
  }


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
  own = {"position_ids": long(positions)}
  if model.config.model_type == "gemma4":
    own["mm_token_type_ids"] = long(tokens == IMAGE)
  if model.config.model_type.startswith("qwen"):  # it finds the three axes itself
    own = {"mm_token_type_ids": long(tokens == IMAGE)}
  return model(
    input_ids=long(tokens), attention_mask=long(mask), **own, **theirs
  ).logits


@contextlib.contextmanager
def everything_in_float64():
  """Makes torch compute in float64 where the code of a model asks for float32."""
  with (
    mock.patch.multiple(torch, float32=torch.float64, float=torch.float64),
    mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
  ):
    yield


def expected(model):
  """Returns the inputs, and what a model computes from them."""
  if not model.config.model_type.startswith(("gemma4", "qwen3_5")):
    return computed(model)
  # In float32 the chunks of Qwen3.5's recurrence lose up to 4e-5 of a gradient.
  model.set_experts_implementation("eager")  # the grouped product has no float64
  with everything_in_float64():
    found = computed(copy.deepcopy(model).double())
  return {k: np.float32(v) if v.dtype == np.float64 else v for k, v in found.items()}


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
  kind, text, tower, fields = case
  torch.manual_seed(fields.get("seed", 0))
  model = build(kind, text, tower, {k: v for k, v in fields.items() if k != "seed"})
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
