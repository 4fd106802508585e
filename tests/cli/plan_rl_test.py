"""`tunix plan` of jobs that sample: the programs are those that a learner runs."""

import dataclasses

import pytest

from tests.cli.plan_main_test import MESH, TINY, trainer_of
from tunix.cli import config as config_lib
from tunix.cli.commands import plan as plan_main
from tunix.cli.commands.planning import fit as plan_fit
from tunix.cli.jobs.rl import rollout_configs
from tunix.cli.jobs.table import JOBS
from tunix.cli.make import loading
from tunix.perf import programs
from tunix.plan import topology

SIZES = (
  *TINY[:2],
  *("--training.global_batch_size=8", "--training.max_steps=10"),
  *("--rollout.max_prompt_length=16", "--rollout.max_tokens_to_generate=12"),
  *("--algorithm.num_generations=2", "--algorithm.beta=0.1"),
)
GRPO = ("--job=grpo", "--rl.mini_batch_size=4", "--rl.bucketed_lengths=true", *SIZES)
PPO = ("--job=ppo", "--rl.compute_logps_micro_batch_size=4", *SIZES)


@pytest.mark.parametrize("words", [(), ("--rollout.weights=int8",)])
def test_the_programs_are_those_of_the_run(words, monkeypatch):
  """A real learner goes through a step, and the texts of what it runs are noted."""
  config = plan_main.settled(
    config_lib.load([*PPO, *words, "--reward.functions=length(target=3)"]), MESH
  )
  mesh = topology.find("cpu:8").mesh(MESH)
  planned = plan_main._records(config, plan_main._trainer(config, mesh), mesh)
  ran, call, lower = {}, programs.call, programs.lower

  def noted_call(name, jitted, *args):
    ran.setdefault(name, jitted.lower(*args).as_text())
    return call(name, jitted, *args)

  def noted_lower(name, jitted, *args):
    lowered = lower(name, jitted, *args)
    ran.setdefault(name, lowered.as_text())
    return lowered

  model = loading.ModelLoader(config, mesh).model()
  learner = trainer_of(config, model, mesh, of_shapes=False)
  monkeypatch.setattr(programs, "call", noted_call)
  monkeypatch.setattr(programs, "lower", noted_lower)
  learner.lower_step(JOBS["ppo"].example(config))
  assert set(planned) == {
    *("prefill", "decode", "unstack", "weight stamp"),
    *("critic scoring", "actor scoring", "reference scoring"),
    *("critic update", "actor update"),
  }
  for name, one in planned.items():
    assert one.lowered.as_text() == ran[name], name
  assert planned["actor scoring"].calls == 2 and planned["prefill"].calls == 1
  assert ("i8" in planned["unstack"].lowered.as_text()) == bool(words)


def test_rows_are_planned_with_their_limits():
  texts = []
  for word in ("--rl.bucketed_lengths=true", "--rl.bucketed_lengths=false"):
    words = ("--rollout.max_tokens_to_generate=40", word)
    config = plan_main.settled(config_lib.load([*GRPO, *words]), {"tp": 2})
    mesh = topology.find("cpu:2").mesh({"tp": 2})  # with the engine
    records = plan_main._records(config, plan_main._trainer(config, mesh), mesh)
    texts.append({name: one.lowered.as_text() for name, one in records.items()})
  assert texts[0] == texts[1]


def test_engines_of_processes_are_not_planned():
  config = config_lib.load([*GRPO, "--rollout.engine=per_process"])
  with pytest.raises(ValueError, match=r"add --rollout\.engine=vanilla"):
    plan_main.plan(config, "cpu:8", MESH)


@pytest.mark.parametrize(
  ("turns", "key", "tokens"),
  [(1, "rollout.max_tokens_to_generate", 12), (2, "episode.max_tokens", 1024)],
)
def test_the_longest_row_of_an_episode(turns, key, tokens):
  config = config_lib.load([*GRPO, "--env=a.py:Env", f"--episode.max_turns={turns}"])
  keys, length = JOBS["grpo"].length(config)
  assert keys.endswith(key) and length == 16 + tokens
  (sampling,) = rollout_configs(config, plans=True).values()
  assert sampling.max_tokens_to_generate == tokens


