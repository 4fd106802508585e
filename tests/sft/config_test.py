import dataclasses
import math

import jax
import numpy as np
import pytest

from tunix.sft.config import CheckpointOptions, TrainingConfig, TrainingInput


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"max_steps": 0}, "max_steps is 0: .* at least 1, or None"),
    ({"max_steps": 2.5}, "max_steps is 2.5: it must be a whole number"),
    ({"max_steps": True}, "max_steps is True"),
    ({"max_steps": "10"}, "max_steps is '10'"),
    ({"eval_every_n_steps": -1}, "eval_every_n_steps is -1"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
    (
      {"learning_rate": -0.1},
      "learning_rate is -0.1: it must be a finite number of",
    ),
    ({"learning_rate": math.nan}, "learning_rate is nan"),
    ({"data_sharding_axis": "fsdp"}, r"must be a list, such as \['fsdp'\]"),
    ({"max_inflight_computations": -1}, "max_inflight_computations is -1"),
    ({"max_steps": 3, "num_train_steps": 4}, "max_steps is 3 and num_train_steps is 4"),
  ],
)
def test_nonsense_is_refused(values, message):
  with pytest.raises((TypeError, ValueError), match=message):
    TrainingConfig(**values)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"save_every_n_steps": 0}, "save_every_n_steps is 0"),
    ({"max_to_keep": 1.5}, "max_to_keep is 1.5: it must be a whole number"),
    ({"timeout_secs": 0}, "timeout_secs is 0: it must be a whole number of at"),
    ({"min_interval_secs": -1}, "min_interval_secs is -1: it must be"),
  ],
)
def test_checkpoint_nonsense_is_refused(values, message):
  with pytest.raises(ValueError, match=message):
    CheckpointOptions(**values)


def test_other_names_and_derived_values():
  assert TrainingConfig(num_train_steps=7).max_steps == 7
  assert TrainingConfig(num_train_steps=7, max_steps=7).max_steps == 7
  assert TrainingConfig(max_steps=np.int64(3)).max_steps == 3
  assert TrainingConfig().micro_batches == 1
  assert TrainingConfig(gradient_accumulation_steps=4).micro_batches == 4


def test_configs_are_frozen_and_keyword_only():
  with pytest.raises(dataclasses.FrozenInstanceError):
    TrainingConfig().max_steps = 3  # pyright: ignore[reportAttributeAccessIssue]
  with pytest.raises(TypeError):
    TrainingConfig(3)  # pyright: ignore[reportCallIssue]


def test_a_training_input_is_a_pytree():
  batch = TrainingInput(np.ones((2, 3)), np.zeros((2, 3)))
  assert len(jax.tree.leaves(batch)) == 2
  doubled = jax.tree.map(lambda x: 2 * x, batch)
  assert isinstance(doubled, TrainingInput) and doubled.input_tokens[0, 0] == 2
