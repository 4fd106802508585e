"""The sections that every run has, and the dataclass that holds them.

A key of the command is a field of a dataclass, and the text under `Attributes:` is its
help. A section is the library's own dataclass where one exists: LoraConfig,
CheckpointOptions. The classes here add the keys that only a command line needs.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Literal

from tunix.cli.settings import export as export_settings, mesh as mesh_axes
from tunix.cli.settings.data import DataSettings, StreamSettings
from tunix.cli.settings.export import Dtype, ExportSettings
from tunix.cli.settings.training import (
  MicroBatchSettings,
  OptimizerSettings,
  ScheduleSettings,
  TrainingSettings,
)
from tunix.data.records import Kind
from tunix.generate.tokenizer import added_tokens, chat_template
from tunix.models.lora import LoraConfig
from tunix.rl.env.config import EpisodeConfig
from tunix.sft.config import CheckpointOptions
from tunix.utils import checks
from tunix.utils.setting import field_values, model_setting, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
  """The model, and how it computes.

  Attributes:
    path: a Hugging Face folder (config.json and safetensors), a GGUF file, or a hub id
      "owner/name".
    revision: commit, tag or branch of a hub id and of its tokenizer; null: the newest
      commit. The run keeps the commit that it starts with.
    name: a preset to train from scratch, such as llama3p2_1b or qwen3_0p6b; instead of
      model.path.
    args: fields of the preset to change: {num_layers: 4, embed_dim: 256, ...}.
    images: true loads the vision tower of a folder that has one, false leaves it out;
      null: as `AutoModel` does, with the tower for Gemma 3 and SmolVLM. The tower is
      frozen. The jobs sft, dpo, orpo, reward, kto, distill, grpo and ppo then read
      images.
    train_tower: true trains the vision tower too when the whole model is trained.
    dtype: dtype of the computation; null: the checkpoint's.
    param_dtype: dtype of the weights, and so of the optimizer's moments. null: float32
      when the whole model is trained, because bfloat16 rounds most updates to nothing;
      with adapters the same as model.dtype.
    remat: activations that the backward pass computes again instead of keeping them in
      memory.
    scan_layers: true compiles one layer and scans over all of them, false compiles
      every layer; null: chosen by the number of layers.
    attention: implementation of attention. splash needs a TPU, cudnn a GPU; an
      implementation that cannot compute the model's attention is an error. null: auto.
    batch_invariant: true computes tokens in products whose bits do not depend on other
      rows, so that the sampler's log-probabilities are those of the trainer. On a CPU,
      for models without experts and recurrent layers. null: false.
    quantize: stores the frozen weights below adapters in 4 or 8 bits (QLoRA).
  """

  path: str | None = model_setting("model")
  revision: str | None = setting(None, may_change=True)
  name: str | None = None
  args: dict[str, Any] = dataclasses.field(default_factory=dict)
  images: bool | None = None
  train_tower: bool = False
  dtype: Dtype | None = None
  param_dtype: Dtype | None = None
  remat: Literal["none", "block", "dots", "offload"] | None = setting(
    None, may_change=True
  )
  scan_layers: bool | None = setting(None, may_change=True)
  attention: Literal["auto", "plain", "blockwise", "splash", "cudnn"] | None = setting(
    None, may_change=True
  )
  batch_invariant: bool | None = setting(None, may_change=True)
  quantize: Literal["nf4", "int4", "int8", "fp8", "mxfp4"] | None = None

  def __post_init__(self):
    if self.path is not None and self.name is not None:
      raise ValueError(
        f"path is {self.path!r} and model.name {self.name!r}; expected one of them. "
        "Give a checkpoint's folder, or a preset to start from scratch"
      )
    if self.images is not None and self.path is None:
      raise ValueError(
        f"images is {self.images} and model.path is not set; a preset has a tower or "
        "none. Leave model.images out"
      )
    if self.revision is not None and self.path is None:
      raise ValueError(
        f"revision is {self.revision!r} and model.path is not set; a revision belongs "
        "to a hub id 'owner/name'. Set model.path"
      )
    if self.args and self.name is None:
      raise ValueError(
        f"args {sorted(self.args)} change fields of a preset and model.name is not "
        "set. Leave model.args out: a checkpoint has its own sizes"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
  """The tokenizer and its chat template.

  Attributes:
    path: folder, GGUF file or hub id of the tokenizer; null: model.path.
    chat_template: file with a jinja chat template that replaces the tokenizer's.
    template_args: variables of the chat template that training rows, prompts, rollouts
      and evaluations have: {enable_thinking: false} for answers without reasoning from
      a model of Qwen3. They are written into the chat template of the export, so
      `tunix chat` and other programs use them too. data.template_args and the records
      override them.
    add_tokens: texts that become tokens of their own: ["<think>", "</think>"]. Their
      embeddings begin as the mean of the others and are trained, with adapters too. The
      export has the tokens. A text that is a token already stays as it is.
    add_bos: puts BOS before plain texts: prompts and rows without a chat template.
      null: as the tokenizer itself does.
    messages: plain gives the chat template all messages in one form, which the server
      uses too: developer is the role system, arguments of tool calls are objects, or
      texts if the template joins texts, and a turn of tool calls without text has the
      content that the template tests for. given passes messages unchanged, and keeps
      special tokens as text in the answers of episodes, as older versions did. null:
      plain.
  """

  path: str | None = setting(
    None, path="read", may_change=True, fingerprint="tokenizer", takes_object=True
  )
  chat_template: str | None = setting(
    None, path="read", may_change=True, fingerprint="chat_template"
  )
  template_args: dict[str, Any] = dataclasses.field(default_factory=dict)
  add_tokens: tuple[str, ...] = ()
  add_bos: bool | None = None
  messages: Literal["plain", "given"] | None = None

  def __post_init__(self):
    checks.fields(self)
    chat_template.check_defaults(self.template_args, "template_args")
    added_tokens.check(self.add_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingSettings:
  """Outputs of the metrics besides logs/metrics.jsonl and logs/timings.jsonl.

  Attributes:
    tensorboard: writes event files to logs/.
    wandb: logs to Weights & Biases; null: if a WANDB_* variable is set.
    console: prints a line per step on standard output.
    progress_bar: shows a bar on standard error, or one line every ten seconds if
      standard error is no terminal.
    project_name: project of Weights & Biases.
    run_name: name of the run in Weights & Biases.
  """

  tensorboard: bool = True
  wandb: bool | None = None
  console: bool = False
  progress_bar: bool = True
  project_name: str = "tunix"
  run_name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedSettings:
  """Several processes that train as one run, each started with the same command.

  Attributes:
    coordinator: host:port of process 0. auto: this section is read from the environment
      (Slurm, Open MPI, GKE, TPU VMs). null: one process.
    num_processes: number of processes of the run.
    process_id: number of this process, from 0.
    timeout_s: seconds to wait for the other processes at the start.
    heartbeat_s: seconds without a sign of life of one process after which the others
      end.
    stall_s: seconds that a process may wait for one batch of its data, or for its share
      of the reward functions' calls; after them all processes end.
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
  """The keys that every job has. Each section checks itself, this class the pairs.

  Attributes:
    job: the training method.
    output_dir: folder of the run with config.yaml, checkpoints/, logs/ and export/.
      Needed for training. The same command again resumes the run in the folder.
    seed: seed of the data's order, of adapters and of fresh weights; 0 to 2**32 - 1.
    lora: adapters; without a rank the whole model is trained.
    mesh: number of devices by axis: {dp: 2, fsdp: 4, tp: 2}. dp, fsdp and ep split
      batches, cp splits the tokens of each row, ep splits experts, and fsdp, cp, ep and
      tp split all other weights. One size may be -1: all devices that the other axes
      leave. {}: one device.
    compilation_cache: folder for compiled programs, which later runs load, or the
      folder of `tunix plan --ship`; null: programs are not kept.
    compilation_cache_key: file with the key of `tunix plan --ship-key`. The run then
      loads only programs that were signed with this key, and adds none to the folder.
      null: the folder is not signed.

  Raises:
    ValueError: a value out of range, or keys that contradict each other; the message
      begins with the key.
  """

  # Keys of other jobs, and the advice for a person who gives one to this job.
  instead: ClassVar[dict[str, str]] = {}
  # If False, adapters do not hold everything that the job trains.
  fits_adapter: ClassVar[bool] = True
  # True if the job trains on records with images.
  reads_images: ClassVar[bool] = False

  job: str
  output_dir: str | None = setting(None, path="written", may_change=True)
  seed: int = 0
  model: ModelSettings = ModelSettings()
  tokenizer: TokenizerSettings = TokenizerSettings()
  lora: LoraConfig | None = None
  data: DataSettings = dataclasses.field(default=DataSettings())
  optimizer: OptimizerSettings = dataclasses.field(default=OptimizerSettings())
  schedule: ScheduleSettings = dataclasses.field(default=ScheduleSettings())
  training: TrainingSettings = dataclasses.field(default=TrainingSettings())
  mesh: dict[str, int] = setting(default_factory=dict, may_change=True)
  checkpoint: CheckpointOptions = setting(CheckpointOptions(), may_change=True)
  logging: LoggingSettings = setting(LoggingSettings(), may_change=True)
  export: ExportSettings = setting(ExportSettings(), may_change=True)
  distributed: DistributedSettings = setting(DistributedSettings(), may_change=True)
  compilation_cache: str | None = setting(None, path="written", may_change=True)
  compilation_cache_key: str | None = setting(None, path="read", may_change=True)

  def __post_init__(self):
    checks.fields(self, seed=checks.SEED)
    if self.model.quantize is not None and self.lora is None:
      raise ValueError(
        f"model.quantize is {self.model.quantize!r} and lora.rank is not set; "
        "quantized weights are not trained. Set lora.rank (8, for example)"
      )
    if self.model.train_tower and self.lora is not None:
      raise ValueError(
        "model.train_tower is true and lora.rank is set; adapters alone are trained. "
        "Leave one of them out, or name layers of the tower in lora.targets"
      )
    check_cache(self.compilation_cache, self.compilation_cache_key)
    export_settings.check(self)
    self._check_best()
    if self.training.eval_every_n_steps is not None and not self.evaluates:
      raise ValueError(
        f"training.eval_every_n_steps is {self.training.eval_every_n_steps} and "
        "data.eval is not set. Name a file to evaluate on"
      )
    mesh_axes.check(self.mesh, self.training.batch_rows)

  def _check_best(self) -> None:
    best, every = self.training.best, self.training.eval_every_n_steps
    if best is None:
      return
    if not self.evaluates:
      raise ValueError(
        "training.best is set and data.eval is not. Name a file to evaluate on"
      )
    if best.patience is not None and every is None:
      raise ValueError(
        f"training.best.patience is {best.patience} and training.eval_every_n_steps is "
        "not set, so the only evaluation is after the last step. Set it"
      )

  @property
  def evaluates(self) -> bool:
    """True if the run is evaluated."""
    return self.data.eval is not None

  @property
  def export_kind(self) -> str:
    """The kind of export, with "auto" resolved."""
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

  @property
  def follows_lengths(self) -> bool:
    """True if rows may be as short as the longest record."""
    return True

  @property
  def pad_to(self) -> str:
    """The value of data.pad_to, with null resolved."""
    return self.data.pad_to or ("shared" if self.follows_lengths else "max_length")

  @property
  def rollout_axes(self) -> dict[str, int]:
    """Sizes by axis of the devices that only sample; {}: there are none."""
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvEvalSettings:
  """Evaluation in environments, in each evaluation of the run.

  Attributes:
    env: function that makes the environments of the evaluations, named as the key env
      of grpo: pkg.mod:make, /path/file.py:make(level=2), or reasoning_gym:NAME(size=50)
      for tasks of reasoning-gym. Evaluations then have the mean reward of the
      episodes and pass@k. null: no environments.
    prompts: prompts with the columns that env names, named as in data.train; null: env
      names tasks of reasoning-gym.
    num_generations: episodes of each prompt; pass@k has k of 1, 2, 4, ... up to it.
    pass_threshold: reward from which an episode passes.
    temperature: temperature of the actions; 0: greedy.
    max_prompt_length: most tokens of the first prompt of an episode.
    max_tokens_to_generate: most tokens of an action.
    batch_size: prompts whose episodes run at once.
    episode: limits of the episodes; null: the defaults of the section episode of grpo.
  """

  env: str | None = setting(None, path="function", takes_object=True)
  prompts: tuple[str, ...] | str | None = setting(None, path="data", takes_object=True)
  num_generations: int = 1
  pass_threshold: float = 1.0
  temperature: float = 1.0
  max_prompt_length: int = 256
  max_tokens_to_generate: int = 256
  batch_size: int = 16
  episode: EpisodeConfig | None = None

  def __post_init__(self):
    checks.fields(
      self,
      temperature=checks.NOT_NEGATIVE,
      **dict.fromkeys(
        ("num_generations", "max_prompt_length", "max_tokens_to_generate"), checks.COUNT
      ),
      batch_size=checks.COUNT,
    )
    values = field_values(self)
    usual = {f.name: f.default for f in dataclasses.fields(self)}
    others = [n for n, x in values.items() if n != "env" and x != usual[n]]
    if self.env is None and others:
      raise ValueError(
        f"{others[0]} is {values[others[0]]!r} and eval.env is not set, so no "
        f"environment is evaluated. Set eval.env, or leave eval.{others[0]} out"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamRun(RunSettings):
  """The keys of a job that trains on given completions, not on rollouts.

  Attributes:
    eval: evaluation in environments, in each evaluation of the run.
  """

  data: StreamSettings = dataclasses.field(default=StreamSettings())
  training: MicroBatchSettings = dataclasses.field(default=MicroBatchSettings())
  eval: EnvEvalSettings = setting(EnvEvalSettings(), may_change=True)

  @property
  def evaluates(self) -> bool:
    """True if the run is evaluated, on data or in environments."""
    return super().evaluates or self.eval.env is not None

  def __post_init__(self):
    super().__post_init__()
    if self.data.stream and self.training.max_steps is None:
      raise ValueError(
        "data.stream is true and training.max_steps is not set; a stream has no "
        "length. Set training.max_steps to the number of steps"
      )

  @property
  def follows_lengths(self) -> bool:
    """See `RunSettings`."""
    return self.data.is_padded

  @property
  def shares_rows(self) -> bool:
    """True if short records may share rows."""
    return self.pad_to == "shared"

  @property
  def drops(self) -> bool:
    """True if records may be left out."""
    return super().drops or self.data.reasoning == "strip"


def check_cache(folder: str | None, key_file: str | None) -> None:
  """Refuses a key of the folder of compiled programs without the folder."""
  if key_file is not None and folder is None:
    raise ValueError(
      f"compilation_cache_key is {key_file!r} and compilation_cache is not set. Name "
      "the folder of `tunix plan --ship`"
    )
