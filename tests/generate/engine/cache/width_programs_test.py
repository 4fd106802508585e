"""Programs of other widths of rows are compiled beside the launches."""

import threading

import jax
import numpy as np
import pytest

from tests import toys, toys_text
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest

VOCAB = 600
COMPILED = "/jax/core/compile/backend_compile_duration"


def ask(length, tokens, **rules):
  return EngineRequest(
    prompt=np.full(length, 7, np.int32),
    max_tokens=tokens,
    stop_ids=(),
    temperature=1.0,
    seed=length,
    logprobs=True,
    **rules,
  )


# The programs that have rows.
WITH_ROWS = {f"jit({name})" for name in ("mixed", "decode", "load", "write_back")}


class Compiled(list):
  """Pairs of a program that was compiled, or loaded, and the thread that did it.

  Other threads than the main one end a program once `gate` is set.
  """

  def __init__(self):
    self.gate = threading.Event()

  def note(self, event, _, fun_name="", **__):
    if event == COMPILED and fun_name in WITH_ROWS:
      thread = threading.current_thread()
      self.append((fun_name, thread.name))
      if thread is not threading.main_thread():
        self.gate.wait(60)

  def finish(self, engine):
    """Lets the thread end; returns what was compiled since the last call."""
    self.gate.set()
    engine._device.widths._job._thread.join()
    self.gate.clear()
    out = {*self}
    self.clear()
    return out


@pytest.fixture
def compiled():
  compiled = Compiled()
  jax.monitoring.register_event_duration_secs_listener(compiled.note)
  yield compiled
  compiled.gate.set()
  jax.monitoring.unregister_event_duration_listener(compiled.note)


def make():
  model = toys.model(vocab_size=VOCAB, num_layers=1)
  sizes = {"slots": 2, "max_tokens": 512, "prefill_tokens": 48}
  return Engine(model, toys_text.chat_tokenizer(), EngineConfig(**sizes))


def drawn(engine, *requests):
  """Runs requests one after the other; returns their tokens and the rows' widths."""
  rows = [(engine.run([x])[0][0].tokens, engine._device.width) for x in requests]
  tokens, widths = zip(*rows)
  return tokens, [*widths]


def test_no_text_waits_for_the_programs_of_another_width(compiled):
  requests = ask(20, 150), ask(100, 90)
  engine = make()
  engine.warm_up()
  compiled.finish(engine)  # the narrowest rows
  # With the programs of the widest rows, while the thread compiles.
  wide, widths = drawn(engine, *requests)
  assert widths == [512, 512]
  named = {(name, "programs of width 192") for name in WITH_ROWS}
  assert compiled.finish(engine) == named
  narrow, widths = drawn(engine, *requests)
  assert widths == [192, 192]
  # Also a width of more than half of the present one is taken once it can be.
  _, widths = drawn(engine, long := ask(300, 30))
  assert widths == [512]
  compiled.finish(engine)
  _, widths = drawn(engine, long)
  assert widths == [384]
  assert compiled == []
  expected, widths = drawn(make(), *requests)
  assert widths == [192, 192]
  for a, b, c in zip(expected, wide, narrow, strict=True):
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, c)
