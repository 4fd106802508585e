"""PEFT folders of our own making; adapter_files_live_test.py has PEFT read them."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.models import checkpoints
from tests.models.lora_test import state, widen
from tunix.models import backbone, families, lora
from tunix.models.adapters import config as adapter_config, lora_modules, whole_modules
from tunix.models.adapters.combining import merge_adapters
from tunix.models.automodel import AutoModel
from tunix.utils import tree

TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)
GOLDEN = checkpoints.GOLDEN / "llama3p1"


@pytest.mark.parametrize("stacked", [True, False])
def test_adapter_survives_the_way_there_and_back(stacked, tmp_path):
  model = toys.model()
  model = model if stacked else model.unstack()
  adapted = toys.model(lora_rank=4)
  adapted = adapted if stacked else adapted.unstack()
  lora.save_adapter(adapted, tmp_path / "adapter", base="somewhere")
  back = lora.load_adapter(model, tmp_path / "adapter")
  np.testing.assert_array_equal(toys.logits(back, TOKENS), toys.logits(adapted, TOKENS))
  config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
  assert (config["r"], config["lora_alpha"]) == (4, 8.0)
  assert config["base_model_name_or_path"] == "somewhere"
  assert config["target_modules"] == sorted(lora.ALL_LINEAR)


def test_loaded_adapter_is_sharded(mesh_fsdp8):
  model = AutoModel.from_pretrained(GOLDEN, mesh_fsdp8)
  adapted = lora.load_adapter(model, GOLDEN / "adapter")
  a = state(adapted, nnx.LoRAParam)["layers.attn.q_proj.lora_a"]
  assert a.addressable_shards[0].data.shape == (2, 16 // 8, 4)


@pytest.fixture
def adapter(tmp_path):
  return checkpoints.copy("llama3p1/adapter", tmp_path / "adapter")


def set_field(adapter, **fields):
  path = adapter / "adapter_config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_rank_stabilised_scale(adapter):
  set_field(adapter, use_rslora=True)
  model = lora.load_adapter(AutoModel.from_pretrained(GOLDEN), adapter)
  # alpha 8, rank 4: 8 / sqrt(4) instead of 8 / 4.
  assert {m.lora_scale for m in lora_modules.adapted(model).values()} == {4.0}


@pytest.fixture(scope="module")
def base():
  return AutoModel.from_pretrained(GOLDEN)


MERGE = "merge it with PEFT"
REFUSED = [
  ({"use_dora": True}, "lora_magnitude_vector' is missing"),
  ({"rank_pattern": {"q_proj": 2}}, r"lora_A.weight' is of shape \(4, 16\), expected"),
  ({"r": None}, "r is missing"),
  ({"r": 0}, "r is 0, it must be a whole number of at least 1"),
  ({"r": 5}, r"lora_A.weight' is of shape \(4, 16\), expected shape \(5, 16\)"),
  ({"lora_alpha": math.nan}, "lora_alpha is nan, it must be a finite number"),
  ({"alpha_pattern": {"q_proj": "1"}}, "q_proj is '1', it must be a finite number"),
  ({"lora_dropout": 1.5}, r"lora_dropout is 1.5: it must be"),
  ({"use_rslora": "no"}, "use_rslora is 'no', it must be true or false"),
  ({"target_modules": "(.*)*z"}, "adapter of '.*', which target_modules"),
  ({"target_modules": r"(.)\1"}, "adapter: target_modules: the pattern .* has a refer"),
  (
    {"target_modules": 3},
    "adapter_config.json: target_modules is 3; expected a text o",
  ),
  ({"target_modules": [[]]}, "target_modules is .* expected a list of texts"),
  ({"target_modules": ["a"] * 5000}, "target_modules has 5,000 entries; expected at m"),
  ({"exclude_modules": "("}, "exclude_modules: '.' is no regular expression"),
  ({"rank_pattern": ["q_proj"]}, "rank_pattern is .* expected a table"),
  ({"rank_pattern": {"(": 2}}, "rank_pattern: .* is no regular expression"),
  ({"target_modules": ["q_proj"]}, r"adapter of '.*(down|v)_proj', which target_m"),
  ({"target_modules": r".*\.(q|v)_proj"}, "adapter of '.*down_proj', which target_m"),
  ({"exclude_modules": ["v_proj"]}, "adapter of '.*v_proj', which target_modules, ex"),
  ({"layers_to_transform": 1}, "adapter of '.*layers.0.*', which target_modules"),
  ({"layers_to_transform": [0], "layers_pattern": "layers"}, "adapter of '.*layers.1"),
  ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
  ({"bias": "all"}, f"bias is 'all'.*{MERGE}"),
  ({"fan_in_fan_out": True}, f"fan_in_fan_out is True.*{MERGE}"),
  ({"lora_bias": True}, f"lora_bias is True.*{MERGE}"),
  ({"modules_to_save": ["lm_head"]}, "adapter tensor '.*lm_head.weight' is missing"),
  (
    {"modules_to_save": ["0.mlp.up_proj"]},
    r"names some layers of layers\.mlp\.up_proj",
  ),
  ({"target_parameters": ["w"]}, rf"target_parameters is \['w'\].*{MERGE}"),
  ({"trainable_token_indices": [1]}, "trainable_tokens_delta' is missing"),
  ({"trainable_token_indices": {"a": [1], "b": [2]}}, "expected one list of ids for"),
  ({"trainable_token_indices": ["1"]}, "expected one list of ids for all modules"),
  ({"layer_replication": [[0, 1]]}, f"layer_replication is.*{MERGE}"),
  ({"megatron_config": {"x": 1}}, f"megatron_config is.*{MERGE}"),
  ({"use_qalora": True}, f"use_qalora is True.*{MERGE}"),
  ({"use_bdlora": {"nblocks": 2}}, f"use_bdlora is.*{MERGE}"),
  ({"velora_config": {"scale": 1.0}}, f"velora_config is.*{MERGE}"),
  ({"monteclora_config": {"num_samples": 8}}, f"monteclora_config is.*{MERGE}"),
  ({"arrow_config": {"top_k": 3}}, f"arrow_config is.*{MERGE}"),
  ({"kasa_config": {"beta": 1e-4}}, f"kasa_config is.*{MERGE}"),
  (
    {"alora_invocation_tokens": [3]},
    r"alora_invocation_tokens is \[3\].*only PEFT and",
  ),
  ({"of_a_later_peft": True}, f"of_a_later_peft is True.*{MERGE}"),
  *(
    (
      {"init_lora_weights": init},
      f"init_lora_weights is '{init}'.*path_initial_model_fo",
    )
    for init in ("pissa", "pissa_niter_16", "OLoRA", "corda", "lora_ga")
  ),
  ({"init_lora_weights": "loftq"}, f"init_lora_weights is 'loftq'.*{MERGE}"),
  ({"init_lora_weights": "a later one"}, f"init_lora_weights is.*{MERGE}"),
]


@pytest.mark.parametrize("fields, message", REFUSED)
def test_what_is_not_done_exactly_is_refused(adapter, base, fields, message):
  set_field(adapter, **fields)
  with pytest.raises(ValueError, match=message):
    lora.load_adapter(base, adapter)


def test_every_field_of_peft_is_read_refused_or_without_meaning():
  """The committed folder was written by PEFT 0.21: it names all of them."""
  fields = set(config_of(GOLDEN / "adapter"))
  refused = {name for fields, _ in REFUSED for name in fields}
  known = adapter_config.READ | adapter_config.WITHOUT_MEANING
  assert fields <= known | refused
  assert not adapter_config.READ & adapter_config.WITHOUT_MEANING


@pytest.mark.parametrize(
  "init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"]
)
def test_a_draw_of_a_and_b_leaves_the_base_alone(adapter, base, init, caplog):
  set_field(adapter, init_lora_weights=init)
  assert lora_modules.adapted(lora.load_adapter(base, adapter))
  assert bool(caplog.records) == (init == "mica")


def test_patterns_are_of_the_names_in_the_file(adapter, base):
  """PEFT of a model with images says "model.language_model.layers"."""
  from safetensors import numpy as st

  family = dataclasses.replace(
    families.of_config(base.config),
    canonical_key=lambda key: key.replace("model.language_model.", "model."),
  )
  nested = {
    key.replace("model.layers.", "model.language_model.layers."): value
    for key, value in tensors_of(adapter).items()
  }
  st.save_file(nested, adapter / "adapter_model.safetensors")
  set_field(adapter, alpha_pattern={r"language_model\.layers\..*\.q_proj": 32.0})
  back = lora_modules.adapted(lora.load_adapter(base, adapter, family=family))
  scales = {path: linear.lora_scale for path, linear in back.items()}
  assert scales.pop("layers.attn.q_proj") == 8.0
  assert set(scales.values()) == {2.0}


def test_adapter_tensors_that_do_not_fit(adapter):
  from safetensors import numpy as st

  model = AutoModel.from_pretrained(GOLDEN)
  file = adapter / "adapter_model.safetensors"
  good = st.load_file(file)
  key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
  st.save_file({k: v for k, v in good.items() if k != key}, file)
  with pytest.raises(ValueError, match=f"'{key}' is missing.*folder is damaged"):
    lora.load_adapter(model, adapter)
  extra = {"base_model.model.lm_head.lora_A.weight": np.ones((4, 16), np.float32)}
  st.save_file(good | extra, file)
  with pytest.raises(ValueError, match=r"lm_head.lora_A.weight'\] name no module"):
    lora.load_adapter(model, adapter)
  file.unlink()
  with pytest.raises(FileNotFoundError, match=r"lacks adapter_config\.json or"):
    lora.load_adapter(model, adapter)


def config_of(folder):
  return json.loads((folder / "adapter_config.json").read_text())


def tensors_of(folder):
  from safetensors import numpy as st

  return st.load_file(folder / "adapter_model.safetensors")


VARIANTS = {
  "rslora": {"use_rslora": True, "alpha": 6.0},
  "dora": {"use_dora": True, "alpha": 6.0},
  "dropout": {"dropout": 0.25},
  "patterns": {
    "rank_pattern": {"q_proj": 2, r".*down_proj": 5},
    "alpha_pattern": {"v_proj": 12.0},
  },
  "all": {
    "use_rslora": True,
    "use_dora": True,
    "dropout": 0.5,
    "rank_pattern": {"attn.q_proj": 2},
    "alpha_pattern": {"mlp.up_proj": 1.0},
  },
}


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_option_survives_the_way_there_and_back(name, stacked, tmp_path):
  model = toys.model()
  model = model if stacked else model.unstack()
  adapted = widen(lora.apply(model, lora.LoraConfig(rank=3, **VARIANTS[name])))
  lora.save_adapter(adapted, tmp_path / "one")
  back = lora.load_adapter(model, tmp_path / "one")
  np.testing.assert_array_equal(toys.logits(back, TOKENS), toys.logits(adapted, TOKENS))
  fields = ("lora_scale", "lora_dropout", "lora_rslora")
  want = lora_modules.adapted(adapted)
  for path, linear in lora_modules.adapted(back).items():
    for field in fields:
      assert getattr(linear, field) == pytest.approx(getattr(want[path], field))
  lora.save_adapter(back, tmp_path / "two")
  assert config_of(tmp_path / "one") == config_of(tmp_path / "two")


def test_fields_of_the_config(tmp_path):
  adapted = lora.apply(
    toys.model(), lora.LoraConfig(rank=3, alpha=4.0, **VARIANTS["patterns"])
  )
  lora.save_adapter(widen(adapted), tmp_path / "a")
  config = config_of(tmp_path / "a")
  assert (config["r"], config["lora_alpha"]) == (3, 4.0)
  assert config["rank_pattern"] == {"q_proj": 2, "down_proj": 5}
  assert config["alpha_pattern"] == {"v_proj": 12.0}
  assert not config["use_dora"] and not config["use_rslora"]
  lora.save_adapter(
    lora.apply(
      toys.model(),
      lora.LoraConfig(rank=4, alpha=6.0, use_rslora=True, use_dora=True, dropout=0.1),
    ),
    tmp_path / "b",
  )
  config = config_of(tmp_path / "b")
  assert config["use_rslora"] and config["use_dora"]
  assert (config["lora_alpha"], config["lora_dropout"]) == (6.0, 0.1)
  name = "base_model.model.model.layers.1.mlp.up_proj.lora_magnitude_vector"
  assert tensors_of(tmp_path / "b")[name].shape == (64,)


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_of_some_layers_on_a_stacked_model(use_dora, tmp_path):
  single = toys.model().unstack()
  config = lora.LoraConfig(
    rank=2,
    use_dora=use_dora,
    targets=(r"layers\.1\..*_proj", r"layers\.0\.attn\.q_proj"),
    rank_pattern={r"layers\.0\.attn\.q_proj": 3},
    alpha_pattern={r"layers\.0\.attn\.q_proj": 9.0},
  )
  adapted = widen(lora.apply(single, config))
  lora.save_adapter(adapted, tmp_path / "one")
  stacked = lora.load_adapter(toys.model(), tmp_path / "one")
  assert (
    checkpoints.relative(toys.logits(stacked, TOKENS), toys.logits(adapted, TOKENS))
    < 1e-6
  )
  assert (
    checkpoints.relative(toys.logits(single, TOKENS), toys.logits(adapted, TOKENS))
    > 0.01
  )
  # A layer without an adapter gets none by training either.
  graph, params, rest = nnx.split(stacked, nnx.LoRAParam, ...)
  gradient = jax.jit(jax.grad(lambda p: jnp.var(nnx.merge(graph, p, rest)(TOKENS)[0])))(
    params
  )
  for path, value in tree.flatten(gradient).items():
    zero = not np.any(np.asarray(value)[0])
    assert zero == ("q_proj" not in path), path
    assert np.any(np.asarray(value)[1]), path
  lora.save_adapter(stacked, tmp_path / "two")
  one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
  assert one.keys() == two.keys()
  assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in two.items()}
  again = lora.load_adapter(toys.model(), tmp_path / "two")
  np.testing.assert_array_equal(
    toys.logits(again, TOKENS), toys.logits(stacked, TOKENS)
  )
  configs = config_of(tmp_path / "one"), config_of(tmp_path / "two")
  for config in configs:  # a stack has one scale: B has taken over the difference
    del config["alpha_pattern"]
  assert configs[0] == configs[1]
  assert configs[0]["rank_pattern"] == {"model.layers.0.self_attn.q_proj": 3}
  assert len(configs[0]["target_modules"]) == 8


def test_adapters_that_cannot_share_a_folder(tmp_path):
  adapted = toys.model(lora_rank=2)
  lora_modules.adapted(adapted)["layers.attn.q_proj"].lora_dropout = 0.5
  with pytest.raises(ValueError, match=r"dropout is \[0.0, 0.5\] cannot be saved in"):
    lora.save_adapter(adapted, tmp_path / "adapter")
  assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
  ("targets", "said"),
  [
    (("gate_proj", "up_proj"), "experts' gate_proj and up_proj and not on down_proj"),
    (("up_proj",), "experts' up_proj and not on down_proj and gate_proj"),
    (("down_proj",), None),
    (("gate_proj", "up_proj", "down_proj"), None),
  ],
)
def test_what_peft_cannot_read_of_experts_is_said(targets, said, tmp_path, caplog):
  model = AutoModel.from_pretrained(checkpoints.GOLDEN / "qwen3_moe")
  adapted = lora.apply(model, lora.LoraConfig(rank=2, targets=targets))
  lora.save_adapter(adapted, tmp_path / "adapter")
  assert [said in r.getMessage() for r in caplog.records] == ([True] if said else [])


def test_dense_layers_and_shared_experts_are_named_as_parameters_too(tmp_path):
  """PEFT 0.21 would leave them out beside experts; see the live tests."""
  base = AutoModel.from_pretrained(checkpoints.GOLDEN / "deepseek_v3")
  experts = r"layers.*\.experts\..*"
  for targets, has_dense in ((lora.ALL_LINEAR, True), ((experts,), False)):
    adapted = widen(lora.apply(base, lora.LoraConfig(rank=2, targets=targets)))
    folder = tmp_path / str(has_dense)
    lora.save_adapter(adapted, folder)
    fields = json.loads((folder / "adapter_config.json").read_text())
    named = fields.get("target_parameters", [])
    assert (len(named) >= 6) == bool(named) == has_dense
    assert all(name.endswith("_proj.weight") for name in named)
    assert not any(".experts." in name for name in named)
    loaded = lora.load_adapter(base, folder)
    merge_adapters([folder, folder], tmp_path / f"sum {has_dense}", [1, -1])
    summed = tmp_path / f"sum {has_dense}" / "adapter_config.json"
    assert json.loads(summed.read_text()).get("target_parameters", []) == named
    same = jax.tree.map(np.array_equal, state(loaded), state(adapted))
    assert jax.tree.all(same)


def test_dense_layers_beside_fused_experts_are_modules_alone(tmp_path):
  base = AutoModel.from_pretrained(checkpoints.GOLDEN / "qwen3_5_moe")
  lora.save_adapter(lora.apply(base, lora.LoraConfig(rank=2)), tmp_path)
  fields = json.loads((tmp_path / "adapter_config.json").read_text())
  assert not any(name.endswith(".weight") for name in fields["target_parameters"])


def test_one_pair_for_each_expert(tmp_path):
  """[L, E, in, out] kernels, whose names are layer-major."""
  model = AutoModel.from_pretrained(checkpoints.GOLDEN / "qwen3_moe")
  config = lora.LoraConfig(rank=2, targets=("experts.gate_proj",), use_dora=True)
  adapted = widen(lora.apply(model, config))
  lora.save_adapter(adapted, tmp_path / "adapter")
  saved = tensors_of(tmp_path / "adapter")
  assert len(saved) == 3 * 2 * 6
  want = lora_modules.adapted(adapted)["layers.mlp.experts.gate_proj"]
  key = "base_model.model.model.layers.1.mlp.experts.2.gate_proj.lora_A.weight"
  np.testing.assert_array_equal(saved[key], lora_modules.pair_of(want)[0][1, 2].T)
  back = lora.load_adapter(model, tmp_path / "adapter")
  for path, value in state(back, nnx.LoRAParam).items():
    np.testing.assert_array_equal(value, state(adapted, nnx.LoRAParam)[path])
  merged = lora.merge(back)
  assert merged.layers.mlp.experts.gate_proj.kernel.shape == (2, 6, 16, 12)
  assert (
    checkpoints.relative(toys.logits(merged, TOKENS), toys.logits(adapted, TOKENS))
    < 1e-5
  )
  assert (
    checkpoints.relative(toys.logits(model, TOKENS), toys.logits(adapted, TOKENS))
    > 1e-3
  )


# Modules that are trained whole.

WHOLE = ("score", "norm", "input_layernorm")


@pytest.fixture(scope="module")
def scored():
  """The base of golden/peft_score, whose head is PEFT's alone."""
  return AutoModel.from_pretrained(checkpoints.GOLDEN / "qwen3", num_scores=2)


