"""Groups of layers: which there are, and how many pages each of them has."""

import dataclasses

import pytest

from tests import toys
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.scheduling import layer_groups
from tunix.models.gemma3.model import ModelConfig as Gemma3

# A window of 8 and 4 rounds: 10 keys that begin anywhere in pages of 4 lie in 4 pages.
SIZES = EngineConfig(
  slots=2, max_tokens=64, page_tokens=4, rounds=3, prefill_tokens=8, draft_tokens=0
)


def sliding(*types, window=8):
  kinds = {"s": "sliding", "f": "full"}
  return toys.config(
    num_layers=len(types),
    layer_types=tuple(kinds[x] for x in types),
    sliding_window=window,
  )


@pytest.mark.parametrize(
  ("model", "windows", "groups"),
  [
    (toys.config(), (None,), (0, 0)),
    (sliding("s", "f", "s"), (None, 8), (1, 0, 1)),
    (sliding("s", "s"), (8,), (0, 0)),
    # 36 + 3 keys in 11 pages: 44 pages save nothing of 32.
    (sliding("s", "f", window=36), (None,), (0, 0)),
    (sliding("s", "s", window=36), (None,), (0, 0)),
  ],
)
def test_the_groups_of_a_model(model, windows, groups):
  assert layer_groups.windows_of(model, SIZES) == windows
  assert layer_groups.groups_of(model, windows) == groups


def test_a_window_of_all_tokens_is_none():
  """Many pages for prefixes are not cut to those of the slots."""
  model = sliding("s", "f", window=64)
  config = dataclasses.replace(SIZES, cache_tokens=4096)
  assert layer_groups.pages_of(config, 64) < config.pages
  assert layer_groups.windows_of(model, config) == (None,)


def test_layers_of_another_model_use_the_narrowest_group_that_is_wide_enough():
  windows = (None, 16, 8, 4)
  assert layer_groups.groups_of(sliding("s", "f", window=6), windows) == (2, 0)
  assert layer_groups.groups_of(sliding("s", window=17), windows) == (0,)
  with pytest.raises(ValueError, match="window None, expected at most 16"):
    layer_groups.groups_of(sliding("f"), (16, 8))


def test_the_number_of_pages():
  """Twice those of the slots, or what a round prefills, and never more than of all."""
  pages = lambda window, **changes: layer_groups.pages_of(
    dataclasses.replace(SIZES, **changes), window
  )
  assert pages(None) == 32
  # 8 + 3 tokens, that begin with the last of a page: 4 pages.
  assert pages(8) == 2 * 4 + 2 * 4
  assert pages(8, draft_tokens=1) == 2 * 5 + 2 * 5
  assert pages(8, prefill_tokens=64) == 2 * 4 + 16
  assert pages(8, cache_tokens=64) == 16 == pages(None, cache_tokens=64)


def test_published_sizes():
  """Gemma 3 4B, 8 slots of 32,768 tokens: 29 of 34 layers need 3 % of the pages."""
  config, model = EngineConfig(max_tokens=32768), Gemma3.gemma3_4b()
  windows = layer_groups.windows_of(model, config)
  assert windows == (None, 1024)
  sizes = [layer_groups.pages_of(config, window) for window in windows]
  assert sizes == [16384, 1056]
