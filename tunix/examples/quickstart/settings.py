"""What the quickstart does by default, and the layout of its folder."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil

from tunix.utils import checks

# All that a quickstart leaves in its folder, so that --overwrite deletes nothing else.
_NAMES = (
  "answers.jsonl",
  "curves.png",  # of versions before
  "data",
  "grpo",
  "grpo-rloo",
  "grpo.yaml",
  "model",
  "report.md",
  "sft",
  "sft.yaml",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Sizes and places. The defaults take a few minutes on two CPU cores.

  Attributes:
    output: the folder that everything goes into.
    seed: of the split, the weights, the order of the data, and the rollouts.
    sft_steps, grpo_steps: optimizer steps.
    num_layers, embed_dim, hidden_dim, num_heads: of the model.
    sft_rows, row_length: rows of a batch of fine-tuning, and tokens of a row, into which
      several sums are packed.
    sft_rate, grpo_rate: learning rates; the first one after its warm-up.
    prompts, generations: of one batch of rollouts.
    held_out: sums that are asked before and after, and never trained on.
    prompt_tokens, answer_tokens: of the longest prompt and the longest answer.
  """

  output: pathlib.Path
  seed: int = 0
  sft_steps: int = 150
  grpo_steps: int = 100
  num_layers: int = 2
  embed_dim: int = 128
  hidden_dim: int = 384
  num_heads: int = 4
  sft_rows: int = 16
  row_length: int = 96
  sft_rate: float = 4e-3
  grpo_rate: float = 1.5e-4
  prompts: int = 16
  generations: int = 8
  held_out: int = 200
  prompt_tokens: int = 8
  answer_tokens: int = 6

  def __post_init__(self):
    checks.fields(
      self, sft_steps=checks.COUNT, grpo_steps=checks.COUNT, seed=checks.SEED
    )

  @property
  def data(self) -> pathlib.Path:
    """JSON lines."""
    return self.output / "data"

  @property
  def model(self) -> pathlib.Path:
    """The model before any training, with its tokenizer."""
    return self.output / "model"

  def config_file(self, stage: str) -> pathlib.Path:
    """What `tunix train` is given for "sft" or "grpo"."""
    return self.output / f"{stage}.yaml"

  def run(self, stage: str) -> pathlib.Path:
    """The run of that stage."""
    return self.output / stage

  def export(self, stage: str) -> pathlib.Path:
    """The model after that stage."""
    return self.run(stage) / "export"

  @property
  def samples(self) -> pathlib.Path:
    """The page of rollouts."""
    return self.run("grpo") / "samples" / "index.html"

  @property
  def answers(self) -> pathlib.Path:
    """Every answer, before and after."""
    return self.output / "answers.jsonl"

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
  names = sorted(os.listdir(folder)) if folder.is_dir() else []
  foreign = [name for name in names if name not in _NAMES]
  if foreign:
    raise ValueError(
      f"{folder} holds {foreign[0]!r}, which is not of a quickstart: choose another "
      "folder, --output DIR"
    )
  if names and not overwrite:
    raise ValueError(
      f"{folder} is not empty: choose another folder, --output DIR, or --overwrite "
      "what is there"
    )
  for name in names:
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
  folder.mkdir(parents=True, exist_ok=True)
