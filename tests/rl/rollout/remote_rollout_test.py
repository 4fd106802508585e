"""Engines on other hosts draw what one of the run draws; a lost host costs nothing."""

import json
import threading
import time
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import drills, processes, toys
from tests.rl import clusters, drill_worker
from tests.rl.env import toy_envs
from tests.rl.rollout import hosts as hosts_lib
from tests.rl.schedules import greedy_test, schedule_test
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.rollout import host as host_lib, remote_host, wire
from tunix.rl.rollout.host import HostError, RolloutHost
from tunix.rl.rollout.remote_host import RemoteError, RemoteHost
from tunix.rl.schedules.journal import JournalError
from tunix.rl.weights import policy_version
from tunix.rl.weights.placement import Weights
from tunix.serve import rollouts
from tunix.sft.steps.module_state import trained_variables
from tunix.utils import array_codec

ROLLOUT = {"max_tokens_to_generate": 6, "max_prompt_length": 8}


def far(urls, **options):
  return {"engine_options": {"urls": urls, "lost_s": 5.0, **options}}


def weights(learner):
  return jax.tree.leaves(nnx.state(learner.rl_cluster.actor_trainer.model, nnx.Param))


def trained(learner, batches=2):
  learner.train(clusters.prompts(batches))
  learner.close()
  return weights(learner)


def assert_equal(a, b):
  for x, y in zip(a, b, strict=True):
    np.testing.assert_array_equal(x, y)


def test_two_hosts_learn_what_one_engine_learns():
  here = trained(clusters.grpo(rollout=ROLLOUT))
  with hosts_lib.served(hosts_lib.make, hosts_lib.make) as (urls, hosts):
    before = [host.stamp for host in hosts]
    learner = clusters.grpo(rollout=ROLLOUT | far(urls), rollout_engine="remote")
    assert [host.stamp for host in hosts] == before  # equal weights are not sent
    assert_equal(here, trained(learner))
    stamp = learner.rl_cluster.version.stamp
    assert stamp not in before and [host.stamp for host in hosts] == [stamp] * 2
    assert all(host.draws for host in hosts)


def test_adapters_alone_are_sent_and_bits_are_kept():
  def adapted():
    return toys.model(num_layers=1, dtype=jnp.bfloat16, lora_rank=2)

  with hosts_lib.served(lambda: hosts_lib.make(adapted())) as (urls, (host,)):
    actor = adapted()
    learner = clusters.GRPOLearner(
      clusters.cluster(actor, rollout=ROLLOUT | far(urls), rollout_engine="remote"),
      clusters.GRPOConfig(num_generations=4, beta=0.0),
      clusters.even,
    )
    arrays = learner.rl_cluster.weights().arrays
    assert arrays and all("lora" in path for path in arrays)
    trained(learner, batches=1)
    own = trained_variables(learner.rl_cluster.actor_trainer.model)
    for path, variable in trained_variables(host._model).items():
      np.testing.assert_array_equal(variable.get_value(), own[path].get_value())


@pytest.mark.parametrize("schedule", ["sync", "lagged"])
def test_episodes_on_a_host_equal_those_of_an_engine_of_the_run(schedule):
  def run(**options):
    options["rollout"] = {
      "max_tokens_to_generate": 4,
      "max_prompt_length": 8,
      **options.get("rollout", {}),
    }
    cluster = clusters.cluster(schedule=schedule, **options)
    config = clusters.GRPOConfig(num_generations=4, beta=0.0)
    limits = EpisodeConfig(max_turns=3, max_tokens=24)
    return trained(
      clusters.GRPOLearner(cluster, config, env=toy_envs.Echo, episodes=limits)
    )

  here = run()
  with hosts_lib.served(hosts_lib.make) as (urls, _):
    assert_equal(here, run(rollout=far(urls), rollout_engine="remote"))


