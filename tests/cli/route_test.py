"""`tunix route`: its arguments, and what it refuses."""

import sys

import pytest

from tests.cli import runs
from tunix.serve import router

URLS = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]


def test_arguments_reach_the_router(monkeypatch, tmp_path, capsys):
  made = []

  def route(settings, hosts, on_start):
    made.append((settings, hosts))
    on_start("http://127.0.0.1:8080")

  monkeypatch.setattr(router, "route", route)
  monkeypatch.setenv("TUNIX_API_KEY", "of clients")
  key = tmp_path / "key"
  key.write_text("of hosts\n")
  words = ("--host_key_file", key, "--max_lead", 3, "--host", "0.0.0.0")
  words += ("--proxy", "10.0.0.9", "--proxy", "10.1.0.0/16")
  assert runs.tunix("route", *URLS, *words) == 0
  assert runs.tunix("route", *URLS) == 0
  (settings, hosts), (_, same_key) = made
  assert (settings.api_key, hosts.host_key) == ("of clients", "of hosts")
  assert settings.proxies == ("10.0.0.9", "10.1.0.0/16")
  assert hosts.urls == tuple(URLS) and hosts.max_lead == 3
  assert settings.max_concurrent == 128 and same_key.host_key == "of clients"
  assert "routing to 2 servers at http://127.0.0.1:8080" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--host", "0.0.0.0"], "api_key is None"),
    (["--api_key_file", "/nowhere"], "/nowhere"),
    (["--check_interval", "0"], "check_interval is 0"),
    (["127.0.0.1:8003"], "expected http://HOST:PORT"),
  ],
)
def test_bad_arguments(monkeypatch, capsys, words, message):
  monkeypatch.delenv("TUNIX_API_KEY", raising=False)
  assert runs.tunix("route", *URLS, *words) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1


def test_the_extra_is_named(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "httpx", None)
  assert runs.tunix("route", *URLS) == 2
  assert "pip install tunix[serve]" in capsys.readouterr().err
