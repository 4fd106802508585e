"""Published parameter counts of the checkpoints that our presets describe."""

# Preset -> (repository on the Hugging Face hub, parameters). The numbers are those of
# the "Safetensors, model size" box of the repository's page, that is of the metadata of
# its files, as known when the preset was added; no test asks the hub. The files of
# Qwen3 0.6B and 1.7B hold the tied table twice; it is counted once here: 751,632,384 -
# 151,936 * 1024 and 2,031,739,904 - 151,936 * 2048. The numbers of Granite 3
# and 4, Ministral 3, OLMo 3, SmolLM3, Phi 4, GLM-4.7 Flash and DeepSeek-V3 were
# computed from the presets and not compared with the pages. transformers counts as many
# for every preset, and has eight as its defaults: published_live_test.py.
COUNTS = {
  "gemma_2b": ("google/gemma-2b", 2_506_172_416),
  "gemma_7b": ("google/gemma-7b", 8_537_680_896),
  "gemma2_2b": ("google/gemma-2-2b", 2_614_341_888),
  "gemma2_9b": ("google/gemma-2-9b", 9_241_705_984),
  "gemma2_27b": ("google/gemma-2-27b", 27_227_128_320),
  "gemma3_270m": ("google/gemma-3-270m", 268_098_176),
  "gemma3_1b": ("google/gemma-3-1b-pt", 999_885_952),
  "gemma3_4b": ("google/gemma-3-4b-pt", 4_300_079_472),
  "gemma3_12b": ("google/gemma-3-12b-pt", 12_187_325_040),
  "gemma3_27b": ("google/gemma-3-27b-pt", 27_432_406_640),
  # The model card (arXiv:2508.10925) gives 20.91B and 116.83B parameters; the numbers
  # are those of the presets. The files count four-bit weights otherwise.
  "gpt_oss_20b": ("openai/gpt-oss-20b", 20_914_757_184),
  "gpt_oss_120b": ("openai/gpt-oss-120b", 116_829_156_672),
  # Without the layer for further tokens (MTP), which the pages count.
  "deepseek_v3_671b": ("deepseek-ai/DeepSeek-V3", 671_026_419_200),
  "glm4p7_flash": ("zai-org/GLM-4.7-Flash", 29_943_393_920),
  # Text models without towers. The pages name 2.3B and 4.5B without the table of the
  # vectors for every layer (2,348,810,240 and 2,818,572,288), 30.7B and 25.2B.
  "gemma4_e2b": ("google/gemma-4-E2B", 4_628_569_379),
  "gemma4_e4b": ("google/gemma-4-E4B", 7_463_013_418),
  "gemma4_31b": ("google/gemma-4-31B", 30_697_345_340),
  "gemma4_26b_a4b": ("google/gemma-4-26B-A4B", 25_233_141_790),
  "granite3p1_2b": ("ibm-granite/granite-3.1-2b-base", 2_533_531_648),
  "granite3p1_8b": ("ibm-granite/granite-3.1-8b-base", 8_170_848_256),
  "granite3p3_2b": ("ibm-granite/granite-3.3-2b-base", 2_533_539_840),
  "granite3p3_8b": ("ibm-granite/granite-3.3-8b-base", 8_170_864_640),
  "granite4_1b": ("ibm-granite/granite-4.0-1b-base", 1_631_750_144),
  "granite4_micro": ("ibm-granite/granite-4.0-micro-base", 3_402_836_480),
  "llama3_8b": ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
  "llama3_70b": ("meta-llama/Meta-Llama-3-70B", 70_553_706_496),
  "llama3p1_8b": ("meta-llama/Llama-3.1-8B", 8_030_261_248),
  "llama3p1_70b": ("meta-llama/Llama-3.1-70B", 70_553_706_496),
  "llama3p1_405b": ("meta-llama/Llama-3.1-405B", 405_853_388_800),
  "llama3p2_1b": ("meta-llama/Llama-3.2-1B", 1_235_814_400),
  "llama3p2_3b": ("meta-llama/Llama-3.2-3B", 3_212_749_824),
  "llama3p3_70b": ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
  # Text models; the pages count the tower of the images too, and name 3.4B, 8.4B and
  # 13.5B for the text.
  "ministral3_3b": ("mistralai/Ministral-3-3B-Base-2512", 3_429_006_336),
  "ministral3_8b": ("mistralai/Ministral-3-8B-Base-2512", 8_489_553_920),
  "ministral3_14b": ("mistralai/Ministral-3-14B-Base-2512", 13_506_073_600),
  "mistral_7b_v0p1": ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
  "mistral_7b_v0p3": ("mistralai/Mistral-7B-v0.3", 7_248_023_552),
  "mistral_nemo_12b": ("mistralai/Mistral-Nemo-Base-2407", 12_247_782_400),
  "nemotron3_nano_30b_a3b": (
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    31_577_940_288,
  ),
  "nemotron_nano_9b_v2": ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8_888_227_328),
  "olmo2_1b": ("allenai/OLMo-2-0425-1B", 1_484_916_736),
  "olmo2_7b": ("allenai/OLMo-2-1124-7B", 7_298_617_344),
  "olmo2_13b": ("allenai/OLMo-2-1124-13B", 13_716_198_400),
  "olmo2_32b": ("allenai/OLMo-2-0325-32B", 32_234_279_936),
  "olmo3_7b": ("allenai/Olmo-3-1025-7B", 7_298_011_136),
  "olmo3_32b": ("allenai/Olmo-3-1125-32B", 32_233_522_176),
  "phi4_14b": ("microsoft/phi-4", 14_659_507_200),
  "phi4_mini_3p8b": ("microsoft/Phi-4-mini-instruct", 3_836_021_760),
  "qwen2p5_0p5b": ("Qwen/Qwen2.5-0.5B", 494_032_768),
  "qwen2p5_1p5b": ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
  "qwen2p5_3b": ("Qwen/Qwen2.5-3B", 3_085_938_688),
  "qwen2p5_7b": ("Qwen/Qwen2.5-7B", 7_615_616_512),
  "qwen2p5_14b": ("Qwen/Qwen2.5-14B", 14_770_033_664),
  "qwen2p5_32b": ("Qwen/Qwen2.5-32B", 32_763_876_352),
  "qwen2p5_math_1p5b": ("Qwen/Qwen2.5-Math-1.5B", 1_543_714_304),
  "deepseek_r1_distill_qwen_1p5b": (
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    1_777_088_000,
  ),
  "qwen3_0p6b": ("Qwen/Qwen3-0.6B", 596_049_920),
  "qwen3_1p7b": ("Qwen/Qwen3-1.7B", 1_720_574_976),
  "qwen3_4b": ("Qwen/Qwen3-4B", 4_022_468_096),
  "qwen3_8b": ("Qwen/Qwen3-8B", 8_190_735_360),
  "qwen3_14b": ("Qwen/Qwen3-14B", 14_768_307_200),
  "qwen3_32b": ("Qwen/Qwen3-32B", 32_762_123_264),
  "qwen3_30b_a3b": ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
  # Text models; the pages count the tower of the images and the MTP layer too. Computed
  # from the presets and not compared with the pages.
  "qwen3p5_0p8b": ("Qwen/Qwen3.5-0.8B", 752_393_024),
  "qwen3p5_2b": ("Qwen/Qwen3.5-2B", 1_881_825_088),
  "qwen3p5_4b": ("Qwen/Qwen3.5-4B", 4_205_751_296),
  "qwen3p5_9b": ("Qwen/Qwen3.5-9B", 8_953_803_264),
  "qwen3p5_27b": ("Qwen/Qwen3.5-27B", 26_895_998_464),
  "qwen3p5_35b_a3b": ("Qwen/Qwen3.5-35B-A3B", 34_660_610_688),
  "qwen3p5_122b_a10b": ("Qwen/Qwen3.5-122B-A10B", 122_111_526_912),
  "qwen3p5_397b_a17b": ("Qwen/Qwen3.5-397B-A17B", 396_346_350_336),
  "smollm3_3b": ("HuggingFaceTB/SmolLM3-3B", 3_075_098_624),
}

