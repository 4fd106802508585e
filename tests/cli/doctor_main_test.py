"""`tunix doctor` on simulated devices."""

import importlib.metadata
import json

import pytest

from tunix.cli import main
from tunix.cli.commands import doctor as doctor_main


def found(name, findings):
  return next(one for one in findings if one.name == name)


def test_a_healthy_machine(capsys, tmp_path, monkeypatch):
  monkeypatch.setenv("HF_TOKEN", "hf_secret")
  monkeypatch.setenv("HF_HOME", "/models")
  assert main.main(["doctor", "--folder", str(tmp_path)]) == 0
  page = capsys.readouterr().out
  assert "fsdp 8: a sum over all devices is right" in page
  assert f"written and read in {tmp_path}" in page
  assert "jax 0." in page and "HF_HOME=/models" in page
  assert "HF_TOKEN is set" in page and "hf_secret" not in page
  assert not list(tmp_path.iterdir())


def test_what_fails_is_told_and_all_else_too(tmp_path, monkeypatch, capsys):
  def broken():
    raise RuntimeError("no such backend\nmore")

  monkeypatch.setattr(doctor_main, "_collective", broken)
  assert main.main(["doctor", "--json", "--folder", str(tmp_path / "none")]) == 1
  findings = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
  assert findings["mesh"]["text"] == "RuntimeError: no such backend"
  assert not findings["mesh"]["ok"] and findings["devices"]["ok"]
  assert "No such file or directory" in findings["checkpoint"]["text"]


def test_the_other_library_of_our_name_is_told(monkeypatch):
  owners = {"tunix": ["tunix", "google-tunix"]}
  monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: owners)
  (told,) = doctor_main._other_tunix()
  assert not told.ok and "google-tunix installs a package of the same name" in told.text


@pytest.mark.parametrize("there", [True, False])
def test_missing_packages_of_extras(monkeypatch, there):
  wanted = ['fsspec; extra == "data"', 'tunix[test]; extra == "parity"', "jax>=1"]
  monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
  monkeypatch.setattr(
    importlib.metadata, "distributions", lambda name: ["it"] if there else []
  )
  (told,) = doctor_main._extras()
  assert told.text == ("data is complete" if there else "data (fsspec missing)")
