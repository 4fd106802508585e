"""The unmodified SDK: supervised and reinforcement learning, checkpoints."""

import dataclasses
import io
import tarfile

import httpx
import numpy as np
import pytest

from tests.tinker.serving import KEY, base, rows, server
from tunix.models import lora
from tunix.tinker import AdamParams, Datum, SamplingParams, ServiceClient
from tunix.utils import tree

tinker = pytest.importorskip("tinker")
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
  with server(tmp_path_factory.mktemp("tinker"), lora_alpha=8.0) as (url, service):
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    yield url, service, client
    client.close("success").result()


def test_a_client_is_warned_that_the_unembedding_is_not_adapted(served, caplog):
  url, _, _ = served
  client = tinker.ServiceClient(base_url=url, api_key=KEY)
  client.holder.get_session_id()  # the session is made in another thread
  client.close("success").result()
  (record,) = [x for x in caplog.records if "train_unembed=True has no" in x.message]
  assert record.levelname == "WARNING"


def datums(seed, *lengths):
  return [
    tinker.Datum(
      model_input=tinker.ModelInput.from_ints(x.tolist()),
      loss_fn_inputs={"target_tokens": y, "weights": np.ones(len(y), np.float32)},
    )
    for x, y in rows(seed, *lengths)
  ]


def supervised(trainer, steps=3):
  adam = tinker.AdamParams(learning_rate=1e-2)
  losses = []
  for step in range(steps):
    future = trainer.forward_backward(datums(step, 9, 5, 12), "cross_entropy")
    update = trainer.optim_step(adam)
    out = future.result()
    losses.append(out.metrics["loss:sum"])
    assert [x["logprobs"].shape for x in out.loss_fn_outputs] == [[9], [5], [12]]
    assert update.result().metrics["grad_norm"] > 0
  return losses


def test_the_supervised_loop_equals_the_client_in_the_process(served):
  _, service, client = served
  trainer = client.create_lora_training_client("toy", rank=4, seed=3).result()
  theirs = supervised(trainer)
  with ServiceClient(
    base(), settings=dataclasses.replace(service.settings, root=None)
  ) as local:
    ours = local.create_lora_training_client(rank=4, seed=3)
    losses = []
    for step in range(3):
      given = [Datum(x, {"target_tokens": y}) for x, y in rows(step, 9, 5, 12)]
      future = ours.forward_backward(given, "cross_entropy")
      ours.optim_step(AdamParams(learning_rate=1e-2))
      losses.append(future.result().metrics["loss:sum"])
  assert losses == theirs


def test_gspo_and_several_targets(served):
  _, _, client = served
  trainer = client.create_lora_training_client("toy", rank=4, seed=3).result()
  tokens = tinker.ModelInput.from_ints([5, 6, 7])
  of = lambda **inputs: [tinker.Datum(tokens, inputs)]
  logps = lambda out: out.loss_fn_outputs[0]["logprobs"].to_numpy()
  columns = [
    logps(trainer.forward(of(target_tokens=np.array(x)), "cross_entropy").result())
    for x in ([1, 2, 3], [4, 0, 9])
  ]
  ids, weights = (
    np.array([[1, 4], [2, 0], [3, 9]]),
    np.float32([[1, 2], [0, 3], [2, 0]]),
  )
  # The weights as the SDK sends a torch tensor [N, K]: four of six values are listed.
  sparse = tinker.TensorData(
    data=[1, 2, 3, 2],
    dtype="float32",
    shape=[3, 2],
    sparse_crow_indices=[0, 2, 3, 4],
    sparse_col_indices=[0, 1, 1, 0],
  )
  out = trainer.forward(of(target_tokens=ids, weights=sparse), "cross_entropy").result()
  np.testing.assert_allclose(logps(out), np.stack(columns, -1), atol=1e-5)
  expected = -np.sum(weights * np.stack(columns, -1))
  np.testing.assert_allclose(out.metrics["loss:sum"], expected, rtol=1e-5)
  mask, gains = np.float32([0, 1, 1]), np.float32([0, 1, 2])
  given = {"advantages": gains, "logprobs": columns[0] - np.float32([9, 0.2, 0.4])}
  given |= {"target_tokens": np.array([1, 2, 3]), "sequence_ratio_mask": mask}
  out = trainer.forward(of(**given), "gspo", {"clip_high_threshold": 2.0}).result()
  np.testing.assert_allclose(out.metrics["loss:sum"], -3 * np.exp(0.3), rtol=1e-5)


def test_chunks_arrive_in_any_order_and_forward_passes_change_nothing(served):
  _, _, client = served
  whole = client.create_lora_training_client("toy", rank=2, seed=0).result()
  cut = client.create_lora_training_client("toy", rank=2, seed=0).result()
  config = client.holder._client_config
  given = datums(0, 5, 9, 7, 6)
  norms = []
  for trainer, length in ((whole, 1024), (cut, 1)):
    chunks = {"fwdbwd_max_chunk_len": length}
    client.holder._client_config = config.model_copy(update=chunks)
    trainer.forward(given, "cross_entropy")
    future = trainer.forward_backward(given, "cross_entropy")
    update = trainer.optim_step(tinker.AdamParams())
    assert len(future.result().loss_fn_outputs) == 4
    norms.append([update.result().metrics["grad_norm"], future.result().metrics])
  client.holder._client_config = config
  assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-5)
  assert norms[0][1]["loss:sum"] == pytest.approx(norms[1][1]["loss:sum"], rel=1e-6)


