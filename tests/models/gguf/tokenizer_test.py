"""Tokenizers of GGUF files: tokenizer files -> metadata -> tokenizer files."""

import functools
import json

import pytest
import tokenizers
from tokenizers import (
  AddedToken,
  Regex,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  trainers,
)

from tests.models.gguf import script_texts
from tunix.models.gguf import pre_tokenizers as table, tokenizer as gguf_tokenizer
from tunix.models.gguf.tokenizer import Kind
from tunix.models.gguf.tokenizer_keys import metadata_of

SPECIALS = ["<s>", "<|im_end|>", "<|im_start|>"]
PLAIN = ["<think>", "</think>"]
KEY = "tokenizer.ggml."


def bytes_after(*steps):
  last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  return pre_tokenizers.Sequence([*steps, last])


def isolated(pattern):
  return pre_tokenizers.Split(Regex(pattern), "isolated")


# The pre-tokenizers as published tokenizer.json files spell them, by llama.cpp's name:
# normalizer, pre-tokenizer, ignore_merges.
LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
  r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}"
  r"\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
  r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
  "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
  "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
NFC = normalizers.NFC()
PUBLISHED = {
  "llama-bpe": (None, bytes_after(isolated(LLAMA3)), True),
  "dbrx": (
    None,
    bytes_after(pre_tokenizers.Split(Regex(LLAMA3), "removed", invert=True)),
    False,
  ),
  "qwen2": (NFC, bytes_after(isolated(QWEN2)), False),
  "deepseek-r1-qwen": (None, bytes_after(isolated(QWEN2)), False),
  "qwen35": (NFC, bytes_after(isolated(QWEN35)), False),
  "gpt-2": (None, GPT2, False),
  "olmo": (NFC, GPT2, False),
  "smollm": (None, pre_tokenizers.Sequence([DIGITS, GPT2]), False),
  "command-r": (NFC, pre_tokenizers.Sequence([DIGITS, GPT2]), False),
  "tekken": (None, bytes_after(isolated(TEKKEN)), True),
  "gpt-4o": (None, bytes_after(isolated(O200K)), False),
  "deepseek-v3": (
    normalizers.Sequence([]),
    bytes_after(
      isolated(r"\p{N}{1,3}"),
      isolated("[一-龥\u3040-ゟ\u30a0-ヿ]+"),
      isolated(DEEPSEEK),
    ),
    False,
  ),
}


@functools.cache
def trained(name):
  """A small tokenizer of a published kind; its merges include digits and spaces."""
  normalizer, cuts, ignore_merges = PUBLISHED[name]
  made = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
  if normalizer is not None:
    made.normalizer = normalizer
  made.pre_tokenizer, made.decoder = cuts, decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=600,
    special_tokens=SPECIALS,
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  made.train_from_iterator(script_texts.texts(80, seed=1), trainer)
  made.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
  return made


def keys_of(made, **changes):
  ids = [made.token_to_id("<|im_end|>")]
  roles = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
  options = {
    "roles": roles,
    "eos_ids": ids,
    "chat_template": None,
    "add_bos": False,
    "rows": made.get_vocab_size() + 5,
  }
  return metadata_of(json.loads(made.to_str()), **(options | changes))


def read_back(metadata):
  text = gguf_tokenizer.files_of(metadata)["tokenizer.json"]
  return tokenizers.Tokenizer.from_str(text)


def check_equal(one, other, count=200):
  texts = script_texts.texts(count, SPECIALS + PLAIN)
  pairs = zip(one.encode_batch(texts), other.encode_batch(texts), strict=True)
  for text, (a, b) in zip(texts, pairs, strict=True):
    assert a.ids == b.ids, text
    assert one.decode(a.ids) == other.decode(b.ids), text


