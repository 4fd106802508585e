"""Tokens that are added to tokenizers of every kind."""

import json

import pytest

from tests import toys, toys_text
from tests.generate.tokenizer_kinds_test import KINDS
from tunix.generate.new_tokens import add_tokens
from tunix.generate.tokenizer_adapter import TokenizerAdapter

TEXTS = ("<tool>", "</tool>", "<|im_end|>")


def check(adapter, before):
  """The two new texts are one token each, and nothing else has changed."""
  size = before.vocab_size
  assert adapter.added_tokens == {"<tool>": size, "</tool>": size + 1}
  assert adapter.vocab_size == size + 2
  text = "the sea<tool> a day</tool>"
  ids = adapter.encode(text)
  assert ids == [
    *(*before.encode("the sea"), size),
    *(*before.encode_continuation(" a day"), size + 1),
  ]
  assert adapter.decode(ids) == text  # the tokens are not special
  assert adapter.encode("the sea") == before.encode("the sea")
  assert adapter.special_tokens() == before.special_tokens()
  assert (adapter.eos_ids(), adapter.bos_id()) == (before.eos_ids(), before.bos_id())


@pytest.mark.parametrize("kind", ["tokenizers", "transformers"])
def test_new_tokens_are_found_whole(kind):
  raw = KINDS[kind]()
  before = TokenizerAdapter(raw)
  size = before.vocab_size
  adapter = TokenizerAdapter(raw, add_tokens=TEXTS)
  check(adapter, before)
  assert before.vocab_size == size  # the user's object is unchanged
  again = TokenizerAdapter(adapter, add_tokens=TEXTS)
  assert again.added_tokens == adapter.added_tokens
  assert again.vocab_size == adapter.vocab_size


def test_normalizer_does_not_change_new_tokens():
  before = TokenizerAdapter(toys_text.metaspace())  # puts a space before every text
  adapter = TokenizerAdapter(before, add_tokens=TEXTS)
  assert adapter.encode("the<tool>")[-1] == before.vocab_size
  assert adapter.encode("<tool>") == [before.vocab_size]


def test_folder_keeps_new_tokens(tmp_path):
  before = toys_text.chat_tokenizer("chatml")
  before.save(tmp_path / "base")
  file = tmp_path / "base" / "tokenizer_config.json"
  config = json.loads(file.read_text())
  end = {"content": "<|im_end|>", "special": True}
  listed = {"added_tokens_decoder": {str(before.eos_id()): end}}
  file.write_text(json.dumps(config | listed))
  adapter = TokenizerAdapter.from_pretrained(tmp_path / "base", add_tokens=TEXTS)
  adapter.save(tmp_path / "saved")
  back = TokenizerAdapter.from_pretrained(tmp_path / "saved")
  ids = [before.vocab_size, before.vocab_size + 1]
  assert back.encode("<tool></tool>") == ids
  saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
  # The list of the base would lack the new tokens.
  assert "added_tokens_decoder" not in saved and "added_tokens_decoder" in listed
  assert back.chat_template == before.chat_template


@pytest.mark.parametrize("kind", ["tiktoken-like", "sentencepiece-like", "plain"])
def test_tokenizers_that_cannot_be_extended(kind):
  with pytest.raises(ValueError, match=r"which cannot be extended with \['<tool>'"):
    TokenizerAdapter(KINDS[kind](), add_tokens=("<tool>",))


@pytest.mark.parametrize(
  ("texts", "message"),
  [
    (("",), "add_tokens has ''; expected texts with a character"),
    ((" \n",), "add_tokens has .*; expected texts with a character"),
    ((3,), "add_tokens has 3; expected texts"),
    (("<a>", "<a>"), "add_tokens has '<a>' twice"),
    ("<a>", "add_tokens is '<a>'; expected a list"),
  ],
)
def test_texts_that_are_no_tokens(texts, message):
  with pytest.raises(ValueError, match=message):
    TokenizerAdapter(toys_text.chat_tokenizer("chatml"), add_tokens=texts)


@pytest.mark.parametrize(
  ("tokenizer", "text"),
  [(toys_text.chat_tokenizer("chatml"), "<café>"), (toys_text.metaspace(), "<a▁b>")],
)
def test_texts_that_the_tokenizer_decodes_to_others(tokenizer, text):
  with pytest.raises(ValueError, match=f"{text}', which this tokenizer would decode"):
    TokenizerAdapter(tokenizer, add_tokens=[text])


def test_model_and_tokenizer_in_one_call():
  tokenizer = toys_text.chat_tokenizer("chatml")
  size = tokenizer.vocab_size
  model, adapter = add_tokens(toys.model(vocab_size=size), tokenizer, TEXTS)
  check(adapter, tokenizer)
  assert model.config.vocab_size == adapter.vocab_size == size + 2
