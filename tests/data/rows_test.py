import pytest

from tunix.data.chat import rendered_row
from tunix.data.rows import OneRow, fit_row as fit

# Five tokens of prompt, four of response; 100 is BOS.
EXAMPLE = rendered_row([100, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 1, 1, 1, 1])


def test_the_first_token_is_never_trained():
  example = rendered_row([1, 2], [1, 1])
  assert example.mask.tolist() == [0, 1]
  assert example.prompt_length == 1
  assert rendered_row([1, 2], [0, 0]).prompt_length == 2
  assert len(rendered_row([], []).tokens) == 0


def test_what_fits_stays():
  for policy in ("error", "drop", "truncate"):
    assert fit(EXAMPLE, 9, policy) is EXAMPLE


def test_dropping():
  assert fit(EXAMPLE, 8, "drop") is None


def test_truncation_cuts_the_response():
  cut = fit(EXAMPLE, 7, "truncate")
  assert cut.tokens.tolist() == [100, 1, 2, 3, 4, 5, 6]
  assert cut.mask.tolist() == [0, 0, 0, 0, 0, 1, 1]
  assert cut.prompt_length == 5


def test_a_prompt_that_fills_everything_keeps_its_end():
  cut = fit(EXAMPLE, 5, "truncate")
  assert cut.tokens.tolist() == [2, 3, 4, 5, 6]
  assert cut.mask.tolist() == [0, 0, 0, 1, 1]
  assert cut.prompt_length == 3
  with_bos = fit(EXAMPLE, 5, "truncate", bos_id=100)
  assert with_bos.tokens.tolist() == [100, 3, 4, 5, 6]
  assert with_bos.mask.tolist() == [0, 0, 0, 1, 1]
  assert fit(EXAMPLE, 5, "truncate", bos_id=1).tokens.tolist() == cut.tokens.tolist()
  short = rendered_row([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1])
  assert fit(short, 4, "truncate").tokens.tolist() == [3, 4, 5, 6]
  assert fit(EXAMPLE, 2, "truncate", bos_id=100).mask.tolist() == [0, 1]


def test_errors_say_the_lengths_and_the_remedy():
  with pytest.raises(ValueError, match="9 tokens, more than the maximum of 6; raise"):
    fit(EXAMPLE, 6, "error")
  message = 'prompt has 5 tokens and the maximum is 5, .* set overlong to "truncate"'
  with pytest.raises(ValueError, match=message):
    fit(EXAMPLE, 5, "error")
  with pytest.raises(ValueError, match=r"max_length is 1: .* of at least 2"):
    OneRow(max_length=1)