def test_every_pre_tokenizer_is_tested():
  assert [*PUBLISHED] == [entry.names[0] for entry in table.TABLE]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_tokenizer_over_bytes_comes_back(name):
  metadata = keys_of(trained(name))
  assert metadata[KEY + "pre"] == name
  assert {*metadata[KEY + "tokens"][-5:]} == {f"[PAD{i}]" for i in range(602, 607)}
  check_equal(trained(name), read_back(metadata))


@functools.cache
def over_characters(*, prefix=False, all_pairs=True):
  """A small tokenizer over characters, with spaces written as ▁.

  Args:
    prefix: it puts a space before a text.
    all_pairs: every pair that makes a token is a merge, as in SentencePiece's files.
  """
  made = tokenizers.Tokenizer(
    models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
  )
  changes = [normalizers.Prepend("▁")] if prefix else []
  made.normalizer = normalizers.Sequence([*changes, normalizers.Replace(" ", "▁")])
  made.decoder = decoders.Sequence(
    [
      *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
      *([decoders.Strip(" ", 1, 0)] if prefix else []),
    ]
  )
  letters = [f"<0x{i:02X}>" for i in range(256)]
  trainer = trainers.BpeTrainer(
    vocab_size=900,
    limit_alphabet=300,
    special_tokens=["<unk>", *SPECIALS, *letters],
    show_progress=False,
  )
  texts = script_texts.texts(80, seed=1)
  # Whole texts would take long: each is one word here.
  made.train_from_iterator([f" {x}" for text in texts for x in text.split()], trainer)
  known = json.loads(made.to_str())
  # The trainer adds the bytes; in published files they are plain tokens.
  added = [item for item in known["added_tokens"] if item["content"] not in letters]
  known["added_tokens"] = added
  if all_pairs:
    made_by = ["".join(pair) for pair in known["model"]["merges"]]
    vocab = known["model"]["vocab"]
    merges = [pair for text in made_by for pair in gguf_tokenizer.splits(text, vocab)]
    known["model"]["merges"] = merges
  return tokenizers.Tokenizer.from_str(json.dumps(known))


@pytest.mark.parametrize("prefix", [False, True])
def test_a_tokenizer_over_characters_comes_back_by_its_scores(prefix):
  made = over_characters(prefix=prefix)
  metadata = keys_of(made)
  assert metadata[KEY + "model"] == "llama" and KEY + "merges" not in metadata
  assert metadata[KEY + "add_space_prefix"] is prefix
  kinds = metadata[KEY + "token_type"]
  assert kinds.count(Kind.BYTE) == 256 and kinds[0] == Kind.UNKNOWN
  check_equal(made, read_back(metadata))


def test_merges_are_stored_where_scores_do_not_give_them():
  made = over_characters(all_pairs=False)
  metadata = keys_of(made)
  assert metadata[KEY + "model"] == "gemma4"
  check_equal(made, read_back(metadata))


def test_tokens_that_end_an_answer():
  made = trained("gpt-2")
  odd, think = made.token_to_id("<s>"), made.token_to_id("<think>")
  metadata = keys_of(made, eos_ids=[made.token_to_id("<|im_end|>"), odd, think])
  assert (metadata[KEY + "eot_token_id"], metadata[KEY + "eom_token_id"]) == (
    odd,
    think,
  )
  config = gguf_tokenizer.generation_config(metadata)
  assert config["eos_token_id"] == [made.token_to_id("<|im_end|>"), odd, think]
  with pytest.raises(ValueError, match=r"\['<s>', '<think>', '!'\] end an answer"):
    keys_of(made, eos_ids=[odd, think, made.token_to_id("!")])


@pytest.mark.parametrize(
  ("control", "ends"),
  [
    (["<|end|>", "<|user|>"], ["<|end|>"]),
    (["<|return|>", "<|call|>", "<|end|>"], ["<|return|>", "<|call|>"]),
    (["<eos>", "</s>", "<turn|>"], ["<eos>", "</s>", "<turn|>"]),
    (["<eos>", "</s>", "<|tool_response>"], ["<eos>", "<|tool_response>"]),
  ],
)
def test_tokens_that_end_an_answer_are_found_by_their_texts(control, ends):
  tokens = ["a", "<|eot_id|>", *control]  # the second is no control token
  metadata = {KEY + "tokens": tokens, KEY + "token_type": [1, 1, *[3] * len(control)]}
  found = gguf_tokenizer.generation_config(metadata)
  assert [tokens[i] for i in found["eos_token_id"]] == ends


