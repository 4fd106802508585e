"""Rows with different adapters against models that have one adapter each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tests.models.lora_test import widen
from tunix.generate.engine.device.adapters import AdapterBank, with_bank
from tunix.generate.padded import decode
from tunix.models import lora, quantization
from tunix.models.adapters.lora_modules import Adapter
from tunix.models.automodel import AutoModel
from tunix.models.transformer.config import MoEConfig
from tunix.utils import mesh as mesh_lib

GOLDEN = checkpoints.GOLDEN / "llama3p1"
ROWS = ("three", None, "eight", "two", "three", None)
TOKENS = np.arange(1, 31, dtype=np.int32).reshape(6, 5)
# Rank and alpha patterns, few targets, and scales of both kinds.
CONFIGS = {
  "two": lora.LoraConfig(rank=2, alpha=3.0, targets=("q_proj", "down_proj")),
  "three": lora.LoraConfig(
    rank=2, rank_pattern={"v_proj": 3, "k_proj": 1}, alpha_pattern={"up_proj": 5.0}
  ),
  "eight": lora.LoraConfig(rank=8, alpha=4.0, use_rslora=True),
}


def adapted(base, name):
  return widen(lora.apply(base, CONFIGS[name], seed=len(name)))


def filled(base, ranks=16):
  """A bank for the opened base, with an adapter of each configuration."""
  bank = AdapterBank(nnx.merge(*decode.opened(*nnx.split(base))), ranks)
  for name in CONFIGS:
    bank.load(name, adapted(base, name))
  return bank


def runner(base, calls=None):
  """Returns f(bank, names): logits of the opened base; `calls` counts traces."""
  graph, state = decode.opened(*nnx.split(base))

  @jax.jit
  def call(state, bank, rows, tokens):
    if calls is not None:
      calls.append(1)
    return with_bank(nnx.merge(graph, state), bank, rows)(tokens)[0]

  def run(bank, names):
    rows = np.asarray([bank.index(name) for name in names], np.int32)
    return np.asarray(call(state, bank.state, rows, TOKENS))

  return run


@nnx.jit
def logits_of(model, tokens):
  return model(tokens)[0]


def alone(base, name, tokens):
  model = base if name is None else adapted(base, name)
  return np.asarray(logits_of(model, tokens))


def check_rows(base, bank, logits, atol=1e-5):
  for name in (None, *bank.names):
    chosen = [i for i, row in enumerate(ROWS) if row == name]
    expected = alone(base, name, TOKENS[chosen])
    np.testing.assert_allclose(logits[chosen], expected, atol=atol, rtol=1e-5)


def quantized():
  config = quantization.QuantizationConfig(method="int8")
  return quantization.quantize(toys.model(), config)


BASES = {
  "stacked": toys.model,
  "quantized": quantized,
  "remat": lambda: toys.model(remat="block"),
}


@pytest.mark.parametrize("kind", BASES)
def test_each_row_equals_a_model_with_its_adapter_only(kind):
  base = BASES[kind]()
  bank = filled(base)
  logits = runner(base)(bank, ROWS)
  check_rows(base, bank, logits)
  # The adapters are large enough that a wrong one would be seen.
  assert np.abs(logits - alone(base, None, TOKENS)).max() > 0.01


def test_an_adapter_adds_to_a_base_with_its_own_adapter():
  base = toys.model(lora_rank=4)
  bank = AdapterBank(base, 4)
  bank.load("more", adapted(toys.model(), "two"))
  logits = runner(base)(bank, [None, "more"] * 3)
  np.testing.assert_allclose(logits[::2], alone(base, None, TOKENS[::2]), atol=1e-5)
  merged = lora.merge(base)
  more = widen(lora.apply(merged, CONFIGS["two"], seed=3))
  expected = logits_of(more, TOKENS[1::2])
  np.testing.assert_allclose(logits[1::2], expected, atol=1e-5, rtol=1e-5)


def test_one_token_a_row_through_the_cache():
  base = toys.model()
  bank = filled(base)
  graph, state = decode.opened(*nnx.split(base))
  rows = np.asarray([bank.index(name) for name in ROWS], np.int32)

  @jax.jit
  def step(state, bank, rows, tokens, positions, cache):
    model = with_bank(nnx.merge(graph, state), bank, rows)
    return model(tokens, positions, cache)

  cache = base.init_cache(6, 8)
  for i in range(TOKENS.shape[1]):
    at = np.full((6, 1), i, np.int32)
    logits, cache = step(state, bank.state, rows, TOKENS[:, i : i + 1], at, cache)
  for name in (None, *bank.names):
    chosen = [i for i, row in enumerate(ROWS) if row == name]
    expected = alone(base, name, TOKENS[chosen])[:, -1]
    np.testing.assert_allclose(logits[chosen, 0], expected, atol=1e-5, rtol=1e-5)


def test_rows_without_adapter_add_exactly_zero_whatever_others_hold():
  base = toys.model(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
  bank = AdapterBank(base, 4)
  run = runner(base)
  before = run(bank, [None] * 6)
  bank.load("two", adapted(base, "two"))
  after = run(bank, ["two"] + [None] * 5)
  np.testing.assert_array_equal(after[1:], before[1:])
  assert np.abs(after[0] - before[0]).max() > 0.01
  assert bank.state.factors["layers.0.attn.q_proj"][0].dtype == jnp.bfloat16


def test_a_column_that_overflows_stays_in_its_row():
  base = toys.model()
  bank = AdapterBank(base, 4)
  huge = {"layers.attn.q_proj": pair(2, 3e38, 1.0)}
  bank.load("huge", huge)
  logits = runner(base)(bank, ["huge"] + [None] * 5)
  assert np.isnan(logits[0]).any()
  np.testing.assert_allclose(logits[1:], alone(base, None, TOKENS[1:]), atol=1e-5)


def pair(rank, a, b, layers=2, rows=32, columns=32, **fields):
  return Adapter(
    a=np.full((layers, rows, rank), a, np.float32),
    b=np.full((layers, rank, columns), b, np.float32),
    scale=1.0,
    **fields,
  )


def test_a_row_of_tokens_may_mix_adapters():
  base = toys.model()
  bank = filled(base)
  graph, state = nnx.split(base)  # stacked: with_bank unstacks it

  @jax.jit
  def call(state, bank, rows):
    return with_bank(nnx.merge(graph, state), bank, rows)(TOKENS[:1])[0]

  numbers = np.asarray([[bank.index("two")] * 3 + [bank.index("eight")] * 2], np.int32)
  logits = np.asarray(call(state, bank.state, numbers))
  expected = alone(base, "two", TOKENS[:1])
  np.testing.assert_allclose(logits[:, :3], expected[:, :3], atol=1e-5, rtol=1e-5)
  assert np.abs(logits[:, 3:] - expected[:, 3:]).max() > 0.01


@pytest.mark.parametrize("stacked", [True, False])
def test_folders_are_read_as_models_are(stacked, tmp_path):
  base = toys.model()
  base = base if stacked else base.unstack()
  bank = filled(toys.model())
  from_files = AdapterBank(base, 16)
  for name in CONFIGS:
    model = adapted(toys.model(), name)
    lora.save_adapter(model if stacked else model.unstack(), tmp_path / name)
    from_files.load(name, tmp_path / name)
  run = runner(base)
  found, expected = run(from_files, ROWS), run(bank, ROWS)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_folder_of_peft_gives_what_load_adapter_gives():
  base = AutoModel.from_pretrained(GOLDEN)
  bank = AdapterBank(base, 8)
  bank.load("peft", GOLDEN / "adapter")
  logits = runner(base)(bank, ["peft", None] * 3)
  expected = logits_of(lora.load_adapter(base, GOLDEN / "adapter"), TOKENS[::2])
  np.testing.assert_allclose(logits[::2], expected, atol=1e-5, rtol=1e-5)


def test_unloading_frees_columns_and_nothing_compiles_again():
  base, calls = toys.model(), []
  bank, run = AdapterBank(base, 13), runner(base, calls)
  empty = run(bank, [None] * 6)
  for name in CONFIGS:  # 2 + 3 + 8 columns: all of them
    bank.load(name, adapted(base, name))
  check_rows(base, bank, run(bank, ROWS))
  old, number = bank.state, bank.index("three")
  bank.unload("two")
  bank.unload("three")
  assert bank.names == ("eight",)
  # Four of the five free columns, and q_proj only: the other modules must be cleared.
  small = lora.LoraConfig(rank=4, targets=("q_proj",))
  new = widen(lora.apply(base, small, seed=9))
  bank.load("three", new)
  assert bank.index("three") not in (number, 0)
  logits = run(bank, ["three"] * 3 + ["eight"] * 3)
  np.testing.assert_allclose(logits[:3], logits_of(new, TOKENS[:3]), atol=1e-5)
  np.testing.assert_allclose(
    logits[3:], alone(base, "eight", TOKENS[3:]), atol=1e-5, rtol=1e-5
  )
  bank.unload("three")
  bank.unload("eight")
  np.testing.assert_array_equal(run(bank, [None] * 6), empty)
  assert calls == [1]
  assert not old.owner.is_deleted()  # a launch in flight may still use it


def test_number_of_an_unloaded_adapter_selects_no_columns():
  base = toys.model()
  bank, run = filled(base), runner(base)
  gone = dataclasses.replace(bank.state)
  bank.unload("eight")
  bank.load("again", adapted(base, "eight"))
  graph, state = nnx.split(base)
  call = jax.jit(
    lambda s, bank, rows: with_bank(nnx.merge(graph, s), bank, rows)(TOKENS)
  )
  rows = np.full(6, 3, np.int32)  # the number of "eight"
  plain = run(bank, [None] * 6)
  np.testing.assert_array_equal(call(state, bank.state, rows)[0], plain)
  assert np.abs(call(state, gone, rows)[0] - plain).max() > 0.01


def test_without_ranks_the_program_is_the_model_s():
  base = toys.model()
  bank = AdapterBank(base, 0)
  assert bank.state is None and with_bank(base, bank.state, None) is base
  with pytest.raises(ValueError, match="adapter_ranks is 0; expected at least"):
    bank.load("two", adapted(base, "two"))


@pytest.mark.parametrize("gather", [None, True, "split"])
def test_factors_follow_the_shardings_of_the_kernels(gather, mesh_fsdp4_tp2):
  from tunix.generate.decoders import layout

  base = AutoModel.from_config(toys.config(), mesh_fsdp4_tp2, seed=0)
  graph, state = nnx.split(base)
  chosen = layout.for_decoding(base, state, gather)
  graph, state = decode.opened(graph, state, chosen)
  bank = AdapterBank(nnx.merge(graph, state), 16)
  shardings = jax.tree.map(lambda x: x.sharding, bank.state)
  for name in CONFIGS:
    bank.load(name, adapted(toys.model(), name))
  rows = np.asarray([bank.index(name) for name in ROWS], np.int32)
  with mesh_lib.use_mesh(mesh_fsdp4_tp2):
    call = jax.jit(
      lambda s, bank, r: with_bank(nnx.merge(graph, s), bank, r)(TOKENS)[0]
    )
    logits = np.asarray(call(state, bank.state, rows))
  check_rows(toys.model(), bank, logits)
  assert jax.tree.map(lambda x: x.sharding, bank.state) == shardings
  kernels = {True: (None, "tp"), None: ("fsdp", "tp"), "split": (None, ("tp", "fsdp"))}
  a, b = bank.state.factors["layers.1.mlp.up_proj"]
  assert (a.sharding.spec[0], b.sharding.spec[1]) == kernels[gather]
  assert a.sharding.spec[1] is None and b.sharding.spec[0] is None


def test_a_model_of_shapes_gives_a_state_of_shapes():
  base = toys.model()
  shapes = jax.eval_shape(lambda: nnx.split(base)[1])
  bank = AdapterBank(nnx.merge(nnx.split(base)[0], shapes), 4)
  real = AdapterBank(base, 4).state
  sizes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert sizes(bank.state) == sizes(real)
  assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(bank.state))


def test_experts_are_refused_and_attention_is_not():
  base = toys.model(moe=MoEConfig(num_experts=4, experts_per_token=2, hidden_dim=16))
  bank = AdapterBank(base, 4)
  experts = lora.apply(base, lora.LoraConfig(rank=2, targets=("up_proj",)))
  message = r"'e' adapts layers\.0\.mlp\.experts\.up_proj; expected only attn\.k_proj, "
  with pytest.raises(ValueError, match=message):
    bank.load("e", experts)
  router = lora.apply(base, lora.LoraConfig(rank=2, targets=("router",)))
  with pytest.raises(ValueError, match=r"adapts layers\.0\.mlp\.router"):
    bank.load("r", router)
  attention = widen(lora.apply(base, lora.LoraConfig(rank=2, targets=("o_proj",))))
  bank.load("o", attention)
  logits = runner(base)(bank, ["o", None] * 3)
  expected = logits_of(attention, TOKENS[::2])
  np.testing.assert_allclose(logits[::2], expected, atol=1e-5, rtol=1e-5)


SCORES = lora.LoraConfig(rank=2, modules_to_save=("norm",))
NAN = {"layers.attn.q_proj": pair(2, 1.0, np.nan)}
OTHER = {"layers.0.attn.q_proj": pair(2, 1.0, 1.0, layers=1, rows=16)}
REFUSED = {
  "dora": (
    lambda base: lora.apply(base, lora.LoraConfig(rank=2, use_dora=True)),
    r"'x' has magnitudes \(lora_magnitude\) in layers\.attn\.k_proj: it is a DoRA",
  ),
  "whole": (
    lambda base: lora.apply(base, SCORES),
    r"modules that were trained whole: norm\.scale; expected only LoRA",
  ),
  "bare": (lambda base: base, "the model has no adapters"),
  "nothing": (lambda base: {}, "'x' adapts no module; expected at least one"),
  "nan": (
    lambda base: NAN,
    r"NaN or infinite numbers in A or scale \* B of layers\.at",
  ),
  "layers": (
    lambda base: {"layers.attn.q_proj": pair(2, 1.0, 1.0, layers=3)},
    r"'x' has 3 layers in layers\.attn\.q_proj; expected 2",
  ),
  "shape": (
    lambda base: {"layers.attn.q_proj": pair(2, 1.0, 1.0, rows=16)},
    r"q_proj have shapes \(16, 2\) and \(2, 32\); expected \(32, 2\) and \(2, 32\)",
  ),
  "rank": (
    lambda base: lora.apply(base, lora.LoraConfig(rank=4)),
    r"rank 4; expected at most 3, the free ones of adapter_ranks=5 \(loaded: 'old': 2"
    r"\)\. Unload an adapter, or set adapter_ranks to at least 6",
  ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_adapters_change_nothing(case):
  base, (source, message) = toys.model(), REFUSED[case]
  bank = AdapterBank(base, 5)
  bank.load("old", adapted(base, "two"))
  state = bank.state
  with pytest.raises(ValueError, match=message):
    bank.load("x", source(base))
  assert bank.names == ("old",) and bank.state is state


def test_names(tmp_path):
  base = toys.model()
  bank = AdapterBank(base, 5)
  with pytest.raises(ValueError, match=r"'a' is not loaded; .* loaded ones: none"):
    bank.index("a")
  bank.load("old", adapted(base, "two"))
  with pytest.raises(ValueError, match="'old' is loaded already; expected a new name"):
    bank.load("old", adapted(base, "two"))
  for call in (bank.index, bank.unload):
    with pytest.raises(ValueError, match=r"'a' is not loaded; .* loaded ones: 'old'"):
      call("a")
  with pytest.raises(ValueError, match="adapter name is ''; expected a text"):
    bank.load("", adapted(base, "two"))
  with pytest.raises(FileNotFoundError, match=r"lacks adapter_config\.json"):
    bank.load("b", tmp_path)
  with pytest.raises(TypeError, match="the model is a TokensOnly; expected a decoder"):
    AdapterBank(toys.TokensOnly(nnx.Rngs(0)), 4)
