"""What the quickstart does by default, and the layout of its folder."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil

# All that a quickstart leaves in its folder, so that --overwrite deletes nothing else.
_NAMES = (
  "checkpoint",
  "data",
  "finetune",
  "finetune-lora",
  "finetune.yaml",
  "generations.jsonl",
  "loss.png",
  "pretrain",
  "report.md",
  "tokenizer",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Sizes and places. The defaults take about two minutes on two CPU cores.

  Attributes:
    output: the folder that everything goes into.
    seed: of the split, the weights and the order of the data.
    pretrain_steps, finetune_steps: optimizer steps.
    vocab_size: ids of the tokenizer and rows of the embedding.
    num_layers, embed_dim, hidden_dim, num_heads, num_kv_heads: of the model.
    batch_size: rows of a batch. row_length: tokens of a row.
    pretrain_rate, finetune_rate: peak learning rates.
    questions: held-out signatures that are asked about, before and after.
    answer_tokens: longest answer.
  """

  output: pathlib.Path
  seed: int = 0
  pretrain_steps: int = 400
  finetune_steps: int = 500
  vocab_size: int = 2048
  num_layers: int = 4
  embed_dim: int = 128
  hidden_dim: int = 384
  num_heads: int = 4
  num_kv_heads: int = 2
  batch_size: int = 4
  row_length: int = 128
  pretrain_rate: float = 4e-3
  finetune_rate: float = 4e-3
  questions: int = 64
  answer_tokens: int = 64

  def __post_init__(self):
    for name in ("pretrain_steps", "finetune_steps"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
    if not 0 <= self.seed < 2**32:
      raise ValueError(f"seed is {self.seed}: it must be from 0 to 2**32 - 1")

  @property
  def data(self) -> pathlib.Path:
    """JSON lines."""
    return self.output / "data"

  @property
  def tokenizer(self) -> pathlib.Path:
    """The tokenizer's files."""
    return self.output / "tokenizer"

  @property
  def pretrain(self) -> pathlib.Path:
    """Metrics of the pretraining."""
    return self.output / "pretrain"

  @property
  def checkpoint(self) -> pathlib.Path:
    """The pretrained model."""
    return self.output / "checkpoint"

  @property
  def config_file(self) -> pathlib.Path:
    """What `tunix train` is given."""
    return self.output / "finetune.yaml"

  @property
  def finetune(self) -> pathlib.Path:
    """The run of `tunix train`."""
    return self.output / "finetune"

  @property
  def export(self) -> pathlib.Path:
    """The fine-tuned model."""
    return self.finetune / "export"

  @property
  def generations(self) -> pathlib.Path:
    """Every answer, before and after."""
    return self.output / "generations.jsonl"

  @property
  def plot(self) -> pathlib.Path:
    """The loss curves."""
    return self.output / "loss.png"

  @property
  def report(self) -> pathlib.Path:
    """The report."""
    return self.output / "report.md"


def prepare_output(folder: pathlib.Path, *, overwrite: bool) -> None:
  """Makes an empty folder to write into.

  Args:
    folder: where to.
    overwrite: delete the quickstart that lies there.

  Raises:
    ValueError: the folder is not empty and may not be emptied.
    NotADirectoryError: it is a file.
    OSError: it cannot be made or emptied.
  """
  if folder.exists() and not folder.is_dir():
    raise NotADirectoryError(f"{folder} is a file: give a folder, --output DIR")
  found = sorted(os.listdir(folder)) if folder.is_dir() else []
  foreign = [name for name in found if name not in _NAMES]
  if foreign:
    raise ValueError(
      f"{folder} holds {foreign[0]!r}, which is not of a quickstart: choose another "
      "folder, --output DIR"
    )
  if found and not overwrite:
    raise ValueError(
      f"{folder} is not empty: choose another folder, --output DIR, or --overwrite "
      "what is there"
    )
  for name in found:
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
  folder.mkdir(parents=True, exist_ok=True)
