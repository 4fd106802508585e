"""`tunix rollouts`: samples for a run of RL on a host of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from tunix.cli import config as config_lib
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.jobs.rl import rollout_configs
from tunix.cli.jobs.rl_settings import RLRun
from tunix.cli.make.loading import ModelLoader
from tunix.cli.run import settle
from tunix.cli.settings.options import Section
from tunix.rl import config as rl_config
from tunix.rl.rollout.host import RolloutHost
from tunix.serve import rollouts, server
from tunix.serve.settings import HttpSettings
from tunix.sft.metrics_logger import Mode
from tunix.utils import checks, mesh as mesh_lib, optional

EPILOG = """\
All other arguments are those of the run: tunix rollouts run.yaml --KEY.SUB=VALUE. The
run itself has --rollout.engine=remote --rl.rollout_hosts=[http://HOST:PORT]. It reads
the API key from the same variable."""

_PORT = 8700
# The largest body: a part of a parameter, or the prompts of a batch.
_MOST_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
  """The devices of the host.

  Attributes:
    tp: devices that split the weights.
  """

  tp: int = 1

  def __post_init__(self):
    checks.fields(self, tp=checks.COUNT)


def main(argv: Sequence[str]) -> None:
  """Runs `tunix rollouts` until SIGTERM or Ctrl-C.

  Raises:
    FileNotFoundError: there is no such configuration, model, or file of options or
      keys.
    OSError: the address cannot be used.
    ImportError: the extra `serve` is not installed.
    ValueError: the configuration is wrong or of a job without rollouts; or an address
      that other machines can reach, without an API key.
  """
  values, words = parser().read_known(argv)
  tp = values.build(HostOptions).tp
  for package in ("starlette", "uvicorn", "prometheus_client"):
    optional.require(package, "the host", "tunix[serve]")
  settings = values.build(HttpSettings, port=_PORT, max_body_bytes=_MOST_BYTES)
  server.check_address(settings)
  config: Any = config_lib.load(words)
  if not isinstance(config, RLRun):
    raise ValueError(f"job is {config.job}, expected grpo or ppo, which sample")
  if config.rollout.weights is not None:
    raise ValueError(
      f"rollout.weights is {config.rollout.weights!r}, and hosts sample with whole "
      "weights. Leave it out"
    )
  config = settle.settle_model(settle.absolute_paths(config))
  mesh = None
  if tp != 1:
    mesh = mesh_lib.create_mesh({"tp": tp}, jax.local_devices()[:tp])
  loader = ModelLoader(config, mesh)
  loader.check()
  tokenizer = loader.tokenizer()
  with mesh_lib.use_mesh(mesh):
    model = loader.model()
  configs = rollout_configs(config)
  widest = rl_config.widest(configs[Mode.TRAIN], configs.values())
  host = RolloutHost(model, tokenizer, widest)
  # A program that starts the host reads this line from a pipe.
  rollouts.serve(
    host,
    settings,
    on_start=lambda address: print("sampling at", address, flush=True),
  )


def parser() -> Parser:
  """Returns the parser of the arguments that are not the run's."""
  defaults = {"port": f"{_PORT}", "max_body_bytes": f"{_MOST_BYTES}"}
  # Calls run one after the other, as long as they take.
  idle = ("queue_timeout", "request_timeout")
  made = Parser(
    "tunix rollouts",
    "samples for a run of RL, on a host of its own",
    Section(HostOptions),
    Section(HttpSettings, without=idle, defaults=defaults),
    config="host_config",
  )
  made.epilog = EPILOG
  return made
