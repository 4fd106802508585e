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


class Threads(list):
  """Names of the threads that have compiled a program, or loaded one.

  The others end a program once `gate` is set.
  """

  def __init__(self):
    self.gate = threading.Event()

  def note(self, event, _, **__):
    if event == COMPILED:
      self.append(threading.current_thread().name)
      if threading.current_thread() is not threading.main_thread():
        self.gate.wait(60)

  def finish(self, engine):
    self.gate.set()
    engine._device.widths._job._thread.join()
    self.gate.clear()


@pytest.fixture
def threads():
  threads = Threads()
  jax.monitoring.register_event_duration_secs_listener(threads.note)
  yield threads
  threads.gate.set()
  jax.monitoring.unregister_event_duration_listener(threads.note)


def make():
  model = toys.model(vocab_size=VOCAB, num_layers=1)
  sizes = {"slots": 2, "max_tokens": 512, "prefill_tokens": 48}
  return Engine(model, toys_text.chat_tokenizer(), EngineConfig(**sizes))


def drawn(engine, *requests):
  """Runs requests one after the other; returns their tokens and the rows' widths."""
  rows = [(engine.run([x])[0][0].tokens, engine._device.width) for x in requests]
  tokens, widths = zip(*rows)
  return tokens, [*widths]


def test_no_text_waits_for_the_programs_of_another_width(threads):
  requests = ask(20, 150), ask(100, 90)
  engine = make()
  engine.warm_up()
  threads.finish(engine)  # the narrowest rows
  drawn(engine, requests[0])  # begins the next thread
  threads.clear()
  wide, widths = drawn(engine, *requests)  # with the programs of the widest rows
  assert widths == [512, 512]
  threads.finish(engine)
  assert "programs of width 192" in threads
  threads.clear()
  narrow, widths = drawn(engine, *requests)
  assert widths == [192, 192]
  # Zeros of the new rows and other small programs, and none of the model.
  assert len(threads) < len(engine._device.widths._forms[engine._device.widths.kind])
  expected, widths = drawn(make(), *requests)
  assert widths == [192, 192]
  for a, b, c in zip(expected, wide, narrow, strict=True):
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, c)
