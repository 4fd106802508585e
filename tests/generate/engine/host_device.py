"""A device without arrays: checks what it is told, and draws tokens by a hash.

It keeps what the device would keep, with prefixes in place of keys and values, so that
a wrong page, a page that is written too late or a prefix of other weights is seen. Each
group of layers has its own pages and rows; a group with a window is only asked for what
its queries see.
"""

import hashlib

import numpy as np

from tests import toys
from tunix.generate.engine import engine as engine_lib
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.device.state import LaunchOutput, PromptOut
from tunix.generate.engine.device.token_sampling import DrawnTokens
from tunix.generate.engine.scheduling import layer_groups
from tunix.generate.tokenizer_adapter import TokenizerAdapter

VOCAB = toys.VOCAB
END = 0


class Letters:
  """Two letters a token, so that a text of two letters can lie in two tokens."""

  bos_id, eos_id, pad_id = None, END, None

  def encode(self, text):
    raise NotImplementedError

  def decode(self, ids):
    return "".join("abcd"[i % 4] + "abcd"[i // 4 % 4] for i in ids)


decode = TokenizerAdapter(Letters()).decode  # without the end token


def next_token(prefix, key, row, allowed=None):
  """The token after a prefix; one of twenty is the end."""
  data = np.asarray(prefix, np.int32).tobytes() + key.tobytes() + bytes([row])
  number = int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")
  token = END if number % 20 == 0 else 1 + number % (VOCAB - 1)
  if allowed is not None:
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[:VOCAB]
    while not bits[token]:
      token = (token + 1) % VOCAB
  return token


class HostDevice:
  """Stands in for `device.Device`.

  Attributes:
    most_held: most pages that a decoding completion held, of each group of layers.
  """

  def __init__(self, model, config, gather_weights, draft_model=None):
    del gather_weights, draft_model
    self.config, self.version = config, 0
    self.windows = layer_groups.windows_of(model.config, config)
    self.rng = np.random.default_rng(0)
    self.fails = False
    self.seen_rounds, self.wanted = 0, 2**30
    self.most_held = [0] * len(self.windows)
    self.release()

  def close(self):
    self.release()

  def set_model(self, model):
    del model
    self.version += 1

  def release(self):
    c = self.config
    sizes = [1 + layer_groups.pages_of(c, window) for window in self.windows]
    self.pages = [[[None] * c.page_tokens for _ in range(size)] for size in sizes]
    width = c.max_tokens + c.page_tokens
    self.rows = [[[None] * width for _ in range(c.slots)] for _ in sizes]

  def look_at(self, idle):
    self.wanted = idle

  width = 0

  def launch(self, plan, running, masks, source="none"):
    if self.fails:
      raise RuntimeError("the device is gone")
    c = self.config
    rounds = len(plan.rounds) + plan.decode_rounds
    assert 0 < rounds <= c.rounds and not (plan.forks and plan.decode_rounds)
    self.load(plan)
    allowed = None if masks is None else masks()
    for s in filter(None, running):
      assert running[s.slot] is s
      self.check_pages(s)
      self.check_row(s, s.computed)
    width = c.rounds * (1 + c.draft_tokens)
    out = self.out(width)
    scored = []
    tokens = {s: list(s.known) for s in running if s}
    active = {s for s in running if s and s.is_decoding}
    for blocks in plan.rounds:
      assert 0 < sum(b.count for b in blocks) <= c.prefill_tokens
      assert len(blocks) <= c.prefill_tokens // c.page_tokens
      drawing = dict.fromkeys(active)
      for block in blocks:
        drawing |= dict.fromkeys(self.prefill(block, plan, tokens))
      for s in drawing:
        self.draw(s, tokens, out, active, allowed)
      active -= {fork.follower for fork in plan.forks}
      out.rounds[...] += 1
    if any(b.sequence.request.prompt_logprobs for r in plan.rounds for b in r):
      scored.append((plan.rounds, self.scores(plan.rounds)))
    for _ in range(plan.decode_rounds):
      if not active or sum(s not in active for s in running) >= self.wanted:
        break
      for s in list(active):
        most = 1 + (c.draft_tokens if allowed is None else 0)
        for _ in range(self.rng.integers(1, most + 1)):
          if s in active:
            self.draw(s, tokens, out, active, allowed)
      out.rounds[...] += 1
    return out, scored

  def out(self, width):
    c = self.config
    ints = lambda *shape: np.zeros(shape, np.int32)
    return LaunchOutput(
      count=ints(c.slots),
      chosen=DrawnTokens(
        ids=ints(c.slots, width),
        logps=np.zeros((c.slots, width), np.float32),
        sampling_logps=np.zeros((c.slots, width), np.float32),
        top_ids=ints(c.slots, width, 2),
        top_logps=np.zeros((c.slots, width, 2), np.float32),
      ),
      stopped=np.zeros(c.slots, bool),
      is_not_finite=np.zeros(c.slots, bool),
      rounds=ints(),
      **{
        x: ints()
        for x in ("turns", "decoded", "proposed", "accepted", "watched", "predicted")
      },
    )

  def load(self, plan):
    for copies in plan.copies:
      for pages, (source, target) in zip(self.pages, copies, strict=True):
        pages[target] = list(pages[source])
    for s in plan.loads:
      for pages, rows, held in zip(self.pages, self.rows, s.pages, strict=True):
        row = [x for page in held for x in pages[page]][: s.computed]
        rows[s.slot][: len(row)] = row

  def entry(self, tokens):
    return self.version, np.asarray(tokens, np.int32).tobytes()

  def check_pages(self, s):
    """No page is held twice, and no more of them than a window and a launch need."""
    c = self.config
    for group, (window, pages) in enumerate(zip(self.windows, s.pages)):
      held = list(filter(None, pages))
      assert len(held) == len(set(held))
      if s.is_decoding:
        self.most_held[group] = max(len(held), self.most_held[group])
        if window is not None:
          tokens = window + c.launch_tokens(c.rounds)
          assert len(held) <= (tokens - 2) // c.page_tokens + 2

  def check_row(self, s, count, known=None):
    """The query after `count` tokens finds those that it sees, in rows and pages."""
    size, known = self.config.page_tokens, s.known if known is None else known
    for rows, window, held in zip(self.rows, self.windows, s.pages):
      for place in range(first_seen(count, window), count):
        found = rows[s.slot][place]
        assert found == self.entry(known[: place + 1]), (s.ticket.id, s.slot, place)
        assert held[place // size], (s.ticket.id, s.slot, place, window)

  def put(self, s, place, known):
    """Writes a token, which has a place in the pages, too."""
    for rows, held in zip(self.rows, s.pages, strict=True):
      assert held[place // self.config.page_tokens]
      rows[s.slot][place] = self.entry(known[: place + 1])

  def prefill(self, block, plan, tokens):
    s = block.sequence
    assert s.slot is not None and s.leader is None
    assert block.start % self.config.page_tokens == 0
    assert 0 < block.count <= self.config.page_tokens
    self.check_row(s, block.start)
    for place in range(block.start, block.start + block.count):
      self.put(s, place, s.known)
    if not block.is_last:
      return []
    return [s, *(fork.follower for fork in plan.forks if fork.leader is s)]

  def draw(self, s, tokens, out, active, allowed):
    known, count = tokens[s], int(out.count[s.slot])
    if s.leader is None:
      self.check_row(s, len(known) - 1, known)
      self.put(s, len(known) - 1, known)
    mask = None if allowed is None else allowed[s.slot]
    token = next_token(known, s.key, s.request.first_row + s.sample, mask)
    known.append(token)
    out.chosen.ids[s.slot, count] = token
    out.chosen.logps[s.slot, count] = -len(known)
    out.count[s.slot] += 1
    out.stopped[s.slot] |= token in s.stop_ids
    assert len(known) <= s.limit
    active.add(s)
    if token in s.stop_ids or len(known) == s.limit:
      active.discard(s)

  def scores(self, rounds):
    """The score of a token is minus its position."""
    c = self.config
    shape = (c.rounds, c.prefill_tokens)
    logps = np.zeros(shape, np.float32)
    for number, blocks in enumerate(rounds):
      for n, block in enumerate(blocks):
        for i in range(block.count):
          logps[number, n * c.page_tokens + i] = -(block.start + i + 1)
    return PromptOut(logps, np.zeros((*shape, 2)), np.zeros((*shape, 2)))

  def write(self, written):
    size = self.config.page_tokens
    for slot, place, *numbers in written:
      for pages, rows, page in zip(self.pages, self.rows, numbers, strict=True):
        assert page != 0
        pages[page] = rows[slot][place * size : (place + 1) * size]


def first_seen(position, window):
  """The first token that a query at a position sees."""
  return 0 if window is None else max(0, position - window + 1)


class HostEngine(engine_lib.Engine):
  """An engine whose launches cost nothing, and that checks itself after each."""

  def __init__(self, model, monkeypatch, **sizes):
    monkeypatch.setattr(engine_lib, "Device", HostDevice)
    defaults = {
      "slots": 3, "max_tokens": 48, "page_tokens": 4, "rounds": 4, "prefill_tokens": 8,
      "max_top_logprobs": 2,
    }  # fmt: skip
    super().__init__(model, Letters(), EngineConfig(**{**defaults, **sizes}))

  def step(self):
    went = super().step()
    self.check()
    return went

  def check(self):
    """Every page is counted, and holds the tokens of the rows that hold it."""
    self.audit()
    device, size = self._device, self.config.page_tokens
    for s in self._scheduler.active():
      most = s.computed // size * size  # the rest is in the row only
      for window, stored, numbers in zip(device.windows, device.pages, s.pages):
        held = [x for page in numbers for x in stored[page]]
        for place in range(first_seen(s.computed, window), most):
          assert held[place] == device.entry(s.known[: place + 1]), (s.ticket.id, place)


def expected(request, sample):
  """Tokens and reason of a completion, drawn one after the other."""
  key, tokens = engine_key(request.seed), []
  matcher = request.constraint and request.constraint.matcher()
  while True:
    mask = matcher.mask() if matcher else None
    prefix = [*request.prompt, *tokens]
    tokens.append(next_token(prefix, key, request.first_row + sample, mask))
    if tokens[-1] in request.stop_ids:
      return tokens, "eos"
    if matcher:
      matcher.accept(tokens[-1])
    text = decode(tokens)
    if any(stop in text for stop in request.stop_strings):
      return tokens, "stop"
    if len(tokens) == request.max_tokens:
      return tokens, "length"


def expected_text(request, tokens, reason):
  """The text before the end token or the first stop string."""
  text = decode(tokens[: len(tokens) - (reason == "eos")])
  places = [text.find(stop) for stop in request.stop_strings if stop in text]
  return text[: min(places)] if places else text


def engine_key(seed):
  import jax

  return np.asarray(jax.random.key_data(jax.random.key(seed)))
