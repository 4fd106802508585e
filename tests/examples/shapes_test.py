import pathlib

import pytest

from tunix.examples import shapes


def pictures(records):
  return [
    pathlib.Path(x["prompt"][0]["content"][0]["image"]).read_bytes() for x in records
  ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_pictures_are_not_trained_on(seed, tmp_path):
  task = shapes.Shapes(tmp_path, seed)
  held_out = task.questions(40, held_out=True)
  assert not set(pictures(held_out)) & set(pictures(task.questions(200)))
  assert len({x["answer"] for x in held_out}) == shapes.MAX_SHAPES


def test_a_larger_count_appends_records(tmp_path):
  few, more = (shapes.Shapes(tmp_path / str(n)).questions(n) for n in (5, 9))
  assert pictures(few) == pictures(more)[:5]
  assert [x["answer"] for x in few] == [x["answer"] for x in more[:5]]
