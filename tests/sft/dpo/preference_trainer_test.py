import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import drills, optimizers, toys, toys_text
from tests.sft import trainers
from tests.sft.dpo import preferences
from tunix.models import heads, lora
from tunix.ops import preference
from tunix.sft.dpo.dpo_trainer import (
  DPOTrainer,
  DPOTrainingConfig,
  ORPOTrainer,
  ORPOTrainingConfig,
)
from tunix.sft.dpo.kto_trainer import KTOConfig, KTOTrainer
from tunix.sft.dpo.preference_config import PreferenceConfig
from tunix.sft.dpo.preference_trainer import PreferenceTrainer
from tunix.sft.dpo.reward_trainer import RewardTrainer
from tunix.sft.utils import live_array_bytes
from tunix.utils import tree


def hand_dpo(model, ref, batch, beta):
  """-log s(beta ((pc - rc) - (pr - rr))), pair by pair, from plain logits."""
  ratio = lambda a: (
    preferences.logps(model, batch, a) - preferences.logps(ref, batch, a)
  )
  chosen, rejected = ratio("chosen"), ratio("rejected")
  losses = [math.log1p(math.exp(-beta * (c - r))) for c, r in zip(chosen, rejected)]
  return np.mean(losses), beta * chosen, beta * rejected


def test_loss_and_metrics_by_hand():
  model, ref, batch = preferences.model(0), preferences.model(1), preferences.pairs()
  loss, chosen, rejected = hand_dpo(model, ref, batch, 0.3)
  t = preferences.trainer(model, ref, beta=0.3)
  got = t.eval_step(batch)
  np.testing.assert_allclose(got["loss"], loss, rtol=1e-5)
  np.testing.assert_allclose(got["rewards/chosen"], chosen.mean(), rtol=1e-4)
  np.testing.assert_allclose(got["rewards/rejected"], rejected.mean(), rtol=1e-4)
  margin, right = (chosen - rejected).mean(), (chosen > rejected).mean()
  np.testing.assert_allclose(got["rewards/margin"], margin, rtol=1e-4)
  assert got["rewards/accuracy"] == right
  own = preferences.logps(model, batch, "chosen").mean()
  np.testing.assert_allclose(got["log_probs/chosen"], own, rtol=1e-5)
  np.testing.assert_allclose(t.train_step(batch), loss, rtol=1e-5)


def test_metrics_are_logged_in_training_and_evaluation():
  t = preferences.trainer(ref=preferences.model(1))
  t.train([preferences.pairs(s) for s in range(3)], [preferences.pairs(9)])
  for name in ("rewards/accuracy", "log_probs/rejected", "kl", "loss"):
    assert len(trainers.history(t, name)) == 3
    assert len(trainers.history(t, name, "eval")) == 2
  assert not t.metrics_logger.metric_exists("", "perplexity", "train")


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("sigmoid", {}),
    ("sigmoid", {"label_smoothing": 0.3}),
    ("sigmoid", {"beta": 0.5}),
    ("sigmoid", {"reference_free": True}),
    ("ipo", {}),
    ("aot", {}),
    ("simpo", {}),
    ("simpo", {"options": {"gamma": 3.0}}),
    ("orpo", {}),
  ],
)
def test_the_settings_reach_the_loss(name, options):
  batch, model, ref = (
    preferences.pairs(rows=3),
    preferences.model(),
    preferences.model(1),
  )
  unused = name in ("simpo", "orpo") or options.get("reference_free")
  t = preferences.trainer(model, None if unused else ref, loss=name, **options)
  scores = [preferences.logps(model, batch, a) for a in ("chosen", "rejected")]
  scores += [preferences.logps(ref, batch, a) for a in ("chosen", "rejected")]
  if options.get("reference_free"):
    scores[2:] = [np.zeros(3), np.zeros(3)]
  counts = [batch[f"{a}_mask"].sum(1) for a in ("chosen", "rejected")]
  arrays = [np.asarray(x, np.float32) for x in (*scores, *counts, np.ones(3))]
  keys = {k: x for k, x in options.items() if k in ("beta", "label_smoothing")}
  want = preference.pair_loss(
    name, preference.PairScores(*arrays), **keys, **options.get("options", {})
  )
  np.testing.assert_allclose(t.eval_step(batch)["loss"], want.values.mean(), rtol=1e-4)