def test_greedy_on_hosts_is_replayed_on_hosts_and_survives_the_loss_of_one(tmp_path):
  def options(urls):
    rollout = {"max_tokens_to_generate": 4, "max_prompt_length": 8, **far(urls)}
    return {"rollout": rollout, "rollout_engine": "remote", "env": toy_envs.Echo}

  def served(*makers):
    return hosts_lib.served(*makers, hosts_lib.make)

  with served(hosts_lib.make) as (urls, hosts):
    made = greedy_test.learner(tmp_path, eval_every_n_steps=1, **options(urls))
    host, launches = hosts[0], []

    def poll(*arguments, **named):
      launches.append(1)
      if len(launches) == 9:  # as if its process was started again
        host.life, host.stamp, host._owner = "another life", "", None
        host._end_stream()
      return RolloutHost.poll(host, *arguments, **named)

    host.poll = poll
    made.train(schedule_test.data(greedy_test.STEPS), schedule_test.data(1))
    made.close()
  starts = [r[0] for r in greedy_test.decisions(tmp_path)].count("start")
  assert starts == 2
  greedy_test.assert_ended_once(tmp_path, greedy_test.STEPS)
  with served(hosts_lib.make) as (urls, _):
    again = greedy_test.replayed(tmp_path, **options(urls))
  assert_equal(weights(made), weights(again))
  with served() as (urls, _), pytest.raises(JournalError, match="engines 2, and this"):
    greedy_test.replayed(tmp_path, **options(urls))


@pytest.mark.parametrize(
  ("options", "part"),
  [
    ({}, "engine_options has no 'urls', which remote needs"),
    ({"urls": "http://localhost:1"}, "each once"),
    ({"urls": ["http://a:1", "http://a:1/"]}, "each once"),
    ({"urls": [1]}, "each once"),
    ({"urls": ["ftp://a"]}, "give http://host:port"),
    ({"urls": ["http://a:x"]}, "give http://host:port"),
    ({"urls": ["http://[::1"]}, "give http://host:port"),
    ({"urls": ["http://a:1"], "lost_s": 0}, "lost_s"),
    ({"urls": ["http://a:1"], "url": 1}, "which remote does not know"),
  ],
)
def test_wrong_options_are_named(options, part):
  with pytest.raises(ValueError, match=part):
    clusters.cluster(rollout={"engine_options": options}, rollout_engine="remote")


def test_a_host_that_never_answers_is_named_in_time():
  url = f"http://localhost:{processes.free_port()}"
  with pytest.raises(RemoteError, match=rf"{url} did not come back within 0.1 s"):
    clusters.cluster(rollout=far([url], lost_s=0.1), rollout_engine="remote")


def test_a_host_with_another_model_is_refused_by_its_first_difference():
  adapted = lambda rank: toys.model(num_layers=1, lora_rank=rank)  # of equal scales
  with hosts_lib.served(lambda: hosts_lib.make(adapted(4))) as (urls, _):
    part = r"the run trains '[\w.]+' as .* start the host with the configuration"
    with pytest.raises(RemoteError, match=part):
      clusters.cluster(adapted(2), rollout=far(urls), rollout_engine="remote")


def test_other_frozen_weights_are_noticed():
  adapted = lambda seed: toys.model(seed=seed, num_layers=1, lora_rank=2)
  with hosts_lib.served(lambda: hosts_lib.make(adapted(1))) as (urls, _):
    options = {"rollout": far(urls), "rollout_engine": "remote"}
    with pytest.raises(RemoteError, match="their frozen weights differ"):
      clusters.cluster(adapted(0), **options)


def test_a_key_is_needed(monkeypatch):
  with hosts_lib.served(hosts_lib.make, api_key="secret") as (urls, _):
    options = {"rollout": far(urls), "rollout_engine": "remote"}
    with pytest.raises(RemoteError, match="the API key is missing or wrong") as raised:
      clusters.cluster(**options)
    assert "Start a host for each run" not in str(raised.value)
    monkeypatch.setenv("TUNIX_API_KEY", "secret")
    clusters.cluster(**options).close()


