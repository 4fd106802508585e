"""What rollouts take, by hand."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from tunix.generate.decoders.layout import Layout
from tunix.generate.decoders.memory import Memory
from tunix.models.transformer.cache import init_cache
from tunix.models.transformer.config import LayerKind
from tunix.perf.programs import ProgramRecord
from tunix.plan import rollout


def test_rows_that_fit_and_tokens_a_second():
  cache = lambda: init_cache(
    [LayerKind(window, None, 2, 8) for window in (None, None, 5)],  # half the slots
    batch_size=4,
    cache_size=10,
    dtype=jnp.bfloat16,
  )
  memory = Memory(
    cache=jax.eval_shape(cache),
    visible=jax.ShapeDtypeStruct((4, 10), bool),
    positions=jax.ShapeDtypeStruct((4,), jnp.int32),
    slot=jax.ShapeDtypeStruct((), jnp.int32),
  )
  rules = types.SimpleNamespace(limits=np.array([7, 7, 7, 0]))
  decode = ProgramRecord(None, ("graph", "state", rules, "out", memory, 8))
  assert rollout.passes(decode) == 6
  token = 2 * 5 * 2 * 8 * 2 // 2  # keys and values, layers, heads, sizes, bytes
  planned = types.SimpleNamespace(held_bytes=4 * 10 * token + 1000, seconds=0.5)
  said = rollout.of_loop(decode, planned, memory_bytes=1000 + 9 * 10 * token + 5)
  assert (said.cache_token_bytes, said.cache_bytes) == (token, 4 * 10 * token)
  assert (said.most_rows, said.tokens_per_second) == (9, 8.0)
  assert "at most 9 such rows fit; at most 8 tokens/s" in str(said)
  assert "weights lie as they are trained" in str(said)
  split = Layout(leaves=(None,), step=("fsdp",))
  opening = ProgramRecord(None, ("graph", split, "state"))
  laid_out = rollout.of_loop(decode, planned, 1000, opening)
  assert "weights lie split by fsdp" in str(laid_out)
