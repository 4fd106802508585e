"""Prompts with images in reinforcement learning: data, scores, updates, the command."""

import asyncio
import base64
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import optimizers, toys_images as toys
from tests.cli import runs
from tests.rl import clusters
from tests.sft import trainers
from tunix.data import image_parts
from tunix.data.images import ImageReader
from tunix.data.questions import build_prompts
from tunix.generate import scoring
from tunix.generate.sizes import text_size
from tunix.models import lora
from tunix.models.images.opening import open_image
from tunix.models.images.prompt_images import PromptImages
from tunix.rl import common, policy_loss
from tunix.rl.common import TrainExample
from tunix.rl.config import Role
from tunix.rl.env import processes
from tunix.rl.env.adapters import trl
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.env.conversation import Conversation
from tunix.rl.env.env import EnvError, StepResult
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.grpo.sdpo_learner import SDPOConfig, SDPOLearner
from tunix.rl.pipeline import prompt_batch
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.prompts import images
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.client import Draw, groups_of
from tunix.rl.schedules import deciders
from tunix.rl.trainer import Trainer
from tunix.rl.utils import create_critic_model
from tunix.sft import inference
from tunix.sft.metrics_logger import Mode
from tunix.utils import mesh as mesh_lib

GROUP, NEW = 2, 4
LENGTH = 80  # tokens of a prompt
SHORT = 60  # of one with one image at most; the toys have 64 positions


def questions(folder, most, count=4):
  """Prompts with two, one or no images, at most `most`, and a column."""
  for number in range(4):
    toys.draw(folder / f"{number}.png", number)
  out = []
  for number in range(count):
    drawn = range(min(most, (2 - number) % 3))
    sources = [str(folder / f"{(number + i) % 4}.png") for i in drawn]
    question = toys.message(f"what is {number}?", *sources)
    out.append({"prompt": [question], "answer": str(number)})
  return out