def test_a_run_whose_host_another_one_takes_ends():
  with hosts_lib.served(hosts_lib.make) as (urls, _):
    options = {"rollout": ROLLOUT | far(urls), "rollout_engine": "remote"}
    first, second = clusters.grpo(**options), clusters.grpo(**options)
    trained(second, batches=1)
    with pytest.raises(RemoteError, match="another run has taken this host"):
      trained(first, batches=1)


class Cut:
  """A host whose answers to some calls are lost once, as if the network failed."""

  def __init__(self, ask, lost):
    self._ask, self.lost = ask, set(lost)

  def __call__(self, method, path, body=None):
    answer = self._ask(method, path, body)
    name = (body or {}).get("method")
    if name in self.lost:
      self.lost.remove(name)
      raise remote_host.EngineError("the answer is lost")
    return answer


@pytest.mark.parametrize("what", ["completions", "episodes"])
def test_a_lost_answer_is_drawn_again(what, monkeypatch):
  monkeypatch.setattr(remote_host, "_LOOK_S", 0.01)
  more = {"reward_fns": clusters.even}
  if what == "episodes":
    limits = EpisodeConfig(max_turns=3, max_tokens=24)
    more = {"env": toy_envs.Echo, "episodes": limits}

  def run(lost, **options):
    cluster = clusters.cluster(**options)
    for host in getattr(cluster.rollout, "_hosts", ()):
      host._client.ask = Cut(host._client.ask, lost)
      cuts.append(host._client.ask)
    config = clusters.GRPOConfig(num_generations=4, beta=0.0)
    return trained(clusters.GRPOLearner(cluster, config, **more))

  cuts = []
  rollout = {"max_tokens_to_generate": 4, "max_prompt_length": 8}
  here = run((), rollout=rollout)
  lost = {"take", "end"} | (
    {"open", "poll"} if what == "episodes" else {"generate", "begin"}
  )
  with hosts_lib.served(hosts_lib.make) as (urls, _):
    options = {"rollout": rollout | far(urls), "rollout_engine": "remote"}
    assert_equal(here, run(lost, **options))
  assert [cut.lost for cut in cuts] == [set()]


# The methods of a host.


def owned():
  host = hosts_lib.make()
  host.take("me", None)
  return host


def test_weights_arrive_in_parts():
  host, other = owned(), clusters.model(seed=1)
  arrays = {k: np.asarray(v.get_value()) for k, v in trained_variables(other).items()}
  host.begin("me", {k: (str(x.dtype), list(x.shape)) for k, x in arrays.items()})
  with pytest.raises(HostError, match="the weights of no version"):
    host.generate("me", host.stamp or "x", [[2]], {}, 1, 0, 0)
  for path, x in arrays.items():
    data, half = x.tobytes(), x.nbytes // 2
    host.part("me", path, 0, data[:half])
    with pytest.raises(ValueError, match="are not expected"):
      host.part("me", path, 0 if half == 0 else half + 1, data[half:])
    with pytest.raises(ValueError, match="are not expected"):
      host.part("me", path, half, data[half:] + b"x")
    host.part("me", path, half, data[half:])
    with pytest.raises(ValueError, match="is not expected: call begin first"):
      host.part("me", path, 0, data)
  stamp = policy_version.policy_stamp(other)
  host.end("me", stamp)
  assert host.stamp == stamp == policy_version.policy_stamp(host._model)


def test_missing_parameters_and_wrong_stamps_are_refused():
  host = owned()
  forms = {
    k: (str(v.get_value().dtype), list(v.get_value().shape))
    for k, v in trained_variables(host._model).items()
  }
  host.begin("me", forms)
  with pytest.raises(ValueError, match=f"{len(forms)} parameters have not arrived"):
    host.end("me", "x")
  for path, variable in trained_variables(host._model).items():
    host.part("me", path, 0, np.asarray(variable.get_value()).tobytes())
  with pytest.raises(ValueError, match="and the run has x"):
    host.end("me", "x")


