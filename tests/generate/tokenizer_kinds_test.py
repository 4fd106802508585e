"""Every kind of tokenizer does all that a sampler asks of one.

tiktoken and SentencePiece are tested by objects with their methods, and themselves
where they are installed.
"""

import concurrent.futures
import io
import re
import threading
import time

import numpy as np
import pytest

from tests import toys, toys_text
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter

TEXT = "the sea, naïve ☃"
END = "<|endoftext|>"


class Encoding:
  """The methods of `tiktoken.Encoding`, a token a byte."""

  n_vocab = 258

  def __init__(self):
    self._special = {END: 256, "<|im_start|>": 257}
    self.special_tokens_set = set(self._special)

  def encode(self, text, *, allowed_special=frozenset(), disallowed_special="all"):
    found = re.findall(r"<\|\w+\|>|.", text, re.DOTALL)
    if allowed_special != "all" and self.special_tokens_set & set(found):
      raise ValueError("special tokens in the text")
    ids = []
    for part in found:
      special = self._special.get(part)
      ids += part.encode() if special is None else [special]
    return ids

  def encode_single_token(self, text):
    return self._special[text]

  def decode(self, ids):
    names = {i: text for text, i in self._special.items()}
    parts = [names[i].encode() if i in names else bytes([i]) for i in ids]
    return b"".join(parts).decode("utf-8", errors="replace")


class Pieces:
  """The methods of `SentencePieceProcessor`, a piece a byte behind three controls."""

  def encode(self, text):
    return [byte + 3 for byte in text.encode()]

  def decode(self, ids):
    assert all(isinstance(i, int) for i in ids)
    return bytes(i - 3 for i in ids if i > 2).decode("utf-8", errors="replace")

  def bos_id(self):
    return 1

  def eos_id(self):
    return 2

  def pad_id(self):
    return -1

  def vocab_size(self):
    return 259

  def id_to_piece(self, number):
    return ["<unk>", "<s>", "</s>"][number]


class Plain:
  """A user's own, with attributes for ids."""

  bos_id, eos_id, pad_id = None, 128, 0

  def encode(self, text):
    return [min(ord(c), 127) for c in text]

  def decode(self, ids):
    return "".join(chr(i) for i in ids)

  def __len__(self):
    return 129


def real_tiktoken():
  tiktoken = pytest.importorskip("tiktoken")
  return tiktoken.Encoding(
    "bytes",
    pat_str=r"\w+|\W",
    mergeable_ranks={bytes([i]): i for i in range(256)},
    special_tokens={END: 256, "<|im_start|>": 257},
  )


def real_sentencepiece():
  package = pytest.importorskip("sentencepiece")
  model = io.BytesIO()
  package.SentencePieceTrainer.train(
    sentence_iterator=iter([*toys_text.WORDS, "the sea, a day"] * 20),
    model_writer=model,
    vocab_size=330,
    hard_vocab_limit=False,
    byte_fallback=True,
    minloglevel=2,
  )
  return package.SentencePieceProcessor(model_proto=model.getvalue())


def real_transformers():
  transformers = pytest.importorskip("transformers")
  rust = toys_text.chat_tokenizer("chatml").tokenizer
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=rust, eos_token="<|im_end|>"
  )


KINDS = {
  "tokenizers": lambda: toys_text.chat_tokenizer("chatml").tokenizer,
  "transformers": real_transformers,
  "tiktoken-like": Encoding,
  "tiktoken": real_tiktoken,
  "sentencepiece-like": Pieces,
  "sentencepiece": real_sentencepiece,
  "plain": Plain,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_works_with_all_of_it(kind):
  adapter = TokenizerAdapter(KINDS[kind]())
  text = "the sea, a day" if kind == "plain" else TEXT
  ids = adapter.encode(text)
  assert adapter.decode(ids).strip() == adapter.decode(np.asarray(ids)).strip() == text
  assert adapter.vocab_size > max(ids) and adapter.eos_id() in adapter.eos_ids()
  assert adapter.decode([*ids, adapter.eos_id()]).strip() == text
  assert adapter.tokenize(text)[-1] == adapter.eos_id()
  assert adapter.eos_id() in adapter.special_ids()

  sampler = Sampler(toys.model(vocab_size=adapter.vocab_size, num_layers=1), adapter)
  options = {"temperature": 1.0, "seed": 0, "num_samples": 2}
  free = sampler([text], 12, **options)
  parts = list(sampler.stream([text], 12, every=1, **options))
  for row in range(2):
    assert "".join(p.text for p in parts if p.row == row) == free.text[row]
  stop = free.text[0][len(free.text[0]) // 2]
  cut = sampler([text], 12, stop_strings=stop, **options)
  assert cut.text[0] == free.text[0][: free.text[0].index(stop)]
  echoed = sampler([text], 12, echo=True, **options)
  assert text in echoed.text[0]


def test_tiktoken_by_hand():
  adapter = TokenizerAdapter(Encoding())
  assert adapter.encode(f"a{END}") == [97, 256]
  assert (adapter.bos_id(), adapter.eos_id(), adapter.pad_id()) == (None, 256, 256)
  assert adapter.decode([97, 256, 98]) == "ab"
  assert adapter.decode([97, 256], skip_special_tokens=False) == f"a{END}"
  assert adapter.special_tokens() == {END: 256, "<|im_start|>": 257}
  assert (adapter.vocab_size, adapter.eos_token) == (258, END)


def test_tiktokens_roles_can_be_named(tmp_path):
  adapter = TokenizerAdapter(Encoding(), bos_token="<|im_start|>", eos_token="")
  assert adapter.encode("a", add_special_tokens=True) == [257, 97]
  assert adapter.eos_id() is None
  again = TokenizerAdapter(adapter, pad_token=END)
  assert (again.bos_id(), again.eos_id(), again.pad_id()) == (257, None, 256)
  with pytest.raises(ValueError, match="eos_token '</s>' is no special token"):
    TokenizerAdapter(Encoding(), eos_token="</s>")
  with pytest.raises(TypeError, match="an Encoding cannot be written"):
    adapter.save(tmp_path)


def test_a_long_text_is_encoded_while_other_threads_run():
  tokenizer = TokenizerAdapter(toys_text.bpe())
  text = f"{TEXT} the sea. " * 3000
  turns, over = [0], threading.Event()

  def count():
    while not over.wait(0.0005):
      turns[0] += 1

  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    counter = pool.submit(count)
    while not turns[0]:
      time.sleep(0.001)
    before = turns[0]
    ids = tokenizer.encode(text)
    during = turns[0] - before
    over.set()
    counter.result()
  # A call that holds the interpreter's lock for its 0.2 s leaves at most a turn or two.
  assert during > 10
  assert ids == tokenizer.tokenizer.encode(text).ids
  ends = tokenizer.encode(text, add_special_tokens=True)
  assert ends == tokenizer.tokenizer.encode(text, add_special_tokens=True).ids