def test_special_tokens_around_a_text():
  made = trained("gpt-2")
  metadata = keys_of(made, add_bos=True) | {KEY + "add_eos_token": True}
  ids = read_back(metadata).encode("a").ids
  assert ids == [0, made.token_to_id("a"), 1]
  config = json.loads(gguf_tokenizer.files_of(metadata)["tokenizer_config.json"])
  assert config["add_bos_token"] and config["eos_token"] == "<|im_end|>"
  again = json.loads(gguf_tokenizer.files_of(metadata)["tokenizer.json"])
  options = {"eos_ids": [], "chat_template": None, "add_bos": True, "rows": 602}
  roles = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
  assert metadata_of(again, roles=roles, **options)[KEY + "add_eos_token"]
  # llama.cpp refuses a file that adds a token which it does not name.
  assert not metadata_of(again, roles={}, **options)[KEY + "add_bos_token"]


def test_templates_by_name():
  templates = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
  metadata = keys_of(trained("gpt-2"), chat_template=templates)
  assert metadata["tokenizer.chat_templates"] == ["tool_use"]
  files = gguf_tokenizer.files_of(metadata | {"tokenizer.chat_template.../x": "no"})
  assert {name: files[name] for name in files if name.endswith("jinja")} == {
    "chat_template.jinja": "{{ 1 }}",
    "additional_chat_templates/tool_use.jinja": "{{ 2 }}",
  }


def test_runs_of_spaces_are_cut_out_as_llama_cpp_does():
  """Gemma's files list them as tokens with plain spaces."""
  metadata = dict(keys_of(over_characters()))
  tokens, kinds = [*metadata[KEY + "tokens"]], [*metadata[KEY + "token_type"]]
  tokens[-2:], kinds[-2:] = ["   ", "  "], [Kind.USER_DEFINED] * 2
  made = read_back(metadata | {KEY + "tokens": tokens, KEY + "token_type": kinds})
  assert made.encode("a" + " " * 6 + "b").tokens == ["a", "   ", "   ", "b"]
  assert made.encode("a" + " " * 5 + "b").tokens == ["a", "   ", "  ", "b"]


@pytest.mark.parametrize(
  ("architecture", "name", "rstrip"),
  [("phi3", "x", True), ("llama", "Phi-3 mini", True), ("llama", "x", False)],
)
def test_special_tokens_of_phi3_take_the_spaces_after_them(architecture, name, rstrip):
  metadata = keys_of(over_characters()) | {
    "general.architecture": architecture,
    "general.name": name,
  }
  added = json.loads(gguf_tokenizer.files_of(metadata)["tokenizer.json"])[
    "added_tokens"
  ]
  taking = {item["content"]: item["rstrip"] for item in added}
  assert taking == {"<unk>": False, "<s>": False} | dict.fromkeys(SPECIALS[1:], rstrip)


