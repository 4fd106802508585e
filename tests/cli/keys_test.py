"""Every key of the configuration changes something that can be seen.

A row of TABLE says what a key is set to, where to look, and which other keys the
comparison needs. What is seen there with and without the key must differ. What exactly
each key does is tested in the files beside this one.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys_text
from tests.cli import runs
from tunix.cli import (
  algorithms,
  build,
  build_data,
  build_distill,
  build_preference,
  build_prompts,
  build_rl,
  config as config_lib,
  fingerprints,
  optimizer,
  precision,
  train_main,
)
from tunix.data import pipeline
from tunix.models import safetensors_saver
from tunix.models.automodel import AutoModel
from tunix.sft import metrics_logger


def model(config):
  built = build.build_model(config, None)
  leaves = nnx.to_flat_state(nnx.state(built, nnx.Param))
  shapes = {str(path): (leaf.shape, str(leaf.dtype)) for path, leaf in leaves}
  scales = {getattr(module, "lora_scale", 1.0) for _, module in nnx.iter_modules(built)}
  drops = {getattr(module, "lora_dropout", 0) for _, module in nnx.iter_modules(built)}
  c = built.config
  return shapes, scales, drops, (c.dtype, c.remat, c.scan_layers, c.attention)


def settled_model(config):
  return model(precision.settle(config))


def preset(config):
  return None if config.model.name is None else build.preset_config(config)


def base_model(config):
  return fingerprints.of_base(config)


def tokenizer(config):
  made = build.build_tokenizer(config)
  turn = [{"role": "user", "content": "How many days"}]
  return made.vocab_size, made.apply_chat_template(turn)


def data(config):
  """Reports, steps and all batches of at most one epoch."""
  made = build_data.build_data(config, build.build_tokenizer(config))
  limit = None if config.training.max_steps is None else 2
  found = [made.reports, made.num_steps]
  for batches in (made.train, made.eval or ()):
    for number, batch in enumerate(batches):
      if number == limit:
        break
      found.append(hashlib.sha256(repr(batch).encode()).hexdigest())
  return found


def overlong(config):
  try:
    return data(config)
  except ValueError as error:
    return str(error)


def threads(config):
  seen = []
  build_batches = pipeline.build_batches
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      pipeline,
      "build_batches",
      lambda *args, **options: (
        seen.append(options["num_threads"]) or build_batches(*args, **options)
      ),
    )
    data(config)
  return seen


def updates(config):
  """What three steps of the optimizer do to a parameter."""
  config = optimizer.settle(config, 10)
  rate = optimizer.build_schedule(config)
  tx = optimizer.build_optimizer(config, rate)
  grads = {"w": jnp.asarray([[3.0, -4.0]])}
  state, found = tx.init(grads), []
  for _ in range(3):
    step, state = tx.update(grads, state, grads)
    found.append(np.asarray(step["w"]).tolist())
  return found


def trainer(config):
  settings = build.training_config(config, pathlib.Path("/out"), 0.1)
  return dataclasses.asdict(settings), config.training.micro_rows


def backends(config):
  """What would be logged to, with its settings."""
  seen = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      metrics_logger,
      "MetricsLogger",
      lambda options: seen.extend(options.backend_factories),
    )
    patch.delenv("WANDB_MODE", raising=False)
    build.build_logger(config, pathlib.Path("/out"))
  return [(getattr(f, "func", f), getattr(f, "args", ())) for f in seen]


def mesh(config):
  made = build.build_mesh(config)
  return made and dict(made.shape)


def export(config):
  return config.export_kind, precision.of_export(
    config, build.build_model(config, None)
  )


class Looked(Exception):
  """Ends a run where it begins."""


def start(config):
  """The folders of a run: its own, and that of compiled programs."""
  seen = []

  def prepare(config, folder):
    seen.append(folder.path)
    raise Looked

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train_main, "prepare", prepare)
    patch.setattr(train_main, "_keep_programs", seen.append)
    with pytest.raises((Looked, ValueError)):
      train_main.run(config)
  return seen


def loaded(config):
  return config


@dataclasses.dataclass(frozen=True)
class Row:
  """How to see a key: what it is set to, where to look, what else is set; None in
  `needs` takes a key away. Names in braces stand for files."""

  value: Any
  look: Callable[[Any], Any]
  needs: dict[str, Any] = dataclasses.field(default_factory=dict)


def rl(config):
  """The settings of an RL run, its learner's class and its prompts."""
  data = build_prompts.build_prompts(config, build.build_tokenizer(config))
  sampling = build_rl.rollout_configs(config)
  return (
    algorithms.learner_class(config),
    algorithms.algorithm_config(config),
    {mode: dataclasses.asdict(how) for mode, how in sampling.items()},
    [next(iter(data.train)), *(data.eval or ())],
    (data.num_steps, data.fingerprints, data.reports),
  )


