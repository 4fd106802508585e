"""The quickstart's folder: never mixed with something else, never more deleted."""

import pytest

from tunix.examples.quickstart.settings import Settings, prepare_output


@pytest.mark.parametrize(
  "field, value", [("sft_steps", 0), ("grpo_steps", -1), ("seed", -1)]
)
def test_settings_out_of_range(tmp_path, field, value):
  with pytest.raises(ValueError, match=f"{field} is {value}: it must be"):
    Settings(output=tmp_path, **{field: value})


def test_a_new_folder_is_made(tmp_path):
  prepare_output(tmp_path / "a" / "b", overwrite=False)
  assert (tmp_path / "a" / "b").is_dir()
  prepare_output(tmp_path / "a" / "b", overwrite=False)


def old_run(folder):
  (folder / "sft").mkdir()
  (folder / "sft" / "x").write_text("old")
  (folder / "report.md").write_text("old")


def test_a_quickstart_is_replaced_only_when_asked(tmp_path):
  old_run(tmp_path)
  with pytest.raises(ValueError, match=r"is not empty: choose .* or --overwrite"):
    prepare_output(tmp_path, overwrite=False)
  assert (tmp_path / "sft" / "x").read_text() == "old"
  prepare_output(tmp_path, overwrite=True)
  assert not list(tmp_path.iterdir())


def test_files_of_others_are_never_deleted(tmp_path):
  old_run(tmp_path)
  (tmp_path / "thesis.tex").write_text("mine")
  with pytest.raises(ValueError, match=r"holds 'thesis\.tex', which is not of a quick"):
    prepare_output(tmp_path, overwrite=True)
  assert (tmp_path / "report.md").exists()


def test_a_file_is_no_folder(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(NotADirectoryError, match="is a file: give a folder"):
    prepare_output(tmp_path / "file", overwrite=True)


def test_every_place_lies_in_the_output(tmp_path):
  settings = Settings(output=tmp_path)
  places = [name for name, p in vars(Settings).items() if isinstance(p, property)]
  found = [getattr(settings, name) for name in places]
  for stage in ("sft", "grpo"):
    found += [settings.run(stage), settings.export(stage), settings.config_file(stage)]
  for place in found:
    place.mkdir(parents=True, exist_ok=True)
    assert tmp_path in place.parents
  prepare_output(tmp_path, overwrite=True)
