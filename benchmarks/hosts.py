"""A host that samples: transfer of weights, and cost of a batch, by
python -m benchmarks.hosts.

The host runs in this process, so both sides share its cores. The batch is drawn by an
engine of the run and by the host, in interleaved passes.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from tunix.examples.quickstart.task import make_tokenizer
from tunix.models.automodel import AutoModel
from tunix.models.qwen3.model import ModelConfig
from tunix.models.transformer.config import RopeConfig
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig
from tunix.rl.rollout.host import RolloutHost
from tunix.rl.rollout.remote_rollout import RemoteRollout
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.rl.weights.policy_version import PolicyVersion, policy_stamp
from tunix.serve import rollouts, server
from tunix.serve.settings import ServeSettings
from tunix.utils import tree

_MIB = 2**20


def _model(options: argparse.Namespace) -> nnx.Module:
  config = ModelConfig(
    num_layers=options.layers,
    vocab_size=options.vocab,
    embed_dim=options.width,
    hidden_dim=3 * options.width,
    num_heads=8,
    num_kv_heads=4,
    head_dim=options.width // 8,
    rope=RopeConfig(theta=1e6),
  )
  return AutoModel.from_config(config, seed=0)


def _served(options: argparse.Namespace, config: RolloutConfig) -> str:
  """Serves a host in a thread; returns its address."""
  urls, ready = [], threading.Event()

  def run() -> None:
    host = RolloutHost(_model(options), make_tokenizer(), config)
    settings = ServeSettings(port=0, max_body_bytes=64 * _MIB)

    def begun(url: str) -> None:
      urls.append(url)
      ready.set()

    app = rollouts.make_app(host, settings)
    server.run_until_signal(server.make_server(app, settings, begun))

  threading.Thread(target=run, daemon=True).start()
  ready.wait()
  return urls[0]


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
  start = clock()
  work()
  return clock() - start


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--width", type=int, default=512, help="of the model")
  parser.add_argument("--layers", type=int, default=8)
  parser.add_argument("--vocab", type=int, default=32_000)
  parser.add_argument("--prompts", type=int, default=8, help="each with 8 completions")
  parser.add_argument("--tokens", type=int, default=64, help="most of a completion")
  parser.add_argument("--passes", type=int, default=7)
  options = parser.parse_args()
  sizes = {"max_prompt_length": 64, "max_tokens_to_generate": options.tokens}
  url = _served(options, RolloutConfig(**sizes))
  config = RolloutConfig(**sizes)
  far = RolloutConfig(**sizes, engine_options={"urls": [url]})
  actor, tokenizer = _model(options), make_tokenizer()
  engines: dict[str, BaseRollout] = {
    "here": VanillaRollout(actor, tokenizer, config),
    "host": RemoteRollout(actor, tokenizer, far),
  }

  def publish(step: int) -> None:
    embedding = next(v for _, v in nnx.iter_graph(actor) if isinstance(v, nnx.Param))
    embedding.set_value(embedding.get_value() * np.float32(1.001))
    version = PolicyVersion(step, policy_stamp(actor))
    for engine in engines.values():
      engine.update_params(actor, version)

  size = tree.size_bytes(nnx.state(actor, nnx.Param)) / _MIB
  publish(0)
  sent = [_seconds(lambda n=n: publish(n + 1), time.monotonic) for n in range(5)]
  print(f"weights: {size:.0f} MiB in {statistics.median(sent):.2f} s")

  dice = np.random.default_rng(0)
  prompts = [dice.integers(4, 14, 64).tolist() for _ in range(options.prompts)]
  seconds: dict[str, list[float]] = {name: [] for name in engines}
  drawn = {}
  for number in range(options.passes + 1):
    for name, engine in engines.items():
      start = time.process_time()
      key = jax.random.key(number)
      out = engine.generate(prompts, config, num_generations=8, seed=key)
      drawn[name] = out.tokens
      if number:  # the first pass compiles
        seconds[name].append(time.process_time() - start)
    pairs = zip(drawn["here"], drawn["host"], strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
  for name, values in seconds.items():
    print(f"{name}: {statistics.median(values):.3f} CPU s")
  ratios = sorted(a / b for a, b in zip(seconds["host"], seconds["here"]))
  print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
  main()