def learner(config):
  """What a learner is made of; the models by their fingerprints' sizes."""
  settled = optimizer.settle(config, 10)
  made = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(build_rl, "RLCluster", lambda **options: made.append(options))
    patch.setattr(
      algorithms,
      "learner_class",
      lambda _: lambda *args, **options: Made(made[0], args, options),
    )
    return build_rl.build_learner(
      settled,
      build.build_model(config, None),
      build.build_tokenizer(config),
      optimizer.build_optimizer(settled, 0.1),
      mesh=None,
      output_dir=pathlib.Path("/out"),
      learning_rate=0.1,
    ).seen()


def weight(model):
  return model and float(sum(abs(x).sum() for x in jax.tree.leaves(nnx.state(model))))


def built(config, build_trainer):
  """What a builder gives its trainer."""
  settled = optimizer.settle(config, 10)
  return build_trainer(
    settled,
    build.build_model(config, None),
    build.build_tokenizer(config),
    optimizer.build_optimizer(settled, 0.1),
    mesh=None,
    output_dir=pathlib.Path("/out"),
    learning_rate=0.1,
  )


def preference(config):
  """The data of a preference job, and what its trainer is made of."""
  build_preference.check(config)
  made, known = [], build_preference.TRAINERS[config.job]

  def trainer(model, *args, **options):
    reference, _, settings = (None, *args) if config.job == "reward" else args
    logps = options.get("reference_logps")
    made.append((known[0], settings, weight(reference), logps and len(logps)))

  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(build_preference.TRAINERS, config.job, (trainer, known[1]))
    built(config, build_preference.build_trainer)
  return data(config), made


def distillation(config):
  """The data of a distillation, and what its trainer is made of."""
  try:
    build_distill.check(config)
  except ValueError as error:  # without a teacher
    return str(error)
  made = []

  def trainer(student, teacher, how, tx, settings, *_, **__):
    if isinstance(teacher, build_distill.TeacherCache):
      made.append((teacher.top_k, teacher.temperature))
      teacher = teacher._teacher
    options = {k: v for k, v in vars(how).items() if isinstance(v, int | float | tuple)}
    dtype = teacher and str(teacher.config.dtype)
    made.append((type(how), options, settings, weight(teacher), dtype))

  with pytest.MonkeyPatch.context() as patch:
    for name in ("DistillationTrainer", "OnPolicyDistillationTrainer"):
      patch.setattr(build_distill, name, trainer)
    built(config, build_distill.build_trainer)
  return data(config), made


class Made:
  """Stands for a learner; keeps what it was given."""

  def __init__(self, cluster, args, options):
    self.cluster, self.args, self.options = cluster, args, options
    self.samples = None

  def with_samples(self, samples):
    self.samples = vars(samples)
    return self

  def seen(self):
    config = self.cluster["cluster_config"]
    names = [f.name for f in dataclasses.fields(config.training_config)]
    settings = {n: getattr(config.training_config, n) for n in names}
    plain = {n: v for n, v in settings.items() if isinstance(v, int | None)}
    models = {
      role: float(sum(abs(x).sum() for x in jax.tree.leaves(nnx.state(model))))
      for role in ("actor", "reference", "critic", "reward")
      if isinstance(model := self.cluster.get(role), nnx.Module)
    }
    manager = self.args[2]
    rewards = manager and (manager.names, manager._weights, vars(manager._pool or Made))
    rates = critic_rate(config.training_config.critic_optimizer)
    placed = (config.rollout_engine, config.offload_to_cpu)
    limits = (rewards or [0, 0, {}])[2].get("_timeout_s")
    shown = (rewards or [0, 0])[:2], limits
    return plain, models, shown, rates, placed, self.options, self.samples


def critic_rate(tx):
  if tx is None:
    return None
  grads = {"w": jnp.ones(3)}
  return np.asarray(tx.update(grads, tx.init(grads), grads)[0]["w"]).tolist()


