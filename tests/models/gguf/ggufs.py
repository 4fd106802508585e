"""GGUF files of the golden folders, written by the package `gguf`."""

import json

import gguf
import numpy as np

from tests.models import checkpoints
from tunix.models import families
from tunix.models.gguf import architectures, convert, rope

# Golden folders that llama.cpp has an architecture for.
NAMES = (
  *("gemma", "gemma2", "gemma3", "gemma4", "gpt_oss", "granite", "llama3p1"),
  *("llama3p2_tied", "llama_biased", "mistral", "olmo2", "olmo3", "phi3", "qwen2"),
  *("qwen3", "qwen3_moe", "smollm3"),
)
# What llama.cpp fixes and these folders have otherwise.
FIXED = {
  "gemma2": {"query_pre_attn_scalar": 8},
  "gemma3": {
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention"] * 5,
  },
  "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
  "smollm3": {"no_rope_layers": [1, 1, 1]},
  "mistral": {"sliding_window": None},
}
# Rows of 256 numbers, the blocks of K-quants; see golden/make_k_quants.py.
K_SIZES = {"dim": 256, "hidden": 32, "heads": 1, "head_dim": 32}


def source(name, **fields):
  """The canonical config.json of a golden folder, and its tensors."""
  hf = json.loads((checkpoints.GOLDEN / name / "config.json").read_text())
  family = families.by_model_type(hf["model_type"])
  config = family.config_from_hf(hf | FIXED.get(name, {}) | fields)
  return family.config_to_hf(config), checkpoints.tensors(checkpoints.GOLDEN / name)


def llama(dim=64, hidden=96, heads=4, head_dim=16):
  """A Llama of one layer, whose rows fill blocks of quantized numbers."""
  vocab, width = 48, heads * head_dim
  shapes = {f"self_attn.{x}_proj": (width, dim) for x in ("q", "k", "v")}
  shapes |= {"self_attn.o_proj": (dim, width)}
  shapes |= {f"mlp.{x}_proj": (hidden, dim) for x in ("gate", "up")}
  shapes |= {"mlp.down_proj": (dim, hidden)}
  shapes |= {f"{x}_layernorm": (dim,) for x in ("input", "post_attention")}
  named = {f"model.layers.0.{key}.weight": shape for key, shape in shapes.items()}
  named |= {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
  hf = {
    "model_type": "llama",
    "vocab_size": vocab,
    "hidden_size": dim,
    "intermediate_size": hidden,
    "num_hidden_layers": 1,
    "num_attention_heads": heads,
    "head_dim": head_dim,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
  }
  family = families.by_model_type("llama")
  rng = np.random.default_rng(0)
  arrays = {k: rng.standard_normal(n).astype(np.float32) for k, n in named.items()}
  return family.config_to_hf(family.config_from_hf(hf)), arrays


def write(path, hf, tensors, kind=gguf.GGMLQuantizationType.F32, **metadata):
  """Writes a model. `kind` is the type of all matrices."""
  architecture = architectures.of_model_type(hf["model_type"])
  writer = gguf.GGUFWriter(path, architecture.name)
  for key, value in (convert.metadata_of(architecture, hf) | metadata).items():
    add(writer, key, value)
  rope_config = rope.parse(hf)
  dim = int(hf["head_dim"] * hf.get("partial_rotary_factor", 1.0))
  for name, table in rope.tables(rope_config, hf.get("global_head_dim") or dim).items():
    writer.add_tensor(name, table)
  left = dict(tensors)
  for link in convert.links(architecture, hf):
    if all(name in left for name in link.hf):
      arrays = [left.pop(name) for name in link.hf]
      for name, array in zip(link.gguf, link.change.to_gguf(arrays)):
        add_tensor(writer, name, np.ascontiguousarray(array), kind)
  assert not left, sorted(left)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def add(writer, key, value):
  """Adds metadata in the type that llama.cpp reads."""
  kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
  kinds |= {str: writer.add_string, list: writer.add_array}
  kinds[type(value)](key, value)


def add_tensor(writer, name, array, kind):
  if array.ndim < 2 or kind == gguf.GGMLQuantizationType.F32:
    writer.add_tensor(name, array)
  else:
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
