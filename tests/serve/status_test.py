"""Probes and metrics of a server over two replicas, one of which dies."""

import pytest

from tests import toys, toys_text
from tests.serve.serving import Server, error_of, server
from tunix.generate.engine import replicas as replicas_lib
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.replicas import Replicas
from tunix.serve.app import make_app
from tunix.serve.settings import ServeSettings

SOON = 60.0


class OverReplicas(Server):
  """The routes over a driver that was started."""

  def __init__(self, driver):
    self.driver, self.app = driver, make_app(driver, ServeSettings())


@pytest.fixture
def over_replicas():
  model = toys.model(vocab_size=600, num_layers=1)
  config = EngineConfig(max_tokens=64, slots=2, prefill_tokens=32, page_tokens=8)
  meshes = replicas_lib.groups(2, 1)
  driver = Replicas.of_model(model, toys_text.chat_tokenizer(), config, meshes)
  driver.start()
  yield OverReplicas(driver)
  driver.stop(SOON)


def complete(made, prompt, status=200):
  body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
  answer = made.post("/v1/completions", body)
  assert answer.status_code == status, answer.text
  return answer


def test_a_dead_replica_is_reported_and_the_other_serves(over_replicas):
  made, prompt = over_replicas, list(range(10, 40))
  complete(made, prompt)
  usage = complete(made, [*prompt, 5]).json()["usage"]
  assert usage["prompt_tokens_details"]["cached_tokens"] == 24
  assert made.get("/ready").json() == {"status": "ok"}
  assert "tunix_is_degraded 0.0" in made.get("/metrics").text

  def fail(*args):
    raise RuntimeError("the chip is gone")

  for dead, driver in enumerate(made.driver.drivers, 1):
    driver.engine._device.launch = fail
    answer = complete(made, [dead] * 9, 503)  # equal loads: the first that runs
    driver._thread.join(SOON)
    error = error_of(answer, 503)
    assert error["code"] == "engine_dead" and "the chip is gone" in error["message"]
    if dead == 1:
      for path in ("/health", "/ready"):
        answer = made.get(path)
        assert answer.status_code == 200 and answer.json()["status"] == "degraded"
        assert "replica 0 of 2" in answer.json()["reason"]
      assert "tunix_is_degraded 1.0" in made.get("/metrics").text
      for _ in range(3):
        complete(made, prompt)
  for path in ("/health", "/ready"):
    assert made.get(path).status_code == 503


def test_probes_of_one_engine():
  with server() as made:
    assert made.get("/health").json() == {"status": "ok"}
    made.driver.degraded = "replica 1 of 2: other weights or adapters than the rest"
    assert made.get("/ready").json()["status"] == "degraded"
