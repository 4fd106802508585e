import collections
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests import toys_text
from tests.data.pipeline_test import build, prompts, same
from tunix.data.batching.draws import weighted_draws
from tunix.data.batching.prompts import PromptBatches
from tunix.data.pipeline import build_batches
from tunix.data.reading.mixture import Mixture, describe
from tunix.data.reading.stored import HeldRecords
from tunix.data.records import PAIRS, SFT
from tunix.data.rows import OneRow
from tunix.data.scan import scan
from tunix.data.source import Source


def part(start, count, name="part"):
  records = [{"prompt": f"{start + i} of", "response": " sea"} for i in range(count)]
  return HeldRecords(records, name=name)


def mixed(weights=(3, 1), sizes=(10, 2)):
  starts = itertools.accumulate(sizes, initial=0)
  parts = [
    part(start, size, f"p{i}") for i, (start, size) in enumerate(zip(starts, sizes))
  ]
  return Mixture(parts, weights)


def test_without_weights_every_record_comes_once_a_pass():
  both = mixed(None)
  assert len(both) == 12
  assert both.where(11) == "p1, record 1"
  assert [record["prompt"] for record in both] == [f"{i} of" for i in range(12)]
  assert both[-1] == both.parts[1][1]
  assert sorted(prompts(build(both))) == list(range(12))
  assert describe(both) == []


def test_with_weights_each_part_has_its_share():
  drawn = list(prompts(build(mixed(), num_epochs=4)))
  assert len(drawn) == 48
  counts = collections.Counter(drawn)
  assert sum(counts[i] for i in range(10)) == 36  # three quarters
  assert {counts[10], counts[11]} == {6}
  # Evenly spread: in every eight draws there are two of the small part.
  for at in range(0, 48, 8):
    assert sum(index >= 10 for index in drawn[at : at + 8]) == 2
  # 36 draws of ten are three times through them, and six of a fourth.
  assert sorted(counts[i] for i in range(10)) == [3] * 4 + [4] * 6
  assert describe(mixed()) == [
    "75.0% from p0 (10 records, 0.90 times a pass)",
    "25.0% from p1 (2 records, 1.50 times a pass)",
  ]


def test_the_order_is_by_seed_and_new_each_time_through():
  big = [i for i in prompts(build(mixed(), num_epochs=4)) if i < 10]
  assert sorted(big[:10]) == sorted(big[10:20]) == list(range(10))
  assert big[:10] != big[10:20]
  again = [i for i in prompts(build(mixed(), num_epochs=4)) if i < 10]
  assert big == again
  other = [i for i in prompts(build(mixed(), num_epochs=4, seed=5)) if i < 10]
  assert big != other
  plain = list(prompts(build(mixed(), shuffle=False)))
  assert [i for i in plain if i < 10] == list(range(9))
  assert [i for i in plain if i >= 10] == [10, 11, 10]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("weights", [(3, 1), (1, 0), (0.0, 1)])
def test_a_mixture_goes_on_exactly_and_is_shared_by_processes(packing, weights):
  def make(**kwargs):
    records = mixed(weights)
    return build(records, packing=packing, num_epochs=3, batch_size=4, **kwargs)

  iterator = iter(make())
  states, batches = [json.dumps(iterator.get_state())], []
  for batch in iterator:
    batches.append(batch)
    states.append(json.dumps(iterator.get_state()))
  for position, state in enumerate(states):
    fresh = iter(make())
    fresh.set_state(json.loads(state))
    for batch in batches[position:]:
      same(next(fresh), batch)
  halves = [list(make(process_index=i, process_count=2)) for i in range(2)]
  for batch, *parts in zip(batches, *halves, strict=True):
    same(batch, {name: np.concatenate([p[name] for p in parts]) for name in batch})


@settings(deadline=None, max_examples=40)
@given(
  parts=st.lists(
    st.tuples(st.integers(1, 9), st.floats(0.05, 20)), min_size=1, max_size=4
  ),
  epochs=st.integers(1, 3),
)
def test_shares_hold_after_every_draw(parts, epochs):
  sizes, weights = zip(*parts)
  order = weighted_draws(sizes, weights, shuffle=True, seed=3, num_epochs=epochs)
  ends = np.cumsum(sizes)
  owners = np.searchsorted(ends, [order[i] for i in range(len(order))], side="right")
  assert len(owners) == sum(sizes) * epochs
  shares = np.asarray(weights) / sum(weights)
  for count in range(1, len(owners) + 1):
    had = np.bincount(owners[:count], minlength=len(sizes))
    assert np.all(np.abs(had - shares * count) <= len(sizes))