# Other names of the same sizes.
ALIASES = {
  **{
    f"gemma4_{size}_it": f"gemma4_{size}" for size in ("e2b", "e4b", "31b", "26b_a4b")
  },
  "gemma1p1_2b_it": "gemma_2b",
  "gemma1p1_7b_it": "gemma_7b",
  "llama3p2_1b_instruct": "llama3p2_1b",
  "llama3p2_3b_instruct": "llama3p2_3b",
  "qwen2p5_coder_0p5b": "qwen2p5_0p5b",
  "qwen2p5_coder_3b": "qwen2p5_3b",
  "qwen2p5_coder_7b": "qwen2p5_7b",
  "qwen3_4b_instruct_2507": "qwen3_4b",
  "qwen3_4b_thinking_2507": "qwen3_4b",
  "gemma_2b_it": "gemma_2b",
  "gemma_7b_it": "gemma_7b",
  "gemma2_2b_it": "gemma2_2b",
  "gemma2_9b_it": "gemma2_9b",
  "gemma2_27b_it": "gemma2_27b",
  "gemma3_270m_it": "gemma3_270m",
  "gemma3_1b_it": "gemma3_1b",
  "gemma3_1b_pt": "gemma3_1b",
  "gemma3_4b_it": "gemma3_4b",
  "gemma3_4b_pt": "gemma3_4b",
  "gemma3_12b_it": "gemma3_12b",
  "gemma3_12b_pt": "gemma3_12b",
  "gemma3_27b_it": "gemma3_27b",
  "gemma3_27b_pt": "gemma3_27b",
  "qwen2p5_0p5b_instruct": "qwen2p5_0p5b",
  "qwen2p5_1p5b_instruct": "qwen2p5_1p5b",
  "qwen2p5_3b_instruct": "qwen2p5_3b",
  "qwen2p5_7b_instruct": "qwen2p5_7b",
  "qwen3_0p6b_base": "qwen3_0p6b",
  "qwen3_1p7b_base": "qwen3_1p7b",
  "qwen3_4b_base": "qwen3_4b",
  "qwen3_8b_base": "qwen3_8b",
  "qwen3_14b_base": "qwen3_14b",
}

PUBLISHED = {name: count for name, (_, count) in COUNTS.items()} | {
  alias: COUNTS[name][1] for alias, name in ALIASES.items()
}
