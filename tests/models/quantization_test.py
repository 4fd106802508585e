import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.models import checkpoints
from tests.models.lora_test import state, widen
from tunix.models import lora, quantization
from tunix.models.adapters import lora_modules
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer.dense import quantized
from tunix.sft.peft_trainer import CheckpointOptions, PeftTrainer, TrainingConfig
from tunix.sft.steps.module_state import ModuleState
from tunix.sft.steps.step_metrics import matmul_params
from tunix.utils import tree

TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)
GOLDEN = checkpoints.GOLDEN / "llama3p1"
# The unrolled form, as CI runs it after the quick suite.
SLOW = pytest.param(False, marks=[pytest.mark.slow, pytest.mark.ci])


def round_trip(kernel, method, block):
  codes, scales = quantized.encode(kernel, method, block, jnp.float32)
  return codes, scales, quantized.decode(codes, scales, method, jnp.float32)


@pytest.mark.parametrize(
  "method, low, high", [("nf4", 0.08, 0.1), ("int4", 0.08, 0.12)]
)
def test_error_of_four_bits(method, low, high):
  kernel = jax.random.normal(jax.random.key(0), (2, 256, 64))
  codes, scales, back = round_trip(kernel, method, 64)
  assert codes.dtype == jnp.uint8 and codes.shape == (2, 128, 64)
  assert scales.shape == (2, 4, 64)
  assert low < checkpoints.relative(back, kernel) < high


@pytest.mark.parametrize(
  "method, dtype, low, high",
  [("int8", jnp.int8, 0.005, 0.01), ("fp8", jnp.int8, 0.02, 0.03)],
)
def test_error_of_eight_bits(method, dtype, low, high):
  kernel = jax.random.normal(jax.random.key(0), (2, 256, 64))
  codes, scales, back = round_trip(kernel, method, 256)
  assert codes.dtype == dtype and codes.shape == kernel.shape
  assert scales.shape == (2, 1, 64)
  assert low < checkpoints.relative(back, kernel) < high


def test_fp8_by_hand():
  # Scale 448 / 448 = 1. E4M3 has 3 bits after the first: near 20 its numbers are 2
  # apart, so that 21 lies between 20 and 22 and goes to 20, whose last bit is 0.
  kernel = jnp.array([448.0, -448.0, 21.0, 2.0**-9])[:, None]
  codes, scales, back = round_trip(kernel, "fp8", 4)
  assert scales.tolist() == [[1.0]]
  assert back[:, 0].tolist() == [448.0, -448.0, 20.0, 2.0**-9]
  assert codes[0, 0] == 0b01111110  # exponent 8, mantissa 6 of 8


def test_nf4_by_hand():
  # Of a block whose largest absolute value is 2: 2 -> 1, -2 -> -1, 0 -> 0, 1 -> 0.5,
  # whose nearest entries are 0.4407 (0.0593 off) and 0.5626 (0.0626 off).
  kernel = jnp.array([2.0, -2.0, 0.0, 1.0])[:, None]
  codes, scales, back = round_trip(kernel, "nf4", 4)
  np.testing.assert_array_equal(codes[:, 0], [15 + (0 << 4), 7 + (12 << 4)])
  assert scales.tolist() == [[2.0]]
  np.testing.assert_allclose(back[:, 0], [2, -2, 0, 0.8814197], rtol=1e-6)


def test_int4_by_hand():
  # Scale 7 / 7 = 1; 2.6 rounds to 3; codes are 8 more than the numbers.
  codes, scales, back = round_trip(jnp.array([[7.0], [2.6]]), "int4", 2)
  assert codes.tolist() == [[15 + (11 << 4)]] and scales.tolist() == [[1.0]]
  assert back[:, 0].tolist() == [7.0, 3.0]


def test_blocks_of_zeros_stay_zero():
  for method in quantized.METHODS:
    assert not np.any(round_trip(jnp.zeros((4, 2)), method, 4)[2])