@pytest.mark.long
@settings(deadline=None, max_examples=15)
@given(
  sizes=st.lists(st.integers(1, 7), min_size=1, max_size=3),
  changes=st.lists(st.integers(1, 40), max_size=3, unique=True).map(sorted),
  data=st.data(),
)
def test_weights_that_change_hold_from_their_draw_on(sizes, changes, data):
  weight = st.one_of(st.just(0.0), st.floats(0.1, 5))
  row = st.lists(weight, min_size=len(sizes), max_size=len(sizes)).filter(any)
  begins = [0, *changes]
  phases = [(begin, data.draw(row)) for begin in begins]
  options = {"shuffle": True, "seed": 3, "num_epochs": None}
  order = weighted_draws(sizes, phases[0][1], later=phases[1:], **options)[:80]
  drawn = [order[i] for i in range(len(order))]
  owners = np.searchsorted(np.cumsum(sizes), drawn, side="right")
  for (begin, weights), end in zip(phases, [*changes, 80]):
    had = np.bincount(owners[begin:end], minlength=len(sizes))
    shares = np.asarray(weights) / sum(weights) * (end - begin)
    assert np.all(np.abs(had - shares) <= len(sizes))
    assert not had[np.asarray(weights) == 0].any()
  for number, size in enumerate(sizes):  # no record twice in a pass of its part
    own = np.asarray(drawn)[owners == number]
    for at in range(0, len(own), size):
      assert len(set(own[at : at + size])) == len(own[at : at + size])


def test_a_part_may_come_later():
  mixture = Mixture(mixed().parts, [1, 0], later={8: [0, 1]})
  assert (mixture.weights, mixture.later, mixture.unused) == ((1, 0), [(8, (0, 1))], ())
  drawn = list(prompts(build(mixture, num_epochs=1)))
  assert sorted(drawn[:8]) == sorted(set(drawn[:8])) and max(drawn[:8]) < 10
  assert set(drawn[8:]) == {10, 11} and len(drawn) == 12
  assert describe(mixture)[-1] == "from record 8 on: 0.0% from p0, 100.0% from p1"
  rows = [{"prompts": str(i)} for i in range(12)]
  weighted = {"sizes": (10, 2), "weights": (1, 0), "later": mixture.later}
  batches = iter(PromptBatches(rows, 4, seed=0, epochs=1, **weighted))
  numbers = [[int(x) for x in batch["prompts"]] for batch in batches]
  assert max(numbers[0] + numbers[1]) < 10 and set(numbers[2]) == {10, 11}


WRONG = [
  ({"weights": [0, 0.0]}, r"weights is \[0, 0.0\]; expected a number above 0 among"),
  ({"weights": [1, False]}, r"weights\[1\] is False"),
  ({"weights": [1, -1]}, r"weights\[1\] is -1"),
  ({"weights": [float("nan"), 1]}, r"weights\[0\] is nan"),
  ({"weights": [float("inf"), 1]}, r"weights\[0\] is inf"),
  ({"weights": [True, 1]}, r"weights\[0\] is True"),
  ({"weights": [1]}, "weights is .1.; expected 2 numbers"),
  ({"parts": []}, "parts is empty"),
  ({"parts": [[{"text": "a"}]]}, "kind is None and no part has one"),
  (
    {"parts": [part(0, 1), HeldRecords([{}], PAIRS, name="x")]},
    r"parts are of the kinds \['pair', 'sft'\]",
  ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_nonsense_is_refused(arguments, message):
  with pytest.raises((TypeError, ValueError), match=message):
    Mixture(**{"parts": [part(0, 3), part(3, 2)]} | arguments)


def test_a_part_with_the_weight_0_is_as_if_it_were_absent():
  both, alone = mixed((0, 2)), Mixture([part(10, 2, "p1")], [2])
  assert len(both) == both.sizes[0] == 2
  assert both.fingerprint == alone.fingerprint
  assert both.where(1) == "p1, record 1"
  assert both.count_by_part([0, 1]) == (2,)
  assert describe(both) == [
    "100.0% from p1 (2 records, 1.00 times a pass)",
    "nothing from p0 (its weight is 0)",
  ]
  drawn = list(prompts(build(both, num_epochs=3)))
  assert drawn == list(prompts(build(alone, num_epochs=3)))
  assert collections.Counter(drawn) == {10: 3, 11: 3}


def test_the_fingerprint_is_of_the_parts_in_order():
  one, two = part(0, 3), part(3, 2)
  assert Mixture([one, two]).fingerprint == Mixture([one, two], [1, 2]).fingerprint
  assert Mixture([one, two]).fingerprint != Mixture([two, one]).fingerprint


def test_a_scan_tells_the_shares():
  lists = [[{"text": "a"}] * 3, [{"text": "b c"}]]
  source = Source(
    records=Mixture(lists, [1, 1], SFT),
    kind=SFT,
    tokenizer=toys_text.chat_tokenizer(None),
    layout=OneRow(max_length=20),
  )
  text = str(scan(source))
  assert text.startswith("4 records: 4 kept")
  assert text.endswith("50.0% from part 1 (1 record, 2.00 times a pass)")
  assert len(list(build_batches(source, batch_size=2))) == 2
