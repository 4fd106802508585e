"""Pages against dense attention and against numbers computed by hand."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.models.transformer.attention import paths as attention_paths
from tunix.models.transformer.paged import attention as paged, kernels as paged_kernels
from tunix.models.transformer.paged.rows import Group, Ragged
from tunix.models.transformer.visibility import Visibility
from tunix.utils import mesh as mesh_lib

PAGE, WIDTH, POOL = 4, 6, 32


def draw(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def group(tables, starts, counts, tokens):
  table = np.zeros((len(tables), WIDTH), np.int32)
  for row, numbers in enumerate(tables):
    table[row, : len(numbers)] = numbers
  as_ints = lambda x: jnp.asarray(x, jnp.int32)
  return Group(
    table=as_ints(table), start=as_ints(starts), count=as_ints(counts), tokens=tokens
  )


class Case:
  """Three sequences in shuffled pages: 11, 16 and 6 tokens are there already.

  A round runs one token of the first, an idle row, one token of the second (on the
  first slot of a page) and two blocks of the third, the second of which has padding.
  """

  def __init__(self, heads=4, kv_heads=2, head_dim=8, path="gather", **layout):
    self.pages = pages = [9, 3, 14], [5, 1, 12, 7, 20], [2, 30, 8, 11]
    before, self.ends = [11, 16, 6], [12, 17, 13]
    self.kv = [
      draw(2, end, kv_heads, head_dim, seed=i) for i, end in enumerate(self.ends)
    ]
    layer = paged.empty(
      pages=POOL,
      page_tokens=PAGE,
      kv_heads=kv_heads,
      head_dim=head_dim,
      dtype=jnp.float32,
      path=path,
      **layout,
    )
    past = group(pages, [0, 0, 0], before, 16)
    old = [
      np.concatenate([kv[:, :n], np.full((2, 16 - n, *kv.shape[2:]), 7.0)], axis=1)
      for kv, n in zip(self.kv, before)
    ]
    old = jnp.asarray(np.concatenate(old, axis=1))[:, :, None]
    self.past = paged.write(layer, old[0], old[1], Ragged((past,)))
    decode = group([pages[0], [], pages[1]], [11, 0, 16], [1, 0, 1], 1)
    blocks = group([pages[2], pages[2]], [6, 10], [4, 3], 4)
    self.ragged = Ragged((decode, blocks))
    # Sequence and position of each valid token; None for padding.
    self.at = [(0, 11), None, (1, 16), *((2, p) for p in range(6, 13)), None]
    new = [
      self.kv[x[0]][:, x[1]] if x else np.full((2, kv_heads, head_dim), 5.0)
      for x in self.at
    ]
    self.key, self.value = jnp.asarray(np.stack(new, axis=1))[:, :, None]
    self.query = draw(len(self.at), 1, heads, head_dim, seed=9)

  def got(self, **options):
    @jax.jit
    def run(layer, query, key, value, ragged):
      layer = paged.write(layer, key, value, ragged)
      return paged.attend(query, layer, ragged, **options), layer

    return run(self.past, self.query, self.key, self.value, self.ragged)

  def want(self, window=None, **options):
    """Dense attention of each sequence, at the tokens of the round."""
    out = np.zeros(self.query[:, 0].shape, np.float32)
    for sequence, end in enumerate(self.ends):
      rows = [i for i, x in enumerate(self.at) if x and x[0] == sequence]
      positions = [self.at[i][1] for i in rows]
      query = np.zeros((1, end, *self.query.shape[2:]), np.float32)
      query[0, positions] = self.query[np.array(rows), 0]
      key, value = self.kv[sequence][:, None]
      visible = Visibility(jnp.arange(end), aligned=True)
      dense = attention_paths.attend(
        jnp.asarray(query), key, value, visible, window=window, **options
      )
      out[rows] = dense[0, np.array(positions)]
    return out

  @property
  def valid(self):
    return np.array([x is not None for x in self.at])


CASES = [
  ({}, {}),
  ({"kv_heads": 1}, {"window": 5, "scale": 0.3}),
  ({"kv_heads": 4}, {"window": 3, "softcap": 2.0}),
  ({}, {"window": 1}),
  ({}, {"window": 40, "softcap": 1.0}),
  ({}, {"window": 3, "sinks": np.array([-2.0, 0.5, 3.0, 1.0])}),
]


@pytest.mark.parametrize("shape, options", CASES)
def test_gather_equals_dense_attention(shape, options):
  case = Case(**shape)
  out = np.asarray(case.got(**options)[0][:, 0])
  np.testing.assert_allclose(out, case.want(**options), atol=2e-6)


@pytest.mark.parametrize(
  "shape, options",
  [
    ({}, {"window": 3, "softcap": 2.0}),
    # Heads of 256 numbers are in one array for each key head.
    ({"head_dim": 130}, {"window": 6}),
  ],
)
def test_arguments_of_the_tpu_kernel(shape, options):
  # The kernel's own reference runs in its place: neither interpreter of Pallas runs it.
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention as lib

  case = Case(path="ragged", **shape)
  layer = paged.write(case.past, case.key, case.value, case.ragged)
  given = {"scale": 0.3, "softcap": None, "window": None, **options}
  kernel = lib.ref_ragged_paged_attention
  run = paged_kernels.tpu
  out = run(case.query[:, 0], layer.pages, case.ragged, **given, kernel=kernel)
  assert len(layer.pages) == (2 if "head_dim" in shape else 1)
  np.testing.assert_allclose(out[case.valid], case.want(**given)[case.valid], atol=2e-6)


@pytest.mark.parametrize("programs", [1024, 1], ids=["3 parts", "1 part"])
def test_gpu_kernel_in_the_interpreter(programs, monkeypatch):
  # Blocks of 2 pages, so that the 6 pages of the table are at most 3 parts.
  monkeypatch.setattr(paged_kernels, "_GPU_KEYS", 2 * PAGE)
  monkeypatch.setattr(paged_kernels, "_GPU_PROGRAMS", programs)
  case = Case(head_dim=16, path="gpu_paged")
  layer = paged.write(case.past, case.key, case.value, case.ragged)
  out = paged_kernels.gpu(
    case.query[:, 0], layer.pages, case.ragged, 0.3, 2.0, None, interpret=True
  )
  want = case.want(scale=0.3, softcap=2.0)
  np.testing.assert_allclose(out[case.valid], want[case.valid], atol=2e-6)


def test_two_keys_by_hand():
  # Page 2 holds position 0, page 1 position 1. Keys 0 and ln 3 give the weights 1/4 and
  # 3/4; values 8 and 4 give 8/4 + 3 = 5. With a window of 1 only the value 4 is seen.
  layer = paged.empty(pages=3, page_tokens=1, kv_heads=1, head_dim=1, dtype=jnp.float32)
  numbers = lambda *x: jnp.asarray(x, jnp.float32).reshape(-1, 1, 1, 1)
  ragged = Ragged((group([[2, 1]], [0], [2], 2),))
  layer = paged.write(layer, numbers(0, np.log(3)), numbers(8, 4), ragged)
  np.testing.assert_array_equal(layer.pages[1].reshape(-1), [0, 4, 8])
  out = paged.attend(numbers(1, 1), layer, ragged, scale=1.0)
  np.testing.assert_allclose(out.reshape(-1), [8, 5], rtol=1e-6)
  out = paged.attend(numbers(1, 1), layer, ragged, scale=1.0, window=1)
  np.testing.assert_allclose(out.reshape(-1), [8, 4], rtol=1e-6)


@pytest.mark.parametrize("path", ["gather", "ragged"])
def test_padding_is_written_nowhere(path):
  case = Case(path=path)
  layer = paged.write(case.past, case.key, case.value, case.ragged)
  heads = np.asarray(layer.pages[0])
  if path == "ragged":
    heads = heads[:, :, 0::2, :8].transpose(2, 0, 1, 3)
  assert np.count_nonzero(heads.any(axis=(0, 3))) == sum(case.ends)
  assert not heads[:, 0].any()
  # Position 11 of the second sequence is in slot 3 of its third page.
  np.testing.assert_array_equal(heads[:, 12, 3], case.kv[1][0, 11])


@pytest.mark.parametrize("path", ["gather", "ragged"])
def test_a_nan_after_the_last_key_is_not_read(path):
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention as lib

  case = Case(path=path)
  written = paged.write(case.past, case.key, case.value, case.ragged)
  unused = np.ones((POOL, PAGE), bool)
  for pages, end in zip(case.pages, case.ends):
    for position in range(end):
      unused[pages[position // PAGE], position % PAGE] = False
  unused[0] = False
  mask = unused[:, :, None, None] if path == "ragged" else unused[None, :, :, None]
  pages = tuple(jnp.where(mask, jnp.nan, x) for x in written.pages)
  arguments = case.query[:, 0], pages, case.ragged, 0.3, None, 5
  if path == "ragged":
    out = paged_kernels.tpu(*arguments, kernel=lib.ref_ragged_paged_attention)
  else:
    out = paged_kernels.gather(*arguments)
  want = case.want(scale=0.3, window=5)
  np.testing.assert_allclose(out[case.valid], want[case.valid], atol=2e-6)


@pytest.mark.parametrize("axes, share", [(("tp", "fsdp"), 1), (("tp",), 4), ((), 8)])
def test_heads_are_split_over_a_mesh(axes, share, mesh_fsdp4_tp2):
  one = Case(heads=16, kv_heads=8)
  want = one.got(window=7)[0]
  case = Case(heads=16, kv_heads=8, mesh=mesh_fsdp4_tp2, head_axes=axes)
  assert case.past.pages[0].sharding.shard_shape((8, POOL, PAGE, 8))[0] == share
  with jax.set_mesh(mesh_fsdp4_tp2):
    out, layer = case.got(window=7)
  np.testing.assert_allclose(out, want, atol=1e-6)
  assert layer.pages[0].sharding.is_equivalent_to(case.past.pages[0].sharding, 4)


def test_axes_that_do_not_divide_the_heads_are_dropped(mesh_fsdp4_tp2):
  case = Case(kv_heads=2, mesh=mesh_fsdp4_tp2, head_axes=("tp", "fsdp"))
  assert case.past.pages[0].sharding.shard_shape((2, POOL, PAGE, 8))[0] == 1


def test_a_loop_changes_pages_in_place():
  case = Case()
  arrays = case.past, case.query, case.key, case.value, case.ragged
  compiled = jax.jit(rounds, donate_argnums=0).lower(*arrays).compile()
  pages, memory = case.past.pages[0], compiled.memory_analysis()
  assert memory is not None
  assert count(compiled, COPIES, pages.shape) == 0
  assert memory.alias_size_in_bytes == 2 * pages.nbytes
  kept = jax.jit(rounds).lower(*arrays).compile()
  assert count(kept, COPIES, pages.shape) == 2  # the count finds copies


def rounds(layer, query, key, value, ragged, **options):
  """Four rounds of a launch."""

  def body(loop):
    number, layer, out = loop
    # The first query head of each key head, which is on the same device.
    first = out.reshape(*key.shape[:3], -1, key.shape[3])[:, :, :, 0]
    layer = paged.write(layer, key + first, value, ragged)
    return number + 1, layer, paged.attend(query, layer, ragged, **options)

  return jax.lax.while_loop(lambda loop: loop[0] < 4, body, (0, layer, query))


COPIES = ("copy", "transpose")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def count(compiled, kinds, shape=None):
  """Returns the number of a program's instructions of some kinds.

  Args:
    compiled: the program.
    kinds: names of instructions.
    shape: shape of their first result; None for any.
  """
  dims = r"[\d,]*" if shape is None else ",".join(map(str, shape))
  pattern = rf"= \(?\w+\[{dims}\][^=]* (?:{'|'.join(kinds)})(?:-start)?\("
  return len(re.findall(pattern, compiled.as_text()))


def call(**changes):
  given = {"platform": "tpu", "dtype": "bfloat16", "head_dim": 128, "page_tokens": 16}
  return paged.Call(**{**given, **changes})


@pytest.mark.parametrize(
  "changes, want",
  [
    ({"softcap": True, "window": True}, "ragged"),
    ({"dtype": "float32", "head_dim": 64}, "ragged"),
    ({"dtype": "float32", "head_dim": 256}, "gather"),
    ({"dtype": "float16"}, "gather"),
    ({"platform": "gpu", "softcap": True}, "gpu_paged"),
    ({"platform": "gpu", "window": True}, "gather"),
    ({"platform": "gpu", "head_dim": 96}, "gather"),
    ({"platform": "cpu"}, "gather"),
  ],
)
def test_auto_takes_a_kernel_that_can(changes, want):
  assert paged.choose(call(**changes)) == want


def test_refusals_name_what_is_missing_and_what_can():
  with pytest.raises(ValueError, match=r"a window; page_tokens 24 .*\['gather'\]"):
    paged.choose(call(platform="gpu", window=True, page_tokens=24), "gpu_paged")
  with pytest.raises(ValueError, match="'flash' is unknown: use 'auto' or one of"):
    paged.choose(call(), "flash")
  case = Case(path="ragged")
  half = case.query.astype(jnp.bfloat16)
  with pytest.raises(ValueError, match="dtype bfloat16 over pages of float32"):
    paged.attend(half, case.past, case.ragged)
  with pytest.raises(ValueError, match=r"platform cpu \(it takes tpu\)"):
    paged.attend(case.query, case.past, case.ragged)


def compile_for_tpu(topology, axes, kv_heads, head_dim, **options):
  """Compiles a launch for eight chips, and prints what the test compares."""
  from jax.experimental import topologies
  from jax.sharding import NamedSharding, PartitionSpec

  chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
  mesh = mesh_lib.create_mesh(axes, chips)
  layer = paged.empty(
    pages=8192,
    page_tokens=16,
    kv_heads=kv_heads,
    head_dim=head_dim,
    dtype=jnp.bfloat16,
    path="ragged",
    head_axes=("tp", "fsdp"),
    mesh=mesh,
  )

  def shape(dtype, *sizes, spec=()):
    where = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

  def rows(count, tokens):
    table = shape(jnp.int32, count, 128)
    numbers = shape(jnp.int32, count)
    return Group(table=table, start=numbers, count=numbers, tokens=tokens)

  ragged = Ragged((rows(32, 1), rows(8, 16)))
  # Queries are split like the key heads, where fewer axes may fit.
  split = None, None, mesh_lib.fit_spec((("tp", "fsdp"),), (kv_heads,), mesh)[0]
  heads = lambda n: shape(jnp.bfloat16, 160, 1, n, head_dim, spec=split)
  launch = functools.partial(rounds, **options)
  arrays = layer, heads(4 * kv_heads), heads(kv_heads), heads(kv_heads), ragged
  with jax.set_mesh(mesh):
    compiled = jax.jit(launch, donate_argnums=0).lower(*arrays).compile()
  memory: Any = compiled.memory_analysis()
  kernels = str(compiled.as_text()).count('custom_call_target="tpu_custom_call"')
  local = layer.pages[0].sharding.shard_shape(layer.pages[0].shape)
  pages = len(layer.pages) * 2 * np.prod(local)
  print(
    f"{len(layer.pages)} arrays {local}:",
    f"{kernels} kernels,",
    f"{count(compiled, COPIES, local)} copies,",
    f"{count(compiled, COLLECTIVES)} collectives,",
    f"all pages aliased: {memory.alias_size_in_bytes == pages},",
    f"little temporary memory: {memory.temp_size_in_bytes < pages / 50}",
  )


@pytest.mark.slow
def test_launches_compile_for_tpu_chips():
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("the TPU compiler is not installed: pip install 'jax[tpu]'")
  code = """
from tests.models.transformer.paged.attention_test import compile_for_tpu as run
run("v5e:2x4", {"tp": 8}, 8, 128)
run("v6e:2x4", {"tp": 2, "fsdp": 4}, 8, 64, softcap=30.0, window=500)
run("v5e:2x4", {"tp": 4, "fsdp": 2}, 8, 256, window=1024)
run("v6e:2x4", {"tp": 2, "fsdp": 4}, 4, 256)
"""
  done = subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  clean = (
    "0 copies, 0 collectives, all pages aliased: True, little temporary memory: True"
  )
  assert done.stdout.splitlines() == [
    f"1 arrays (8192, 16, 2, 128): 1 kernels, {clean}",
    f"1 arrays (8192, 16, 2, 128): 1 kernels, {clean}",
    f"1 arrays (8192, 16, 2, 256): 1 kernels, {clean}",
    f"2 arrays (8192, 16, 2, 256): 2 kernels, {clean}",
  ]
