"""The layer of a checkpoint that predicts further tokens (MTP), as a draft model.

DeepSeek-V3, GLM-4.7 Flash and Qwen3.5 are trained with one more layer (DeepSeek-AI
2024, arXiv:2412.19437, section 2.2). Its input at a token joins the embedding of the
token with the model's hidden state at the token before. Its output predicts the token
after. `tunix.generate.engine` drafts with it:

    model = AutoModel.from_pretrained(folder)
    engine = Engine(model, tokenizer, EngineConfig(draft_tokens=1),
                    draft_model=mtp.from_pretrained(folder))

The hidden states are those after the model's last norm, as in vLLM. Training does not
change this layer, and saved models do not have it.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tunix.models import automodel, families
from tunix.models.family import Family
from tunix.models.files import stored_formats, tensor_files
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import values as hf_values
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.params import HfName, MTPNames
from tunix.utils import checks

_ELSEWHERE = "elsewhere."  # prefix of the tensors of the model


class MTPLayer(Transformer):
  """A decoder of one layer, which reads the hidden states of another model.

  Attributes:
    embed_norm, hidden_norm: norms of the embedding and of the hidden state.
    join: linear map from both [2 D] to the input of the layer [D].
  """

  def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    c, make = config, LayerMaker(config.sharding, config.param_dtype, rngs)
    self.embed_norm = make.norm(c.embed_dim, c.norm_eps, c.norm_offset)
    self.hidden_norm = make.norm(c.embed_dim, c.norm_eps, c.norm_offset)
    self.join = make.linear(2 * c.embed_dim, c.embed_dim, "out_in")

  def embed_after(
    self, tokens: Int[Array, "B T"], hidden: Float[Array, "B T D"]
  ) -> Float[Array, "B T D"]:
    """Returns the `input_embeddings` of a call.

    Args:
      tokens: token ids.
      hidden: for each token, the hidden state at the token before it.
    """
    x = self.embed_norm(self.embed(tokens))
    return self.join(jnp.concatenate([x, self.hidden_norm(hidden)], axis=-1))


def from_pretrained(
  folder: str | os.PathLike[str],
  mesh: Mesh | None = None,
  *,
  revision: str | None = None,
  dtype: DTypeLike | None = None,
  quantize: str | None = None,
) -> MTPLayer:
  """Loads the layer that predicts further tokens, with the embeddings of its model.

  Args:
    folder: the folder or hub id of the model.
    mesh, revision, dtype, quantize: see `AutoModel.from_pretrained`.

  Raises:
    FileNotFoundError: see `AutoModel.from_pretrained`.
    ValueError: the family has no such layer, or the checkpoint has not exactly one; or
      see `AutoModel.from_pretrained`.
  """
  path = automodel.resolve_folder(folder, revision)
  hf = tensor_files.read_json(path / "config.json")
  base = families.by_model_type(hf.get("model_type"), False)
  if base.mtp is None:
    known = sorted(f.name for f in families.FAMILIES.values() if f.mtp is not None)
    raise ValueError(
      f"{path} is a model of the family {base.name!r}, which has no layer that "
      f"predicts further tokens; expected one of {known}. Use a small model as the "
      "draft model"
    )
  text = hf if base.mtp.count in hf else hf.get("text_config", hf)
  if text.get("mtp_use_dedicated_embeddings"):
    raise ValueError(
      f"{path / 'config.json'}: mtp_use_dedicated_embeddings is true; expected a layer "
      "that shares the embeddings of its model. Use a small model as the draft model"
    )
  field = base.mtp.count
  count = hf_values.integer({field: 0} | text, field, checks.NOT_NEGATIVE)
  if count != 1:
    raise ValueError(
      f"{path / 'config.json'}: {field} is {count}; expected 1 layer that "
      "predicts further tokens. Use a small model as the draft model"
    )
  names = base.mtp.of(base.config_from_hf(stored_formats.plain(hf)).num_layers)
  if not any(
    base.canonical_key(key).startswith(names.prefix)
    for key in tensor_files.open_folder(path)
  ):
    raise ValueError(
      f"{path} has no tensor {names.prefix}*, though {field} is 1 in its config.json; "
      "expected those of the layer, which many derived folders lack. Use a small model "
      "as the draft model"
    )
  family = _family(base, names)
  out = automodel.AutoModel.from_pretrained(
    path, mesh, dtype=dtype, quantize=quantize, family=family
  )
  assert isinstance(out, MTPLayer)
  return out


def _family(base: Family, names: MTPNames) -> Family:
  """Returns the family that loads the layer from the folders of a family."""

  def config_from_hf(hf: Any) -> TransformerConfig:
    config = base.config_from_hf(hf)
    moe = config.moe and dataclasses.replace(config.moe, dense_layers=())
    return dataclasses.replace(
      config, num_layers=1, layer_types=None, type_fields=(), moe=moe
    )

  def canonical_key(key: str) -> str:
    key = base.canonical_key(key)
    for theirs, ours in (
      (names.embed_norm, "mtp.embed_norm"),
      (names.hidden_norm, "mtp.hidden_norm"),
      (names.join, "mtp.join"),
      (names.norm, "model.norm"),
    ):
      if key.startswith(f"{theirs}."):
        return ours + key.removeprefix(theirs)
    shared = (f"{names.layer}embed_tokens.", f"{names.layer}shared_head.")
    if key.startswith(names.layer) and not key.startswith(shared):
      return "model.layers.0." + key.removeprefix(names.layer)
    is_shared = key.startswith(("model.embed_tokens.", "lm_head."))
    return key if is_shared else _ELSEWHERE + key

  own = {
    "embed_norm.scale": HfName("mtp.embed_norm.weight"),
    "hidden_norm.scale": HfName("mtp.hidden_norm.weight"),
    "join.kernel": HfName("mtp.join.weight", transpose=True),
  }
  return dataclasses.replace(
    base,
    name=f"{base.name} (MTP)",
    model_class=MTPLayer,
    names={**base.names, **own},
    config_from_hf=config_from_hf,
    canonical_key=canonical_key,
    harmless=(*base.harmless, _ELSEWHERE.replace(".", r"\.") + ".*"),
    mtp=None,
  )
