"""Compiled programs in a folder: loaded where they fit, compiled where they do not."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tunix.perf import programs
from tunix.plan import shipped
from tunix.utils import mesh as mesh_lib

COMPILED = "/jax/core/compile/backend_compile_duration"


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def update(name, weights, state, factor):
  return {name: weights["w"] @ weights["w"].T * factor}, state + 1


@functools.partial(jax.jit, static_argnums=1)
def other(x, factor):
  return x * factor


@pytest.fixture(scope="module")
def mesh():
  return mesh_lib.create_mesh({"fsdp": 4, "tp": 2})


def arguments(mesh, rows=8, factor=2.0, kind=jnp.asarray):
  where = NamedSharding(mesh, P("fsdp", "tp"))

  def one(shape):
    if kind is not jnp.asarray:
      return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return jax.device_put(numbers, where)

  return "product", {"w": one((rows, 4))}, one((rows, 2)), factor


@pytest.fixture
def folder(mesh, tmp_path):
  """A folder with the program above, for two shapes."""
  with shipped.compiled_afresh(), programs.noted() as noted:
    jax.clear_caches()
    for rows in (8, 16):
      programs.call("update", update, *arguments(mesh, rows, kind=None))
  entries = shipped.write(tmp_path / "programs", mesh, noted)
  assert len(entries) == 2 and {entry["name"] for entry in entries} == {"update"}
  return tmp_path / "programs"


@pytest.fixture
def compiled():
  """Grows by one with every program that is compiled."""
  seen = []

  def watch(event, seconds, **_):
    if event == COMPILED:
      seen.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(watch)
  yield seen
  jax.monitoring.unregister_event_duration_listener(watch)


def run(folder, mesh, *calls):
  """(results, what was said)."""
  said = []
  with shipped.loaded(folder, mesh, said.append):
    out = [jax.device_get(programs.call("update", *call)) for call in calls]
  return out, said


def same(got, expected):
  jax.tree.map(np.testing.assert_array_equal, got, jax.device_get(expected))


def test_what_was_shipped_is_loaded_and_nothing_is_compiled(mesh, folder, compiled):
  inputs = [arguments(mesh, rows) for rows in (8, 16, 8)]
  jax.clear_caches()  # what was planned in this process is compiled in it
  compiled.clear()
  got, said = run(folder, mesh, *((update, *one) for one in inputs))
  assert not compiled
  assert [line.partition(":")[0] for line in said] == ["update", "update"]
  assert all("loaded from" in line for line in said)
  jax.clear_caches()
  for out, rows in zip(got, (8, 16, 8)):
    same(out, update(*arguments(mesh, rows)))
  assert len(compiled) >= 2  # the watch sees what is compiled


def test_arguments_are_donated_as_they_are_otherwise(mesh, folder):
  inputs = arguments(mesh)
  run(folder, mesh, (update, *inputs))
  assert inputs[2].is_deleted() and not inputs[1]["w"].is_deleted()


@pytest.mark.parametrize(
  "change", [{"rows": 24}, {"factor": 3.0}], ids=["shape", "constant"]
)
def test_another_program_is_compiled(mesh, folder, change):
  got, said = run(folder, mesh, (update, *arguments(mesh, **change)))
  (line,) = said
  assert "update: not among the programs shipped to" in line
  same(got[0], update(*arguments(mesh, **change)))


def test_a_program_of_no_plan_runs(mesh, folder):
  (got,), said = run(folder, mesh, (other, jnp.ones(3), 4.0))
  same(got, np.full(3, 4.0, np.float32))
  assert "not among" in said[0]


@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_a_damaged_file_is_not_loaded(mesh, folder, how):
  for file in folder.glob("*.program"):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "gone":
      file.unlink()
    else:
      file.write_bytes(data[: len(data) // 2] if how == "cut" else data)
  (got,), (line,) = run(folder, mesh, (update, *arguments(mesh)))
  same(got, update(*arguments(mesh)))
  assert "cannot be loaded, compiled here: " in line
  assert ("No such file" if how == "gone" else "damaged") in line


@pytest.mark.parametrize(
  ("key", "value", "expected"),
  [
    ("platform", "tpu", "platform tpu when they were made, cpu here"),
    ("kind", "TPU v4", "kind TPU v4 when they were made, cpu here"),
    ("versions", {"jax": "0.1"}, "versions {'jax': '0.1'} when they were made"),
    ("flags", ["--xla_a=1"], "flags ['--xla_a=1'] when they were made"),
    ("mesh", {"fsdp": 8}, "mesh {'fsdp': 8} when they were made, {'fsdp': 4, 'tp': 2}"),
    ("devices", [[0]], "the devices of the mesh have other numbers or places"),
    ("format", 99, "shipped.json is of format 99, this version reads 1"),
  ],
)
def test_what_was_made_for_another_place_says_so(mesh, folder, key, value, expected):
  made = json.loads((folder / shipped.NAME).read_text())
  (folder / shipped.NAME).write_text(json.dumps(made | {key: value}))
  (got,), (line,) = run(folder, mesh, (update, *arguments(mesh)))
  assert "are not used, all is compiled here: " in line and expected in line
  same(got, update(*arguments(mesh)))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_list_that_cannot_be_read(mesh, folder, text):
  (folder / shipped.NAME).write_text(text)
  (got,), (line,) = run(folder, mesh, (update, *arguments(mesh)))
  assert "shipped.json is of format" in line
  same(got, update(*arguments(mesh)))


def test_flags_that_change_no_program_do_not_matter(mesh, folder, monkeypatch):
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_dump_to=/somewhere")
  _, (line,) = run(folder, mesh, (update, *arguments(mesh)))
  assert "loaded from" in line
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=1")
  _, (line,) = run(folder, mesh, (update, *arguments(mesh)))
  assert "--xla_tpu_something=1" in line


def test_files_are_the_same_when_made_again(mesh, folder, tmp_path):
  with shipped.compiled_afresh(), programs.noted() as noted:
    jax.clear_caches()
    programs.call("update", update, *arguments(mesh, kind=None))
  again = shipped.write(tmp_path / "again", mesh, noted)
  made = json.loads((folder / shipped.NAME).read_text())["programs"]
  assert again[0]["text"] == made[0]["text"] and again[0]["file"] == made[0]["file"]
  assert (tmp_path / "again" / again[0]["file"]).is_file()
