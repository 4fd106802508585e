import numpy as np
import pytest

from tests.generate import toy_ids
from tunix.generate.base_sampler import BaseSampler, SamplerOutput
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.sampler import Sampler
from tunix.generate.sizes import text_size


class Echoing(BaseSampler):
  """Completes a prompt with itself."""

  name = "Echoing"
  not_honoured = frozenset({"top_k", "seed", "first_prompt"})

  def _sample(self, prompts, options):
    self.options = options
    return SamplerOutput(
      text=[self.tokenizer.decode(ids) for ids in prompts],
      tokens=prompts,
      padded_prompt_tokens=np.stack(prompts),
      finish_reasons=["length"] * len(prompts),
    )


@pytest.fixture
def echoing():
  return Echoing(toy_ids.Ids())


def test_a_sampler_is_given_ids_and_checked_options(echoing):
  out = echoing(["3 1", [4, 1]], 5, eos_tokens=[2], stop_strings="9", min_p=0.0)
  assert out.text == ["3 1", "4 1"]
  assert echoing.options == SamplingOptions(
    max_generation_steps=5, eos_tokens=[2], stop_strings="9", min_p=0.0
  )
  assert echoing("3 1", 5).text == ["3 1"]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"temperature": 1.0, "top_k": 2}, "Echoing does not honor top_k: leave"),
    ({"temperature": 1.0, "seed": 0}, "Echoing does not honor seed"),
    (
      {"temperature": 1.0, "top_k": 2, "seed": 3},
      "does not honor seed and top_k",
    ),
    ({"max_prompt_length": 1}, "2 tokens and max_prompt_length is 1"),
    ({"temperature": -1.0}, "temperature is -1"),
  ],
)
def test_what_it_does_not_take_is_refused(echoing, options, message):
  with pytest.raises(ValueError, match=message):
    echoing(["3 1"], 5, **options)
  assert not hasattr(echoing, "options")


def test_what_would_do_nothing_is_no_reason_to_refuse(echoing):
  # Nothing is drawn at temperature 0, so a seed says nothing.
  assert echoing(["3 1"], 5, seed=3).text == ["3 1"]
  plain = SamplingOptions(max_generation_steps=1)
  assert plain.active == {"max_generation_steps"}
  same = SamplingOptions(
    max_generation_steps=1, forbidden_tokens=[], eos_tokens=(), num_samples=1, seed=4
  )
  assert same.active == plain.active
  asked = SamplingOptions(
    max_generation_steps=1, forbidden_tokens=np.array([1]), echo=True, temperature=1.0
  ).active
  assert asked == {"max_generation_steps", "forbidden_tokens", "echo", "temperature"}
  # A batch in parts is no other without draws; filters that keep all are none.
  assert echoing(["3 1"], 5, first_prompt=2, engine_options=None).text == ["3 1"]
  off = {"top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "engine_options": None}
  assert SamplingOptions(max_generation_steps=1, **off).active == {
    "max_generation_steps",
    "temperature",
  }


def test_our_own_sampler_takes_no_engine_options():
  sampler = Sampler(toy_ids.sharp_model(), toy_ids.Ids())
  with pytest.raises(ValueError, match="Sampler does not honor engine_options"):
    sampler(["3 1"], 2, engine_options={"regex": "[0-9]"})


def test_a_sampler_of_before_that_writes_its_call_goes_on():
  class OwnCall(BaseSampler):
    def __call__(self, input_strings, max_generation_steps, **options):
      return [len(self.tokenize(x)) for x in input_strings]

  assert OwnCall(toy_ids.Ids())(["3 1", "4"], 2, anything=1) == [2, 1]
  with pytest.raises(TypeError, match="neither _sample nor __call__"):
    BaseSampler(toy_ids.Ids())(["3"], 1)


def test_a_text_that_cannot_fit_is_not_tokenized(echoing, monkeypatch):
  long = "1 " * 600  # 1,200 characters; two tokens have at most 1,024
  assert echoing(["3 1"], 5, max_prompt_length=2).text == ["3 1"]
  monkeypatch.setattr(echoing.tokenizer, "tokenize", None)
  with pytest.raises(ValueError, match="1200 characters, expected at most 1024"):
    echoing(["3 1", long], 5, max_prompt_length=2)


def test_all_texts_of_an_object_count():
  assert text_size.may_fit({"a" * 500: ["b" * 10, 3, None]}, 1)  # and two objects
  assert not text_size.may_fit({"a" * 500: [["b" * 12], ("c",)]}, 1)
