import asyncio
import types

import pytest

from tunix.serve.http import bodies
from tunix.serve.http.bodies import LargeBodies
from tunix.serve.http.errors import ApiError


def test_large_bodies_leave_time_to_others(monkeypatch):
  """Each of them takes 2 s of this clock."""
  slept = []
  clock = iter((100.0, 100.0, 102.0, 102.0, 110.0, 112.0, 112.0, 120.0, 122.0))

  async def sleep(seconds):
    slept.append(seconds)

  async def here(function, *args):
    return function(*args)

  fake = types.SimpleNamespace(Lock=asyncio.Lock, sleep=sleep, to_thread=here)
  monkeypatch.setattr(bodies, "asyncio", fake)
  monkeypatch.setattr(bodies, "time", types.SimpleNamespace(monotonic=clock.__next__))
  large = LargeBodies()

  async def three():
    assert await large.read(b'{"a": 1}') == {"a": 1}
    with pytest.raises(ApiError):
      await large.read(b"{")
    await large.read(b"{}")

  asyncio.run(three())
  assert slept == [0.0, 8.0, 8.0]


def test_routes_of_a_server_share_their_large_bodies():
  async def pair():
    return LargeBodies.here(), LargeBodies.here()

  first, again = asyncio.run(pair())
  assert first is again is not asyncio.run(pair())[0]
