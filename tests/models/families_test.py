import dataclasses

import jax
import pytest
from flax import nnx

from tests.models.published import ALIASES, COUNTS, PUBLISHED
from tunix.models import families
from tunix.models.llama3 import model as llama3
from tunix.models.transformer.config import RopeConfig, TransformerConfig

# A config.json with the least that a checkpoint needs.
MINIMAL = {
  "hidden_size": 32,
  "num_attention_heads": 4,
  "num_hidden_layers": 2,
  "vocab_size": 64,
  "intermediate_size": 48,
}
LLAMA, QWEN = families.FAMILIES["llama3"], families.FAMILIES["qwen3"]


def test_every_preset_has_a_published_count():
  presets = [name for f in families.FAMILIES.values() for name in f.presets]
  assert sorted(presets) == sorted(PUBLISHED)


@pytest.mark.parametrize("alias", ALIASES)
def test_other_names_have_the_same_sizes(alias):
  same = {"rope": RopeConfig(), "max_position": None}
  make, original = (families.preset(name)[1] for name in (alias, ALIASES[alias]))
  assert make(**same) == original(**same)


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name):
  family, preset = families.preset(name)
  config = preset()
  model = nnx.eval_shape(lambda: family.model_class(config, rngs=nnx.Rngs(0)))
  assert sum(x.size for x in jax.tree.leaves(nnx.state(model))) == PUBLISHED[name]


def test_presets_take_overrides():
  config = llama3.ModelConfig.llama3p1_8b(num_layers=2, max_position=64)
  assert (config.num_layers, config.max_position) == (2, 64)
  assert config.rope.scaling == "llama3" and config.rope.factor == 8.0
  assert families.preset("llama3p2_1b")[1]().rope.factor == 32.0
  assert families.preset("qwen3_8b_base")[1]().max_position == 32_768


def test_unknown_names_list_the_known_ones():
  with pytest.raises(ValueError, match=r"'gpt2' is unknown, known are .*llama.*qwen3"):
    families.by_model_type("gpt2")
  with pytest.raises(ValueError, match=r"'llama9' is unknown.*llama3p2_1b"):
    families.preset("llama9")


def test_config_of_no_family():
  plain = TransformerConfig(
    num_layers=1,
    vocab_size=8,
    embed_dim=8,
    hidden_dim=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
  )
  with pytest.raises(ValueError, match=r"TransformerConfig belongs to no family"):
    families.of_config(plain)
  assert families.of_config(llama3.ModelConfig.llama3_8b()) is LLAMA


def test_absent_fields_mean_what_transformers_means():
  llama, qwen = LLAMA.config_from_hf(MINIMAL), QWEN.config_from_hf(MINIMAL)
  assert (llama.head_dim, qwen.head_dim) == (8, 128)
  assert llama.num_kv_heads == 4
  assert llama.norm_eps == 1e-6
  assert llama.rope == RopeConfig(theta=10_000.0)
  assert not llama.tie_embeddings and not llama.qk_norm and qwen.qk_norm


def test_rope_scaling_wins_over_rope_parameters():
  # transformers does so, and older readers know no other.
  config = LLAMA.config_from_hf(
    MINIMAL
    | {
      "rope_theta": 7.0,
      "rope_scaling": {"type": "linear", "factor": 2.0},
      "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    }
  )
  assert config.rope == RopeConfig(theta=7.0, scaling="linear", factor=2.0)


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"hidden_act": "relu"}, r"hidden_act is 'relu', supported are \['gelu'"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"use_sliding_window": True}, "use_sliding_window True: this family has"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is m"),
    ({"layer_types": 3}, "layer_types is 3, it must be a list"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "32"}, "hidden_size is '32', it must be a whole number"),
    ({"hidden_size": 30}, "hidden_size 30 is not a multiple of num_attention_heads 4"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', it must be a finite number"),
    ({"num_key_value_heads": 3}, "num_kv_heads 3 must divide num_heads 4"),
    (
      {"rope_scaling": {"rope_type": "yarn"}},
      "original_max_position_embeddings is missing",
    ),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    (
      {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
      "partial_rotary_factor is 0.25",
    ),
    ({"rope_parameters": {"full_attention": {}}}, "not one flat table"),
    (
      {
        "rope_scaling": {
          "rope_type": "llama3",
          "factor": 8.0,
          "low_freq_factor": 1.0,
          "high_freq_factor": 4.0,
        }
      },
      "original_max_position_embeddings is missing",
    ),
  ],
)
def test_what_the_decoder_cannot_do_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    LLAMA.config_from_hf(MINIMAL | fields)