def test_smaller_blocks_and_scales_of_bfloat16_change_something():
  model = toys.model(embed_dim=128)
  kernel = state(model)["layers.attn.q_proj.kernel"]

  def error(**options):
    small = quantization.quantize(model, quantization.QuantizationConfig(**options))
    return checkpoints.relative(
      lora_modules.linears(small)["layers.attn.q_proj"].dense(), kernel
    )

  assert error(block=16) < 0.9 * error()
  half = quantization.QuantizationConfig(scale_dtype=jnp.bfloat16)
  small = quantization.quantize(model, half)
  assert small.layers.attn.q_proj.kernel.scales.dtype == jnp.bfloat16
  assert error() != error(scale_dtype=jnp.bfloat16) < 1.1 * error()


@pytest.mark.parametrize(
  "options, message",
  [
    ({"method": "fp4"}, "method 'fp4' is unknown: use one of nf4, int4, int8"),
    ({"block": 3}, "block is 3, it must be even"),
    ({"scale_dtype": jnp.int8}, "scale_dtype is"),
  ],
)
def test_config_refuses_nonsense(options, message):
  with pytest.raises(ValueError, match=message):
    quantization.QuantizationConfig(**options)


def test_refusals():
  model = toys.model()
  small = quantization.quantize(model, "nf4")
  with pytest.raises(ValueError, match="quantized already"):
    quantization.quantize(small, "nf4")
  with pytest.raises(ValueError, match="adapters"):
    quantization.quantize(toys.model(lora_rank=2), "nf4")
  with pytest.raises(ValueError, match="is not quantized"):
    quantization.dequantize(model)
  with pytest.raises(ValueError, match="32 inputs cannot be cut into blocks of 12"):
    quantization.quantize(model, quantization.QuantizationConfig(block=12))
  with pytest.raises(ValueError, match="w1"):
    quantization.quantize(model, "nf4", targets=("w1",))
  with pytest.raises(ValueError, match=r"codes holds (ui|i)nt8, which has no gradient"):
    PeftTrainer(small, optimizers.sgd(1.0), TrainingConfig())


@pytest.mark.parametrize(
  "method, limit", [("nf4", 0.15), ("int4", 0.2), ("int8", 0.02), ("fp8", 0.04)]
)
@pytest.mark.parametrize("stacked", [True, SLOW])
def test_forward_is_close(method, limit, stacked):
  model = toys.model(num_layers=3)
  small = quantization.quantize(model, method)
  small = small if stacked else small.unstack()
  want = model(TOKENS, return_hidden=True)[0]
  error = checkpoints.relative(small(TOKENS, return_hidden=True)[0], want)
  assert 1e-4 < error < limit
  dense = quantization.dequantize(small)
  assert not quantization.is_quantized(dense)
  assert checkpoints.relative(dense(TOKENS)[0], small(TOKENS)[0]) < 1e-5
  assert state(small)["norm.scale"] is state(model)["norm.scale"]


def test_targets():
  small = quantization.quantize(toys.model(), "int8", targets=("q_proj", "mlp.up_proj"))
  found = {
    p for p, m in lora_modules.linears(small).items() if lora_modules.is_quantized(m)
  }
  assert found == {"layers.attn.q_proj", "layers.mlp.up_proj"}


@pytest.mark.slow
@pytest.mark.ci
def test_gradients_are_those_of_the_dequantized_model():
  for use_dora in (False, True):
    small = quantization.quantize(toys.model(remat="block", scan_layers=True), "nf4")
    adapted = widen(lora.apply(small, lora.LoraConfig(rank=2, use_dora=use_dora)))
    both = []
    for model in (adapted, quantization.dequantize(adapted)):
      graph, params, rest = nnx.split(model, nnx.LoRAParam, ...)

      def loss(params, graph=graph, rest=rest):
        return jnp.var(nnx.merge(graph, params, rest)(TOKENS)[0])

      both.append(tree.flatten(jax.jit(jax.grad(loss))(params)))
    for path, want in both[1].items():
      assert checkpoints.relative(both[0][path], np.asarray(want)) < 1e-5, path