def test_calls_of_another_owner_are_refused():
  host = owned()
  for method, arguments in [
    ("begin", [{}]),
    ("part", ["a", 0, b""]),
    ("end", [""]),
    ("generate", ["", [], {}, 1, 0, 0]),
    ("open", ["", {}, 0, 1, 8, 0]),
    ("poll", [[]]),
    ("close", []),
  ]:
    with pytest.raises(HostError) as raised:
      host.methods[method]("you", *arguments)
    assert raised.value.code == host_lib.OTHER_OWNER
  with pytest.raises(HostError, match="no batch of episodes is open"):
    host.poll("me", [])
  host.open("me", host.stamp, {}, {"impl": "threefry2x32", "words": [0, 0]}, 1, 8, 0)
  with pytest.raises(HostError, match="no action waits"):
    host.poll("me", [])
  with pytest.raises(HostError, match="another run has taken this host"):
    host.take("you", host.life)
  assert host.take("you", "an earlier life")["life"] == host.life


def test_seeds_are_kept():
  for seed in (7, None):
    assert wire.seed_from_json(wire.seed_to_json(seed)) == seed
  for key in (jax.random.key(3), jax.random.key(3, impl="rbg")):
    saved = json.loads(json.dumps(wire.seed_to_json(key)))
    again = wire.seed_from_json(saved)
    assert jax.random.key_impl(again) == jax.random.key_impl(key)
    assert (jax.random.key_data(again) == jax.random.key_data(key)).all()


# The routes.


def post(url, path, body, kind="application/json"):
  data = body if isinstance(body, bytes) else json.dumps(body).encode()
  request = urllib.request.Request(
    url + path, data, {"Content-Type": kind}, method="POST"
  )
  try:
    with urllib.request.urlopen(request, timeout=30) as answer:
      return answer.status, json.loads(answer.read())
  except urllib.error.HTTPError as error:
    return error.code, json.loads(error.read())


def test_malformed_requests_are_refused_and_the_host_goes_on():
  with hosts_lib.served(hosts_lib.make, max_body_bytes=1000) as (urls, (host,)):
    url, raw = urls[0], "application/octet-stream"
    cases = [
      ("/rollouts/call", {"method": "take"}, 200, "missing 2 required"),
      ("/rollouts/call", {"method": "__init__"}, 400, "expected one of the host's"),
      ("/rollouts/call", {"arguments": {}}, 400, "method"),
      ("/rollouts/call", b"[", 400, "no valid JSON"),
      ("/rollouts/answer", {"call": 12345}, 404, "no such call"),
      ("/rollouts/answer", {}, 400, "call"),
      ("/rollouts/nothing", {}, 404, "no such path"),
    ]
    for path, body, status, part in cases:
      code, answer = post(url, path, body)
      assert code == status and part in json.dumps(answer), (path, body, code, answer)
    for path, body, kind, status, part in [
      ("/rollouts/part?start=0", b"x", "text/plain", 415, "expected application/oct"),
      ("/rollouts/part?start=-1", b"x", raw, 400, "expected a number of bytes"),
      ("/rollouts/part?start=0", b"x" * 1001, raw, 413, "larger than 1000"),
      ("/rollouts/part?start=0&owner=you", b"x", raw, 409, "other_owner"),
    ]:
      code, answer = post(url, path, body, kind)
      assert code == status and part in json.dumps(answer), (path, code, answer)
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
      assert b"tunix_rollout_draws 0.0" in answer.read()
    body = {"method": "take", "arguments": {"owner": "me", "life": None}}
    code, answer = post(url, "/rollouts/call", body)
    assert code == 200 and answer["value"]["stamp"] == host.stamp


def test_a_long_call_is_asked_for_again(monkeypatch):
  monkeypatch.setattr("tunix.serve.rollouts._HOLD_S", 0.05)
  with hosts_lib.served(hosts_lib.make) as (urls, (host,)):
    take = host.take
    host.take = lambda *a, **b: (time.sleep(0.3), take(*a, **b))[1]
    client = RemoteHost(urls[0], None, 20.0, 1.0, host._form)
    assert client.call("take", life=None)["life"] == host.life
    slow = RemoteHost(urls[0], None, 0.1, 1.0, host._form)
    with pytest.raises(RemoteError, match=r"has no result after 0\.1 s"):
      slow.call("take", life=None)


