"""Compiled programs in a folder: loaded where they fit, compiled where they do not."""

import functools
import hashlib
import json
import os
import pathlib
import stat as stat_lib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tunix.perf import programs
from tunix.plan import shipped
from tunix.utils import mesh as mesh_lib

MISSED = "/jax/compilation_cache/cache_misses"


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


@pytest.fixture(autouse=True)
def own_cache():
  """Gives JAX back the cache of the tests afterwards."""
  with shipped.cache_in(""):
    yield


KEY = bytes(range(32))


def ship(mesh, cache, folder, *sizes, key=None):
  """Ships the program above for arrays of these numbers of rows."""
  with shipped.cache_in(cache), programs.recording() as noted:
    for rows in sizes:
      programs.call("update", update, *arguments(mesh, rows, kind=None))
    names = ["update" for one in noted.values() for _ in (one, *one.others)]
    assert shipped.write(folder, cache, mesh, names, key) > 0
  assert len(names) == len(sizes)
  return folder


@pytest.fixture
def folder(mesh, tmp_path):
  return ship(mesh, tmp_path / "cache", tmp_path / "programs", 8, 16)


@pytest.fixture
def compiled():
  """Grows by one with every program that is compiled and not found in a cache."""
  seen = []

  def watch(event, **_):
    if event == MISSED:
      seen.append(event)

  jax.monitoring.register_event_listener(watch)
  yield seen
  jax.monitoring.unregister_event_listener(watch)


def run(folder, mesh, *calls, key=None):
  """(results, messages) of a new process's calls."""
  said = []
  jax.clear_caches()  # a plan of this process compiled in it
  shipped.use_cache(folder, key)
  with shipped.loaded(folder, mesh, said.append):
    out = [jax.device_get(programs.call("update", *call)) for call in calls]
  return out, said


def same(got, expected):
  jax.tree.map(np.testing.assert_array_equal, got, jax.device_get(expected))


