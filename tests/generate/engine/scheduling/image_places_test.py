"""The places of images in a prompt, and the rounds that prefill them."""

import types

import numpy as np
import pytest

from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.scheduling import pages, plan
from tunix.generate.engine.scheduling.image_places import ImagePlaces
from tunix.models.images.prompt_images import PromptImages

SOFT = 9
# Runs of soft tokens at 3-6, 8-11 and 20-23, of three images.
PROMPT = np.ones(26, np.int32)
for _start in (3, 8, 20):
  PROMPT[_start : _start + 4] = SOFT


def places(both_ways=True, names=("a", "b", "c")):
  images = PromptImages(None, (4, 4, 4), tuple(name.encode() for name in names))
  return ImagePlaces.of(PROMPT, images, SOFT, both_ways)


def test_vectors_and_last_tokens():
  found = places()
  assert found.vector[[2, 3, 6, 7, 8, 23, 24]].tolist() == [-1, 0, 3, -1, 4, 11, -1]
  assert found.last is not None
  assert found.last[[2, 3, 6, 7, 8, 20, 25]].tolist() == [2, 6, 6, 7, 11, 23, 25]
  assert found.longest_run == 4
  causal = places(both_ways=False)
  assert causal.last is None and causal.longest_run == 0 and not causal.is_inside_run(4)


def test_digests_of_pages_name_their_images():
  def digests(found):
    out = [b"root"]
    pages.extended(out, PROMPT, 4, found.digests_in)
    return out

  one, other = digests(places()), digests(places(names=("a", "x", "c")))
  # The second image has tokens in the pages 8-11 and no others.
  assert one[:3] == other[:3] and one[3] != other[3]
  assert places().digests_in(4, 9) == b"ab" and places().digests_in(12, 20) == b""
  plain = [b"root"]
  pages.extended(plain, PROMPT[:3], 3)
  assert plain == digests(places())[:1] + plain[1:]


@pytest.mark.parametrize("computed", [0, 4, 8])
@pytest.mark.parametrize("both_ways", [True, False])
def test_rounds_cut_no_image_that_attends_in_both_directions(computed, both_ways):
  found = places(both_ways)
  one = types.SimpleNamespace(
    images=found, computed=computed, length=30, leader=None, is_decoding=False
  )
  config = EngineConfig(page_tokens=2, prefill_tokens=10, max_tokens=64)
  rounds = plan.rounds_of([one, one], config, 99)
  blocks = [block for each in rounds for block in each]
  covered = [i for b in blocks for i in range(b.start, b.start + b.count)]
  assert covered == 2 * list(range(computed, 30))  # 4 tokens were drawn
  assert all(b.start // 2 == (b.start + b.count - 1) // 2 for b in blocks)
  assert all(len(each) <= 5 for each in rounds)
  ends = [each[-1].start + each[-1].count for each in rounds]
  cut = any(start < end < start + 4 for start in (3, 8, 20) for end in ends)
  assert cut == (not both_ways and computed == 0)


def test_a_limit_of_blocks_cuts_no_image():
  one = types.SimpleNamespace(
    images=places(), computed=0, length=26, leader=None, is_decoding=False
  )
  config = EngineConfig(page_tokens=2, prefill_tokens=10, max_tokens=64)
  for most in range(1, 16):
    rounds = plan.rounds_of([one], config, 99, most)
    end = max((b.start + b.count for each in rounds for b in each), default=0)
    assert sum(map(len, rounds)) <= most
    assert not any(start < end < start + 4 for start in (3, 8, 20))
