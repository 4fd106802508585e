"""Makes the committed models beside this file, with transformers and PEFT.

Run where the `parity` extra is installed: `python tests/golden/make_models.py`, with
the names of models to make only these. Each folder holds a tiny random model in several
safetensors files, a PEFT adapter, and `expected.npz` with what transformers and PEFT
compute in float32:

  tokens, mask [3, 20]       left-padded rows; mask is 1 on valid tokens
  logits, adapted [3, 20, V] with padding masked and positions counted from the first
                             valid token; padded places are zero

  greedy [3, 12]             the most likely next tokens of each row, each from a pass
                             over the whole text; only of the families in GREEDY

and `gradients`, a folder like the model's whose tensors are the gradients of the mean
next-token loss over the valid tokens of these rows.
"""

import json
import pathlib
import sys

import numpy as np
import peft
import torch
import transformers

HERE = pathlib.Path(__file__).parent
VOCAB = 48
COMMON = {
  "vocab_size": VOCAB,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "max_position_embeddings": 128,
  # Wide, so that attention and rotary angles matter for the logits.
  "initializer_range": 0.4,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "pad_token_id": 0,
}
LLAMA31_ROPE = {
  "rope_type": "llama3",
  "rope_theta": 500.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 32,
}


def llama3p1():
  config = transformers.LlamaConfig(
    **COMMON, rms_norm_eps=1e-5, rope_parameters=LLAMA31_ROPE
  )
  return transformers.LlamaForCausalLM(config)


def llama3p2_tied():
  config = transformers.LlamaConfig(
    **COMMON,
    rms_norm_eps=1e-5,
    rope_parameters=LLAMA31_ROPE | {"factor": 32.0},
    tie_word_embeddings=True,
  )
  return transformers.LlamaForCausalLM(config)


def qwen3():
  config = transformers.Qwen3Config(
    **COMMON, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}
  )
  return transformers.Qwen3ForCausalLM(config)


def llama_biased():
  """Biases on all projections of attention, linear scaling."""
  config = transformers.LlamaConfig(
    **COMMON,
    attention_bias=True,
    rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
  )
  return transformers.LlamaForCausalLM(config)


def gemma():
  config = transformers.GemmaConfig(
    **COMMON | {"num_key_value_heads": 1}, hidden_act="gelu"
  )
  return transformers.GemmaForCausalLM(config)


def gemma2():
  """A window shorter than the rows, caps low enough to matter."""
  config = transformers.Gemma2Config(
    **COMMON | {"num_hidden_layers": 3},
    query_pre_attn_scalar=6,
    sliding_window=5,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=4.0,
  )
  return transformers.Gemma2ForCausalLM(config)


