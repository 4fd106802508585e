"""The engine on real weights: the padded sampler and dense scoring are the oracles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys, toys_text
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest, RequestError
from tunix.generate.sampler import Sampler
from tunix.models import tiny
from tunix.models.automodel import AutoModel
from tunix.models.gemma3.model import ModelConfig as Gemma3
from tunix.models.qwen3.model import ModelConfig as Qwen3
from tunix.perf import programs

VOCAB = 600
TOKENIZER = toys_text.chat_tokenizer()
SIZES = {"slots": 4, "max_tokens": 96, "prefill_tokens": 32, "max_top_logprobs": 5}


def small(seed=0, **changes):
  """A toy of one layer; FAMILIES have caches of several layers."""
  return toys.model(seed, vocab_size=VOCAB, num_layers=1, **changes)


@pytest.fixture(scope="module")
def model():
  return small()


@pytest.fixture(scope="module")
def engine(model):
  return Engine(model, TOKENIZER, EngineConfig(**SIZES))


def ask(prompt, tokens, **rules):
  rules.setdefault("stop_ids", ())
  return EngineRequest(prompt=np.asarray(prompt), max_tokens=tokens, **rules)


def load(seed=0):
  """Prompts of 1 to 60 tokens, some with a common beginning, and their lengths."""
  rng = np.random.default_rng(seed)
  common = rng.integers(1, VOCAB, 40)
  prompts = [rng.integers(1, VOCAB, n) for n in (1, 16, 17, 33, 60)]
  prompts += [np.concatenate([common, rng.integers(1, VOCAB, n)]) for n in (1, 8)]
  return prompts, [int(n) for n in rng.integers(1, 33, len(prompts))]


RULES = [
  {},
  {"temperature": 1.0},
  {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


@pytest.fixture(scope="module")
def expected(model):
  """The padded sampler's rows for `load`, two a prompt, by number of the rules."""
  sampler, (prompts, lengths) = Sampler(model, TOKENIZER), load()
  options = {"num_samples": 2, "seed": 5, "eos_tokens": [], "return_logprobs": True}
  return [sampler(prompts, lengths, **rules, **options) for rules in RULES]


