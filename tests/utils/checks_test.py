"""Numbers and bools of every public configuration are checked, and in one way."""

import dataclasses
import importlib
import inspect
import math
import pkgutil
import types

import numpy as np
import pytest

import tunix
from tests import optimizers
from tunix.models.gemma4 import multimodal as gemma4
from tunix.models.gemma4.vision import Gemma4TowerConfig
from tunix.models.ministral3 import multimodal as ministral3
from tunix.models.qwen3_5 import multimodal as qwen3_5
from tunix.models.qwen3_5_moe import multimodal as qwen3_5_moe
from tunix.models.qwen3_vl import model as qwen3_vl
from tunix.models.smolvlm import model as smolvlm
from tunix.models.vision import config as vision, qwen
from tunix.models.vision.pixtral import PixtralConfig
from tunix.models.vision.siglip import SiglipConfig
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.utils import checks

_TOWER = dict.fromkeys(["num_layers", "embed_dim", "hidden_dim", "patch_size"], 4)
_TOWER |= {"num_heads": 1}
# What a configuration cannot be made without.
_REQUIRED = {
  "RLTrainingConfig": {"actor_optimizer": optimizers.sgd(0.1)},
  "LoraConfig": {"rank": 2},
  "AdapterSpec": {"rank": 2},
  "CacheConfig": {"cache_size": 8},
  "OneRow": {"max_length": 8},
  "RouteSettings": {"urls": ("http://127.0.0.1:8000",)},
  "EngineRequest": {"prompt": [1], "max_tokens": 4},
  "SideBySide": {"max_prompt_length": 8, "max_completion_length": 8},
  "SamplingOptions": {"max_generation_steps": 4},
  "MoEConfig": {"num_experts": 4, "experts_per_token": 2, "hidden_dim": 8},
  "MLAConfig": {
    "kv_rank": 4,
    "q_rank": 4,
    "nope_dim": 4,
    "rope_dim": 2,
    "value_dim": 4,
  },
  "Mamba2Config": {"num_heads": 2, "head_dim": 4, "state_dim": 4},
  "DeltaNetConfig": {"num_heads": 2, "num_key_heads": 2},
  "MetricsLoggerOptions": {"log_dir": "logs"},
  "OnPolicyConfig": {"max_prompt_length": 8, "max_completion_length": 8},
  "ProfilerOptions": {"log_dir": "x", "skip_first_n_steps": 1, "profiler_steps": 2},
  "ImageTokens": {"start": 1, "soft": 2, "end": 3, "newlines": (4, 5)},
  **dict.fromkeys(
    ["TowerConfig", "PixtralConfig", "Gemma4TowerConfig", "QwenConfig"], _TOWER
  ),
  "SiglipConfig": _TOWER | {"image_size": 8},
  "OverlongBuffer": {"tokens": 4},
  "RewardSettings": {"functions": ()},
  "GenerateOptions": {"model": "m", "prompt": ("a",)},
  "ChatOptions": {"model": "m"},
  "EvalOptions": {"model": "m", "prompts": "a", "temperature": 1.0},
  "ServeOptions": {"model": "m"},
  "JudgeModel": {"model": "m", "url": "http://127.0.0.1:9/v1"},
}
# Models with images, and the towers that they have no default for.
_TOWERS = {
  vision.VisionLanguageConfig: vision.TowerConfig,
  smolvlm.ModelConfig: SiglipConfig,
  ministral3.MultimodalConfig: PixtralConfig,
  gemma4.MultimodalConfig: Gemma4TowerConfig,
  **dict.fromkeys(
    (
      qwen.QwenImagesConfig,
      qwen3_5.MultimodalConfig,
      qwen3_5_moe.MultimodalConfig,
      qwen3_vl.ModelConfig,
    ),
    qwen.QwenConfig,
  ),
}
_SIZES = dict.fromkeys(
  ["num_layers", "embed_dim", "hidden_dim", "num_heads", "num_kv_heads", "head_dim"], 2
) | {"vocab_size": 8, "head_dim": 8}  # Qwen3.5 rotates a quarter of a head
# Values of ours, which no user writes, and what only jobs of a name are made of.
_NOT_SETTINGS = {"PolicyVersion", "SharedPrompt", "Source", "Taught"}
_NOT_SETTINGS |= {"RunSettings", "StreamRun", "RLRun", "PreferenceRun"}
_NOT_SETTINGS |= {"Position", "Progress", "LearnerProgress", "Part"}
_NOT_SETTINGS |= {"Asking", "Judge", "PairJudge", "Rubric"}  # numbers of JudgeModel
# Below 0 there is a number of each of these; they are not a count, a size or a share.
_SIGNED = {
  "priority",
  "pass_threshold",
  "length_penalty",
  "norm_offset",
  "success_threshold",
  "start",
  "soft",
  "end",
}


