"""No value of a field makes a route fail in another way than by a named refusal."""

import copy

import pytest

from tests.serve.fake_engine import FakeDriver, FakeEngine
from tests.tinker.serving import base
from tunix.tinker import requests, rest
from tunix.tinker.errors import TinkerError
from tunix.tinker.protocol.results import Result
from tunix.tinker.rest import TinkerCall
from tunix.tinker.service import Service
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.work.executor import Executor

HUGE = 10**400
VALUES = (None, True, -1, 0, 1.5, 2**31, HUGE, "", "\xb2", "x" * 20_000, [], [1], {})
VALUES += ({"a": [1]}, [[1], [2]], [None], 1e300, [1e300], [HUGE], [-1], [1.5])
TENSOR = {"data": [1, 2], "dtype": "float32", "shape": [2]}
INPUTS = dict.fromkeys(("target_tokens", "logprobs", "advantages", "mask"), TENSOR)
NUMBERS = {*INPUTS, "weights", "seq_id", "model_seq_id"}
TOKENS = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
DATA = {
  "data": [{"model_input": TOKENS, "loss_fn_inputs": INPUTS | {"weights": TENSOR}}],
  "loss_fn": "dro",
  "loss_fn_config": {"beta": 0.5},
}
ADAM = dict.fromkeys(
  ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"), 0.1
)
NUMBERS |= {*ADAM, "beta"}
SAVE = {"path": "x", "ttl_seconds": 9, "user_metadata": {}, "overwrite": True}
SAVE |= {"sampling_session_seq_id": 1}
PARAMS = dict.fromkeys(("max_tokens", "top_k", "seed", "temperature", "top_p"), 1)
SAMPLE = {"num_samples": 1, "prompt_logprobs": True, "topk_prompt_logprobs": 1}
SAMPLE |= {"topk_sample_logprobs": 1, "prompt_logprobs_last_n": 1, "seq_id": 1}
NUMBERS |= {*SAMPLE, *PARAMS, "rank"} - {"prompt_logprobs"}
LORA = {"rank": 1, "seed": 0, "train_attn": True, "train_mlp": True}
MADE = {"model_seq_id": 1, "base_model": "toy", "user_metadata": {}}


def bodies(session, model, sampler):
  """A body that is accepted, for each route with fields."""
  on_model = {"model_id": model, "seq_id": 1}
  prompt = {"prompt": TOKENS, "sampling_params": PARAMS | {"stop": ["a"]}}
  return {
    "create_session": {"tags": [], "user_metadata": {}, "display_name": "x"},
    "session_heartbeat": {"session_id": session},
    "create_model": {"session_id": session, "lora_config": LORA, **MADE},
    "forward": {**on_model, "forward_input": DATA},
    "forward_backward": {**on_model, "forward_backward_input": DATA},
    "optim_step": {**on_model, "adam_params": ADAM},
    "save_weights": {**on_model, **SAVE},
    "save_weights_for_sampler": {**on_model, **SAVE, "path": None},
    "load_weights": {**on_model, "path": f"tinker://{model}/weights/x"},
    "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 1},
    "asample": {"sampling_session_id": sampler, **SAMPLE, **prompt},
    "cancel_future": {"request_id": f"{sampler}:1"},
    "get_info": {"model_id": model},
    "weights_info": {"tinker_path": f"tinker://{model}/weights/x"},
    "unload_model": {"model_id": model},
  }


def changed(body):
  """Yields copies of a body, each with another value at one place."""

  def places(value, path=()):
    if path:
      yield path
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
      items = enumerate(value)
    for key, part in items:
      yield from places(part, (*path, key))

  for *path, last in list(places(body)):
    for value in VALUES:
      made = copy.deepcopy(body)
      part = made
      for key in path:
        part = part[key]
      part[last] = value
      yield made, (*path, last), value


def execute(executor, run, op, known):
  return Result(error=op.args["error"] if op.kind == "refused" else None), True


@pytest.fixture(scope="module")
def service():
  settings = TinkerSettings(max_pending=10**6, max_models=10**6)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Executor, "execute", execute)
    patch.setattr(Executor, "arrays_of", lambda *_: {})
    patch.setattr("os.fdatasync", lambda _: None)
    patch.setattr("os.fsync", lambda _: None)
    driver = FakeDriver(FakeEngine()).start()
    made = Service(base(), settings, name="toy", driver=driver)
    yield made
    made.close()
    driver.stop(10)


def test_each_value_is_taken_or_refused_by_name(service):
  routes = requests.ROUTES | rest.ROUTES
  call = lambda path, body: routes["POST", path](
    TinkerCall(body=body, tenant="a"), service
  )
  session = call("create_session", {})["session_id"]
  made = call("create_model", bodies(session, "", "")["create_model"])
  sampling = {"session_id": session, "sampling_session_seq_id": 0}
  sampler = call("create_sampling_session", sampling)["sampling_session_id"]
  wrong, taken, number = [], [], 1
  for path, body in bodies(session, made["model_id"], sampler).items():
    for sent, place, value in changed(body):
      counts = "model_id" in sent and "seq_id" in sent
      if counts and place != ("seq_id",):
        sent["seq_id"] = number
      try:
        id = call(path, sent).get("request_id")
        number += counts and id is not None
        taken.append((id, path, place, value))
      except TinkerError as error:
        if not any(str(x) in error.message for x in ("expected", *place)):
          wrong.append((path, place, value, error.message))
      except Exception as error:
        wrong.append((path, place, value, repr(error)))
  for id, path, place, value in taken:
    name = NUMBERS.intersection(map(str, place))
    is_done = id is None or ":train:" not in id or not service.wait("a", id, 9).error
    if name and is_done and type(value) not in (int, float, type(None)):
      wrong.append((path, place, value, "was taken"))
  assert not wrong, "\n".join(str(x)[:200] for x in wrong[:40])
