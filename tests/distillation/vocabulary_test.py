"""Tokenizers of students and teachers."""

import pytest

from tests import toys, toys_text
from tests.distillation import trainers
from tests.generate.toy_ids import Ids
from tunix.distillation import vocabulary
from tunix.distillation.distillation_trainer import DistillationTrainer
from tunix.distillation.strategies import LogitStrategy


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


def test_the_trainer_asks():
  with pytest.raises(ValueError, match="the tokenizers differ"):
    DistillationTrainer(
      toys.model(),
      trainers.teacher(),
      LogitStrategy(),
      tokenizers=(Bytes(), Bytes(shift=4)),
    )


def test_models_that_do_not_say_pass():
  vocabulary.check_sizes(Ids(), toys.model())
