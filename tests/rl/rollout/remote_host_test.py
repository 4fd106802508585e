"""The run's side of a host: losses in a row, and hosts with another policy."""

import asyncio
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl import clusters
from tests.rl.rollout import hosts as hosts_lib
from tunix.generate.external.rows import EngineError
from tunix.models import lora
from tunix.rl.rollout import remote_host
from tunix.rl.rollout.remote_host import RemoteError, RemoteHost
from tunix.rl.weights import policy_version
from tunix.rl.weights.placement import Weights
from tunix.serve import rollouts
from tunix.serve.settings import ServeSettings
from tunix.sft.steps.module_state import trained_variables

KEY = {"impl": "threefry2x32", "words": [0, 7]}


class Clock:
  """Time that passes only while somebody sleeps."""

  def __init__(self):
    self.now = 0.0

  def sleep(self, seconds):
    self.now += seconds


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  fake = types.SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep)
  monkeypatch.setattr(remote_host, "time", fake)
  return clock


def weights_of(model):
  arrays = {k: np.asarray(v.get_value()) for k, v in trained_variables(model).items()}
  version = policy_version.PolicyVersion(0, policy_version.policy_stamp(model))
  return Weights(version=version, arrays=arrays)


def a_run(url, host, **changes):
  options = {"timeout_s": 20.0, "lost_s": 5.0, "form": host._form} | changes
  return RemoteHost(url, None, **options)


class Lost:
  """Work in which a host is lost after some seconds, a number of times."""

  def __init__(self, clock, seconds, times):
    self._clock, self._seconds, self._left = clock, seconds, times

  def __call__(self):
    if not self._left:
      return "drawn"
    self._left -= 1
    self._clock.now += self._seconds
    raise EngineError("the host is gone")


def test_each_loss_of_a_host_has_its_own_time_limit(clock):
  """The second loss is 100 s after the first, and lost_s is 5 s."""
  with hosts_lib.served(hosts_lib.make) as (urls, (host,)):
    run = a_run(urls[0], host)
    assert run.run(weights_of(host._model), Lost(clock, 100.0, 2)) == "drawn"


def test_a_host_that_is_lost_in_the_same_work_for_ever_ends_the_run(clock):
  with (
    hosts_lib.served(hosts_lib.make) as (urls, (host,)),
    pytest.raises(RemoteError, match="was lost 10 times in the same work"),
  ):
    a_run(urls[0], host).run(weights_of(host._model), Lost(clock, 1.0, 99))


def test_a_call_of_an_earlier_process_is_begun_again(clock):
  """The host was started again between two questions for the end of a call."""
  with hosts_lib.served(hosts_lib.make) as (urls, (host,)):
    run = a_run(urls[0], host)
    sent = weights_of(host._model)
    ask, lost = run._client.ask, [True]

    def answered(method, path, body=None):
      if (body or {}).get("method") == "generate" and lost:
        lost.pop()
        return {"is_done": False, "call": 12345}
      return ask(method, path, body)

    run._client.ask = answered
    drawn = run.run(
      sent,
      lambda: run.call(
        "generate",
        stamp=sent.version.stamp,
        prompts=[[2, 3]],
        config={"max_tokens_to_generate": 2},
        num_generations=1,
        seed=KEY,
        first_prompt=0,
      ),
    )
    assert len(drawn["tokens"]) == 1 and not lost


def test_threads_that_wait_for_hosts_do_not_keep_the_process():
  is_daemon = lambda: threading.current_thread().daemon
  assert remote_host.together([is_daemon]) == [True]

  def failing():
    raise KeyError("x")

  with pytest.raises(KeyError):
    remote_host.together([failing])


def adapted(alpha):
  return lora.apply(clusters.model(), lora.LoraConfig(rank=2, alpha=alpha))


@pytest.mark.parametrize(
  ("mine", "its", "part"),
  [
    (lambda: adapted(4.0), lambda: adapted(8.0), r"lora scale of .* is 2\.0, .* 4\.0"),
    (clusters.model, lambda: clusters.model(dtype=jnp.bfloat16), r"dtype is float32"),
    (clusters.model, lambda: clusters.model(embed_dim=16), "embed_dim is 32"),
    (clusters.model, lambda: clusters.model(final_softcap=3.0), "softcap is None"),
  ],
)
def test_another_policy_with_the_same_weights_is_refused(mine, its, part):
  with hosts_lib.served(lambda: hosts_lib.make(its())) as (urls, _):
    options = {"engine_options": {"urls": urls, "lost_s": 5.0}}
    with pytest.raises(RemoteError, match=part):
      clusters.cluster(mine(), rollout=options, rollout_engine="remote")


@pytest.mark.parametrize(
  ("recorded", "part"),
  [
    ({"replay_routes": True}, "replay_routes is True, .* is False"),
    ({"center_scores": 4}, "center_scores is 4, .* is None"),
  ],
)
def test_a_host_that_records_less_is_named(recorded, part):
  with hosts_lib.served(hosts_lib.make) as (urls, _):
    options = {"engine_options": {"urls": urls, "lost_s": 5.0}, **recorded}
    with pytest.raises(RemoteError, match=part):
      clusters.cluster(rollout=options, rollout_engine="remote")


def test_a_part_fits_a_server_of_default_settings():
  assert ServeSettings().max_body_bytes > remote_host._PART_BYTES


def test_results_of_a_run_that_was_killed_are_dropped():
  calls = rollouts.Calls(hosts_lib.make(), hosts_lib.settings())
  begin = lambda owner: calls.begin("take", {"owner": owner, "life": None})

  async def taken():
    for number in range(4):
      left = begin(f"killed {number}")
      await asyncio.wrap_future(calls._open[left])
    return await calls.answer(begin("me"))

  assert asyncio.run(taken())["is_done"]
  assert not calls._open
