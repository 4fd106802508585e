"""What a traced run of fine-tuning writes, and that an untraced one pays nothing."""

import json

import pytest

from tests import optimizers
from tests.perf import traces
from tests.sft import trainers
from tests.sft.trainers import smalls, trainer
from tunix.perf.metrics import PerfMetricsOptions
from tunix.perf.trace import NoopTracer, PerfTracer
from tunix.sft.config import CheckpointOptions
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig


def traced(folder, **options):
  return trainer(
    metrics_logging_options=MetricsLoggerOptions(folder / "logs"),
    perf_metrics_options=PerfMetricsOptions(**options),
    checkpoint_root_directory=str(folder / "checkpoints"),
    checkpointing_options=CheckpointOptions(save_every_n_steps=2),
    eval_every_n_steps=2,
  )


def test_a_run_leaves_its_phases_as_metrics_and_as_a_trace(tmp_path):
  t = traced(tmp_path)
  t.train(smalls(4), smalls(2))
  t.close()
  host, devices = (traces.events(tmp_path / "logs")[k] for k in ("host", "devices"))
  traces.check_nesting(host)
  traces.check_nesting(devices)
  # A batch is drawn for each step, and once in vain; evaluated at 0, 2 and 4.
  counts = {
    name: len(traces.named(host, name))
    for name in ("data", "prepare", "device_wait", "train_step", "evaluation")
  }
  assert counts == {
    "data": 5,
    "prepare": 4,
    "device_wait": 4,
    "train_step": 4,
    "evaluation": 3,
  }
  assert len(traces.named(host, "checkpoint")) == 2
  evaluations = traces.named(host, "evaluation")
  assert all(traces.inside(e, evaluations) for e in traces.named(host, "eval_step"))
  for event in traces.named(host, "prepare"):
    assert traces.inside(event, traces.named(host, "data"))
  # The devices: a step each, none before it was sent, and the batches of evaluations.
  assert [e["name"] for e in devices].count("train_step") == 4
  assert [e["name"] for e in devices].count("eval_step") == 6
  for sent, done in zip(
    traces.named(host, "train_step"), traces.named(devices, "train_step")
  ):
    assert done["ts"] >= sent["ts"] and done["args"]["devices"]


def test_metrics_sum_up_and_stay_with_the_timings(tmp_path):
  t = traced(tmp_path)
  t.train(smalls(4))
  t.close()
  events = traces.events(tmp_path / "logs")
  lines = (tmp_path / "logs" / "timings.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  for name in ("train_step", "device_wait"):
    logged = sum(row.get(f"perf/{name}_sec", 0) for row in rows)
    whole = sum(e["dur"] for e in traces.named(events["host"], name)) / 1e6
    assert logged == pytest.approx(whole, abs=1e-5)
  busy = sum(row.get("perf/busy/devices_sec", 0) for row in rows)
  assert 0 < busy <= sum(e["dur"] for e in events["devices"]) / 1e6 + 1e-5
  assert "perf/" not in (tmp_path / "logs" / "metrics.jsonl").read_text()


def test_tracing_changes_no_number(tmp_path):
  plain, other = trainer(), traced(tmp_path)
  for t in (plain, other):
    t.train(smalls(3))
  assert trainers.equal(trainers.leaves(plain.model), trainers.leaves(other.model))
  assert trainers.history(plain, "loss") == trainers.history(other, "loss")
  other.close()


def run_of(steps, **options):
  # Without a bound on steps in flight nothing of ours waits but the end of the run.
  t = trainer(max_inflight_computations=0, **options)
  t.train(smalls(steps))


def test_a_run_without_a_tracer_pays_nothing(monkeypatch):
  run_of(1)  # compiled
  waits = []
  for steps in (2, 6):
    with traces.counted(monkeypatch) as cost:
      run_of(steps)
    assert (cost.phases, cost.spans, cost.clock) == (0, 0, 0)
    waits.append(cost.waits)
  assert waits[0] == waits[1], "no step waits for the device"
  options = PerfMetricsOptions(enable_trace_writer=False)
  with traces.counted(monkeypatch) as cost:
    run_of(2, perf_metrics_options=options)
  assert cost.phases and cost.spans and cost.clock, "the counters count"


def test_a_tracer_that_is_given_is_used_as_it_is(tmp_path):
  exported = []

  def export(query):
    exported.append(len(query.main().all_groups("train_step").get()))
    return {"perf/mine": 7}

  tracer = PerfTracer("mine", export, trace_dir=tmp_path)
  with tracer.span_group("experiment"):
    t = PeftTrainer(
      trainers.tokens_only(),
      optimizers.sgd(1),
      TrainingConfig(pbar_description=None),
      perf_tracer=tracer,
    )
    assert t.perf_tracer is tracer
    t.train(smalls(3))
    t.train_step(trainers.small(0))
    t.close()
  tracer.synchronize()
  assert sum(exported) == 4 and trainers.history(t, "perf/mine") == [7] * 4
  events = traces.events(tmp_path)
  assert set(events) == {"host", "mine"}
  (whole,) = traces.named(events["host"], "experiment")
  assert all(traces.inside(e, [whole]) for e in events["host"])


def test_a_step_that_fails_leaves_the_trace(tmp_path):
  def loss(model, **batch):
    raise KeyError("no")

  t = trainer(
    perf_metrics_options=PerfMetricsOptions(trace_dir=str(tmp_path))
  ).with_loss_fn(loss)
  with pytest.raises(KeyError):
    t.train(smalls(1))
  assert traces.named(traces.events(tmp_path)["host"], "train_step")


def test_what_is_no_tracer_is_refused():
  model, tx = trainers.tokens_only(), optimizers.sgd(1)
  with pytest.raises(TypeError, match="perf_tracer is an object"):
    PeftTrainer(model, tx, perf_tracer=object())  # pyright: ignore
  with pytest.raises(TypeError, match="perf_metrics_options is a dict"):
    TrainingConfig(perf_metrics_options={})  # pyright: ignore
  config = TrainingConfig(perf_metrics_options=PerfMetricsOptions())
  with pytest.raises(ValueError, match="are both set"):
    PeftTrainer(model, tx, config, perf_tracer=NoopTracer())