def test_the_backward_pass_keeps_no_full_kernel():
  # Scanned: unrolled, the CPU backend (which drops barriers before it schedules) holds
  # the kernels of all layers at once.
  sizes = {"num_layers": 8, "embed_dim": 256, "hidden_dim": 512, "head_dim": 64}
  base = toys.model(remat="none", scan_layers=True, **sizes)

  def temporary(model):
    graph, params, rest = nnx.split(
      lora.apply(model, lora.LoraConfig(rank=2)), nnx.LoRAParam, ...
    )

    def loss(params, rest):
      return jnp.var(nnx.merge(graph, params, rest)(TOKENS)[0])

    compiled = jax.jit(jax.grad(loss)).lower(params, rest).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  kernels = sum(v.nbytes for k, v in state(base).items() if "kernel" in k)
  extra = temporary(quantization.quantize(base, "nf4")) - temporary(base)
  # Measured: 120 bytes of 19 MB of kernels; one layer of them is an eighth.
  assert extra < kernels / 8, (extra, kernels)


def test_bytes_of_the_state():
  model = toys.model(embed_dim=256, hidden_dim=512, head_dim=64)

  def kernels(model):
    return sum(v.nbytes for k, v in state(model).items() if ".kernel" in k)

  full = kernels(model)  # 4 bytes a weight
  lm_head = state(model)["lm_head.kernel"].nbytes
  for method, bits in (("nf4", 4.5), ("int4", 4.5), ("int8", 8.1), ("fp8", 8.1)):
    small = kernels(quantization.quantize(model, method)) - lm_head
    assert small <= (full - lm_head) * (bits + 0.1) / 32, method


