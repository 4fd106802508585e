"""Preferences with images: scores, micro-batches, references, and the command."""

import itertools

import jax
import numpy as np
import pytest

from tests import drills, optimizers, toys_images
from tests.cli import runs
from tests.sft import images_test, trainers
from tunix.data import records
from tunix.data.batches import PAIR
from tunix.data.images import ImageReader
from tunix.data.pipeline import build_batches
from tunix.data.reading.files import open_file
from tunix.data.rows import SideBySide
from tunix.data.source import Source
from tunix.models import heads, lora
from tunix.models.automodel import AutoModel
from tunix.sft import inference
from tunix.sft.dpo.completions import logps_of
from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig
from tunix.sft.dpo.kto_trainer import KTOConfig, KTOTrainer
from tunix.sft.dpo.precomputed import PrecomputedLogps
from tunix.sft.dpo.reward_trainer import RewardConfig, RewardTrainer


def batches(
  folder, name, config, kind=records.PAIRS, image_tokens: int | None = 24, size=4
):
  """Batches of records with images."""
  file = toys_images.write_records(folder, kind=kind.name)
  source = Source(
    records=open_file(file, kind),
    kind=kind,
    tokenizer=toys_images.tokenizer(name),
    layout=SideBySide(max_prompt_length=88, max_completion_length=24),
    images=ImageReader(folder / "model", config),
    image_tokens=image_tokens,
  )
  return list(build_batches(source, batch_size=size, shuffle=False))


