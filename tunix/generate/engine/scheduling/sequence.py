"""The host's record of a completion while the engine works on it."""

from __future__ import annotations

import dataclasses

import numpy as np

from tunix.generate.engine.request import EngineRequest, Matcher, RequestError, Ticket
from tunix.generate.engine.scheduling import pages as pages_lib
from tunix.generate.engine.scheduling.image_places import ImagePlaces
from tunix.generate.engine.scheduling.text import TextReader


@dataclasses.dataclass(eq=False)
class Sequence:
  """One completion.

  Attributes:
    ticket: the request it belongs to.
    sample: number of the completion in its request.
    order: number of the completion in the order of submission to the engine. Among
      equal priorities, lower numbers are admitted first.
    tokens: int32 buffer, prompt and drawn tokens; `length` of them are valid.
    length: number of tokens so far.
    computed: number of tokens whose keys and values are in `pages`.
    drafted: number of computed tokens that also have keys of the draft model.
    limit: number of tokens at which it ends.
    slot: the slot it runs in; None while it waits.
    pages: pages of its tokens, in order, for each group of layers; see page_groups.py.
    digests: root digest and those of its full pages, see pages.py.
    leader: a completion of the same request whose prefill this one shares; None if it
      waits for none.
    key: data of the random key of the request, uint32 [2].
    stop_ids: ids that end it.
    filters: filters that can exclude a token, by name.
    uses: flags of `token_sampling.Rules` that it needs.
    adapter: number of its adapter, see `AdapterBank.index`; 0: none.
    matcher: state of its constraint, or None.
    scores: log-probs of the prompt's tokens so far, if the request needs them.
    routes: experts of its tokens [limit, M, k], see experts/route_records.py; None if
      they are not recorded.
    routed: number of tokens, counted from the first, whose experts are in `routes`.
    images: places of the prompt's images, or None.
    reader: turns its tokens into text, see text.py.
    is_started: it was admitted at least once.
    failure: error that ends it after the launch; None if there is none.
    finish_reason: why it ended; None until it ends.
  """

  ticket: Ticket
  sample: int
  order: int
  tokens: np.ndarray
  length: int
  limit: int
  key: np.ndarray
  stop_ids: tuple[int, ...]
  filters: dict[str, float | int]
  uses: frozenset[str]
  reader: TextReader
  adapter: int = 0
  matcher: Matcher | None = None
  images: ImagePlaces | None = None
  computed: int = 0
  drafted: int = 0
  slot: int | None = None
  pages: list[list[int]] = dataclasses.field(default_factory=list)
  digests: list[bytes] = dataclasses.field(default_factory=list)
  leader: Sequence | None = None
  scores: list[list[np.ndarray]] = dataclasses.field(default_factory=list)
  routes: np.ndarray | None = None
  routed: int = 0
  is_started: bool = False
  failure: RequestError | None = None
  finish_reason: str | None = None

  @property
  def request(self) -> EngineRequest:
    return self.ticket.request

  @property
  def drawn(self) -> int:
    """Number of drawn tokens."""
    return self.length - len(self.request.prompt)

  @property
  def is_decoding(self) -> bool:
    """True if all tokens but the last are computed and at least one was drawn."""
    return self.drawn > 0 and self.computed == self.length - 1

  @property
  def needs_scores(self) -> bool:
    """True if the request needs log-probs of its prompt and has none yet.

    The whole prompt must then be run, without pages of the prefix cache.
    """
    return self.request.prompt_logprobs and self.ticket.prompt_scores is None

  @property
  def known(self) -> np.ndarray:
    """int32 [length], prompt and drawn tokens."""
    return self.tokens[: self.length]

  def name_pages(self, tokens: int, page_tokens: int) -> None:
    """Extends `digests` to the full pages of the first `tokens` tokens."""
    marks = () if self.images is None else (self.images.digests_in,)
    pages_lib.extended(self.digests, self.known[:tokens], page_tokens, *marks)

  @property
  def rank(self) -> tuple[int, int]:
    """Order of admission: priority, then age."""
    return self.request.priority, self.order

  def pages_at(self, place: int) -> tuple[int, ...]:
    """Returns the page of each group of layers at a place."""
    return tuple(pages[place] for pages in self.pages)

  def record(self, start: int, routes: np.ndarray) -> None:
    """Records the experts of consecutive tokens.

    A preempted completion runs its tokens again. A token keeps the experts of its first
    run, because the log-probs of drawn tokens come from that run.

    Args:
      start: position of the first token, at most `routed`.
      routes: [n, M, k].
    """
    assert self.routes is not None and start <= self.routed
    end = start + len(routes)
    if end > self.routed:
      self.routes[self.routed : end] = routes[self.routed - start :]
      self.routed = end

  def hit(self, tokens: int) -> int:
    """Records and returns the number of prompt tokens that need no prefill."""
    if self.sample == 0:
      self.ticket.cached_tokens = tokens
    return tokens
