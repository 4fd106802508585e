"""Gradients and updates, against `tunix train` on the same rows."""

import jax
import numpy as np
import optax
import pytest

from tests.cli import runs
from tests.tinker.serving import VOCAB, base, rows
from tunix.data import pipeline
from tunix.data.reading import jsonl
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import lora
from tunix.models.automodel import AutoModel
from tunix.tinker.errors import TinkerError
from tunix.tinker.learning import data, losses
from tunix.tinker.learning.learner import AdamParams, AdapterSpec, Learner
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


def batches_of(records, tokenizer):
  """Yields the batches of `tunix train` as (rows of a request, trained tokens)."""
  batches = pipeline.build_dataset(
    records, tokenizer, batch_size=4, max_length=48, shuffle=False
  )
  for batch in batches:
    made, count = [], batch["input_mask"][:, 1:].sum()
    for ids, mask, inside in zip(
      *(batch[name] for name in ("input_tokens", "input_mask", "segment_ids"))
    ):
      ids, mask = ids[inside > 0], mask[inside > 0]
      # The trainer's loss is a mean over tokens, the protocol's a sum.
      inputs = {"target_tokens": ids[1:], "weights": mask[1:] / np.float32(count)}
      made.append(data.Row(tokens=ids[:-1], inputs=inputs))
    yield made


def test_the_loss_curve_is_that_of_tunix_train(tmp_path):
  folder = runs.write_model(tmp_path / "model")
  file = runs.write_records(tmp_path / "train.jsonl", 16)
  optimizer = "{b2: 0.99, eps: 1.0e-8, weight_decay: 0.1}"
  keys = {
    "model__path": folder,
    "data__train": file,
    "data__max_length": 48,
    "data__shuffle": "false",
    "lora": "{rank: 4, alpha: 8}",
    "optimizer__args": optimizer,
    "training__max_steps": 4,
    "training__global_batch_size": 4,
    "training__learning_rate": "1e-2",
    "output_dir": tmp_path / "out",
    "seed": 3,
  }
  assert runs.tunix("train", *runs.arguments(**keys)) == 0
  theirs = [x["loss"] for _, x in sorted(runs.metrics(tmp_path / "out").items())]
  model = AutoModel.from_pretrained(folder)
  ours, curve = Learner(model, alpha=8.0, batch_tokens=4096), []
  state = ours.init(SPEC, seed=3)
  adam = AdamParams(**ADAM, grad_clip_norm=1.0)
  tokenizer = TokenizerAdapter.from_pretrained(folder)
  for made in batches_of(jsonl.JsonlRecords(file), tokenizer):
    given = data.check_rows(
      made, "cross_entropy", vocab_size=model.config.vocab_size, max_tokens=48
    )
    outputs = ours.forward_backward(
      SPEC, state, given, "cross_entropy", {}, backward=True
    )
    curve.append(sum(float(x.losses.sum()) for x in outputs))
    ours.update(state, adam)
  np.testing.assert_allclose(curve, theirs, rtol=1e-5)
  assert curve[-1] < curve[0]
  trained = lora.load_adapter(model, tmp_path / "out" / "export")
  adapted = lora.lora_modules.adapted(trained)
  for path, adapter in ours.adapters(SPEC, flat(state.params)).items():
    a, b = lora.lora_modules.pair_of(adapted[path])
    # AdamW divides by roots near 0, so its updates of 1e-2 differ by more than losses.
    np.testing.assert_allclose(adapter.a, a, atol=2e-4)
    np.testing.assert_allclose(adapter.b, b, atol=2e-4)


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


def test_several_targets_are_the_sum_of_rows_with_one_target_each():
  """Rows with 3 and 4 targets, which are computed together, and one with a target."""
  rng = np.random.default_rng(1)
  whole, apart = [], []
  for (x, y), width in zip(rows(0, 5, 9, 9), (3, 4, 0)):
    shape = (x.size, width) if width else (x.size,)
    targets = rng.integers(0, VOCAB, shape) if width else y
    weights = rng.random(shape).astype(np.float32)
    whole.append((x, targets, weights))
    columns = zip(targets.T, weights.T) if width else [(targets, weights)]
    apart += [(x, *column) for column in columns]
  outputs, gradients = [], []
  ours = learner()
  for given in (whole, apart):
    state = ours.init(SPEC, seed=0)
    made = checked([x[:2] for x in given], weights=[x[2] for x in given])
    outputs.append(
      ours.forward_backward(SPEC, state, made, "cross_entropy", {}, backward=True)
    )
    gradients.append(flat(state.gradient))
  assert [x.logps.shape for x in outputs[0]] == [(5, 3), (9, 4), (9,)]
  for field in ("logps", "losses"):
    values = [getattr(x, field) for x in outputs[0]]
    columns = [column for x in values for column in np.atleast_2d(x.T)]
    for x, row in zip(columns, outputs[1], strict=True):
      np.testing.assert_allclose(x, getattr(row, field), atol=5e-6)
  for name, x in gradients[0].items():
    np.testing.assert_allclose(x, gradients[1][name], atol=3e-5, err_msg=name)


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


@pytest.mark.parametrize(("rate", "scale"), [(1e-3, np.nan), (1e-3, 3e38), (3e38, 1)])
def test_an_update_to_weights_that_are_no_numbers_is_refused(rate, scale):
  ours = learner()
  state = ours.init(SPEC, seed=0)
  before = [x.copy() for x in jax.tree.leaves(jax.tree.map(np.asarray, state.params))]
  state.gradient = jax.tree.map(lambda x: x * 0 + np.float32(scale), state.params)
  params = AdamParams(learning_rate=rate, weight_decay=1e3)
  with pytest.raises(TinkerError, match="weights that are not finite"):
    ours.update(state, params)
  after = jax.tree.leaves((state.params, state.opt_state))
  assert all(np.isfinite(x).all() for x in after)
  for x, y in zip(before, after):
    np.testing.assert_array_equal(x, y)


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
  several = np.ones((3, 2), int)
  check(target_tokens=several, weights=np.ones((3, 2)))
  with pytest.raises(TinkerError, match=r"weights has shape \[3\]; expected \[3, 2\]"):
    check(target_tokens=several, weights=np.ones(3))
  rl = {"logprobs": np.ones(3), "advantages": np.ones(3)}
  with pytest.raises(TinkerError, match=r"\[3, 2\].*only cross_entropy takes several"):
    check("ppo", target_tokens=several, **rl)
  with pytest.raises(TinkerError, match="sequence_ratio_mask is 0 at all tokens"):
    check("gspo", target_tokens=tokens, sequence_ratio_mask=np.zeros(3), **rl)
  with pytest.raises(TinkerError, match="weights has the value nan"):
    check(target_tokens=tokens, weights=np.array([1, np.nan, 1]))
