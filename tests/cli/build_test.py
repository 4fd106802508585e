"""What each key turns into."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cli import runs
from tunix.cli import config as config_lib
from tunix.cli.make import data as build_data, loading, training
from tunix.cli.run import settle
from tunix.cli.settings import mesh as mesh_axes
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.adapters import lora_modules
from tunix.sft import metrics_logger as metrics
from tunix.sft.config import TrainingConfig


def config(*layers, **keys):
  merged = {name: value for layer in layers for name, value in layer.items()} | keys
  return config_lib.load(runs.arguments(**merged))


# The model.


def test_model_keys_reach_the_model(settings):
  keys = config(
    settings,
    model__dtype="bfloat16",
    model__param_dtype="float32",
    model__remat="block",
    model__scan_layers="true",
  )
  model = loading.ModelLoader(keys, None).model()
  assert model.config.dtype == jnp.bfloat16
  assert model.config.param_dtype == jnp.float32
  assert (model.config.remat, model.config.scan_layers) == ("block", True)
  plain = loading.ModelLoader(config(settings), None).model()
  assert (plain.config.dtype, plain.config.remat) == (jnp.float32, "none")


def test_a_preset_starts_from_scratch_with_the_seed():
  args = "{num_layers: 1, vocab_size: 40, embed_dim: 8, hidden_dim: 8, num_heads: 2, "
  args += "num_kv_heads: 1, head_dim: 4}"
  keys = {"model__name": "qwen3_0p6b", "model__args": args}
  first, again, other = (
    loading.ModelLoader(config(keys, seed=seed), None).model() for seed in (1, 1, 2)
  )
  assert first.config.num_layers == 1
  a, b, c = (
    nnx.state(m)["embed_tokens"]["embedding"][...] for m in (first, again, other)
  )
  np.testing.assert_array_equal(a, b)
  assert np.any(a != c)


def test_presets_and_their_fields_are_checked():
  with pytest.raises(ValueError, match="preset 'qwen9' is unknown"):
    loading.ModelLoader(config(model__name="qwen9")).check()
  with pytest.raises(ValueError, match=r"--model\.path=google/gemma-2b"):
    loading.ModelLoader(config(model__name="google/gemma-2b")).check()
  with pytest.raises(ValueError, match="did you mean num_layers"):
    loading.ModelLoader(
      config(model__name="qwen3_0p6b", model__args__num_layer=2)
    ).check()
  with pytest.raises(ValueError, match=r"model\.args: num_layers is 0"):
    loading.ModelLoader(
      config(model__name="qwen3_0p6b", model__args__num_layers=0)
    ).check()
  with pytest.raises(ValueError, match=r"--model\.name=PRESET"):
    loading.ModelLoader(config()).check()


def test_lora_keys_reach_the_adapters(settings):
  keys = config(
    settings,
    lora__rank=3,
    lora__alpha=12,
    lora__targets="[q_proj]",
    lora__dtype="bfloat16",
  )
  adapted = lora_modules.adapted(loading.ModelLoader(keys, None).model())
  assert list(adapted) == ["layers.attn.q_proj"]
  (linear,) = adapted.values()
  assert linear.lora_a.shape[-1] == 3
  assert linear.lora_a.dtype == jnp.bfloat16
  assert linear.lora_scale == 4.0
  everything = loading.ModelLoader(config(settings, lora__rank=3), None).model()
  assert len(lora_modules.adapted(everything)) == 7


def test_adapters_depend_on_the_seed(settings):
  def draw(seed):
    model = loading.ModelLoader(config(settings, lora__rank=2, seed=seed), None).model()
    return np.asarray(lora_modules.adapted(model)["layers.attn.q_proj"].lora_a[...])

  np.testing.assert_array_equal(draw(1), draw(1))
  assert np.any(draw(1) != draw(2))


def test_lora_targets_that_match_nothing_name_the_modules(settings):
  keys = config(settings, lora__rank=2, lora__targets="[query]")
  with pytest.raises(ValueError, match=r"lora: target 'query'.*layers.attn.q_proj"):
    loading.ModelLoader(keys, None).model()


# The tokenizer.


def test_tokenizer_path_and_chat_template(settings, tmp_path):
  template = tmp_path / "mine.jinja"
  template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
  plain = loading.ModelLoader(config(settings)).tokenizer()
  changed = loading.ModelLoader(
    config(settings, tokenizer__chat_template=template)
  ).tokenizer()
  turn = [{"role": "user", "content": "hi"}]
  assert changed.apply_chat_template(turn) == "[hi]"
  assert plain.apply_chat_template(turn) != "[hi]"
  elsewhere = config(model__name="qwen3_0p6b", tokenizer__path=settings["model__path"])
  assert loading.ModelLoader(elsewhere).tokenizer().vocab_size == plain.vocab_size


def test_tokenizers_that_are_not_there(settings):
  with pytest.raises(ValueError, match=r"tokenizer\.path is not set"):
    loading.ModelLoader(config(model__name="qwen3_0p6b")).tokenizer()
  with pytest.raises(FileNotFoundError, match="no such file"):
    loading.ModelLoader(
      config(settings, tokenizer__chat_template="none.jinja")
    ).tokenizer()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(settings):
  tokenizer = loading.ModelLoader(config(settings)).tokenizer()
  args = "{num_layers: 1, vocab_size: 40, embed_dim: 8, hidden_dim: 8, num_heads: 2, "
  args += "num_kv_heads: 1, head_dim: 4}"
  small = loading.ModelLoader(
    config({"model__name": "qwen3_0p6b", "model__args": args}), None
  ).model()
  with pytest.raises(ValueError, match=r"514 ids and the model has 40"):
    loading.check_vocabulary(small, tokenizer)


# The data.


@pytest.fixture
def plain_records(tmp_path):
  """Eight examples of 7 tokens: BOS-less, one a letter, and EOS."""
  file = tmp_path / "plain.jsonl"
  lines = [json.dumps({"prompt": c * 3, "response": c * 3}) for c in "bcdfghjk"]
  file.write_text("\n".join(lines) + "\n")
  return file


def draw(settings, **keys):
  """(configuration, all batches of training)."""
  made = config(settings, **keys)
  tokenizer = loading.ModelLoader(made).tokenizer()
  data = build_data.build_data(made, tokenizer)
  return data, list(data.train)


def test_data_keys_reach_the_batches(settings, plain_records):
  base = {
    "data__train": plain_records,
    "data__max_length": 30,
    "data__pad_to": "longest",
    "training__max_steps": "null",
    "data__chat": "false",
    "data__shuffle": "false",
  }
  settings = settings | base
  data, rows = draw(settings)
  assert [batch["input_tokens"].shape for batch in rows] == [(4, 30)] * 2
  assert data.num_steps == 2
  _, two = draw(settings, data__num_epochs=2)
  assert len(two) == 4
  _, small = draw(settings, training__micro_batch_size=2)
  assert [batch["input_tokens"].shape for batch in small] == [(2, 30)] * 4
  _, packed = draw(settings | {"data__pad_to": "null"}, data__packing="true")
  assert packed[0]["segment_ids"].max() > 1
  assert rows[0]["segment_ids"].max() == 1
  _, shuffled = draw(settings, data__shuffle="true")
  _, other = draw(settings, data__shuffle="true", seed=5)
  first = [batch[0]["input_tokens"] for batch in (rows, shuffled, other)]
  assert np.any(first[0] != first[1])
  assert np.any(first[1] != first[2])
  _, unthreaded = draw(settings, data__shuffle="true", data__num_threads=0)
  np.testing.assert_array_equal(unthreaded[0]["input_tokens"], first[1])


def test_plain_prompts_become_turns_when_asked(settings, plain_records):
  settings = settings | {"data__train": plain_records, "data__max_length": 64}
  settings = settings | {"training__max_steps": "null"}
  _, chat = draw(settings)  # the tokenizer has a template
  _, plain = draw(settings, data__chat="false")
  assert (chat[0]["segment_ids"] != 0).sum() > (plain[0]["segment_ids"] != 0).sum()


def test_overlong_decides_and_scan_limit_looks_at_fewer(settings, plain_records):
  settings = settings | {"data__train": plain_records, "data__chat": "false"}
  settings = settings | {"data__max_length": 3, "training__max_steps": "null"}
  with pytest.raises(ValueError, match=r"plain\.jsonl:1: .*maximum"):
    draw(settings)
  with pytest.raises(ValueError, match="none is left"):
    draw(settings, data__overlong="drop")
  data, batches = draw(settings, data__overlong="truncate")
  assert data.reports["train"].truncated == 8
  assert len(batches) == 2
  data, _ = draw(settings, data__overlong="truncate", data__scan_limit=2)
  assert data.reports["train"].scanned == 2
  assert data.num_steps == 2


def test_template_args_reach_the_template(settings, tmp_path):
  template = tmp_path / "mine.jinja"
  template.write_text(
    "{% for m in messages %}{{ mark }}{{ m.content }}<|im_end|>{% endfor %}"
  )
  settings = settings | {"tokenizer__chat_template": template}
  settings = settings | {"training__max_steps": "null"}
  _, plain = draw(settings)
  _, marked = draw(settings, data__template_args="{mark: seven seven}")
  assert (marked[0]["segment_ids"] != 0).sum() > (plain[0]["segment_ids"] != 0).sum()


def test_evaluation_is_in_order_and_once(settings, eval_file):
  settings = settings | {"data__eval": eval_file, "training__eval_batch_size": 2}
  data, _ = draw(settings, data__num_epochs=3)
  first, again = list(data.eval), list(data.eval)
  assert [batch["input_tokens"].shape[0] for batch in first] == [2, 2, 2]
  for a, b in zip(first, again):
    np.testing.assert_array_equal(a["input_tokens"], b["input_tokens"])
  adapter = TokenizerAdapter.from_pretrained(settings["model__path"])
  assert "week? 16" in adapter.decode(first[0]["input_tokens"][0])


@pytest.mark.parametrize(
  ("keys", "steps"),
  [
    ({}, 4),  # 16 records / 4
    ({"data__num_epochs": 2}, 8),
    ({"training__global_batch_size": 6, "training__micro_batch_size": 2}, 3),
    ({"training__max_steps": 3}, 3),
    ({"training__max_steps": 30}, 30),  # as many epochs as that needs
    ({"training__max_steps": 30, "data__num_epochs": 1}, 4),
    ({"data__packing": "true"}, None),
    ({"data__packing": "true", "training__max_steps": 3}, 3),
    ({"data__overlong": "drop", "data__scan_limit": 4}, None),
  ],
)
def test_steps_of_a_run(settings, keys, steps):
  made = config(settings | {"training__max_steps": "null"}, keys)
  tokenizer = loading.ModelLoader(made).tokenizer()
  data = build_data.build_data(made, tokenizer)
  assert data.num_steps == steps
  if build_data.epochs(made) is not None and steps is not None and steps < 30:
    batches = len(list(data.train))
    per_step = made.training.micro_batches
    drawn = -(-batches // per_step)
    assert steps == min(drawn, made.training.max_steps or drawn)


# The trainer's settings.


def test_training_and_checkpoint_keys_reach_the_trainer(settings, eval_file, tmp_path):
  keys = config(
    settings,
    data__eval=eval_file,
    training__micro_batch_size=2,
    training__eval_every_n_steps=3,
    checkpoint__every_n_steps=7,
    checkpoint__max_to_keep="null",
    checkpoint__asynchronous="false",
    mesh="{tp: 1, fsdp: 2, dp: 1}",
    logging__progress_bar="false",
  )
  made = TrainingConfig(**training.training_options(keys, tmp_path, 0.5))
  assert (made.max_steps, made.eval_every_n_steps) == (4, 3)
  assert made.gradient_accumulation_steps == 2
  assert made.checkpoint_root_directory == str(tmp_path / "checkpoints")
  assert dataclasses.asdict(made.checkpointing_options) | {"timeout_secs": 0} == {
    "save_every_n_steps": 7,
    "min_interval_secs": None,
    "max_to_keep": None,
    "asynchronous": False,
    "timeout_secs": 0,
  }
  assert made.data_sharding_axis == ("dp", "fsdp")
  assert (made.learning_rate, made.pbar_description) == (0.5, None)
  timed = TrainingConfig(
    **training.training_options(
      config(settings, checkpoint__min_interval_secs=5), tmp_path, 0.5
    )
  )
  assert timed.checkpointing_options.min_interval_secs == 5
  assert timed.perf_metrics_options is None
  assert timed.pbar_description == "training"


def test_a_trace_lies_beside_the_metrics_unless_a_folder_is_named(settings, tmp_path):
  def options(**more):
    more = {f"training__perf_metrics_options__{k}": v for k, v in more.items()}
    keys = config(settings, **more)
    made = TrainingConfig(**training.training_options(keys, tmp_path, 0.5))
    return made.perf_metrics_options

  assert options() is None
  assert options(enable_perf_v1="true").trace_dir == str(tmp_path / "logs")
  assert options(trace_dir="/traces").trace_dir == "/traces"
  assert options(enable_perf_v1="false").enable_perf_v1 is False
  assert options(enable_trace_writer="false").enable_trace_writer is False
  named = options(custom_export_fn_path="tunix.perf.export:seconds")
  assert named.custom_export_fn_path == "tunix.perf.export:seconds"


def test_logging_keys_choose_the_backends(settings, tmp_path, capsys):
  def log(**keys):
    logger = training.build_logger(config(settings, **keys), tmp_path)
    logger.log("", "loss", 1.5, metrics.Mode.TRAIN, 1)
    logger.close()
    return sorted(p.name.split(".")[0] for p in (tmp_path / "logs").iterdir())

  assert log() == ["metrics"]
  assert capsys.readouterr().out == ""
  assert log(logging__console="true") == ["metrics"]
  assert "loss=1.5" in capsys.readouterr().out
  assert log(logging__tensorboard="true") == ["events", "metrics"]


def test_wandb_is_asked_for_by_key_or_environment(settings, tmp_path, monkeypatch):
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_SILENT", "true")
  keys = {"logging__project_name": "proj", "logging__run_name": "named"}

  def runs_of(**more):
    logger = training.build_logger(config(settings, keys, **more), tmp_path)
    logger.log("", "loss", 1.5, metrics.Mode.TRAIN, 1)
    logger.close()
    return len(list((tmp_path / "logs").glob("wandb/offline-run-*")))

  assert runs_of(logging__wandb="false") == 0
  assert runs_of() == 1


# The mesh.


def build_mesh(keys):
  length = "data.max_length", keys.data.max_length
  return mesh_axes.build(keys.mesh, keys.training.batch_rows, length)


def test_mesh_axes_become_a_mesh(settings):
  assert build_mesh(config(settings)) is None
  mesh = build_mesh(config(settings, mesh="{fsdp: -1, tp: 2}"))
  assert dict(mesh.shape) == {"fsdp": jax.device_count() // 2, "tp": 2}


def test_batches_must_divide_the_mesh_that_minus_one_gives(settings):
  keys = config(settings, mesh="{fsdp: -1}", training__global_batch_size=3)
  with pytest.raises(ValueError, match=r"is 3 and does not divide over the 8 shards"):
    build_mesh(keys)


def test_rows_must_divide_over_cp(settings):
  keys = config(settings, mesh="{cp: -1}", data__max_length=1001)
  with pytest.raises(ValueError, match=r"data.max_length is 1001, .* 1000 or 1008"):
    build_mesh(keys)
  assert build_mesh(dataclasses.replace(keys, mesh={"tp": 8})) is not None


@pytest.mark.parametrize(
  ("mesh", "message"),
  [
    (math.nan, "mesh is nan; expected sizes by axis"),
    ([2], "mesh is .2.; expected sizes by axis"),
    ({"tp": math.nan}, "mesh.tp is nan: it must be a whole number"),
    ({"tp": "2"}, "mesh.tp is '2': it must be a whole number"),
  ],
)
def test_a_mesh_has_sizes_by_axis(settings, mesh, message):
  with pytest.raises((TypeError, ValueError), match=message):
    dataclasses.replace(config(settings), mesh=mesh)


def test_a_mesh_needs_as_many_devices_as_there_are(settings):
  keys = config(settings, mesh="{fsdp: 3}", training__global_batch_size=3)
  with pytest.raises(ValueError, match="needs 3 devices, there are 8"):
    build_mesh(keys)


def test_paths_become_absolute_and_hub_ids_stay(settings, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "folder").mkdir()
  keys = config(
    model__path="owner/name",
    tokenizer__path="folder",
    output_dir="out",
    compilation_cache="cache",
  )
  made = settle.absolute_paths(keys)
  assert made.model.path == "owner/name"
  assert made.tokenizer.path == str(tmp_path / "folder")
  assert made.output_dir == str(tmp_path / "out")
  assert made.compilation_cache == str(tmp_path / "cache")
