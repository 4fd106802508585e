"""Datasets that a user's module makes: loaded, rendered, filtered, batched."""

import itertools

import grain
import pytest

from tests import toys_text
from tunix.cli.utils.data import (
  apply_chat_template,
  get_dataset_from_module,
  parse_call_string,
  post_init_dataset,
)

MODULE = """
def create_dataset(count=4, word="day"):
  return [{"prompt": f"{word} {i}", "answer": i} for i in range(count)]

def messages():
  return [{"prompt": [{"role": "user", "content": "What is it?"}], "answer": 1}]

def broken():
  raise KeyError("no such column")

def nothing():
  return 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
  path = tmp_path_factory.mktemp("own") / "my_prompts_module.py"
  path.write_text(MODULE)
  return path


def plain():
  return toys_text.chat_tokenizer(None)


def rows(count, length=lambda i: 1 + i):
  return [{"prompts": "a " * length(i), "n": i} for i in range(count)]


def test_arguments_are_literals():
  assert parse_call_string("(1, name='x', n=[2])") == ([1], {"name": "x", "n": [2]})
  assert parse_call_string("name='x'") == ([], {"name": "x"})
  assert parse_call_string("") == ([], {})
  with pytest.raises(ValueError, match="cannot be parsed"):
    parse_call_string("open('x')")


def test_a_function_by_file_name_and_arguments(file, monkeypatch):
  made = get_dataset_from_module(str(file), plain())
  assert isinstance(made, grain.MapDataset) and len(made) == 4
  assert made[1] == {"prompts": "day 1", "answer": 1}
  some = get_dataset_from_module(f"{file}:create_dataset(2, word='sea')", plain())
  assert [x["prompts"] for x in (some[0], some[1])] == ["sea 0", "sea 1"]
  monkeypatch.chdir(file.parent)
  assert len(get_dataset_from_module("my_prompts_module:create_dataset", None)) == 4
  # A tokenizer with a chat template renders texts as well.
  chat = get_dataset_from_module(f"{file}:messages", toys_text.chat_tokenizer("chatml"))
  assert "<|im_start|>user" in chat[0]["prompts"] and chat[0]["answer"] == 1


@pytest.mark.parametrize(
  ("name", "kind", "part"),
  [
    (":broken", RuntimeError, "broken raised KeyError: 'no such column'"),
    (":nothing", TypeError, "a dataset is an int"),
    (":absent", ValueError, "has no function 'absent'"),
  ],
)
def test_what_a_module_does_wrong_is_named(file, name, kind, part):
  with pytest.raises(kind, match=part):
    get_dataset_from_module(f"{file}{name}", plain())


def test_modules_that_are_not_there(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such file"):
    get_dataset_from_module(str(tmp_path / "absent.py"), plain())
  with pytest.raises(ImportError, match="absent_module"):
    get_dataset_from_module("absent_module.sub", plain())
  (tmp_path / "wrong_syntax.py").write_text("def (:")
  (tmp_path / "raises_at_import.py").write_text("raise OSError('no network')")
  (tmp_path / "imports_what_is_not_there.py").write_text("import not_there_xyz")
  for name, part in (
    ("wrong_syntax", "SyntaxError"),
    ("raises_at_import", "OSError: no network"),
    ("imports_what_is_not_there", "No module named 'not_there_xyz'"),
  ):
    with pytest.raises(ImportError, match=rf"{name}\.py cannot be imported.*{part}"):
      get_dataset_from_module(f"{tmp_path}/{name}.py", plain())


def test_columns_are_kept_and_prompts_needed():
  done = {"prompts": "x", "a": 1}
  assert apply_chat_template(done, None) is done
  with pytest.raises(ValueError, match="question"):
    apply_chat_template({"question": "x"}, None)
  with pytest.raises(ValueError, match="tokenizer is None"):
    apply_chat_template({"prompt": [{"role": "user", "content": "x"}]}, None)


def test_filter_fraction_repeat_batch_limit_in_this_order():
  lengths = [len(plain().tokenize(x["prompts"], add_eos=False)) for x in rows(8)]
  limit = sorted(lengths)[5]  # six of eight fit
  made = post_init_dataset(rows(8), plain(), 2, None, limit, fraction=0.5)
  assert [made[i]["n"] for i in range(len(made))] == [[0, 1]]  # 3 of 6, one left over
  twice = post_init_dataset(rows(8), plain(), 2, None, limit, 0.5, num_epochs=2)
  assert [x["n"] for x in twice] == [[0, 1], [2, 0], [1, 2]]
  assert [x["n"] for x in post_init_dataset(rows(8), plain(), 2, 2, None)] == [
    [0, 1],
    [2, 3],
  ]


def test_the_place_is_saved_and_restored():
  make = lambda: post_init_dataset(rows(9), plain(), 2, None, None, num_epochs=3)
  whole = [x["n"] for x in make()]
  first = iter(make().to_iter_dataset())
  list(itertools.islice(first, 5))
  again = iter(make().to_iter_dataset())
  again.set_state(first.get_state())
  assert [x["n"] for x in again] == whole[5:]


@pytest.mark.parametrize(
  ("change", "part"),
  [
    ({"fraction": 0.0}, "fraction is 0.0"),
    ({"fraction": 1.5}, "fraction is 1.5"),
    ({"batch_size": 0}, "batch_size is 0"),
    ({"num_batches": 0}, "num_batches is 0"),
    ({"num_epochs": 0}, "num_epochs is 0"),
    ({"max_prompt_length": 1}, "none of 4 records has a prompt of at most"),
    ({"batch_size": 5}, "the dataset has 4 records and batch_size is 5"),
  ],
)
def test_values_out_of_range(change, part):
  values = {"batch_size": 2, "num_batches": None, "max_prompt_length": None, **change}
  with pytest.raises(ValueError, match=part):
    post_init_dataset(rows(4, lambda i: 3), plain(), **values)
