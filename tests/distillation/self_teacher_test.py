"""A teacher that reads more, that is the student, or that is one of several."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import drills, toys
from tests.distillation import trainers
from tests.sft import trainers as sft
from tunix.distillation.strategies import (
  FeatureProjectionStrategy,
  LogitStrategy,
  PolicyGradientStrategy,
)
from tunix.distillation.teachers import SelfTeacher, Teachers
from tunix.models.transformer.decoder_layer import DecoderLayer
from tunix.sft import averages

HINTED: dict[str, Any] = {"max_teacher_prompt_length": 12}
WHOLE: dict[str, Any] = {"divergence": "reverse_kl", "alpha": 1.0, "temperature": 1.0}


def batch(rows: int = 4, **columns):
  """Prompts with completions; the teacher reads a longer prompt, with other ids."""
  rng = np.random.default_rng(7)
  given = trainers.prompts(rows=rows)
  hint = lambda: rng.integers(1, toys.VOCAB, rng.integers(1, 5)).tolist()
  own = [hint() + prompt for prompt in given["prompts"]]
  return given | {"teacher_prompts": own} | columns


def reverse_kl(student, teacher, given) -> float:
  """Mean of KL(student, teacher) over all tokens of the completions."""
  values = []
  for prompt, own, completion in zip(
    given["prompts"], given["teacher_prompts"], given["completions"]
  ):
    q, p = (
      trainers.logps(student, prompt, completion),
      trainers.logps(teacher, own, completion),
    )
    values += jnp.sum(jnp.exp(q) * (q - p), -1).tolist()
  return float(np.mean(values))


@pytest.mark.parametrize(
  ("known", "top_k"),
  [
    (None, 0),  # compared by its hidden states
    (SelfTeacher(weights="current"), toys.VOCAB),
    (SelfTeacher(), 0),
  ],
)
def test_the_teacher_reads_its_own_prompt(known, top_k):
  student = trainers.fresh_student()
  teacher = trainers.teacher() if known is None else student
  t = trainers.on_policy(
    LogitStrategy(**WHOLE, distill_top_k=top_k),
    student=student,
    known=teacher if known is None else known,
    on_policy_fraction=0.0,
    **HINTED,
  )
  want = reverse_kl(student, teacher, batch())
  assert want > 1e-4
  np.testing.assert_allclose(t.train_step(batch()), want, rtol=2e-4)


def test_a_policy_gradient_takes_the_teachers_own_prompt():
  """log p of the student's samples, at the places of the student's rows."""
  student = trainers.fresh_student()
  t = trainers.on_policy(
    PolicyGradientStrategy(),
    student=student,
    known=SelfTeacher(weights="current"),
    **HINTED,
  )
  given = batch()
  with t._session():
    (ready,), _ = t._ready([t._read(given)], 0)
  rows, mask = ready.batch["input_tokens"], ready.batch["input_mask"]
  for row, (prompt, own) in enumerate(zip(given["prompts"], given["teacher_prompts"])):
    completion = rows[row][mask[row] > 0].tolist()
    words = trainers.logps(student, own, completion)
    want = words[np.arange(len(completion)), np.asarray(completion)]
    start = len(prompt) - 1
    got = ready.teacher_output[row, start : start + len(completion)]
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_teacher_reads_its_own_rows_of_a_batch():
  """Two teachers: each row has the output of its own, at every position."""
  models = {"sums": trainers.teacher(1), "words": trainers.teacher(2)}
  names = ["words", "sums", "words", "words"]
  outs = {}
  for own in (names, ["sums"] * 4, ["words"] * 4):
    t = trainers.on_policy(
      LogitStrategy(**WHOLE, distill_top_k=5),
      known=Teachers(models),
      on_policy_fraction=0.0,
    )
    given = trainers.prompts() | {"teachers": own}
    with t._session():
      (ready,), _ = t._ready([t._read(given)], 0)
    outs[own[0], own[1]] = ready.teacher_output
  for part in range(2):  # ids and log-probabilities
    got = outs["words", "sums"][part]
    for row, name in enumerate(names):
      np.testing.assert_array_equal(got[row], outs[name, name][part][row])
  assert np.any(outs["sums", "sums"][0] != outs["words", "words"][0])


@pytest.mark.slow
@pytest.mark.parametrize(
  "known",
  [
    SelfTeacher(),
    Teachers({"a": trainers.fresh_student(3), "b": trainers.fresh_student(4)}),
  ],
)
def test_micro_batches_and_a_mesh_have_the_gradient_of_the_whole(known, mesh_fsdp8):
  whole = batch(8, teachers=["a", "b"] * 4)
  half = [{k: x[i : i + 4] for k, x in whole.items()} for i in (0, 4)]

  def gradients(batches):
    t = trainers.on_policy(
      LogitStrategy(**WHOLE, distill_top_k=9),
      known=known,
      gradient_accumulation_steps=len(batches),
      **HINTED,
    )
    return drills.gradients(t, batches)

  want = gradients([whole])
  drills.assert_same_gradients(gradients(half), want)
  if isinstance(known, SelfTeacher):
    with jax.set_mesh(mesh_fsdp8):
      drills.assert_same_gradients(gradients([whole]), want)


def test_the_average_by_hand():
  """average += rate (new - average), from the first weights, in float32."""
  tx = averages.averaging(optax.sgd(1.0), 0.25)
  params = {"w": jnp.asarray([1.0, 2.0], jnp.bfloat16)}
  state = tx.init(params)
  assert averages.average_of(state)["w"].dtype == jnp.float32
  want = np.asarray([1.0, 2.0])
  for _ in range(2):
    updates, state = tx.update({"w": jnp.ones(2, jnp.bfloat16)}, state, params)
    params = optax.apply_updates(params, updates)
    new: Any = params
    want = want + 0.25 * (np.asarray(new["w"], np.float32) - want)
    average = averages.average_of(state)["w"]
    np.testing.assert_array_equal(average, want)
  with pytest.raises(ValueError, match="averaging"):
    averages.average_of(optax.sgd(1.0).init(params))
  with pytest.raises(ValueError, match="rate is 2"):
    averages.averaging(optax.sgd(1.0), 2.0)


@pytest.mark.parametrize("rate", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_an_average_of_rate_0_stays_and_of_rate_1_follows(rate):
  """Rate 1 is the teacher "current", and rate 0 the student before its first step."""
  student = trainers.fresh_student()
  t = trainers.on_policy(
    LogitStrategy(**WHOLE, distill_top_k=9),
    student=student,
    known=SelfTeacher(rate=rate),
    on_policy_fraction=0.0,
    **HINTED,
  )
  t.train([batch()] * 2)
  wants = {1.0: sft.leaves(student), 0.0: sft.leaves(trainers.fresh_student())}
  assert sft.equal(sft.leaves(t._state.merged(average=True)), wants[rate])
  t.close()


@pytest.mark.slow
def test_going_on_from_a_checkpoint_has_the_same_average(tmp_path):
  finals = []
  for folder, parts in (("whole", [3]), ("cut", [2, 3])):
    for steps in parts:
      t = trainers.on_policy(
        PolicyGradientStrategy(),
        student=trainers.fresh_student(),
        known=SelfTeacher(rate=0.3),
        max_steps=steps,
        checkpoint_root_directory=str(tmp_path / folder),
        **HINTED,
      )
      t.train([batch() for _ in range(3)])
      average = sft.leaves(t._state.merged(average=True))
      finals.append({"average": average, "model": sft.leaves(t.model)})
      t.close()
  whole, two, three = finals
  assert all(sft.equal(whole[name], three[name]) for name in whole)
  assert not sft.equal(whole["average"], two["average"])


@pytest.mark.parametrize(
  ("given", "says"),
  [
    ({"known": SelfTeacher()}, "max_teacher_prompt_length None"),
    (
      {"strategy": FeatureProjectionStrategy(feature_layer=DecoderLayer), **HINTED},
      "strategy is FeatureProjectionStrategy",
    ),
  ],
)
def test_a_teacher_that_cannot_be_compared_is_refused(given, says):
  strategy = given.pop("strategy", None) or LogitStrategy(**WHOLE)
  with pytest.raises(ValueError, match=says):
    trainers.on_policy(strategy, **given)


def test_what_a_batch_lacks_is_refused():
  with pytest.raises(ValueError, match="weights is 'old'"):
    SelfTeacher(weights="old")  # pyright: ignore[reportArgumentType]
  with pytest.raises(ValueError, match="vocabulary sizes"):
    Teachers({})
  t = trainers.on_policy(LogitStrategy(**WHOLE), **HINTED)
  with pytest.raises(ValueError, match="4 prompts and no teacher_prompts"):
    t._read(trainers.prompts())
  with pytest.raises(ValueError, match="has 13 tokens"):
    t._read(trainers.prompts(rows=1) | {"teacher_prompts": [[1] * 13]})
  t = trainers.on_policy(
    LogitStrategy(**WHOLE), known=Teachers({"a": trainers.fresh_student(3)})
  )
  with pytest.raises(ValueError, match="no names of teachers"):
    t._read(trainers.prompts())
  with pytest.raises(ValueError, match="teacher 'b'; expected one of a"):
    t._read(trainers.prompts(rows=1) | {"teachers": ["b"]})
