"""`tunix init`: a configuration to start from, with comments.

What is written is what `tunix train --help` says: the fields of the job's dataclasses.
Only the values that a person sets first stand here.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from tunix.cli.commands.arguments import Parser
from tunix.cli.jobs.table import JOBS
from tunix.cli.settings import reference, yaml_text
from tunix.utils import io

# Keys that every job has and a person sets first, with values to start from. A job adds
# its own as `Job.first_values`.
_FIRST = {
  "output_dir": "out",
  "model.path": "my-model",
  "data.train": "train.jsonl",
  "lora.rank": 8,
  "training.max_steps": 200,
  "training.global_batch_size": 8,
  "training.learning_rate": 2e-4,
  "checkpoint.save_every_n_steps": 50,
}

_HEAD = """\
# tunix train --config {file}
#
# Job {job}. What stands without a comment sign is set; all else has the value that is
# shown, and what it means above it. Arguments override: --training.max_steps=500.
# `tunix train --dry-run --config {file}` looks whether everything is in its place.
"""


def main(argv: Sequence[str]) -> None:
  """Runs `tunix init`.

  Raises:
    ValueError: an unknown job, or a file that is there already.
  """
  parser = Parser("tunix init", "writes a configuration to start from, with comments")
  parser.add_argument("job", metavar="JOB", help=", ".join(JOBS))
  parser.add_argument("--output", metavar="FILE", help="JOB.yaml if not given")
  args = parser.parse_args(argv)
  if args.job not in JOBS:
    raise ValueError(f"the job {args.job!r} is unknown: use one of {', '.join(JOBS)}")
  file = pathlib.Path(args.output or f"{args.job}.yaml").expanduser()
  if file.exists():
    raise ValueError(
      f"--output {file} is there already, and is not overwritten: give another file"
    )
  if not file.parent.is_dir():
    raise ValueError(
      f"--output {file}: there is no folder {file.parent}: make it first"
    )
  io.write_atomic(file, configuration(args.job, str(file)).encode())
  print(
    f"wrote {file}: set model.path and data.train, then "
    f"`tunix train --dry-run --config {file}`"
  )


def configuration(job: str, file: str) -> str:
  """The text of a file for a job: keys to set first, the others as comments."""
  first = {"job": job, **_FIRST, **JOBS[job].first_values}
  active = {key.partition(".")[0] for key in first}
  lines = [_HEAD.format(job=job, file=file).rstrip()]
  for line in reference.listing(job):
    section, depth = line.path[0], len(line.path)
    # A section whose keys are all comments is one itself: an empty one says nothing.
    mark = "" if section in active else "# "
    indent = mark + "  " * (depth - 1)
    lines += [""] * (depth == 1)
    lines += reference.wrap(line.meaning, f"{indent}# " if depth > 1 else "# ")
    key = ".".join(line.path)
    if line.is_section:
      lines.append(f"{indent}{line.path[-1]}:")
    elif key in first:
      lines.append(f"{indent}{line.path[-1]}: {yaml_text.inline(first[key])}")
    else:
      sign = "" if mark else "# "
      value = yaml_text.inline(line.value)
      lines.append(f"{indent}{sign}{line.path[-1]}: {value}")
  return "\n".join(lines) + "\n"
