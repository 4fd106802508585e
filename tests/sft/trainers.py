"""What the trainer tests share: small trainers, weights as numpy, faults."""

import contextlib
from typing import Any

import jax
import numpy as np
from flax import nnx

from tests import optimizers, toys
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.sft.steps import shared_steps
from tunix.utils import tree


def tokens_only(seed: int = 0, **options: Any) -> toys.TokensOnly:
  return toys.TokensOnly(nnx.Rngs(seed), **options)


def wide(seed: int = 0) -> toys.TokensOnly:
  """A user's model whose matrices say how they are split."""
  model = toys.TokensOnly(nnx.Rngs(seed), rate=0.5)
  for variable in (model.embed.embedding, model.out.kernel):
    variable.set_metadata(out_sharding=("fsdp", None))
  return model


def small(seed: int, rows: int = 4, length: int = 8) -> dict[str, np.ndarray]:
  """A batch without segments, for user models."""
  whole = toys.batch(seed, rows=rows, length=length)
  return {k: whole[k] for k in ("input_tokens", "input_mask")}


def smalls(count: int, **options: Any) -> list[dict[str, np.ndarray]]:
  return [small(seed, **options) for seed in range(count)]


def trainer(
  model: nnx.Module | None = None, tx: Any = None, **config: Any
) -> PeftTrainer:
  """Adam at 0.01 on a TokensOnly; keywords are TrainingConfig's."""
  options: dict[str, Any] = {"pbar_description": None, **config}
  return PeftTrainer(
    tokens_only() if model is None else model,
    optimizers.adam(1e-2) if tx is None else tx,
    TrainingConfig(**options),
  )


def leaves(model: nnx.Module, kind: Any = nnx.Variable) -> dict[str, np.ndarray]:
  """Copies of a model's variables by name; random keys as their data."""
  flat = tree.flatten(nnx.state(model, kind))
  return {name: as_numpy(x) for name, x in flat.items()}


def shake(model: nnx.Module) -> None:
  """Changes the adapters of a model, in place: B of new ones is 0."""
  keys = iter(jax.random.split(jax.random.key(1), 99))
  draw = lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape)
  nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.LoRAParam)))


def as_numpy(x: Any) -> np.ndarray:
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  return np.array(x)


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
  """Whether two sets of arrays are bitwise the same."""
  return a.keys() == b.keys() and all(
    a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes() for k in a
  )


def history(trainer: PeftTrainer, name: str, mode: str = "train") -> list[float]:
  logger = trainer.metrics_logger
  return logger.get_metric_history("", name, mode).tolist()


@contextlib.contextmanager
def compilations(*, fresh: bool = True):
  """Yields a list of the names of the functions that XLA compiles inside.

  Args:
    fresh: if True, steps that earlier trainers have compiled are forgotten first.
  """
  names: list[str] = []
  if fresh:
    shared_steps.clear()

  def listen(event: str, duration: float, **info: Any) -> None:
    if event.endswith("backend_compile_duration"):
      names.append(str(info.get("fun_name", "")))

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield names
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