LORA = {"lora__rank": 2}
PRESET = {"model__path": None, "model__name": "qwen3_0p6b"}
EVAL = {"data__eval": "{eval}"}
WANDB = {"logging__wandb": "true"}
GRPO = {
  "job": "grpo",
  "data__train": "{prompts}",
  "data__max_length": None,
  "reward__functions": "exact_match",
  "rollout__max_prompt_length": 60,
}
DAPO = GRPO | {"algorithm__name": "dapo"}
PPO = GRPO | {"job": "ppo"}
ALGORITHM = {
  "name": "gspo",
  "num_generations": 3,
  "num_iterations": 2,
  "beta": 0.5,
  "kl_method": "k1",
  "kl_corrected": "true",
  "epsilon": 0.1,
  "epsilon_low": 0.1,
  "epsilon_high": 0.1,
  "epsilon_c": 3.0,
  "loss_algo": "cispo",
  "loss_agg_mode": "sequence-mean-token-mean",
  "advantage_estimator": "leave_one_out",
  "entropy_coef": 0.1,
  "rollout_correction": "{{kind: mask}}",
  "mask_truncated": "true",
  "shared_prompt": "false",
  "exact_tile_rows": 2,
  "eval_num_generations": 2,
  "pass_threshold": 1.0,
}
DAPOS = {
  "dynamic_sampling": "false",
  "max_refills": 2,
  "overlong_buffer": "{{tokens: 4}}",
}
PPOS = {
  "gamma": 0.9,
  "gae_lambda": 0.5,
  "clip_range_value": 0.5,
  "whiten_advantages": "false",
}
ROLLOUT = {
  "max_tokens_to_generate": 7,
  "max_prompt_length": 50,
  "temperature": 0.5,
  "eval_temperature": 0,
  "top_p": 0.9,
  "top_k": 4,
  "min_p": 0.1,
  "seed": 5,
  "stop_strings": "[stop]",
}
SIZES = {
  "mini_batch_size": 2,
  "train_micro_batch_size": 2,
  "rollout_micro_batch_size": 2,
  "compute_logps_micro_batch_size": 2,
  "bucketed_lengths": "true",
  "shuffle_seed": 3,
  "offload_to_cpu": "true",
}
PAIRS = {
  "job": "dpo",
  "data__train": "{pairs}",
  "data__max_length": None,
  "data__overlong": "truncate",
  "preference__max_prompt_length": 40,
  "preference__max_response_length": 12,
}
REWARD = PAIRS | {"job": "reward"}
KTO = PAIRS | {"job": "kto", "data__train": "{labelled}"}
DISTILL = {"job": "distill", "distill__teacher": "{half}"}
TOP_K = DISTILL | {"distill__top_k": 3}
JSD = DISTILL | {"distill__divergence": "jsd", "distill__jsd_beta": 0.5}
ON_POLICY = DISTILL | {
  "data__max_length": None,
  "data__overlong": "truncate",
  "distill__on_policy_fraction": 1,
}
VLLM = GRPO | {"rollout__engine": "vllm"}
TABLE = {
  "job": Row("ppo", rl, GRPO),  # see test_the_job_is_what_is_trained
  "output_dir": Row("/tmp/elsewhere", start),
  "seed": Row(7, data),
  "dataset_name": Row("{train}", overlong, {"data__train": None}),
  "model.path": Row("{half}", base_model),
  "model.name": Row("qwen3_0p6b", preset, {"model__path": None}),
  "model.args": Row("{{num_layers: 3}}", preset, PRESET),
  "model.dtype": Row("bfloat16", model),
  "model.param_dtype": Row("bfloat16", settled_model),
  "model.remat": Row("block", model),
  "model.scan_layers": Row("true", model),
  "model.attention": Row("blockwise", model),
  "model.quantise": Row("nf4", model, LORA),
  "tokenizer.path": Row("{other_tokenizer}", tokenizer),
  "tokenizer.chat_template": Row("{template}", tokenizer),
  "lora.rank": Row(2, model),
  "lora.alpha": Row(6, model, LORA),
  "lora.targets": Row("[q_proj]", model, LORA),
  "lora.dtype": Row("bfloat16", model, LORA),
  "lora.dropout": Row(0.5, model, LORA),
  "lora.rslora": Row("true", model, LORA),
  "lora.dora": Row("true", model, LORA),
  "lora.rank_pattern": Row("{{q_proj: 3}}", model, LORA),
  "lora.alpha_pattern": Row("{{q_proj: 3}}", model, LORA),
  "data.train": Row("{train}", overlong),
  "data.eval": Row("{eval}", data),
  "data.max_length": Row(60, data),
  "data.packing": Row("true", data),
  "data.shuffle": Row("false", data),
  "data.num_epochs": Row(2, data),
  "data.overlong": Row("truncate", overlong, {"data__max_length": 12}),
  "data.chat": Row("false", data, {"data__train": "{plain}"}),
  "data.template_args": Row(
    "{{mark: seven seven}}", data, {"tokenizer__chat_template": "{template}"}
  ),
  "data.scan_limit": Row(3, data),
  "data.num_threads": Row(0, threads),
  "optimizer.name": Row("sgd", updates),
  "optimizer.args": Row("{{weight_decay: 0.5}}", updates),
  "schedule.name": Row("cosine_decay_schedule", updates),
  "schedule.args": Row(
    "{{decay_steps: 3}}", updates, {"schedule__name": "cosine_decay_schedule"}
  ),
  "training.learning_rate": Row(0.5, updates),
  "training.max_steps": Row(3, trainer),
  "training.global_batch_size": Row(4, data),
  "training.micro_batch_size": Row(2, trainer),
  "training.eval_batch_size": Row(2, data, EVAL),
  "training.eval_every_n_steps": Row(3, trainer, EVAL),
  "training.max_grad_norm": Row("null", updates, {"optimizer__name": "sgd"}),
  **{f"algorithm.{k}": Row(v, rl, GRPO) for k, v in ALGORITHM.items()},
  **{f"algorithm.{k}": Row(v, rl, DAPO) for k, v in DAPOS.items()},
  **{f"algorithm.{k}": Row(v, rl, PPO) for k, v in PPOS.items()},
  **{f"rollout.{k}": Row(v, rl, GRPO) for k, v in ROLLOUT.items()},
  "rollout.engine": Row("vllm", learner, GRPO),
  "rollout.engine_options": Row("{{seed: 3}}", rl, VLLM),
  **{f"rl.{k}": Row(v, learner, GRPO) for k, v in SIZES.items()},
  "rl.reference": Row("{half}", learner, GRPO),
  "rl.critic": Row("{half}", learner, PPO),
  "rl.critic_learning_rate": Row(0.5, learner, PPO),
  "reward.functions": Row("[length(maximum=3)]", learner, GRPO),
  "reward.weights": Row("[0.5]", learner, GRPO),
  "reward.model": Row("{half}", learner, GRPO),
  "reward.workers": Row(2, learner, GRPO),
  "reward.timeout_s": Row(9, learner, GRPO | {"reward__workers": 1}),
  "samples.every_n_rollouts": Row(3, learner, GRPO),
  "samples.max_groups": Row(3, learner, GRPO),
  "preference.loss": Row("ipo", preference, PAIRS),
  "preference.beta": Row(0.5, preference, PAIRS),
  "preference.label_smoothing": Row(0.1, preference, PAIRS),
  "preference.lambda_orpo": Row(0.5, preference, PAIRS | {"job": "orpo"}),
  "preference.options": Row(
    "{{gamma: 1.0}}", preference, PAIRS | {"preference__loss": "simpo"}
  ),
  "preference.reference": Row("{half}", preference, PAIRS),
  "preference.reference_free": Row("true", preference, PAIRS),
  "preference.reference_logps": Row("{logps}", preference, PAIRS),
  "preference.shared_prompt": Row("true", preference, PAIRS),
  "preference.desirable_weight": Row(2, preference, KTO),
  "preference.undesirable_weight": Row(2, preference, KTO),
  "preference.centering": Row(0.1, preference, REWARD),
  "preference.max_prompt_length": Row(8, preference, PAIRS),
  "preference.max_response_length": Row(4, preference, PAIRS),
  "preference.unusable": Row(
    "drop", overlong, PAIRS | {"data__train": "{equal}", "data__num_epochs": 1}
  ),
  "distill.teacher": Row("{model}", distillation, DISTILL),
  "distill.strategy": Row("policy_gradient", distillation, ON_POLICY),
  "distill.on_policy_fraction": Row(0.5, distillation, ON_POLICY),
  "distill.teacher_dtype": Row("float16", distillation, DISTILL),
  "distill.temperature": Row(3, distillation, DISTILL),
  "distill.alpha": Row(0.9, distillation, DISTILL),
  "distill.top_k": Row(3, distillation, DISTILL),
  "distill.divergence": Row("reverse_kl", distillation, DISTILL),
  "distill.jsd_beta": Row(0.1, distillation, JSD),
  "distill.cache": Row("{cache}", distillation, TOP_K),
  "mesh": Row("{{fsdp: 8}}", mesh),
  "checkpoint.every_n_steps": Row(5, trainer),
  "checkpoint.min_interval_secs": Row(5, trainer),
  "checkpoint.max_to_keep": Row(1, trainer),
  "checkpoint.asynchronous": Row("false", trainer),
  "logging.tensorboard": Row("false", backends),
  "logging.wandb": Row("true", backends),
  "logging.console": Row("true", backends),
  "logging.progress_bar": Row("false", trainer),
  "logging.project_name": Row("mine", backends, WANDB),
  "logging.run_name": Row("mine", backends, WANDB),
  "export.kind": Row("merged", export, LORA),
  "export.dtype": Row("bfloat16", export),
  "compilation_cache": Row("/tmp/programs", start, {"output_dir": "/tmp/elsewhere"}),
}


