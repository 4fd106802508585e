"""Distillation with images: the teacher and its cache see them."""

import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest

from tests import optimizers, toys_images
from tests.cli import runs
from tests.sft import images_test, trainers
from tunix.cli.jobs.distill import as_prompts
from tunix.data.images import ImageReader
from tunix.data.pipeline import build_batches
from tunix.data.reading.files import open_file
from tunix.data.records import ANSWERED
from tunix.data.rows import SideBySide
from tunix.data.source import Source
from tunix.data.turns.teacher_prompts import Taught
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.on_policy_trainer import (
  OnPolicyConfig,
  OnPolicyDistillationTrainer,
)
from tunix.distillation.strategies import LogitStrategy
from tunix.distillation.teacher_cache import TeacherCache
from tunix.distillation.teachers import SelfTeacher
from tunix.models import lora
from tunix.models.automodel import AutoModel

STRATEGY = LogitStrategy(temperature=1.0, alpha=1.0, distill_top_k=5)


def pair(folder):
  """A teacher, and a student that differs from it."""
  teacher = toys_images.load(folder)
  student = lora.apply(teacher, lora.LoraConfig(rank=2))
  trainers.shake(student)
  return teacher, student


@pytest.fixture
def prepared(tmp_path):
  """(folder of the model, dataset of Ministral 3, whose images are pairs of arrays)."""
  folder = toys_images.folder("ministral3", tmp_path / "model")
  file = toys_images.write_records(tmp_path)

  def data(**options):
    model, tokenizer = toys_images.load(folder), toys_images.tokenizer("ministral3")
    options = {"shuffle": False, **options}
    return list(images_test.dataset(folder, model, tokenizer, file, **options))

  return folder, data


def run(student, teacher, batch, parts=1):
  config = TrainingConfig(gradient_accumulation_steps=parts)
  trainer = DistillationTrainer(student, teacher, STRATEGY, optimizers.sgd(1.0), config)
  return float(trainer.train_step(batch)), trainers.leaves(trainer.model)


def test_a_cut_batch_with_a_cache_gives_the_update_of_a_whole_one(prepared, tmp_path):
  folder, data = prepared
  batch = data()[0]
  teacher, student = pair(folder)
  cache = TeacherCache(tmp_path / "cache", teacher, top_k=5)
  assert cache.fill([batch]) == 4
  read = TeacherCache(tmp_path / "cache")
  whole, one = run(student, teacher, batch)
  assert whole > 1e-4
  cut, many = run(pair(folder)[1], read, batch, parts=4)
  np.testing.assert_allclose(cut, whole, rtol=1e-5)
  for path, leaf in one.items():
    np.testing.assert_allclose(many[path], leaf, rtol=0, atol=1e-6, err_msg=path)
  # Other images are other rows; more room for images is not.
  wide = data(image_tokens=32)[0]
  assert wide["images"][0].shape[1] > batch["images"][0].shape[1]
  read.look_up(wide)
  values, grid = batch["images"]
  with pytest.raises(ValueError, match="3 of 4 rows are not in the cache"):
    read.look_up({**batch, "images": (-values, grid)})


def test_a_teacher_of_text_is_refused(prepared):
  folder, data = prepared
  text = AutoModel.from_pretrained(folder, dtype="float32", images=False)
  with pytest.raises(ValueError, match=r"the batch has images, and Ministral3.* takes"):
    run(pair(folder)[1], text, data()[0])


def test_what_the_command_refuses(tmp_path, capsys):
  folder = toys_images.folder("smolvlm", tmp_path / "model")
  toys_images.write_records(tmp_path)
  keys = {"job": "distill", "output_dir": tmp_path / "out", "training__max_steps": 1}
  files: dict[str, Any] = {"preprocessor_config.json": {"resample": 3}}
  files["config.json"] = {"model_type": "llama"}
  messages = ("has another image processor", "has no vision tower")
  for (name, change), message in zip(files.items(), messages):
    teacher = tmp_path / name.partition(".")[0]
    shutil.copytree(folder, teacher)
    values = json.loads((teacher / name).read_text())
    (teacher / name).write_text(json.dumps(values | change))
    assert images_test.command(tmp_path, distill__teacher=teacher, **keys) == 2
    assert f"distill.teacher is {teacher}, which {message}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_trains(tmp_path):
  folder = toys_images.folder("smolvlm", tmp_path / "model")
  toys_images.write_records(tmp_path)
  keys = {"job": "distill", "distill__teacher": folder, "distill__top_k": 5}
  keys |= {"output_dir": tmp_path / "out", "training__max_steps": 2}
  cache = {"distill__cache": tmp_path / "cache"}
  assert images_test.command(tmp_path, **keys, **cache) == 0
  losses = [record["loss"] for record in runs.metrics(tmp_path / "out").values()]
  assert len(losses) == 2 and np.isfinite(losses).all()


LIMITS = {"max_prompt_length": 80, "max_completion_length": 6}
HINT = "hint: {demonstration}. {prompt} again"