def test_a_custom_loss_of_torch_has_the_gradient_of_the_built_in_one(served):
  torch = pytest.importorskip("torch", reason="the SDK's custom losses need torch")
  _, service, client = served
  rng = np.random.default_rng(0)
  data = [
    tinker.Datum(
      model_input=tinker.ModelInput.from_ints(x.tolist()),
      loss_fn_inputs={
        "target_tokens": y,
        "logprobs": rng.normal(-6, 0.1, len(y)).astype(np.float32),
        "advantages": rng.normal(size=len(y)).astype(np.float32),
      },
    )
    for x, y in rows(0, 9, 5, 12)
  ]

  def loss(data, logprobs):
    total = 0.0
    for datum, logps in zip(data, logprobs):
      known = {k: x.to_torch() for k, x in datum.loss_fn_inputs.items()}
      total -= (torch.exp(logps - known["logprobs"]) * known["advantages"]).sum()
    return total, {"rows": len(data)}

  found = []
  for is_custom in (False, True):
    trainer = client.create_lora_training_client("toy", rank=4, seed=3).result()
    if is_custom:
      out = trainer.forward_backward_custom(data, loss).result()
    else:
      out = trainer.forward_backward(data, "importance_sampling").result()
    gradient = service.run("local", trainer.model_id).state.gradient
    found.append((out.metrics["loss:sum"], tree.flatten(gradient)))
  for name, expected in found[0][1].items():
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(found[1][1][name], expected, rtol=0, atol=1e-6 * scale)
  assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)


def test_the_loop_of_reinforcement_learning(served):
  """GRPO's form: groups of completions, advantages against the group's mean.

  The reward is the share of tokens that one direction of the last state makes likelier.
  """
  good = np.asarray(base().lm_head.kernel[...])[0] > 0
  _, _, client = served
  trainer = client.create_lora_training_client("toy", rank=4, seed=0).result()
  prompt, means = tinker.ModelInput.from_ints(PROMPT), []
  for seed in range(9):
    params = tinker.SamplingParams(max_tokens=4, temperature=1.0, seed=seed)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    group = sampler.sample(prompt, 16, params).result().sequences
    rewards = [np.mean(good[x.tokens]) for x in group]
    means.append(np.mean(rewards))
    data = []
    for sequence, reward in zip(group, rewards):
      first = len(PROMPT) - 1
      tokens = [*PROMPT, *sequence.tokens]
      size = len(tokens) - 1
      advantages = np.zeros(size, np.float32)
      advantages[first:] = reward - means[-1]
      logprobs = np.zeros(size, np.float32)
      logprobs[first:] = sequence.logprobs
      inputs = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": logprobs,
        "advantages": advantages,
      }
      data.append(
        tinker.Datum(
          model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
        )
      )
    future = trainer.forward_backward(data, "importance_sampling")
    trainer.optim_step(tinker.AdamParams(learning_rate=3e-2)).result()
    # The trainer's log-probabilities are those of the sampler.
    out = future.result().loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(out[first:], group[0].logprobs, atol=2e-4)
  assert np.mean(means[-3:]) > np.mean(means[:2]) + 0.1, means


def test_samplers_checkpoints_and_archives(served, tmp_path):
  url, _, client = served
  trainer = client.create_lora_training_client("toy", rank=4, seed=3).result()
  supervised(trainer)
  state = trainer.save_state("step-3").result().path
  path = trainer.save_weights_for_sampler("step-3").result().path
  rest = tinker.RestClient(base_url=url, api_key=KEY)
  kinds = {
    x.checkpoint_id
    for x in rest.list_checkpoints(trainer.model_id).result().checkpoints
  }
  assert kinds == {"weights/step-3", "sampler_weights/step-3"}
  assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
  assert rest.get_training_run(trainer.model_id).result().base_model == "toy"
  archive = httpx.get(
    f"{url}/api/v1/training_runs/{trainer.model_id}/checkpoints/sampler_weights/step-3/"
    "archive",
    headers={"X-API-Key": KEY},
  )
  with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
    tar.extraction_filter = getattr(tarfile, "data_filter", None)  # not in 3.11.2
    tar.extractall(tmp_path)
  merged = lora.merge(lora.load_adapter(base(), tmp_path))
  greedy = {"max_tokens": 6, "temperature": 0.0}
  prompt = tinker.ModelInput.from_ints(PROMPT)
  named = client.create_sampling_client(model_path=path).result()
  plain = client.create_sampling_client(base_model="toy").result()
  found = [
    sampler.sample(prompt, 1, tinker.SamplingParams(**greedy)).result().sequences[0]
    for sampler in (named, plain)
  ]
  with ServiceClient(merged, _tokenizer()) as local:
    sampler = local.create_sampling_client()
    (expected,) = sampler.sample(PROMPT, 1, SamplingParams(**greedy)).result().sequences
  assert found[0].tokens == expected.tokens != found[1].tokens
  scores = named.compute_logprobs(
    tinker.ModelInput.from_ints([*PROMPT, *expected.tokens])
  )
  np.testing.assert_allclose(scores.result()[3:], expected.logprobs, atol=2e-4)
  with pytest.raises(tinker.BadRequestError, match="does not have public checkpoints"):
    rest.publish_checkpoint_from_tinker_path(path).result()
  with pytest.raises(tinker.RequestFailedError, match="'stable_reinforce', which"):
    trainer.forward(datums(0, 5), "stable_reinforce").result()
  rest.delete_checkpoint_from_tinker_path(path).result()
  with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
    client.create_sampling_client(model_path=path).result()
  copy = client.create_training_client_from_state_with_optimizer(state).result()
  pairs = [supervised(x, 1) for x in (trainer, copy)]
  assert pairs[0] == pairs[1]


def _tokenizer():
  from tests import toys_text

  return toys_text.chat_tokenizer()
