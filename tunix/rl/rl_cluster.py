"""RLCluster: the models of an RL run by role, where they live, and what they can do.

The learners say what is learnt; a cluster says where it runs and with which engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.generate import tokenizer_adapter
from tunix.models import backbone
from tunix.models.automodel import AutoModel
from tunix.perf import trace
from tunix.perf.metrics import PerfMetricsConfig, PerfMetricsOptions
from tunix.rl import inference_worker, placement, reshard, utils
from tunix.rl.common import Tokens, TrainExample
from tunix.rl.config import ClusterConfig, RLTrainingConfig, Role
from tunix.rl.inference_worker import InferenceWorker
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutOutput
from tunix.rl.trainer import Trainer
from tunix.rl.weight_sync import PolicyVersion, WeightSync
from tunix.sft import inference
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.utils import mesh as mesh_lib

__all__ = ["ClusterConfig", "Mode", "RLCluster", "RLTrainingConfig", "Role"]

ENGINES = {
  "vanilla": "tunix.rl.rollout.vanilla_rollout:VanillaRollout",
  "vllm": "tunix.rl.rollout.vllm_rollout:VllmRollout",
  "sglang_jax": "tunix.rl.rollout.sglang_jax_rollout:SglangJaxRollout",
}


class RLCluster:
  """Models in their roles.

  Args:
    actor: the policy that is trained: a module, or a folder for AutoModel.
    critic: values, for PPO; any model with one score a token.
    reference: what the policy is kept close to. None with a LoRA actor: the actor
      without its adapters, which shares its weights.
    reward: a reward model (one score).
    tokenizer: of the actor.
    cluster_config: meshes, engine, sizes.
    perf_config: how metrics are made of what the run did when. Given, or with
      `training_config.perf_metrics_options`, the run is traced.

  Attributes:
    perf: the tracer.

  Raises:
    ValueError: models that do not fit together, or a config for roles that are absent.
  """

  def __init__(
    self,
    *,
    actor: nnx.Module | str,
    critic: nnx.Module | str | None = None,
    reference: nnx.Module | str | None = None,
    reward: nnx.Module | str | None = None,
    tokenizer: Any,
    cluster_config: ClusterConfig,
    perf_config: PerfMetricsConfig | None = None,
  ):
    config, train = cluster_config, cluster_config.training_config
    self.cluster_config = config
    self.tokenizer = tokenizer_adapter.adapted(tokenizer)
    placement.check_devices(self._meshes(actor))
    self.actor = self._placed(Role.ACTOR, actor)
    self.critic = self._placed(Role.CRITIC, critic)
    self.reference = self._placed(Role.REFERENCE, reference)
    self.reward = self._placed(Role.REWARD, reward)
    utils.check_roles(self.actor, self._others())
    self.logger = MetricsLogger(train.metrics_logging_options)
    self.perf = _tracer(train, perf_config)
    self.actor_trainer = Trainer(
      self.actor, train.actor_optimizer, train, "actor", self.logger, self.perf
    )
    self.critic_trainer = self._make_critic_trainer(train)
    self.rollout = self._make_rollout()
    self._sync = WeightSync()
    self.inference_worker = InferenceWorker(
      self._others(), self._axes, config.offload_to_cpu
    )
    self.sync_weights()

  # Building.

  def _placed(self, role: Role, model: nnx.Module | str | None) -> Any:
    mesh = self._mesh(role)
    if model is None or isinstance(model, nnx.Module):
      moved = model is not None and mesh is not None
      return reshard.reshard_model_to_mesh(model, mesh) if moved else model
    scores = 1 if role in (Role.CRITIC, Role.REWARD) else None
    return AutoModel.from_pretrained(model, mesh=mesh, num_scores=scores)

  def _meshes(self, actor: nnx.Module | str) -> dict[str, Any]:
    """By role where it will lie, as far as somebody has said."""
    out = {role.value: self._mesh(role) for role in Role}
    if isinstance(actor, nnx.Module) and out[Role.ACTOR.value] is None:
      out[Role.ACTOR.value] = mesh_lib.mesh_of(nnx.state(actor))
    return {role: mesh for role, mesh in out.items() if mesh is not None}

  def _mesh(self, role: Role) -> Any:
    meshes = self.cluster_config.role_to_mesh or {}
    return meshes.get(role, meshes.get(Role.ACTOR))

  def _others(self) -> dict[Role, nnx.Module]:
    """The models besides the actor."""
    roles = {
      Role.CRITIC: self.critic,
      Role.REFERENCE: self.reference,
      Role.REWARD: self.reward,
    }
    return {role: model for role, model in roles.items() if model is not None}

  def _make_critic_trainer(self, config: RLTrainingConfig) -> Trainer | None:
    if self.critic is None:
      if config.critic_optimizer is not None:
        raise ValueError("there is a critic_optimizer and no critic: give both")
      return None
    if config.critic_optimizer is None:
      raise ValueError("there is a critic and no critic_optimizer: give both")
    return Trainer(
      self.critic, config.critic_optimizer, config, "critic", self.logger, self.perf
    )

  def _make_rollout(self) -> BaseRollout:
    engine: Any = self.cluster_config.rollout_engine
    if isinstance(engine, str):
      if engine not in ENGINES:
        raise ValueError(
          f"rollout_engine is {engine!r}: choose one of {', '.join(ENGINES)}, or give "
          "a class of the kind of BaseRollout"
        )
      module, name = ENGINES[engine].split(":")
      engine = getattr(importlib.import_module(module), name)
    model: Any = self.actor
    there = self._mesh(Role.ROLLOUT)
    here = mesh_lib.mesh_of(nnx.state(self.actor))
    if there is not None and mesh_lib.auto(there) != here:
      model = reshard.reshard_model_to_mesh(nnx.clone(self.actor), there)
    return engine(model, self.tokenizer, self.cluster_config.widest_rollout())

  # What it can do.

  def generate(
    self,
    prompts: Sequence[Any],
    apply_chat_template: bool = False,
    mode: Mode = Mode.TRAIN,
    micro_batch_size: int | None = None,
    *,
    num_generations: int = 1,
    seed: Any = None,
  ) -> RolloutOutput:
    """Completions of prompts: strings, message lists, or token ids.

    Args:
      prompts: message lists are rendered by the tokenizer's chat template, and strings
        with `apply_chat_template` as one user message.
      apply_chat_template: see `prompts`.
      mode: whose RolloutConfig is used.
      micro_batch_size: prompts sampled at once; None: as the config says.
      num_generations: completions of each prompt.
      seed: of this call; None: the config's.

    Raises:
      ValueError: no prompts, or weights that are not the policy's.
    """
    if not len(prompts):
      raise ValueError("there are no prompts: give at least one")
    config = self.cluster_config.rollout(mode)
    texts = [self._rendered(prompt, apply_chat_template) for prompt in prompts]
    size = (
      micro_batch_size or self.cluster_config.training_config.rollout_micro_batch_size
    )
    size = size or len(texts)
    self._check_weights()
    key = config.seed if seed is None else seed
    key = jax.random.key(key) if isinstance(key, int) else key
    parts = [
      self.rollout.generate(
        texts[start : start + size],
        config,
        num_generations=num_generations,
        seed=key,
        first_prompt=start,
      )
      for start in range(0, len(texts), size)
    ]
    for part in parts:
      self._sync.check(part.version)
    return parts[0].joined(parts[1:])

  def _rendered(self, prompt: Any, as_user: bool) -> Any:
    if isinstance(prompt, str) and as_user:
      prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
      return self.tokenizer.apply_chat_template(
        list(prompt), add_generation_prompt=True, tokenize=False
      )
    return prompt

  def update_actor(
    self,
    train_ds: Iterable[TrainExample],
    eval_ds: None = None,
    skip_jit: bool = False,
    *,
    micro_batches: int = 1,
  ) -> int:
    """One update of the actor a mini-batch; returns their number."""
    _check_no_evaluation(eval_ds)
    with self.perf.span_group("actor_train"):
      return self.actor_trainer.update(train_ds, micro_batches, skip_jit)

  def update_critic(
    self,
    train_ds: Iterable[TrainExample],
    eval_ds: None = None,
    skip_jit: bool = False,
    *,
    micro_batches: int = 1,
  ) -> int:
    """One update of the critic a mini-batch; returns their number.

    Raises:
      ValueError: there is no critic.
    """
    if self.critic_trainer is None:
      raise ValueError("the cluster has no critic: pass critic= to RLCluster")
    _check_no_evaluation(eval_ds)
    try:
      with (
        self.perf.span_group("critic_train"),
        self.inference_worker.resident(Role.CRITIC),
      ):
        return self.critic_trainer.update(train_ds, micro_batches, skip_jit)
    finally:
      self.critic_trainer.after_move()

  def get_ref_per_token_logps(
    self,
    tokens: Tokens,
    *,
    shared_prompt: bool = False,
    tile_rows: int | None = None,
    micro_batch_size: int | None = None,
  ) -> np.ndarray:
    """The reference's log-probs of completions, float32 [B, R]."""
    score = self._logps(tokens, shared_prompt, tile_rows)
    at_once = self._at_once(tokens, micro_batch_size)
    with self.perf.span("refer_inference", "reference"):
      if self.reference is None:
        model = backbone.reference_of(self.actor_trainer.model)
        name = "reference scoring"
        return inference.run(model, score, _rows(tokens), at_once, self._axes, name)
      return self.inference_worker.run(Role.REFERENCE, score, _rows(tokens), at_once)

  def get_old_per_token_logps(
    self,
    tokens: Tokens,
    *,
    shared_prompt: bool = False,
    tile_rows: int | None = None,
    micro_batch_size: int | None = None,
  ) -> np.ndarray:
    """The actor's log-probs as it stands, float32 [B, R]."""
    with self.perf.span("old_logps", "actor"):
      return inference.run(
        self.actor_trainer.model,
        self._logps(tokens, shared_prompt, tile_rows),
        _rows(tokens),
        self._at_once(tokens, micro_batch_size),
        self._axes,
        "actor scoring",
      )

  def get_values(
    self, tokens: Tokens, *, micro_batch_size: int | None = None
  ) -> np.ndarray:
    """The critic's values before each token of the completions, float32 [B, R]."""
    at_once = self._at_once(tokens, micro_batch_size)
    score = inference_worker.values_of
    with self.perf.span("values", "critic"):
      values = self.inference_worker.run(Role.CRITIC, score, _rows(tokens), at_once)
    if self.critic_trainer is not None:
      self.critic_trainer.after_move()
    return values

  def get_rewards(
    self, tokens: Tokens, *, micro_batch_size: int | None = None
  ) -> np.ndarray:
    """The reward model's scores, float32 [B]."""
    at_once = self._at_once(tokens, micro_batch_size)
    score = inference_worker.rewards_of
    with self.perf.span("reward_model", "reward"):
      return self.inference_worker.run(Role.REWARD, score, _rows(tokens), at_once)

  def sync_weights(self) -> PolicyVersion:
    """Gives the rollout engine the actor's weights, under a new version.

    Raises:
      RuntimeError: training changed the actor and nothing reached the engine.
    """
    actor, sampled = self.actor_trainer.model, self._sampling_model()
    if sampled is None:
      sampled = actor
    elif sampled is not actor:
      placement.copy_weights(actor, sampled)
    version = self._sync.publish(sampled, self.actor_trainer.train_steps)
    self.rollout.update_params(sampled, version)
    return version

  @property
  def version(self) -> PolicyVersion:
    """Of the weights that the engine holds."""
    return self.rollout.version

  def close(self) -> None:
    """Hands the models back and closes files."""
    for trainer in (self.actor_trainer, self.critic_trainer):
      if trainer is not None:
        trainer.close()
    self.inference_worker.close()
    self.perf.synchronize()
    self.logger.close()

  def __enter__(self) -> RLCluster:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def _check_weights(self) -> None:
    """Refuses to sample from weights that were changed and not published."""
    if (model := self._sampling_model()) is not None:
      self._sync.identify(model)

  def _sampling_model(self) -> nnx.Module | None:
    """The module that samples: the actor, with its current weights, or the engine's
    copy; None: it is in another process."""
    try:
      model = self.rollout.model()
    except TypeError:
      return None
    return self.actor_trainer.model if model is self.actor else model

  def _logps(self, tokens: Tokens, shared: bool, tile_rows: int | None) -> Any:
    temperature = self.cluster_config.rollout(Mode.TRAIN).temperature
    group = tokens.group_size if shared else 1
    return inference_worker.logps_of(group, temperature, tile_rows)

  def _at_once(self, tokens: Tokens, stated: int | None) -> int | None:
    size = stated or self.cluster_config.training_config.compute_logps_micro_batch_size
    return None if size is None else size * tokens.group_size

  @property
  def _axes(self) -> tuple[str, ...]:
    return self.cluster_config.training_config.data_sharding_axis


def _tracer(
  config: RLTrainingConfig, perf_config: PerfMetricsConfig | None
) -> trace.NoopTracer:
  if perf_config is not None and not isinstance(perf_config, PerfMetricsConfig):
    raise TypeError(
      f"perf_config is a {type(perf_config).__name__}: expected a "
      "tunix.perf.metrics.PerfMetricsConfig, or None"
    )
  options = config.perf_metrics_options
  if perf_config is None:
    return trace.make_tracer(options, config.log_dir)
  options, made = options or PerfMetricsOptions(), perf_config.custom_export_fn
  return trace.make_tracer(options, config.log_dir, made)


def _check_no_evaluation(eval_ds: None) -> None:
  if eval_ds is not None:
    raise ValueError("evaluation is the learner's: RLLearner.train(..., eval_ds)")


def _rows(tokens: Tokens) -> dict[str, np.ndarray]:
  names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
  return {name: getattr(tokens, name) for name in names}