def test_images_of_environments_are_not_planned():
  words = ("--env=a.py:Env", "--episode.max_image_tokens=8")
  with pytest.raises(ValueError, match="max_image_tokens is 8, and plans of grpo"):
    plan_main.plan(config_lib.load([*GRPO, *words]), "cpu:8", MESH)


@pytest.fixture(scope="module")
def made():
  return plan_main.plan(config_lib.load(GRPO), "cpu:8", MESH)


def test_what_a_plan_of_rollouts_tells(made):
  by_name = {p.name: p for p in made.programs}
  assert by_name["decode"].runs == 11  # the first token is the prefill's
  assert by_name["actor update"].runs == 2 and made.steps == 5
  assert "critic scoring" not in by_name
  assert made.tokens == 8 * 2 * (16 + 12)
  rollouts = made.rollouts
  # Keys and values x 2 heads of 8, in float32; columns in powers of two.
  assert rollouts.cache_token_bytes == 2 * 2 * 8 * 4
  assert (rollouts.rows, rollouts.slots) == (16, 32)
  assert rollouts.cache_bytes == rollouts.cache_token_bytes * 16 * 32 // 8
  assert rollouts.most_rows is None and rollouts.tokens_per_second is None
  assert "rollouts: 16 rows of 32 tokens" in str(made)


def test_what_the_run_holds_besides(made):
  """The policy learns while the reference waits, and samples while the optimizer's
  state does."""
  by_name = {p.name: p for p in made.programs}
  reference = by_name["actor update"].beside_bytes
  optimizer = by_name["reference scoring"].beside_bytes - reference
  assert reference and optimizer == pytest.approx(2 * reference, rel=0.01)
  assert by_name["prefill"].beside_bytes > reference + optimizer
  assert made.peak_bytes == max(p.peak_bytes + p.beside_bytes for p in made.programs)


def test_markdown_has_the_table(made):
  text = made.to_markdown()
  assert text.startswith("# grpo: qwen3_0p6b") and "\n| program | runs |" in text
  assert "\n| decode | 11 | " in text and "\n- rollouts: 16 rows" in text


def test_fit_changes_what_takes_most():
  """Each program needs what its batches say, and 10 bytes are the optimizer's."""

  def peak(config):
    rl = config.rl
    needs = {
      "actor update": 9 * (rl.train_micro_batch_size or rl.mini_batch_size),
      "actor scoring": 3 * (rl.compute_logps_micro_batch_size or 8),
      "engine decode": 5 * (rl.rollout_micro_batch_size or 8),
    }
    largest = max(needs, key=needs.__getitem__)
    rest = 0 if config.training.offload_optimizer else 10
    return needs[largest] + rest, largest

  config = plan_main.settled(config_lib.load(GRPO), MESH)
  words = (
    *("--rl.rollout_micro_batch_size=2", "--rl.train_micro_batch_size=2"),
    *("--rl.compute_logps_micro_batch_size=2", "--training.offload_optimizer=true"),
  )
  assert plan_fit.micro_batches(config, 2) == [2, 4]  # prompts, of 2 rows each
  assert plan_fit.micro_batches(config, 8) == [4]
  assert plan_fit.micro_batches(config, 16) == [4]  # nothing splits
  for memory, expected in ((49, 1), (45, 2), (33, 3), (27, 4)):
    found = plan_fit.first_remedy(config, 2, memory, peak, peak(config))
    assert found is not None and found.words == words[:expected]
  assert plan_fit.first_remedy(config, 2, 17, peak, peak(config)) is None
  greedy = dataclasses.replace(config.rl, schedule="greedy")
  for own in ({"env": "a.py:Env"}, {"rl": greedy}):  # these sample all at once
    other = dataclasses.replace(config, **own)
    assert plan_fit.first_remedy(other, 2, 39, peak, peak(other)) is None
  best = plan_fit.largest_micro_batch(config, 2, 60, peak)
  assert best is not None and best.words == ("--rl.train_micro_batch_size=4",)


def test_fit_compiles_what_a_step_runs(made):
  config = plan_main.settled(config_lib.load(GRPO), MESH)
  mesh = topology.find("cpu:8").mesh(MESH)
  known = made.__class__(**{**made.__dict__, "memory_bytes": made.peak_bytes - 1})
  told = plan_main.advise(config, mesh, known)
  assert told.startswith("it fits with: --model.remat=block (")