def test_peft_s_head_of_scores_gives_its_scores(scored):
  folder = checkpoints.GOLDEN / "peft_score"
  expected = np.load(folder / "expected.npz")
  ours = lora.load_adapter(scored, folder)
  scores = ours(expected["tokens"])[0][:, -1]
  assert checkpoints.relative(scores, expected["scores"]) < 1e-5
  assert set(whole_modules.of(ours)) == {"score.kernel", "norm.scale"}
  with pytest.raises(ValueError, match="load the model with num_scores=2"):
    lora.load_adapter(AutoModel.from_pretrained(checkpoints.GOLDEN / "qwen3"), folder)


@pytest.mark.parametrize("stacked", [True, False])
def test_whole_modules_survive_the_way_there_and_back(scored, stacked, tmp_path):
  base = scored if stacked else scored.unstack()
  config = lora.LoraConfig(rank=2, targets=("q_proj",), modules_to_save=WHOLE)
  adapted = widen(lora.apply(base, config))
  assert "score.kernel" in lora.describe(adapted)
  lora.save_adapter(adapted, tmp_path / "adapter")
  written = config_of(tmp_path / "adapter")
  layers = [f"model.layers.{i}.input_layernorm" for i in (0, 1)]
  assert written["modules_to_save"] == [*layers, "model.norm", "score"]
  assert written["task_type"] == "SEQ_CLS"
  back = lora.load_adapter(base, tmp_path / "adapter")
  scores = toys.logits(adapted, TOKENS)
  np.testing.assert_array_equal(toys.logits(back, TOKENS), scores)
  assert np.abs(base(TOKENS)[0] - scores).max() > 0.1
  merged = lora.merge(back)
  assert not nnx.state(merged, nnx.LoRAParam)
  np.testing.assert_allclose(toys.logits(merged, TOKENS), scores, rtol=1e-4, atol=1e-5)
  with pytest.raises(ValueError, match="is trained whole"):
    backbone.reference_of(back)


def test_which_modules_are_trained_whole(scored, base):
  def of(model, **options):
    config = lora.LoraConfig(rank=2, targets=("q_proj",), **options)
    return set(whole_modules.of(lora.apply(model, config)))

  assert of(scored) == {"score.kernel"} and of(scored, modules_to_save=()) == set()
  assert of(base) == set() and of(base, modules_to_save=("lm_head",))
  tied = toys.model(tie_embeddings=True)
  for names, message in (
    (("q_proj",), "q_proj is in targets and in modules_to_save"),
    (("lm_heads",), "'lm_heads' matches no module .* modules are embed_tokens, "),
  ):
    with pytest.raises(ValueError, match=message):
      of(base, modules_to_save=names)
  with pytest.raises(ValueError, match="embed_tokens"):
    of(tied, modules_to_save=("embed_tokens",))
