import base64
import json

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from tunix.generate.tokenizer import limits as tokenizer_limits
from tunix.generate.tokenizer_adapter import TokenizerAdapter

# Patterns of published tokenizers: GPT-2, Llama 3, GPT-4o and Bloom.
PUBLISHED = [
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
  r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re)?|\p{N}{1,3}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
  r" ?[^(\s|[.,!?…。、।])]+",
]


def tokenizer(**parts):
  made = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
  for name, part in parts.items():
    setattr(made, name, part)
  return made


def saved(folder, made):
  made.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
  return folder


def charsmap(*texts):
  raw = (4).to_bytes(4, "little") + bytes(4) + b"\0".join(texts) + b"\0"
  return base64.b64encode(raw).decode()


TWICE = normalizers.Replace("a", "aa")
REFUSED = {
  "doubling": (
    {"normalizer": normalizers.Sequence([TWICE] * 40)},
    "tokenizer.json: normalizer may make a text .* times as long; .* at most 1024",
  ),
  "sequences": (
    {
      "normalizer": normalizers.Sequence([normalizers.Sequence([TWICE] * 4)] * 10),
    },
    "normalizer may make",
  ),
  "empty": (
    {"normalizer": normalizers.Replace(Regex("x*"), "a" * 2000)},
    "normalizer may make a text 2,001 times",
  ),
  "prepend": (
    {"normalizer": normalizers.Prepend("a" * 2000)},
    "normalizer may make a text 2,001 times",
  ),
  "decoder": (
    {"decoder": decoders.Sequence([decoders.Replace("a", "aa")] * 40)},
    "decoder may make",
  ),
  "plus": (
    {"pre_tokenizer": pre_tokenizers.Split(Regex("(a+)+b"), "isolated")},
    r"pre_tokenizer has the pattern '\(a\+\)\+b', which repeats a group that itself re",
  ),
  "choice": (
    {"pre_tokenizer": pre_tokenizers.Split(Regex("x|(?:[)]|a|a){2,}b"), "isolated")},
    "pre_tokenizer has the pattern",
  ),
  "nested": (
    {"normalizer": normalizers.Replace(Regex(r"((\p{L}*))*b"), "")},
    "normalizer has the pattern",
  ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_work_without_a_bound_is_refused(tmp_path, kind):
  parts, message = REFUSED[kind]
  folder = saved(tmp_path, tokenizer(**parts))
  with pytest.raises(ValueError, match=message) as caught:
    TokenizerAdapter.from_pretrained(folder)
  assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_texts_of_a_map_of_characters_count():
  step = {"type": "Precompiled", "precompiled_charsmap": charsmap(b"ab", b"x" * 33)}
  assert tokenizer_limits._growth(step) == 33


def test_normalizers_of_published_files_pass(tmp_path):
  charmap = normalizers.Precompiled(base64.b64decode(charsmap(b"ab", b"x" * 33)))
  both = normalizers.Sequence([normalizers.NFKD(), charmap])  # as of ALBERT
  folder = saved(tmp_path, tokenizer(normalizer=both))
  TokenizerAdapter.from_pretrained(folder)


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_pass(tmp_path, pattern):
  splits = [pre_tokenizers.Split(Regex(pattern), "isolated")]
  splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
  spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFKC()]
  made = tokenizer(
    pre_tokenizer=pre_tokenizers.Sequence(splits),
    normalizer=normalizers.Sequence(spaces),
  )
  folder = saved(tmp_path, made)
  assert TokenizerAdapter.from_pretrained(folder).encode("ab") == [0, 1]


def test_a_panic_is_one_line(tmp_path, monkeypatch):
  monkeypatch.setattr(tokenizer_limits, "check", lambda tokenizer, file: None)
  split = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
  adapter = TokenizerAdapter.from_pretrained(
    saved(tmp_path, tokenizer(pre_tokenizer=split))
  )
  with pytest.raises(ValueError, match=r"tokenizer.json fails on this text \(.*retry"):
    adapter.encode("a" * 100)
