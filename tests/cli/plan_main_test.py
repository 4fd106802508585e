"""`tunix plan` on simulated devices: the programs are those that a run executes."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from tests import toys_images
from tunix.cli import config as config_lib, main
from tunix.cli.commands import plan as plan_main
from tunix.cli.commands.planning import fit as plan_fit
from tunix.cli.jobs.job import Loaded
from tunix.cli.jobs.table import JOBS
from tunix.cli.make import loading, optimizer
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import safetensors_saver
from tunix.plan import rollout, topology, training
from tunix.utils import mesh as mesh_lib

TINY = (
  "--model.name=qwen3_0p6b",
  "--model.args={num_layers: 1, embed_dim: 32, hidden_dim: 64, num_heads: 4,"
  " num_kv_heads: 2, head_dim: 8, vocab_size: 256}",
  *("--training.global_batch_size=8", "--training.micro_batch_size=4"),
  *("--training.max_steps=10", "--data.max_length=16"),
)
PAIRS = (
  *("--job=dpo", "--lora.rank=2"),
  *TINY[:-1],
  *("--preference.max_prompt_length=8", "--preference.max_response_length=8"),
)
KTO = ("--job=kto", *PAIRS[1:])
DISTILL = ("--job=distill", *TINY)
ON_POLICY = (
  *("--job=distill", *TINY[:-1], "--distill.on_policy_fraction=1"),
  *("--rollout.max_prompt_length=8", "--rollout.max_tokens_to_generate=8"),
)
MESH = {"fsdp": 4, "tp": 2}
WHOLE = ("--training.micro_batch_size=null",)
REMEDIES = (
  *("--model.remat=block", "--training.micro_batch_size=4"),
  *("--model.remat=offload", "--training.offload_optimizer=true", "--lora.rank=16"),
)


def trainer_of(config, model, mesh, *, of_shapes):
  rate = optimizer.build_schedule(config)
  return JOBS[config.job].build(
    Loaded(
      config=config,
      model=model,
      tokenizer=TokenizerAdapter(rollout.NoText()),
      optimizer=optimizer.build_optimizer(config, rate),
      mesh=mesh,
      output_dir=None,
      learning_rate=rate,
      of_shapes=of_shapes,
    )
  )


@pytest.mark.parametrize(
  ("words", "scored"),
  [
    (TINY, set()),
    (PAIRS, {"scoring"}),
    (KTO, {"scoring", "first column", "policy scoring", "join", "kl estimate"}),
    (DISTILL, {"scoring"}),
    (ON_POLICY, {"unstack", "prefill", "decode", "scoring"}),
    (TINY[2:], set()),
  ],
  ids=["sft", "dpo", "kto", "distill", "on_policy", "images"],
)
def test_the_programs_are_those_of_the_run(words, scored, tmp_path):
  mesh = topology.find("cpu:8").mesh(MESH)
  image_tokens = 0
  if words == TINY[2:]:
    folder, image_tokens = toys_images.folder("smolvlm", tmp_path / "model"), 8
    words = (f"--model.path={folder}", "--lora.rank=2", *words)
  if "--job=distill" in words:
    teacher = loading.ModelLoader(config_lib.load(TINY), None).model()
    safetensors_saver.save_pretrained(teacher, tmp_path)
    words = (*words, f"--distill.teacher={tmp_path}")
  config = plan_main.settled(config_lib.load(words), MESH)
  batch = plan_main._example(config, image_tokens)
  with mesh_lib.use_mesh(mesh):
    real = trainer_of(
      config, loading.ModelLoader(config, mesh).model(), mesh, of_shapes=False
    )
    shapes = loading.ModelLoader(config, mesh, of_shapes=True).model()
    made = trainer_of(config, shapes, mesh, of_shapes=True)
    planned = training.of_trainer(made, batch)
    text = planned["train step"].lowered.as_text()
    assert ("4x2x24x24x3" in text) == (image_tokens > 0)  # a micro-batch of squares
    assert text == real.lower_train_step(batch).as_text()
  assert planned.keys() == {"train step", "evaluation", *scored}
  held = jax.tree.leaves((real.optimizer.opt_state, jax.tree.leaves(real.model)))
  assert all(isinstance(x, jax.Array) for x in held)


def test_images_are_planned_for_models_that_read_them(capsys):
  words = ["plan", *TINY, "--topology=cpu:4", "--image-tokens=8"]
  assert main.main(words) == 2
  assert "a folder whose model reads images" in capsys.readouterr().err


@pytest.fixture(scope="module")
def made():
  return plan_main.plan(config_lib.load(TINY), "cpu:8", MESH)


def test_arguments_are_the_shards_of_the_run(made):
  mesh = topology.find("cpu:8").mesh(MESH)
  config = plan_main.settled(config_lib.load(TINY), MESH)
  with mesh_lib.use_mesh(mesh):
    real = trainer_of(
      config, loading.ModelLoader(config, mesh).model(), mesh, of_shapes=False
    )
  arrays = jax.tree.leaves((real._module.params, real._state.opt_state))
  size = sum(x.addressable_shards[0].data.nbytes for x in arrays)
  batch = sum(x.nbytes for x in jax.tree.leaves(JOBS["sft"].example(config))) // 4
  weights = 4 * config.training.micro_batches
  assert made.programs[0].argument_bytes == size + batch + weights


def test_what_a_plan_tells(made):
  assert [p.name for p in made.programs] == ["train step", "evaluation"]
  assert made.tokens == 8 * 16 and made.steps == 10 and made.devices == 8
  # By formula: 6 P a token, and three times causal attention of 16 x 17 / 2 pairs.
  matrices = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64 + 256 * 32 + 4 * 32
  attention = 4 * 4 * 8 * (16 * 17 / 2) * 8
  norms = 6 * 128 * (2 * 8 + 2 * 32)  # stacked, they look like matrices
  assert made.model_flops == pytest.approx(
    6 * matrices * 128 + 3 * attention, abs=norms
  )
  assert made.programs[0].flops > made.model_flops / 2
  assert made.step_seconds is None  # nobody knows how fast a CPU is
  assert "0.00 billion parameters" in str(made) and "fsdp 4 x tp 2" in str(made)


def test_the_command(made, monkeypatch, capsys):
  monkeypatch.setattr(plan_main, "plan", lambda *args, **options: made)
  assert main.main(["plan", *TINY, "--topology", "cpu:8", "--mesh", "fsdp=4,tp=2"]) == 0
  assert "train step sends: " in capsys.readouterr().out
  assert main.main(["plan", *TINY, "--topology=cpu:8", "--json"]) == 0
  assert json.loads(capsys.readouterr().out)["programs"][0]["name"] == "train step"
  small = made.__class__(**{**made.__dict__, "memory_bytes": 10.0})
  monkeypatch.setattr(plan_main, "plan", lambda *args, **options: small)
  assert main.main(["plan", *TINY, "--topology", "cpu:8"]) == 1
  assert "does NOT fit" in capsys.readouterr().out


def test_a_server_is_planned(tmp_path, capsys):
  model = loading.ModelLoader(config_lib.load(TINY), None).model()
  safetensors_saver.save_pretrained(model, tmp_path)
  words = ["plan", "serve", str(tmp_path), "--slots=4", "--max_tokens=64"]
  assert main.main([*words, "--topology", "cpu:2", "--adapter_ranks=8"]) == 0
  said = capsys.readouterr().out
  assert f"serve: {tmp_path}" in said and "2 devices, tp 2" in said
  assert "engine: 4 slots of at most 64 tokens, attention over rows" in said
  assert "a step of" not in said and "train step" not in said
  flags = ("--topology", "cpu:1", "--cache_tokens=32", "--max_tokens=64")
  assert main.main([*words, *flags]) == 2
  assert "cache_tokens is 32" in capsys.readouterr().err
  assert main.main(words) == 2
  assert "--topology is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("words", "told"),
  [
    ([*TINY], "--topology is missing"),
    ([*TINY, "--topology"], "--topology: expected one argument"),
    ([*TINY, "--topology", "cpu:8", "--mesh", "fsdp:8"], "--mesh is 'fsdp:8'"),
    ([*TINY, "--topology", "cpu:8", "--mesh", "fsdp=3"], "needs 3 devices"),
    ([*TINY, "--topology", "cpu:8", "--mesh", "data=8"], "mesh.data is no axis"),
    ([*TINY, "--topology", "v5e:9"], "topology is 'v5e:9'"),
    ([*TINY, "--topology=cpu:8", "--json", "--markdown"], "two forms of one plan"),
    (
      [*PAIRS, "--preference.loss=aot", "--topology", "cpu:8", "--mesh", "fsdp=4,tp=2"],
      "preference.loss is 'aot'",
    ),
  ],
)
def test_bad_input_is_one_line(words, told, capsys):
  assert main.main(["plan", *words]) == 2
  error = capsys.readouterr().err
  assert told in error and error.count("\n") == 1


def test_a_step_needs_its_memory():
  """More tokens need more of it, and a plan of shapes allocates nothing."""
  before = {id(x) for x in jax.live_arrays()}
  config = plan_main.settled(config_lib.load(TINY), MESH)
  mesh = topology.find("cpu:8").mesh(MESH)
  with mesh_lib.use_mesh(mesh):
    model = loading.ModelLoader(config, mesh, of_shapes=True).model()
    trainer_of(config, model, mesh, of_shapes=True)
  assert not [x for x in jax.live_arrays() if id(x) not in before and np.size(x) > 64]


def peak_of(config):
  """Bytes as a step might take them."""
  whole = 100 if config.lora is None else 30
  whole -= 8 if config.training.offload_optimizer else 0
  if config.model.quantize:
    whole -= 10
  row = {"block": 5, "offload": 4}.get(config.model.remat, 20)
  return whole + row * config.training.micro_rows, "train step"


@pytest.mark.parametrize(
  ("memory", "words", "peak"),
  [
    (99, REMEDIES, 38),
    (110, REMEDIES[:4], 108),
    (140, ("--model.remat=block",), 140),
    (130, REMEDIES[:2], 120),
    (118, REMEDIES[:3], 116),
    (37, (*REMEDIES, "--model.quantize=nf4"), 28),
    (10, None, None),
  ],
)
def test_the_first_settings_that_fit(memory, words, peak):
  config = plan_main.settled(config_lib.load([*TINY, *WHOLE]), MESH)
  found = plan_fit.first_remedy(config, 4, memory, peak_of, peak_of(config))
  assert (found and found.words, found and found.peak_bytes) == (words, peak)


def test_a_base_of_four_bits_may_need_adapters():
  """Adapters alone save nothing here."""

  def peak(config):
    return (60 if config.model.quantize else 100), "weights"

  config = plan_main.settled(config_lib.load([*TINY, *WHOLE]), MESH)
  found = plan_fit.first_remedy(config, 4, 70, peak, peak(config))
  assert found is not None and found.words == ("--lora.rank=16 --model.quantize=nf4",)
  config = dataclasses.replace(
    config, export=dataclasses.replace(config.export, kind="full")
  )
  assert plan_fit.first_remedy(config, 4, 70, peak, peak(config)) is None


def test_the_largest_micro_batch_that_fits():
  rows = ("--training.global_batch_size=48", "--training.micro_batch_size=null")
  config = plan_main.settled(config_lib.load([*TINY, *rows]), MESH)
  assert plan_fit.micro_batches(config, 4) == [4, 8, 12, 16, 24, 48]
  for memory, best in ((99, None), (180, 4), (500, 16), (1e6, 48)):
    found = plan_fit.largest_micro_batch(config, 4, memory, peak_of)
    words = found and found.words
    assert words == (best and (f"--training.micro_batch_size={best}",))
    assert found is None or found.peak_bytes == 100 + 20 * best


def test_fit_measures_all_programs(made, monkeypatch):
  """A smaller train step is no help where the scores of a teacher need more."""
  planned = {
    name: types.SimpleNamespace(name=name, held_bytes=size)
    for name, size in (("train step", 1), ("scoring", 50))
  }
  for name, value in (("_trainer", None), ("_records", {}), ("_planned", planned)):
    monkeypatch.setattr(plan_main, name, lambda *_, value=value: value)
  config = plan_main.settled(config_lib.load(TINY), MESH)
  mesh = topology.find("cpu:8").mesh(MESH)
  known = made.__class__(**{**made.__dict__, "memory_bytes": made.peak_bytes - 1})
  programs = [types.SimpleNamespace(name="scoring", held_bytes=50)]
  known = dataclasses.replace(known, memory_bytes=40, programs=programs)
  told = plan_main.advise(config, mesh, known)
  assert told.startswith("nothing here makes it fit")


def test_fit_compiles_the_step_anew(made):
  config = plan_main.settled(config_lib.load(TINY), MESH)
  mesh = topology.find("cpu:8").mesh(MESH)
  with pytest.raises(ValueError, match="cpu:8"):
    plan_main.advise(config, mesh, made)
  known = made.__class__(**{**made.__dict__, "memory_bytes": made.peak_bytes})
  told = plan_main.advise(config, mesh, known)
  rows = int(told.partition("micro_batch_size=")[2].split()[0])
  assert told.startswith("the largest micro-batch that fits: --training.") and rows >= 4
