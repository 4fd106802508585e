"""Runs, tenants, quotas and restarts, in the process."""

import os
import pathlib
import shutil
import time
from unittest import mock

import numpy as np
import pytest

from tests.tinker.serving import base, engine, rows
from tunix.generate.engine.driver import Driver
from tunix.tinker.client import AdamParams, Datum, ServiceClient
from tunix.tinker.errors import (
  ConflictError,
  GoneError,
  NotFoundError,
  RequestFailedError,
  ServiceFailedError,
)
from tunix.tinker.learning import data
from tunix.tinker.learning.learner import AdapterSpec
from tunix.tinker.service import Service
from tunix.tinker.settings import TinkerSettings, read_keys
from tunix.tinker.work import sampling
from tunix.utils import array_codec
from tunix.utils.record_file import RecordFile

SPEC = AdapterSpec(rank=2)
STEPS = 4


def service(root=None, **settings):
  options = {"snapshot_steps": 2, "keep_results": 2, **settings}
  return Service(base(), TinkerSettings(root=root, **options))


def datums(seed, *lengths):
  return [Datum(x, {"target_tokens": y}) for x, y in rows(seed, *lengths)]


def row(seed=0):
  ((x, y),) = rows(seed, 6)
  return lambda: [data.Row(tokens=x, inputs={"target_tokens": y})]


def send_all(made, tenant, model):
  """Sends the requests of a training loop, as a client that tries again does."""
  for step in range(STEPS):
    number = 2 * step + 1
    made.training.forward_backward(tenant, model, number, row(step), "cross_entropy")
    made.training.optim_step(tenant, model, number + 1, {"learning_rate": 1e-2})


def final(made, tenant, model):
  last = 2 * STEPS
  assert made.wait(tenant, f"{model}:{last}", 60).error is None
  made.training.save_weights(tenant, model, last + 1, "final")
  saved = made.wait(tenant, f"{model}:{last + 1}", 60)
  return made.store.arrays(made.place(tenant, saved.values["path"]))


def same(one, other):
  return one.keys() == other.keys() and all(
    np.array_equal(one[name], other[name]) for name in one
  )


def test_a_kill_at_any_instant_loses_and_repeats_no_request(tmp_path):
  """Cuts the journal after each record and inside records, as a kill does."""
  first = service(tmp_path / "whole", snapshot_steps=1000)
  session = first.create_session("a", {})
  _, model = first.create_model("a", session, 0, SPEC, seed=5)
  send_all(first, "a", model)
  assert first.wait("a", f"{model}:{2 * STEPS}", 60) is not None
  first.close()
  whole = tmp_path / "killed"
  shutil.copytree(tmp_path / "whole", whole)
  expected = None
  (file,) = whole.rglob("journal-0")
  log = file.read_bytes()
  records = list(RecordFile(file, reads=True).records())
  ends = 16 + np.cumsum([12 + len(x) for x in records])
  kinds = [array_codec.from_bytes(x)[0]["type"] for x in records]
  assert {"op", "result", "start"} == set(kinds)
  # Each cut is in the middle of a record, or at its end; the first op stays.
  cuts = [len(log), *(int(x) - 7 for x in ends[2::6]), *map(int, ends[1::7])]
  for cut in cuts:
    file.write_bytes(log[:cut])
    again = service(whole, snapshot_steps=2)
    send_all(again, "a", model)
    arrays = final(again, "a", model)
    expected = arrays if expected is None else expected
    assert same(arrays, expected), cut
    again.close()
    shutil.rmtree(whole)
    shutil.copytree(tmp_path / "whole", whole)
  assert int(expected["optimizer.0"]) == STEPS


