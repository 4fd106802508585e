"""Every preset on TPU chips that are not here, by the real TPU compiler.

Needs libtpu (the `tpu` extra), which asks for no TPU: `pytest -m slow
tests/models/tpu_aot_test.py`.
"""

import math

import pytest

from tests.models.published import COUNTS

pytest.importorskip("libtpu", reason="pip install 'tunix[tpu]'")
from benchmarks import tpu_aot
from tunix.cli import config as config_lib
from tunix.cli.commands import plan as plan_main
from tunix.perf import chips

pytestmark = pytest.mark.slow

# (topology, mesh) of slices that hold the weights in bfloat16.
SMALL = "v5e:2x4", {"fsdp": 4, "ep": 1, "tp": 2}
MIDDLE = "v5e:4x8", {"fsdp": 16, "ep": 1, "tp": 2}
LARGE = "v5e:16x16", {"fsdp": 64, "ep": 1, "tp": 4}
# 256 experts: their weights, gathered for a layer, would not fit; tokens travel.
HUGE = "v5p:4x4x4", {"fsdp": 2, "ep": 32, "tp": 1}


# Presets whose train step with adapters is compiled.
COMPILED = (
  "deepseek_v3_671b",
  "gemma2_2b",
  "gemma3_1b",
  "gemma3_4b",
  "gemma4_e2b",
  "gemma_2b",
  "glm4p7_flash",
  "gpt_oss_20b",
  "granite3p3_2b",
  "granite4_1b",
  "llama3p2_1b",
  "ministral3_3b",
  "mistral_7b_v0p3",
  "nemotron3_nano_30b_a3b",
  "nemotron_nano_9b_v2",
  "olmo2_1b",
  "olmo3_7b",
  "phi4_mini_3p8b",
  "qwen2p5_0p5b",
  "qwen3_0p6b",
  "qwen3_30b_a3b",
  "qwen3p5_0p8b",
  "qwen3p5_35b_a3b",
  "smollm3_3b",
)


def slice_for(preset):
  count = COUNTS[preset][1]
  bounds = (10e9, SMALL), (40e9, MIDDLE), (500e9, LARGE), (math.inf, HUGE)
  return next(found for bound, found in bounds if count < bound)


@pytest.mark.parametrize("preset", COUNTS)
def test_it_lowers(preset):
  topology, sizes = slice_for(preset)
  mesh, rows = tpu_aot.tpu_mesh(topology, **sizes), sizes["fsdp"] * sizes["ep"]
  text = tpu_aot.lower_forward(preset, mesh, rows, 1024).as_text()
  assert "sdy.mesh" in text or "mhlo.sharding" in text
  text = tpu_aot.lower(preset, mesh, rows, 1024, lora_rank=16).as_text()
  assert "sdy.mesh" in text or "mhlo.sharding" in text


@pytest.mark.parametrize("preset", COMPILED)
def test_it_compiles_and_fits(preset):
  topology, sizes = slice_for(preset)
  mesh, rows = tpu_aot.tpu_mesh(topology, **sizes), sizes["fsdp"] * sizes["ep"]
  compiled = tpu_aot.lower(preset, mesh, rows, 2048, lora_rank=16).compile()
  plan = compiled.memory_analysis()
  print(f"{preset} on {topology}: {plan.peak_memory_in_bytes / 2**30:.2f} GiB a chip")
  chip = chips.chip_of(mesh.devices.flat[0])
  assert plan.peak_memory_in_bytes < chip.memory_bytes


def test_offloading_moves_what_layers_are_given_to_the_host():
  words = ["--model.name=llama3p2_1b", "--model.dtype=bfloat16"]
  words += ["--model.args={num_layers: 4, scan_layers: true}", "--data.max_length=4096"]
  words += ["--training.global_batch_size=16"]

  def step(remat):
    config = config_lib.load([*words, f"--model.remat={remat}"])
    made = plan_main.plan(config, "v5e:2x2")
    return made, made.programs[0]

  kept, block = step("block")
  offloading, offload = step("offload")
  inputs = 4 * 4 * 4096 * 2048 * 2  # layers, rows of a device, tokens, width, bytes
  assert (block.host_bytes, offload.host_bytes) == (0, inputs)
  assert offload.peak_bytes <= block.peak_bytes - inputs // 2
  assert "of its host's memory for each device" in str(offloading)
  assert "host" not in str(kept)


def test_a_plan_of_too_much_says_what_would_fit():
  words = ["--model.name=llama3p1_8b", "--model.dtype=bfloat16", "--model.remat=block"]
  words += ["--data.max_length=4096", "--training.global_batch_size=8"]
  words += ["--training.max_steps=10"]
  config = config_lib.load(words)
  made = plan_main.plan(config, "v5e:2x4", fit=True)
  assert made.fits is False and made.programs[0].seconds is None
  assert "--training.offload_optimizer=true" in made.advice
  offloaded = config_lib.load([*words, "--training.offload_optimizer=true"])
  step, evaluation = plan_main.plan(offloaded, "v5e:2x4").programs
  count = COUNTS["llama3p1_8b"][1]
  assert step.host_bytes == pytest.approx(2 * 4 * count / 8, rel=1e-3)  # two moments
  assert evaluation.beside_bytes < 2**20
