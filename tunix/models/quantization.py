"""Models whose layers' kernels are stored in 4 or 8 bits: the base of QLoRA.

    small = quantization.quantize(model, "nf4")
    adapted = lora.apply(small, lora.LoraConfig(rank=16))

QLoRA: Dettmers et al. 2023, arXiv:2305.14314. Embedding, unembedding, norms and biases
keep their dtype. The storage of a kernel is in transformer/dense/quantized.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.models.adapters import lora_modules
from tunix.models.transformer.dense import quantized, qwix_seam
from tunix.models.transformer.dense.layers import Linear, param
from tunix.models.transformer.dense.quantized import QuantizationConfig, QuantizedKernel
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib

__all__ = ["QuantizationConfig", "dequantize", "is_quantized", "quantize"]


def as_config(config: QuantizationConfig | str) -> QuantizationConfig:
  """Returns the configuration of a method's name ("nf4", "int4", "int8",
  "fp8", "mxfp4").

  A configuration is returned unchanged.

  Raises:
    ValueError: the name is unknown.
  """
  return QuantizationConfig(method=config) if isinstance(config, str) else config


def quantize(
  model: Transformer,
  config: QuantizationConfig | str,
  *,
  targets: tuple[str, ...] | None = None,
) -> Transformer:
  """Returns a model with quantized kernels that shares all else with `model`.

  One kernel is converted at a time. `AutoModel.from_pretrained(..., quantize=)`
  quantizes while reading, and never holds the whole model at full size.

  Args:
    model: a model without adapters and without quantized kernels. It is unchanged.
    config: the name of a method, or the whole configuration.
    targets: names or patterns as in `LoraConfig.targets`. None selects every linear map
      of the layers except the routers of experts, which are small and sensitive. With
      "mxfp4" None selects the experts of a mixture alone, as in published checkpoints.

  Raises:
    ValueError: a target matches nothing, blocks do not divide a kernel, or the model
      has adapters or quantized kernels.
  """
  lora_modules.require_bare(model)
  if is_quantized(model):
    raise ValueError("the model is quantized already: call quantization.dequantize")
  paths = None if targets is None else lora_modules.select(model, targets)
  return _quantized(model, as_config(config), paths)


def for_sampling(model: nnx.Module, config: QuantizationConfig | str) -> Transformer:
  """Returns a model to sample from, with quantized kernels under its adapters.

  It is as `quantize` makes it, but the model may have adapters, kernels that are
  trained whole beside them, and quantized kernels, and these stay as they are. All
  other arrays are shared with `model`, and `rl.weights.placement.copy_weights` encodes
  later weights.

  Args:
    model: the model, or its shapes. It is unchanged.
    config: the name of a method, or the whole configuration.

  Raises:
    ValueError: the model is not a decoder of tunix, qwix has wrapped it, it has no
      kernel to quantize, or see `QuantizationConfig`.
  """
  if not isinstance(model, Transformer) or qwix_seam.is_wrapped(model):
    wrapped = ", which qwix has wrapped" if isinstance(model, Transformer) else ""
    raise ValueError(
      f"weights asks for kernels in {as_config(config).method}, and the model is "
      f"{type(model).__name__}{wrapped}; expected a decoder of tunix, with adapters of "
      "lora.apply or none. Leave weights out"
    )
  out = _quantized(model, as_config(config), None)
  held = [
    sum(map(lora_modules.is_quantized, linears.values()))
    for linears in (lora_modules.linears(model), lora_modules.linears(out))
  ]
  if held[0] == held[1]:
    raise ValueError(
      f"weights asks for kernels in {as_config(config).method}, and all kernels of the "
      "layers are quantized already, or trained whole. Leave weights out"
    )
  return out


def _quantized(
  model: Transformer, config: QuantizationConfig, paths: list[str] | None
) -> Transformer:
  out = nnx.clone(model)
  modules = lora_modules.adaptable(out)
  for path in _chosen(modules, config) if paths is None else paths:
    linear = modules[path]
    # Not quantized already, and not trained whole beside adapters.
    if type(linear.kernel) is nnx.Param:
      spec = linear.kernel.get_metadata("out_sharding")
      linear.kernel = nnx.data(quantize_kernel(linear.kernel.get_value(), spec, config))
  return out


def encode_like(
  arrays: Mapping[str, jax.Array], target: nnx.Module
) -> dict[str, jax.Array]:
  """Returns arrays by path, with kernels encoded that `target` holds quantized.

  Args:
    arrays: parameters of a model with the structure of `target`, quantized or not, by
      path ("layers.0.q_proj.kernel").
    target: the model whose forms are taken.
  """
  out = dict(arrays)
  held = lora_modules.linears(target) if isinstance(target, Transformer) else {}
  for name, linear in held.items():
    path, kernel = f"{name}.kernel", linear.kernel
    if path in out and isinstance(kernel, QuantizedKernel):
      spec = kernel.get_metadata("out_sharding")
      new = quantize_kernel(out.pop(path), spec, kernel.config)
      codes, scales = new.codes.get_value(), new.scales.get_value()
      out |= {f"{path}.codes": codes, f"{path}.scales": scales}
  return out


def quantize_kernel(
  kernel: jax.Array, spec: tuple[Any, ...], config: QuantizationConfig
) -> QuantizedKernel:
  """Quantizes one kernel [*stack, in, out] on the devices that hold it.

  Args:
    kernel: the kernel, or its shape.
    spec: its PartitionSpec entries.
    config: the method, block and dtype of the scales.

  Raises:
    ValueError: blocks do not divide the kernel's inputs.
  """
  block = config.block_of(kernel.shape[-2])
  static = config.method, block, jnp.dtype(config.scale_dtype)
  where, shapes = None, _encoded_shapes(kernel.shape, jnp.dtype(kernel.dtype), *static)
  if (mesh := mesh_lib.mesh_of(kernel)) is not None:
    where = tuple(mesh_lib.sharding_of_spec(spec, x.shape, mesh) for x in shapes)
  if isinstance(kernel, jax.ShapeDtypeStruct):  # a plan
    where = where or (kernel.sharding,) * 2
    codes, scales = (x.update(sharding=w) for x, w in zip(shapes, where))
  else:
    encode = jax.jit(quantized.encode, static_argnums=(1, 2, 3), out_shardings=where)
    codes, scales = encode(kernel, *static)
  return QuantizedKernel(
    param(codes, spec), param(scales, spec), method=config.method, dtype=kernel.dtype
  )


@functools.lru_cache
def _encoded_shapes(shape: tuple[int, ...], dtype: Any, *static: Any) -> Any:
  """Returns the shapes of codes and scales; each transfer of weights asks for them."""
  encode = functools.partial(quantized.encode, method=static[0], block=static[1])
  kernel = jax.ShapeDtypeStruct(shape, dtype)
  return jax.eval_shape(functools.partial(encode, scale_dtype=static[2]), kernel)


def dequantize(model: Transformer) -> Transformer:
  """Returns a model whose kernels are arrays; it keeps adapters and shares all else.

  Raises:
    ValueError: no kernel is quantized.
  """
  if not is_quantized(model):
    raise ValueError("the model is not quantized: there is nothing to dequantize")
  out = nnx.clone(model)
  for linear in lora_modules.linears(out).values():
    dequantize_kernel(linear)
  return out


def dequantize_kernel(linear: Linear) -> None:
  """Replaces a module's quantized kernel by an array, in place."""
  if isinstance(linear.kernel, QuantizedKernel):
    spec = linear.kernel.get_metadata("out_sharding")
    dense = lora_modules.dense_kernel(linear, linear.kernel.dtype)
    linear.kernel = nnx.data(param(dense, spec))


