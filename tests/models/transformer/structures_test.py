"""Layers of several structures: the pattern, stacks, scans, folders, adapters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys, toys_text
from tests.models import checkpoints
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.models import lora
from tunix.models.automodel import AutoModel
from tunix.models.qwen3.model import ModelConfig
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer.config import MoEConfig, fields_by_type
from tunix.models.transformer.structures import Segment, segments
from tunix.utils import tree

TOKENS = np.random.default_rng(0).integers(0, toys.VOCAB, (2, 10)).astype(np.int32)
MOE = MoEConfig(num_experts=3, experts_per_token=2, hidden_dim=12, dense_layers=(0, 2))
WIDE = {
  "num_layers": 5,
  "layer_types": ("sliding", "sliding", "full", "sliding", "sliding"),
  "sliding_window": 4,
  "type_fields": fields_by_type(full={"head_dim": 12, "num_kv_heads": 1}),
}
CASES = {
  "dense and sparse": {"num_layers": 4, "moe": MOE},
  "both": WIDE | {"moe": dataclasses.replace(MOE, dense_layers=(0,))},
}


@pytest.mark.parametrize(
  ("layers", "want"),
  [
    ("a", [(0, 1, 1)]),
    ("aaaa", [(0, 1, 4)]),
    ("dssss", [(0, 1, 1), (1, 1, 4)]),
    ("lllflllflllf", [(0, 4, 3)]),
    ("dlflflfx", [(0, 1, 1), (1, 2, 3), (7, 1, 1)]),
    ("abcabcab", [(0, 2, 1), (2, 3, 2)]),
  ],
)
def test_the_pattern_is_cut_where_it_repeats(layers, want):
  assert segments(tuple(layers)) == tuple(Segment(*one) for one in want)


@pytest.mark.parametrize("case", CASES)
def test_scanned_stacked_and_unstacked_models_are_one_function(case):
  def run(make, **changes):
    graph, state = nnx.split(make(toys.model(**CASES[case], **changes)))
    loss = lambda state: jnp.mean(nnx.merge(graph, state)(TOKENS)[0] ** 2)
    return jax.jit(jax.value_and_grad(loss))(state)

  same = lambda model: model
  want, gradient = run(same, scan_layers=False)
  want_leaves = tree.flatten(gradient)
  for make, changes in (
    (same, {"scan_layers": True, "remat": "block"}),
    (lambda model: model.unstack(), {"remat": "dots"}),
  ):
    value, gradient = run(make, **changes)
    assert abs(value / want - 1) < 1e-6
    leaves = tree.flatten(gradient)
    if leaves.keys() == want_leaves.keys():
      for path, leaf in leaves.items():
        assert checkpoints.relative(leaf, want_leaves[path]) < 1e-5, path
    else:
      total = lambda leaves: sum(float(np.sum(np.square(x))) for x in leaves.values())
      assert total(leaves) == pytest.approx(total(want_leaves), rel=1e-5)


def test_token_by_token_through_the_cache():
  model = toys.model(**CASES["both"]).unstack()
  want = np.asarray(toys.logits(model, TOKENS))
  call = nnx.jit(lambda model, tokens, cache: model(tokens, cache=cache))
  first, cache = call(model, TOKENS[:, :4], model.init_cache(2, 10))
  steps = [np.asarray(first)]
  for t in range(4, 10):
    step, cache = call(model, TOKENS[:, t : t + 1], cache)
    steps.append(np.asarray(step))
  assert checkpoints.relative(np.concatenate(steps, 1), want) < 1e-5


def test_a_mixture_with_dense_layers_is_a_folder(tmp_path):
  fields = dataclasses.asdict(toys.config(**CASES["dense and sparse"]))
  own = {name: fields[name] for name in ("vocab_size", "num_layers", "embed_dim")}
  own |= {name: fields[name] for name in ("hidden_dim", "num_heads", "num_kv_heads")}
  model = AutoModel.from_config(ModelConfig(**own, head_dim=8, moe=MOE))
  save_pretrained(model, tmp_path)
  again = AutoModel.from_pretrained(tmp_path)
  assert again.config.moe.dense_layers == (0, 2)
  want = toys.logits(model, TOKENS)
  np.testing.assert_array_equal(toys.logits(again, TOKENS), want)
  assert sorted(again.layers) == ["dense", "sparse"]
  checkpoints.change_config(tmp_path, decoder_sparse_step=2, mlp_only_layers=[])
  again = AutoModel.from_pretrained(tmp_path)
  np.testing.assert_array_equal(toys.logits(again, TOKENS), want)
  checkpoints.change_config(tmp_path, mlp_only_layers=[0, 1, 2, 3])
  with pytest.raises(ValueError, match=r"mlp_only_layers \[0, 1, 2, 3\]"):
    AutoModel.from_pretrained(tmp_path)


def test_adapters_of_every_structure(tmp_path):
  model = toys.model(**CASES["dense and sparse"])
  adapted = lora.apply(model, lora.LoraConfig(rank=2, targets=("q_proj", "up_proj")))
  for _, node in nnx.iter_graph(adapted):
    if isinstance(node, nnx.LoRAParam):
      node.set_value(node.get_value() + 0.1)
  want = toys.logits(adapted, TOKENS)
  assert checkpoints.relative(want, toys.logits(model, TOKENS)) > 0.01
  lora.save_adapter(adapted, tmp_path / "adapter")
  for base in (model, model.unstack()):
    again = lora.load_adapter(base, tmp_path / "adapter")
    assert checkpoints.relative(toys.logits(again, TOKENS), want) < 1e-6
  merged = lora.merge(adapted)
  assert checkpoints.relative(merged(TOKENS)[0], adapted(TOKENS)[0]) < 1e-5


@pytest.mark.filterwarnings("ignore")  # qwix uses names that flax deprecates
def test_qwix_adapts_every_structure():
  qwix = pytest.importorskip("qwix")
  model = toys.model(**CASES["dense and sparse"], scan_layers=True)
  provider = qwix.LoraProvider(module_path=".*q_proj", rank=2, alpha=4.0)
  adapted = qwix.apply_lora_to_model(
    model, provider, rngs=nnx.Rngs(0), **model.get_model_input()
  )
  np.testing.assert_array_equal(adapted(TOKENS)[0], model(TOKENS)[0])
  shapes = {x.shape for x in tree.flatten(nnx.state(adapted, nnx.LoRAParam)).values()}
  assert shapes == {(2, 32, 2), (2, 2, 32)}
  assert sorted(tree.flatten(nnx.state(adapted, nnx.LoRAParam)))[0].startswith(
    "layers.dense.attn.q_proj"
  )


def test_structures_over_a_mesh(mesh_fsdp4_tp2):
  config = toys.config(**CASES["both"], scan_layers=True)
  tokens = np.repeat(TOKENS, 4, 0)
  want = AutoModel.from_config(config)(tokens)[0]
  made = AutoModel.from_config(config, mesh_fsdp4_tp2)
  kernel = made.layers["sliding_sparse"].attn.q_proj.kernel[...]
  assert kernel.shape == (3, 32, 32) and not kernel.is_fully_replicated
  with jax.set_mesh(mesh_fsdp4_tp2):
    got = jax.jit(lambda: made(tokens)[0])()
  assert checkpoints.relative(got, want) < 1e-5


@pytest.mark.parametrize("attention", ["rows", "gather"])
def test_the_engine_draws_and_takes_adapters_by_structure(attention):
  model = toys.model(**CASES["both"])
  adapted = lora.apply(model, lora.LoraConfig(rank=2, targets=("q_proj", "o_proj")))
  for _, node in nnx.iter_graph(adapted):
    if isinstance(node, nnx.LoRAParam):
      node.set_value(node.get_value() + 0.5)
  sizes = {"slots": 2, "max_tokens": 32, "prefill_tokens": 16, "adapter_ranks": 2}
  engine = Engine(
    model, toys_text.chat_tokenizer(), EngineConfig(**sizes, attention=attention)
  )
  engine.load_adapter("one", adapted)
  prompt = TOKENS[0, :5]
  ask = lambda name: EngineRequest(
    prompt=prompt, max_tokens=6, adapter=name, stop_ids=()
  )
  plain, own = (done[0].tokens for done in engine.run([ask(None), ask("one")]))
  want = [_greedy(each, prompt.tolist(), 6) for each in (model, adapted)]
  assert [list(plain), list(own)] == want
  assert want[0] != want[1]


def _greedy(model, prompt, steps):
  tokens = np.zeros((1, len(prompt) + steps), np.int32)
  tokens[0, : len(prompt)] = prompt
  call = nnx.jit(lambda model, tokens: model(tokens)[0])
  for at in range(len(prompt), tokens.shape[1]):
    tokens[0, at] = np.argmax(call(model, tokens)[0, at - 1])
  return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"moe": dataclasses.replace(MOE, dense_layers=(4,))}, "names layer 4"),
    ({"type_fields": WIDE["type_fields"]}, "layer_types is None"),
    (
      {"type_fields": WIDE["type_fields"], "layer_types": ("nope",) * 2},
      r"type_fields has \['full'\]",
    ),
  ],
)
def test_wrong_structures_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    toys.model(**fields)
