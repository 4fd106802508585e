"""Requests of all kinds in one batch, goldens, and requests that must not do harm."""

import functools
import json
import pathlib

import numpy as np
import pytest

from tests import toys, toys_text
from tests.generate import toy_ids
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.device import launch
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.grammar import Grammars
from tunix.generate.engine.request import EngineRequest, RequestError, Ticket
from tunix.generate.engine.run import batch
from tunix.generate.sampler import Sampler
from tunix.models import quantization
from tunix.models.automodel import AutoModel

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
VOCAB = 600
TOKENIZER = toys_text.chat_tokenizer()
SIZES = {"slots": 4, "max_tokens": 64, "prefill_tokens": 32, "max_top_logprobs": 3}
END = TOKENIZER.eos_id()


@functools.cache
def model():
  return toys.model(vocab_size=VOCAB, num_layers=1)


def make(**sizes):
  engine = Engine(model(), TOKENIZER, EngineConfig(**{**SIZES, **sizes}))
  engine._drafts.use_only("lookup")  # also where it is slower
  return engine


@pytest.fixture(scope="module")
def engine():
  return make()


def ask(prompt, tokens, **rules):
  rules.setdefault("stop_ids", ())
  return EngineRequest(prompt=np.asarray(prompt), max_tokens=tokens, **rules)


@functools.cache
def digits():
  return Grammars(TOKENIZER, VOCAB, (END,)).regex("[0-9a-c]{6,20}")


def requests():
  """Requests with every rule; some prompts begin alike."""
  common, other = np.arange(40, 60), np.arange(7, 18)
  drawn = {"temperature": 1.0, "seed": 3}
  narrow = {"temperature": 0.8, "seed": 4, "top_k": 30, "top_p": 0.95, "min_p": 0.01}
  ends = tuple(range(20, 36))
  return [
    ask(common, 30),
    ask(common, 20, **drawn, num_samples=3, logprobs=True),
    ask([*common, 5], 25, **narrow, logprobs=True, top_logprobs=2),
    ask(other, 9, prompt_logprobs=True, top_logprobs=3),
    ask([*other, *other, *other], 31, logprobs=True),  # as many as there can be
    ask([1], 40, **drawn, stop_ids=ends),
    ask([1], 40, temperature=0.6, seed=8, stop_ids=ends, num_samples=2),
    ask(common, 40, **drawn, stop_strings=("e", "th"), num_samples=2),
    ask(other, 12, logit_bias={9: 4.0, 11: -np.inf}),
    ask(other, 12, **narrow, logit_bias={9: 100.0}, num_samples=2),
    ask(common, 24, constraint=digits(), stop_ids=(END,), **drawn, num_samples=2),
    ask(common, 30, priority=-1, **drawn, first_row=7),
  ]


@pytest.fixture(scope="module")
def alone(engine):
  """Each request of `requests`, with nothing beside it and nothing in the cache."""
  out = []
  for request in requests():
    engine.sleep()
    out.append(finished(engine, [request])[0])
  return out


def finished(engine, wanted):
  tickets = [engine.submit(request) for request in wanted]
  while engine.step():
    pass
  return [(ticket, engine.collect(ticket, 0)) for ticket in tickets]


def check_same(found, wanted):
  (ticket, rows), (other, others) = found, wanted
  assert len(rows) == len(others)
  for row, alike in zip(rows, others):
    assert (row.text, row.finish_reason) == (alike.text, alike.finish_reason)
    np.testing.assert_array_equal(row.tokens, alike.tokens)
    for name in ("logprobs", "sampling_logprobs"):
      check_close(getattr(row, name), getattr(alike, name))
    check_tops(row.top, alike.top)
  assert (ticket.prompt_scores is None) == (other.prompt_scores is None)
  if ticket.prompt_scores is not None:
    check_close(ticket.prompt_scores.logprobs, other.prompt_scores.logprobs)
    check_tops(ticket.prompt_scores.top, other.prompt_scores.top)


def check_close(found, wanted):
  assert (found is None) == (wanted is None)
  if wanted is not None:
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def check_tops(found, wanted):
  assert (found is None) == (wanted is None)
  if wanted is not None:
    np.testing.assert_array_equal(found.ids, wanted.ids)
    check_close(found.logprobs, wanted.logprobs)