def _configs():
  """Frozen keyword-only dataclasses that check themselves, with numbers among their
  fields: {name: class}."""
  found = {}
  for info in pkgutil.walk_packages(tunix.__path__, "tunix."):
    for name, cls in vars(importlib.import_module(info.name)).items():
      if not inspect.isclass(cls) or inspect.isabstract(cls):
        continue
      if cls.__module__ != info.name:
        continue
      is_config = dataclasses.is_dataclass(cls) and hasattr(cls, "__post_init__")
      if not is_config or name in _NOT_SETTINGS:
        continue
      kinds = checks._kinds(cls).values()
      if any(kind.whole is not None or kind.items is not None for kind in kinds):
        found[f"{info.name.removeprefix('tunix.')}.{name}"] = cls
  return found


def _made(cls, **values):
  arguments = dict(_REQUIRED.get(cls.__name__, {}))
  if {"vocab_size", "embed_dim"} <= {f.name for f in dataclasses.fields(cls)}:
    arguments = dict(_SIZES)
  if cls in _TOWERS:
    arguments["vision"] = _made(_TOWERS[cls])
  return cls(**arguments | values)


@pytest.fixture(scope="module")
def configs():
  return _configs()


def test_no_value_of_a_configuration_is_taken_unseen(configs):
  """nan, infinity, a text, a bool; a half where whole numbers are; -1."""
  assert len(configs) > 40
  taken = []
  for where, cls in configs.items():
    _made(cls)
    for name, kind in checks._kinds(cls).items():
      if kind.whole is None:
        wrong = ["text"] if str not in kind.others else []
      else:
        wrong = [math.nan, math.inf, -math.inf, True, 1e300]
        wrong += ["1"] if str not in kind.others else []
        wrong += [1.5, 2**70] if kind.whole else []
        wrong += [-1] if name not in _SIGNED else []
      for value in wrong:
        try:
          _made(cls, **{name: value})
        except (TypeError, ValueError) as error:
          if name not in str(error):
            taken.append((where, name, value, str(error)))
        else:
          taken.append((where, name, value))
  assert not taken, "\n".join(map(str, taken))


@pytest.mark.parametrize(
  ("value", "options", "message"),
  [
    (1.5, {"whole": True}, "x is 1.5: it must be a whole number$"),
    (0, {"within": checks.COUNT, "whole": True}, "whole number of at least 1$"),
    (0, {"within": checks.POSITIVE}, "x is 0: it must be a finite number above 0$"),
    (1.5, {"within": checks.SHARE}, "a finite number from 0 to 1$"),
    (1, {"within": checks.Range(0, 1, below=True)}, "number from 0 and below 1$"),
    (-1, {"within": checks.SEED, "whole": True}, "from 0 to 4294967295$"),
    (2**31, {"whole": True}, "x is 2147483648: it must be a whole number$"),
    (1e-300, {}, "a finite number, and 0 or more than 1e-37 away from 0$"),
    (-1e-38, {"within": checks.NOT_NEGATIVE}, "at least 0, and 0 or more than 1e-37"),
    (np.float32("nan"), {"optional": True}, "a finite number, or None$"),
    (None, {}, "x is None: it must be a finite number$"),
    ("1", {}, "x is '1'"),
    (np.array(1.0), {}, "x is array"),
  ],
)
def test_what_a_number_must_be(value, options, message):
  with pytest.raises((TypeError, ValueError), match=message):
    checks.number("x", value, **options)


def test_numbers_that_pass():
  checks.number("x", np.int64(3), checks.COUNT, whole=True)
  checks.number("x", np.float32(0.5), checks.SHARE)
  checks.number("x", 1, checks.SHARE)
  checks.number("x", None, optional=True)
  checks.number("x", 2**32 - 1, checks.SEED, whole=True)
  checks.number("x", 10**12, checks.BYTES, whole=True)
  checks.listed("x", np.arange(3), int)
  checks.listed("x", {"a", "b"}, str)


@pytest.mark.parametrize(
  ("value", "items", "message"),
  [
    ("abc", str, r"x is 'abc': it must be a list, such as \['abc'\]"),
    (3, int, r"x is 3: it must be a list, such as \[3\]"),
    ({"a": 1}, str, "x is .*it must be a list"),
    ([1, 1.5], int, r"x\[1\] is 1.5: it must be a whole number"),
    ([1.0, math.nan], float, r"x\[1\] is nan: it must be a finite number"),
    (["a", 1], str, r"x\[1\] is 1: it must be a text"),
  ],
)
def test_what_a_list_must_be(value, items, message):
  with pytest.raises((TypeError, ValueError), match=message):
    checks.listed("x", value, items)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 1.5, True, 5])
def test_a_number_is_no_list(value):
  with pytest.raises(TypeError, match=f"eos_tokens is {value}: it must be a list"):
    RolloutConfig(eos_tokens=value)


@pytest.mark.parametrize(
  ("value", "text"),
  [
    *((3, "an int"), ("a", "a str"), ([], "a list"), (None, "None")),
    *((np.zeros(1), "an ndarray"), (object(), "an object"), ({}, "a dict")),
    (types.new_class("RLLearner")(), "an RLLearner"),
    (types.new_class("OneRow")(), "a OneRow"),
    (types.new_class("Host")(), "a Host"),
  ],
)
def test_a_type_has_its_article(value, text):
  assert checks.type_of(value) == text