def test_the_table_has_exactly_the_keys_of_the_schema():
  assert set(TABLE) == set(config_lib.known_keys())


def test_a_job_that_there_is_not():
  message = "job is the text 'spin', expected one of sft, dpo, orpo, kto, reward"
  with pytest.raises(ValueError, match=message):
    config_lib.load(["--job=spin"])


@pytest.fixture(scope="module")
def files(model, train_file, eval_file, tmp_path_factory):
  """Names in the table -> paths; `train` is the default data under another name."""
  folder = tmp_path_factory.mktemp("keys")
  named = {"model": model, "train": train_file, "eval": eval_file}
  for name in ("plain", "template", "half", "other_tokenizer", "prompts"):
    named[name] = folder / name
  for name in ("pairs", "labelled", "equal", "logps", "cache"):
    named[name] = folder / name
  pair = '{"prompt": "How many days", "chosen": "seven of %d", "rejected": "five"}\n'
  named["pairs"].write_text("".join(pair % i for i in range(9)))
  equal = '{"prompt": "How", "chosen": "many", "rejected": "many"}\n'
  named["equal"].write_text(pair % 1 + equal)
  answer = '{"prompt": "How", "completion": "many", "label": %s}\n'
  named["labelled"].write_text(answer % "true" + answer % "false")
  named["plain"].write_text('{"prompt": "How", "response": "many"}\n' * 16)
  named["prompts"].write_text('{"prompt": "How many days", "answer": "7"}\n' * 9)
  named["template"].write_text(
    "{% for m in messages %}{{ mark }}{{ m.content }}<|im_end|>{% endfor %}"
  )
  safetensors_saver.save_pretrained(
    AutoModel.from_pretrained(model), named["half"], dtype="bfloat16"
  )
  toys_text.chat_tokenizer("chatml").save(named["half"])
  toys_text.chat_tokenizer("llama3").save(named["other_tokenizer"])
  return {name: str(path) for name, path in named.items()}


@pytest.mark.parametrize("key", [key for key in TABLE if key != "job"])
def test_every_key_changes_what_is_seen(key, files):
  row = TABLE[key]
  base = {"model__path": "{model}", "data__train": "{train}", "data__max_length": 48}
  name = key.replace(".", "__")
  base = base | row.needs
  base.pop(name, None)
  base = {k: v for k, v in base.items() if v is not None}

  def see(**keys):
    given = {k: str(v).format(**files) for k, v in keys.items()}
    return row.look(config_lib.load(runs.arguments(**given)))

  without = see(**base)
  assert repr(see(**base)) == repr(without)  # or the comparison says nothing
  assert repr(see(**base, **{name: row.value})) != repr(without)


def test_the_job_is_what_is_trained(files):
  keys = {"model__path": "{model}"} | {k: v for k, v in GRPO.items() if v is not None}
  keys = {
    name: value.format(**files) if isinstance(value, str) else value
    for name, value in keys.items()
  }
  names = {
    job: algorithms.name_of(config_lib.load(runs.arguments(**(keys | {"job": job}))))
    for job in ("grpo", "ppo")
  }
  assert names == {"grpo": "grpo", "ppo": "ppo"}
  assert not config_lib.load(runs.arguments(job="sft")).is_rl
