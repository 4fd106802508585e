"""Training on images: what is trained, micro-batches, resume, and the command."""

import json

import jax
import numpy as np
import pytest

from tests import optimizers, toys_images
from tests.cli import runs
from tests.models.vision.seeing import BUFFERS
from tests.sft import trainers
from tunix.cli import config as config_lib
from tunix.cli.make import loading
from tunix.data.images import ImageReader
from tunix.data.pipeline import build_dataset
from tunix.data.reading.files import open_file
from tunix.models import lora
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.sft.steps.module_state import trained_variables


def dataset(folder, model, tokenizer, records, **options):
  reader = ImageReader(folder, model.config)
  options = {"batch_size": 4, "max_length": 96, "image_tokens": 24, **options}
  return build_dataset(open_file(records), tokenizer, images=reader, **options)


def adapted(folder):
  """A model with adapters on the text model and on all that reads images."""
  model = toys_images.load(folder)
  targets = ("all-linear", *toys_images.adapted_modules(model))
  config = lora.LoraConfig(rank=2, targets=targets, dropout=0.2)
  return lora.apply(model, config)


@pytest.mark.parametrize("name", toys_images.NAMES)
def test_a_global_batch_gives_one_update_however_it_is_cut(name, tmp_path):
  folder = toys_images.folder(name, tmp_path / "model")
  records = toys_images.write_records(tmp_path)
  tokenizer = toys_images.tokenizer(name)
  results = []
  for parts in (1, 4):
    model = adapted(folder)
    config = TrainingConfig(gradient_accumulation_steps=parts)
    trainer = PeftTrainer(model, optimizers.sgd(1.0), config)
    batch = next(iter(dataset(folder, model, tokenizer, records, shuffle=False)))
    loss = float(trainer.train_step(batch))
    assert np.isfinite(loss)
    results.append((loss, trainers.leaves(trainer.model)))
  (whole, one), (cut, many) = results
  np.testing.assert_allclose(cut, whole, rtol=1e-6)
  moved = set()
  for path, leaf in one.items():
    np.testing.assert_allclose(many[path], leaf, rtol=0, atol=1e-6, err_msg=path)
    if path.endswith("lora_b") and np.any(leaf):
      moved.add(path.partition(".")[0])
  assert moved == {"layers", *toys_images.adapted_modules(model)}
  # Other pixels give another loss: the images reach the model.
  other = jax.tree.map(lambda x: -x if x.dtype == np.float32 else x, batch["images"])
  assert abs(float(trainer.train_step({**batch, "images": other})) - whole) > 1e-4


@pytest.mark.parametrize("name", ("smolvlm", "gemma4"))
def test_the_tower_is_frozen_until_it_is_asked_for(name, tmp_path):
  model = toys_images.load(toys_images.folder(name, tmp_path / "model"))
  names = {path.partition(".")[0] for path in trained_variables(model)}
  assert {"layers", "multi_modal_projector"} < names
  assert "vision_tower" not in names
  model.train_tower()
  trained = trained_variables(model)
  assert any(path.startswith("vision_tower.") for path in trained)
  assert not any(path.endswith(BUFFERS) for path in trained)


def test_a_key_of_the_command_unfreezes_the_tower(prepared, capsys):
  for value in ("true", "false"):
    keys = {"model__path": prepared / "model", "model__train_tower": value}
    config = config_lib.load(runs.arguments(**keys))
    trained = trained_variables(loading.ModelLoader(config).model())
    has_tower = any(path.startswith("vision_tower.") for path in trained)
    assert has_tower == (value == "true")
  keys = {"lora__rank": "null", "model__train_tower": "true"}
  keys |= {"output_dir": prepared / "out", "training__max_steps": 1}
  for changed, message in (
    ({"lora__rank": 2}, "model.train_tower is true and lora.rank is set"),
    ({"model__images": "false"}, "is true and the model is loaded without a vision"),
  ):
    assert command(prepared, **(keys | changed)) == 2
    assert message in capsys.readouterr().err


def command(tmp_path, **keys):
  folder, records = tmp_path / "model", tmp_path / "data.jsonl"
  keys = {
    "model__path": folder,
    "data__train": records,
    "data__max_length": 96,
    "lora__rank": 2,
    "training__global_batch_size": 4,
    "training__micro_batch_size": 2,
    "checkpoint__save_every_n_steps": 1,
    "logging__tensorboard": "false",
    **keys,
  }
  return runs.tunix("train", *runs.arguments(**keys))


def adapter(folder):
  return (folder / "export" / "adapter_model.safetensors").read_bytes()


@pytest.fixture
def prepared(tmp_path):
  toys_images.folder("smolvlm", tmp_path / "model")
  toys_images.write_records(tmp_path)
  return tmp_path


def test_the_command_trains_and_resumes_exactly(prepared, capsys):
  whole, parts = prepared / "whole", prepared / "parts"
  assert command(prepared, output_dir=whole, training__max_steps=3) == 0
  assert "the most images have 24" in capsys.readouterr().out
  for steps in (1, 3):
    assert command(prepared, output_dir=parts, training__max_steps=steps) == 0
  assert adapter(parts) == adapter(whole)
  logs = "logs/metrics.jsonl"
  assert (parts / logs).read_bytes() == (whole / logs).read_bytes()
  losses = [record["loss"] for record in runs.metrics(whole).values()]
  assert len(losses) == 3 and np.isfinite(losses).all()
  # Another processor would give other images.
  files = prepared / "model" / "preprocessor_config.json"
  files.write_text(json.dumps(json.loads(files.read_text()) | {"resample": 3}))
  assert command(prepared, output_dir=parts, training__max_steps=4) == 2
  assert "the content of model.path has changed" in capsys.readouterr().err


def test_what_the_command_refuses(prepared, capsys):
  def message(**keys):
    keys = {"output_dir": prepared / "out", "training__max_steps": 1, **keys}
    assert command(prepared, **keys) == 2
    return capsys.readouterr().err

  assert "only text is read here" in message(model__images="false")
  assert "data.packing is True" in message(data__packing="true")
  assert "data.pad_to is 'shared'" in message(data__pad_to="shared")
  (prepared / "pictures" / "1.png").unlink()
  assert "data.jsonl:1: image 2: there is no file" in message()


def test_data_show_prints_the_images(prepared, capsys):
  model = f"--model={prepared / 'model'}"
  assert runs.tunix("data", "show", prepared / "data.jsonl", model) == 0
  assert "image 1: pictures/0.png, 40 x 20 pixels, 12 tokens" in capsys.readouterr().out
  assert runs.tunix("data", "show", prepared / "data.jsonl") == 0
  assert "[user] [image pictures/0.png][image pictures/1.png]what is 0?" in (
    capsys.readouterr().out
  )


@pytest.mark.slow
def test_adapters_on_a_quantized_base(prepared):
  losses = []
  for name, keys in (("whole", {}), ("int8", {"model__quantize": "int8"})):
    out = prepared / name
    assert command(prepared, output_dir=out, training__max_steps=2, **keys) == 0
    losses.append([record["loss"] for record in runs.metrics(out).values()])
  assert losses[0] != losses[1]
  np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)
