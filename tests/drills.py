"""What every trainer is put through: killed and resumed, cut and packed.

`KillDrill` runs a command that trains into a folder, kills it at awkward moments,
starts it again, and compares the bytes of what it leaves with those of a run that was
never touched. `gradients` and `assert_same_gradients` check that a global batch gives
one gradient however it is cut.
"""

import dataclasses
import hashlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tests import forks, world
from tunix.sft.steps import train_step
from tunix.utils import tree

ROOT = pathlib.Path(__file__).parent.parent
DEADLINE_SECONDS = 600
_PER_RUN = 4  # interruptions


@dataclasses.dataclass(kw_only=True)
class KillDrill:
  """A training command and where it leaves things.

  Attributes:
    command: argv of a run into a folder. The same command resumes.
    checkpoints: folder of checkpoints inside the run's folder.
    files: files inside the run's folder whose bytes count as well.
    resumed: pattern, searched in the output, whose group 1 is the step that a run
      started from; a run without it started from the beginning.
  """

  command: Callable[[pathlib.Path], Sequence[str]]
  checkpoints: str = "checkpoints"
  files: Sequence[str] = ("logs/metrics.jsonl",)
  resumed: str = r"starts from step (\d+)"

  def start(self, folder: pathlib.Path, *, fork: bool = True) -> subprocess.Popen:
    # The programs of the drill's nine processes are compiled once. A killed process may
    # leave half a file, so they have a folder of their own.
    programs = {
      "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    popen = forks.popen if fork else subprocess.Popen
    return popen(
      list(self.command(folder)),
      cwd=ROOT,
      env=os.environ | programs,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def finish(self, folder: pathlib.Path, *, fork: bool = True) -> int:
    """Runs to the end; returns the step it started from."""
    run = self.start(folder, fork=fork)
    output, _ = run.communicate(timeout=DEADLINE_SECONDS)
    assert run.returncode == 0, output
    match = re.search(self.resumed, output)
    return int(match[1]) if match else 0

  def saved(self, folder: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints."""
    root = folder / self.checkpoints
    names = [p.name for p in root.iterdir()] if root.exists() else []
    return sorted(int(name) for name in names if name.isdigit())

  def saving(self, folder: pathlib.Path) -> bool:
    """Whether a checkpoint is being written right now."""
    root = folder / self.checkpoints
    return root.exists() and any("tmp" in p.name for p in root.iterdir())

  def interrupt(
    self,
    folder: pathlib.Path,
    *,
    signum: int = signal.SIGKILL,
    after_saves: int = 2,
    delay: float = 0.0,
    in_save: bool = False,
  ) -> bool:
    """Starts a run and sends it a signal once it has saved `after_saves` times more.

    Returns: whether the signal ended it (False: the run was over first).
    """
    before = len(self.saved(folder))
    known = set(self.saved(folder))
    run = self.start(folder)
    end = time.monotonic() + DEADLINE_SECONDS
    while len(known) - before < after_saves or (in_save and not self.saving(folder)):
      known |= set(self.saved(folder))
      if run.poll() is not None:
        break
      assert time.monotonic() < end, "the run saved nothing in time"
      time.sleep(0.001)
    try:
      run.wait(timeout=delay)
    except subprocess.TimeoutExpired:
      run.send_signal(signum)
    output, _ = run.communicate(timeout=DEADLINE_SECONDS)
    if signum == signal.SIGKILL:
      assert run.returncode in (0, -signal.SIGKILL), output
    return run.returncode != 0

  def digest(self, folder: pathlib.Path) -> dict[str, str]:
    """Hashes of every array of the last checkpoint, and of the files."""
    import orbax.checkpoint as ocp

    last = folder / self.checkpoints / str(self.saved(folder)[-1])
    out = {
      name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
      for name in self.files
    }
    for item in ("model_params", "model_rest", "optimizer_state"):
      if not (last / item).exists():
        continue
      with ocp.PyTreeCheckpointer() as reader:
        # As NumPy arrays: the devices of other processes are not here.
        names = reader.metadata(last / item).item_metadata.tree
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        arrays = tree.flatten(reader.restore(last / item, restore_args=kinds))
      for name, value in arrays.items():
        value = np.asarray(value)
        out[f"{item}.{name}"] = hashlib.sha256(value.tobytes()).hexdigest()
    assert len(out) > len(self.files), f"nothing was saved in {last}"
    return out

  def check(self, tmp_path: pathlib.Path, *, random_kills: int, seed: int = 0) -> None:
    """The whole drill: SIGTERM and kill -9 during a save, kills at random instants."""
    whole, kept = tmp_path / "whole", world.programs() / "drills"
    _copy_missing(kept, tmp_path / "programs")
    # No fork: forks have one seed of hashes, which would hide that a run goes through a
    # set in another order once it is resumed.
    assert self.finish(whole, fork=False) == 0
    _copy_missing(tmp_path / "programs", kept)
    expected = self.digest(whole)
    dice = random.Random(seed)
    plans: list[dict[str, Any]] = [
      {"in_save": True, "signum": signal.SIGTERM},
      {"in_save": True},
      *({"delay": dice.uniform(0.0, 0.7)} for _ in range(random_kills)),
    ]
    # One run suffers several interruptions: a run for each would start twice as often.
    for first in range(0, len(plans), _PER_RUN):
      folder, suffered = tmp_path / f"cut{first}", plans[first : first + _PER_RUN]
      for plan in suffered:
        assert self.interrupt(folder, after_saves=1, **plan), (
          f"the run ended before {plan}"
        )
      assert self.finish(folder) > 0, f"the run after {suffered} began at step 0"
      found = self.digest(folder)
      different = sorted(k for k in expected if expected[k] != found.get(k))
      assert found.keys() == expected.keys() and not different, (
        f"after {suffered}: {different} differ"
      )


def _copy_missing(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies the files of a folder that another folder lacks, each in one piece."""
  target.mkdir(parents=True, exist_ok=True)
  for file in source.iterdir() if source.exists() else ():
    if not (target / file.name).exists():
      partial = target / f"{file.name}.{os.getpid()}"
      shutil.copyfile(file, partial)
      partial.replace(target / file.name)


def worker(job: str) -> Callable[[pathlib.Path], list[str]]:
  """The command of a job of tests/drill_worker.py."""
  return lambda folder: [sys.executable, "-m", "tests.drill_worker", job, str(folder)]


def gradients(trainer: Any, micro_batches: Sequence[Any]) -> dict[str, np.ndarray]:
  """The gradient that one update by these micro-batches would hand to the optimizer."""
  with trainer._session():
    read = [trainer._read(batch) for batch in micro_batches]
    window = trainer._window(read, None)
    step = train_step.make_gradient(trainer._module.skeleton, trainer._train_step)
    state = trainer._module
    out = jax.jit(step)(state.params, state.rest, state.frozen, window.groups)
  return {name: np.asarray(x) for name, x in tree.flatten(out).items()}


def assert_same_gradients(
  got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float = 1e-5
) -> None:
  """Per leaf: norm of the difference over the norm."""
  assert got.keys() == want.keys()
  for name in want:
    norm = np.linalg.norm(want[name].astype(np.float64))
    assert norm > 0, f"{name} has no gradient: the check would prove nothing"
    error = np.linalg.norm(got[name].astype(np.float64) - want[name]) / norm
    assert error <= tolerance, f"{name}: {error:.2e} > {tolerance:.0e}"


def check_split_invariance(
  make_trainer: Callable[[int], Any],
  whole: Any,
  cut: Callable[[Any, int], list[Any]],
  *,
  packed: Any = None,
  meshes: Sequence[Any] = (),
  cuts: Sequence[int] = (1, 2, 4),
) -> None:
  """One global batch, cut into 1, 2 and 4, packed, and on several devices.

  Args:
    make_trainer: builds a trainer that accumulates the given number of micro-batches;
      called under the mesh.
    whole: the global batch.
    cut: (batch, parts) -> micro-batches.
    packed: the same examples in packed rows, or None.
    meshes: device meshes to repeat it on: whole, in four, and packed in two.
    cuts: numbers of micro-batches; without 1, no mesh gets the batch whole.
  """
  want = gradients(make_trainer(1), [whole])
  # Half of the cases: a cut does not know the devices, and each is one compilation.
  on_meshes = [(whole, 1)] * (1 in cuts) + [(whole, 4)]
  on_meshes += [] if packed is None else [(packed, 2)]
  for batch in [whole] if packed is None else [whole, packed]:
    for parts in cuts:
      if batch is not whole or parts > 1:
        assert_same_gradients(gradients(make_trainer(parts), cut(batch, parts)), want)
  for mesh in meshes:
    with jax.set_mesh(mesh):
      for batch, parts in on_meshes:
        pieces = cut(batch, parts)
        assert_same_gradients(gradients(make_trainer(parts), pieces), want)
