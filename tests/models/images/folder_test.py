"""Reading of a model folder's processor files."""

import pytest

from tests.models.images import toys
from tunix.models.images.folder import read_processor
from tunix.models.images.patches import Pixtral, Qwen3VL
from tunix.models.images.squares import Gemma3, SmolVLM

PRE, PRO = "preprocessor_config.json", "processor_config.json"


def test_published_numbers_are_the_defaults(tmp_path):
  found = [
    read_processor(toys.write(tmp_path, files)) for files in toys.PUBLISHED.values()
  ]
  assert found[:2] == [Gemma3(), Gemma3(pan_and_scan=True)]
  assert found[3:5] == [SmolVLM(), Qwen3VL()]


def test_newer_folders_have_all_in_one_file(tmp_path):
  files = toys.CONFIGS["pixtral"]
  # Numbers of the image processor there replace those of the other file.
  old = {**files[PRE], "size": {"longest_edge": 1}}
  nested = {**files[PRE], "image_processor_type": "PixtralImageProcessorFast"}
  toys.write(tmp_path, {PRE: old, PRO: {**files[PRO], "image_processor": nested}})
  found = read_processor(tmp_path)
  assert isinstance(found, Pixtral)
  assert (found.longest_edge, found.patch_size, found.merge_size) == (90, 5, 2)


def change(config, file=PRE, **new):
  files = toys.CONFIGS[config]
  return {**files, file: {**files[file], **new}}


@pytest.mark.parametrize(
  "files, message",
  [
    (change("qwen", image_processor_type="FuyuImageProcessor"), "expected one of"),
    (change("qwen", image_processor_type=None), "'None'"),
    (change("qwen", do_resize=False), "do_resize is False; expected True"),
    (change("qwen", min_pixels=9), "min_pixels is 9"),
    (change("qwen", patch_size=None), "must have patch_size"),
    (change("qwen", patch_size="16"), "patch_size"),
    (change("qwen", size=5), "must have size.shortest_edge"),
    (change("gemma3", size={"height": 8, "width": 9}), "8 x 9|square"),
    (change("gemma3", PRO, image_seq_length=None), "config.json .*image_seq_length"),
    (change("smolvlm", image_mean=[0.5]), "3 channels"),
  ],
)
def test_refused_files(files, message, tmp_path):
  with pytest.raises((ValueError, TypeError), match=message):
    read_processor(toys.write(tmp_path, files))


def test_a_folder_without_files(tmp_path):
  with pytest.raises(FileNotFoundError, match="copy both"):
    read_processor(tmp_path)


def test_numbers_of_a_normalization_that_is_off_are_not_used(tmp_path):
  found = read_processor(toys.write(tmp_path, change("qwen", do_normalize=False)))
  assert found.mean == (0.0, 0.0, 0.0) and found.std == (1.0, 1.0, 1.0)


def test_folders_of_idefics3(tmp_path):
  files = change("smolvlm", image_processor_type="Idefics3ImageProcessor")
  assert isinstance(read_processor(toys.write(tmp_path, files)), SmolVLM)


def test_an_empty_image_processor_is_none(tmp_path):
  files = change("gemma3", PRO, image_processor=None)
  assert isinstance(read_processor(toys.write(tmp_path, files)), Gemma3)
