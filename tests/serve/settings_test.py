import pytest

from tunix.serve.settings import ServeSettings


@pytest.mark.parametrize(
  "host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.0.1"]
)
def test_loopback_needs_no_key(host):
  assert ServeSettings(host=host).is_local


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3", "example.org", ""])
def test_other_addresses_need_a_key(host):
  with pytest.raises(ValueError, match="api_key is None"):
    ServeSettings(host=host)
  settings = ServeSettings(host=host, api_key="secret")
  assert not settings.is_local and "secret" not in repr(settings)


@pytest.mark.parametrize(
  "fields",
  [
    *({"port": 70000}, {"api_key": " "}, {"api_key": "é"}, {"max_concurrent": 0}),
    *({"tool_format": "x"}, {"model_name": ""}, {"request_timeout": 0.0}),
    *({"header_timeout": 0.0}, {"max_address_requests": 0}),
    *({"proxies": ("example.org",)}, {"proxies": ("10.0.0.1/8",)}),
  ],
)
def test_nonsense_is_refused(fields):
  with pytest.raises(ValueError, match=next(iter(fields))):
    ServeSettings(**fields)
