"""`AutoModel` loads, and `save_pretrained` writes, a module that is none of ours."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tunix.models import safetensors_saver
from tunix.models.automodel import AutoModel
from tunix.models.families import Family
from tunix.models.transformer.params import HfName


@dataclasses.dataclass(frozen=True)
class Config:
  vocab: int = 32
  width: int = 16
  depth: int = 3
  param_dtype: Any = jnp.float32


class Block(nnx.Module):
  def __init__(self, c, rngs):
    self.mix = nnx.Linear(c.width, c.width, param_dtype=c.param_dtype, rngs=rngs)
    self.mix.kernel.set_metadata(out_sharding=(None, "fsdp"))

  def __call__(self, x):
    return x + jnp.tanh(self.mix(x))


class Tower(nnx.Module):
  """Blocks in a list: none of our paths, no stack."""

  def __init__(self, config, *, rngs):
    self.config = config
    self.embed = nnx.Embed(
      config.vocab, config.width, param_dtype=config.param_dtype, rngs=rngs
    )
    self.blocks = nnx.List([Block(config, rngs) for _ in range(config.depth)])
    self.out = nnx.Linear(
      config.width,
      config.vocab,
      use_bias=False,
      param_dtype=config.param_dtype,
      rngs=rngs,
    )

  def __call__(self, tokens):
    x = self.embed(tokens)
    for block in self.blocks:
      x = block(x)
    return self.out(x)


def to_hf(config):
  return {"model_type": "tower", "sizes": [config.vocab, config.width, config.depth]}


TOWER = Family(
  name="tower",
  model_types=("tower",),
  config_class=Config,
  model_class=Tower,
  names={
    "embed.embedding": HfName("tower.wte.weight"),
    "blocks.{i}.mix.kernel": HfName("tower.h.{i}.mix.weight", transpose=True),
    "blocks.{i}.mix.bias": HfName("tower.h.{i}.mix.bias"),
    "out.kernel": HfName("lm_head.weight", transpose=True),
  },
  config_from_hf=lambda hf: Config(*hf["sizes"]),
  config_to_hf=to_hf,
)
TOKENS = np.arange(12).reshape(2, 6)


@pytest.fixture
def saved(tmp_path):
  model = Tower(Config(), rngs=nnx.Rngs(0))
  safetensors_saver.save_pretrained(model, tmp_path / "tower", family=TOWER)
  return model, tmp_path / "tower"


def test_there_and_back(saved, mesh_fsdp8):
  model, folder = saved
  for mesh in (None, mesh_fsdp8):
    loaded = AutoModel.from_pretrained(folder, mesh=mesh, family=TOWER)
    assert isinstance(loaded, Tower) and loaded.config == model.config
    np.testing.assert_allclose(loaded(TOKENS), model(TOKENS), atol=1e-6)
  kernel = loaded.blocks[1].mix.kernel[...]
  assert kernel.sharding.shard_shape(kernel.shape) == (16, 2)


def test_the_dtype_is_told(saved):
  _, folder = saved
  loaded = AutoModel.from_pretrained(folder, dtype="bfloat16", family=TOWER)
  assert {x.dtype for x in jax.tree.leaves(nnx.state(loaded, nnx.Param))} == {
    jnp.dtype(jnp.bfloat16)
  }


@pytest.mark.parametrize(
  ("change", "options", "part"),
  [
    ({"names": {}}, {}, "has no Hugging Face name: add"),
    (
      {"config_from_hf": lambda hf: Config(depth=4)},
      {},
      "'tower.h.3.mix.bias' is miss",
    ),
    ({"config_from_hf": lambda hf: Config(depth=2)}, {}, "which a tower model of this"),
    ({}, {"remat": "block"}, "Config has no such field"),
    ({}, {"quantize": "nf4"}, "only our decoder is quantized"),
  ],
)
def test_what_does_not_fit_is_named(change, options, part, saved):
  family = dataclasses.replace(TOWER, **change)
  with pytest.raises(ValueError, match=part):
    AutoModel.from_pretrained(saved[1], family=family, **options)
