import random
import re

import pytest

from tunix.utils import patterns

NAMES = [
  "model.layers.11.self_attn.q_proj",
  "model.layers.0.mlp.down_proj",
  "base.visual.blocks.3.attn.qkv",
  "lm_head",
  "",
]
# Patterns of published adapters, or near them.
PUBLISHED = [
  r".*\.(q|v)_proj",
  r"^(?!.*visual).*(?:q_proj|qkv|down_proj)$",
  r"^(model)(?!.*(lm_head|output|emb)).*",
  r"(?:.*?(?:model|visual).*?(?:self_attn|attn|mlp).*?(?:q_proj|qkv|down_proj).*?)|"
  r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))",
  r"model\.layers\.(?:[0-9]|1[01])\..*proj",
  r"[^.]*",
  r"(.*\.)?(q_proj)$",
  r"\w+\.\w+\.\d\d\..*?\Z",
  r".*\Bproj|lm\B.*",
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_match_as_in_re(pattern):
  for name in NAMES:
    assert patterns.matches(pattern, name) == bool(re.fullmatch(pattern, name)), name


def some_pattern(rng, depth=3):
  kind = rng.randrange(8 if depth else 2)
  inner = lambda: some_pattern(rng, depth - 1)
  return [
    lambda: rng.choice("ab.") + rng.choice(["", "b"]),
    lambda: rng.choice([r"\d", "[ab]", "[^a]", r"[a-c\d]", "", r"\b", "^", "$", r"\W"]),
    lambda: f"(?:{inner()}|{inner()})",
    lambda: f"({inner()}){rng.choice(['*', '+', '?', '*?', '{2}', '{1,3}', '{0,}'])}",
    lambda: f"(?={inner()})",
    lambda: f"(?!{inner()})",
    lambda: inner() + inner(),
    lambda: inner() + inner(),
  ][kind]()


def test_random_patterns_match_as_in_re():
  rng = random.Random(3)
  counts = [0, 0]
  for _ in range(4000):
    pattern = some_pattern(rng)
    text = "".join(rng.choice("ab1 .") for _ in range(rng.randrange(6)))
    expected = bool(re.fullmatch(pattern, text))
    assert patterns.matches(pattern, text) == expected, (pattern, text)
    counts[expected] += 1
  assert min(counts) > 400


@pytest.mark.parametrize(
  "pattern",
  ["(a|a)*b", "(a*)*b", "(a+)+$b", ".*" * 30 + "b", "(?:a?){60}a{60}b", "(a|aa)+b"],
)
def test_patterns_that_backtrack_for_ever_are_answered(pattern):
  assert not patterns.matches(pattern, "a" * 100)
  assert patterns.matches(pattern, "a" * 60 + "b") or pattern.startswith("(a+)+$")


@pytest.mark.parametrize(
  "pattern, message",
  [
    ("(?:(?!(?:.?){60}z).)*" * 12, "takes more than 20,000 steps for 'a"),
    (r"(a)\1", "has a reference to a group, which patterns of a file may not have"),
    ("(?<=a)b", "has assert, which"),
    ("(?>a)b", "has atomic group, which"),
    ("(?i)a", "has a flag, which"),
    ("(?i:a)", "has a flag, which"),
    ("(", "is no regular expression"),
    ("a{99999999999}", "is no regular expression"),
    ("a" * 5000, "has 5,000 characters; expected at most 4,096"),
    ("(?:" * 400 + ".*" + ")*" * 400, "nests too deeply"),
  ],
)
def test_other_patterns_are_refused(pattern, message):
  with pytest.raises(ValueError, match=message) as caught:
    patterns.matches(pattern, "a" * 60)
  assert "\n" not in str(caught.value)