def gemma3():
  """Two kinds of layer, each with its window and its rope."""
  config = transformers.Gemma3TextConfig(
    **COMMON | {"num_hidden_layers": 5},
    query_pre_attn_scalar=10,
    sliding_window=6,
    sliding_window_pattern=3,
    rope_parameters={
      "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
      "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
  )
  return transformers.Gemma3ForCausalLM(config)


def qwen2():
  return transformers.Qwen2ForCausalLM(
    transformers.Qwen2Config(
      **COMMON | {"head_dim": 4, "tie_word_embeddings": True},
      rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
  )


def qwen2_window_yarn():
  """Full attention below, a window above; rope stretched by YaRN."""
  config = transformers.Qwen2Config(
    **COMMON | {"num_hidden_layers": 3},
    use_sliding_window=True,
    sliding_window=4,
    max_window_layers=1,
    rope_parameters={
      "rope_type": "yarn",
      "rope_theta": 500.0,
      "factor": 4.0,
      "original_max_position_embeddings": 16,
    },
  )
  return transformers.Qwen2ForCausalLM(config)


def _mixture(**changes):
  config = transformers.Qwen3MoeConfig(
    **COMMON,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    **changes,
  )
  return transformers.Qwen3MoeForCausalLM(config)


def qwen3_moe():
  return _mixture(norm_topk_prob=True)


def qwen3_moe_raw():
  """The weights of a token's experts do not add up to 1."""
  return _mixture(norm_topk_prob=False)


def mistral():
  config = transformers.MistralConfig(**COMMON, sliding_window=7)
  return transformers.MistralForCausalLM(config)


def olmo2():
  config = transformers.Olmo2Config(**COMMON | {"head_dim": 4})
  return transformers.Olmo2ForCausalLM(config)


def olmo3():
  """Windows shorter than the rows in three of four layers, YaRN in the fourth."""
  rope = {"rope_theta": 500.0}
  yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
  config = transformers.Olmo3Config(
    **COMMON | {"head_dim": 4, "num_hidden_layers": 4},
    sliding_window=5,
    rope_parameters={
      "full_attention": rope | yarn,
      "sliding_attention": rope | {"rope_type": "default"},
    },
  )
  return transformers.Olmo3ForCausalLM(config)


def smollm3():
  """The second of three layers has no rotary embedding."""
  config = transformers.SmolLM3Config(
    **COMMON | {"head_dim": 4, "num_hidden_layers": 3},
    no_rope_layers=[1, 0, 1],
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
  )
  return transformers.SmolLM3ForCausalLM(config)


def ministral3():
  """Queries are scaled by their position from the ninth token on."""
  rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
  rope |= {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
  rope |= {"mscale": 2.0, "mscale_all_dim": 0.5}
  config = transformers.Ministral3Config(**COMMON, rope_parameters=rope)
  return transformers.Ministral3ForCausalLM(config)


def granite():
  """All four multipliers."""
  config = transformers.GraniteConfig(
    **COMMON | {"head_dim": 4, "tie_word_embeddings": True},
    embedding_multiplier=1.5,
    attention_multiplier=0.3,
    residual_multiplier=0.7,
    logits_scaling=3.0,
  )
  return transformers.GraniteForCausalLM(config)


def gpt_oss():
  """Sinks, a window of 3 in the first layer, and a gate that is often clamped."""
  config = transformers.GptOssConfig(
    **COMMON,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=3,
    swiglu_limit=1.5,
    rope_parameters={
      "rope_type": "yarn",
      "rope_theta": 500.0,
      "factor": 4.0,
      "original_max_position_embeddings": 16,
      "truncate": False,
    },
  )
  return transformers.GptOssForCausalLM(config)


def nemotron_h():
  """A layer of each part, and a second recurrent one."""
  config = transformers.NemotronHConfig(
    **{k: v for k, v in COMMON.items() if k != "num_hidden_layers"},
    layers_block_type=["linear_attention", "full_attention", "mlp", "linear_attention"],
    mamba_num_heads=4,
    mamba_head_dim=6,
    ssm_state_size=5,
    n_groups=2,
    time_step_min=0.5,
  )
  return transformers.NemotronHForCausalLM(config)


def qwen3_5():
  """Gated delta nets below and above gated attention."""
  rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
  config = transformers.Qwen3_5TextConfig(
    **COMMON | {"num_hidden_layers": 3},
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    rope_parameters=rope,
  )
  return transformers.Qwen3_5ForCausalLM(config)


def qwen3_5_moe():
  """A gated delta net and gated attention; experts in both, with a gated shared one."""
  config = transformers.Qwen3_5MoeTextConfig(
    **{k: v for k, v in COMMON.items() if k != "intermediate_size"},
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=12,
  )
  return transformers.Qwen3_5MoeForCausalLM(config)


def phi3():
  """Fused projections, a partial rotary embedding with LongRoPE's short divisors."""
  rope = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
  rope |= {"short_factor": [1.0, 2.0], "long_factor": [3.0, 5.0]}
  config = transformers.Phi3Config(
    **COMMON | {"hidden_size": 32, "intermediate_size": 20},
    original_max_position_embeddings=64,
    rope_parameters=rope,
  )
  return transformers.Phi3ForCausalLM(config)


def glm4_moe_lite():
  """A dense layer and two with experts; latent attention, values wider than keys."""
  config = transformers.Glm4MoeLiteConfig(
    **{k: v for k, v in COMMON.items() if k != "head_dim"}
    | {"num_key_value_heads": 4, "num_hidden_layers": 3},
    kv_lora_rank=6,
    q_lora_rank=5,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=12,
    moe_intermediate_size=12,
    n_routed_experts=6,
    n_group=3,
    topk_group=2,
    num_experts_per_tok=2,
  )
  return transformers.Glm4MoeLiteForCausalLM(config)


def gemma4():
  """Vectors for every layer, and a layer that reads the keys of an earlier one."""
  proportional = {"rope_type": "proportional", "rope_theta": 100.0}
  config = transformers.Gemma4TextConfig(
    **COMMON | {"num_hidden_layers": 3, "head_dim": 4},
    sliding_window=4,
    global_head_dim=6,
    hidden_size_per_layer_input=5,
    vocab_size_per_layer_input=VOCAB,
    num_kv_shared_layers=1,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    rope_parameters={
      "full_attention": proportional | {"partial_rotary_factor": 0.7},
      "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
  )
  return transformers.Gemma4ForCausalLM(config)


def deepseek_v3():
  """A dense layer and one with experts in groups; YaRN that scales the scores too."""
  rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
  rope |= {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7}
  config = transformers.DeepseekV3Config(
    **{k: v for k, v in COMMON.items() if k != "head_dim"} | {"num_key_value_heads": 4},
    kv_lora_rank=6,
    q_lora_rank=5,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=8,
    moe_intermediate_size=12,
    n_routed_experts=6,
    n_shared_experts=2,
    n_group=3,
    topk_group=2,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    rope_parameters=rope,
  )
  return transformers.DeepseekV3ForCausalLM(config)


def granite4():
  """Only attention and a dense MLP, without a rotary embedding, and multipliers."""
  config = transformers.GraniteMoeHybridConfig(
    **COMMON | {"head_dim": 4, "tie_word_embeddings": True},
    layer_types=["full_attention"] * 2,
    num_local_experts=0,
    shared_intermediate_size=20,
    position_embedding_type=None,
    mamba_n_heads=4,
    embedding_multiplier=1.5,
    attention_multiplier=0.3,
    residual_multiplier=0.7,
    logits_scaling=3.0,
  )
  return transformers.GraniteMoeHybridForCausalLM(config)


BUILDERS = (
  llama3p1,
  llama3p2_tied,
  qwen3,
  llama_biased,
  gemma,
  gemma2,
  gemma3,
  qwen2,
  qwen2_window_yarn,
  qwen3_moe,
  qwen3_moe_raw,
  mistral,
  olmo2,
  olmo3,
  smollm3,
  ministral3,
  granite,
  gpt_oss,
  nemotron_h,
  qwen3_5,
  phi3,
  glm4_moe_lite,
  gemma4,
  deepseek_v3,
  granite4,
  qwen3_5_moe,
)


# The files of the other families are older than this field.
GREEDY = (olmo3, smollm3, ministral3, granite, gpt_oss, nemotron_h, qwen3_5, phi3)
GREEDY += (glm4_moe_lite, gemma4, deepseek_v3, granite4, qwen3_5_moe)


def inputs():
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, VOCAB, (3, 20)).astype(np.int32)
  mask = np.ones_like(tokens)
  for row, padding in enumerate((0, 4, 11)):
    mask[row, :padding] = 0
    tokens[row, :padding] = 0
  return tokens, mask


def logits(model, tokens, mask):
  positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
  with torch.no_grad():
    out = model(
      input_ids=torch.tensor(tokens, dtype=torch.long),
      attention_mask=torch.tensor(mask, dtype=torch.long),
      position_ids=torch.tensor(positions, dtype=torch.long),
    ).logits
  return (out.float().numpy() * mask[..., None]).astype(np.float32)


def greedy(model, tokens, mask, steps):
  """The most likely tokens [B, steps] after each row, without a cache."""
  out = []
  for row, keep in zip(tokens, mask.astype(bool)):
    text = row[keep].tolist()
    for _ in range(steps):
      with torch.no_grad():
        scores = model(input_ids=torch.tensor([text])).logits[0, -1]
      text.append(int(scores.argmax()))
    out.append(text[-steps:])
  return np.array(out, np.int32)


def legacy_spelling(folder):
  """`config.json` as the real Llama folders have it."""
  hf = json.loads((folder / "config.json").read_text())
  rope = hf.pop("rope_parameters")
  hf["rope_theta"] = rope.pop("rope_theta")
  hf["rope_scaling"] = rope
  hf["torch_dtype"] = hf.pop("dtype")
  (folder / "config_legacy.json").write_text(json.dumps(hf, indent=2) + "\n")


def randomise(module, part, draw):
  """Fresh values for what would start as ones or zeros and hide mistakes."""
  for name, value in [*module.named_parameters(), *module.named_buffers()]:
    if part in name:
      draw(value)


def save_gradients(model, tokens, mask, folder):
  """The gradients of the mean loss, in the place of the weights."""
  positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
  tokens, mask, positions = map(torch.tensor, (tokens, mask, positions))
  out = model(
    input_ids=tokens.long(), attention_mask=mask.long(), position_ids=positions.long()
  ).logits
  logps = out.float().log_softmax(-1)[:, :-1]
  chosen = logps.gather(-1, tokens[:, 1:, None].long())[..., 0]
  valid = (mask[:, 1:] * mask[:, :-1]).float()
  (-(chosen * valid).sum() / valid.sum()).backward()
  for value in model.parameters():
    value.data = torch.zeros_like(value) if value.grad is None else value.grad
  # No gradient flows to the corrections of routers, which are stored as buffers.
  randomise(model, "correction", torch.nn.init.zeros_)
  model.save_pretrained(folder)


def main(names=()):
  """Makes the models of these names; all if none is given."""
  for seed, build in enumerate(BUILDERS):
    if names and build.__name__ not in names:
      continue
    torch.manual_seed(seed)
    folder = HERE / build.__name__
    model = build().eval()
    model.set_attn_implementation("eager")
    randomise(model, "norm", lambda x: torch.nn.init.uniform_(x, 0.5, 1.5))
    randomise(model, ".bias", lambda x: torch.nn.init.normal_(x, std=0.4))
    randomise(model, "_bias", lambda x: torch.nn.init.normal_(x, std=0.4))
    randomise(model, "layer_scalar", lambda x: torch.nn.init.uniform_(x, 0.5, 1.5))
    if build in (qwen3_5, qwen3_5_moe):  # with faster decays torch's chunks lose digits
      randomise(model, "A_log", lambda x: torch.nn.init.uniform_(x, -3, 0.5))
    model.save_pretrained(folder, max_shard_size="12KB")
    if build is llama3p1:
      legacy_spelling(folder)
    tokens, mask = inputs()
    plain = logits(model, tokens, mask)
    more = {}
    if build in GREEDY:
      more["greedy"] = greedy(model, tokens, mask, 12)
    targets, fields = ["q_proj", "v_proj"], {}
    if build is gpt_oss:
      names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
      fields = {"target_parameters": names}
    elif build in (glm4_moe_lite, deepseek_v3):
      targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    elif model.config.model_type not in ("qwen3_moe", "qwen3_5_moe_text"):
      targets.append("down_proj")
    if build is granite4:
      targets = ["q_proj", "v_proj", "shared_mlp.output_linear"]
    if build is phi3:
      targets = ["qkv_proj", "o_proj", "gate_up_proj"]
    if build is nemotron_h:
      targets.append("in_proj")
    if build in (qwen3_5, qwen3_5_moe):
      targets += ["in_proj_qkv", "in_proj_z", "out_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **fields)
    adapted = peft.get_peft_model(model, config).eval()
    randomise(adapted, "lora_", lambda x: torch.nn.init.normal_(x, std=0.2))
    adapted.save_pretrained(folder / "adapter")
    (folder / "adapter" / "README.md").unlink(missing_ok=True)
    np.savez_compressed(
      folder / "expected.npz",
      tokens=tokens,
      mask=mask,
      logits=plain,
      adapted=logits(adapted, tokens, mask),
      **more,
    )
    base = adapted.unload()
    for value in base.parameters():
      value.requires_grad_(True)
    save_gradients(base, tokens, mask, folder / "gradients")


if __name__ == "__main__":
  main(sys.argv[1:])
