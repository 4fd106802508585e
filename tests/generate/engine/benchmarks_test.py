"""The benchmarks of docs/performance.md run; their figures are not looked at."""

import json
import sys

from benchmarks import groups, many, ragged


def figures(module, words, monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", [module.__name__, *words.split()])
  module.main()
  return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_group_prefills_its_prompt_once(monkeypatch, capsys):
  words = "--layers 1 --vocab 64 --width 64 --prompt 64 --group 4 --repeats 1"
  (found,) = figures(groups, words, monkeypatch, capsys)
  assert found["rows_equal"] == 4
  assert found["flops_ratio"] == 4.0


def test_the_share_of_the_host(monkeypatch, capsys):
  words = "host --layers 1 --vocab 64 --requests 4 --slots 2 --passes 1"
  (found,) = figures(ragged, words, monkeypatch, capsys)
  assert 0 < found["host_ms"] <= found["launch_ms"]


def test_blocks_of_many_requests(monkeypatch, capsys):
  words = "--requests 40 --block 20 --slots 4 --flight 8"
  *blocks, last = figures(many, words, monkeypatch, capsys)
  assert [block["requests"] for block in blocks] == [20, 40]
  assert last["last_over_first"]["descriptors"] == 1.0
