"""Logits, loss, every gradient and greedy text of odd configurations, against torch.

Runs where the `parity` extra is installed; parity_test.py compares with goldens.
"""

import contextlib
import copy
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.generate import toy_ids
from tests.models import checkpoints, odd_models
from tunix.generate.decoders import decoders
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer.dense.layers import FrozenParam
from tunix.ops.masks import next_token_targets, positions_from_mask
from tunix.ops.vocabulary.logprobs import weighted_nll
from tunix.utils import tree

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

TOLERANCE = 1e-5
# Share of the norm of all gradients; a leaf with a smaller norm is compared with it.
FLOOR = 1e-3
# Some of the models lose more than 1e-5 to rounding. Ours may lose this many times as
# much as torch's float32 does. jax.nn.gelu lost 15 times as much for Gemma 4.
NOISE = 3
STEPS = 10


def make_models():
  path = checkpoints.GOLDEN / "make_models.py"
  spec = importlib.util.spec_from_file_location("make_models", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


make = make_models()


@contextlib.contextmanager
def everything_in_float64():
  """Makes torch compute in float64 where the code of a model asks for float32."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch, "float32", torch.float64)
    patch.setattr(torch, "float", torch.float64)
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    yield


def save_gradients(model, tokens, mask, folder):
  """Writes the gradients of float32, and those of float64, into two folders."""
  exact = copy.deepcopy(model).double()
  exact.set_experts_implementation("eager")  # the grouped product has no float64
  with everything_in_float64():
    make.save_gradients(exact, tokens, mask, folder / "exact")
  make.save_gradients(model, tokens, mask, folder / "gradients")


def read_gradients(folder):
  """Returns the gradients by our paths."""
  model = AutoModel.from_pretrained(folder, dtype=jnp.float32)
  return tree.flatten(nnx.state(model))


def leaf_errors(gradients, exact):
  """Returns the norm of each leaf's error over the leaf's norm, or over the floor."""
  total = np.sqrt(sum(np.sum(np.square(x)) for x in exact.values()))
  floor = FLOOR * total
  norm = np.linalg.norm
  return {
    path: norm(gradients[path] - value) / max(norm(value), floor)
    for path, value in exact.items()
  }


@pytest.fixture(scope="module", params=odd_models.CASES, ids=str)
def case(request, tmp_path_factory):
  """A folder of `transformers`, and what it computes."""
  name, number = request.param
  kind, cases = odd_models.FAMILIES[name]
  folder = tmp_path_factory.mktemp("odd")
  fields = odd_models.SIZES | {"kind": kind} | cases[number]
  config = getattr(transformers, f"{fields.pop('kind')}Config")(**fields)
  torch.manual_seed(number)
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  model.set_attn_implementation("eager")
  make.randomise(model, "norm", lambda x: torch.nn.init.uniform_(x, 0.5, 1.5))
  for part in (".bias", "_bias"):
    make.randomise(model, part, lambda x: torch.nn.init.normal_(x, std=0.4))
  for path, value in model.named_buffers():
    if path.endswith("layer_scalar"):
      torch.nn.init.uniform_(value, 0.5, 1.5)
  # With faster decays torch's chunks lose 3e-5: it subtracts large sums.
  make.randomise(model, "A_log", lambda x: torch.nn.init.uniform_(x, -3, 0.5))
  model.save_pretrained(folder)
  tokens, mask = make.inputs()
  want = {
    "name": name,
    "tokens": tokens,
    "mask": mask,
    "logits": make.logits(model, tokens, mask),
    "greedy": make.greedy(model, tokens, mask, STEPS),
  }
  save_gradients(model, tokens, mask, folder)
  return folder, want


def test_logits_loss_and_every_gradient(case):
  folder, want = case
  model = AutoModel.from_pretrained(folder)
  mask = want["mask"]
  options = {
    "positions": positions_from_mask(jnp.asarray(mask)),
    "attention_mask": checkpoints.visible(mask),
  }
  logits = np.asarray(model(want["tokens"], **options)[0]) * mask[..., None]
  assert checkpoints.relative(logits, want["logits"]) < TOLERANCE
  scored = np.zeros(mask.shape, np.float32)
  scored[:, :-1] = mask[:, 1:] * mask[:, :-1]
  graph, state = nnx.split(model)

  def loss(state):
    model = nnx.merge(graph, state)
    hidden, _ = model(want["tokens"], return_hidden=True, **options)
    target = next_token_targets(jnp.asarray(want["tokens"]))
    table, layout = model.unembedding()
    return weighted_nll(hidden, table, target, scored, layout) / scored.sum()

  value, ours = jax.jit(jax.value_and_grad(loss))(state)
  logps = jax.nn.log_softmax(want["logits"])[:, :-1]
  chosen = np.take_along_axis(logps, want["tokens"][:, 1:, None], -1)[..., 0]
  theirs = -np.sum(chosen * scored[:, :-1]) / scored.sum()
  np.testing.assert_allclose(value, theirs, rtol=TOLERANCE)
  exact = read_gradients(folder / "exact")
  ours = tree.flatten(ours)
  assert ours.keys() == exact.keys()
  for path in tree.flatten(nnx.state(model, FrozenParam)):
    del exact[path]
  noise = max(leaf_errors(read_gradients(folder / "gradients"), exact).values())
  errors = leaf_errors(ours, exact)
  worst = max(errors, key=errors.__getitem__)
  assert errors[worst] < max(TOLERANCE, NOISE * noise), (worst, errors[worst], noise)


def test_greedy_text_of_the_engine_and_of_groups(case):
  folder, want = case
  model = AutoModel.from_pretrained(folder)
  config = EngineConfig(slots=4, max_tokens=48, prefill_tokens=16)
  engine = Engine(model, toy_ids.Ids(), config)
  prompts = [row[keep] for row, keep in zip(want["tokens"], want["mask"].astype(bool))]
  requests = [
    EngineRequest(prompt=prompt, max_tokens=STEPS, stop_ids=(), num_samples=2)
    for prompt in prompts
  ]
  if (decoders.max_positions(model) or 64) < 20:
    with pytest.raises(ValueError, match="positions of the model"):
      engine.run(requests)
    return
  for rows, tokens in zip(engine.run(requests), want["greedy"]):
    for row in rows:
      np.testing.assert_array_equal(row.tokens, tokens)


def test_what_we_save_is_the_same_model(case, tmp_path):
  folder, want = case
  save_pretrained(AutoModel.from_pretrained(folder), tmp_path, source=folder)
  theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, output_loading_info=True, attn_implementation="eager"
  )
  assert not info["missing_keys"] and not info["unexpected_keys"]
  logits = make.logits(theirs.eval(), want["tokens"], want["mask"])
  assert checkpoints.relative(logits, want["logits"]) < TOLERANCE