def test_states_and_results_survive_a_restart(tmp_path):
  one = service(tmp_path)
  session = one.create_session("a", {})
  future, model = one.create_model("a", session, 0, SPEC, seed=5)
  send_all(one, "a", model)
  last = f"{model}:{2 * STEPS - 1}"
  before = one.wait("a", last, 60)
  assert one.wait("a", f"{model}:{2 * STEPS}", 60)
  one.close()
  (folder,) = (tmp_path / "runs").iterdir()
  assert (folder / "current").read_text() == "2"
  assert sorted(x.name for x in folder.iterdir()) == [
    *("current", "info.json", "journal-2", "state-2")
  ]
  two = service(tmp_path)
  after = two.result("a", last)
  assert after.values == before.values
  assert np.array_equal(after.arrays["logprobs"], before.arrays["logprobs"])
  assert two.result("a", future).values == {"model_id": model, "type": "create_model"}
  # A repeated request changes nothing; another one of its number is refused.
  two.training.optim_step("a", model, 2 * STEPS, {"learning_rate": 1e-2})
  two.training.optim_step("a", model, 2 * STEPS + 1, {"learning_rate": 0.5})
  with pytest.raises(ConflictError, match="sent before with other contents"):
    two.training.optim_step("a", model, 2 * STEPS + 1, {"learning_rate": 0.25})
  assert "no gradient" in two.wait("a", f"{model}:{2 * STEPS + 1}", 60).error
  arrays = two.store
  two.training.save_weights("a", model, 2 * STEPS + 2, "x")
  path = two.wait("a", f"{model}:{2 * STEPS + 2}", 60).values["path"]
  assert int(arrays.arrays(two.place("a", path))["optimizer.0"]) == STEPS
  two.close()


def test_results_that_were_retrieved_are_dropped(tmp_path):
  made = service(tmp_path)
  session = made.create_session("a", {})
  future, model = made.create_model("a", session, 0, SPEC)
  assert made.wait("a", future, 60).error is None
  send_all(made, "a", model)
  for number in range(1, 2 * STEPS + 1):
    assert made.wait("a", f"{model}:{number}", 60).error is None
  made.training.forward_backward("a", model, 9, row(), "cross_entropy")
  made.training.optim_step("a", model, 10, {})
  made.training.forward_backward("a", model, 11, row(), "cross_entropy")
  made.training.optim_step("a", model, 12, {})
  assert made.wait("a", f"{model}:12", 60)
  made.close()
  with pytest.raises(GoneError, match="was dropped, after it was retrieved"):
    made.result("a", f"{model}:1")


def test_requests_wait_for_their_turn_and_wrong_ones_take_theirs():
  with ServiceClient(base()) as client:
    made = client.service
    trainer = client.create_lora_training_client(rank=2, seed=0)
    model = trainer.model_id
    later = made.training.optim_step("local", model, 3, {"learning_rate": 1e-2})
    made.training.forward_backward("local", model, 2, row(), "cross_entropy")
    assert made.wait("local", later, 0.2) is None
    made.training.forward_backward("local", model, 1, lambda: [], "cross_entropy")
    assert made.wait("local", later, 60).error is None
    assert "data is empty" in made.result("local", f"{model}:1").error
    for number, params in ((4, {"rate": 1}), (5, {"beta1": 1.5})):
      made.training.optim_step("local", model, number, params)
      assert "adam_params" in made.wait("local", f"{model}:{number}", 60).error


def test_samples_that_a_kill_interrupts_are_computed_after_it(tmp_path, monkeypatch):
  model, settings = base(), TinkerSettings(root=tmp_path)
  dead, found, id = engine(model), [], None
  for number, running in enumerate((Driver(dead), Driver(engine(model)), None)):
    if running is not None and number:
      running.start()
    made = Service(model, settings, driver=running or Driver(dead))
    if id is None:
      session = made.create_session("a", {})
      sampler = made.sampling.create("a", session, 0, None)
      params = {"max_tokens": 4, "seed": 7}
      args = {"num_samples": 3, "sampling_params": params}
      id = made.sampling.sample("a", sampler, 0, np.array([3, 4, 5]), args)
      assert made.sampling.sample("a", sampler, 0, np.array([3, 4, 5]), args) == id
      dead.close()
      assert made.wait("a", id, 0.2) is None
    else:
      found.append(made.wait("a", id, 60))
    if running is not None and number:
      monkeypatch.setattr(sampling, "_PART", 2)  # the cut into turns changes nothing
      cut = made.sampling.sample("a", sampler, 1, np.array([3, 4, 5]), args)
      found.append(made.wait("a", cut, 60))
    made.close()
    if running is not None:
      running.stop(60)
  assert [x.error for x in found] == [None] * 3
  assert found[0].arrays["lengths"].size == 3
  for other in found[1:]:
    for name, value in found[0].arrays.items():
      assert np.array_equal(value, other.arrays[name]), name


