import json
import math
import sys

import pytest

from tunix.rl.env.tools.search_tool import SearchTool
from tunix.rl.env.tools.tool import as_tools, call

CORPUS = [
  "The cat sat on the mat.",
  {"title": "Dogs", "text": "Dogs bark. Dogs run."},
  {"text": "A cat and a dog.", "title": ""},
]


def test_the_best_documents_come_first():
  pytest.importorskip("bm25s")
  tool = SearchTool(CORPUS, top_k=2)
  assert tool.search("dogs") == "[1] Dogs\nDogs bark. Dogs run."
  assert tool.search("cat") == "[1] A cat and a dog.\n\n[2] The cat sat on the mat."
  assert tool.search("CAT, mat!").startswith("[1] The cat sat on the mat.")
  for query in ("", "the", "zebra", "?"):
    assert tool.search(query) == "No document matches the query."


def test_scores_are_those_of_the_formula():
  pytest.importorskip("bm25s")
  tool = SearchTool(["apple pear", "apple apple plum fig", "plum"])
  # idf = ln(1 + (N - n + 0.5) / (n + 0.5)) with N = 3 documents, n = 2 of them with the
  # word; tf / (tf + k1 (1 - b + b length / mean length)), k1 = 1.5, b = 0.75. The mean
  # length is 7/3.
  idf = math.log(1 + 1.5 / 2.5)
  first = idf * 1 / (1 + 1.5 * (0.25 + 0.75 * 2 / (7 / 3)))
  second = idf * 2 / (2 + 1.5 * (0.25 + 0.75 * 4 / (7 / 3)))
  scores = tool._index.get_scores(["apple"])
  assert scores.tolist() == pytest.approx([first, second, 0], rel=1e-5)


def test_equal_scores_keep_the_order_of_the_corpus():
  pytest.importorskip("bm25s")
  tool = SearchTool([f"apple {i:02}" for i in range(50)], top_k=50)
  shown = tool.search("apple").split("\n\n")
  assert shown == [f"[{i + 1}] apple {i:02}" for i in range(50)]


def test_a_file_of_json_lines(tmp_path):
  pytest.importorskip("bm25s")
  path = tmp_path / "corpus.jsonl"
  path.write_text("\n".join(map(json.dumps, CORPUS)) + "\n\n")
  tools = as_tools([SearchTool(path, max_document_chars=4)])
  assert call(tools, "search", {"query": "bark"}).text == "[1] Dogs\nDogs"
  path.write_text('"a"\n{')
  with pytest.raises(ValueError, match=r"line 2 of .* is no JSON"):
    SearchTool(path)


@pytest.mark.parametrize(
  ("corpus", "settings", "message"),
  [
    ([], {}, "the corpus is empty"),
    (["a", {"title": "b"}], {}, "document 1 is .*'text'"),
    ([3], {}, "document 0 is '3'"),
    (["a"], {"top_k": 0}, "top_k is 0"),
    (["a"], {"max_document_chars": 0}, "max_document_chars is 0"),
  ],
)
def test_a_corpus_is_checked(corpus, settings, message):
  with pytest.raises(ValueError, match=message):
    SearchTool(corpus, **settings)


def test_the_missing_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "bm25s", None)
  with pytest.raises(ImportError, match=r"pip install tunix\[envs\]"):
    SearchTool(["a"])
