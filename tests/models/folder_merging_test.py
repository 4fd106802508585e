"""The formulas of merging by hand, and the exact merge of adapters."""

import json

import numpy as np
import pytest
from safetensors import numpy as st

from tunix.models import folder_merging
from tunix.models.adapters import combining

A, B = np.float32([[3, 0], [-0.0, 4]]), np.float32([[0, 5], [np.inf, 0]])


def test_weights_of_1_and_0_return_the_first_tensor_to_the_bit():
  merged = folder_merging.linear([A, B], [1, 0])
  assert merged.tobytes() == A.tobytes() and merged.dtype == np.float32


def test_linear_by_hand():
  merged = folder_merging.linear([A, A, np.ones_like(A)], [0.5, 0.25, 2])
  np.testing.assert_array_equal(merged, [[4.25, 2], [2, 5]])


def test_slerp_by_hand():
  """A right angle: shares of sin(60 degrees) and sin(30 degrees) at t = 1/3."""
  pair = np.float32([2, 0]), np.float32([0, 1])
  merged = folder_merging.slerp(pair, 1 / 3)
  np.testing.assert_allclose(merged, [2 * np.sqrt(3) / 2, 1 / 2], rtol=1e-6)
  for t in (0, 1):
    np.testing.assert_array_equal(folder_merging.slerp(pair, t), pair[t])


@pytest.mark.parametrize("scale", [1, 3, -2, 0])
def test_slerp_of_tensors_without_an_arc_is_linear(scale):
  merged = folder_merging.slerp([A, scale * A], 0.25)
  np.testing.assert_allclose(merged, (0.75 + 0.25 * scale) * A, rtol=1e-6)


def test_slerp_keeps_the_length():
  rng = np.random.default_rng(0)
  pair = [x / np.linalg.norm(x) for x in rng.normal(size=(2, 3, 4)).astype(np.float32)]
  assert np.linalg.norm(folder_merging.slerp(pair, 0.3)) == pytest.approx(1, rel=1e-6)


DELTAS = np.float32([[4, 0.1, -3, 2], [2, -5, 1, 0.1], [-1, -6, 0.2, -3]])


@pytest.mark.parametrize(
  ("weights", "density", "expected"),
  [
    # Kept: [4, 0, -3, 0], [2, -5, 0, 0], [0, -6, 0, -3]; signs: + - - -.
    ((1, 1, 1), 0.5, [(4 + 2) / 2, (-5 - 6) / 2, -3, -3]),
    # Sums: 5, -10.9, -1.8, -0.9. The entries of these signs: 4 2, -5 -6, -3, -3.
    ((1, 1, 1), 1, [3, -5.5, -3, -3]),
    # Sums: 13, -10.7, -7.8, 3.1: the last sign is now that of the first two.
    ((3, 1, 1), 1, [(12 + 2) / 4, -5.5, -3, (6 + 0.1) / 4]),
    ((0, 1, 1), 0.25, [0, -5.5, 0, 0]),
  ],
)
def test_ties_by_hand(weights, density, expected):
  merged = folder_merging.ties(list(DELTAS), weights, density)
  np.testing.assert_allclose(merged, expected, rtol=1e-6)


def test_ties_of_opposite_entries_is_0():
  merged = folder_merging.ties([DELTAS[0], -DELTAS[0]], [1, 1], 1)
  np.testing.assert_array_equal(merged, np.zeros(4))


def test_ties_takes_numbers_and_empty_tensors():
  assert folder_merging.ties([np.float32(2), np.float32(4)], [1, 1], 0.5) == 3
  assert folder_merging.ties([np.zeros((0, 2), np.float32)] * 2, [1, 1], 0.5).shape == (
    0,
    2,
  )


def test_dare_of_density_1_is_task_arithmetic():
  merged = folder_merging.dare(list(DELTAS), [1, -2, 0.5], 1, 7)
  np.testing.assert_allclose(merged, np.float32([1, -2, 0.5]) @ DELTAS, rtol=1e-6)