def is_quantized(model: Transformer) -> bool:
  """Returns True if any kernel of the model is stored in 4 or 8 bits."""
  return any(map(lora_modules.is_quantized, lora_modules.linears(model).values()))


def _chosen(paths: Iterable[str], config: QuantizationConfig) -> list[str]:
  """Returns the modules that are quantized if no targets are given."""
  chosen = [path for path in paths if not _is_router(path)]
  experts = [path for path in chosen if ".experts." in path]
  return experts if experts and config.method == "mxfp4" else chosen


def _is_router(path: str) -> bool:
  return path.rpartition(".")[2] in ("router", "gate")


class OnLoad:
  """Quantizer of kernels that are being loaded.

  The loader passes each array through `packed`, and the loaded model through `finish`.
  The peak of memory is the quantized model and one parameter at full size.

  Args:
    config: the name of a method, or the whole configuration.
    model: the model that is loaded, with shapes for arrays.
  """

  def __init__(self, config: QuantizationConfig | str, model: Transformer):
    self.config = as_config(config)
    modules = lora_modules.adaptable(model)
    self.specs = {
      f"{path}.kernel": modules[path].stored.get_metadata()["out_sharding"]
      for path in _chosen(modules, self.config)
    }
    self.kernels: dict[str, QuantizedKernel] = {}

  def packed(self, path: str, value: jax.Array) -> jax.Array:
    """Quantizes a kernel and returns its scales as a placeholder until `finish`.

    An array that is not to be quantized is returned unchanged.
    """
    if path not in self.specs:
      return value
    kernel = quantize_kernel(value, self.specs[path], self.config)
    # Dispatch is asynchronous. Without waiting, the device would hold several
    # parameters at full size.
    jax.block_until_ready(kernel.codes[...])
    self.kernels[path.removesuffix(".kernel")] = kernel
    return kernel.scales[...]

  def finish(self, model: Transformer) -> Transformer:
    """Replaces the placeholders in the loaded model by the quantized kernels."""
    modules = lora_modules.linears(model)
    for path, kernel in self.kernels.items():
      modules[path].kernel = nnx.data(kernel)
    return model


# Names of earlier versions.
quantize, dequantize = quantize, dequantize
