"""On-policy: who writes, what is scored, and that a resumed run draws the same."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import drills, toys_text
from tests.distillation import trainers
from tests.generate.toy_ids import Ids
from tests.sft import trainers as sft
from tunix.distillation.on_policy_trainer import (
  OnPolicyConfig,
  OnPolicyDistillationTrainer,
)
from tunix.distillation.outputs import Labels
from tunix.distillation.strategies import LogitStrategy, PolicyGradientStrategy
from tunix.generate.drawing.params import SamplingParams
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter

GKD = {"divergence": "jsd", "beta": 0.5, "alpha": 1.0, "temperature": 1.0}


def rows_of(t, *batches):
  """The rows that a step would train on."""
  with t._session():
    ready, _ = t._ready([t._read(batch) for batch in batches], 0)
  return [taught.batch for taught in ready]


def test_rows_are_prompt_and_completion_side_by_side():
  t = trainers.on_policy(LogitStrategy(**GKD), on_policy_fraction=0.0)
  given = {"prompts": [[1, 2, 3], list(range(1, 13))], "completions": [[7, 8], [9]]}
  (rows,) = rows_of(t, given)
  assert rows["input_tokens"].shape == (2, 14)
  assert rows["input_tokens"][0].tolist() == [1, 2, 3, 7, 8, *[0] * 9]
  assert rows["input_mask"][0].tolist() == [0, 0, 0, 1, 1, *[0] * 9]
  # Of a long prompt the end is kept.
  assert rows["input_tokens"][1].tolist() == [*range(5, 13), 9, *[0] * 5]


def read(tokenizer, prompt, completion, **limits):
  """(prompt, completion) as ids, of one row."""
  lengths = {"max_prompt_length": 40, "max_completion_length": 40, **limits}
  t = trainers.on_policy(
    LogitStrategy(**GKD), on_policy_fraction=0.0, tokenizer=tokenizer, **lengths
  )
  out = t._read({"prompts": [prompt], "completions": [completion]})
  assert out.completion_ids is not None and out.completion_mask is not None
  prompt, completion = (
    ids[mask > 0].tolist()
    for ids, mask in (
      (out.prompt_ids, out.prompt_mask),
      (out.completion_ids, out.completion_mask),
    )
  )
  return prompt, completion


def test_texts_are_the_tokens_that_fine_tuning_trains():
  """Of a tokenizer that puts a space before every text: there is none at the border."""
  adapter = TokenizerAdapter(toys_text.metaspace(), bos_token="<s>", eos_token="</s>")
  bos, eos = adapter.bos_id(), adapter.eos_id()
  prompt, completion = read(adapter, "The mi", "ller")
  assert prompt == [bos, *adapter.encode("The mi")]
  assert completion == [*adapter.encode_continuation("ller"), eos]
  assert adapter.encode_continuation("ller") != adapter.encode("ller")
  # Nothing that the text has already is doubled.
  assert read(adapter, "<s>The mi", "ller</s>") == (prompt, completion)
  # Of a long prompt the end is kept, behind BOS; of a long completion the beginning.
  cut = read(adapter, "The mi", "ller", max_prompt_length=2, max_completion_length=1)
  assert cut == ([bos, prompt[-1]], completion[:1])
  # Ids are taken as they are.
  assert read(adapter, "The mi", [7, 8]) == (prompt, [7, 8])
  assert read(adapter, [5, 6], [7, 8]) == ([5, 6], [7, 8])


def test_as_many_completions_as_prompts():
  t = trainers.on_policy(LogitStrategy(**GKD))
  with pytest.raises(ValueError, match="2 prompts and 1 completions"):
    t._read({"prompts": [[1], [2]], "completions": [[3]]})


def test_a_subclass_prepares_every_micro_batch_once():
  seen = []

  class Counting(OnPolicyDistillationTrainer):
    def _prepare_inputs(self, batch):
      seen.append(type(batch).__name__)
      return super()._prepare_inputs(batch)

  t = trainers.on_policy(
    LogitStrategy(**GKD),
    kind=Counting,
    on_policy_fraction=0.0,
    gradient_accumulation_steps=2,
  )
  with t._session():
    t._whole(trainers.prompts())
  assert seen == ["Prompts"] * 2


def test_the_student_writes_what_its_sampler_says():
  student = trainers.fresh_student()
  t = trainers.on_policy(
    LogitStrategy(**GKD), student=student, seed=3, sampling_temperature=0.7, top_k=9
  )
  batch = trainers.prompts()
  del batch["completions"]
  (rows,) = rows_of(t, batch)
  want = Sampler(student, Ids())(
    batch["prompts"],
    6,
    max_prompt_length=8,
    temperature=0.7,
    top_k=9,
    seed=jax.random.fold_in(jax.random.key(3), 0),
    include_eos=True,
  )
  for tokens, mask, right in zip(rows["input_tokens"], rows["input_mask"], want.tokens):
    assert tokens[mask > 0].tolist() == right.tolist()


def test_the_student_is_sampled_by_every_rule():
  rules = {"top_p": 0.9, "top_k": 9, "min_p": 0.2, "eos_tokens": (5,)}
  rules |= {"stop_strings": ("x",)}
  t = trainers.on_policy(LogitStrategy(**GKD), sampling_temperature=0.7, **rules)
  batch, seen = t._read({"prompts": [[1], [2]]}), {}

  def sampler(prompts, max_generation_steps, **options):
    seen.update(options)
    return types.SimpleNamespace(tokens=[np.ones(1, np.int32)] * len(prompts))

  t.sampler = sampler
  assert t._sampled(batch, step=0, first=4).completion_mask.sum() == 2
  assert seen.keys() >= SamplingParams().rules().keys()
  assert seen.items() >= {**rules, "temperature": 0.7, "first_prompt": 4}.items()


@pytest.mark.parametrize(
  "changes",
  [{"seed": 1}, {"sampling_temperature": 0.3}, {"top_k": 1}, {"top_p": 0.1}],
)
def test_options_change_what_is_written(changes):
  batch, rows = trainers.prompts(), []
  for options in ({}, changes):
    t = trainers.on_policy(LogitStrategy(**GKD), **options)
    rows.append(rows_of(t, batch)[0]["input_tokens"])
  assert np.any(rows[0] != rows[1])


def test_every_step_draws_anew_with_the_weights_of_that_step():
  student = trainers.fresh_student()
  t = trainers.on_policy(LogitStrategy(**GKD), student=student)
  seen = []
  t.with_gen_model_input_fn(lambda b: seen.append(b["input_tokens"]) or b)
  batch = trainers.prompts()
  t.train([batch, batch, batch])
  concrete = [x for x in seen if isinstance(x, np.ndarray)]
  assert len(concrete) == 3
  assert np.any(concrete[0] != concrete[1]) and np.any(concrete[1] != concrete[2])


def test_lambda_is_the_share_of_steps():
  t = trainers.on_policy(LogitStrategy(**GKD), on_policy_fraction=0.3)
  batches = [t._read(trainers.prompts())]
  share = np.mean([t._is_sampled(step, batches) for step in range(400)])
  assert 0.23 < share < 0.37
  again = trainers.on_policy(LogitStrategy(**GKD), on_policy_fraction=0.3)
  assert [again._is_sampled(s, batches) for s in range(50)] == [
    t._is_sampled(s, batches) for s in range(50)
  ]


def test_off_policy_steps_need_completions():
  t = trainers.on_policy(LogitStrategy(**GKD), on_policy_fraction=0.5)
  with pytest.raises(ValueError, match="no completions"):
    t.train([{"prompts": [[1, 2]]}])
  with pytest.raises(ValueError, match="without prompts"):
    t.train([{"completions": [[1, 2]]}])


@pytest.mark.parametrize("make", [lambda: LogitStrategy(**GKD), PolicyGradientStrategy])
def test_micro_batches_draw_what_the_whole_draws(make):
  whole = trainers.prompts(rows=8)
  half = [{k: x[i : i + 4] for k, x in whole.items()} for i in (0, 4)]
  got = [
    drills.gradients(trainers.on_policy(make(), gradient_accumulation_steps=n), batches)
    for n, batches in ((1, [whole]), (2, half))
  ]
  drills.assert_same_gradients(got[1], got[0])


def test_a_step_cuts_lists_and_texts_into_micro_batches(monkeypatch):
  """Into what the loop would get as micro-batches."""
  whole = {"prompts": ["1 2", "3", "4 5", "6"], "completions": [[7], [8], [9], [1, 2]]}
  seen = []
  t = trainers.on_policy(
    LogitStrategy(**GKD),
    on_policy_fraction=0.0,
    gradient_accumulation_steps=2,
  )
  monkeypatch.setattr(t, "_learn", lambda window, skip_jit: seen.append(window))
  t.train_step(whole)
  parts = [{k: x[i : i + 2] for k, x in whole.items()} for i in (0, 2)]
  (group,) = seen[0].groups
  for got, want in zip(group.batches, rows_of(t, *parts), strict=True):
    for name, array in want.items():
      np.testing.assert_array_equal(got.batch[name], array)


def test_on_a_mesh(mesh_fsdp8):
  batch = trainers.prompts(rows=8)
  want = drills.gradients(trainers.on_policy(LogitStrategy(**GKD)), [batch])
  with jax.set_mesh(mesh_fsdp8):
    got = drills.gradients(trainers.on_policy(LogitStrategy(**GKD)), [batch])
  drills.assert_same_gradients(got, want)


def test_an_evaluation_takes_completions_where_there_are_some():
  t = trainers.on_policy(LogitStrategy(**GKD))
  batch = trainers.prompts()
  given = t.eval_step(batch)["loss"]
  del batch["completions"]
  written = t.eval_step(batch)["loss"]
  assert given != written
  assert written == t.eval_step(batch)["loss"]  # draws the same every time


def test_policy_gradient_by_hand():
  """log q = log(1/2), log p = log(1/4) at the one token that counts: A = -log 2."""
  q = jnp.log(jnp.asarray([[0.5, 0.3]]))
  p = jnp.log(jnp.asarray([[0.25, 0.9]]))
  labels = Labels(jnp.zeros((1, 2), jnp.int32), jnp.asarray([[1.0, 0.0]]))
  strategy = PolicyGradientStrategy()
  value, pull = jax.jit(
    jax.value_and_grad(lambda q: strategy.compute_loss(q, p, labels)[0])
  )(q)
  np.testing.assert_allclose(value, np.log(2) * np.log(0.5), rtol=1e-6)
  np.testing.assert_allclose(pull, [[np.log(2), 0.0]], rtol=1e-6)
  _, metrics = strategy.compute_loss(q, p, labels)
  np.testing.assert_allclose(metrics["distill/reverse_kl"], np.log(2), rtol=1e-6)
  loss, _ = strategy.compute_eval_loss(q, p, labels)
  np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)


def test_its_expected_gradient_is_that_of_the_reverse_kl():
  """Summed over all words with their probabilities, at one position."""
  from tunix.ops import distill
  from tunix.ops.distill import Divergence

  q, p = 2 * jax.random.normal(jax.random.key(0), (2, 7))
  labels = Labels(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
  probability = jax.nn.softmax(q)

  def expected(q):
    pairs = [jax.nn.log_softmax(x)[:, None, None] for x in (q, p)]
    strategy = PolicyGradientStrategy()
    losses = jax.vmap(lambda q, p: strategy.compute_loss(q, p, labels)[0])(*pairs)
    return jnp.sum(probability * losses)

  how = Divergence("reverse_kl")
  want = jax.jit(jax.grad(lambda q: distill.divergence(q, p, how)))(q)
  np.testing.assert_allclose(jax.jit(jax.grad(expected))(q), want, atol=1e-6)


@pytest.mark.parametrize(
  "changes",
  [
    {"on_policy_fraction": 0.5},
    {"sampling_temperature": 0.7},
    {"top_k": 5},
    {"min_p": 0.5},
  ],
)
def test_a_policy_gradient_of_other_peoples_tokens_is_refused(changes):
  with pytest.raises(ValueError, match="student's distribution"):
    trainers.on_policy(PolicyGradientStrategy(), **changes)
  right = PolicyGradientStrategy(temperature=0.7)
  trainers.on_policy(right, sampling_temperature=0.7)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"max_prompt_length": 0}, "max_prompt_length"),
    ({"on_policy_fraction": 1.5}, "on_policy_fraction is 1.5"),
    ({"sampling_temperature": 0.0}, "above 0"),
  ],
)
def test_nonsense_is_refused(changes, says):
  lengths = {"max_prompt_length": 8, "max_completion_length": 6}
  with pytest.raises(ValueError, match=says):
    OnPolicyConfig(**{**lengths, **changes})
  with pytest.raises(TypeError, match="OnPolicyConfig"):
    OnPolicyDistillationTrainer(
      trainers.fresh_student(), trainers.teacher(), LogitStrategy(), tokenizer=Ids()
    )


def test_going_on_from_a_checkpoint_draws_the_same(tmp_path):
  batches = [trainers.prompts(seed) for seed in range(4)]
  finals = []
  for folder, parts in (("whole", [4]), ("cut", [2, 4])):
    for steps in parts:
      t = trainers.on_policy(
        LogitStrategy(**GKD),
        max_steps=steps,
        on_policy_fraction=0.7,
        checkpoint_root_directory=str(tmp_path / folder),
      )
      t.train(batches)
      t.close()
    finals.append(sft.leaves(t.model))
  assert sft.equal(*finals)