def test_a_loss_of_ones_own():
  def squared(scores, *, beta):
    return beta * (scores.chosen - scores.rejected - 1) ** 2

  batch = preferences.pairs()
  t = preferences.trainer(ref=preferences.model(1), loss=squared, beta=2.0)
  model = preferences.model()
  gap = preferences.logps(model, batch, "chosen")
  gap -= preferences.logps(model, batch, "rejected")
  want = np.mean(2 * (gap - 1) ** 2)
  np.testing.assert_allclose(t.eval_step(batch)["loss"], want, rtol=1e-4)


@pytest.mark.parametrize("kind", list(preferences.CONFIGS), ids=lambda x: x.__name__)
def test_a_subclass_that_replaces_the_step_trains_on_it(kind):
  class Tripled(kind):
    def _train_step(self, model, batch):
      loss, aux = super()._train_step(model, batch)
      return loss._replace(total=3 * loss.total), aux

  batch = preferences.labelled() if kind is KTOTrainer else preferences.pairs()
  losses = []
  for each in (kind, Tripled):
    made = {"ref": preferences.model(1)}
    if kind is RewardTrainer:
      made = {"policy": heads.with_scores(preferences.model())}
    losses.append(preferences.trainer(kind=each, **made).eval_step(batch)["loss"])
  np.testing.assert_allclose(losses[1], 3 * losses[0], rtol=1e-5)


@pytest.mark.parametrize("loss", ["sigmoid", "simpo"])
def test_with_loss_fn_is_a_loss_of_pair_scores(loss):
  def squared(scores, *, beta):
    return beta * (scores.chosen - scores.rejected - scores.ref_chosen - 1) ** 2

  batch, free = preferences.pairs(), loss == "simpo"
  ref = None if free else preferences.model(1)
  settings = {"reference_free": True} if free else {}
  want = preferences.trainer(ref=ref, loss=squared, **settings).eval_step(batch)
  t = preferences.trainer(ref=ref, loss=loss)
  assert t.eval_step(batch)["loss"] != want["loss"]
  assert t.with_loss_fn(squared) is t
  assert t.eval_step(batch) == want

  def with_metrics(scores, *, beta):
    return squared(scores, beta=beta), {"gap": scores.chosen - scores.rejected}

  got = t.with_loss_fn(with_metrics, has_aux=True).eval_step(batch)
  gap = preferences.logps(preferences.model(), batch, "chosen")
  gap -= preferences.logps(preferences.model(), batch, "rejected")
  assert got["loss"] == want["loss"]
  np.testing.assert_allclose(got["gap"], gap.mean(), rtol=1e-4)
  smooth = preferences.trainer(ref=preferences.model(1), label_smoothing=0.1)
  with pytest.raises(ValueError, match="takes no label_smoothing"):
    smooth.with_loss_fn(squared)


def test_a_batch_is_mapped_once_before_it_is_read():
  batch, seen = preferences.pairs(), []

  def swapped(given):
    seen.append(given)
    other = {"chosen": "rejected", "rejected": "chosen"}
    name = lambda k: "_".join(
      [other.get(k.split("_")[0], k.split("_")[0]), *k.split("_")[1:]]
    )
    return {name(k): x for k, x in given["mine"].items()}

  plain = preferences.trainer(ref=preferences.model(1))
  mapped = preferences.trainer(ref=preferences.model(1)).with_gen_model_input_fn(
    swapped
  )
  margin = plain.eval_step(batch)["rewards/margin"]
  assert mapped.eval_step({"mine": batch})["rewards/margin"] == pytest.approx(-margin)
  mapped.train_step({"mine": batch})
  assert len(seen) == 2


@pytest.mark.parametrize("loss", ["sigmoid", "orpo", "aot"])
def test_padding_rows_change_nothing(loss):
  batch = preferences.pairs(rows=3)
  make = lambda: preferences.trainer(preferences.model(lora_rank=2), loss=loss)
  want = drills.gradients(make(), [batch])
  padded = preferences.with_padding(batch, 5)
  drills.assert_same_gradients(drills.gradients(make(), [padded]), want)
  assert make().eval_step(padded)["loss"] == pytest.approx(
    make().eval_step(batch)["loss"], rel=1e-6
  )


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_shared_prompt_gives_the_same_gradient(lora_rank):
  batch = preferences.pairs(rows=4, prompt=12, response=7)
  make = lambda shared: preferences.trainer(
    preferences.model(lora_rank=lora_rank), preferences.model(1), shared_prompt=shared
  )
  plain, shared = (drills.gradients(make(s), [batch]) for s in (False, True))
  drills.assert_same_gradients(shared, plain, tolerance=1e-6)
  flops = lambda s: make(s).lower_train_step(batch).compile().cost_analysis()["flops"]
  assert flops(None) == flops(True) < 0.9 * flops(False)  # on a CPU