class Setup:
  """A folder of a model, its reader and its prompts."""

  def __init__(self, name, path, folder=toys.folder):
    self.folder = folder(name, path / "model")
    self.tokenizer = toys.tokenizer(name)
    self.reader = ImageReader(self.folder, self.model().config)
    self.records = questions(path / "pictures", 2)
    self.short = questions(path / "pictures", 1)

  def model(self):
    return toys.load(self.folder)

  def adapted(self):
    return lora.apply(self.model(), lora.LoraConfig(rank=2))

  def prompts(self, records=None, **options):
    options = {"batch_size": 4, "max_prompt_length": LENGTH, "seed": None, **options}
    options.setdefault("images", self.reader)
    return build_prompts(records or self.records, self.tokenizer, **options)

  def cluster(self, actor=None, **options):
    rollout = {"max_prompt_length": SHORT, "max_tokens_to_generate": NEW}
    models = {k: options.pop(k) for k in ("critic", "reference") if k in options}
    reader = options.pop("images", self.reader)
    if "critic" in models:
      options["critic_optimizer"] = optimizers.adam(1e-3)
    return RLCluster(
      actor=actor or self.adapted(),
      tokenizer=self.tokenizer,
      images=reader,
      cluster_config=clusters.config(rollout, **options),
      **models,
    )


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
  return Setup("smolvlm", tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture(scope="module", params=["smolvlm", "qwen3_vl"])
def family(request, tmp_path_factory):
  return Setup(request.param, tmp_path_factory.mktemp(request.param))


def example(setup, shared, seed=0) -> TrainExample:
  """Groups of random completions of the prompts."""
  batch = prompt_batch(next(iter(setup.prompts())))
  seen: Any = images.read(setup.reader, batch)
  rng, rows = np.random.default_rng(seed), 4 * GROUP
  ids, mask = np.zeros((2, rows, LENGTH), np.int32)
  for row in range(rows):
    prompt = batch.inputs[row // GROUP]
    ids[row, LENGTH - len(prompt) :], mask[row, LENGTH - len(prompt) :] = prompt, 1
  return TrainExample(
    prompt_ids=ids,
    prompt_mask=mask.astype(bool),
    completion_ids=rng.integers(5, 70, (rows, NEW)).astype(np.int32),
    completion_mask=np.arange(NEW) < rng.integers(1, NEW + 1, (rows, 1)),
    advantages=rng.standard_normal(rows).astype(np.float32),
    images=seen.rows,
    group_size=GROUP if shared else 1,
  )


# Data.


def test_prompts_have_references_tokens_and_room(family):
  [batch] = family.prompts()
  assert batch["answer"] == ["0", "1", "2", "3"]
  assert [len(x) for x in batch["images"]] == [2, 1, 0, 2]
  soft = [ids.count(toys.SOFT) for ids in batch["prompt_token_ids"]]
  assert soft[2] == 0 < soft[1] < soft[0]
  assert batch["prompt_image_tokens"] == [max(soft)] * 4
  assert "what is 1?" in batch["prompts"][1]
  seen: Any = images.read(family.reader, prompt_batch(batch))
  assert [x and x.num_tokens for x in seen.prompts] == [soft[0], soft[1], None, soft[3]]
  values = jax.tree.leaves(seen.rows)[0]
  assert len(values) == 4 and values[0].any() and not values[2].any()


def test_every_image_becomes_a_text(smol, tmp_path):
  path = toys.draw(tmp_path / "cat.png", 5)
  content = path.read_bytes()
  uri = "data:image/png;base64," + base64.b64encode(content).decode()
  pixels = open_image(path)
  text = "<image>what?"
  rows = [{"prompt": [toys.message("what?", x)]} for x in (str(path), content, uri)]
  rows += [{"prompt": [toys.message("what?", pixels)]}]
  rows += [{"prompt": text, "image": str(path)}, {"prompts": text, "images": [content]}]
  rows += [{"prompt": [{"role": "user", "content": text}], "image": uri}]
  [batch] = smol.prompts(rows, batch_size=9)
  assert json.loads(json.dumps(batch)) == batch
  assert batch["images"][0] == [str(path)] and batch["images"][2] == [uri]
  for ids, [source] in zip(batch["prompt_token_ids"], batch["images"], strict=True):
    assert ids == batch["prompt_token_ids"][0]
    np.testing.assert_array_equal(open_image(source), pixels)


def test_prompts_of_text_have_no_columns_of_images(smol):
  [batch] = smol.prompts([{"prompt": "what?", "answer": "a"}])
  assert set(batch) == {"prompts", "prompt_token_ids", "answer"}
  [plain] = smol.prompts([{"prompt": "what?", "image": "a.png"}], images=None)
  assert plain["image"] == ["a.png"]
  assert images.read(None, prompt_batch(plain)) is None


def test_what_prompts_refuse(smol, tmp_path):
  def message(record, **options):
    with pytest.raises(ValueError) as caught:
      smol.prompts([record], **options)
    return str(caught.value)

  asked = smol.records[0]
  assert "only text is read here" in message(asked, images=None)
  assert "a column 'image' and the prompt has no placeholder" in message(
    {"prompt": "what?", "image": "a.png"}
  )
  assert "2 placeholders of images and 1 images" in message(
    {"prompt": "<image><image>what?", "image": "a.png"}
  )
  missing = {"prompt": [toys.message("what?", str(tmp_path / "no.png"))]}
  assert "record 0: image 1: there is no file" in message(missing)
  assert "max_prompt_length is 8" in message(asked, max_prompt_length=8)


def test_an_image_that_changed_is_noticed(smol, tmp_path):
  path = toys.draw(tmp_path / "a.png", 0)
  [batch] = smol.prompts([{"prompt": [toys.message("what?", str(path))]}])
  toys.draw(path, 0, size=(20, 20))
  with pytest.raises(ValueError, match="image tokens"):
    images.read(smol.reader, prompt_batch(batch))
  path.unlink()
  with pytest.raises(ValueError, match="prompt 0 of batch 0: image 1: there is no"):
    images.read(smol.reader, prompt_batch(batch))
  with pytest.raises(ValueError, match="expected an ImageReader"):
    images.read(None, prompt_batch(batch))


# Scores and updates.


def test_rows_of_a_group_share_the_images_of_their_prompt(family):
  given = example(family, shared=False)
  rows = {name: getattr(given, name) for name in (*common.TOKEN_ARRAYS, "images")}
  rows["own"] = jax.tree.map(lambda x: np.repeat(x, GROUP, axis=0), given.images)
  rows["other"] = jax.tree.map(np.copy, given.images)
  jax.tree.leaves(rows["other"])[0][1] *= -1

  def score(model, images, own, other, **rows):
    def of(images, **options):
      return scoring.score_completions(model, **rows, images=images, **options).logps

    tiled, shared = of(images, tile_rows=3), of(images, group_size=GROUP)
    return jnp.stack([of(images), of(own), tiled, shared, of(other)], axis=1)

  found = inference.run(family.model(), score, rows, None, ())
  whole, *same, changed = np.moveaxis(found, 1, 0)
  assert np.isfinite(whole).all() and np.abs(whole).max() > 1
  for scores in same:
    np.testing.assert_allclose(scores, whole, atol=1e-5)
  # The pixels count, for each row those of its own prompt.
  differs = np.abs(changed - whole).max(1) > 1e-4
  assert differs.tolist() == [False, False, True, True, *[False] * 4]


def test_a_batch_gives_one_update_however_it_is_cut(smol):
  given, results = example(smol, shared=True), []
  config = GRPOConfig(num_generations=GROUP, beta=0.0)
  for parts in (1, 4):
    training = clusters.config().training_config
    trainer = Trainer(smol.adapted(), optimizers.sgd(1.0), training, "actor")
    trainer.with_role_loss(
      lambda model, example: policy_loss.policy_loss(
        model, example, config, temperature=1.0, max_tokens=NEW
      )
    )
    assert trainer.update([given], parts, skip_jit=False) == 1
    results.append(trainers.leaves(trainer.model))
    trainer.close()
  moved = max(float(np.max(np.abs(leaf))) for leaf in results[0].values())
  assert moved > 0
  for path, leaf in results[0].items():
    np.testing.assert_allclose(results[1][path], leaf, rtol=0, atol=1e-6, err_msg=path)


def test_examples_are_cut_with_their_images(smol):
  given = example(smol, shared=True)
  taken = given.take([4, 5, 0, 1]).padded_to(6)
  assert taken.rows == 6
  np.testing.assert_array_equal(taken.images, given.images[[2, 0, 2]])


# Learners.


def looked_at(seen):
  def reward(prompts, completions, images, answer):
    seen.append((images, answer))
    return [float(len(text) % 3) for text in completions]

  return reward


def algorithm(**changes):
  return {"num_generations": GROUP, "beta": 0.0, **changes}


def test_grpo_trains_on_images(smol):
  seen = []
  learner = GRPOLearner(
    smol.cluster(max_steps=2, compute_logps_micro_batch_size=1),
    GRPOConfig(**algorithm(beta=0.1, num_iterations=2)),
    looked_at(seen),
  )
  learner.train(smol.prompts(smol.short))
  [(given, answers)] = seen
  assert answers == ["0", "0", "1", "1", "2", "2", "3", "3"]
  assert (
    given[2] == given[3] == [str(smol.short[1]["prompt"][0]["content"][0]["image"])]
  )
  logger = learner.rl_cluster.logger
  history = logger.get_metric_history("actor", "parity/abs_diff", Mode.TRAIN)
  assert len(history) == 2
  learner.close()


@pytest.mark.parametrize("engine", ["vanilla", "padded"])
def test_the_sampler_and_the_trainer_see_the_same(smol, engine):
  cluster = smol.cluster(rollout_engine=engine)
  batch = prompt_batch(next(iter(smol.prompts(smol.short))))
  seen: Any = images.read(smol.reader, batch)
  out = cluster.generate(batch.inputs, num_generations=GROUP, images=seen.prompts)
  config = cluster.cluster_config.rollout(Mode.TRAIN)
  rollouts = common.rollouts_of(
    out, batch, config, group_size=GROUP, bucketed=False, images=seen.rows
  )
  # The sampler forbids image tokens, and shares their probability among the others.
  soft = jnp.full((*rollouts.completion_ids.shape, 1), toys.SOFT)

  def score(model, **rows):
    found: Any = scoring.score_completions(model, **rows, head_ids=soft)
    return found.logps - jnp.log1p(-jnp.exp(found.head[..., 0]))

  names = (*common.TOKEN_ARRAYS, "images")
  rows = {name: getattr(rollouts, name) for name in names}
  expected = inference.run(cluster.actor, score, rows, None, ())
  mask = rollouts.completion_mask
  found = rollouts.rollout_logps[mask]
  np.testing.assert_allclose(found, expected[mask], atol=1e-5)
  assert not (rollouts.completion_ids == toys.SOFT).any()


def test_ppo_trains_on_images(smol):
  actor = smol.adapted()
  cluster = smol.cluster(actor, critic=create_critic_model(actor), max_steps=1)
  learner = PPOLearner(cluster, PPOConfig(beta=0.0), looked_at([]))
  assert learner.train(smol.prompts(smol.short)).steps == 1
  learner.close()


def drawn_by(learner, prompts):
  """Completions of the first batch, and the distance of its log-probabilities."""
  texts = []

  def note(prompts, completions, rewards, **columns):
    texts.append(completions)
    return {}

  learner._experience._metric_fns.append(note)
  learner.train(prompts)
  logger = learner.rl_cluster.logger
  [distance] = logger.get_metric_history("actor", "parity/abs_diff", Mode.TRAIN)
  learner.close()
  return texts, distance


def test_greedy_draws_what_sync_draws(smol):
  """From the same weights; groups are kept without their pixels."""
  found = []
  for schedule, lag in (("sync", None), ("greedy", 1)):
    cluster = smol.cluster(max_steps=1, schedule=schedule, lag=lag)
    learner = GRPOLearner(cluster, GRPOConfig(**algorithm()), looked_at([]))
    found.append(drawn_by(learner, smol.prompts(smol.short)))
  (texts, distance), (others, same) = found
  assert texts == others and len(set(texts[0])) > 4
  np.testing.assert_allclose(same, distance, rtol=1e-4)


@pytest.mark.slow
def test_roles_on_meshes_see_the_images(smol, mesh_fsdp8):
  def trained(**options):
    actor = smol.adapted()
    trainers.shake(actor)
    cluster = smol.cluster(actor, max_steps=1, **options)
    learner = GRPOLearner(cluster, GRPOConfig(**algorithm()), looked_at([]))
    learner.train(smol.prompts(smol.short))
    return trainers.leaves(learner.rl_cluster.actor)

  want = trained()
  halves = [mesh_lib.create_mesh({"fsdp": 4}, jax.devices()[n : n + 4]) for n in (0, 4)]
  apart = dict(zip((Role.ACTOR, Role.ROLLOUT), halves))
  for meshes in ({Role.ACTOR: mesh_fsdp8}, apart):
    found = trained(role_to_mesh=meshes)
    for path, leaf in want.items():
      np.testing.assert_allclose(found[path], leaf, atol=2e-5, err_msg=path)


# Environments.


class Pictures:
  """Shows a picture, and after an action another one."""

  folder: Any = None

  def __init__(self, prompt, answer):
    self.number, self.first, self.turns = int(answer), prompt, 0

  def initial_observation(self):
    return self.first

  def step(self, action):
    self.turns += 1
    picture = str(Pictures.folder / f"{self.number % 4}.png")
    return StepResult(
      reward=len(action.text) % 3,
      episode_done=self.turns == 2,
      next_observation=toys.message("b?", picture),
    )


@pytest.fixture(scope="module")
def long(tmp_path_factory):
  """A family whose toy has more positions."""
  path = tmp_path_factory.mktemp("long")
  setup = Setup("ministral3", path, toys.long_folder)
  Pictures.folder = path / "pictures"
  return setup


def env_learner(setup, room=40, history="split", **options):
  cluster = setup.cluster(**options)
  limits = EpisodeConfig(max_tokens=60, max_image_tokens=room, history=history)
  config = GRPOConfig(**algorithm())
  return GRPOLearner(cluster, config, env=Pictures, episodes=limits)


def shown(setup):
  rows = [{**row, "images": []} for row in setup.short]
  return {name: [row[name] for row in rows] for name in ("prompt", "answer")}


@pytest.mark.parametrize(
  "engine, history", [("vanilla", "keep"), ("vanilla", "split"), ("padded", "split")]
)
def test_environments_show_images(long, engine, history):
  columns = shown(long)
  batch = prompt_batch({"prompts": columns["prompt"], "answer": columns["answer"]})
  learner = env_learner(long, history=history, rollout_engine=engine)
  out = learner._experience.rollouts(batch, Mode.TRAIN, 0, learner._shape_rewards)
  assert out.finish_reasons == ["done"] * 8
  assert not out.shares_prompts  # rows have images of their own
  # In one row a second picture stands between two actions; they draw none.
  soft, each = out.completion_ids == toys.SOFT, out.episode_rows
  assert each == (1 if history == "keep" else 2)
  assert soft.any() and not soft[out.completion_mask].any()
  assert len(jax.tree.leaves(out.images)[0]) == 8 * each
  ids = jnp.full((*out.completion_ids.shape, 1), toys.SOFT)

  def score(model, **rows):
    found: Any = scoring.score_completions(model, **rows, head_ids=ids)
    return found.logps - jnp.log1p(-jnp.exp(found.head[..., 0]))

  rows = {name: getattr(out, name) for name in (*common.TOKEN_ARRAYS, "images")}
  actor, mask = learner.rl_cluster.actor, out.completion_mask
  expected = inference.run(actor, score, rows, None, ())
  np.testing.assert_allclose(out.rollout_logps[mask], expected[mask], atol=1e-5)
  dark = jax.tree.map(lambda x: -x if x.dtype == np.float32 else x, out.images)
  other = inference.run(actor, score, {**rows, "images": dark}, None, ())
  assert np.abs(other[mask] - expected[mask]).max() > 1e-4
  part = out.take([2, 0])
  for have, all_rows in zip(jax.tree.leaves(part.images), jax.tree.leaves(out.images)):
    want = all_rows.reshape(4, -1, *all_rows.shape[1:])[[2, 0]]
    np.testing.assert_array_equal(have, np.concatenate(want))
  wide = out.with_episode_rows(3)
  for have, all_rows in zip(jax.tree.leaves(wide.images), jax.tree.leaves(out.images)):
    np.testing.assert_array_equal(have[::3], all_rows[::each])
    np.testing.assert_array_equal(have[2::3], all_rows[::each])
  learner.close()


def test_a_learner_trains_on_what_environments_show(long):
  columns = shown(long)
  prompts = [{"prompts": columns["prompt"], "answer": columns["answer"]}]
  texts, distance = drawn_by(env_learner(long, max_steps=1), prompts)
  assert len(texts[0]) == 8 and distance < 0.1
  # One image has no room: the episode ends before it is drawn for.
  learner = env_learner(long, room=1)
  batch = prompt_batch(prompts[0])
  out = learner._experience.rollouts(batch, Mode.TRAIN, 0, learner._shape_rewards)
  assert set(out.finish_reasons) == {"observation"}
  learner.close()


def test_what_environments_refuse(long):
  with pytest.raises(ValueError, match="max_image_tokens is 0 and prompts have images"):
    env_learner(long, room=0)
  with pytest.raises(ValueError, match="schedule is 'greedy' and prompts have images"):
    env_learner(long, schedule="greedy", lag=1)
  with pytest.raises(ValueError, match="is None; expected an ImageReader"):
    env_learner(long, images=None)
  talk = Conversation(long.tokenizer)
  with pytest.raises(EnvError, match="max_image_tokens is 0; expected text"):
    talk.observe(toys.message("a?", str(Pictures.folder / "0.png")))
  rendered = {**next(iter(long.prompts(long.short)))}
  with pytest.raises(ValueError, match="rendered texts and env is set"):
    env_learner(long).train([rendered])
  process = EpisodeConfig(max_image_tokens=40, isolation="process")
  with pytest.raises(EnvError, match="type bytes; with isolation='process'"):
    processes._plain(toys.message("a?", b"png"))
  assert process.max_image_tokens == 40


def talk_of(setup, history="split"):
  return Conversation(
    setup.tokenizer, history=history, reader=setup.reader, max_image_tokens=40
  )


def test_observations_that_are_refused_end_their_episode_alone(long):
  picture = str(Pictures.folder / "0.png")
  for observation, message in (
    (toys.message("a?", "/no.png"), "there is no file"),
    ({"role": "user", "content": ["a"]}, "has the part 'a'"),
    ({"role": "user", "content": [{"text": "a"}]}, "has the part"),
    ({"role": "user", "content": [{"type": "image"}]}, "without an image; add it"),
    (toys.message("[IMG]?", picture), "tokens of images .*; expected equal numbers"),
    ([1, toys.SOFT, 5], "tokens of images"),
  ):
    with pytest.raises(EnvError, match=message):
      talk_of(long).observe(observation)

  class Spells(Pictures):
    def initial_observation(self):
      return "[IMG]" if self.number == 1 else super().initial_observation()

  learner = GRPOLearner(
    long.cluster(max_steps=1),
    GRPOConfig(**algorithm()),
    env=Spells,
    episodes=EpisodeConfig(max_tokens=60, max_image_tokens=40),
  )
  columns = shown(long)
  batch = prompt_batch({"prompts": columns["prompt"], "answer": columns["answer"]})
  out = learner._experience.rollouts(batch, Mode.TRAIN, 0, learner._shape_rewards)
  ends = ["done", "done", "failed", "failed", "done", "done", "done", "done"]
  assert out.finish_reasons == ends and out.episodes[0].turns[0].images is None
  learner.close()


def test_a_placeholder_that_the_policy_spells_is_text(long):
  talk = talk_of(long, "keep")
  start = talk.observe(toys.message("a?", str(Pictures.folder / "0.png")))
  spelled = [long.tokenizer.encode(letter)[-1] for letter in "img"]
  talk.act(spelled, "eos")
  talk.messages[-1]["content"] = "[IMG]"  # as a text that decodes to the placeholder
  ids = talk.observe(toys.message("b?", str(Pictures.folder / "1.png")))
  assert ids[: len(start) + 3] == start + spelled
  assert ids.count(toys.SOFT) == talk.image_tokens


def test_equal_prompts_with_other_images_are_other_actions():
  def draw(episode, pixels):
    seen = PromptImages.of_row(np.full(4, pixels, np.float32), 2)
    prompt = np.array([1, toys.SOFT, toys.SOFT], np.int32)
    return Draw(episode=episode, turn=0, prompt=prompt, max_tokens=4, images=seen)

  one, same, other = draw(0, 0.5), draw(1, 0.5), draw(2, 0.25)
  assert [len(group) for group in groups_of([one, same, other])] == [2, 1]
  digests = [deciders.digest_of_draw(x) for x in (one, same, other)]
  assert digests[0] == digests[1] != digests[2]
  # A column of other values is shown as it is.
  assert image_parts.shown("image", [1, "data:x", "a.png"]) == [1, "data URI", "a.png"]


def test_images_in_data_uris_do_not_count_as_text():
  message = toys.message("a?", "data:image/png;base64," + "A" * 10**6)
  assert not text_size.may_fit(message, 64)
  assert text_size.may_fit(image_parts.outline(message), 64)
  again = image_parts.outline([{"role": "user", "content": [{"type": "image_url"}]}])
  assert again[0]["content"] == [{"type": "image"}]


def test_the_text_of_a_trl_environment_follows_the_parts():
  class Task:
    def reset(self, **columns):
      return " Now."

    def look(self):
      """Looks."""
      return "nothing"

  prompt = [toys.message("what?", "a.png")]
  adapted = trl.TRLEnvironment(Task(), prompt, {})
  [turn] = asyncio.run(adapted.initial_observation())
  assert turn["content"][-1] == {"type": "text", "text": "what? Now."}


def test_what_learners_refuse(smol):
  def message(learner=GRPOLearner, config=None, cluster=None, **options):
    config = config or GRPOConfig(**algorithm())
    with pytest.raises(ValueError, match="prompts have images") as caught:
      learner(cluster or smol.cluster(**options), config, looked_at([]))
    return str(caught.value)

  assert "SDPO" in message(SDPOLearner, SDPOConfig(**algorithm()))
  with pytest.raises(ValueError, match="shared_prompt is True"):
    GRPOLearner(
      smol.cluster(),
      GRPOConfig(**algorithm(shared_prompt=True, exact_tile_rows=2)),
      looked_at([]),
    )


# The command.

REWARD = """
def seen(prompts, completions, images, answer):
  assert all(isinstance(source, str) for row in images for source in row)
  return [(len(text) + len(row)) % 3 for text, row in zip(completions, images)]
"""


@pytest.fixture(scope="module")
def command(smol, tmp_path_factory):
  files = tmp_path_factory.mktemp("files")
  lines = [json.dumps(record) for record in smol.short]
  (files / "data.jsonl").write_text("\n".join(lines) + "\n")
  (files / "seen.py").write_text(REWARD)

  def run(**keys):
    keys = {
      "job": "grpo",
      "model__path": smol.folder,
      "data__train": files / "data.jsonl",
      "reward__functions": f"{files}/seen.py:seen",
      "lora__rank": 2,
      "rollout__max_prompt_length": SHORT,
      "rollout__max_tokens_to_generate": NEW,
      "training__global_batch_size": 4,
      "rl__train_micro_batch_size": 2,
      "algorithm__num_generations": GROUP,
      "checkpoint__save_every_n_steps": 1,
      "samples__every_n_rollouts": 1,
      "logging__tensorboard": "false",
      **keys,
    }
    return runs.tunix("train", *runs.arguments(**keys))

  return run


BOARD = """
from tunix.rl.env.env import StepResult

class Board:
  def __init__(self, prompt):
    self.prompt = prompt

  def initial_observation(self):
    return self.prompt

  def step(self, action):
    return StepResult(reward=len(action.text) % 3, episode_done=True)
"""


def test_the_command_shows_images_in_environments(command, tmp_path):
  (tmp_path / "board.py").write_text(BOARD)
  keys = {"env": f"{tmp_path}/board.py:Board", "episode__max_image_tokens": 12}
  keys |= {"output_dir": tmp_path / "out", "training__max_steps": 1}
  assert command(**keys) == 0
  text = (tmp_path / "out" / "samples" / "000000.jsonl").read_text()
  assert "[image: " in text and "1.png]" in text


def test_the_command_trains_and_resumes_exactly(command, tmp_path, capsys):
  """Checkpoints of `lagged` have rollouts that wait; a kill drill has `sync`."""
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  keys = {"rl__schedule": "lagged"}
  assert command(output_dir=whole, training__max_steps=3, **keys) == 0
  assert "the most images have 12" in capsys.readouterr().out
  for steps in (1, 3):
    assert command(output_dir=parts, training__max_steps=steps, **keys) == 0
  for name in ("export/adapter_model.safetensors", "logs/metrics.jsonl"):
    assert (parts / name).read_bytes() == (whole / name).read_bytes()
  assert "1.png" in (whole / "samples" / "000000.jsonl").read_text()


def test_what_the_command_refuses(command, tmp_path, capsys):
  def message(**keys):
    keys = {"output_dir": tmp_path / "out", "training__max_steps": 1, **keys}
    assert command(**keys) == 2
    return capsys.readouterr().err

  assert "only text is read here" in message(model__images="false")
