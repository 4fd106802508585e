"""Checksums of exported files: written on request, compared before a folder is read."""

import shutil
import subprocess

import pytest

from tests import toys
from tunix.models import lora, safetensors_saver
from tunix.models.automodel import AutoModel
from tunix.models.files import sums as file_sums


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  folder = tmp_path_factory.mktemp("saved")
  safetensors_saver.save_pretrained(toys.model(), folder / "model")
  lora.save_adapter(toys.model(lora_rank=2), folder / "adapter")
  (folder / "model" / "additional_chat_templates").mkdir()
  (folder / "model" / "additional_chat_templates" / "rag.jinja").write_text("x")
  for part in folder.iterdir():
    file_sums.write(part)
  return folder


def load(folder):
  if folder.name == "model":
    AutoModel.from_pretrained(folder)
  else:
    lora.load_adapter(toys.model(), folder)


@pytest.mark.parametrize("name", ["model", "adapter"])
def test_a_flipped_bit_is_refused_by_file(saved, tmp_path, name):
  folder = shutil.copytree(saved / name, tmp_path / name)
  load(folder)
  files = [x for x in folder.rglob("*") if x.is_file() and x.name != file_sums.NAME]
  assert len(files) > 1
  for file in files:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    whole = file.read_bytes()
    file.write_bytes(data)
    with pytest.raises(ValueError, match=f"{file.name} is not the file that was"):
      load(folder)
    file.write_bytes(whole)
  load(folder)


def test_the_program_sha256sum_reads_them(saved):
  if shutil.which("sha256sum") is None:
    pytest.skip("needs sha256sum")
  command = ["sha256sum", "--check", "--strict", file_sums.NAME]
  subprocess.run(command, cwd=saved / "model", check=True, capture_output=True)


def test_another_model_in_the_folder_removes_them(saved, tmp_path):
  folder = shutil.copytree(saved / "model", tmp_path / "model")
  safetensors_saver.save_pretrained(toys.model(seed=1), folder)
  assert not (folder / file_sums.NAME).exists()
  load(folder)


def test_files_may_be_left_out_and_lines_must_be_checksums(tmp_path):
  (tmp_path / "a").write_text("a")
  (tmp_path / "b").write_text("b")
  file_sums.write(tmp_path)
  (tmp_path / "b").unlink()
  file_sums.check(tmp_path)
  for line in ("abc  a", f"{'0' * 64}  /etc/hostname", f"{'0' * 64} *b/../../a"):
    (tmp_path / file_sums.NAME).write_text(f"\ufeff\r\n{line}\r\n")
    with pytest.raises(
      ValueError, match=r"line 2: found .*, expected 64 .* this folder"
    ):
      file_sums.check(tmp_path)


def test_the_list_itself_and_hidden_files_may_change(tmp_path):
  (tmp_path / ".git").mkdir()
  for name in ("a", ".git/index", file_sums.NAME):
    (tmp_path / name).write_text(name)
  file_sums.write(tmp_path)
  listed = (tmp_path / file_sums.NAME).read_text()
  assert listed.count("\n") == 1
  # `sha256sum * > SHA256SUMS`, called again
  (tmp_path / file_sums.NAME).write_text(f"{listed}{'0' * 64}  {file_sums.NAME}\n")
  file_sums.check(tmp_path)
  (tmp_path / "a").write_text("b")
  with pytest.raises(ValueError, match="a is not the file that was written"):
    file_sums.check(tmp_path)
