"""Gradients and updates against our trainer on the same rows."""

import jax
import numpy as np
import optax
import pytest

from tests.tinker.serving import VOCAB, base, rows
from tunix.models import lora
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.tinker import data, losses
from tunix.tinker.errors import TinkerError
from tunix.tinker.learner import AdamParams, AdapterSpec, Learner
from tunix.utils import tree

ADAM = {"learning_rate": 1e-2, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
SPEC = AdapterSpec(rank=4)


def learner(**options):
  return Learner(base(), **{"alpha": 8.0, "batch_tokens": 4096, **options})


def checked(given, loss="cross_entropy", **inputs):
  made = []
  for i, (x, y) in enumerate(given):
    more = {name: values[i] for name, values in inputs.items()}
    made.append(data.Row(tokens=x, inputs={"target_tokens": y, **more}))
  return data.check_rows(made, loss, vocab_size=VOCAB, max_tokens=64)


def flat(params):
  return {name: np.array(x) for name, x in tree.flatten(params).items()}


def for_the_trainer(given):
  shape = (len(given), 16)
  tokens, inside = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  for i, (x, y) in enumerate(given):
    tokens[i, : len(x) + 1] = [x[0], *y]
    inside[i, : len(x) + 1] = 1
  return {"input_tokens": tokens, "input_mask": inside, "segment_ids": inside}


def test_the_loss_curve_is_that_of_the_trainer():
  batches = [rows(seed, 9, 5, 12, 15) for seed in range(4)]
  ours, curve = learner(), []
  state = ours.init(SPEC, seed=3)
  for batch in batches:
    # The trainer's loss is a mean over tokens, the protocol's a sum.
    share = 1 / sum(len(x) for x, _ in batch)
    weights = [np.full(len(x), share, np.float32) for x, _ in batch]
    made = checked(batch, weights=weights)
    outputs = ours.forward_backward(
      SPEC, state, made, "cross_entropy", {}, backward=True
    )
    curve.append(sum(float(x.losses.sum()) for x in outputs))
    ours.update(state, AdamParams(**ADAM))
  adapted = lora.apply(base(), lora.LoraConfig(rank=4, alpha=8.0), seed=3)
  tx = optax.adamw(1e-2, 0.9, 0.99, 1e-8, weight_decay=0.1)
  trainer = PeftTrainer(adapted, tx, TrainingConfig(max_steps=4))
  theirs = [float(trainer.train_step(for_the_trainer(x))) for x in batches]
  np.testing.assert_allclose(curve, theirs, rtol=1e-5)
  trained = lora.lora_modules.adapted(adapted)
  for path, adapter in ours.adapters(SPEC, flat(state.params)).items():
    a, b = lora.lora_modules.pair_of(trained[path])
    np.testing.assert_allclose(adapter.a, a, atol=2e-5)
    np.testing.assert_allclose(adapter.b, b, atol=2e-5)


def test_micro_batches_and_padding_do_not_change_the_gradient():
  given = checked(rows(0, 3, 17, 30, 16, 9))
  gradients, logps = [], []
  for batch_tokens in (4096, 32):
    ours = learner(batch_tokens=batch_tokens)
    state = ours.init(SPEC, seed=0)
    out = ours.forward_backward(SPEC, state, given, "cross_entropy", {}, backward=True)
    gradients.append(flat(state.gradient))
    logps.append(np.concatenate([x.logps for x in out]))
  np.testing.assert_allclose(*logps, atol=2e-6)
  for name, x in gradients[0].items():
    np.testing.assert_allclose(x, gradients[1][name], atol=2e-5, err_msg=name)


def test_gradients_add_up_and_a_forward_pass_leaves_them():
  ours, given = learner(), checked(rows(0, 5, 9, 14))
  whole, parts = ours.init(SPEC, seed=0), ours.init(SPEC, seed=0)
  run = lambda state, x, backward=True: ours.forward_backward(
    SPEC, state, x, "cross_entropy", {}, backward=backward
  )
  run(whole, given)
  for row in given:
    run(parts, [row])
    run(parts, given, backward=False)
  for name, x in flat(whole.gradient).items():
    np.testing.assert_allclose(x, flat(parts.gradient)[name], atol=2e-5)


def test_the_norm_of_the_gradient_is_clipped():
  ours, given = learner(), checked(rows(0, 5, 9))
  config = losses.configured("cross_entropy", None)
  moments = []
  for clip in (0.0, 0.5, 1e9):
    state = ours.init(SPEC, seed=0)
    ours.forward_backward(SPEC, state, given, "cross_entropy", config, backward=True)
    norm = ours.update(state, AdamParams(beta1=0.0, grad_clip_norm=clip))["grad_norm"]
    assert norm > 0.5
    # With beta1 = 0 the first moment is the gradient.
    moments.append(float(optax.tree.norm(state.opt_state[0].mu)))
  np.testing.assert_allclose(moments, [norm, 0.5, norm], rtol=1e-5)
  with pytest.raises(TinkerError, match="no gradient"):
    ours.update(state, AdamParams())


def test_adapters_share_programs_and_no_bytes():
  ours = learner()
  one, other = ours.init(SPEC, seed=0), ours.init(SPEC, seed=1)
  before = ours.to_arrays(other)
  given = checked(rows(0, 5))
  for _ in range(2):
    ours.forward_backward(SPEC, one, given, "cross_entropy", {}, backward=True)
    ours.update(one, AdamParams())
  after = ours.to_arrays(other)
  assert all(np.array_equal(before[name], after[name]) for name in before)
  ours.forward_backward(SPEC, other, given, "cross_entropy", {}, backward=True)
  (program,) = ours._programs.values()
  assert program._cache_size() == 1
  again = ours.from_arrays(SPEC, ours.to_arrays(one))
  assert all(map(np.array_equal, *map(jax.tree.leaves, (again.params, one.params))))
  only = ours.init(AdapterSpec(rank=2, train_attn=False), seed=0)
  assert not [name for name in tree.flatten(only.params) if "attn" in name]
  assert ours.size_bytes(SPEC) == 4 * sum(x.nbytes for x in flat(one.params).values())


def test_wrong_rows():
  tokens = np.array([1, 2, 3])

  def check(loss="cross_entropy", ids=tokens, **inputs):
    row = data.Row(tokens=ids, inputs=inputs)
    data.check_rows([row], loss, vocab_size=VOCAB, max_tokens=4)

  check(target_tokens=tokens)
  with pytest.raises(TinkerError, match="data is empty"):
    data.check_rows([], "cross_entropy", vocab_size=VOCAB, max_tokens=4)
  with pytest.raises(TinkerError, match=r"datum 0 has the loss_fn_inputs none"):
    check()
  with pytest.raises(
    TinkerError, match=r"expected target_tokens, logprobs, advantages"
  ):
    check("ppo", target_tokens=tokens)
  with pytest.raises(TinkerError, match=r"has 5 tokens; expected 1 to 4"):
    check(ids=np.arange(5), target_tokens=np.arange(5))
  with pytest.raises(TinkerError, match=r"ids from 1 to 600 in target_tokens"):
    check(target_tokens=np.array([1, 600, 2]))
  with pytest.raises(TinkerError, match=r"shape \[3, 2\].*Several targets"):
    check(target_tokens=np.ones((3, 2), int))
  with pytest.raises(TinkerError, match="weights has NaN"):
    check(target_tokens=tokens, weights=np.array([1, np.nan, 1]))
