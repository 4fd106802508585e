"""Sizes of an engine."""

from __future__ import annotations

import dataclasses

from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """The sizes that an engine's programs and its cache are made for.

  Attributes:
    slots: number of completions that run at the same time.
    max_tokens: largest number of tokens of a prompt and its completion together.
    page_tokens: tokens of a page of the cache. Prompts share whole pages.
    cache_tokens: tokens that all pages hold together, at least `max_tokens`; None:
      slots * max_tokens, with which no completion ever waits for a page. Pages that no
      running completion uses keep earlier prefixes. Layers with a window have fewer
      pages where fewer suffice, see docs/guides/engine.md.
    rounds: largest number of tokens of a completion between two looks of the host. A
      stream gets its text in parts of this size, and a finished completion keeps its
      slot for at most this number of rounds.
    prefill_tokens: most prompt tokens of a round, which also decodes. A multiple of
      `page_tokens`.
    draft_tokens: number of tokens that prompt lookup, or the draft model of the engine,
      proposes for each completion in a round; 0: no drafts. Drafts never change the
      tokens. They are used while they are accepted often enough to be faster.
    prefix_cache: keep pages of earlier requests for requests with the same prefix.
    adapter_ranks: sum of the ranks of all adapters that can be loaded; 0: none.
    max_top_logprobs: largest `top_logprobs` of a request.
    attention: "auto"; "rows", which every device runs; or a name in `paged.PATHS`,
      attention that reads pages. See docs/guides/engine.md.
    record_routes: record the experts of each token, and return them with the last delta
      of a completion; the model must be a mixture of experts. The host keeps the
      records of running completions and of all pages of the cache.
    record_head: record this number of the most likely tokens of the distribution that
      each token is drawn from, with their probabilities; 0: none. Requests with
      `logprobs` get them.

  Raises:
    ValueError: a number is out of range, or two contradict each other.
  """

  slots: int = 8
  max_tokens: int = 2048
  page_tokens: int = 16
  cache_tokens: int | None = None
  rounds: int = 16
  prefill_tokens: int = 512
  draft_tokens: int = 0
  prefix_cache: bool = True
  adapter_ranks: int = 0
  max_top_logprobs: int = 20
  attention: str = "auto"
  record_routes: bool = False
  record_head: int = 0

  def __post_init__(self):
    checks.fields(
      self,
      slots=checks.COUNT,
      max_tokens=checks.Range(2),
      page_tokens=checks.COUNT,
      cache_tokens=checks.COUNT,
      rounds=checks.COUNT,
      prefill_tokens=checks.COUNT,
      draft_tokens=checks.NOT_NEGATIVE,
      adapter_ranks=checks.NOT_NEGATIVE,
      max_top_logprobs=checks.NOT_NEGATIVE,
      record_head=checks.NOT_NEGATIVE,
    )
    if self.prefill_tokens % self.page_tokens:
      raise ValueError(
        f"prefill_tokens is {self.prefill_tokens}, expected a multiple of page_tokens, "
        f"{self.page_tokens}: a round prefills whole pages"
      )
    if self.pages * self.page_tokens < self.max_tokens:
      raise ValueError(
        f"cache_tokens is {self.cache_tokens} and max_tokens {self.max_tokens}: the "
        "pages must hold at least one completion. Raise cache_tokens, or lower "
        "max_tokens"
      )

  @property
  def block_counts(self) -> tuple[int, ...]:
    """Numbers of one-page blocks that a prefill round can have; each is a program.

    They are 2, 8, 32, ... up to that of `prefill_tokens`.
    """
    most = self.prefill_tokens // self.page_tokens
    return tuple(sorted({most, *(2 * 4**i for i in range(16) if 2 * 4**i < most)}))

  def launch_tokens(self, rounds: int) -> int:
    """Returns the most tokens of a completion that `rounds` rounds draw or draft."""
    return rounds * (1 + self.draft_tokens)

  @property
  def pages(self) -> int:
    """Number of pages, without the page that takes writes of idle rows."""
    tokens = self.cache_tokens
    # A completion that does not end on a page boundary fills its last page in part.
    full = self.slots * self.pages_of(self.max_tokens) * self.page_tokens
    return self.pages_of(full if tokens is None else tokens)

  def pages_of(self, tokens: int) -> int:
    """Returns the number of pages that hold `tokens` tokens."""
    return -(-tokens // self.page_tokens)
