"""Divergences of distributions by hand, by their properties, and against TRL."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops import distill, policy_gradient
from tunix.ops.distill import Divergence

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
TRL = dict(np.load(GOLDEN / "trl_gkd.npz"))
CASES = [tuple(case) for case in TRL["cases"]]
ALL = [
  Divergence("forward_kl", None, 2.0),
  Divergence("reverse_kl", None, 0.7),
  Divergence("jsd", 0.3, 1.5),
]


def logits(seed: int, *shape: int) -> jax.Array:
  return 2 * jax.random.normal(jax.random.key(seed), shape)


def test_forward_and_reverse_by_hand():
  # p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4):
  # KL(p || q) = 1/2 log 2 - 1/4 log 2 = log(2) / 4, and the same the other way round.
  p, q = jnp.log(jnp.asarray([[2.0, 1, 1], [1, 2, 1]]))
  for name in ("forward_kl", "reverse_kl"):
    got = distill.divergence(q, p, Divergence(name))
    np.testing.assert_allclose(got, np.log(2) / 4, rtol=1e-6)
  # p = (3/4, 1/4), q = (1/2, 1/2), which tells them apart.
  p, q = jnp.log(jnp.asarray([[3.0, 1], [1, 1]]))
  forward = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
  reverse = 0.5 * np.log(2 / 3) + 0.5 * np.log(2)
  got = [distill.divergence(q, p, Divergence(n)) for n in ("forward_kl", "reverse_kl")]
  np.testing.assert_allclose(got, [forward, reverse], rtol=1e-6)


def test_jsd_by_hand():
  # p = (3/4, 1/4), q = (1/4, 3/4), beta = 1/4: m = 1/4 p + 3/4 q = (3/8, 5/8).
  p, q = jnp.log(jnp.asarray([[3.0, 1], [1, 3]]))
  to_p = 0.75 * np.log(2) + 0.25 * np.log(0.4)
  to_q = 0.25 * np.log(2 / 3) + 0.75 * np.log(1.2)
  got = distill.divergence(q, p, Divergence("jsd", 0.25))
  np.testing.assert_allclose(got, 0.25 * to_p + 0.75 * to_q, rtol=1e-6)


def test_temperature_divides_both_logits():
  s, t = logits(0, 4, 7), logits(1, 4, 7)
  got = distill.divergence(s, t, Divergence("forward_kl", None, 2.0))
  np.testing.assert_allclose(
    got, distill.divergence(s / 2, t / 2, Divergence("forward_kl")), rtol=1e-5
  )


@pytest.mark.parametrize("how", ALL, ids=lambda h: h.name)
def test_equal_distributions_have_none_and_others_some(how):
  s = logits(0, 4, 7)
  np.testing.assert_allclose(distill.divergence(s, s + 3.0, how), 0, atol=1e-6)
  assert np.all(distill.divergence(s, logits(1, 4, 7), how) > 1e-3)


def test_jsd_at_and_near_its_ends():
  s, t = logits(0, 4, 7), logits(1, 4, 7)
  for beta, end, name in ((1e-3, 0.0, "forward_kl"), (1 - 1e-3, 1.0, "reverse_kl")):
    want = distill.divergence(s, t, Divergence(name))
    near = distill.divergence(s, t, Divergence("jsd", beta)) / min(beta, 1 - beta)
    np.testing.assert_allclose(near, want, rtol=2e-2)
    exact = distill.divergence(s, t, Divergence("jsd", end))
    np.testing.assert_allclose(exact, want, rtol=1e-6)


def test_words_that_nobody_says_count_nothing():
  s = jnp.asarray([0.0, 1.0, -jnp.inf])
  t = jnp.asarray([1.0, 0.0, -jnp.inf])
  for how in ALL:
    got, gradient = jax.jit(
      jax.value_and_grad(lambda x, h=how: distill.divergence(x, t, h))
    )(s)
    want = distill.divergence(s[:2], t[:2], how)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert np.all(np.isfinite(gradient[:2]))
  assert distill.divergence(jnp.zeros(3), t, Divergence("reverse_kl")) > 1e20
  assert distill.divergence(jnp.zeros(3), t, Divergence("forward_kl")) < 10


def test_no_gradient_reaches_the_teacher():
  s, t = logits(0, 4, 7), logits(1, 4, 7)
  for how in ALL:
    pull = jax.jit(jax.grad(lambda t, h=how: jnp.sum(distill.divergence(s, t, h))))(t)
    assert not np.any(pull)


@pytest.mark.parametrize("how", ALL, ids=lambda h: h.name)
def test_pulls_are_the_gradient(how):
  s, t = logits(0, 4, 7), logits(1, 4, 7)
  found = distill.terms(jax.nn.log_softmax(t), jax.nn.log_softmax(s), how)
  q = jax.nn.softmax(s)
  got = found.pulls - q * jnp.sum(found.pulls, axis=-1, keepdims=True)
  plain = how._replace(temperature=1.0)
  want = jax.jit(jax.grad(lambda s: jnp.sum(distill.divergence(s, t, plain))))(s)
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_top_k_by_hand():
  # p = (1/2, 1/4, 1/8, 1/8), q = (1/4, 1/4, 1/4, 1/4), K = 1: events (1/2, 1/2) and
  # (1/4, 3/4): KL = 1/2 log 2 + 1/2 log(2/3).
  p = jnp.log(jnp.asarray([[[4.0, 2, 1, 1]]]))
  teacher = distill.top_k(p, 1)
  assert teacher.ids.tolist() == [[[0]]]
  got = distill.top_k_divergence(jnp.zeros((1, 1, 4)), teacher, Divergence())
  want = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
  np.testing.assert_allclose(got, [[want]], rtol=1e-6)


@pytest.mark.parametrize("how", ALL, ids=lambda h: h.name)
def test_top_k_grows_to_the_whole_divergence(how):
  s, t = logits(0, 2, 3, 9), logits(1, 2, 3, 9)
  full = distill.divergence(s, t, how)
  last = jnp.zeros(full.shape)
  for k in (1, 3, 6, 9):
    words = distill.top_k(t, k, how.temperature)
    found = distill.top_k_divergence(s, words, how)
    assert np.all(found >= last - 1e-6) and np.all(found <= full + 1e-6)
    last = found
  np.testing.assert_allclose(last, full, rtol=1e-5)


def test_a_rest_too_small_for_float32_stays_finite():
  s, t = jnp.zeros((1, 1, 4)), jnp.asarray([[[60.0, 0, 0, 0]]])
  for how in ALL:
    value, pull = jax.jit(
      jax.value_and_grad(
        lambda s, h=how: distill.top_k_divergence(s, distill.top_k(t, 1), h)[0, 0]
      )
    )(s)
    assert np.isfinite(value) and np.all(np.isfinite(pull))


@pytest.mark.parametrize(
  ("how", "says"),
  [
    (Divergence("kl"), "use one of"),
    (Divergence(temperature=0.0), "positive"),
    (Divergence("jsd"), "needs a beta"),
    (Divergence("forward_kl", 0.5), "take none"),
    (Divergence("jsd", 1.5), r"in \[0, 1\]"),
  ],
)
def test_nonsense_is_refused(how, says):
  with pytest.raises(ValueError, match=says):
    distill.divergence(jnp.zeros(3), jnp.zeros(3), how)


def test_different_vocabularies_are_refused():
  with pytest.raises(ValueError, match=r"student has 3 tokens .*teacher 4"):
    distill.divergence(jnp.zeros(3), jnp.zeros(4), Divergence())
  with pytest.raises(ValueError, match="k is 4"):
    distill.top_k(jnp.zeros((1, 1, 3)), 4)


def trl_form(case, given):
  """(loss, gradient) by our functions."""
  beta, temperature = map(float, case)
  how, mask = Divergence("jsd", beta, temperature), given["mask"]

  def loss(student):
    values = distill.divergence(student, jnp.asarray(given["teacher"]), how)
    return jnp.sum(values * mask) / mask.sum()

  return jax.jit(jax.value_and_grad(loss))(jnp.asarray(given["student"]))


def check_trl(got, want):
  for ours, theirs in zip(got, want):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_trl(number):
  want = TRL[f"loss/{number}"], TRL[f"gradient/{number}"]
  check_trl(trl_form(CASES[number], TRL), want)


def test_trl_cases_differ():
  losses = [float(TRL[f"loss/{i}"]) for i in range(len(CASES))]
  assert len(set(losses)) == len(losses)


def test_trl_live():
  pytest.importorskip("trl")
  spec = importlib.util.spec_from_file_location("gkd", GOLDEN / "make_trl_gkd.py")
  assert spec and spec.loader
  live = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(live)
  given = live.inputs(1)
  for case in live.CASES:
    check_trl(trl_form(case, given), live.loss(*case, given))


SELF = dict(np.load(GOLDEN / "trl_self.npz"))


def self_form(form: str, alpha: float, given) -> tuple[jax.Array, jax.Array]:
  """Loss and gradient of self-distillation, as a TRL function names them."""
  teacher = jnp.asarray(given["teacher"])
  names = {0.0: Divergence("forward_kl"), 1.0: Divergence("reverse_kl")}
  how = names.get(alpha, Divergence("jsd", alpha))

  def loss(student):
    if form == "whole":
      return jnp.mean(distill.divergence(student, teacher, how))
    if form == "top":
      return jnp.mean(distill.top_k_divergence(student, distill.top_k(teacher, 4), how))
    pick = lambda x: jnp.take_along_axis(
      jax.nn.log_softmax(x), jnp.asarray(given["tokens"])[..., None], -1
    )[..., 0]
    logps = pick(student)
    dense = jax.lax.stop_gradient(pick(teacher) - logps)
    return jnp.mean(policy_gradient.reinforce_loss(logps, dense))

  return jax.jit(jax.value_and_grad(loss))(jnp.asarray(given["student"]))


@pytest.mark.parametrize(
  "name", [name.removeprefix("loss/") for name in SELF if name.startswith("loss/")]
)
def test_self_distillation_of_trl(name):
  """SDFT's and SDPO's losses per token, and SDPO's policy gradient."""
  form, alpha = name.split("/")
  got = self_form(form, float(alpha), SELF)
  np.testing.assert_allclose(got[0], SELF[f"loss/{name}"], rtol=1e-5)
  np.testing.assert_allclose(got[1], SELF[f"gradient/{name}"], atol=1e-6)
