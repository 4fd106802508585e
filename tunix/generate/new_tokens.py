"""One call that adds tokens to a model and to its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import new_tokens
from tunix.models.transformer.model import Transformer


def add_tokens(
  model: Transformer, tokenizer: Any, tokens: Sequence[str]
) -> tuple[Transformer, TokenizerAdapter]:
  """Adds tokens to a tokenizer, and their embeddings to a model.

  `lora.LoraConfig(trainable_token_indices=...)` trains the new embeddings beside
  adapters: `tuple(tokenizer.added_tokens.values())` are their ids.

  Args:
    model: the model. It is unchanged, and its other weights are shared.
    tokenizer: anything that `TokenizerAdapter` wraps. It is unchanged.
    tokens: texts of the tokens. A text that is a token already stays as it is.

  Returns:
    The model, with embeddings as in `tunix.models.new_tokens.with_rows`, and the
    tokenizer.

  Raises:
    ValueError: a text is empty, all spaces or repeated, the tokenizer cannot be
      extended, or see `with_rows`.
  """
  adapter = TokenizerAdapter(tokenizer, add_tokens=tokens)
  ids = [adapter.added_tokens[x] for x in tokens if x in adapter.added_tokens]
  return new_tokens.with_rows(model, ids), adapter
