"""Cost of the Tinker protocol, and throughput of several tenants; prints JSON.

  python -m benchmarks.tinker overhead [--models FOLDER] [--steps 8]
  python -m benchmarks.tinker tenants [--models FOLDER] [--steps 8]

`overhead` times a LoRA step of the 58M model of benchmarks.bench by our trainer and by
the SDK over a socket, in turn. `tenants` times one tenant, and eight tenants in turn.
Client and server are one process, so its CPU seconds count both, and hold on a busy
machine too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import tempfile
import threading
import time

import jax
import numpy as np
import optax

from benchmarks import bench
from tunix.cli.make import loading
from tunix.models import lora
from tunix.serve.app import make_app
from tunix.serve.server import make_server
from tunix.serve.settings import ServeSettings
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.tinker import app as tinker_app
from tunix.tinker.service import Service
from tunix.tinker.settings import TinkerSettings

RANK = 8


ROWS, LENGTH = 8, 256  # of a step


class _NoEngine:
  """The part of a driver that a server without samples needs."""

  alive, degraded, failure = True, None, None

  class engine:
    adapters, config = (), None


@contextlib.contextmanager
def served(model, root):
  service = Service(model, TinkerSettings(root=root, lora_alpha=RANK), name="bench")
  serve = ServeSettings(port=0)
  app = make_app(_NoEngine(), serve, more=tinker_app.routes(service))
  started, found = threading.Event(), []
  server = make_server(app, serve, lambda url: (found.append(url), started.set()))
  thread = threading.Thread(target=server.run)
  thread.start()
  started.wait(60)
  try:
    yield found[0]
  finally:
    server.should_exit = True
    thread.join()
    service.close()


def rows(seed: int, vocab: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(1, vocab, (ROWS, LENGTH + 1))


def client_of(url: str):
  import tinker

  return tinker.ServiceClient(base_url=url, api_key="tml-bench")


def sdk_step(trainer, tokens: np.ndarray) -> None:
  import tinker

  weights = np.full(LENGTH, 1 / (ROWS * LENGTH), np.float32)
  data = [
    tinker.Datum(
      model_input=tinker.ModelInput.from_ints(x[:-1].tolist()),
      loss_fn_inputs={"target_tokens": x[1:], "weights": weights},
    )
    for x in tokens
  ]
  future = trainer.forward_backward(data, "cross_entropy")
  update = trainer.optim_step(tinker.AdamParams(learning_rate=1e-4))
  future.result()
  update.result()


def timed(function) -> tuple[float, float]:
  """Returns wall and CPU seconds."""
  start = time.perf_counter(), time.process_time()
  function()
  return time.perf_counter() - start[0], time.process_time() - start[1]


def overhead(model, options) -> dict:
  vocab = model.config.vocab_size
  adapted = lora.apply(model, lora.LoraConfig(rank=RANK, alpha=RANK))
  trainer = PeftTrainer(adapted, optax.adamw(1e-4), TrainingConfig())

  def direct(tokens):
    # LENGTH tokens of input, as the protocol has them after its shift.
    inside = np.ones((ROWS, LENGTH), np.int32)
    batch = {"input_tokens": tokens[:, :-1], "input_mask": inside}
    jax.block_until_ready(trainer.train_step({**batch, "segment_ids": inside}))

  with served(model, options.root) as url:
    client = client_of(url)
    remote = client.create_lora_training_client("bench", rank=RANK, seed=0).result()
    pairs = []
    for step in range(options.steps + 2):
      tokens = rows(step, vocab)
      pairs.append([timed(lambda t=tokens: direct(t))])
      pairs[-1].append(timed(lambda t=tokens: sdk_step(remote, t)))
    client.close("success").result()
  figures = {}
  for i, name in enumerate(("wall", "cpu")):
    direct_s, sdk_s = zip(*((a[i], b[i]) for a, b in pairs[2:]))  # two compile
    ratio = statistics.median(b / a for a, b in zip(direct_s, sdk_s))
    medians = [round(statistics.median(x), 3) for x in (direct_s, sdk_s)]
    figures[name] = {"direct_s": medians[0], "sdk_s": medians[1], "ratio": ratio}
  return figures


def tenants(model, options) -> dict:
  vocab, rates = model.config.vocab_size, {}
  with served(model, options.root) as url:
    for count in (1, 8):
      clients = [client_of(url) for _ in range(count)]
      made = [
        x.create_lora_training_client("bench", rank=RANK, seed=i).result()
        for i, x in enumerate(clients)
      ]
      sdk_step(made[0], rows(0, vocab))

      def loop(trainer, seed, steps):
        for step in range(steps):
          sdk_step(trainer, rows(100 * seed + step, vocab))

      steps = max(1, options.steps // count)
      threads = [
        threading.Thread(target=loop, args=(x, i, steps)) for i, x in enumerate(made)
      ]

      def run(threads=threads):
        for thread in threads:
          thread.start()
        for thread in threads:
          thread.join()

      rates[count] = [count * steps * ROWS * LENGTH / x for x in timed(run)]
      for client in clients:
        client.close("success").result()
  names = ("wall", "cpu")
  return {
    "tokens_per_s": {n: dict(zip(names, x)) for n, x in rates.items()},
    "ratio": {name: many / one for name, one, many in zip(names, *rates.values())},
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("job", choices=("overhead", "tenants"))
  parser.add_argument("--models", default=f"{tempfile.gettempdir()}/tunix-bench")
  parser.add_argument("--steps", type=int, default=8)
  parser.add_argument("--layers", type=int, default=8)
  parser.add_argument("--vocab", type=int, default=32000)
  options = parser.parse_args()
  folder = bench.model_folder(options)
  model = loading.load_model(str(folder), None, "float32")
  with tempfile.TemporaryDirectory() as root:
    options.root = pathlib.Path(root)
    print(json.dumps({"job": options.job, **globals()[options.job](model, options)}))


if __name__ == "__main__":
  main()