def test_a_number_of_an_earlier_process_names_no_call():
  calls = [rollouts.Calls(hosts_lib.make(), hosts_lib.settings()) for _ in range(2)]
  take = {"owner": "me", "life": None}
  assert len({one.begin("take", take) for one in calls}) == 2


def test_arrays_of_a_request_have_a_limit(monkeypatch):
  monkeypatch.setattr(host_lib, "_MOST_BYTES", 100)
  host = hosts_lib.make()
  host.take("me", None)
  prompts = array_codec.to_json([np.zeros(101, np.uint8)])
  with pytest.raises(ValueError, match="more than 100 bytes"):
    host.generate("me", host.stamp, prompts, {}, 1, 0, 0)


def test_too_many_calls_wait(monkeypatch):
  monkeypatch.setattr("tunix.serve.rollouts._HOLD_S", 0.01)
  monkeypatch.setattr("tunix.serve.rollouts._MOST_CALLS", 2)
  with hosts_lib.served(hosts_lib.make) as (urls, (host,)):
    take, go_on = host.take, threading.Event()
    host.take = lambda *a, **b: (go_on.wait(drills.DEADLINE_SECONDS), take(*a, **b))[1]
    body = {"method": "take", "arguments": {"owner": "me", "life": None}}
    codes = [post(urls[0], "/rollouts/call", body)[0] for _ in range(3)]
    assert codes == [200, 200, 429]
    go_on.set()
    end = time.monotonic() + drills.DEADLINE_SECONDS
    while post(urls[0], "/rollouts/call", body)[0] == 429:
      # Results that nobody asks for make room.
      assert time.monotonic() < end
      time.sleep(0.05)


def test_weights_that_are_sent_are_those_of_the_version(monkeypatch):
  monkeypatch.setattr(remote_host, "_PART_BYTES", 1000)
  with hosts_lib.served(hosts_lib.make) as (urls, (host,)):
    other = clusters.model(seed=2)
    arrays = {k: np.asarray(v.get_value()) for k, v in trained_variables(other).items()}
    version = policy_version.PolicyVersion(3, policy_version.policy_stamp(other))
    client = RemoteHost(urls[0], None, 20.0, 1.0, host._form)
    sent = Weights(version=version, arrays=arrays)
    assert client.run(sent, lambda: "drawn") == "drawn"
    assert host.stamp == version.stamp
    assert client.vocab_size == toys.VOCAB


# A host that is killed.


@pytest.mark.slow
@pytest.mark.ci
def test_a_host_that_is_killed_and_started_again_changes_no_byte(tmp_path):
  """kill -9 of the host, twice, while the run samples episodes ahead of its updates."""
  host = hosts_lib.HostProcess(tmp_path)

  def run(name):
    options = {
      "rollout": {"max_tokens_to_generate": 4, "max_prompt_length": 8},
      "schedule": "lagged",
      "mini_batch_size": 2,
    }
    if name == "far":
      options["rollout_engine"] = "remote"
      options["rollout"] |= far([host.url], lost_s=120.0)
    cluster = clusters.cluster(drill_worker.actor(), **options)
    limits = EpisodeConfig(max_turns=3, max_tokens=24)
    learner = clusters.GRPOLearner(
      cluster,
      clusters.GRPOConfig(num_generations=4, beta=0.0),
      env=toy_envs.Echo,
      episodes=limits,
    )
    batches = iter(clusters.prompts(6))

    def drawn():
      for number, batch in enumerate(batches):
        if name == "far" and number in (2, 4):
          host.restart()
        yield batch

    learner.train(drawn())
    learner.close()
    return weights(learner)

  try:
    assert_equal(run("here"), run("far"))
  finally:
    host.stop()
