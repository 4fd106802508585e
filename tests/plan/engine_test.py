"""The engine's cache, rounds and bytes, by hand."""

import types

import jax
import numpy as np
import pytest

from tests import toys, toys_text
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.models import automodel
from tunix.perf import programs
from tunix.plan import engine as engine_plan, residents
from tunix.plan.engine import DECODE, HELPERS, MIXED, EngineRecords, Load
from tunix.utils import mesh as mesh_lib

# A page of 16 tokens: 2 layers x keys and values x 2 heads of 8, in float32.
TOKEN = 2 * 2 * 2 * 8 * 4


@pytest.fixture(scope="module", params=["rows", "gather"])
def records(request):
  config = EngineConfig(
    slots=4,
    max_tokens=128,
    cache_tokens=320,
    prefill_tokens=32,
    attention=request.param,
  )
  mesh = mesh_lib.create_mesh({"tp": 2}, jax.devices()[:2])
  model = automodel.of_shapes(toys.config(), mesh)
  one = EngineRequest(prompt=np.ones(1, np.int32), max_tokens=1, stop_ids=())
  with programs.recording() as made:
    Engine(model, toys_text.chat_tokenizer(), config).run([one])
  return request.param, EngineRecords(made)


def test_pages_that_fit(records):
  path, records = records
  assert (
    {MIXED, DECODE} <= records.records.keys() <= {MIXED, DECODE, "unstack", *HELPERS}
  )
  pages, rows = 21 * 16 * TOKEN // 2, 4 * 128 * TOKEN // 2  # on one of two devices
  held = pages + rows * (path == "rows") + 5000
  planned = dict.fromkeys(
    (MIXED, DECODE), types.SimpleNamespace(held_bytes=held, seconds=0.5)
  )
  memory = held + 3 * 16 * TOKEN // 2 + 7  # three more pages
  made = records.estimate(planned, memory, context=20)
  assert made.path == path and (made.slots, made.slot_tokens) == (4, 128)
  assert (made.pages, made.page_tokens, made.pages_that_fit) == (20, 16, 23)
  assert made.token_bytes == TOKEN
  assert made.cache_bytes == held - 5000
  assert made.tokens_per_second == 8.0
  assert "cache: 20 pages of 16 tokens" in made.lines()[1]
  assert "at most 23 pages fit" in made.lines()[1]
  assert "4 slots with 20 tokens each takes at least 500.00 ms" in made.lines()[2]
  unknown = records.estimate(planned, None, context=20)
  assert unknown.pages_that_fit is None


def test_the_cache_is_held_while_the_engine_runs_alone(records):
  path, records = records
  pages = 21 * 16 * TOKEN // 2
  always = residents.beside(records.records)
  freed = residents.beside(records.records, (MIXED, DECODE, *HELPERS))
  # Pages that no program makes look as if they stayed.
  found = always["engine start"] - freed["engine start"]
  assert found >= pages if path == "gather" else found < pages
  assert always["unstack"] - freed["unstack"] == found


def test_bytes_that_a_round_reads(records):
  _, records = records
  weights = records.read_bytes(0)
  # 20 thousand parameters in float32, of which each device has a part.
  assert 4 * 5_000 < weights < 4 * 25_000
  assert records.read_bytes(20) == weights + 4 * 20 * TOKEN / 2


@pytest.mark.parametrize(
  ("load", "mixed", "decode"),
  [
    # Two prompts of 3 pages, 2 pages a round; 4 completions in 4 slots.
    (Load(prompts=2, samples=2, prompt_tokens=40, new_tokens=9), 3, 8),
    # 16 completions of 10 tokens in 4 slots are 40 rounds, of which 4 prefill.
    (Load(prompts=8, samples=2, prompt_tokens=5, new_tokens=10), 4, 36),
    (Load(prompts=1, samples=1, prompt_tokens=1, new_tokens=1), 1, 1),
  ],
)
def test_least_rounds_of_a_load(records, load, mixed, decode):
  assert records[1].rounds(load) == {MIXED: mixed, DECODE: decode}


def test_layers_with_a_window_read_no_more_than_it(monkeypatch, records):
  path, records = records
  if path == "rows":
    pytest.skip("attention reads whole rows")
  monkeypatch.setattr(engine_plan.EngineRecords, "_windows", lambda self, n: [None, 8])
  read = records.read_bytes(20) - records.read_bytes(0)
  assert read == pytest.approx(4 * (20 + 8) * TOKEN / 2 / 2)
