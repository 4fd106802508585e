"""Turns among the episodes of a group, for games whose players are all the policy.

    class Player:
      async def initial_observation(self):
        await self.table.turn(self.seat)  # returns when it is this player's turn
        return self.game.view(self.seat)

      async def step(self, action):
        self.game.move(self.seat, action.text)
        self.table.next()  # or self.table.end()
        await self.table.turn(self.seat)
        ...

A call that waits for its turn does not count as an environment at work, so that the
other episodes of a batch are drawn meanwhile, and it has no deadline. If nobody can
move any more, because an episode failed, all waiting calls fail.
"""

from __future__ import annotations

import asyncio

from tunix.rl.env import calls


class Table:
  """The order of the players of one game. All methods are called in `async` methods.

  Args:
    seats: number of players; player 0 begins.

  Attributes:
    seat: the player whose turn it is.
    is_over: True after `end`.
  """

  def __init__(self, seats: int):
    if seats < 1:
      raise ValueError(f"seats is {seats}, expected at least 1")
    self._seats, self.seat, self.is_over = seats, 0, False
    self._waiting: dict[int, tuple[asyncio.Future[None], calls.Waiter]] = {}

  async def turn(self, seat: int) -> None:
    """Waits until it is the turn of a player, or the game is over."""
    if self.is_over or self.seat == seat:
      return
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiter = calls.waiting()
    self._waiting[seat] = future, waiter
    try:
      await future
    finally:  # also if the caller stops waiting
      self._waiting.pop(seat, None)
      waiter.goes_on()

  def next(self, seat: int | None = None) -> None:
    """Gives the turn to a player; None: to the next one."""
    self.seat = (self.seat + 1) % self._seats if seat is None else seat
    self._wake(self.seat)

  def end(self) -> None:
    """Ends the game: all players go on."""
    self.is_over = True
    for seat in list(self._waiting):
      self._wake(seat)

  def _wake(self, seat: int) -> None:
    if seat in self._waiting:
      future, waiter = self._waiting.pop(seat)
      # At once, and not when the player runs: the batch must not seem to be idle.
      waiter.goes_on()
      # The other player may be in another loop, see `calls`.
      future.get_loop().call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
  if not future.done():
    future.set_result(None)
