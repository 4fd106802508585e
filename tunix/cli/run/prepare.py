"""Prepares a run: checks all that can be checked before the model is loaded."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from tunix.cli.jobs.table import JOBS
from tunix.cli.make import environments, loading, optimizer
from tunix.cli.make.data import RunData
from tunix.cli.run import folder as run_folder, processes
from tunix.cli.run.folder import RunFolder
from tunix.cli.run.settle import settle
from tunix.cli.settings import keys, mesh as mesh_axes
from tunix.cli.settings.run import RunSettings
from tunix.generate.decoders import decoders
from tunix.generate.sizes import capacity
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.transformer.model import Transformer
from tunix.plan import shipped
from tunix.rl.experience.env_evaluation import EnvEvaluation
from tunix.sft.config import Schedule
from tunix.utils import folder_lock, tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
  """A checked run without its model.

  Attributes:
    config: settled settings.
    folder: folder of the run.
    mesh: mesh over all devices; None: one device, or a dry run of several processes.
    rollout_mesh: mesh of devices that only sample, which `mesh` does not have then;
      None: there are none.
    tokenizer: tokenizer of the run.
    data: checked data.
    optimizer: optimizer of the model.
    learning_rate: rate or schedule of the optimizer.
    evaluation: evaluation in environments; None: there is none.
  """

  config: RunSettings
  folder: RunFolder
  mesh: Mesh | None
  rollout_mesh: Mesh | None
  tokenizer: TokenizerAdapter
  data: RunData
  optimizer: optax.GradientTransformation
  learning_rate: float | Schedule
  evaluation: EnvEvaluation | None

  @property
  def row_length(self) -> tuple[str, int]:
    """The keys that limit the length of a row, and the tokens of the widest row."""
    keys, most = JOBS[self.config.job].length(self.config)
    lengths = [widths.tokens for widths in self.data.widths.values()]
    return keys, max(lengths, default=most)

  @property
  def sized(self) -> RunSettings:
    """The settings that the trainer is built from.

    Rollouts have the width of the prompts, as `data.pad_to` sets. The run keeps the
    limit in its config.yaml, because a resumed run finds the same width again.
    """
    widths = self.data.widths.values()
    if not widths or JOBS[self.config.job].rollout(self.config) is None:
      return self.config
    longest = max(each.layout.max_prompt_length for each in widths)
    config = keys.with_value(self.config, "rollout.max_prompt_length", longest)
    own = [each.layout.max_teacher_prompt_length for each in widths]
    if None in own:
      return config
    return keys.with_value(config, "distill.max_teacher_prompt_length", max(own))


def prepare(config: RunSettings, *, join: bool = True) -> Prepared:
  """Checks folder, processes, mesh, model, data, optimizer, and the run in the folder.

  Writes nothing, and makes the folder of the compilation cache. With several
  processes, every process must call it.

  Args:
    config: settings as loaded.
    join: joins the other processes of the run; False in a dry run.

  Raises:
    ValueError, FileNotFoundError: something about settings, data or model is wrong.
    RuntimeError: another process trains in the folder.
  """
  folder = run_folder.open_folder(config)
  if join:
    shipped.open_cache(config.compilation_cache, config.compilation_cache_key)
    processes.start(config)
  mesh = rollout_mesh = None
  if join or config.distributed.coordinator is None:
    length = JOBS[config.job].length(config)
    devices, rollout_mesh = mesh_axes.divided(config.rollout_axes, jax.devices())
    rows = config.training.batch_rows
    mesh = mesh_axes.build(config.mesh, rows, length, devices)
  if jax.process_index() == 0:
    folder_lock.check(folder.path)
  config = folder.with_former(config)
  config, tokenizer, data = settle(config, folder.scans())
  processes.compare(config, data.fingerprints)
  rate = optimizer.build_schedule(config)
  tx = optimizer.build_optimizer(config, rate)
  folder.check_resume(config, data.fingerprints)
  return Prepared(
    config=config,
    folder=folder,
    mesh=mesh,
    rollout_mesh=rollout_mesh,
    tokenizer=tokenizer,
    data=data,
    optimizer=tx,
    learning_rate=rate,
    evaluation=environments.evaluation_of(config, tokenizer),
  )


def trained_of(config: RunSettings, model: Transformer) -> nnx.State:
  """Returns the trained arrays, or shapes, of a model with its adapters."""
  # Modules that are trained whole beside adapters are LoRAParam as well.
  return nnx.state(model, nnx.Param if config.lora is None else nnx.LoRAParam)


def check_model(run: Prepared, model: Transformer) -> None:
  """Refuses a model that does not fit the tokenizer, the memory or the completions.

  Args:
    run: the prepared run.
    model: the model, or its shapes.

  Raises:
    ValueError: the tokenizer has more ids than the model, a target of weight decay
      matches no parameter, the memory cannot hold the rows, or prompts and completions
      exceed the model's positions.
  """
  loading.check_vocabulary(model, run.tokenizer)
  optimizer.decay_of(run.config, tree.flatten(trained_of(run.config, model)))
  config, sizes, job = run.config, model.config, JOBS[run.config.job]
  key, length = run.row_length
  rows = config.training.batch_rows.get("training.micro_batch_size", 1)
  # Bytes of a token: a backward pass keeps the hidden states of every layer at least.
  token = sizes.num_layers * sizes.embed_dim * jnp.dtype(sizes.dtype).itemsize
  capacity.require(
    key, length, lambda n: rows * n * token, f"the hidden states of {rows} rows"
  )
  rollout, positions = job.rollout(config), decoders.max_positions(model)
  if rollout is None or positions is None:
    return
  new = rollout.max_tokens_to_generate
  for name, report in run.data.reports.items():
    # Longer prompts were dropped.
    longest = min(report.longest_prompt, rollout.max_prompt_length)
    if longest + new > positions:
      raise ValueError(
        f"rollout.max_tokens_to_generate is {new} and the longest prompt of the {name} "
        f"data has {longest} tokens: the model has {positions} positions, so that at "
        f"most {max(positions - longest, 0)} new tokens fit"
      )
