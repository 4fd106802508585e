"""A tool that searches a local corpus with BM25.

Paper: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond",
2009. The package `bm25s` (extra `envs`) computes the scores.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix.utils import checks, optional

Document = str | Mapping[str, Any]


class SearchTool:
  """Finds the documents of a corpus that match a query best.

  Equal scores keep the order of the corpus, so a query has one answer.
  """

  def __init__(
    self,
    corpus: Sequence[Document] | str | os.PathLike[str],
    *,
    top_k: int = 3,
    max_document_chars: int = 2000,
  ):
    """Builds the index in memory.

    Args:
      corpus: documents, or the path of a file with one JSON document in each line. A
        document is text, or an object with "text" and, if it has one, "title".
      top_k: number of documents in an answer.
      max_document_chars: characters of the begin of a document in an answer.

    Raises:
      ImportError: the package bm25s is missing.
      ValueError: the corpus is empty, a document has no text, or a number is wrong.
    """
    checks.number("top_k", top_k, checks.COUNT, whole=True)
    checks.number("max_document_chars", max_document_chars, checks.COUNT, whole=True)
    if isinstance(corpus, (str, os.PathLike)):
      corpus = _read(pathlib.Path(corpus))
    if not corpus:
      raise ValueError("the corpus is empty; expected at least one document")
    self._documents = [_parts(x, f"document {i}") for i, x in enumerate(corpus)]
    self._top_k, self._max_chars = top_k, max_document_chars
    self._library = optional.require("bm25s", "SearchTool", "tunix[envs]")
    self._index = self._library.BM25(backend="numpy")
    texts = [f"{title}\n{text}" for title, text in self._documents]
    self._index.index(self._words(texts), show_progress=False)

  def search(self, query: str) -> str:
    """Searches a collection of documents and returns the best matches.

    Args:
      query: The words to search for.

    Returns:
      The titles and texts of the documents.
    """
    shown = []
    for rank, index in enumerate(self._best(query), start=1):
      title, text = self._documents[index]
      head = f"[{rank}] {title}\n" if title else f"[{rank}] "
      shown.append(head + text[: self._max_chars])
    return "\n\n".join(shown) or "No document matches the query."

  def _best(self, query: str) -> list[int]:
    """Returns the indices of the documents that match, best first."""
    words = self._words([query])[0]
    if not words:
      return []
    scores = self._index.get_scores(words)
    best = np.argsort(-scores, kind="stable")[: self._top_k]
    return [int(i) for i in best if scores[i] > 0]

  def _words(self, texts: list[str]) -> list[list[str]]:
    return self._library.tokenize(
      texts, stopwords="en", return_ids=False, show_progress=False
    )


def _read(path: pathlib.Path) -> list[Any]:
  """Returns the documents of a file of JSON lines.

  Raises:
    ValueError: a line is no JSON in UTF-8.
  """
  documents = []
  with path.open("rb") as file:
    for number, line in enumerate(file, start=1):
      if not line.strip():
        continue
      try:
        documents.append(json.loads(line.decode("utf-8-sig")))
      except ValueError as error:
        raise ValueError(
          f"line {number} of {path} is no JSON ({error}); expected one document a line"
        ) from error
  return documents


def _parts(document: Document, what: str) -> tuple[str, str]:
  """Returns the title, which may be empty, and the text of a document.

  Raises:
    ValueError: the document has no text.
  """
  if isinstance(document, str):
    return "", document
  text = document.get("text") if isinstance(document, Mapping) else None
  if not isinstance(text, str):
    raise ValueError(
      f"{what} is {str(document)[:200]!r}; expected text, or an object with 'text'"
    )
  return str(document.get("title") or ""), text
