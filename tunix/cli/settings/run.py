"""The sections that every run has, and the settings that hold them.

A section is a dataclass of the library wherever it has one: LoraConfig, TrainingConfig,
CheckpointOptions. What is added here is what a command line alone needs. A key of the
command is a field; `Attributes:` is its help.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Literal

from tunix.cli.build import mesh as mesh_axes
from tunix.cli.settings import export as export_settings
from tunix.cli.settings.data import DataSettings, StreamSettings
from tunix.cli.settings.export import Dtype, ExportSettings
from tunix.data.records import Kind
from tunix.models.lora import LoraConfig
from tunix.sft.config import CheckpointOptions, TrainingConfig
from tunix.utils import checks


def values_for(kind: type, section: Any) -> dict[str, Any]:
  """The values that a section has for the fields of `kind`."""
  known = {field.name for field in dataclasses.fields(kind)}
  shared = [f.name for f in dataclasses.fields(section) if f.name in known]
  return {name: getattr(section, name) for name in shared}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
  """Which model, and how it computes.

  Attributes:
    path: a Hugging Face folder (config.json and safetensors), or a hub id "owner/name".
    revision: of a hub id, and of its tokenizer: a commit, tag or branch; null: the
      newest. The run keeps the commit that it means when the run begins.
    name: or a preset to start from scratch, such as llama3p2_1b or qwen3_0p6b, ...
    args: ... with fields of it to change: {num_layers: 4, embed_dim: 256, ...}.
    dtype: of the computation; null: the checkpoint's.
    param_dtype: of the weights, and so of the optimizer's moments. null: float32 when
      the whole model is trained (bfloat16 rounds most updates away), as dtype below
      adapters.
    remat: what the backward pass recomputes to save memory.
    scan_layers: compile one layer and scan over them (true), or every layer (false);
      null: by depth.
    attention: how it is computed: splash is for TPU, cudnn for GPU; one that cannot do
      what the model needs is an error. null: auto.
    quantise: store the frozen weights below adapters in fewer bits (QLoRA).
  """

  path: str | None = None
  revision: str | None = None
  name: str | None = None
  args: dict[str, Any] = dataclasses.field(default_factory=dict)
  dtype: Dtype | None = None
  param_dtype: Dtype | None = None
  remat: Literal["none", "block", "dots", "offload"] | None = None
  scan_layers: bool | None = None
  attention: Literal["auto", "plain", "blockwise", "splash", "cudnn"] | None = None
  quantise: Literal["nf4", "int4", "int8"] | None = None

  def __post_init__(self):
    if self.path is not None and self.name is not None:
      raise ValueError(
        f"path is {self.path!r} and model.name {self.name!r}: give a checkpoint's "
        "folder or a preset to start from scratch, not both"
      )
    if self.revision is not None and self.path is None:
      raise ValueError(
        f"revision is {self.revision!r} and model.path is not set: it is of a hub id "
        "'owner/name'"
      )
    if self.args and self.name is None:
      raise ValueError(
        f"args {sorted(self.args)} change fields of a preset, and model.name is not "
        "set: a checkpoint brings its own sizes"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
  """Text to tokens.

  Attributes:
    path: folder or hub id; null: model.path.
    chat_template: a file with the jinja chat template to use instead of the tokenizer's
      own.
  """

  path: str | None = None
  chat_template: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
  """An optax optimizer by name.

  Attributes:
    name: a function of optax (or optax.contrib) that takes a learning rate. muon: each
      layer's matrices are orthogonalised, the rest gets Adam.
    args: its other arguments: {b2: 0.95, weight_decay: 0.1}.
  """

  name: str = "adamw"
  args: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if "learning_rate" in self.args:
      raise ValueError("args.learning_rate is set: give training.learning_rate instead")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
  """An optax schedule by name; without one the rate is constant.

  Attributes:
    name: a schedule of optax, such as warmup_cosine_decay_schedule; null: constant.
    args: its arguments. The peak (or first) value is training.learning_rate, the number
      of steps that of the run, first and last value 0, where not given here.
  """

  name: str | None = None
  args: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.args and self.name is None:
      raise ValueError(
        f"args {sorted(self.args)} are set and schedule.name is not: name the optax "
        "schedule that takes them"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings(TrainingConfig):
  """TrainingConfig, with the sizes of batches.

  Attributes:
    learning_rate: null: 1e-5, and 2e-4 with LoRA.
    max_steps: optimizer steps; null: until data.num_epochs are over.
    global_batch_size: rows of one optimizer step, over all devices. In RL prompts of
      one batch of rollouts.
    eval_batch_size: rows (in RL prompts) at a time when evaluating; null: as
      micro_batch_size.
    eval_every_n_steps: besides before the first and after the last step.
    max_grad_norm: gradients are scaled down to this global norm; null: never.
  """

  # Follow from other keys, or are for Python alone.
  hidden: ClassVar[tuple[str, ...]] = (
    "gradient_accumulation_steps",
    "checkpoint_root_directory",
    "checkpointing_options",
    "metrics_logging_options",
    "data_sharding_axis",
    "metrics_prefix",
    "pbar_description",
    "num_train_steps",
  )

  global_batch_size: int = 8
  eval_batch_size: int | None = None
  max_grad_norm: float | None = 1.0

  def __post_init__(self):
    super().__post_init__()
    checks.fields(
      self,
      global_batch_size=checks.COUNT,
      eval_batch_size=checks.COUNT,
      max_grad_norm=checks.POSITIVE,
    )

  @property
  def eval_rows(self) -> int:
    """Rows (in RL prompts) of one batch of the evaluation."""
    return self.eval_batch_size or self.global_batch_size

  @property
  def batch_rows(self) -> dict[str, int]:
    """Rows of batches by key, where they are stated. In RL they follow from prompts and
    completions of each, and the learner checks them."""
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatchSettings(TrainingSettings):
  """TrainingSettings of a trainer that is given micro-batches.

  Attributes:
    micro_batch_size: rows computed at a time, over all devices; null: all. Results do
      not depend on it.
  """

  micro_batch_size: int | None = None

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, micro_batch_size=checks.COUNT)
    if self.global_batch_size % self.micro_rows:
      raise ValueError(
        f"global_batch_size {self.global_batch_size} is no multiple of "
        f"training.micro_batch_size {self.micro_rows}: change one of them"
      )

  @property
  def micro_rows(self) -> int:
    """Rows of one micro-batch."""
    return self.micro_batch_size or self.global_batch_size

  @property
  def eval_rows(self) -> int:
    """Rows of one batch of the evaluation."""
    return self.eval_batch_size or self.micro_rows

  @property
  def micro_batches(self) -> int:
    """Micro-batches of one optimizer step."""
    return self.global_batch_size // self.micro_rows

  @property
  def batch_rows(self) -> dict[str, int]:
    """Rows of batches by key."""
    return {
      "training.micro_batch_size": self.micro_rows,
      "training.eval_batch_size": self.eval_rows,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingSettings:
  """Where metrics go besides logs/metrics.jsonl; speeds go to logs/timings.jsonl.

  Attributes:
    tensorboard: event files in logs/.
    wandb: Weights & Biases; null: when a WANDB_* variable asks for it.
    console: a line per step on standard output.
    progress_bar: on standard error; a line every ten seconds when that is no terminal.
    project_name, run_name: of Weights & Biases.
  """

  tensorboard: bool = True
  wandb: bool | None = None
  console: bool = False
  progress_bar: bool = True
  project_name: str = "tunix"
  run_name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedSettings:
  """Several processes as one run, each started with the same command.

  Attributes:
    coordinator: host:port of process 0; auto: all of this is read from the environment
      (Slurm, Open MPI, GKE, TPU VMs). null: one process.
    num_processes: of the run.
    process_id: of this process, from 0 on.
    timeout_s: seconds to wait for the other processes at the start.
    heartbeat_s: a process that is not heard of for so many seconds ends the others.
    stall_s: a process that waits so many seconds for one batch of its data, or for its
      share of the calls of reward functions, ends all of them.
  """

  coordinator: str | None = None
  num_processes: int | None = None
  process_id: int | None = None
  timeout_s: int = 300
  heartbeat_s: int = 30
  stall_s: int = 3600

  def __post_init__(self):
    checks.fields(
      self,
      num_processes=checks.COUNT,
      process_id=checks.NOT_NEGATIVE,
      timeout_s=checks.COUNT,
      heartbeat_s=checks.COUNT,
      stall_s=checks.COUNT,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(abc.ABC):
  """All keys that every job has. Sections are checked alone, then against each other.

  Attributes:
    job: what is trained: sft (supervised fine-tuning), dpo (and the other losses of
      pairs, see preference.loss), orpo, kto, reward (a reward model), distill (from a
      teacher), grpo (with its variants, see algorithm.name) or ppo.
    output_dir: folder of the run: config.yaml, checkpoints/, logs/, export/. Needed for
      training. The same command again resumes what it finds there.
    seed: of the data's order, of adapters, and of fresh weights; 0 to 2**32 - 1.
    lora: adapters; without a rank the whole model is trained.
    mesh: devices by axis: {dp: 2, fsdp: 4, tp: 2}. dp, fsdp and ep split batches,
      cp the tokens of each row, ep experts, and fsdp, cp, ep and tp all other weights;
      one size may be -1, what the others leave. Empty: one device.
    compilation_cache: folder that keeps compiled programs between runs, or has those of
      `tunix plan --ship`; null: none are kept.

  Raises:
    ValueError: a value out of range, or keys that contradict each other; the message
      begins with the key.
  """

  # Keys of other jobs, and what to use here instead.
  instead: ClassVar[dict[str, str]] = {}
  # Whether adapters hold all that is trained.
  fits_adapter: ClassVar[bool] = True

  job: str
  output_dir: str | None = None
  seed: int = 0
  model: ModelSettings = ModelSettings()
  tokenizer: TokenizerSettings = TokenizerSettings()
  lora: LoraConfig | None = None
  data: DataSettings = dataclasses.field(default=DataSettings())
  optimizer: OptimizerSettings = OptimizerSettings()
  schedule: ScheduleSettings = ScheduleSettings()
  training: TrainingSettings = TrainingSettings()
  mesh: dict[str, int] = dataclasses.field(default_factory=dict)
  checkpoint: CheckpointOptions = dataclasses.field(default=CheckpointOptions())
  logging: LoggingSettings = LoggingSettings()
  export: ExportSettings = dataclasses.field(default=ExportSettings())
  distributed: DistributedSettings = DistributedSettings()
  compilation_cache: str | None = None

  def __post_init__(self):
    checks.fields(self, seed=checks.SEED)
    if self.model.quantise is not None and self.lora is None:
      raise ValueError(
        f"model.quantise is {self.model.quantise!r} and lora.rank is not set: "
        "quantised weights are not trained themselves, set lora.rank (8, for example)"
      )
    export_settings.check(self)
    self._check_best()
    if self.training.eval_every_n_steps is not None and self.data.eval is None:
      raise ValueError(
        f"training.eval_every_n_steps is {self.training.eval_every_n_steps} and "
        "data.eval is not set: name a file to evaluate on"
      )
    mesh_axes.check(self.mesh, self.training.batch_rows)

  def _check_best(self) -> None:
    best, every = self.training.best, self.training.eval_every_n_steps
    if best is None:
      return
    if self.data.eval is None:
      raise ValueError(
        "training.best is set and data.eval is not: name a file to evaluate on"
      )
    if best.patience is not None and every is None:
      raise ValueError(
        f"training.best.patience is {best.patience} and training.eval_every_n_steps is "
        "not set: the one evaluation after the last step has nothing to stop"
      )

  @property
  def export_kind(self) -> str:
    """What is exported, "auto" decided."""
    if self.export.kind != "auto":
      return self.export.kind
    if self.lora is None:
      return "full"
    return "adapter" if self.fits_adapter else "merged"

  @abc.abstractmethod
  def kind(self, *, training: bool) -> Kind:
    """Returns the kind of the records for training, or for evaluation."""

  @abc.abstractmethod
  def row_keys(self, kind: Kind) -> dict[str, str]:
    """Returns {argument of the data layer: key} for the lengths of rows."""

  @property
  def drops(self) -> bool:
    """True if records may be left out."""
    return self.data.overlong == "drop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamRun(RunSettings):
  """A run on records that are given, of whatever kind its job trains on."""

  data: StreamSettings = dataclasses.field(default=StreamSettings())
  training: MicroBatchSettings = MicroBatchSettings()