def test_a_save_that_is_sent_twice_is_made_once():
  made = service(max_checkpoints=1)
  session = made.create_session("a", {})
  _, model = made.create_model("a", session, 0, SPEC)
  for _ in range(2):  # the second time the limit of checkpoints is reached
    future = made.training.save_weights("a", model, 1, "one", ttl_seconds=3600)
    assert made.wait("a", future, 60).error is None
    time.sleep(0.01)  # the end of its life is counted from the first request
  (path,) = (place for place, _ in made.checkpoints("a"))
  for _ in range(2):
    future = made.training.save_weights("a", model, 2, "two")
    refused = made.wait("a", future, 60).error
    assert refused is not None and "1 checkpoints" in refused
    if made.checkpoints("a"):
      made.store.delete(path)  # the second time there is room
  made.close()


def test_samples_come_from_the_newest_checkpoint_of_a_name():
  model = base()
  driver = Driver(engine(model))
  driver.start()
  made = Service(model, TinkerSettings(), driver=driver)
  session = made.create_session("a", {})
  _, id = made.create_model("a", session, 0, SPEC)
  found, args = [], {"prompt_logprobs": True, "sampling_params": {"max_tokens": 1}}
  for step in range(2):
    first = 3 * step + 1
    made.training.forward_backward("a", id, first, row(), "cross_entropy")
    made.training.optim_step("a", id, first + 1, {"learning_rate": 0.5})
    saved = made.training.save_weights_for_sampler("a", id, first + 2, "x")
    path = made.wait("a", saved, 60).values["path"]
    sampler = made.sampling.create("a", session, step, path)
    future = made.sampling.sample("a", sampler, 0, np.array([3, 4, 5]), args)
    found.append(made.wait("a", future, 60).arrays["prompt_logprobs"][1:])
    made.store.delete(made.place("a", path))
  made.close()
  driver.stop(60)
  assert not np.allclose(found[0], found[1])


def test_unloaded_models_hold_no_open_files(tmp_path):
  made = service(tmp_path)
  session = made.create_session("a", {})
  # Journals alone: the thread may just write another file.
  count = lambda: sum(
    os.path.realpath(x).startswith(f"{tmp_path}/")
    and "/journal-" in os.path.realpath(x)
    for x in pathlib.Path("/proc/self/fd").iterdir()
  )
  _, model = made.create_model("a", session, 0, SPEC)
  assert made.wait("a", f"{model}:0", 60).error is None
  before = count()
  assert made.wait("a", made.training.unload_model("a", model), 60).error is None
  assert count() == before - 1
  assert made.training.unload_model("a", model) == f"{model}:1"  # it is sent again
  made.training.optim_step("a", model, 2, {})
  assert "was unloaded" in made.wait("a", f"{model}:2", 60).error
  made.close()
  again = service(tmp_path)
  assert "was unloaded" in again.wait("a", f"{model}:2", 60).error
  assert count() == before - 1
  assert again.training.unload_model("a", model) == f"{model}:1"
  again.close()


def test_a_service_that_fails_says_so(monkeypatch):
  made = service()
  session = made.create_session("a", {})
  _, model = made.create_model("a", session, 0, SPEC)
  assert made.wait("a", f"{model}:0", 60)
  full = OSError(28, "No space left on device")
  monkeypatch.setattr(made.run("a", model), "finish", mock.Mock(side_effect=full))
  with pytest.raises(ServiceFailedError, match=r"No space left.*restart the server"):
    made.training.optim_step("a", model, 1, {})
    made.wait("a", f"{model}:1", 60)
  with pytest.raises(ServiceFailedError):
    made.training.optim_step("a", model, 2, {})
  made.close()


