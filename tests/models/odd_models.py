"""Odd tiny configurations of `transformers` for each family of FAMILIES."""

SIZES = {
  "vocab_size": 48,
  "hidden_size": 16,
  "intermediate_size": 20,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "initializer_range": 0.3,
  "pad_token_id": 0,
  "bos_token_id": 1,
  "eos_token_id": 2,
}
ONE_LAYER, THREE, FIVE = ({"num_hidden_layers": n} for n in (1, 3, 5))
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SCALED = YARN | {"rope_theta": 100.0, "llama_4_scaling_beta": 0.5}

EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}

LINEAR, MLP = "linear_attention", "mlp"
MAMBA = {
  "mamba_num_heads": 4,
  "mamba_head_dim": 6,
  "ssm_state_size": 5,
  "n_groups": 2,
  "head_dim": 6,
}

# Family -> (name of `transformers` before "Config", sets of fields). A set may name
# another kind of the family as "kind".
FAMILIES = {
  "olmo3": (
    "Olmo3",
    (
      FIVE | {"sliding_window": 3, "rms_norm_eps": 1e-3},
      THREE
      | {
        "sliding_window": 1,
        "layer_types": [FULL, SLIDING, FULL],
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {
          FULL: YARN | {"rope_theta": 100.0, "beta_fast": 4.0},
          SLIDING: {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0},
        },
      },
      ONE_LAYER
      | {
        "layer_types": [FULL],
        "attention_bias": True,
        "num_attention_heads": 2,
        "hidden_act": "gelu",
      },
    ),
  ),
  "granite": (
    "Granite",
    (
      FIVE | {"residual_multiplier": 0.3, "logits_scaling": 0.5},
      THREE
      | {
        "attention_bias": True,
        "attention_multiplier": 0.8,
        "embedding_multiplier": 12.0,
        "num_key_value_heads": 1,
      },
      ONE_LAYER
      | {
        "tie_word_embeddings": True,
        "logits_scaling": 7.0,
        "rope_parameters": YARN | {"rope_theta": 100.0},
      },
    ),
  ),
  "ministral3": (
    "Ministral3",
    (
      FIVE | {"head_dim": 6, "rope_parameters": SCALED | {"mscale": 1.0}},
      THREE
      | {
        "head_dim": 4,
        "sliding_window": 6,
        "tie_word_embeddings": True,
        "rope_parameters": SCALED
        | {"original_max_position_embeddings": 3, "llama_4_scaling_beta": 2.0},
      },
      ONE_LAYER
      | {
        "head_dim": 8,
        "num_key_value_heads": 4,
        "rope_parameters": SCALED
        | {"mscale": 3.0, "mscale_all_dim": 1.5, "truncate": False},
      },
    ),
  ),
  "nemotron_h": (
    "NemotronH",
    (
      MAMBA | {"layers_block_type": [LINEAR, MLP, FULL, LINEAR, MLP]},
      MAMBA
      | {
        "layers_block_type": [FULL, LINEAR, LINEAR],
        "n_groups": 1,
        "conv_kernel": 3,
        "use_conv_bias": False,
        "num_key_value_heads": 1,
        "layer_norm_epsilon": 1e-3,
      },
      MAMBA
      | {
        "layers_block_type": [MLP, LINEAR, "moe", FULL, "moe"],
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 5,
        "routed_scaling_factor": 1.5,
        "n_groups": 4,
        "time_step_min": 0.9,
        "mlp_hidden_act": "silu",
      },
    ),
  ),
  "smollm3": (
    "SmolLM3",
    (
      FIVE,
      THREE
      | {
        "no_rope_layers": [0, 1, 0],
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": YARN | {"rope_theta": 100.0},
      },
      ONE_LAYER | {"no_rope_layers": [0], "num_key_value_heads": 4},
    ),
  ),
}
FAMILIES["gpt_oss"] = (
  "GptOss",
  (
    FIVE | EXPERTS | {"sliding_window": 3, "head_dim": 6},
    THREE
    | EXPERTS
    | {
      "layer_types": [FULL, FULL, SLIDING],
      "sliding_window": 1,
      "num_key_value_heads": 1,
      "num_experts_per_tok": 1,
      "tie_word_embeddings": True,
      "rope_parameters": YARN | {"rope_theta": 100.0, "truncate": False},
    },
    # The gate is clamped for many hidden units, and every token uses every expert.
    ONE_LAYER
    | EXPERTS
    | {
      "layer_types": [FULL],
      "attention_bias": False,
      "num_experts_per_tok": 5,
      "swiglu_limit": 0.5,
      "swiglu_alpha": 1.1,
    },
  ),
)
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 100.0}
DEFAULT = {"rope_type": "default", "rope_theta": 50.0}
FAMILIES["gemma4"] = (
  "Gemma4Text",
  (
    # As 31B: one map for keys and values in full layers, with larger heads.
    FIVE
    | {
      "sliding_window": 3,
      "head_dim": 6,
      "global_head_dim": 8,
      "num_global_key_value_heads": 1,
      "attention_k_eq_v": True,
      "hidden_size_per_layer_input": 0,
      "final_logit_softcapping": 2.0,
      "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
      "rope_parameters": {
        FULL: PROPORTIONAL | {"partial_rotary_factor": 0.5},
        SLIDING: DEFAULT,
      },
    },
    # As E2B: vectors for every layer, and two layers that read the keys of others.
    FIVE
    | {
      "sliding_window": 4,
      # With smaller weights, rounding a weight changes the gradient by more than 1e-5.
      "initializer_range": 2.0,
      "head_dim": 4,
      "global_head_dim": 6,
      "hidden_size_per_layer_input": 5,
      "vocab_size_per_layer_input": 48,
      "num_kv_shared_layers": 2,
      "use_double_wide_mlp": True,
      "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
      "rope_parameters": {
        FULL: PROPORTIONAL | {"partial_rotary_factor": 0.7},
        SLIDING: DEFAULT,
      },
    },
    # As 26B-A4B: experts beside the MLP.
    THREE
    | {
      "sliding_window": 2,
      "head_dim": 4,
      "global_head_dim": 6,
      "num_global_key_value_heads": 4,
      "attention_k_eq_v": True,
      "hidden_size_per_layer_input": 0,
      "enable_moe_block": True,
      "num_experts": 5,
      "top_k_experts": 2,
      "moe_intermediate_size": 8,  # torch's grouped product needs a multiple of 4
      "layer_types": [SLIDING, SLIDING, FULL],
    },
    ONE_LAYER
    | {
      "layer_types": [FULL],
      "global_head_dim": 4,
      "attention_bias": True,
      "num_key_value_heads": 4,
      "tie_word_embeddings": False,
      "hidden_size_per_layer_input": 3,
      "vocab_size_per_layer_input": 64,
    },
  ),
)
DELTA = {
  "linear_num_key_heads": 2,
  "linear_num_value_heads": 4,
  "linear_key_head_dim": 6,
  "linear_value_head_dim": 5,
}
FAMILIES["qwen3_5"] = (
  "Qwen3_5Text",
  (
    FIVE | DELTA | {"head_dim": 16, "rms_norm_eps": 1e-3},
    THREE
    | DELTA
    | {
      "head_dim": 6,
      "layer_types": [FULL, LINEAR, FULL],
      "num_key_value_heads": 1,
      "linear_num_value_heads": 2,
      "linear_conv_kernel_dim": 2,
      "rms_norm_eps": 1e-2,
      "tie_word_embeddings": True,
      "rope_parameters": YARN
      | {"rope_theta": 100.0, "partial_rotary_factor": 0.7, "mrope_section": [1, 0, 1]},
    },
    THREE
    | DELTA
    | {
      "head_dim": 8,
      "layer_types": [LINEAR, LINEAR, FULL],
      "attention_bias": True,
      "linear_num_key_heads": 1,
      "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    },
  ),
)
SPARSE = {
  "num_experts": 5,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 8,
  "shared_expert_intermediate_size": 12,
}
FAMILIES["qwen3_5_moe"] = (
  "Qwen3_5MoeText",
  (
    FIVE | DELTA | SPARSE | {"head_dim": 16, "rms_norm_eps": 1e-3},
    THREE
    | DELTA
    | SPARSE
    | {
      "head_dim": 6,
      "layer_types": [FULL, LINEAR, FULL],
      "num_key_value_heads": 1,
      "num_experts_per_tok": 1,
      "linear_num_value_heads": 2,
      "linear_conv_kernel_dim": 2,
      "rms_norm_eps": 1e-2,
      "initializer_range": 0.2,
      "tie_word_embeddings": True,
      "rope_parameters": YARN
      | {"rope_theta": 100.0, "partial_rotary_factor": 0.7, "mrope_section": [1, 0, 1]},
    },
    # Every token uses every expert, and the shared one is narrower than they are.
    THREE
    | DELTA
    | SPARSE
    | {
      "head_dim": 8,
      "layer_types": [LINEAR, LINEAR, FULL],
      "num_experts_per_tok": 5,
      "shared_expert_intermediate_size": 4,
      "attention_bias": True,
      "linear_num_key_heads": 1,
    },
  ),
)
LONG = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
FAMILIES["phi3"] = (
  "Phi3",
  (
    FIVE | {"sliding_window": 3, "num_attention_heads": 2, "num_key_value_heads": 1},
    # Every sequence is longer than the original context of 4 tokens, so the engine
    # refuses it; ...
    THREE
    | {
      "tie_word_embeddings": True,
      "hidden_size": 32,
      "num_key_value_heads": 1,
      "original_max_position_embeddings": 4,
      "rope_parameters": LONG | {"short_factor": [1.0, 2.0], "long_factor": [1.5, 3.0]},
    },
    # ... or none is longer than 40 tokens.
    ONE_LAYER
    | {
      "head_dim": 8,
      "hidden_size": 32,
      "num_key_value_heads": 4,
      "original_max_position_embeddings": 40,
      "rope_parameters": LONG
      | {"short_factor": [1.0, 2.0], "long_factor": [9.0, 9.0]}
      | {"attention_factor": 1.7},
    },
  ),
)
# Only attention, and no experts beside the MLP.
DENSE4 = {
  "num_local_experts": 0,
  "shared_intermediate_size": 20,
  "position_embedding_type": "rope",
  "mamba_n_heads": 4,
}
FAMILIES["granite4"] = (
  "GraniteMoeHybrid",
  (
    FIVE | DENSE4 | {"layer_types": [FULL] * 5, "residual_multiplier": 0.3},
    THREE
    | DENSE4
    | {
      "layer_types": [FULL] * 3,
      "position_embedding_type": None,  # no rotary embedding
      "attention_multiplier": 0.8,
      "embedding_multiplier": 12.0,
      "num_key_value_heads": 1,
    },
    ONE_LAYER
    | DENSE4
    | {
      "layer_types": [FULL],
      "attention_bias": True,
      "tie_word_embeddings": True,
      "logits_scaling": 7.0,
    },
  ),
)
LATENT = {
  "num_key_value_heads": 4,
  "kv_lora_rank": 6,
  "q_lora_rank": 5,
  "qk_nope_head_dim": 6,
  "qk_rope_head_dim": 4,
  "v_head_dim": 8,
  "moe_intermediate_size": 12,
  "n_routed_experts": 6,
  "num_experts_per_tok": 2,
}
# Groups of experts; YaRN that scales the scores too.
GROUPED = {
  "n_group": 3,
  "topk_group": 2,
  "norm_topk_prob": False,
  "n_shared_experts": 2,
  "rope_parameters": YARN | {"rope_theta": 100.0, "mscale": 1.0, "mscale_all_dim": 0.7},
}
FAMILIES["glm4_moe_lite"] = (
  "Glm4MoeLite",
  (
    FIVE | LATENT | {"v_head_dim": 12},  # values wider than keys
    THREE
    | LATENT
    | GROUPED
    | {"q_lora_rank": None, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ONE_LAYER
    | LATENT
    | {
      "mlp_layer_types": ["sparse"],
      "attention_bias": True,
      "rope_interleave": False,
      "tie_word_embeddings": True,
    },
  ),
)
FAMILIES["deepseek_v3"] = (
  "DeepseekV3",
  (
    FIVE | LATENT | GROUPED | {"first_k_dense_replace": 2},
    THREE
    | LATENT
    | {
      "q_lora_rank": None,
      "n_group": 1,
      "topk_group": 1,
      "first_k_dense_replace": 0,
      "attention_bias": True,
    },
    ONE_LAYER | LATENT | GROUPED | {"first_k_dense_replace": 0, "topk_group": 1},
  ),
)
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 100.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
FAMILIES["llama3"] = (
  "Llama",
  (
    FIVE | {"rope_parameters": LLAMA3, "num_key_value_heads": 1},
    THREE | {"head_dim": 6, "tie_word_embeddings": True, "attention_bias": True},
    ONE_LAYER
    | {
      "num_key_value_heads": 4,
      "rms_norm_eps": 1e-2,
      "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0},
    },
  ),
)
FAMILIES["mistral"] = (
  "Mistral",
  (
    FIVE | {"sliding_window": 3, "head_dim": 6},
    THREE | {"sliding_window": None, "num_key_value_heads": 1, "rms_norm_eps": 1e-2},
    ONE_LAYER
    | {
      "sliding_window": 1,
      "tie_word_embeddings": True,
      "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    },
  ),
)
FAMILIES["olmo2"] = (
  "Olmo2",
  (
    FIVE | {"rms_norm_eps": 1e-3},
    THREE
    | {
      "num_key_value_heads": 1,
      "tie_word_embeddings": True,
      "rope_parameters": YARN | {"rope_theta": 100.0},
    },
    ONE_LAYER | {"attention_bias": True, "num_attention_heads": 2},
  ),
)
FAMILIES["qwen2"] = (
  "Qwen2",
  (
    FIVE | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    THREE | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ONE_LAYER
    | {"num_key_value_heads": 4, "rope_parameters": YARN | {"rope_theta": 100.0}},
  ),
)
FAMILIES["qwen3"] = (
  "Qwen3",
  (
    FIVE | {"head_dim": 6, "rms_norm_eps": 1e-3},
    THREE
    | {
      "head_dim": 8,
      "num_key_value_heads": 1,
      "attention_bias": True,
      "tie_word_embeddings": True,
      "rope_parameters": YARN | {"rope_theta": 100.0},
    },
    FIVE
    | SPARSE
    | {
      "kind": "Qwen3Moe",
      "head_dim": 6,
      "mlp_only_layers": [1],
      "decoder_sparse_step": 2,
      "norm_topk_prob": True,
    },
    # Every token uses every expert.
    ONE_LAYER | SPARSE | {"kind": "Qwen3Moe", "head_dim": 4, "num_experts_per_tok": 5},
  ),
)
FAMILIES["gemma"] = (
  "Gemma",
  (
    THREE | {"head_dim": 6, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    FIVE
    | {
      "kind": "Gemma2",
      "head_dim": 6,
      "sliding_window": 3,
      "query_pre_attn_scalar": 7,
      "attn_logit_softcapping": 2.0,
      "final_logit_softcapping": 1.5,
    },
    THREE
    | {
      "kind": "Gemma2",
      "head_dim": 4,
      "layer_types": [FULL, SLIDING, FULL],
      "sliding_window": 1,
      "attention_bias": True,
      "attn_logit_softcapping": None,
      "final_logit_softcapping": None,
    },
  ),
)
FAMILIES["gemma3"] = (
  "Gemma3Text",
  (
    FIVE | {"head_dim": 6, "sliding_window": 3, "query_pre_attn_scalar": 7},
    THREE
    | {
      "head_dim": 8,
      "num_key_value_heads": 1,
      "layer_types": [FULL, SLIDING, FULL],
      "sliding_window": 1,
      "rope_parameters": {
        FULL: {"rope_type": "linear", "rope_theta": 100.0, "factor": 8.0},
        SLIDING: DEFAULT,
      },
    },
    ONE_LAYER | {"head_dim": 4, "layer_types": [FULL], "attention_bias": True},
  ),
)
CASES = [(name, i) for name, (_, cases) in FAMILIES.items() for i in range(len(cases))]
