"""Tokenizers of students and teachers."""

import pytest

from tests import toys_text
from tests.distillation import trainers
from tests.generate.toy_ids import Ids
from tunix.distillation import vocabulary
from tunix.distillation.distillation_trainer import DistillationTrainer
from tunix.distillation.strategies import LogitStrategy
from tunix.generate.tokenizer_adapter import TokenizerAdapter


class Bytes:
  """Text is its bytes, from 3 up."""

  def __init__(self, shift=3, eos=1):
    self.shift, self.eos = shift, eos

  def encode(self, text):
    return [b + self.shift for b in text.encode()]

  def decode(self, ids):
    return bytes(i - self.shift for i in ids if i >= self.shift).decode()

  def bos_id(self):
    return None

  def eos_id(self):
    return self.eos

  def pad_id(self):
    return 0


def test_equal_tokenizers_pass():
  vocabulary.check_tokenizers(Bytes(), Bytes())
  chat = toys_text.chat_tokenizer("chatml")
  vocabulary.check_tokenizers(chat, chat)


def test_other_ids_or_roles_are_refused():
  with pytest.raises(ValueError, match="the tokenizers differ"):
    vocabulary.check_tokenizers(Bytes(), Bytes(shift=4))
  with pytest.raises(ValueError, match="eos_id is 1 to the student and 2"):
    vocabulary.check_tokenizers(Bytes(), Bytes(eos=2))


def chat_tokenizer(*, pad="<pad>", added=()):
  raw = toys_text.bpe()
  raw.add_special_tokens(list(added))
  return TokenizerAdapter(raw, eos_token="<|im_end|>", pad_token=pad)


def test_words_of_other_ids_are_refused():
  """No sample text holds them."""
  tools, thoughts = (chat_tokenizer(added=[t]) for t in ("<|tool|>", "<|thought|>"))
  vocabulary.check_tokenizers(tools, chat_tokenizer(added=["<|tool|>"]))
  with pytest.raises(ValueError, match=r"'<\|thought\|>' is unknown to the student"):
    vocabulary.check_tokenizers(tools, thoughts)
  with pytest.raises(
    ValueError, match=r"'<\|tool\|>' is \d+ .* unknown to the teacher"
  ):
    vocabulary.check_tokenizers(tools, chat_tokenizer())


def test_a_token_for_padding_alone_may_differ():
  plain, padded = chat_tokenizer(), chat_tokenizer(pad="[PAD]", added=["[PAD]"])
  vocabulary.check_tokenizers(padded, plain)
  vocabulary.check_tokenizers(plain, chat_tokenizer(pad="<|im_end|>"))
  with pytest.raises(ValueError, match=r"'\[PAD\]'"):  # a word of theirs
    vocabulary.check_tokenizers(plain, chat_tokenizer(added=["[PAD]"]))


def test_special_tokens_where_no_vocabulary_is_given():
  class Marked(Bytes):
    def __init__(self, bos_token):
      super().__init__()
      self.bos_token = bos_token

    def bos_id(self):
      return 2

  vocabulary.check_tokenizers(Marked("<s>"), Marked("<s>"))
  with pytest.raises(ValueError, match="the token '<bos>' is unknown to the student"):
    vocabulary.check_tokenizers(Marked("<s>"), Marked("<bos>"))


def test_the_same_tokenizer_in_another_wrapper():
  class Wrapped:
    """Says its roles and gives no vocabulary."""

    def __init__(self, adapter, eos_token="<|im_end|>"):
      self.encode, self.decode = adapter.encode, adapter.decode
      self.bos_id, self.eos_id = adapter.bos_id, adapter.eos_id
      self.pad_id, self.eos_token = adapter.pad_id, eos_token

  whole = chat_tokenizer()
  vocabulary.check_tokenizers(whole, Wrapped(whole))
  with pytest.raises(ValueError, match="the token '<end>' is unknown to the student"):
    vocabulary.check_tokenizers(whole, Wrapped(whole, "<end>"))


def test_the_trainer_asks():
  with pytest.raises(ValueError, match="the tokenizers differ"):
    DistillationTrainer(
      trainers.fresh_student(),
      trainers.teacher(),
      LogitStrategy(),
      tokenizers=(Bytes(), Bytes(shift=4)),
    )


def test_models_that_do_not_say_pass():
  vocabulary.check_sizes(Ids(), trainers.fresh_student())