@pytest.mark.parametrize("family", [LLAMA, QWEN], ids=lambda f: f.name)
@pytest.mark.parametrize(
  "rope",
  [
    RopeConfig(theta=500.0),
    RopeConfig(theta=500.0, scaling="linear", factor=4.0),
    RopeConfig(theta=500.0, scaling="llama3", factor=8.0, original_max_position=64),
    RopeConfig(theta=500.0, scaling="yarn", factor=8.0, original_max_position=64),
  ],
)
@pytest.mark.parametrize("spelling", ["both", "rope_parameters", "rope_scaling"])
def test_config_survives_the_way_there_and_back(family, rope, spelling):
  hf = MINIMAL | {"max_position_embeddings": 256, "tie_word_embeddings": True}
  config = family.config_class(
    **{f: getattr(family.config_from_hf(hf), f) for f in _fields(family)}
    | {"rope": rope}
  )
  written = family.config_to_hf(config)
  if spelling == "rope_parameters":
    del written["rope_scaling"], written["rope_theta"]
  if spelling == "rope_scaling":
    del written["rope_parameters"]
  assert family.config_from_hf(written) == config


def _fields(family):
  return family.config_class.__dataclass_fields__


def read(model_type, **fields):
  family = families.by_model_type(model_type)
  return family.config_from_hf(MINIMAL | {"model_type": model_type} | fields)


def test_absent_and_null_are_two_things():
  assert read("gemma2").attention_softcap == 50.0
  assert read("gemma2").final_softcap == 30.0
  assert read("gemma2", final_logit_softcapping=None).final_softcap is None
  assert read("gemma2").num_kv_heads == 4
  assert read("mistral", num_attention_heads=8).num_kv_heads == 8
  assert read("mistral", num_attention_heads=8).sliding_window == 4096
  unlimited = read("mistral", num_attention_heads=8, sliding_window=None)
  assert unlimited.layer_types is None or "sliding" not in unlimited.layer_types


def test_activations_of_gemma():
  heads = {"num_attention_heads": 16}
  assert read("gemma", hidden_act="gelu", **heads).activation == "gelu_tanh"
  assert read("gemma", hidden_act="silu", **heads).activation == "silu"


def test_gemma3_has_no_cap_on_its_attention():
  assert read("gemma3_text", attn_logit_softcapping=2.0).attention_softcap is None


def test_a_mixture_slides_in_all_layers_or_none():
  moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
  windowed = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
  assert read("qwen3_moe", **moe, **windowed).layer_types == ("sliding",) * 2
  assert read("qwen3_moe", **moe).layer_types is None


def test_unknown_attention_is_refused_at_once():
  with pytest.raises(ValueError, match="attention 'flash' must be one of"):
    llama3.ModelConfig.llama3_8b(attention="flash")


def test_a_proportional_rotary_embedding_names_its_factor_if_it_has_one():
  # transformers warns of a factor that it does not need.
  config = families.preset("gemma4_e2b")[1]()
  scaled = dataclasses.replace(
    config, rope=dataclasses.replace(config.rope, factor=2.0)
  )
  to_hf = families.FAMILIES["gemma4"].config_to_hf
  kinds = (to_hf(it)["rope_parameters"]["full_attention"] for it in (config, scaled))
  assert [kind.get("factor") for kind in kinds] == [None, 2.0]


@pytest.mark.parametrize(
  ("keys", "is_read"), [(("05", "11"), True), (("5", "11"), True), (("05", "x"), False)]
)
def test_layers_with_values_of_their_own_have_numbers_of_any_width(keys, is_read):
  # transformers pads the numbers with zeros as soon as one has two digits.
  family, make = families.preset("gemma4_e2b")
  hf = family.config_to_hf(make()) | {
    "num_hidden_layers": 12,
    "num_kv_shared_layers": 0,
  }
  del hf["global_head_dim"], hf["layer_types"]
  hf["per_layer_config"] = {key: {"head_dim": 512} for key in keys}
  if is_read:
    full = dict(family.config_from_hf(hf).type_fields)["full"]
    assert dict(full)["head_dim"] == 512
  else:
    with pytest.raises(ValueError, match=r"per_layer_config .* layer, \[5, 11\]"):
      family.config_from_hf(hf)