@pytest.mark.parametrize(
  ("job", "count"), [(GRPO, 2), ((*PPO, "--rollout.weights=int8"), 1)]
)
def test_rollouts_of_the_engine(job, count):
  """Also on a mesh of one device, where the actor itself samples."""
  made = plan_main.plan(config_lib.load(job), f"cpu:{count}", {"tp": count})
  by_name = {p.name: p for p in made.programs}
  assert not {"prefill", "decode", "engine start"} & by_name.keys()
  # 8 prompts of one page are less than a round; the first token is drawn in it.
  assert by_name["engine mixed"].runs == 1 and by_name["engine decode"].runs == 11
  assert made.rollouts is None
  engine = made.engine
  assert (engine.path, engine.slots, engine.slot_tokens) == ("rows", 16, 64)
  assert (engine.pages, engine.page_tokens) == (16 * 64 // 16, 16)
  # Keys and values x 2 heads of 8, in float32.
  assert engine.token_bytes == 2 * 2 * 8 * 4
  # Rows, pages, and one page more; half of the heads on each device.
  assert engine.cache_bytes == engine.token_bytes * (2 * 16 * 64 + 16) // count
  assert engine.context == 16 + 12 // 2 and engine.round_seconds is None
  assert "engine: 16 slots of at most 64 tokens, attention over rows" in str(made)
  assert "\n- cache: 64 pages of 16 tokens" in made.to_markdown()


def test_rollouts_on_devices_of_their_own():
  """The weights travel, and a device holds what its own programs need."""
  words = [*GRPO, "--lora.rank=2", "--rl.rollout_mesh={tp: 2}", "--rl.schedule=lagged"]
  made = plan_main.plan(config_lib.load(words), "cpu:8", {"fsdp": 2, "tp": 3})
  by_name = {p.name: p for p in made.programs}
  assert by_name["engine decode"].only_samples and by_name["engine decode"].devices == 2
  update = by_name["actor update"]
  assert not update.only_samples and update.devices == 6 and made.devices == 8
  sent = made.handover
  assert sent.mesh == {"tp": 2} and sent.lag == 1
  # Adapters of rank 2 on all linear layers.
  assert 0 < sent.received_bytes <= sent.trained_bytes < 100_000
  assert "fsdp 2 x tp 3 trains, tp 2 samples" in str(made)
  assert "go to the 2 devices that sample" in str(made)
  timed = [dataclasses.replace(p, compute_seconds=1.0) for p in made.programs]
  known = dataclasses.replace(sent, seconds=0.5)
  sides = [sum(p.runs for p in timed if p.only_samples == on) for on in (True, False)]
  lagged = dataclasses.replace(made, programs=timed, handover=known)
  assert lagged.step_seconds == max(sides[0] + 0.5, sides[1])
  sync = dataclasses.replace(lagged, handover=dataclasses.replace(known, lag=0))
  assert sync.step_seconds == sum(sides) + 0.5


def test_weights_that_wait_for_rollouts_are_counted():
  """Those of each batch ahead, which the learner no longer has."""
  beside = {}
  for schedule in ("sync", "lagged", "greedy"):
    words = [*GRPO, "--lora.rank=2", f"--rl.schedule={schedule}", "--rl.lag=3"]
    words = words[:-1] if schedule == "sync" else words
    made = plan_main.plan(config_lib.load(words), "cpu:1", {"tp": 1})
    beside[schedule] = {p.name: p.beside_bytes for p in made.programs}
  for name, without in beside["sync"].items():
    adapters, rest = divmod(beside["lagged"][name] - without, 4)
    assert adapters > 0 and not rest, name
    assert beside["greedy"][name] - without == 2 * adapters, name


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--rl.rollout_mesh={tp: 8}"], "at least one must be left"),
    (["--rl.rollout_mesh={tp: -1}"], "expected a number of devices"),
    (["--rl.rollout_mesh={seq: 2}"], "no axis of the decoder"),
    (["--rl.rollout_mesh={tp: 2}", "--rollout.engine=vllm"], "devices of its own"),
  ],
)
def test_wrong_devices_of_rollouts(words, message):
  with pytest.raises(ValueError, match=message):
    plan_main.plan(config_lib.load([*GRPO, *words]), "cpu:8", {"fsdp": -1})
