import numpy as np

from tunix.rl.env.prompt_ids import PromptIds


def test_prompts_of_a_row_share_memory_that_grows_with_the_row():
  ids, prompts, text = PromptIds(), [], [5]
  assert not ids.follow((), text)
  for turn in range(400):
    prompts.append((ids.ids, list(text)))
    drawn = [turn, turn + 1]
    text = [*text, *drawn, 7]
    assert ids.follow(drawn, text)
  for view, wanted in prompts:
    assert view.tolist() == wanted
  # 400 turns of 3 ids; whole prompts would be 400 * 401 / 2 * 3 ids.
  arrays = {id(view.base): view.base for view, _ in prompts}.values()
  assert sum(len(array) for array in arrays) < 4 * len(text)


def test_another_prompt_begins_a_row_and_leaves_the_old_one():
  ids = PromptIds()
  ids.follow((), [3, 4])
  first = ids.ids
  assert not ids.follow([5], [3, 4, 6])  # the drawn 5 is missing
  assert first.tolist() == [3, 4] and ids.ids.tolist() == [3, 4, 6]
  assert not ids.follow([5], [3])
  assert not first.flags.writeable
  assert ids.ids.dtype == np.int32
