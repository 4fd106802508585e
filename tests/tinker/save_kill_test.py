"""A kill at any change of a checkpoint's files leaves the old one or the new one."""

import contextlib
import os
import shutil
import sys

import numpy as np
import pytest

from tunix.tinker.state.checkpoints import Checkpoints, Place

PLACE = Place("s:train:0", "weights", "x")
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
_watch = None  # called at each change of a file; a hook cannot be removed


def _hook(event, arguments):
  global _watch
  if _watch is None or event not in _EVENTS:
    return
  if event == "open" and not set(str(arguments[1])) & set("wax+"):
    return
  called, _watch = _watch, None  # it changes files of its own
  try:
    called(str(arguments[0]))
  finally:
    _watch = called


@contextlib.contextmanager
def copies(root, to):
  """Copies a folder before each change below it, as a kill there leaves it."""
  global _watch
  made = []

  def copy(path):
    if str(root) in path:
      made.append(to / str(len(made)))
      shutil.copytree(root, made[-1])

  if not hasattr(sys, "_tunix_hook"):
    sys.addaudithook(_hook)
  _watch = copy
  try:
    yield made
  finally:
    _watch = None


def save(store, value, **options):
  meta = {"request": str(value), "is_ephemeral": False, "expires_at": None}
  meta["spec"] = {}
  store.save(PLACE, {"a": np.full(4, value)}, None, meta, **options)


def value_at(folder):
  return int(Checkpoints(folder, "base").arrays(PLACE)["a"][0])


def test_a_kill_within_an_overwrite_leaves_a_checkpoint(tmp_path):
  store = Checkpoints(tmp_path / "root", "base")
  save(store, 1)
  with copies(tmp_path / "root", tmp_path) as made:
    save(store, 2, overwrite=True)
  found = [value_at(folder) for folder in made]
  assert found == sorted(found) and set(found) == {1, 2} and len(found) > 5
  for folder in made:  # the request is repeated after the restart
    save(Checkpoints(folder, "base"), 2, overwrite=True)
    assert value_at(folder) == 2
    assert not list(folder.rglob("*.old"))


def test_a_full_disk_within_an_overwrite_leaves_the_checkpoint(tmp_path, monkeypatch):
  store = Checkpoints(tmp_path, "base")
  save(store, 1)
  replace = os.replace
  for count in range(4):
    left = [count]

    def full(source, target, left=left):
      left[0] -= 1
      if left[0] == -1:
        raise OSError(28, "No space left on device")
      replace(source, target)

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
      save(store, 2, overwrite=True)
    monkeypatch.setattr("os.replace", replace)
    assert value_at(tmp_path) == 1
