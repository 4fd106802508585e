"""`tunix rollouts`: samples for a run of RL on a host of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tunix.cli import config as config_lib
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.commands.serve import KEY, read_key
from tunix.cli.jobs.rl import rollout_configs
from tunix.cli.jobs.rl_settings import RLRun
from tunix.cli.make.loading import ModelLoader
from tunix.cli.run import settle
from tunix.rl import config as rl_config
from tunix.rl.rollout.host import RolloutHost
from tunix.serve import rollouts, server
from tunix.serve.settings import ServeSettings
from tunix.sft.metrics_logger import Mode
from tunix.utils import checks, mesh as mesh_lib, optional

# The largest body: a part of a parameter, or the prompts of a batch.
_MOST_BYTES = 64 << 20

EPILOG = """\
All other arguments are those of the run: tunix rollouts run.yaml --KEY.SUB=VALUE. The
run itself has --rollout.engine=remote --rl.rollout_hosts=[http://HOST:PORT]."""


def main(argv: Sequence[str]) -> None:
  """Runs `tunix rollouts` until SIGTERM or Ctrl-C.

  Raises:
    FileNotFoundError: there is no such configuration, model or key file.
    OSError: the address cannot be used.
    ImportError: the extra `serve` is not installed.
    ValueError: the configuration is wrong or of a job without rollouts; or an address
      that other machines can reach, without an API key.
  """
  args, words = parser().parse_known_args(argv)
  checks.number("--tp", args.tp, checks.COUNT, whole=True)
  for package in ("starlette", "uvicorn", "prometheus_client"):
    optional.require(package, "the host", "tunix[serve]")
  settings = ServeSettings(
    host=args.host,
    port=args.port,
    api_key=read_key(args.api_key_file),
    max_body_bytes=_MOST_BYTES,
  )
  server.check_address(settings)
  config: Any = config_lib.load(words)
  if not isinstance(config, RLRun):
    raise ValueError(f"job is {config.job}, expected grpo or ppo, which sample")
  config = settle.settle_model(settle.absolute_paths(config))
  mesh = None
  if args.tp != 1:
    mesh = mesh_lib.create_mesh({"tp": args.tp}, jax.local_devices()[: args.tp])
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
  made = Parser("tunix rollouts", "samples for a run of RL, on a host of its own")
  made.epilog = EPILOG
  add = made.add_argument
  add("--host", default="127.0.0.1", help="any other than a local one needs a key")
  add("--port", type=int, default=8700, help="0: a free one, which is printed")
  add(
    "--api_key_file",
    metavar="FILE",
    help=f"file with the API key; default: the variable {KEY}, else no key. The run "
    "reads that variable",
  )
  add("--tp", type=int, default=1, help="devices that split the weights")
  return made