def test_a_tenant_sees_only_its_own():
  made = service()
  session = made.create_session("a", {})
  future, model = made.create_model("a", session, 0, SPEC)
  made.training.save_weights("a", model, 1, "x")
  path = made.wait("a", f"{model}:1", 60).values["path"]
  other = made.create_session("b", {})
  calls = [
    lambda: made.session("b", session),
    lambda: made.create_model("b", session, 1, SPEC),
    lambda: made.run("b", model),
    lambda: made.training.forward_backward("b", model, 2, row(), "cross_entropy"),
    lambda: made.training.optim_step("b", model, 2, {}),
    lambda: made.training.save_weights("b", model, 2, "y"),
    lambda: made.training.unload_model("b", model),
    lambda: made.result("b", future),
    lambda: made.place("b", path),
    lambda: made.create_from_checkpoint("b", other, 0, path, optimizer=False),
    lambda: made.sampling.create("b", other, 0, path),
    lambda: made.sampling.create("b", session, 0, None),
    lambda: made.checkpoints("b", model),
  ]
  for call in calls:
    with pytest.raises(NotFoundError, match="there is no"):
      call()
  assert made.runs("b") == [] and made.sessions("b") == [other]
  _, mine = made.create_model("b", other, 0, SPEC)
  made.training.load_weights("b", mine, 1, path, optimizer=False)
  assert "there is no model" in made.wait("b", f"{mine}:1", 60).error
  made.close()


def test_checkpoints(tmp_path):
  settings = TinkerSettings(root=tmp_path, lora_alpha=4.0)
  with ServiceClient(base(), settings=settings) as client:
    trainer = client.create_lora_training_client(rank=2, seed=0)
    given = datums(0, 5, 9)
    step = lambda t: (
      t.forward_backward(given, "cross_entropy"),
      t.optim_step(AdamParams(learning_rate=1e-2)),
    )
    step(trainer)
    path = trainer.save_state("one").result()
    copy = client.create_training_client_from_state_with_optimizer(path)
    for _ in range(2):
      losses = [step(t)[0].result().metrics["loss:sum"] for t in (trainer, copy)]
      assert losses[0] == losses[1]
    fresh = client.create_training_client_from_state(path)
    fresh.load_state(path).result()
    with pytest.raises(RequestFailedError, match=r"exists; expected a new name"):
      trainer.save_state("one").result()
    assert trainer.save_state("one", overwrite=True).result() == path
    sampler = trainer.save_weights_for_sampler("one").result()
    with pytest.raises(RequestFailedError, match="has no optimizer state"):
      fresh.load_state_with_optimizer(sampler).result()
    with pytest.raises(RequestFailedError, match=r"name is '\.\./x'"):
      trainer.save_state("../x").result()
    trainer.forward_backward(given, "cross_entropy")
    with pytest.raises(RequestFailedError, match="expected no open gradient"):
      trainer.save_state("two").result()
    store, place = client.service.store, client.service.place
    short = trainer.save_weights_for_sampler("short", ttl_seconds=1).result()
    found = client.service.checkpoints("local", trainer.model_id)
    assert [str(x) for x, _ in found] == [path, sampler, short]
    time.sleep(1.1)
    with pytest.raises(NotFoundError, match="there is no checkpoint"):
      store.arrays(place("local", short))
    store.delete(place("local", path))
    with pytest.raises(NotFoundError):
      store.delete(place("local", path))


def test_a_custom_loss_has_the_gradient_of_the_built_in_one():
  with ServiceClient(base()) as client:
    given = datums(0, 5, 9)
    norms = []
    for is_custom in (False, True):
      trainer = client.create_lora_training_client(rank=2, seed=0)
      if is_custom:
        loss = lambda data, logps: (-sum(x.sum() for x in logps), {"rows": len(data)})
        out = trainer.forward_backward_custom(given, loss).result()
        assert out.metrics["rows"] == 2
      else:
        out = trainer.forward_backward(given, "cross_entropy").result()
      norms.append(trainer.optim_step(AdamParams()).result()["grad_norm"])
      norms.append(out.metrics["loss:sum"])
    np.testing.assert_allclose(norms[:2], norms[2:], rtol=1e-6)


def test_settings_and_keys(tmp_path):
  file = pathlib.Path(tmp_path / "keys")
  file.write_text("# tenants\nann tml-1\n\nbob tml-2\n")
  assert read_keys(file) == {"ann": "tml-1", "bob": "tml-2"}
  file.write_text("ann tml-1\nann tml-2\n")
  with pytest.raises(ValueError, match="line 2: expected NAME KEY"):
    read_keys(file)
  with pytest.raises(ValueError, match="begins with 'tml-'"):
    TinkerSettings(keys={"ann": "secret"})
  with pytest.raises(ValueError, match="one key twice"):
    TinkerSettings(keys={"ann": "tml-1", "bob": "tml-1"})