def test_text_and_chats_train():
  tokenizer = toys_text.chat_tokenizer("chatml")
  model = preferences.model(vocab_size=tokenizer.vocab_size, lora_rank=2)
  config = DPOTrainingConfig(
    max_prompt_length=24,
    max_response_length=8,
    gradient_accumulation_steps=2,
    pbar_description=None,
  )
  t = DPOTrainer(model, None, optimizers.sgd(0.1), config, tokenizer)
  ask = [{"role": "user", "content": "hello"}]
  batch = {"prompt": [ask, "hi"], "chosen": ["yes", " a"], "rejected": ["no", " b"]}
  before = trainers.leaves(model, nnx.LoRAParam)
  assert float(t.train_step(batch)) > 0  # cut in two after tokenizing
  assert not trainers.equal(before, trainers.leaves(model, nnx.LoRAParam))


def test_orpo_is_a_setting_of_dpo():
  batch = preferences.pairs()
  config = ORPOTrainingConfig(pbar_description=None, lambda_orpo=0.7)
  orpo = ORPOTrainer(preferences.model(), None, optimizers.sgd(0.1), config)
  same = DPOTrainingConfig(algorithm="orpo", pbar_description=None, lambda_orpo=0.7)
  dpo = DPOTrainer(preferences.model(), None, optimizers.sgd(0.1), same)
  metrics = orpo.eval_step(batch)
  assert metrics == dpo.eval_step(batch)
  assert {"odds_ratio", "sft_loss", "or_loss"} <= metrics.keys()
  weaker = DPOTrainingConfig(algorithm="orpo", lambda_orpo=0.1, pbar_description=None)
  other = DPOTrainer(preferences.model(), None, optimizers.sgd(0.1), weaker).eval_step(
    batch
  )
  assert other["loss"] != metrics["loss"]
  with pytest.raises(ValueError, match="loss is 'sigmoid'"):
    ORPOTrainer(preferences.model(), None, optimizers.sgd(0.1), DPOTrainingConfig())


# The reference.


def test_a_full_model_needs_a_reference_or_says_that_it_has_none():
  with pytest.raises(ValueError, match=r"pass ref_model=.*reference_free=True"):
    preferences.trainer()
  with pytest.raises(ValueError, match="ref_model is the model itself"):
    preferences.trainer(model := preferences.model(), model)
  assert preferences.trainer(reference_free=True).eval_step(preferences.pairs())
  for loss in ("simpo", "cpo", "orpo"):
    assert preferences.trainer(loss=loss).eval_step(preferences.pairs())


class Around(nnx.Module):
  def __init__(self, inner):
    self.inner = inner


def test_a_reference_that_shares_what_is_trained_is_refused():
  for rank in (0, 2):
    model = preferences.model(lora_rank=rank)
    for ref in (model, nnx.merge(*nnx.split(model)), Around(model)):
      with pytest.raises(ValueError, match="shares its trained Variables"):
        preferences.trainer(model, ref)
    preferences.trainer(model, nnx.clone(model))
  graph, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
  zeros = jax.tree.map(jnp.zeros_like, adapters)
  preferences.trainer(model, nnx.merge(graph, zeros, frozen))  # shares the frozen ones


def test_the_reference_of_adapters_is_the_model_below_them():
  """And stays so while the adapters learn."""
  batch = preferences.pairs()
  adapted = preferences.model(0, lora_rank=2)  # its adapters are not zero
  base = preferences.model(0)
  t = preferences.trainer(adapted)
  for _ in range(2):
    want, _, _ = hand_dpo(adapted, base, batch, 0.1)
    np.testing.assert_allclose(t.train_step(batch), want, rtol=1e-4)


def test_the_reference_of_adapters_costs_no_memory():
  model = lora.apply(preferences.model(embed_dim=128), toys.default_lora())
  size = tree.size_bytes(nnx.state(model, nnx.Param))
  adapters = tree.size_bytes(nnx.state(model, nnx.LoRAParam))
  assert adapters < size / 10
  batch, before = preferences.pairs(), sum(live_array_bytes().values())
  t = preferences.trainer(model)
  t.train_step(batch)
  t._prepare_inputs(t._read(batch))
  grown = sum(live_array_bytes().values()) - before
  assert grown < 3 * adapters + 20_000, grown  # copies of the adapters, the batch
  with_two = preferences.trainer(
    preferences.model(embed_dim=128), preferences.model(1, embed_dim=128)
  )
  del with_two
  below = t._reference.model(t._module, None)
  theirs = {id(x) for x in jax.tree.leaves(t._module.frozen)}
  assert {id(x) for x in jax.tree.leaves(nnx.state(below, nnx.Param))} <= theirs