# Images that attend within themselves, and rotary positions with three axes.
# tests/sft/images_test.py has all families.
FAMILIES = ("gemma4", "qwen3_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
  """(name, folder, model, batches of pairs) of a family."""
  folder, name = tmp_path_factory.mktemp(request.param), request.param
  model = toys_images.load(toys_images.folder(name, folder / "model"))
  return name, folder, model, batches(folder, name, model.config)


def alone(model, batch):
  """Log-probabilities [B, 2] by one forward pass of rows without inner padding."""
  rows, spans = [], []
  for row, name in itertools.product(range(len(batch["prompt_ids"])), PAIR):
    parts = [
      batch[f"{part}_ids"][row][batch[f"{part}_mask"][row] == 1]
      for part in ("prompt", name)
    ]
    rows.append(np.concatenate(parts))
    spans.append((len(parts[0]), len(rows[-1])))
  tokens = np.stack([np.pad(x, (0, max(map(len, rows)) - len(x))) for x in rows])
  images = jax.tree.map(lambda x: np.repeat(x, 2, axis=0), batch["images"])
  logits = jax.jit(lambda tokens, images: model(tokens, images=images)[0])
  logps = np.asarray(jax.nn.log_softmax(logits(tokens, images)))
  sums = [
    sum(logps[i, at - 1, tokens[i, at]] for at in range(*span))
    for i, span in enumerate(spans)
  ]
  return np.reshape(sums, (-1, 2))


def test_completions_share_the_images_of_their_prompt(family):
  name, _, model, (batch, _) = family
  want = alone(model, batch)

  def score(batch, shared=False):
    out = inference.apply(model, logps_of(PAIR, shared), batch, ("fsdp",))
    return np.asarray(out)

  np.testing.assert_allclose(score(batch), want, rtol=1e-5)
  np.testing.assert_allclose(score(batch, shared=True), want, rtol=1e-5)
  flip = lambda x: -x if x.dtype == np.float32 else x  # no grids
  other = {**batch, "images": jax.tree.map(flip, batch["images"])}
  changed = np.abs(score(other) - want).max(axis=1) > 1e-4
  assert changed.tolist() == [True, True, False, True], name


def shaken(model):
  """A policy that differs from its reference: its adapters are not zero."""
  policy = lora.apply(model, lora.LoraConfig(rank=2))
  trainers.shake(policy)
  return policy


TRAINERS = {
  "pair": (DPOTrainer, DPOTrainingConfig),
  "labelled": (KTOTrainer, KTOConfig),
  "reward": (RewardTrainer, RewardConfig),
}


@pytest.mark.parametrize(
  "kind", ["pair", pytest.param("labelled", marks=pytest.mark.slow), "reward"]
)
def test_a_global_batch_gives_one_update_however_it_is_cut(kind, tmp_path):
  name = "ministral3" if kind == "pair" else "smolvlm"
  model = toys_images.load(toys_images.folder(name, tmp_path / "model"))
  read = records.LABELLED if kind == "labelled" else records.PAIRS
  batch = batches(tmp_path, name, model.config, read)[0]
  if kind == "reward":
    model = heads.with_scores(model)
  make, config = TRAINERS[kind]
  results = []
  for parts in (1, 2):
    options = config(gradient_accumulation_steps=parts)
    trainer = make(
      shaken(model), optimizer=optimizers.sgd(1.0), training_config=options
    )
    loss = float(trainer.train_step(batch))
    results.append((loss, trainers.leaves(trainer.model)))
  (whole, one), (cut, many) = results
  np.testing.assert_allclose(cut, whole, rtol=3e-6)
  start = trainers.leaves(shaken(model))
  moved = {p for p, leaf in one.items() if np.abs(leaf - start[p]).max() > 1e-6}
  assert any(path.endswith("lora_a") for path in moved)
  for path, leaf in one.items():
    np.testing.assert_allclose(many[path], leaf, rtol=0, atol=1e-6, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_eight_devices_give_the_gradient_of_one(name, shared, tmp_path, mesh_fsdp8):
  folder = toys_images.folder(name, tmp_path / "model")
  config = toys_images.load(folder).config
  [batch] = batches(tmp_path, name, config, size=8)

  def gradients():
    options = DPOTrainingConfig(shared_prompt=shared)
    policy = shaken(toys_images.load(folder))
    trainer = DPOTrainer(policy, optimizer=optimizers.sgd(1.0), training_config=options)
    return drills.gradients(trainer, [batch])

  want = gradients()
  with jax.set_mesh(mesh_fsdp8):
    drills.assert_same_gradients(gradients(), want)


def test_stored_log_probabilities_are_found_by_their_images(tmp_path):
  model = toys_images.load(toys_images.folder("smolvlm", tmp_path / "model"))
  batch = batches(tmp_path, "smolvlm", model.config)[0]
  stored = PrecomputedLogps.write(tmp_path / "logps", model, [batch])
  assert len(stored) == 8
  want = np.asarray(inference.apply(model, logps_of(PAIR, False), batch, ("fsdp",)))
  # Rows with more room for images have the same keys.
  wide = batches(tmp_path, "smolvlm", model.config, image_tokens=None)[0]
  assert wide["images"].shape[1] > batch["images"].shape[1]
  for same in (batch, wide):
    np.testing.assert_allclose(stored.logps(same, same["weights"]), want, rtol=1e-6)
  other = {**batch, "images": batch["images"][::-1]}
  with pytest.raises(ValueError, match=r"chosen completion of row 0 .* is not in"):
    stored.logps(other, other["weights"])


def test_what_trainers_refuse(tmp_path):
  folder = toys_images.folder("ministral3", tmp_path / "model")
  model = toys_images.load(folder)
  batch = batches(tmp_path, "ministral3", model.config)[0]
  text = AutoModel.from_pretrained(folder, dtype="float32", images=False)
  policy = lora.apply(text, lora.LoraConfig(rank=2))
  with pytest.raises(ValueError, match=r"the batch has images, and Ministral3.* takes"):
    DPOTrainer(policy, optimizer=optimizers.sgd(1.0)).train_step(batch)
  short = {**batch, "images": jax.tree.map(lambda x: x[:2], batch["images"])}
  with pytest.raises(ValueError, match=r"images have \[2\] rows; expected 4"):
    DPOTrainer(shaken(model), optimizer=optimizers.sgd(1.0)).train_step(short)


def command(tmp_path, kind="pair", **keys):
  toys_images.write_records(tmp_path, kind=kind)
  return images_test.command(tmp_path, **keys)


LENGTHS = {"data__max_length": 112, "preference__max_prompt_length": 88}


def test_the_command_trains_and_resumes_exactly(tmp_path, capsys):
  toys_images.folder("smolvlm", tmp_path / "model")
  keys = {"job": "dpo", "training__learning_rate": 0.01, **LENGTHS}
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  assert command(tmp_path, output_dir=whole, training__max_steps=3, **keys) == 0
  assert "8 pairs: 8 kept; " in (said := capsys.readouterr().out)
  assert "the most images have 24" in said
  for steps in (1, 3):
    assert command(tmp_path, output_dir=parts, training__max_steps=steps, **keys) == 0
  assert images_test.adapter(parts) == images_test.adapter(whole)
  logs = "logs/metrics.jsonl"
  assert (parts / logs).read_bytes() == (whole / logs).read_bytes()
  losses = [record["loss"] for record in runs.metrics(whole).values()]
  assert losses[0] == pytest.approx(np.log(2)) and losses[2] != losses[0]
  keys |= {"output_dir": tmp_path / "shared", "training__max_steps": 1}
  assert command(tmp_path, data__pad_to="shared", **keys) == 2
  assert "data.pad_to is 'shared' and the records have" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("job", ["orpo", "kto", "reward", "dpo"])
def test_every_job_sees_the_images(job, tmp_path):
  """Other pixels give other numbers from the second step on."""
  toys_images.folder("smolvlm", tmp_path / "model")
  keys = {"job": job, "training__learning_rate": 0.01, **LENGTHS}
  keys["training__max_steps"] = 2
  kind = "labelled" if job == "kto" else "pair"
  if job == "dpo":
    keys["preference__reference_logps"] = tmp_path / "logps"
  found = []
  for number in range(2):
    out = tmp_path / f"out{number}"
    toys_images.write_records(tmp_path, kind=kind)
    for picture in range(4 * number):
      toys_images.draw(tmp_path / "pictures" / f"{picture}.png", 10 + picture)
    assert images_test.command(tmp_path, output_dir=out, **keys) == 0
    found.append([record["loss"] for record in runs.metrics(out).values()])
  assert np.isfinite(found).all() and found[0][1] != found[1][1]
