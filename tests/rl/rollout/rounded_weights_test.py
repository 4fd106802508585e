"""Rollouts whose kernels are in 8 bits, made from the policy at every transfer."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.rl import clusters
from tunix.cli import config as config_lib
from tunix.cli.commands import rollouts
from tunix.models import lora, quantization
from tunix.models.adapters import lora_modules
from tunix.models.transformer.dense import quantized
from tunix.rl import learner_state
from tunix.rl.algorithm_config import RolloutCorrection
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.vllm_rollout import VllmRollout
from tunix.rl.weights import placement
from tunix.sft.metrics_logger import Mode
from tunix.utils import mesh as mesh_lib, tree

SETTINGS = {"max_tokens_to_generate": 6, "max_prompt_length": 8}


def kernels(model):
  return {
    path: np.asarray(x.dense()) for path, x in lora_modules.linears(model).items()
  }


def check_holds_rounded(sampling, actor, method):
  """Checks that a model samples from the weights of another one in 8 bits."""
  whole, rounded = kernels(actor), kernels(sampling)
  layers = lora_modules.adaptable(sampling)
  assert whole.keys() == rounded.keys() > layers.keys()
  for path, kernel in whole.items():
    if path in layers:
      codes = quantized.encode(kernel, method, kernel.shape[-2], np.float32)
      kernel = quantized.decode(*codes, method, np.float32)
    np.testing.assert_array_equal(rounded[path], kernel, path)
  for path, value in tree.flatten(nnx.state(actor, nnx.LoRAParam)).items():
    held = tree.flatten(nnx.state(sampling, nnx.LoRAParam))[path]
    np.testing.assert_array_equal(held, value, path)


@pytest.mark.parametrize(
  "method, schedule, rank",
  [
    ("int8", {}, 0),
    ("fp8", {}, 2),
    ("int8", {"schedule": "lagged", "lag": 1}, 0),
    ("fp8", {"schedule": "greedy", "lag": 1}, 2),
    ("int8", {"rollout_engine": "padded"}, 0),
  ],
)
def test_the_sampler_gets_the_weights_of_every_update(method, schedule, rank):
  actor = clusters.model(lora_rank=rank)
  before = kernels(actor)
  learner = clusters.grpo(
    actor=actor, rollout={"weights": method, **SETTINGS}, **schedule
  )
  with learner.rl_cluster as cluster:
    learner.train(clusters.prompts(3))
    cluster.load_weights(cluster.weights())
    trained = cluster.actor_trainer.model
    check_holds_rounded(cluster.rollout.model(), trained, method)
    changed = [p for p, x in kernels(trained).items() if np.any(x != before[p])]
    arrays = tree.flatten(nnx.state(trained, nnx.LoRAParam))
    assert changed or any(np.any(x) for p, x in arrays.items() if "lora_b" in p)


def logps(model, ids):
  every = jax.nn.log_softmax(toys.logits(model, ids[None, :-1]))
  return np.take_along_axis(np.asarray(every), ids[None, 1:, None], -1)[0, :, 0]


@pytest.mark.parametrize("method", quantized.OF_A_BYTE)
def test_log_probs_are_those_of_the_rounded_policy(method):
  with clusters.cluster(rollout={"weights": method, **SETTINGS}) as cluster:
    prompts = clusters.prompts(1)[0]["prompts"]
    out = cluster.generate(prompts)
    policy = quantization.dequantize(quantization.quantize(cluster.actor, method))
    for prompt, tokens, reported in zip(out.prompt_tokens, out.tokens, out.logprobs):
      ids = np.concatenate([prompt, tokens])
      rounded, whole = (logps(x, ids)[-len(tokens) :] for x in (policy, cluster.actor))
      np.testing.assert_allclose(reported, rounded, atol=2e-5)
      assert np.abs(reported - whole).max() > 1e-4


def test_kernels_take_a_byte_for_each_weight():
  actor = clusters.model(embed_dim=64)
  sampling = quantization.for_sampling(actor, "int8")
  for path, linear in lora_modules.adaptable(sampling).items():
    size = tree.size_bytes(nnx.state(linear.kernel))
    whole = np.prod(linear.kernel.shape)
    assert whole < size <= whole * 1.13, path  # 4 bytes for each column of 32 or 64
  # An odd width is one block too, also when it is sent again.
  odd, other = (clusters.model(seed=n, hidden_dim=33) for n in (0, 1))
  sampling_odd = quantization.for_sampling(odd, "int8")
  assert placement.copy_weights(other, sampling_odd)
  check_holds_rounded(sampling_odd, other, "int8")
  # All else is shared with the policy.
  shared = tree.flatten(nnx.state(actor, nnx.Param))
  for path, value in tree.flatten(nnx.state(sampling, nnx.Param)).items():
    assert path not in shared or value is shared[path]


def test_kernels_are_sent_in_their_own_layout(mesh_fsdp4_tp2):
  with mesh_lib.use_mesh(mesh_fsdp4_tp2):
    source, other = toys.model(), toys.model(seed=1)
    target = quantization.for_sampling(other, "int8")
    held = {path: x.sharding for path, x in tree.flatten(nnx.state(target)).items()}
    assert placement.copy_weights(source, target)
    check_holds_rounded(target, source, "int8")
    for path, value in tree.flatten(nnx.state(target)).items():
      assert value.sharding.is_equivalent_to(held[path], value.ndim), path
    assert not placement.copy_weights(source, target)


def test_kernels_that_are_quantized_or_trained_whole_stay_as_they_are():
  base = quantization.quantize(clusters.model(), "nf4", targets=("up_proj",))
  config = lora.LoraConfig(rank=2, targets=("q_proj",), modules_to_save=("o_proj",))
  actor = lora.apply(base, config)
  sampling = quantization.for_sampling(actor, "int8")
  forms = {
    path.rpartition(".")[2]: getattr(x.kernel, "method", "whole")
    for path, x in lora_modules.adaptable(sampling).items()
  }
  assert forms.pop("up_proj") == "nf4" and forms.pop("o_proj") == "whole"
  assert {*forms.values()} == {"int8"}
  assert not placement.copy_weights(actor, sampling)
  whole = lora_modules.linears(actor)["layers.attn.o_proj"].kernel
  whole[...] = whole[...] + 1
  assert placement.copy_weights(actor, sampling) == whole[...].nbytes
  with pytest.raises(ValueError, match="int8, and all kernels of the layers are quant"):
    quantization.for_sampling(quantization.quantize(clusters.model(), "nf4"), "int8")


def test_the_correction_of_rounded_rollouts_is_on_by_default():
  options = {"rollout": {"weights": "int8", **SETTINGS}}
  off = {"rollout_correction": RolloutCorrection(kind="off")}
  for algorithm, more, expected in (
    ({}, options, RolloutCorrection(kind="truncate")),
    (off, options, None),
    ({}, {}, None),
  ):
    learner = clusters.grpo(algorithm, **more)
    assert learner.algo_config.correction == expected
    form = learner_state.identity(learner.rl_cluster).get("weights")
    assert form == ("int8" if more else None)  # a resumed run must keep it


def test_what_does_not_go_with_rounded_rollouts():
  with pytest.raises(ValueError, match="weights is 'int4'; expected one of int8, fp8"):
    RolloutConfig(weights="int4")  # pyright: ignore[reportArgumentType]
  for engine in ("vllm", "remote"):
    with pytest.raises(ValueError, match=f"'{engine}' and weights is 'fp8'"):
      clusters.config(rollout={"weights": "fp8"}, rollout_engine=engine)
  words = ["--job=grpo", "--rollout.weights=int8"]
  for word, name in (
    ("--rollout.engine=vllm", "rollout.engine is 'vllm'"),
    ("--algorithm.exact_tile_rows=4", "algorithm.exact_tile_rows is 4"),
  ):
    with pytest.raises(ValueError, match=f"rollout.weights is 'int8' and {name}"):
      config_lib.load([*words, word])
  with pytest.raises(ValueError, match="hosts sample with whole weights"):
    rollouts.main(words)
  with pytest.raises(ValueError, match="VllmRollout and weights is 'fp8'"):
    clusters.cluster(rollout={"weights": "fp8"}, rollout_engine=VllmRollout)
  modes = {Mode.TRAIN: RolloutConfig(weights="int8"), Mode.EVAL: RolloutConfig()}
  with pytest.raises(ValueError, match="weights is None and 'int8' in different modes"):
    dataclasses.replace(clusters.config(), rollout_config=modes)
  with pytest.raises(ValueError, match="exact_tile_rows is 4, which promises"):
    clusters.grpo({"exact_tile_rows": 4}, rollout={"weights": "int8"})
  with pytest.raises(
    ValueError, match=r"top_k is 3 .* in 8 bits and stale rollouts have by default"
  ):
    clusters.grpo(rollout={"weights": "int8", "top_k": 3})
  with pytest.raises(ValueError, match="expected a decoder of tunix"):
    quantization.for_sampling(toys.TokensOnly(nnx.Rngs(0)), "int8")