BATCHES = {
  "plain": {},
  "drafts": {
    "draft_tokens": 3, "slots": 6, "cache_tokens": 96, "page_tokens": 4, "rounds": 5
  },
  "pages": {
    "attention": "gather", "draft_tokens": 2, "cache_tokens": 128, "page_tokens": 8,
    "rounds": 6,
  },
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_requests_of_all_kinds_do_not_touch_each_other(alone, name):
  engine = make(**BATCHES[name])
  for turn in range(2):  # in the second turn prompts are in the cache
    order = np.random.default_rng(turn).permutation(len(alone))
    wanted = requests()
    for i, found in zip(order, finished(engine, [wanted[i] for i in order])):
      check_same(found, alone[i])
    engine.audit()
  stats = engine.stats()
  assert stats.prefix_hit_tokens
  assert (name != "plain") == bool(stats.preemptions)
  assert (name != "plain") == bool(stats.accepted_tokens)


def test_the_rules_are_honoured(alone):
  """The oracle of the test above is one: what each request asked for is there."""
  rows = [rows for _, rows in alone]
  ends = set(range(20, 36))
  for row in rows[5] + rows[6]:
    found = [t in ends for t in row.tokens]
    assert not any(found[:-1]) and found[-1] == (row.finish_reason == "eos")
  assert any(row.finish_reason == "eos" for row in rows[5] + rows[6])
  for row in rows[7]:
    assert "e" not in row.text and "th" not in row.text
    assert row.finish_reason == "stop"
  assert 11 not in rows[8][0].tokens and set(rows[9][0].tokens) == {9}
  for row in rows[10]:
    assert set(row.text) <= set("0123456789abc") and len(row.text) <= 20
    assert row.finish_reason == "length" or len(row.text) >= 6
  assert len({row.text for row in rows[10]}) == 2


def test_drafts_of_sampled_tokens():
  """A small vocabulary repeats itself, so that drafts are right by chance."""
  tiny, requests = toys.model(vocab_size=6, num_layers=1), []
  for seed in range(8):
    requests.append(ask([1, 2, 3, 4], 40, temperature=1.0, seed=seed, logprobs=True))
  found = []
  for draft_tokens in (0, 3):
    config = EngineConfig(**SIZES, draft_tokens=draft_tokens)
    engine = Engine(tiny, toy_ids.Ids(), config)
    engine._drafts.use_only("lookup")
    found.append(engine.run(requests))
  assert engine.stats().accepted_tokens > 15
  for [with_none], [with_some] in zip(*found):
    np.testing.assert_array_equal(with_none.tokens, with_some.tokens)
    check_close(with_none.sampling_logprobs, with_some.sampling_logprobs)


def test_drafts_behind_the_end_are_written_nowhere(engine):
  """A row's last page must not take keys of tokens behind the end of the row."""
  # The bias draws 1, and "1 1 1" was followed by three tokens: the third one has no
  # place in 64 tokens.
  prompt = [1, 1, 1, 5, 6, 7, *range(10, 63), 1, 1]
  request = ask(prompt, 3, logit_bias={1: 100.0}, logprobs=True)
  pages = make(attention="gather", draft_tokens=3, page_tokens=8)
  [[[row]], [[wanted]]] = pages.run([request]), engine.run([request])
  assert len(prompt) == 61 and pages.stats().draft_tokens
  assert row.tokens.tolist() == [1, 1, 1]
  check_close(row.logprobs, wanted.logprobs)


def test_rows_change_their_width_while_completions_run():
  """128, 256 and 128 tokens again, with pages that are full in part."""
  sizes = {"max_tokens": 256, "slots": 3, "rounds": 6}
  short, wide = np.arange(1, 20), np.arange(40, 240)
  wanted = [
    ask(short, 90, temperature=0.7, seed=1),
    ask(short[3:], 85),
    ask(wide, 30, temperature=0.7, seed=2),
  ]
  engine = make(**sizes)
  alone = [engine.run([request])[0][0] for request in wanted]
  engine.sleep()
  tickets = [engine.submit(request) for request in wanted[:2]]
  engine.step()
  engine.step()
  widths = [engine._device.width]
  tickets.append(engine.submit(wanted[2]))
  while engine.step():
    widths.append(engine._device.width)
  assert list(dict.fromkeys(widths)) == [128, 256] and widths[-1] == 128
  for ticket, row in zip(tickets, alone):
    np.testing.assert_array_equal(engine.collect(ticket, 0)[0].tokens, row.tokens)


def test_a_launch_ends_when_a_slot_is_free_for_a_waiting_request():
  engine = make(slots=2, prefill_tokens=64)
  tickets = [engine.submit(ask([n + 1], most)) for n, most in enumerate((3, 40, 40))]
  engine.step()
  assert engine.stats().rounds == 3 and tickets[0] not in engine._requests
  assert engine.stats().waiting == 1
  engine.step()
  assert engine.stats().waiting == 0
  engine.step()
  assert engine.stats().rounds >= 3 + 2 * 15  # nobody waits


@pytest.mark.parametrize("name", ["llama3p1", "qwen3"])
@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_goldens_of_transformers(name, draft_tokens):
  golden = json.loads((GOLDEN / name / "generation.json").read_text())["greedy"]
  sizes = {**SIZES, "draft_tokens": draft_tokens}
  engine = Engine(
    AutoModel.from_pretrained(GOLDEN / name), toy_ids.Ids(), EngineConfig(**sizes)
  )
  engine._drafts.use_only("lookup")
  rows = engine.run([ask(p, 24, logprobs=True) for p in golden["prompts"]])
  for [row], tokens, logps in zip(rows, golden["tokens"], golden["logps"]):
    np.testing.assert_array_equal(row.tokens, tokens)
    np.testing.assert_allclose(row.logprobs, logps, atol=1e-4)


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_quantized_models(method):
  small = quantization.quantize(
    toys.model(vocab_size=VOCAB, embed_dim=64, num_layers=1), method
  )
  prompts = [np.arange(3, 20), np.arange(50, 55)]
  wanted = Sampler(small, TOKENIZER)(prompts, 16, eos_tokens=[])
  engine = Engine(small, TOKENIZER, EngineConfig(**SIZES))
  for [row], tokens in zip(engine.run([ask(p, 16) for p in prompts]), wanted.tokens):
    np.testing.assert_array_equal(row.tokens, tokens)


BAD = {
  "bias of a text": {"logit_bias": {3: "x"}},
  "bias of None": {"logit_bias": {3: None}},
  "NaN": {"logit_bias": {3: float("nan")}},
  "infinity": {"logit_bias": {3: float("inf")}},
  "beyond float32": {"logit_bias": {3: 1e39}},
  "key of a text": {"logit_bias": {"3": 1.0}},
  "half a key": {"logit_bias": {3.5: 1.0}},
  "list": {"logit_bias": [1, 2]},
  "negative key": {"logit_bias": {-1: 1.0}},
  "beyond int32": {"first_row": 2**31 - 2, "num_samples": 3},
  "wide ids": {"prompt": np.array([2**32 + 5], np.uint64)},
  "stop id": {"stop_ids": (2**40,)},
  "priority": {"priority": "high"},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_before_it_runs(engine, name):
  with pytest.raises((ValueError, TypeError)):
    engine.submit(EngineRequest(**{"prompt": [3, 4], "max_tokens": 3, **BAD[name]}))
  assert engine.run([ask([3, 4], 3)]) and not engine.is_busy


def test_a_constraint_of_another_vocabulary_is_refused(engine):
  other = Grammars(TOKENIZER, VOCAB + 64, (END,)).regex("a*")
  with pytest.raises(ValueError, match=r"shape \(21,\), expected \(19,\)"):
    engine.submit(ask([3, 4], 3, constraint=other))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["bias", "bias and constraint"])
def test_where_every_token_is_forbidden_no_token_is_drawn(engine, kind, temperature):
  rules = {"temperature": temperature, "seed": 0}
  if kind == "bias":
    # More ids than a request may list: a small vocabulary.
    tiny = toys.model(vocab_size=40, num_layers=1)
    engine = Engine(tiny, toy_ids.Ids(), EngineConfig(**SIZES))
    bias = dict.fromkeys(range(40), -np.inf)
  else:
    rules["constraint"] = Grammars(TOKENIZER, VOCAB, (END,)).choice([""])
    bias = {END: -np.inf}
  bad = engine.submit(ask([3, 4], 5, logit_bias=bias, **rules))
  good = engine.submit(ask([3, 4], 5))
  while engine.step():
    pass
  with pytest.raises(RequestError, match="no token is allowed by both"):
    engine.collect(bad, 0)
  assert len(engine.collect(good, 0)[0].tokens) == 5


class Few:
  """A tokenizer that has fewer ids than the model, and says so by an error."""

  bos_id, eos_id, pad_id = None, None, None

  def encode(self, text):
    raise NotImplementedError

  def decode(self, ids):
    return "".join(["a", "b", "c"][i] for i in ids)


@pytest.mark.parametrize("stops", [(), ("ccc",)])
def test_an_id_without_a_text_ends_its_request_only(stops):
  engine = Engine(toys.model(vocab_size=40, num_layers=1), Few(), EngineConfig(**SIZES))
  bad = engine.submit(ask([1], 5, logit_bias={30: 1e4}, stop_strings=stops))
  good = engine.submit(ask([1], 5, logit_bias={1: 1e4}, stop_strings=stops))
  while engine.step():
    pass
  with pytest.raises(RequestError, match="cannot decode"):
    engine.collect(bad, 0)
  assert engine.collect(good, 0)[0].text == "bbbbb"
  engine.audit()


class Left(Ticket):
  """A ticket whose listener another thread takes away once it was looked at."""

  @property
  def _listener(self):
    found, self.kept = self.kept, None
    return found

  @_listener.setter
  def _listener(self, value):
    self.kept = value


def test_a_listener_may_leave_while_a_delta_arrives():
  ticket, heard = Left("request", ask([1], 2)), []
  ticket.listen(lambda: heard.append(1))
  ticket.put(RequestError("over"))
  ticket.put(RequestError("over"))
  assert heard == [1]


def test_a_warm_up_begins_in_the_narrow_rows_of_the_first_requests():
  parts = batch.warm_up_parts(EngineConfig(), VOCAB, ("none", "lookup"), False)
  assert [source for source, _ in parts] == ["none", "lookup"]
  sizes = [[len(request.prompt) for request in requests] for _, requests in parts]
  assert sizes == [[1]] * 2


def test_constrained_requests_compile_nothing_after_a_warm_up():
  engine = make(slots=2, prefill_tokens=48)  # rounds of up to 2 and 3 blocks
  used = (launch.forward, launch.draw, launch.mixed, launch.decode)
  sizes = lambda: tuple(program._cache_size() for program in used)
  before, parts = sizes(), []
  engine.warm_up(constraints=True, on_part=lambda *part: parts.append(part))
  assert parts == [(n + 1, len(parts)) for n in range(len(parts))] and len(parts) > 3
  warm = sizes()
  assert all(x < y for x, y in zip(before, warm))
  drawn = {"temperature": 1.0, "logprobs": True}
  free = ask([9, 8], 3, **drawn)
  for length in (1, 40):
    other = ask([7] * length, 3, **drawn, constraint=batch.AnyText(VOCAB))
    rows = engine.run([free, other])
    assert [len(row[0].tokens) for row in rows] == [3, 3]
  assert len(engine.run([free])[0][0].tokens) == 3  # after the rows of a warm up
  assert sizes() == warm and engine.stats().generated_tokens == 15


def test_no_length_compiles_anything_after_a_warm_up_of_all_widths():
  engine = make(slots=2, prefill_tokens=48, max_tokens=192)
  used = launch.mixed, launch.decode
  sizes = lambda: tuple(program._cache_size() for program in used)
  engine.warm_up(all_widths=True)
  warm = sizes()
  for length, tokens in ((1, 20), (40, 80), (20, 170)):
    asked = [ask([length % 50 + i] * length, tokens, temperature=1.0) for i in (1, 2)]
    rows = engine.run(asked)
    assert [len(row[0].tokens) for row in rows] == [tokens] * 2
  assert sizes() == warm and engine.stats().generated_tokens == 2 * 270


@pytest.mark.parametrize(
  ("sizes", "blocks"),
  [
    ({}, [[1], [3], [9], [33]]),
    ({"max_tokens": 100}, [[1], [3], [6, 3], [6, 6, 6, 6, 6, 3]]),
    ({"max_tokens": 100, "slots": 5}, [[1], [3], [6, 3]]),
    ({"max_tokens": 2}, [[1], [1] * 3]),
  ],
)
def test_each_program_of_constrained_requests_has_a_batch(sizes, blocks):
  config = EngineConfig(**{"prefill_tokens": 1024, **sizes})
  assert config.block_counts[:3] == (2, 8, 32)
  batches = batch.constrained_requests(config, VOCAB)
  assert [[-(-len(r.prompt) // 16) for r in b] for b in batches] == blocks
  first = [int(r.prompt[0]) for b in batches for r in b]
  assert len(set(first)) == len(first)  # no prompt finds another one in the cache
