"""A server of the training API on a socket, and clients of the SDK."""

import contextlib
import threading
from typing import Any

import numpy as np

from tests import toys, toys_text
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.driver import Driver
from tunix.generate.engine.engine import Engine
from tunix.serve.app import make_app
from tunix.serve.server import make_server
from tunix.serve.settings import ServeSettings
from tunix.tinker import app as tinker_app
from tunix.tinker.service import Service
from tunix.tinker.settings import TinkerSettings

VOCAB = 512
KEY = "tml-key"


def base():
  """A toy whose logits can differ enough for a policy to prefer tokens."""
  model = toys.model(vocab_size=VOCAB)
  model.lm_head.kernel.set_value(10 * model.lm_head.kernel[...])
  return model


def engine(model, ranks=16, max_tokens=64) -> Engine:
  sizes = EngineConfig(slots=4, max_tokens=max_tokens, rounds=4, adapter_ranks=ranks)
  return Engine(model, toys_text.chat_tokenizer(), sizes)


@contextlib.contextmanager
def server(
  root=None, *, name="toy", ranks=16, max_tokens=64, sampling=True, **settings: Any
):
  """Yields (address, service) of a server on a free port."""
  model = base()
  driver = Driver(engine(model, ranks, max_tokens))
  if sampling:
    driver.start()
  chosen = TinkerSettings(root=root, **settings)
  service = Service(model, chosen, name=name, driver=driver if sampling else None)
  app = make_app(driver, ServeSettings(port=0), more=tinker_app.routes(service))
  started, found = threading.Event(), []

  def on_start(address: str) -> None:
    found.append(address)
    started.set()

  made = make_server(app, ServeSettings(port=0), on_start)
  thread = threading.Thread(target=made.run)
  thread.start()
  assert started.wait(60)
  try:
    yield found[0], service
  finally:
    made.should_exit = True
    thread.join(60)
    service.close()
    if sampling:
      driver.stop(60)


def rows(seed: int, *lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
  """Random rows: (input, targets), each [N]."""
  rng = np.random.default_rng(seed)
  out = []
  for length in lengths:
    tokens = rng.integers(1, VOCAB, length + 1)
    out.append((tokens[:-1], tokens[1:]))
  return out