@pytest.mark.slow
@pytest.mark.ci
def test_on_a_mesh(mesh_fsdp4_tp2):
  model = AutoModel.from_config(toys.config(), mesh_fsdp4_tp2)
  small = quantization.quantize(model, quantization.QuantizationConfig(block=4))
  codes = small.layers.mlp.down_proj.kernel.codes[...]
  # down_proj [L, F, D] is split (tp, fsdp): 64 / 2 inputs share bytes by twos.
  assert codes.addressable_shards[0].data.shape == (2, 64 // 2 // 2, 32 // 4)
  plain = quantization.quantize(
    AutoModel.from_config(toys.config()), quantization.QuantizationConfig(block=4)
  )
  for path, value in state(plain).items():
    np.testing.assert_array_equal(value, state(small)[path])
  adapted = lora.apply(small, lora.LoraConfig(rank=4, use_dora=True, dropout=0.1))
  trainer = PeftTrainer(adapted, optimizers.adam(1e-2), TrainingConfig(max_steps=2))
  trainer.train(toys.batches(2))
  assert np.any(np.asarray(trainer.model.layers.attn.q_proj.lora_b[...]))
  merged = lora.merge(trainer.model)
  kernel = merged.layers.mlp.down_proj.kernel[...]
  assert kernel.addressable_shards[0].data.shape == (2, 64 // 2, 32 // 4)


@pytest.mark.parametrize("scan_layers", [True, SLOW])
def test_loading_quantizes(scan_layers, mesh_fsdp8):
  full = AutoModel.from_pretrained(GOLDEN, scan_layers=scan_layers)
  want = quantization.quantize(full, "nf4")
  for mesh in (None, mesh_fsdp8):
    got = AutoModel.from_pretrained(
      GOLDEN, mesh, scan_layers=scan_layers, quantize="nf4"
    )
    for path, value in state(want).items():
      np.testing.assert_array_equal(state(got)[path], value)
  np.testing.assert_allclose(got(TOKENS)[0], want(TOKENS)[0], rtol=1e-4, atol=1e-4)


def test_two_methods_under_two_names_are_refused():
  with pytest.raises(ValueError, match="quantize is 'nf4' and quantise is 'int8', exp"):
    AutoModel.from_pretrained(GOLDEN, quantize="nf4", quantise="int8")


def test_loading_holds_one_full_parameter(monkeypatch):
  live = []
  original = quantization.quantize_kernel
  earlier = jax.live_arrays()  # held: other tests' arrays, whose ids stay theirs
  others = {id(x) for x in earlier}

  def noting(kernel, spec, config):
    mine = (x for x in jax.live_arrays() if id(x) not in others)
    live.append(sum(x.nbytes for x in mine if x.shape == kernel.shape))
    live[-1] /= kernel.nbytes
    return original(kernel, spec, config)

  monkeypatch.setattr(quantization, "quantize_kernel", noting)
  AutoModel.from_pretrained(GOLDEN, quantize="int8")
  assert len(live) == 7
  # int8 codes have the kernel's shape too, at a quarter of the bytes.
  assert max(live) < 2 + 7 / 4 and live[0] == 1


def test_checkpoints_hold_the_adapter_only(tmp_path):
  def trainer():
    small = quantization.quantize(toys.model(), "nf4")
    return PeftTrainer(
      lora.apply(small, lora.LoraConfig(rank=2)),
      optimizers.adam(1e-2),
      TrainingConfig(
        max_steps=2,
        checkpoint_root_directory=str(tmp_path),
        checkpointing_options=CheckpointOptions(save_every_n_steps=1),
      ),
    )

  one = trainer()
  assert {k.rpartition(".")[2] for k in tree.flatten(one._module.params)} == {
    *("lora_a", "lora_b")
  }
  assert any("codes" in k for k in tree.flatten(one._module.frozen))
  one.train(toys.batches(2))
  one.close()
  metadata = "".join(p.read_text() for p in pathlib.Path(tmp_path).rglob("_METADATA"))
  assert "lora_a" in metadata and "codes" not in metadata and "norm" not in metadata
  two = trainer()
  assert two.train_steps == 2
  for path, value in state(one.model, nnx.LoRAParam).items():
    np.testing.assert_array_equal(state(two.model, nnx.LoRAParam)[path], value)


def test_merging_and_saving_dequantize(tmp_path):
  small = AutoModel.from_pretrained(GOLDEN, quantize="nf4")
  config = lora.LoraConfig(rank=2, targets=("q_proj", "up_proj"))
  adapted = widen(lora.apply(small, config))
  merged = lora.merge(adapted)
  assert not quantization.is_quantized(merged)
  assert checkpoints.relative(merged(TOKENS)[0], adapted(TOKENS)[0]) < 1e-5
  for model, name in ((adapted, "a"), (adapted.unstack(), "b"), (merged, "c")):
    save_pretrained(model, tmp_path / name, source=GOLDEN)
    back = AutoModel.from_pretrained(tmp_path / name)
    for path, value in state(merged).items():
      np.testing.assert_allclose(state(back)[path], value, rtol=1e-5, atol=1e-7)


def test_describe_counts_numbers_and_not_bytes():
  config = lora.LoraConfig(rank=2, targets=("q_proj",))
  plain = lora.describe(lora.apply(toys.model(), config))
  small = quantization.quantize(toys.model(), "nf4")
  assert lora.describe(lora.apply(small, config)) == plain


@pytest.mark.parametrize("method", quantized.METHODS)
def test_matrices_count_at_full_size_for_flops(method):
  def count(model):
    parts = ModuleState(lora.apply(model, lora.LoraConfig(rank=2)))
    return matmul_params(parts.params, parts.frozen)

  model = toys.model()
  assert count(quantization.quantize(model, method)) == count(model)
