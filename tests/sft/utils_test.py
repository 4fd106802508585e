import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tunix.sft import utils


def test_causal_attention_mask():
  mask = utils.make_causal_attn_mask(jnp.array([[0, 1, 1], [1, 1, 0]]))
  expected = [
    [[0, 0, 0], [0, 1, 0], [0, 1, 1]],  # padding on the left is no key
    [[1, 0, 0], [1, 1, 0], [1, 1, 0]],
  ]
  np.testing.assert_array_equal(mask, np.array(expected, bool))
  assert mask.dtype == bool
  with pytest.raises(ValueError, match=r"shape \(3,\)"):
    utils.make_causal_attn_mask(jnp.ones(3))


def test_positions_begin_at_the_first_token():
  mask = jnp.array([[0, 0, 1, 1], [1, 1, 0, 1]], bool)
  positions = utils.build_positions_from_mask(mask)
  np.testing.assert_array_equal(positions, [[0, 0, 0, 1], [0, 1, 1, 2]])
  assert positions.dtype == jnp.int32


def test_is_lora_enabled():
  class Model(nnx.Module):
    def __init__(self, lora):
      rngs = nnx.Rngs(0)
      self.inner = nnx.Linear(2, 2, rngs=rngs)
      if lora:
        self.adapted = nnx.List([nnx.LoRALinear(2, 2, lora_rank=1, rngs=rngs)])

  assert utils.is_lora_enabled(Model(True))
  assert not utils.is_lora_enabled(Model(False))


def test_time_measure(caplog):
  with caplog.at_level(logging.INFO), utils.time_measure("loading") as elapsed:
    first = elapsed()
    time.perf_counter()
    assert elapsed() >= first >= 0
  assert elapsed() == elapsed()  # stands still after the block
  assert "loading took" in caplog.text
  caplog.clear()
  with caplog.at_level(logging.INFO), utils.time_measure("x", suppress_logging=True):
    pass
  assert not caplog.records


def test_looking_at_live_arrays_makes_none(mesh_fsdp8, monkeypatch):
  # Without those of other tests, which come and go, also from threads. They are held,
  # so that no new array gets the id of one of them.
  live, others = jax.live_arrays, jax.live_arrays()
  known = {id(array) for array in others}
  monkeypatch.setattr(
    jax, "live_arrays", lambda: [x for x in live() if id(x) not in known]
  )
  rows = jax.NamedSharding(mesh_fsdp8, jax.P("fsdp"))
  arrays = [
    jax.device_put(np.ones((16, 1000), np.float32), rows),
    jax.device_put(jnp.zeros((0, 4)), rows),
    jax.random.key(0),
  ]
  before = utils.live_array_bytes()
  assert utils.live_array_bytes() == before
  del arrays[0]
  after = utils.live_array_bytes()
  assert {before[device] - after[device] for device in after} == {8000}


def test_live_arrays_count_on_the_device_that_holds_them(monkeypatch):
  device = jax.local_devices()[0]
  array = jax.device_put(np.ones((1000, 10), np.float32), device)
  assert utils.live_array_bytes()[device] >= 40_000
  # Alone: other tests' arrays come and go, also from threads.
  monkeypatch.setattr(jax, "live_arrays", lambda: [array])
  assert utils.live_array_bytes() == {device: 40_000}


def test_memory_is_printed_for_every_device(capsys):
  array = jnp.ones((1024, 256))  # 1 MiB
  utils.show_hbm_usage("before")
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == len(jax.local_devices())
  assert all(line.startswith("before: ") for line in lines)
  used = utils.device_memory()[next(iter(array.devices()))]
  assert used[0] >= 2**20