SCHEDULES = {
  "plain": {},
  "one slot": {"slots": 1, "max_tokens": 93},
  "short launches, small pages, preemption": {
    "slots": 5, "rounds": 3, "page_tokens": 4, "prefill_tokens": 8, "cache_tokens": 160
  },
  "no prefixes": {"prefix_cache": False, "rounds": 7},
  "drafts": {"draft_tokens": 3, "slots": 3},
  "pages without rows": {
    "attention": "gather", "draft_tokens": 2, "page_tokens": 8, "cache_tokens": 200
  },
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_tokens_do_not_depend_on_the_schedule(model, expected, name):
  engine = Engine(model, TOKENIZER, EngineConfig(**{**SIZES, **SCHEDULES[name]}))
  engine._drafts.use_only("lookup")  # also where it is slower
  prompts, lengths = load()
  order = np.random.default_rng(len(name)).permutation(len(prompts))
  for rules, wanted in zip(RULES, expected):
    requests = [
      ask(
        prompts[i], lengths[i], num_samples=2, seed=5, first_row=2 * int(i),
        logprobs=True, **rules,
      )
      for i in order
    ]  # fmt: skip
    for i, rows in zip(order, engine.run(requests)):
      for sample, row in enumerate(rows):
        at = 2 * i + sample
        np.testing.assert_array_equal(row.tokens, wanted.tokens[at])
        np.testing.assert_allclose(row.logprobs, wanted.logprobs[at], atol=1e-5)
        np.testing.assert_allclose(
          row.sampling_logprobs, wanted.sampling_logprobs[at], atol=1e-5
        )
        assert row.text == wanted.text[at]
    engine.audit()
  if "preemption" in name:
    assert engine.stats().preemptions > 0
  if name == "drafts":
    assert engine.stats().accepted_tokens > 0


FAMILIES = {
  "window": tiny.shrink(Gemma3.gemma3_1b(), VOCAB),
  "soft caps": toys.config(
    vocab_size=VOCAB, attention_softcap=5.0, final_softcap=3.0, scale_embeddings=True
  ),
  "experts": tiny.shrink(Qwen3.qwen3_30b_a3b(), VOCAB),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attention", ["rows", "gather"])
def test_families_draw_the_tokens_of_the_padded_sampler(name, attention):
  config = dataclasses.replace(
    FAMILIES[name], dtype=jnp.float32, param_dtype=jnp.float32
  )
  model = AutoModel.from_config(config, seed=1)
  prompts, lengths = load(1)
  wanted = Sampler(model, TOKENIZER)(prompts, lengths, eos_tokens=[])
  engine = Engine(model, TOKENIZER, EngineConfig(**SIZES, attention=attention))
  rows = engine.run([ask(p, n) for p, n in zip(prompts, lengths)])
  for [row], tokens in zip(rows, wanted.tokens):
    np.testing.assert_array_equal(row.tokens, tokens)


@pytest.mark.parametrize("attention", ["rows", "gather"])
def test_sixteen_bits(attention):
  """Rounding decides between close tokens, so only the log-probs are compared."""
  model = small(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  prompts, _ = load(3)
  config = EngineConfig(**SIZES, attention=attention, draft_tokens=2)
  engine = Engine(model, TOKENIZER, config)
  engine._drafts.use_only("lookup")
  rows = engine.run([ask(prompt, 6, logprobs=True) for prompt in prompts])
  for prompt, [row] in zip(prompts, rows):
    dense = logps_of(model, np.concatenate([prompt, row.tokens]))[len(prompt) - 1 : -1]
    picked = dense[np.arange(6), row.tokens]
    np.testing.assert_allclose(row.logprobs, picked, atol=0.05)


def test_models_with_adapters_and_on_a_mesh(model):
  prompts, lengths = load(2)
  adapted = small(lora_rank=2)
  from tunix.utils import mesh as mesh_lib

  mesh = mesh_lib.create_mesh({"fsdp": 4, "tp": 2})
  with mesh_lib.use_mesh(mesh):
    spread = AutoModel.from_config(model.config, seed=0, mesh=mesh)
  for one, alone in ((adapted, adapted), (spread, model)):
    wanted = Sampler(alone, TOKENIZER)(prompts, lengths, eos_tokens=[])
    rows = Engine(one, TOKENIZER, EngineConfig(**SIZES)).run(
      [ask(p, n) for p, n in zip(prompts, lengths)]
    )
    for [row], tokens in zip(rows, wanted.tokens):
      np.testing.assert_array_equal(row.tokens, tokens)


def logps_of(model, tokens):
  """Dense log-probs [T, V] after each token of a row."""
  logits = toys.logits(model, np.asarray(tokens)[None])
  return np.asarray(jax.nn.log_softmax(logits[0].astype(jnp.float32)))


def test_likely_tokens_and_scores_of_prompts(model, engine):
  prompt = np.arange(3, 43)
  ticket = engine.submit(ask(prompt, 4, top_logprobs=3, prompt_logprobs=True))
  while engine.step():
    pass
  [row] = engine.collect(ticket, 0)
  dense = logps_of(model, np.concatenate([prompt, row.tokens]))
  best = np.argsort(-dense, axis=1)[:, :3]
  scores = ticket.prompt_scores
  np.testing.assert_array_equal(row.top.ids, best[39:43])
  np.testing.assert_array_equal(scores.top.ids, best[:39])
  np.testing.assert_allclose(
    scores.logprobs, dense[np.arange(39), prompt[1:]], atol=1e-5
  )
  np.testing.assert_allclose(
    scores.top.logprobs, np.take_along_axis(dense[:39], best[:39], 1), atol=1e-5
  )


def test_biases_forbid_and_force(engine):
  [[free]] = engine.run([ask([5, 6, 7], 6)])
  banned = {int(token): -np.inf for token in set(free.tokens)}
  requests = [ask([5, 6, 7], 6, logit_bias=bias) for bias in (banned, {11: 1e3}, {})]
  [[other]], [[forced]], [[same]] = ([x] for x in engine.run(requests))
  assert not set(other.tokens) & set(free.tokens)
  assert list(forced.tokens) == [11] * 6
  np.testing.assert_array_equal(same.tokens, free.tokens)


def test_ends(engine):
  [[free]] = engine.run([ask([9, 8], 12)])
  third = int(free.tokens[2])
  text = TOKENIZER.decode(free.tokens)
  [[stopped], [cut]] = engine.run(
    [
      ask([9, 8], 12, stop_ids=(third,)),
      ask([9, 8], 12, stop_strings=(text[4:6],)),
    ]
  )
  first = list(free.tokens).index(third) + 1
  assert stopped.finish_reason == "eos"
  np.testing.assert_array_equal(stopped.tokens, free.tokens[:first])
  assert cut.finish_reason == "stop" and cut.text == text[: text.index(text[4:6])]


def test_a_stream_joins_to_the_whole_text(engine):
  ticket = engine.submit(ask(np.arange(30, 50), 40, temperature=1.0, seed=3))
  parts = []
  while engine.step():
    pass
  while not parts or parts[-1].finish_reason is None:
    parts.append(ticket.get(0))
  assert len(parts) > 2
  tokens = np.concatenate([part.tokens for part in parts])
  assert "".join(part.text for part in parts) == TOKENIZER.decode(tokens)


def test_a_group_is_prefilled_once_and_a_turn_only_what_is_new(model):
  engine = Engine(model, TOKENIZER, EngineConfig(**{**SIZES, "slots": 8}))
  prompt = np.arange(100, 148)
  engine.run([ask(prompt, 5, num_samples=8, temperature=1.0, seed=1)])
  assert engine.stats().prefilled_tokens == 48
  [[row]] = engine.run([ask(prompt, 17, temperature=1.0, seed=2)])
  before = engine.stats().prefilled_tokens  # the last page again: its logits
  assert before == 48 + 16
  turn = np.concatenate([prompt, row.tokens, [7, 8, 9]])
  engine.run([ask(turn, 2)])
  # 48 + 16 computed tokens are in full pages; the 17th token was drawn and never run.
  assert engine.stats().prefilled_tokens == before + len(turn) - 64


def test_new_weights_are_used_and_stamped(model):
  engine = Engine(small(), TOKENIZER, EngineConfig(**SIZES))
  other = small(1)
  prompt = np.arange(1, 40)
  [[old]] = engine.run([ask(prompt, 5)])
  engine.update_weights(other, version=7)
  [[new]] = engine.run([ask(prompt, 5)])
  [[wanted]] = Engine(other, TOKENIZER, EngineConfig(**SIZES)).run([ask(prompt, 5)])
  assert list(old.versions) == [0] * 5 and list(new.versions) == [7] * 5
  np.testing.assert_array_equal(new.tokens, wanted.tokens)
  assert not np.array_equal(old.tokens, new.tokens)
  engine.sleep()
  [[again]] = engine.run([ask(prompt, 5)])
  np.testing.assert_array_equal(again.tokens, new.tokens)


@pytest.mark.parametrize("mode", ["keep", "recompute", "drain"])
def test_running_completions_at_new_weights(mode):
  first, other = small(0), small(1)
  engine = Engine(first, TOKENIZER, EngineConfig(**SIZES))
  ticket = engine.submit(ask(np.arange(1, 40), 40))
  engine.step()
  engine.update_weights(other, mode=mode)
  while engine.step():
    pass
  [row] = engine.collect(ticket, 0)
  assert len(row.tokens) == 40 and row.finish_reason == "length"
  changes = np.flatnonzero(np.diff(row.versions))
  assert len(changes) == (0 if mode == "drain" else 1)
  if mode == "recompute":  # what follows is what the new weights draw after it
    start = np.concatenate([np.arange(1, 40), row.tokens[: changes[0] + 1]])
    rest = row.tokens[changes[0] + 1 :]
    wanted = Sampler(other, TOKENIZER)([start], len(rest), eos_tokens=[])
    np.testing.assert_array_equal(rest, wanted.tokens[0])


def test_a_nan_names_the_request_and_spares_the_others():
  """Token 13 has an embedding that is not a number."""
  broken = small(tie_embeddings=False)
  table = broken.embed_tokens.embedding
  table.set_value(table[...].at[13].set(jnp.nan))
  engine = Engine(broken, TOKENIZER, EngineConfig(**SIZES))
  bad = engine.submit(ask([1, 2, 13], 5, id="chat 4"))
  good = engine.submit(ask([1, 2, 3], 5, logit_bias={13: -np.inf}))
  while engine.step():
    pass
  with pytest.raises(RequestError, match=r"chat 4: the logits after token 2 "):
    bad.get(0)
  assert len(engine.collect(good, 0)[0].tokens) == 5
  engine.audit()


class Broken:
  """A constraint whose matcher fails at the third token."""

  def __init__(self, where, error):
    self.where, self.error, self.tokens = where, error, 0

  def matcher(self):
    return Broken(self.where, self.error)

  def mask(self):
    return self._checked("mask", np.full(-(-VOCAB // 32), 2**32 - 1, np.uint32))

  def accept(self, token):
    self.tokens += 1
    self._checked("accept", None)

  def _checked(self, where, answer):
    if where == self.where and self.tokens == 3:
      raise self.error
    return answer


@pytest.mark.parametrize("where", ["mask", "accept"])
@pytest.mark.parametrize("kind", [RequestError, ZeroDivisionError])
def test_a_constraint_that_fails_ends_its_request_only(engine, where, kind):
  broken = Broken(where, kind("no token may follow"))
  bad = engine.submit(ask([1, 2, 3], 9, constraint=broken))
  good = engine.submit(ask([1, 2, 3], 9))
  while engine.step():
    pass
  named = "" if kind is RequestError else f"Broken.{where} of the constraint raised .*"
  with pytest.raises(RequestError, match=f"{named}no token may follow"):
    engine.collect(bad, 0)
  assert len(engine.collect(good, 0)[0].tokens) == 9
  engine.audit()


class BrokenOnce(Broken):
  """A constraint of whose matchers the second fails."""

  made = 0

  def matcher(self):
    self.made += 1
    return Broken("accept" if self.made == 2 else None, ZeroDivisionError("none"))


def test_a_matcher_that_fails_ends_all_completions_of_its_request(engine):
  request = ask([1, 2, 3], 9, constraint=BrokenOnce(None, None), num_samples=2)
  ticket = engine.submit(request)
  while engine.step():
    pass
  with pytest.raises(RequestError, match="ZeroDivisionError: none"):
    list(ticket.arrived())
  *_, last = ticket.arrived()
  assert last.finish_reason == "cancelled"
  engine.audit()


class Recording:
  """A constraint that notes its calls and allows even tokens only."""

  def __init__(self, events):
    self.events = events

  def matcher(self):
    return self

  def mask(self):
    self.events.append("mask")
    return np.full(-(-VOCAB // 32), 0x55555555, np.uint32)

  def accept(self, token):
    self.events.append("accept")


def test_masks_are_computed_between_the_forward_pass_and_the_draw(engine):
  events = []
  drawn = {"temperature": 1.0, "seed": 4, "logprobs": True}
  ticket = engine.submit(ask(np.arange(40), 3, constraint=Recording(events), **drawn))
  events.clear()  # the mask that checks the constraint

  def note(name, jitted, args):
    events.append(name.removeprefix("engine "))
    return jitted(*args)

  with programs.intercepted(note):
    while engine.step():
      pass
  kept = ("forward", "mask", "draw", "accept", "mixed", "decode")
  seen = [event for event in events if event in kept]
  # A prompt of 40 tokens takes two rounds, the first of which draws nothing.
  assert seen == ["forward", "mask", "draw"] * 2 + ["accept"] + 2 * [
    "forward", "mask", "draw", "accept"
  ]  # fmt: skip
  [row] = engine.collect(ticket, 0)
  # The same tokens, by biases: launches of many rounds, in one program each.
  odd = dict.fromkeys(range(1, VOCAB, 2), -np.inf)
  [[same]] = engine.run([ask(np.arange(40), 3, logit_bias=odd, **drawn)])
  np.testing.assert_array_equal(row.tokens, same.tokens)
  np.testing.assert_allclose(row.sampling_logprobs, same.sampling_logprobs, atol=1e-5)


def test_what_can_never_run_is_refused_at_once(engine, model):
  refused = [
    (ask(np.arange(1, 90), 20), "need 109 tokens, and the engine has 96"),
    (ask([VOCAB], 2), f"token id {VOCAB}"),
    (ask([1], 2, top_logprobs=6), "top_logprobs is 6, expected at most 5"),
    (ask([1], 2, adapter="mine"), "adapter 'mine' is not loaded"),
    (ask([1], 2, stop_ids=range(1, 40)), "stop_ids is 39, expected at most 16"),
  ]
  for request, message in refused:
    with pytest.raises(ValueError, match=message):
      engine.submit(request)
  with pytest.raises(ValueError, match="at least one token id"):
    ask([], 3)
  with pytest.raises(TypeError, match="expected a tunix Transformer"):
    Engine(toys.TokensOnly(nnx.Rngs(0)), TOKENIZER)
  assert not engine.is_busy


def test_drafts_leave_the_distribution_unchanged():
  """Pairs of tokens over a vocabulary of 8: chi-square against enumeration."""
  small = toys.model(vocab_size=8)
  prompt, count = np.array([1, 2, 3, 1, 2, 3, 1, 2, 3, 1]), 3000
  config = EngineConfig(slots=64, max_tokens=64, prefill_tokens=32, draft_tokens=2)
  engine = Engine(small, TOKENIZER, config)
  engine._drafts.use_only("lookup")  # also where it is slower
  [rows] = engine.run(
    [ask(prompt, 3, num_samples=count, temperature=1.0, seed=9)]
  )  # fmt: skip
  first = np.exp(logps_of(small, prompt)[-1])
  second = np.stack(
    [np.exp(logps_of(small, [*prompt, token])[-1]) for token in range(8)]
  )
  wanted = count * (first[:, None] * second).reshape(-1)
  seen = np.bincount([8 * r.tokens[0] + r.tokens[1] for r in rows], minlength=64)
  chi = np.sum((seen - wanted) ** 2 / wanted)
  assert chi < 63 + 4 * np.sqrt(2 * 63)  # four standard deviations
  stats = engine.stats()
  assert 0 < stats.accepted_tokens < stats.draft_tokens


def test_many_requests_leave_nothing_behind(engine):
  for _ in range(5):
    engine.run([ask([1 + n % 7, 2, 3], 1 + n % 4) for n in range(60)])
  stats = engine.stats()
  assert (stats.waiting, stats.running) == (0, 0)
  assert stats.pages_free == stats.pages_total
  assert not len(engine._requests) and not engine._requests.has_news
