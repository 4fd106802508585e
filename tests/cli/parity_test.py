import pytest

from tests import toys, toys_text
from tests.cli import runs
from tests.generate import scored
from tunix.models import safetensors_saver


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  out = tmp_path_factory.mktemp("parity") / "model"
  tokenizer = toys_text.chat_tokenizer("chatml")
  model = toys.model(vocab_size=tokenizer.vocab_size)
  safetensors_saver.save_pretrained(model, out)
  tokenizer.save(out)
  return out


def test_the_exit_code_is_the_gate(folder, capsys):
  words = ["parity", folder, "--prompts=3", "--tokens=4", "--dtype=float32"]
  assert runs.tunix(*words) == 0
  text = capsys.readouterr().out
  assert "3 prompts, computed in float32" in text
  assert "12 sampled tokens" in text and text.endswith("passed\n")
  assert runs.tunix(*words, "--threshold=0", "--seed=5") == 1
  assert capsys.readouterr().out.endswith("FAILED\n")


@pytest.mark.shipped  # XLA's flags in the other tests do not keep bits
@scored.has_compared_bits
def test_batch_invariant_models_allow_no_difference(folder, capsys):
  words = ["parity", folder, "--prompts=5", "--tokens=8", "--dtype=float32"]
  assert runs.tunix(*words, "--batch_invariant") == 0
  assert "max 0, mean 0 nats; beyond 0: 0.00%" in capsys.readouterr().out
  assert runs.tunix(*words, "--threshold=0") == 1


def test_text_prompts_and_other_dtypes(folder, capsys):
  words = ["parity", folder, "--prompt", "how many", "seven", "--tokens=4"]
  assert runs.tunix(*words, "--dtype=bfloat16") == 0
  assert "2 prompts, computed in bfloat16" in capsys.readouterr().out


def test_bad_input(folder, capsys):
  assert runs.tunix("parity", folder, "--tokens=0") == 2
  assert "--tokens is 0" in capsys.readouterr().err
  assert runs.tunix("parity", folder / "nowhere") == 2
  assert runs.tunix("parity") == 2