REFUSED_FILES = (
  ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; expected gpt2, llama or gemma4"),
  ({"model": None}, "tokenizer.ggml.model is missing; expected type str"),
  ({"pre": None}, "tokenizer.ggml.pre is None; expected chatglm-bpe"),
  ({"tokens": 3}, "tokenizer.ggml.tokens is of type int; expected type Sequence"),
  ({"tokens": ["a", "a"]}, "tokenizer.ggml.tokens holds 'a' 2 times"),
  ({"tokens": ["a" * 9999]}, "a token of 9999 characters; expected at most 1024"),
  ({"tokens": []}, "tokenizer.ggml.token_type has 607 entries; expected 0"),
  ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries; expected 607"),
  ({"merges": None}, "tokenizer.ggml.merges is missing"),
  ({"merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab'; expected two parts"),
  ({"eos_token_id": 9999}, "eos_token_id is 9999; expected an id below 602"),
  ({"bos_token_id": -1}, "bos_token_id is -1; expected an id below 602"),
  ({"add_bos_token": 1}, "add_bos_token is of type int; expected type bool"),
  ({"model": "llama", "merges": None}, "tokenizer.ggml.scores has 0 entries"),
  ({"model": "llama", "merges": None, "scores": 1.0}, "scores has 1 entries"),
)


@pytest.mark.parametrize(("changes", "says"), REFUSED_FILES)
def test_damaged_and_unknown_metadata_are_refused(changes, says):
  metadata = dict(keys_of(trained("gpt-2")))
  for key, value in changes.items():
    metadata.pop(KEY + key, None)
    metadata |= {} if value is None else {KEY + key: value}
  with pytest.raises(ValueError) as caught:
    gguf_tokenizer.files_of(metadata)
  assert says in str(caught.value)


def changed(made, **parts):
  return {**json.loads(made.to_str()), **parts}


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
REFUSED_TOKENIZERS = (
  ({"model": {"type": "Unigram", "vocab": []}}, "of type Unigram []; expected BPE"),
  (
    {"model": {"type": "BPE", "end_of_word_suffix": "</w>"}},
    "of type BPE ['end_of_word_suffix']; expected BPE without dropout",
  ),
  (
    {"normalizer": {"type": "Lowercase"}},
    "normalizes with ['Lowercase']; expected NFC",
  ),
  (
    {"pre_tokenizer": json.loads(bytes_after(isolated("x+")).__getstate__())},
    "cuts texts with ('x+',), which is none of llama.cpp's pre-tokenizers",
  ),
  (
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
    "which llama.cpp does not have",
  ),
  ({"pre_tokenizer": {"type": "Whitespace"}}, "by [{'type': 'Whitespace'}]; expected"),
  # The model has no byte_fallback.
  (
    {"pre_tokenizer": None, "normalizer": REPLACE},
    "expected byte-level BPE, or BPE with",
  ),
)


@pytest.mark.parametrize(("parts", "says"), REFUSED_TOKENIZERS)
def test_tokenizers_that_llama_cpp_lacks_are_refused(parts, says):
  with pytest.raises(ValueError) as caught:
    metadata_of(
      changed(trained("gpt-2"), **parts),
      roles={},
      eos_ids=[],
      chat_template=None,
      add_bos=False,
      rows=10,
    )
  assert says in str(caught.value)


@pytest.mark.parametrize(
  ("scheme", "template", "prefix"),
  [
    ("never", None, False),
    ("always", "x", True),
    ("first", None, True),
    ("first", "x", False),
  ],
)
def test_spaces_before_a_text_by_metaspace(scheme, template, prefix):
  cuts = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}
  metadata = metadata_of(
    changed(over_characters(), normalizer=None, pre_tokenizer=cuts | {"split": False}),
    roles={},
    eos_ids=[],
    chat_template=template,
    add_bos=False,
    rows=900,
  )
  assert metadata[KEY + "add_space_prefix"] is prefix


@pytest.mark.parametrize(
  "change",
  [{"content": "_"}, {"pattern": {"String": "x"}}, {"pattern": {"Regex": " "}}],
)
def test_spaces_must_be_written_as_llama_cpp_does(change):
  known = changed(over_characters(), normalizer=REPLACE | change)
  made = tokenizers.Tokenizer.from_str(json.dumps(known))
  with pytest.raises(ValueError, match="writes ▁ for a space"):
    keys_of(made)


def test_merges_with_a_space_before_texts_are_refused():
  with pytest.raises(ValueError, match="lacks some pairs that make a token"):
    keys_of(over_characters(prefix=True, all_pairs=False))