def test_dare_keeps_the_expectation():
  """An entry x is x / d with probability d: mean x, variance x^2 (1 - d) / d."""
  ones, density, count = np.ones(1000, np.float32), 0.25, 100
  means = [
    folder_merging.dare([ones, ones], [1, 0.5], density, s) for s in range(count)
  ]
  assert {0, 2, 4, 6} == set(np.unique(means))
  error = np.sqrt((1 + 0.25) * 3 / (1000 * count))
  assert abs(np.mean(means) - 1.5) < 4 * error
  np.testing.assert_array_equal(
    means[3], folder_merging.dare([ones] * 2, [1, 0.5], density, 3)
  )


# Adapters.


def product(folder, name):
  """The change of a weight in float64, from PEFT's definition."""
  peft = json.loads((folder / "adapter_config.json").read_text())
  values = st.load_file(folder / "adapter_model.safetensors")
  a, b = (values.get(f"base_model.model.{name}.lora_{x}.weight") for x in "AB")
  if a is None:
    return 0.0
  rank, alpha = (
    next((x for end, x in peft[table].items() if f".{name}".endswith(f".{end}")), other)
    for table, other in (
      ("rank_pattern", peft["r"]),
      ("alpha_pattern", peft["lora_alpha"]),
    )
  )
  assert len(a) == rank
  scale = alpha / (np.sqrt(rank) if peft.get("use_rslora") else rank)
  return scale * b.astype(np.float64) @ a.astype(np.float64)


def write_adapter(folder, names, rank, size=6, **fields):
  """A PEFT folder of random pairs on square modules."""
  rng = np.random.default_rng(rank)
  shapes = {"A": (rank, size), "B": (size, rank)}
  folder.mkdir()
  st.save_file(
    {
      f"base_model.model.{name}.lora_{x}.weight": rng.normal(size=shape).astype("f4")
      for name in names
      for x, shape in shapes.items()
    },
    folder / "adapter_model.safetensors",
  )
  peft = {"peft_type": "LORA", "r": rank, "lora_alpha": 7, "rank_pattern": {}}
  peft |= {"alpha_pattern": {}, "target_modules": sorted(names), **fields}
  (folder / "adapter_config.json").write_text(json.dumps(peft))
  return folder


@pytest.mark.parametrize(
  "fields",
  [
    {"target_modules": ["q", "v"]},
    {"target_modules": r"layers\..*"},
    {"target_modules": ["q"], "layers_to_transform": [0, 1]},
  ],
)
def test_adapters_are_merged_exactly(fields, tmp_path):
  """Ranks, scales and modules differ, and some modules are in one adapter only."""
  one, two, three = ("layers.0.q", "layers.1.q", "layers.0.v")
  pair = [
    write_adapter(tmp_path / "a", [one, two], 2, use_rslora=True, **fields),
    write_adapter(tmp_path / "b", [one, three], 3),
  ]
  combining.merge_adapters(pair, tmp_path / "c", [0.5, -2])
  peft = json.loads((tmp_path / "c" / "adapter_config.json").read_text())
  names = {one, two, three}
  are_ends = fields["target_modules"] == ["q", "v"]
  assert peft["target_modules"] == sorted({"q", "v", one, three} if are_ends else names)
  assert not peft["layers_to_transform"]
  for name in names:
    expected = 0.5 * product(pair[0], name) - 2 * product(pair[1], name)
    np.testing.assert_allclose(product(tmp_path / "c", name), expected, atol=1e-5)


@pytest.mark.parametrize(
  ("fields", "size", "message"),
  [
    ({"use_dora": True}, 6, "use_dora is True; expected plain LoRA"),
    ({"modules_to_save": ["norm"]}, 6, "modules_to_save"),
    ({"target_parameters": ["mlp.experts"]}, 6, "target_parameters"),
    ({"trainable_token_indices": [3]}, 6, "trainable_token_indices is"),
    ({"init_lora_weights": "pissa"}, 6, "init_lora_weights"),
    ({"r": 5}, 6, "expected shape"),
    ({}, 4, "adapters of one base"),
  ],
)
def test_other_adapters_are_refused(fields, size, message, tmp_path):
  pair = [
    write_adapter(tmp_path / "a", ["q"], 2),
    write_adapter(tmp_path / "b", ["q"], 3, size, **fields),
  ]
  with pytest.raises(ValueError, match=message):
    combining.merge_adapters(pair, tmp_path / "c", [1, 1])
  assert not (tmp_path / "c").exists()