def test_the_reference_is_left_alone_and_runs_without_dropout():
  ref = preferences.model(1)
  before = trainers.leaves(ref)
  t = preferences.trainer(preferences.model(), ref)
  t.train([preferences.pairs()])
  assert trainers.equal(before, trainers.leaves(ref))


def test_references_live_on_their_own_mesh(mesh_fsdp8, mesh_fsdp4_tp2):
  batch = preferences.pairs(rows=8)
  want = preferences.trainer(preferences.model(), preferences.model(1)).eval_step(
    batch
  )["loss"]
  from tunix.models.automodel import AutoModel

  ref = AutoModel.from_config(toys.config(num_layers=1), seed=1, mesh=mesh_fsdp4_tp2)
  alone = preferences.trainer(preferences.model(), ref)
  assert alone.eval_step(batch)["loss"] == pytest.approx(want, rel=1e-5)
  with jax.set_mesh(mesh_fsdp8):
    for reference in (ref, preferences.model(1)):
      t = preferences.trainer(preferences.model(), reference)
      assert t.eval_step(batch)["loss"] == pytest.approx(want, rel=1e-5)


def test_no_logits_array():
  """The step's temporaries are less than one [2B, R, V] of floats, which no buffer is.
  (Blocks of logits are of 256 MiB at most; compiled, not run.)"""
  vocab, rows, response = 2**16, 16, 128
  model = preferences.model(vocab_size=vocab, lora_rank=2)
  batch = preferences.pairs(rows=rows, prompt=8, response=response)
  t = preferences.trainer(model, reference_free=True)
  plan = t.lower_train_step(batch).compile()
  whole = 2 * rows * response * vocab * 4
  assert plan.memory_analysis().temp_size_in_bytes < 0.75 * whole
  for shape in (f"[{2 * rows},{response},{vocab}]", f"[{2 * rows * response},{vocab}]"):
    assert shape not in plan.as_text()


# Arguments.


@pytest.mark.parametrize(
  ("kind", "options", "message"),
  [
    (PreferenceConfig, {"loss": "dpo"}, "unknown pair loss 'dpo'"),
    (PreferenceConfig, {"beta": 0.0}, "beta=0.0 must be positive"),
    (PreferenceConfig, {"options": {"gamma": 1}}, "takes no gamma"),
    (
      PreferenceConfig,
      {"options": {"beta": 1.0}},
      r"options hold 'beta'.*beta=1.0",
    ),
    (
      PreferenceConfig,
      {"options": {"label_smoothing": 0.1}},
      "options hold 'label_smoothing'",
    ),
    (
      ORPOTrainingConfig,
      {"options": {"lambda_orpo": 1.0}},
      "options hold 'lambda_orpo'",
    ),
    (
      PreferenceConfig,
      {"loss": "simpo", "reference_free": True},
      "reference_free is True",
    ),
    (PreferenceConfig, {"max_prompt_length": 8}, "max_prompt_length is 8"),
    (
      PreferenceConfig,
      {"max_prompt_length": 0, "max_response_length": 8},
      "max_prompt_length is 0",
    ),
    (PreferenceConfig, {"bad_rows": "drop"}, "bad_rows is 'drop'"),
    (DPOTrainingConfig, {"algorithm": "kto"}, "algorithm is 'kto'"),
    (DPOTrainingConfig, {"algorithm": "orpo", "loss": "ipo"}, "algorithm is 'orpo'"),
  ],
)
def test_settings_are_checked(kind, options, message):
  with pytest.raises(ValueError, match=message):
    kind(**options)


def test_wrong_calls_are_named():
  with pytest.raises(TypeError, match="training_config is a KTOConfig"):
    DPOTrainer(
      preferences.model(), preferences.model(1), optimizers.sgd(0.1), KTOConfig()
    )
  t = preferences.trainer(ref=preferences.model(1))
  with pytest.raises(TypeError, match="train_step takes one argument"):
    t.train_step(preferences.model(), preferences.pairs())


def test_a_reference_that_nothing_uses_is_said(caplog):
  t = PreferenceTrainer(
    preferences.model(),
    preferences.model(1),
    optimizers.sgd(0.1),
    PreferenceConfig(loss="simpo"),
  )
  assert "ref_model is not used" in caplog.text and t._reference is None