def test_what_was_shipped_is_loaded_and_nothing_is_compiled(
  mesh, folder, compiled, tmp_path
):
  inputs = [arguments(mesh, rows) for rows in (8, 16, 8)]
  compiled.clear()
  got, said = run(folder, mesh, *((update, *one) for one in inputs))
  assert not compiled
  assert [line.partition(":")[0] for line in said] == ["update", "update"]
  assert all("loaded from" in line for line in said)
  with shipped.cache_in(tmp_path / "empty"):
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
  for file in folder.glob("*-cache"):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "gone":
      file.unlink()
    else:
      file.write_bytes(data[: len(data) // 2] if how == "cut" else data)
  (got,), (line,) = run(folder, mesh, (update, *arguments(mesh)))
  same(got, update(*arguments(mesh)))
  assert "are not used, all is compiled here: " in line
  assert ("No such file" if how == "gone" else "is damaged") in line


@pytest.mark.parametrize(
  ("key", "value", "expected"),
  [
    ("platform", "tpu", "platform tpu when they were made, cpu here"),
    ("kind", "TPU v4", "kind TPU v4 when they were made, cpu here"),
    ("versions", {"jax": "0.1"}, "versions {'jax': '0.1'} when they were made"),
    ("flags", ["--xla_a=1"], "flags ['--xla_a=1'] when they were made"),
    ("mesh", {"fsdp": 8}, "mesh {'fsdp': 8} when they were made, {'fsdp': 4, 'tp': 2}"),
    ("format", 1, "shipped.json is of format 1, this version reads 2"),
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
  again = ship(mesh, tmp_path / "another", tmp_path / "again", 16, 8)
  names = [sorted(x.name for x in one.iterdir()) for one in (folder, again)]
  assert names[0] == names[1] and len(names[0]) == 3


@pytest.mark.parametrize(
  "change",
  [
    {"programs": None},
    {"programs": [{}]},
    {"files": None},
    {"files": "text"},
    {"files": {"a-cache": None}},
    {"files": {"a-cache": {"size": 1}}},
    {"files": {"../a-cache": "0"}},
  ],
)
def test_a_malformed_manifest_is_one_line(mesh, folder, change):
  made = json.loads((folder / shipped.NAME).read_text())
  (folder / shipped.NAME).write_text(json.dumps(made | change))
  (got,), (line,) = run(folder, mesh, (update, *arguments(mesh)))
  assert f"all is compiled here: {next(iter(change))} in shipped.json" in line
  assert "; expected " in line and "\n" not in line
  same(got, update(*arguments(mesh)))


@pytest.mark.parametrize("what", ["folder", "entry"])
@pytest.mark.parametrize(
  ("mode", "group", "found"),
  [
    (0o757, 0, "can be written by every user"),
    (0o775, 12345, "can be written by the group 12345"),
    (0o755, None, "belongs to the user 12345"),
  ],
)
def test_what_others_may_write_is_not_loaded(
  folder, monkeypatch, what, mode, group, found
):
  folder.chmod(0o755)
  path = folder if what == "folder" else next(folder.glob("*-cache"))
  stat = pathlib.Path.stat

  def shown(self, **options):
    real = stat(self, **options)
    if self != path:
      return real
    user = 12345 if group is None else real.st_uid
    values = [stat_lib.S_IFMT(real.st_mode) | mode, *real[1:4], user, group or 0]
    return os.stat_result([*values, *real[6:]])

  monkeypatch.setattr(pathlib.Path, "stat", shown)
  with pytest.raises(ValueError, match=rf"{path}, which {found}; expected .*pickles"):
    shipped.use_cache(folder)


def test_a_cache_of_this_user_is_used(tmp_path):
  shipped.use_cache(tmp_path / "a" / "new")
  assert (tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o700
  (tmp_path / "a" / "new" / "x-cache").touch(0o666)
  shipped.use_cache(tmp_path / "a" / "new")


@pytest.fixture
def signed(mesh, tmp_path):
  return ship(mesh, tmp_path / "cache", tmp_path / "signed", 8, 16, key=KEY)


def contents(folder):
  return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_signed_folder_is_loaded_with_its_key_and_stays_as_it_is(mesh, signed):
  before = contents(signed)
  assert KEY not in b"".join(before.values())
  got, (line,) = run(signed, mesh, (update, *arguments(mesh)), key=KEY)
  assert "update: loaded from" in line
  same(got[0], update(*arguments(mesh)))
  # A program that is compiled here would be an entry that nobody signed.
  run(signed, mesh, (other, jnp.ones(3), 5.0), key=KEY)
  assert contents(signed) == before


def test_a_folder_is_signed_again_without_the_entries_of_before(mesh, signed, tmp_path):
  (signed / "old-cache").write_bytes(b"entry of an earlier plan")
  ship(mesh, tmp_path / "small", signed, 24, key=KEY)
  assert len(list(signed.glob("*-cache"))) == 1
  shipped.use_cache(signed, KEY)


def change_manifest(folder, **values):
  file = folder / shipped.NAME
  file.write_text(json.dumps(json.loads(file.read_text()) | values))


def digest_and_entry(folder):
  """Changes an entry together with its digest, as somebody without the key could."""
  entry = next(folder.glob("*-cache"))
  entry.write_bytes(b"another pickle")
  files = json.loads((folder / shipped.NAME).read_text())["files"]
  digest = hashlib.sha256(b"another pickle").hexdigest()
  change_manifest(folder, files=files | {entry.name: digest})


ATTACKS = {
  "another key": (lambda folder: None, bytes(32), "was signed with another key, or ch"),
  "no key": (
    lambda folder: None,
    None,
    "is signed; expected its key. Set compilation_",
  ),
  "entry": (
    lambda folder: next(folder.glob("*-cache")).write_bytes(b"another pickle"),
    KEY,
    r"is not as it was signed: .*-cache is damaged",
  ),
  "entry and digest": (
    digest_and_entry,
    KEY,
    "was signed with another key, or changed",
  ),
  "versions": (
    lambda folder: change_manifest(folder, versions={}),
    KEY,
    "was signed with another key, or changed",
  ),
  "no signature": (
    lambda folder: change_manifest(folder, signature=None),
    KEY,
    "has no signed shipped.json; expected one",
  ),
  "no text": (
    lambda folder: change_manifest(folder, signature="\ud800"),
    KEY,
    "was signed with another key, or changed",
  ),
  "no manifest": (
    lambda folder: (folder / shipped.NAME).unlink(),
    KEY,
    "has no signed shipped.json; expected one",
  ),
  "further entry": (
    lambda folder: (folder / "x-cache").write_bytes(b"a pickle"),
    KEY,
    r"has 'x-cache'; expected the files of shipped.json alone\. Remove it",
  ),
}


@pytest.mark.parametrize(("attack", "key", "found"), ATTACKS.values(), ids=ATTACKS)
def test_what_the_key_did_not_sign_is_refused(signed, attack, key, found):
  attack(signed)
  before = jax.config.jax_compilation_cache_dir
  with pytest.raises(ValueError, match=found) as raised:
    shipped.use_cache(signed, key)
  assert "\n" not in str(raised.value)
  assert jax.config.jax_compilation_cache_dir == before


def test_keys_that_are_none(tmp_path):
  (tmp_path / "short").write_bytes(bytes(15))
  for name, found in {
    "short": "has 15 bytes; expected at least 16",
    "no": "No such",
  }.items():
    with pytest.raises(ValueError, match=rf"^--ship-key is .*{name}.*{found}"):
      shipped.read_key("--ship-key", tmp_path / name)
