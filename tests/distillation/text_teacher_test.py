"""A teacher with another tokenizer: what it reads, its scores, the loss."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import drills, toys, toys_text
from tests.distillation import trainers
from tests.sft import trainers as sft
from tunix.distillation import prompts as prompts_lib
from tunix.distillation.alignment import Reading
from tunix.distillation.outputs import Labels
from tunix.distillation.strategies import LogitStrategy, PolicyGradientStrategy
from tunix.distillation.strategies.policy_gradient import SpanScores
from tunix.distillation.teachers import TextTeacher
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.ops import reductions

TEXTS = {"prompts": ["the", "sea is", "a", "how many"]}
TEXTS["teacher_prompts"] = TEXTS["prompts"]
OWN: dict[str, Any] = {"max_teacher_prompt_length": 10}


class Letters:
  """Every id is a letter, in an order of its own; id 1 is the end."""

  def __init__(self, order: Any = range(toys.VOCAB)):
    self._letters = [chr(0x20 + i) for i in order]
    self._ids = {x: i for i, x in enumerate(self._letters) if i != 1}
    self.vocab_size = toys.VOCAB

  def encode(self, text):
    return [self._ids[letter] for letter in text if letter in self._ids]

  def decode(self, ids):
    return "".join(self._letters[i] for i in ids if i != 1)

  def bos_id(self):
    return None

  def eos_id(self):
    return 1

  def pad_id(self):
    return None


def reordered(model, order):
  """The model whose id i is the id order[i] of the given one."""
  out = nnx.clone(model)
  for variable in jax.tree.leaves(
    nnx.state(out, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)
  ):
    axes = [axis for axis, size in enumerate(variable.shape) if size == toys.VOCAB]
    if axes:
      variable.set_value(jnp.take(variable[...], jnp.asarray(order), axes[0]))
  return out


def test_other_ids_for_the_same_tokens_change_nothing():
  """Spans are then single tokens, and the gradient is that without an alignment."""
  order = np.random.default_rng(0).permutation(toys.VOCAB)
  order = np.asarray([0, 1, *(i for i in order if i > 1)])
  same, known = Letters(), trainers.teacher()
  other = TextTeacher(model=reordered(known, order), tokenizer=Letters(order))
  assert np.any(same.encode("sea") != Letters(order).encode("sea"))
  got = [
    drills.gradients(
      trainers.on_policy(
        PolicyGradientStrategy(), known=teacher, tokenizer=same, **own
      ),
      [TEXTS if own else {"prompts": TEXTS["prompts"]}],
    )
    for teacher, own in ((known, {}), (other, OWN))
  ]
  drills.assert_same_gradients(got[1], got[0])


def pair():
  """(tokenizer of the student, TextTeacher) whose tokens differ."""
  teacher = TokenizerAdapter(toys_text.metaspace(), bos_token="<s>", eos_token="</s>")
  return toys_text.chat_tokenizer("chatml"), TextTeacher(
    model=trainers.fresh_student(1, vocab_size=teacher.vocab_size), tokenizer=teacher
  )


def aligned(**config):
  tokenizer, teacher = pair()
  student = trainers.fresh_student(vocab_size=tokenizer.vocab_size)
  return trainers.on_policy(
    PolicyGradientStrategy(),
    student=student,
    known=teacher,
    tokenizer=tokenizer,
    **OWN | config,
  )


def test_scores_of_spans_are_sums_of_the_teachers_tokens():
  t = aligned()
  teacher = t.teacher_model
  given = TEXTS | {"completions": ["river runs", "two", "sings é", "seven days"]}
  t._evaluating = True  # takes the completions of the batch
  with t._session():
    (ready,), _ = t._ready([t._read(given)], 0)
  rows, mask, out = ready.batch["input_tokens"], ready.batch["input_mask"], []
  for row in range(4):
    start = int(np.flatnonzero(mask[row])[0])
    ids = rows[row, start : start + 6][: np.flatnonzero(mask[row])[-1] + 1 - start]
    assert t._alignment is not None
    reading = t._alignment.read(ids)
    prompt = teacher.tokenizer.tokenize(TEXTS["prompts"][row], add_eos=False).tolist()
    words = trainers.logps(teacher.model, prompt, reading.ids)
    scores = words[np.arange(len(reading.ids)), reading.ids]
    for place, number in enumerate(reading.student_spans, start):
      if mask[row, place]:
        is_last = number not in reading.student_spans[place + 1 - start :]
        want = is_last * scores[reading.teacher_spans == number].sum()
        assert ready.teacher_output.logps[row, place - 1] == pytest.approx(want, 1e-4)
        out.append(number)
  assert len(out) > 12 and len(set(out)) > 2


def test_rows_by_hand():
  """A prompt of 2 tokens is 1 to the teacher. A span that is cut is not trained."""
  batch = prompts_lib.Prompts(
    prompt_ids=np.asarray([[0, 5, 6]]),
    prompt_mask=np.asarray([[0, 1, 1]]),
    completion_ids=np.asarray([[7, 8, 9, 7]]),
    completion_mask=np.asarray([[1, 1, 1, 1]]),
    teacher_prompt_ids=np.asarray([[3]]),
    teacher_prompt_mask=np.asarray([[1]]),
  )
  spans = [np.asarray(x) for x in ([11, 12, 13], [0, 1, 1], [0, 0, 1, 1])]
  rows, seen, ends = prompts_lib.spanned(batch, [Reading(*spans)], 3)
  assert rows["input_tokens"].tolist() == [[5, 6, 7, 8, 9, 7, 0]]
  assert rows["input_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 0]]
  assert ends.tolist() == [[0, 2, 2, 4, 4, 5, 6]]
  assert seen["input_tokens"].tolist() == [[3, 11, 12, 13]]
  assert seen[prompts_lib.SPAN_ENDS].tolist() == [[0, 2, 2, 3]]
  assert seen[prompts_lib.PLACES][0, 1:5].tolist() == [0, 0, 2, 2]
  rows, seen, _ = prompts_lib.spanned(batch, [Reading(*spans)], 2)
  assert seen["input_tokens"].tolist() == [[3, 11, 12]]
  assert rows["input_mask"].tolist() == [[0, 0, 1, 1, 0, 0, 0]]


def test_the_loss_by_hand():
  """Tokens 0 and 1 are one span, token 2 another; token 3 is not trained.

  A(0, 1) = -1 - (-0.5 - 0.75) = 0.25, A(2) = -2 - (-1) = -1. The loss is
  -(0.25 * -0.5 + 0.25 * -0.75 - 1 * -1) / 3 = -0.6875 / 3, its gradient -A / 3, and
  the metric -(0.25 - 1) / 3 = 0.25.
  """
  student = jnp.asarray([[-0.5, -0.75, -1.0, -9.0]])
  scores = SpanScores(
    jnp.asarray([[0.0, -1.0, -2.0, -7.0]]), jnp.asarray([[1, 1, 2, 3]])
  )
  labels = Labels(None, jnp.asarray([[1.0, 1.0, 1.0, 0.0]]))
  strategy = PolicyGradientStrategy()
  (loss, metrics), gradient = jax.value_and_grad(
    lambda x: strategy.compute_loss(x, scores, labels), has_aux=True
  )(student)
  assert float(loss) == pytest.approx(-0.6875 / 3)
  np.testing.assert_allclose(gradient, [[-0.25 / 3, -0.25 / 3, 1 / 3, 0]], rtol=1e-6)
  assert float(metrics["distill/reverse_kl"]) == pytest.approx(0.25)
  loss, _ = strategy.compute_eval_loss(student, scores, labels)
  assert float(loss) == pytest.approx(0.25)


def test_sums_of_spans_by_hand():
  values = jnp.asarray([[1.0, 2.0, 4.0, 8.0, 1e30], [1.0, 2.0, 4.0, 8.0, 16.0]])
  ends = jnp.asarray([[2, 2, 2, 3, 4], [0, 4, 4, 4, 4]])
  got = jax.jit(reductions.span_sums)(values, ends)
  assert got.tolist() == [[7, 7, 7, 8, pytest.approx(1e30)], [1, 30, 30, 30, 30]]


def test_the_expected_gradient_is_that_of_the_reverse_kl_of_a_span():
  """All completions of two tokens, each of which is one token of the teacher."""
  rng = np.random.default_rng(0)
  theta = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
  teacher = jax.nn.log_softmax(jnp.asarray(rng.normal(size=9), jnp.float32))
  first, second = np.divmod(np.arange(9), 3)
  placed = jnp.stack([jnp.zeros(9), teacher], axis=1)
  scores = SpanScores(placed, jnp.ones((9, 2), jnp.int32))

  def logps(theta):
    words = jax.nn.log_softmax(theta)
    return jnp.stack([words[3, first], words[first, second]], axis=1)

  def loss(theta):
    scored = logps(theta)
    chances = jnp.exp(jax.lax.stop_gradient(scored).sum(1, keepdims=True))
    labels = Labels(None, jnp.tile(chances, 2))
    return PolicyGradientStrategy().compute_loss(scored, scores, labels)[0]

  def reverse_kl(theta):
    q = logps(theta).sum(1)
    return jnp.sum(jnp.exp(q) * (q - teacher)) / 2  # per token

  got, want = jax.grad(loss)(theta), jax.grad(reverse_kl)(theta)
  np.testing.assert_allclose(got, want, atol=1e-6)
  step = 1e-2 * jnp.zeros_like(theta).at[3, 1].set(1.0)
  slope = (reverse_kl(theta + step) - reverse_kl(theta - step)) / 2e-2
  assert abs(slope) > 1e-2 and float(got[3, 1]) == pytest.approx(float(slope), 1e-2)


@pytest.mark.slow
def test_micro_batches_and_a_mesh_have_the_gradient_of_the_whole(mesh_fsdp8):
  more = [*TEXTS["prompts"], "it", "two", "you", "is"]
  whole = {"prompts": more, "teacher_prompts": more[::-1]}
  half = [{k: x[i : i + 4] for k, x in whole.items()} for i in (0, 4)]
  want = drills.gradients(aligned(), [whole])
  split = aligned(gradient_accumulation_steps=2)
  drills.assert_same_gradients(drills.gradients(split, half), want)
  with jax.set_mesh(mesh_fsdp8):
    drills.assert_same_gradients(drills.gradients(aligned(), [whole]), want)


@pytest.mark.slow
def test_going_on_from_a_checkpoint_is_the_same(tmp_path):
  finals = []
  for folder, parts in (("whole", [3]), ("cut", [2, 3])):
    for steps in parts:
      t = aligned(max_steps=steps, checkpoint_root_directory=str(tmp_path / folder))
      t.train([TEXTS for _ in range(3)])
      finals.append(sft.leaves(t.model))
      t.close()
  assert sft.equal(finals[0], finals[2]) and not sft.equal(finals[0], finals[1])


def test_what_cannot_be_aligned_is_refused():
  tokenizer, teacher = pair()
  options: dict[str, Any] = {"known": teacher, "tokenizer": tokenizer}
  options["student"] = trainers.fresh_student(vocab_size=tokenizer.vocab_size)
  with pytest.raises(
    ValueError, match=r"strategy is LogitStrategy .* a TextTeacher. Use Pol"
  ):
    trainers.on_policy(LogitStrategy(), **options, **OWN)
  with pytest.raises(ValueError, match=r"a TextTeacher, which .*_prompt_length None"):
    trainers.on_policy(PolicyGradientStrategy(), **options)
  t = aligned()
  with pytest.raises(ValueError, match="1 prompt and no teacher_prompts"):
    t._read({"prompts": [[5, 6]]})
  read = t._read({"prompts": [[5, 6]], "teacher_prompts": ["a sea"]})
  assert read.teacher_prompt_ids is not None
  own = teacher.tokenizer.tokenize("a sea", add_eos=False).tolist()
  assert read.teacher_prompt_ids[0, -len(own) :].tolist() == own
