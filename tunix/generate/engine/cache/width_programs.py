"""Programs for other widths of rows, compiled in a thread while launches go on."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from tunix.generate.engine.cache.rows import Store
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib

_log = logging.getLogger(__name__)

# A program, and shapes of its arguments, whose rows may have any width.
_Form = tuple[Callable[..., Any], tuple[Any, ...]]


class WidthPrograms:
  """Knows which programs are compiled for which width of rows.

  A width has several programs that take seconds to compile. After `start`, a launch
  runs in wider rows if more of its programs are compiled for them, and a thread
  compiles those of its own width. What no thread has compiled, the launch compiles.

  Attributes:
    kind: kind of the present launch; launches of one kind call the same programs.
  """

  def __init__(self):
    self._is_noting = self._is_on = False
    self.kind: Hashable = None
    # The programs of each kind of launch, by keys that do not depend on the width.
    self._forms: dict[Hashable, dict[Any, _Form]] = collections.defaultdict(dict)
    # Keys of the programs that are compiled, by kind of launch and width.
    self._compiled: dict[tuple[Hashable, int], set[Any]]
    self._compiled = collections.defaultdict(set)
    self._job: _Job | None = None
    self._width = 0  # the last result of `choose`

  def note(self) -> None:
    """Notes the programs that are called with rows from now on, see `noted`."""
    self._is_noting, self._is_on = True, False

  def start(self, width: int) -> None:
    """Starts compiling in threads, with the missing programs of `width` first.

    Does nothing if attention does not read rows, or with several processes: these must
    run the same programs, and time now decides which width a launch has. A thread has
    the mesh of the launch that starts it and no other context of JAX: a launch inside
    `jax.default_matmul_precision`, for example, compiles its programs itself.
    """
    self._is_on = jax.process_count() == 1 and bool(self._forms)
    self._is_noting = self._is_on
    self.choose(width)

  def close(self) -> None:
    """Cancels the thread's remaining programs, without waiting for the present one."""
    self._is_noting = self._is_on = False
    if self._job is not None:
      self._job.is_cancelled = True

  @contextlib.contextmanager
  def noted(self) -> Iterator[None]:
    """Notes the programs that are called inside the block."""
    if not self._is_noting:
      yield
      return
    with programs.observed(self._note):
      yield

  def choose(self, width: int) -> int:
    """Returns the width from `width` on with most of this launch's programs."""
    if not self._is_on:
      return width
    if self._job is not None and self._job.is_done():
      if (error := self._job.error) is not None:
        _log.warning(
          "compiling programs for rows of %d tokens failed: %r; from now on, "
          "completions wait for the programs of new widths",
          self._job.width,
          error,
        )
        self.close()
        return width
      self._compiled[self._job.kind, self._job.width] |= self._job.forms.keys()
      self._job = None
    kind, have = self.kind, self._compiled[self.kind, width]
    wider = [w for k, w in self._compiled if k == kind and w >= width]
    best = min(wider, key=lambda w: (-len(self._compiled[kind, w]), w))
    if best != width and self._job is None:
      forms = self._forms[kind].items()
      missing = {key: form for key, form in forms if key not in have}
      self._job = _Job(kind, width, missing)
    self._width = best
    return best

  def _note(self, name: str, jitted: Callable[..., Any], args: tuple[Any, ...]) -> None:
    have = len(self._compiled.get((self.kind, self._width), ()))
    if self._is_on and have and have == len(self._forms[self.kind]):
      return  # all are known; to find this out below would take the launch some ms
    stores = [x for x in jax.tree.leaves(args, is_leaf=_is_store) if _is_store(x)]
    if not stores:
      return
    leaves, structure = jax.tree.flatten(_shapes(args, 0))
    key = name, structure, tuple(leaves)
    self._compiled[self.kind, stores[0].width].add(key)
    forms = self._forms[self.kind]
    if key not in forms:
      forms[key] = jitted, _shapes(args)


class _Job:
  """A thread that compiles programs for one width of rows.

  Args:
    kind: kind of the launches that call them.
    width: tokens of a row.
    forms: the programs, by their keys.

  Attributes:
    kind, width, forms: the arguments.
    is_cancelled: set it to True to leave out the programs that follow.
    error: what ended the thread early, or None.
  """

  def __init__(self, kind: Hashable, width: int, forms: dict[Any, _Form]):
    self.kind, self.width, self.forms = kind, width, forms
    self.is_cancelled, self.error = False, None
    self._mesh = mesh_lib.current_mesh()
    # Not a daemon: Python's end aborts the process if a daemon thread compiles.
    self._thread = threading.Thread(target=self._run, daemon=False)
    self._thread.name = f"programs of width {width}"
    self._thread.start()

  def is_done(self) -> bool:
    """Returns True once the thread has ended."""
    return not self._thread.is_alive()

  def _run(self) -> None:
    try:
      with mesh_lib.use_mesh(self._mesh):
        for jitted, shapes in self.forms.values():
          if self.is_cancelled or not threading.main_thread().is_alive():
            return
          lowered = jitted.lower(*_shapes(shapes, self.width))  # type: ignore[attr-defined]
          lowered.compile()  # a call with such arguments finds the program in memory
    except Exception as error:  # the next launch reports it
      self.error = error


def _is_store(x: object) -> bool:
  return isinstance(x, Store)


def _shapes(args: Any, width: int | None = None) -> Any:
  """Returns shapes of arguments, with rows of a width; None: of their own."""

  shapes = jax.tree.map(_shape, args)
  if width is None:
    return shapes
  resized = lambda x: x.of_width(width) if _is_store(x) else x
  return jax.tree.map(resized, shapes, is_leaf=_is_store)


def _shape(x: Any) -> Any:
  if not hasattr(x, "dtype"):
    return x
  # JAX compiles other programs for committed arrays than for uncommitted ones.
  is_placed = getattr(x, "committed", isinstance(x, jax.ShapeDtypeStruct))
  return jax.ShapeDtypeStruct(
    x.shape,
    x.dtype,
    sharding=x.sharding if is_placed else None,
    weak_type=getattr(x, "weak_type", False),
  )
