"""Plans for GPUs that are not there; CI has no compiler for them."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from tests.plan import record_gpu
from tunix.cli import main
from tunix.generate.decoders import layout
from tunix.perf import chips, hlo_flops
from tunix.perf.hlo_text import Program
from tunix.plan import apart, collectives, gpus, program, topology

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
  ("name", "sizes"),
  [("h100:8", (1, 1, 8)), ("a100-40:1", (1, 1, 1)), ("h200:1x4x8", (1, 4, 8))],
)
def test_slices_hosts_and_gpus(name, sizes):
  assert gpus.is_name(name) and gpus.shape(name) == sizes


@pytest.mark.parametrize(
  "name",
  [
    "h100",
    "h100:",
    "h100:0",
    "h100:9",
    "h100:2x8",
    "h100:1x0x8",
    "h100:1x1x16",
    "h100:1x2x8xq",
  ],
)
def test_wrong_numbers_are_refused_before_a_process_starts(name, monkeypatch):
  monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail())
  with pytest.raises(ValueError, match=f"topology is '{name}'; expected 1 to 8 GPUs"):
    apart.plan(print, None, name)


def test_a_wrong_name_lists_the_known_ones():
  with pytest.raises(ValueError, match="'h300:8'; expected") as caught:
    topology.find("h300:8")
  assert all(f"{card}:8" in str(caught.value) for card in gpus.CARDS)


@pytest.mark.parametrize("name", gpus.CARDS)
def test_every_card_has_rates_and_the_memory_that_jax_takes(name, monkeypatch):
  card = gpus.CARDS[name]
  monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
  chip = gpus.chip(f"{name}:8")
  assert chip.memory_bytes == card.memory * 3 // 4
  assert chip.memory_rate == pytest.approx(card.rate, rel=0.05) and chip.link_rate
  assert chip == dataclasses.replace(
    chips.chip_of(card.kind), kind=card.kind, memory_bytes=chip.memory_bytes
  )
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
  assert gpus.chip(f"{name}:8").memory_bytes == card.memory // 2
  assert f"device_memory_size: {card.memory}" in str(card)


def test_gathered_weights_fit_into_a_planned_card(monkeypatch):
  """Engines on several cards ask for the memory of one, which a plan cannot."""
  monkeypatch.setattr(chips, "_planned", {})
  monkeypatch.setattr(gpus, "devices", lambda name: [])
  found = topology.find("h100:8")
  device = types.SimpleNamespace(device_kind=gpus.CARDS["h100"].kind, platform="gpu")
  assert (
    layout._memory_of(device) == found.memory_bytes == gpus.chip("h100").memory_bytes
  )


@pytest.mark.parametrize(
  ("plugin", "pjrt", "match"),
  [
    (None, None, r"no GPU: pip install 'tunix\[plan-gpu\]'"),
    ("0.1", "1.2", "jax-cuda13-plugin is 0.1, and jaxlib is 1.2; .*plugin==1.2'"),
    ("1.2", "0.1", "jax-cuda13-pjrt is 0.1, and jaxlib is 1.2; .*pjrt==1.2'"),
  ],
)
def test_the_compiler_must_be_there_in_the_version_of_jaxlib(
  plugin, pjrt, match, monkeypatch
):
  versions = {"jax-cuda13-plugin": plugin, "jax-cuda13-pjrt": pjrt, "jaxlib": "1.2"}
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: plugin)
  monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
  with pytest.raises(ImportError, match=match):
    topology.find("h100:8")


def in_this_process(command, *, env, check):
  """Stands in for the child: runs its code here."""
  del check
  assert command[:2] == [sys.executable, "-c"] and env["JAX_PLATFORMS"] == "cpu"
  assert env["XLA_FLAGS"].startswith("--mine ") and gpus.FLAGS in env["XLA_FLAGS"]
  code = command[2].partition("; ")[2]
  if "no answer" not in env:
    exec(code)
  return subprocess.CompletedProcess(command, 3)


def test_a_child_returns_results_and_errors(monkeypatch):
  monkeypatch.setattr(subprocess, "run", in_this_process)
  monkeypatch.setenv("XLA_FLAGS", "--mine")
  assert apart.call(divmod, 17, 5) == (3, 2)
  assert apart.call(sorted, [1, 3, 2], reverse=True) == [3, 2, 1]
  with pytest.raises(FileNotFoundError, match="no-such-file"):
    apart.call(os.stat, "no-such-file")
  with pytest.raises(ZeroDivisionError):  # a fault keeps its traceback
    apart.call(divmod, 1, 0)
  monkeypatch.setenv("no answer", "1")
  with pytest.raises(RuntimeError, match="exit status 3; expected a plan"):
    apart.call(divmod, 17, 5)


def test_a_real_child_has_no_gpus(monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  assert apart.call(os.getenv, "JAX_PLATFORMS") == "cpu"


@pytest.mark.parametrize(
  ("words", "told"),
  [
    (["--topology=h100:8", "--ship=out"], "--ship is 'out' and --topology h100:8"),
    (["--topology=h100:12"], "topology is 'h100:12'; expected 1 to 8 GPUs"),
    (["--topology=h100:8"], "pip install 'tunix[plan-gpu]'"),
  ],
)
def test_the_command_plans_in_a_child(words, told, monkeypatch, capsys, tmp_path):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(subprocess, "run", in_this_process)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  monkeypatch.setenv("XLA_FLAGS", "--mine")
  assert main.main(["plan", "--model.name=qwen3_0p6b", *words]) == 2
  error = capsys.readouterr().err
  assert told in error and error.count("\n") == 1


def check_step(text):
  """Checks the collectives that `record_gpu.step` must have, in any order."""
  found = collectives.read(Program(text, is_compiled=True), 8)
  layers, width = record_gpu.LAYERS, record_gpu.WIDTH
  assert collectives.counts(found) == {
    "all-gather": 2 * layers,  # of weights: once for each pass
    "all-reduce": 1,
    "reduce-scatter": layers,
  }
  assert {one.group for one in found} == {8}
  matrix = 2 * width * width  # bfloat16
  sizes = {one.kind: one.bytes for one in found}
  assert sizes == {
    "all-gather": matrix,
    "all-reduce": 4,  # of the loss, a scalar of float32
    "reduce-scatter": matrix // 8,
  }
  received = sum(one.received for one in found)
  assert received == pytest.approx(3 * layers * matrix * 7 / 8 + 2 * 4 * 7 / 8)


def test_collectives_of_a_program_for_gpus():
  check_step(record_gpu.STEP.read_text())


def test_several_arrays_in_one_all_reduce():
  text = (
    "ENTRY %main (a: f32[]) -> f32[] {\n"
    "  %x = (f32[3]{0}, f32[]) all-reduce-start(%a, %b), channel_id=1, "
    "replica_groups={{0,1}}, to_apply=%sum\n}\n"
  )
  (one,) = collectives.read(Program(text, is_compiled=True), 2)
  assert (one.kind, one.bytes, one.shape) == ("all-reduce", 16, "f32[3], f32[]")


class Lowered:
  """A program of which only the text is kept."""

  def __init__(self, text):
    self._text = text

  def as_text(self, **options):
    del options
    return self._text


# The names of the kernels, and those with a bias, which segments are.
NAMES = ("Softmax", "ScaleBiasSoftmax")


def attention_text(name):
  return record_gpu.ATTENTION.read_text().replace("fmhaSoftmax", f"fmha{name}")


@pytest.mark.parametrize("name", NAMES)
def test_cudnn_attention_counts_the_visible_pairs(name):
  (rows, length), (heads, _) = record_gpu.ROW, record_gpu.HEADS
  window = record_gpu.WINDOW
  causal = sum(i + 1 for i in range(length))
  near = sum(min(i + 1, window) for i in range(length))
  # Forward: scores and values. Backward: scores again, and two gradients of each.
  products = 2 + 5
  assert hlo_flops.count_flops(Lowered(attention_text(name))).flops == (
    products * 2 * rows * heads * record_gpu.HEAD_DIM * (causal + near)
  )


@pytest.mark.parametrize("name", NAMES)
def test_cudnn_keeps_sums_that_a_plan_without_gpus_adds(name):
  text = attention_text(name)
  (rows, length), (heads, _) = record_gpu.ROW, record_gpu.HEADS
  sums = 3 * 4 * rows // 8 * length * heads * record_gpu.HEAD_DIM  # of one device
  assert program.kernel_bytes(Program(text, is_compiled=False)) == sums
  known = Program(text.replace("u8[0]", "u8[64]"), is_compiled=False)
  assert program.kernel_bytes(known) == 0  # the compiler's figures have it


def test_no_recipe_is_planned_above_the_peak():
  figures = json.loads((ROOT / "docs" / "recipes.json").read_text())
  plans = [
    of for one in figures.values() for of in (one, *one.get("gpus", {}).values())
  ]
  assert len(plans) > len(figures)
  assert all(0 < of["mfu"] <= 1 for of in plans)


@pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  reason="the extra plan-gpu is not installed",
)
@pytest.mark.parametrize("card", gpus.CARDS)
def test_every_card_compiles(card):
  devices = gpus.devices(f"{card}:8")
  assert devices[0].device_kind == gpus.CARDS[card].kind and len(devices) == 8
  check_step(record_gpu.step(f"{card}:8").compile().as_text())
