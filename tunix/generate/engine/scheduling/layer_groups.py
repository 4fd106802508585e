"""Groups of layers: layers that see the same tokens share their page numbers.

A layer with a window of w keys never reads a token again that is w positions behind. So
the pages of such a layer can be released early, and its group needs few pages. All
layers without a window are one group. All layers with the same window are one group.
"""

from __future__ import annotations

from tunix.generate.engine.config import EngineConfig
from tunix.models.transformer.config import TransformerConfig

# The window of each group, the widest first. None stands for all tokens.
Windows = tuple[int | None, ...]


def windows_of(model: TransformerConfig, config: EngineConfig) -> Windows:
  """Returns the windows of the groups of a model.

  Layers with a window that would save no page belong to the group of all tokens.

  Args:
    model: sizes of the model.
    config: sizes of the engine.
  """
  windows = {model.kinds[kind].window for kind in model.layer_kinds}
  shorter = [w for w in windows if w is not None and w < config.max_tokens]
  saving = [w for w in shorter if pages_of(config, w) < config.pages]
  rest: list[int | None] = [None] if len(saving) < len(windows) else []
  return (*rest, *sorted(saving, reverse=True))


def groups_of(model: TransformerConfig, windows: Windows) -> tuple[int, ...]:
  """Returns for each layer the narrowest group that keeps all tokens the layer sees.

  Args:
    model: sizes of the model. The windows may have been made for another model.
    windows: the windows of the groups.

  Raises:
    ValueError: no group is wide enough for a layer.
  """

  def group_of(window: int | None) -> int:
    def fits(w):
      return w is None or (window is not None and window <= w)

    fitting = [number for number, w in enumerate(windows) if fits(w)]
    if not fitting:
      raise ValueError(
        f"a layer has the window {window}, expected at most {windows[0]}: the cache "
        "keeps no more tokens. Use a model whose windows are no wider than those of "
        "the model that the cache was made for"
      )
    return fitting[-1]

  return tuple(group_of(model.kinds[kind].window) for kind in model.layer_kinds)


def pages_of(config: EngineConfig, window: int | None) -> int:
  """Returns the number of pages of a group, not counting the page for idle rows.

  A group with a window has twice the pages that the slots can hold while they decode.
  The second half is for prompts of which a launch prefills more than a window, and for
  cached prefixes. It can hold the ends of as many prefixes as there are slots.

  Args:
    config: sizes of the engine.
    window: the window of the group; None for all tokens.
  """
  if window is None:
    return config.pages
  size, tokens = config.page_tokens, config.launch_tokens(config.rounds)
  # One span of tokens: the keys that the first query of a launch sees, and then the
  # tokens that the launch draws. The span may begin anywhere in a page.
  running = config.slots * ((window + tokens - 2) // size + 2)
  others = max(running, config.prefill_tokens // size)
  return min(config.pages, running + others)
