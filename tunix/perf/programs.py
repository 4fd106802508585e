"""Compiled programs by name: run, by themselves or by what takes their place (see
`tunix.plan.shipped`), or only noted, when their arguments are shapes.

A plan goes through the code that a run goes through, with `jax.ShapeDtypeStruct`s where
the run has arrays; what would be computed is lowered instead, and kept. What comes home
of it (`mesh.to_host`) are ones, so that the code around it goes on.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax


@dataclasses.dataclass
class Noted:
  """A program that was called and not run.

  Attributes:
    lowered: by its first call.
    args: of that call, static ones too.
    calls: how often it was called.
    result: the shapes of what it gives; None: nobody asked.
    others: calls of the same name with arguments of other shapes, each form once.
  """

  lowered: jax.stages.Lowered
  args: tuple[Any, ...]
  calls: int = 1
  result: Any = None
  others: list[Noted] = dataclasses.field(default_factory=list)

  @functools.cached_property
  def compiled(self) -> jax.stages.Compiled:
    """The program, compiled once."""
    return self.lowered.compile()

  @property
  def gives_arrays(self) -> bool:
    """Whether it computes anything: layers that lie apart need no unstacking."""
    return self.result is None or bool(shapes_in(self.result))

  def run(self) -> Any:
    """The shapes of what it gives, laid out as the compiler does: the arguments of the
    programs after it."""
    if self.result is None:
      self.result = jax.tree.map(
        lambda out, where: jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=where),
        self.lowered.out_info,
        self.compiled.output_shardings,
      )
    return self.result


# {name: program}, while programs are noted.
_noted: contextvars.ContextVar[dict[str, Noted] | None] = contextvars.ContextVar(
  "noted_programs", default=None
)

# (name, function, its arguments) -> what it gives, in place of a call.
_Replacement = Callable[[str, Any, tuple[Any, ...]], Any]
_replacement: contextvars.ContextVar[_Replacement | None] = contextvars.ContextVar(
  "replacement_of_programs", default=None
)


@contextlib.contextmanager
def noted(known: dict[str, Noted] | None = None) -> Iterator[dict[str, Noted]]:
  """Notes the programs that are called inside, by name, and runs none of them; `known`
  has those that were noted before, and is added to."""
  out: dict[str, Noted] = {} if known is None else known
  token = _noted.set(out)
  try:
    yield out
  finally:
    _noted.reset(token)


def are_noted() -> bool:
  """Whether programs are noted here instead of run."""
  return _noted.get() is not None


@contextlib.contextmanager
def replaced(replacement: _Replacement) -> Iterator[None]:
  """Inside, programs are called by `replacement(name, jitted, args)`."""
  token = _replacement.set(replacement)
  try:
    yield
  finally:
    _replacement.reset(token)


def call(name: str, jitted: Callable[..., Any], *args: Any) -> Any:
  """`jitted(*args)`; where programs are noted, the shapes that it would give."""
  programs, replacement = _noted.get(), _replacement.get()
  if programs is not None:
    return _note(programs, name, jitted, args).run()
  return jitted(*args) if replacement is None else replacement(name, jitted, args)


def lower(name: str, jitted: Callable[..., Any], *args: Any) -> jax.stages.Lowered:
  """`jitted.lower(*args)`, which is noted where programs are."""
  programs = _noted.get()
  if programs is None:
    return jitted.lower(*args)  # type: ignore[attr-defined]
  return _note(programs, name, jitted, args).lowered


def _note(
  programs: dict[str, Noted], name: str, jitted: Any, args: tuple[Any, ...]
) -> Noted:
  before = programs.get(name)
  if before is None:
    return programs.setdefault(name, Noted(jitted.lower(*args), args))
  before.calls += 1
  # Lowering anew what is known takes seconds for a large model.
  for known in (before, *before.others):
    if form(known.args) == form(args):
      return known
  before.others.append(Noted(jitted.lower(*args), args))
  return before.others[-1]


def form(args: tuple[Any, ...]) -> Any:
  """What arguments are lowered by: shapes and layouts of arrays, all else itself."""

  def one(leaf: Any) -> Any:
    if not hasattr(leaf, "shape"):
      return leaf
    weak = getattr(leaf, "weak_type", False)
    return leaf.shape, leaf.dtype, weak, getattr(leaf, "sharding", None)

  leaves, structure = jax.tree.flatten(args)
  return structure, tuple(one(leaf) for leaf in leaves)


def shapes_in(tree: Any) -> list[jax.ShapeDtypeStruct]:
  """The shapes of a pytree that stand for arrays of numbers."""
  return [
    x
    for x in jax.tree.leaves(tree)
    if isinstance(x, jax.ShapeDtypeStruct)
    and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
  ]