def written(name, tmp_path, **taught):
  """(folder, a batch of prompts with images and answers) of a family."""
  folder = toys_images.long_folder(name, tmp_path / "model")
  model, tokenizer = toys_images.load(folder), toys_images.tokenizer(name)
  limits = {"max_teacher_prompt_length": 110} if taught else {}
  kind = Taught(**taught).kind(ANSWERED)
  file = open_file(toys_images.write_records(tmp_path), kind)
  source = Source(
    records=file,
    kind=kind,
    tokenizer=tokenizer,
    layout=SideBySide(max_prompt_length=80, max_completion_length=40, **limits),
    images=ImageReader(folder, model.config),
    image_tokens=24,
  )
  batches = build_batches(source, batch_size=4, shuffle=False)
  return folder, as_prompts(next(iter(batches)))


def on_policy(name, folder, teacher, parts=1, **options):
  return OnPolicyDistillationTrainer(
    pair(folder)[1],
    teacher,
    LogitStrategy(temperature=1.0, alpha=1.0, distill_top_k=5),
    optimizers.sgd(1.0),
    OnPolicyConfig(gradient_accumulation_steps=parts, **LIMITS, **options),
    tokenizer=toys_images.tokenizer(name),
  )


@pytest.mark.parametrize("name", ("smolvlm", "ministral3"))
def test_the_student_writes_about_images_and_the_teacher_sees_them(name, tmp_path):
  folder, batch = written(name, tmp_path)
  teacher = toys_images.load(folder)

  def step(given, parts=1):
    trainer = on_policy(name, folder, teacher, parts)
    loss = float(trainer.train_step(given))
    return loss, trainers.leaves(trainer.model)

  whole, one = step(batch)
  assert whole > 1e-4
  cut, many = step(batch, parts=4)
  np.testing.assert_allclose(cut, whole, rtol=1e-5)
  for path, leaf in one.items():
    np.testing.assert_allclose(many[path], leaf, rtol=0, atol=1e-6, err_msg=path)
  dark = jax.tree.map(lambda x: -x if x.dtype == np.float32 else x, batch["images"])
  assert abs(step({**batch, "images": dark})[0] - whole) > 1e-4
  # Of given completions, only the rows that are trained have the images.
  given = [
    on_policy(name, folder, teacher, on_policy_fraction=0.0).train_step(x)
    for x in (batch, {**batch, "images": dark})
  ]
  assert abs(float(given[0]) - float(given[1])) > 1e-4
  short = {**batch, "images": jax.tree.map(lambda x: x[:3], batch["images"])}
  with pytest.raises(ValueError, match=r"images have \[3\] rows; expected 4"):
    step(short)
  with pytest.raises(ValueError, match='and the batch no "images"; add them'):
    step({name: x for name, x in batch.items() if name != "images"})
  long = [np.concatenate([ids, np.ones(64, np.int32)]) for ids in batch["prompts"]]
  with pytest.raises(ValueError, match="cannot be cut"):
    step({**batch, "prompts": long})


def test_a_teacher_with_a_hint_sees_the_images(tmp_path):
  folder, batch = written("smolvlm", tmp_path, template=HINT)
  tokenizer, soft = toys_images.tokenizer("smolvlm"), toys_images.SOFT
  for own, prompt in zip(batch["teacher_prompts"], batch["prompts"]):
    assert np.sum(own == soft) == np.sum(prompt == soft)
  texts = [tokenizer.decode(ids.tolist()) for ids in batch["teacher_prompts"]]
  assert all("hint: " in text and " again" in text for text in texts)
  teacher = SelfTeacher(weights="current")
  losses = []
  for images in (batch["images"], np.zeros_like(batch["images"])):
    trainer = on_policy("smolvlm", folder, teacher, max_teacher_prompt_length=110)
    losses.append(float(trainer.train_step({**batch, "images": images})))
  assert losses[0] > 1e-6 and abs(losses[0] - losses[1]) > 1e-6
  own = [*batch["teacher_prompts"][:3], np.ones(5, np.int32)]
  trainer = on_policy("smolvlm", folder, teacher, max_teacher_prompt_length=110)
  with pytest.raises(ValueError, match="another number of tokens of images"):
    trainer.train_step({**batch, "teacher_prompts": own})


@pytest.mark.slow
def test_the_command_distills_on_policy(tmp_path):
  toys_images.long_folder("smolvlm", tmp_path / "model")
  toys_images.write_records(tmp_path)
  keys = {"job": "distill", "output_dir": tmp_path / "out", "training__max_steps": 2}
  keys |= {"distill__on_policy_fraction": 1, "rollout__max_tokens_to_generate": 6}
  keys |= {"distill__self_teacher": "average", "rollout__max_prompt_length": 80}
  keys |= {"data__max_length": 1024}
  assert images_test.command(tmp_path, **keys) == 0
  losses = [record["loss"] for record in runs.metrics(tmp_path / "out").values()]
  assert len(losses) == 2 and np.isfinite(losses).all()
