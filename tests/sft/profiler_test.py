import gzip
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from tunix.sft.profiler import Profiler, ProfilerOptions

step_fn = jax.jit(lambda x: x @ x)


def options(tmp_path, skip, steps, **more):
  return ProfilerOptions(tmp_path, skip, steps, **more)


def trace_events(folder: pathlib.Path) -> list[dict]:
  (path,) = folder.rglob("*.trace.json.gz")
  return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def traced_steps(folder: pathlib.Path) -> list[int]:
  """Step numbers of the StepTraceAnnotations in the trace."""
  events = trace_events(folder)
  steps = {
    int(event["args"]["step_num"])
    for event in events
    if "step_num" in event.get("args", {})
  }
  return sorted(steps)


def run(profiler, steps, *, before_increment=False, fail_at=None):
  """A loop that calls the profiler the trainer's way, or with the old step number."""
  x = jnp.ones((4, 4))
  try:
    for step in range(steps.start, steps.stop):
      profiler.maybe_activate(step, wait_for=x)
      with jax.profiler.StepTraceAnnotation("train", step_num=step):
        if step == fail_at:
          raise KeyboardInterrupt
        x = step_fn(x)
      profiler.maybe_deactivate(step if before_increment else step + 1, wait_for=x)
  finally:
    profiler.close()


@pytest.mark.parametrize("before_increment", [False, True])
def test_exactly_the_steps_asked_for(tmp_path, before_increment):
  profiler = Profiler(10, None, options(tmp_path, 2, 3))
  run(profiler, range(10, 20), before_increment=before_increment)
  assert traced_steps(tmp_path) == [12, 13, 14]
  assert not profiler.active


def test_a_run_that_ends_first_leaves_a_trace(tmp_path, caplog):
  run(Profiler(0, 6, options(tmp_path, 4, 5)), range(6))
  assert traced_steps(tmp_path) == [4, 5]
  assert "has 2 steps" in caplog.text


def test_a_run_that_fails_leaves_a_trace_and_the_next_can_trace(tmp_path):
  with pytest.raises(KeyboardInterrupt):
    run(Profiler(0, None, options(tmp_path / "a", 0, 5)), range(6), fail_at=2)
  assert traced_steps(tmp_path / "a") == [0, 1, 2]
  run(Profiler(0, None, options(tmp_path / "b", 0, 1)), range(3))
  assert traced_steps(tmp_path / "b") == [0]


def test_one_trace_a_process(tmp_path, caplog):
  with Profiler(0, None, options(tmp_path / "a", 0, 5)) as first:
    first.maybe_activate(0)
    second = Profiler(0, None, options(tmp_path / "b", 0, 5))
    second.maybe_activate(0)
    assert first.active and not second.active
    assert "this one is skipped" in caplog.text
    second.close()
    assert first.active
  assert not first.active


def test_somebody_elses_trace_is_left_alone(tmp_path, caplog):
  with jax.profiler.trace(str(tmp_path / "theirs")):
    profiler = Profiler(0, None, options(tmp_path / "ours", 0, 1))
    profiler.maybe_activate(0)
    assert not profiler.active and "the profile is skipped" in caplog.text
    profiler.maybe_deactivate(1)
  run(Profiler(0, None, options(tmp_path / "ours", 0, 1)), range(2))
  assert traced_steps(tmp_path / "ours") == [0]


def test_options_reach_the_tracer(tmp_path):
  def python_frames(folder):
    events = trace_events(folder)
    return sum(event.get("name", "").startswith("$") for event in events)

  for name, more in {
    "on": {"python_tracer_level": 1},
    "off": {"python_tracer_level": 0, "host_tracer_level": 1},
  }.items():
    run(Profiler(0, None, options(tmp_path / name, 0, 1, **more)), range(1))
  assert python_frames(tmp_path / "on") > 0 == python_frames(tmp_path / "off")


def test_a_profile_that_never_starts_is_an_error_or_a_warning(tmp_path, caplog):
  with pytest.raises(ValueError, match=r"no step would be traced.*max_steps=5"):
    Profiler(0, 5, options(tmp_path, 5, 1))
  resumed = Profiler(4, 5, options(tmp_path, 5, 1))
  assert "no step would be traced" in caplog.text
  run(resumed, range(4, 5))
  assert not list(tmp_path.iterdir())


def test_without_options_nothing_happens():
  run(Profiler(0, 5, None), range(3))


@pytest.mark.parametrize(
  ("more", "message"),
  [
    ({"profiler_steps": 0}, "profiler_steps is 0: it must be a whole"),
    ({"skip_first_n_steps": -1}, "skip_first_n_steps is -1"),
    ({"host_tracer_level": 4}, "host_tracer_level is 4.*from 0 to 3"),
    ({"python_tracer_level": -1}, "python_tracer_level is -1"),
  ],
)
def test_bad_options(more, message):
  values = {"log_dir": "x", "skip_first_n_steps": 0, "profiler_steps": 1, **more}
  with pytest.raises(ValueError, match=message):
    ProfilerOptions(**values)
