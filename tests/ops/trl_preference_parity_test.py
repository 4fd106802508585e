"""The same model, pairs and options give TRL's preference losses and gradients.

The figures of TRL are committed (golden/make_trl_preference.py made them); where TRL
itself is installed, fresh ones are made from other weights and tokens. The names of
TRL's options are translated here, and what it does otherwise is given explicitly:

- bco_pair has no reward shift in TRL: shift=0.
- ORPO's and CPO's likelihood is a mean over the tokens of the batch (ORPO's over the
  prompts' tokens too). On the `even` batch, with equally long chosen responses and
  prompts of one token, that is the papers' mean over sequences, which is ours.
- sigmoid has no label smoothing in TRL 1.16: unit tests alone have that of ours.
"""

import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tunix.generate.scoring import score_completions
from tunix.models.automodel import AutoModel
from tunix.ops import kto, preference, reward_loss
from tunix.utils import tree

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
FOLDER = GOLDEN / "trl_preference"
TRL = dict(np.load(FOLDER / "trl.npz"))
WRITTEN = json.loads((FOLDER / "cases.json").read_text())
CASES, REWARDS = WRITTEN["cases"], WRITTEN["rewards"]
TOLERANCE = 1e-5


class Ours:
  """A policy, its reference and batches, as our library runs them."""

  def __init__(self, folder, batch):
    self.folder, self.batch = folder, batch
    self.graph, self.policy = nnx.split(AutoModel.from_pretrained(folder / "policy"))
    self.reference = nnx.split(AutoModel.from_pretrained(folder / "reference"))[1]

  def part(self, name, part, shift=0):
    """(prompts, their mask, responses, their mask), responses from `shift` further."""
    get = lambda key: self.batch[f"{name}/{key}"]
    turn = lambda x: np.roll(x, -shift, axis=0)
    prompts = get("prompt_ids"), get("prompt_mask")
    return *prompts, turn(get(f"{part}_ids")), turn(get(f"{part}_mask"))

  def rows(self, name, shift=0):
    """Chosen responses, then rejected ones."""
    parts = [self.part(name, part, shift) for part in ("chosen", "rejected")]
    size = max(part[2].shape[1] for part in parts)
    pad = lambda x: np.pad(x, ((0, 0), (0, size - x.shape[1])))
    prompts, responses = [part[:2] for part in parts], [part[2:] for part in parts]
    responses = [tuple(map(pad, part)) for part in responses]
    stack = lambda two: tuple(map(np.concatenate, zip(*two, strict=True)))
    return stack(prompts) + stack(responses)

  @functools.cached_property
  def _run(self):
    def logps(state, rows):
      model = nnx.merge(self.graph, state)
      return jnp.sum(score_completions(model, *rows).logps, axis=1)

    def both(state, rows, slope):
      out, back = jax.vjp(lambda state: logps(state, rows), state)
      return out, back(slope)[0]

    return jax.jit(both)

  def logps(self, state, rows):
    return self._run(state, rows, np.zeros(len(rows[0]), np.float32))[0]

  def gradient(self, rows, loss):
    """(loss, gradient) of a function of the rows' log-probabilities."""
    value, slope = jax.jit(jax.value_and_grad(loss))(self.logps(self.policy, rows))
    return value, tree.flatten(self._run(self.policy, rows, slope)[1])

  def pairs(self, case):
    name, options = translated(case)
    rows = self.rows(case["batch"])
    ref = self.logps(self.reference, rows)
    lengths = jnp.asarray(rows[3].sum(1), jnp.float32)
    half = lambda x: (x[: len(x) // 2], x[len(x) // 2 :])

    def loss(logps):
      parts = (*half(logps), *half(ref), *half(lengths))
      scores = preference.PairScores(*parts, weights=jnp.ones_like(parts[0]))
      return jnp.mean(preference.pair_loss(name, scores, **options).values)

    return self.gradient(rows, loss)

  def single(self, case, labels):
    """KTO: z0 from the responses of the row after."""
    rows, others = self.rows(case["batch"]), self.rows(case["batch"], shift=1)
    ref = self.logps(self.reference, rows)
    ones = jnp.ones_like(ref)
    kl = kto.kl_estimate(
      self.logps(self.policy, others), self.logps(self.reference, others), ones
    )
    desirable = jnp.array(labels)
    loss = lambda x: jnp.mean(
      kto.kto_loss(x, ref, desirable, ones, kl=kl, **case["options"]).values
    )
    return self.gradient(rows, loss)

  def run(self, case, labels):
    if case["trainer"] == "kto":
      return self.single(case, labels)
    return self.pairs(case)


def translated(case):
  """(our name, our options) of a case of pairs."""
  options = dict(case["options"])
  if case["trainer"] == "orpo":
    return "orpo", {"lambda_orpo": options["beta"]}
  name = options.pop("loss_type")
  if case["trainer"] == "cpo":
    if name == "simpo":
      assert options.pop("cpo_alpha") == 0
      return name, {"gamma": options.pop("simpo_gamma"), **options}
    return "cpo", options
  (name,) = name
  if name == "bco_pair":
    options["shift"] = 0.0
  if "discopop_tau" in options:
    options["tau"] = options.pop("discopop_tau")
  return name, options


def check(got, loss, gradient, folder, scratch):
  """Compares with TRL's, whose gradient is read as if it were a model's weights."""
  np.testing.assert_allclose(got[0], loss, rtol=TOLERANCE)
  weights = safetensors.numpy.load_file(folder / "policy" / "model.safetensors")
  named, start = {}, 0
  for name in sorted(weights):
    shape, size = weights[name].shape, weights[name].size
    named[name] = gradient[start : start + size].reshape(shape)
    start += size
  assert start == len(gradient)
  safetensors.numpy.save_file(named, scratch / "model.safetensors")
  (scratch / "config.json").write_text((folder / "policy" / "config.json").read_text())
  want = tree.flatten(nnx.state(AutoModel.from_pretrained(scratch)))
  assert set(want) == set(got[1])
  for name, x in want.items():
    assert np.abs(x).max() > 0
    far = np.abs(np.asarray(got[1][name]) - x).max() / np.abs(x).max()
    assert far < TOLERANCE, (name, far)


@pytest.fixture(scope="module")
def ours():
  batch = {key[6:]: x for key, x in TRL.items() if key.startswith("batch/")}
  return Ours(FOLDER, batch)


LABELS = (True, False, True, True, False)
LABELS += LABELS[::-1]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(name, ours, tmp_path):
  got = ours.run(CASES[name], LABELS)
  check(got, TRL[f"loss/{name}"], TRL[f"gradient/{name}"], FOLDER, tmp_path)


def check_reward(name, batch, want):
  options, with_margin = REWARDS[name]
  chosen, rejected, margin = (
    jnp.array(batch[f"rewards/{x}"]) for x in ("chosen", "rejected", "margin")
  )
  centering = options.get("center_rewards_coefficient", 0.0)
  margin = margin if with_margin else None
  loss = lambda pair: jnp.mean(
    reward_loss.bradley_terry(pair[0], pair[1], margin, centering).values
  )
  value, gradient = jax.jit(jax.value_and_grad(loss))((chosen, rejected))
  np.testing.assert_allclose(value, want[0], rtol=TOLERANCE)
  np.testing.assert_allclose(np.concatenate(gradient), want[1], rtol=TOLERANCE)


@pytest.mark.parametrize("name", REWARDS)
def test_reward_loss_and_gradient(name):
  batch = {key[6:]: x for key, x in TRL.items() if key.startswith("batch/")}
  check_reward(
    name, batch, (TRL[f"reward_loss/{name}"], TRL[f"reward_gradient/{name}"])
  )


def test_the_cases_exercise_what_they_name():
  """No two cases agree by chance; every loss that both have is there."""
  losses = [float(TRL[f"loss/{name}"]) for name in CASES]
  assert len(set(losses)) == len(losses)
  pairs = [case for case in CASES.values() if case["trainer"] != "kto"]
  assert {translated(case)[0] for case in pairs} == set(preference.PAIR_LOSSES)


@pytest.fixture(scope="module")
def live():
  pytest.importorskip("trl")
  path = GOLDEN / "make_trl_preference.py"
  spec = importlib.util.spec_from_file_location(path.stem, path)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope="module")
def live_ours(live, tmp_path_factory):
  folder = tmp_path_factory.mktemp("models")
  live.make_models(folder, 1)
  return Ours(folder, live.inputs(1))


@pytest.mark.parametrize("name", CASES)
def test_live_loss_and_gradient(name, live, live_ours, tmp_path):
  case, folder = live.cases()[name], live_ours.folder
  value, gradient = live.loss(case, live_ours.batch, folder)
  check(live_ours.run(case, LABELS), value, gradient, folder, tmp_path)


@pytest.mark.parametrize("name", REWARDS)
def test_live_reward_loss_and_gradient(name, live, live_ours):
  batch = live_ours.batch
  check_reward(name, batch, live.reward_loss(name, batch, live_ours.folder))


def test_live_cases_are_the_committed_ones(live):
  plain = lambda x: json.loads(json.dumps(x))
  assert plain(live.cases()) == CASES and plain(live.REWARD) == REWARDS
