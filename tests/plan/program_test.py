"""What a compiled program needs, against numbers that are known."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tunix.perf import programs
from tunix.perf.chips import Chip
from tunix.plan import program
from tunix.plan.report import RunEstimate

CHIP = Chip(kind="toy", flops=1e6, memory_rate=1e4, link_rate=1e3, memory_bytes=4096)


@pytest.fixture(scope="module")
def plan(mesh_fsdp8):
  """x [16, 32] over rows times w [32, 8] over its rows: w is gathered."""
  rows = NamedSharding(mesh_fsdp8, P("fsdp"))
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=rows)
  product = jax.jit(jnp.dot, out_shardings=rows)
  lowered = product.lower(shape(16, 32), shape(32, 8))
  return program.estimate("product", programs.ProgramRecord(lowered, ()), 8, CHIP)


def test_bytes_and_flops_are_those_of_the_shapes(plan):
  assert plan.argument_bytes == 4 * (16 * 32 + 32 * 8) / 8
  assert plan.output_bytes == 4 * 16 * 8 / 8
  assert plan.flops == 2 * 16 * 32 * 8
  (gather,) = plan.collectives
  assert (gather.kind, gather.received) == ("all-gather", 4 * 32 * 8 * 7 / 8)
  assert plan.peak_bytes >= plan.argument_bytes + 4 * 32 * 8


def test_the_slowest_part_is_what_limits(plan):
  assert plan.compute_seconds == 2 * 16 * 32 * 8 / 8 / 1e6
  assert plan.memory_seconds == (plan.argument_bytes + plan.output_bytes) / 1e4
  assert plan.link_seconds == 896 / 1e3 == plan.seconds
  assert plan.limited_by == "links"
  fast = dataclasses.replace(plan, link_seconds=0.0, memory_seconds=None)
  assert fast.limited_by == "compute" and fast.seconds == plan.compute_seconds


def test_what_runs_alone_comes_on_top(plan):
  known = dataclasses.replace(
    plan,
    compute_seconds=2.0,
    memory_seconds=0.75,
    link_seconds=1.0,
    alone_memory_seconds=0.5,
    alone_link_seconds=0.125,
  )
  assert known.seconds == 2.0 + 0.5 + 0.125 and known.limited_by == "compute"
  moving = dataclasses.replace(known, alone_memory_seconds=2.5)
  assert moving.seconds == 4.625 and moving.limited_by == "memory"
  # What may hide behind the arithmetic counts where it takes longer than all of that.
  sending = dataclasses.replace(known, link_seconds=3.0)
  assert sending.seconds == 3.0 and sending.limited_by == "links"


def test_a_report_says_what_the_figures_mean(plan):
  made = RunEstimate(
    job="sft",
    model="toy",
    topology="toy:8",
    mesh={"fsdp": 8},
    devices=8,
    chip=CHIP,
    memory_bytes=CHIP.memory_bytes,
    programs=[
      dataclasses.replace(plan, name="train step"),
      dataclasses.replace(plan, name="evaluation", peak_bytes=5000),
    ],
    tokens=64,
    model_flops=4096,
    steps=100,
  )
  assert made.fits is False and "does NOT fit" in str(made)
  assert made.step_seconds == plan.seconds  # evaluations are no part of a step
  assert made.mfu == pytest.approx(4096 / (0.896 * 8 * 1e6))
  assert made.tokens_per_second == pytest.approx(64 / 0.896 / 8)
  assert made.chip_hours == pytest.approx(100 * 0.896 * 8 / 3600)
  assert dataclasses.replace(made, memory_bytes=1e6).fits
  unknown = dataclasses.replace(made, memory_bytes=None)
  assert unknown.fits is None and "memory of a device is not known" in str(unknown)
  assert made.to_json()["programs"][0]["limited_by"] == "links"


def test_programs_are_recorded_and_not_run():
  ran = []

  def double(x):
    jax.debug.callback(lambda: ran.append(1))
    return 2 * x

  jitted, shape = jax.jit(double), jax.ShapeDtypeStruct((3,), jnp.float32)
  with programs.recording() as found:
    out = programs.call("double", jitted, shape)
    programs.call("double", jitted, jax.ShapeDtypeStruct((4,), jnp.float32))
    programs.call("double", jitted, shape)
  assert (out.shape, out.dtype) == (shape.shape, shape.dtype) and not ran
  (noted,) = found.values()
  assert noted.lowered.in_avals[0][0].shape == (3,)  # the first of a name
  assert noted.calls == 3 and not programs.is_recording()
  assert programs.call("double", jitted, jnp.ones(3)).tolist() == [2, 2, 2]
  jax.effects_barrier()
  assert ran


class _TooLarge(programs.ProgramRecord):
  """A program that the compiler gives up."""

  said = ""

  @property
  def compiled(self):
    raise jax.errors.JaxRuntimeError(self.said)


OOM = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, "
NEEDS = "the total memory required for HLO temporaries (18.50G) exceeds available HBM"
USED = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 2.00M of 1.00M"


@pytest.mark.parametrize(
  ("said", "temporary"), [(OOM + NEEDS, int(18.5 * 2**30)), (USED, 2**21 - 512)]
)
def test_what_the_compiler_gives_up_does_not_fit(said, temporary, mesh_fsdp8):
  rows = NamedSharding(mesh_fsdp8, P("fsdp"))
  x = jax.ShapeDtypeStruct((32, 32), jnp.float32, sharding=rows)
  noted = _TooLarge(jax.jit(jnp.dot).lower(x, x), (x,))
  noted.said = said
  made = program.estimate("product", noted, 8, CHIP, beside_bytes=7)
  assert (made.argument_bytes, made.temporary_bytes) == (512, temporary)
  assert made.peak_bytes == 512 + temporary == program.peak_of(noted)
  assert made.held_bytes == made.peak_bytes + 7 and made.seconds is None
  assert made.flops == 2 * 32**3
  whole = RunEstimate(
    job="sft",
    model="",
    topology="",
    mesh={},
    devices=8,
    chip=CHIP,
    memory_bytes=1.0,
    programs=[made],
    tokens=1,
    model_flops=1.0,
  )
  assert whole.fits is False and "does NOT fit" in str(whole)
  assert "a device; product takes most; --fit looks for settings that do" in str(whole)
  advised = dataclasses.replace(whole, advice="it fits with: fewer rows")
  assert "--fit" not in str(advised) and "fewer rows" in str(advised)


def test_another_error_of_the_compiler_is_raised(mesh_fsdp8):
  rows = NamedSharding(mesh_fsdp8, P("fsdp"))
  x = jax.ShapeDtypeStruct((32, 32), jnp.float32, sharding=rows)
  noted = _TooLarge(jax.jit(jnp.dot).lower(x, x), (x,))
  noted.said = "INTERNAL: Mosaic failed"
  with pytest.raises(jax.errors.JaxRuntimeError, match="Mosaic"):
    program.estimate("product", noted, 8, CHIP)
