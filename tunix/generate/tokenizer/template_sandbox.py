"""The sandbox in which chat templates run: jinja2 whose work takes steps of a budget.

Loops, calls, operations and long values take the steps; see template_limits.py.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from tunix.generate.tokenizer import template_limits as limits


def _bounded_filter(name: str, function: Any) -> Any:
  """Returns a filter that takes steps for its value and its result."""

  @functools.wraps(function)  # keeps jinja's mark of filters that take the context
  def call(*args: Any, **kwargs: Any) -> Any:
    skipped = int(hasattr(function, "jinja_pass_arg"))
    values = args[skipped:]
    if name == "join" and values:
      values = (list(values[0]), *values[1:])
      args = (*args[:skipped], *values)
    for arg in values:
      limits.spend_read(arg)
    if values:
      limits.check_call(name, (*values, *kwargs.values()))
    return limits.spend(function(*args, **kwargs))

  return call


# jinja's tests that compare or read whole texts.
_READING_TESTS = (
  *("eq", "equalto", "==", "ne", "!=", "in", "lower", "upper"),
  *("lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="),
)


def _reading_test(function: Any) -> Any:
  """Returns a test that takes steps for the texts that it reads."""

  def call(*args: Any) -> Any:
    for arg in args:
      limits.spend_read(arg)
    return function(*args)

  return call


def _bound_tree(template: Any) -> None:
  """Makes loops, `~`, comparisons, slices and literals of a template take steps."""
  import jinja2.nodes as nodes
  import jinja2.visitor

  def spending(node: Any, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

  class Bounds(jinja2.visitor.NodeTransformer):
    def visit_For(self, node: Any) -> Any:
      self.generic_visit(node)
      tick = nodes.EnvironmentAttribute("tick", lineno=node.lineno)
      node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
      if node.test is not None:
        node.test = nodes.And(tick, node.test, lineno=node.lineno)
      return node

    def visit_Operand(self, node: Any) -> Any:
      self.generic_visit(node)
      # Comparing with a literal reads no more than the literal.
      if node.op in ("in", "notin") or not isinstance(node.expr, nodes.Const):
        node.expr = spending(node.expr, "_spend_read")
      return node

    def visit_Getitem(self, node: Any) -> Any:
      self.generic_visit(node)
      if isinstance(node.arg, nodes.Slice):
        return spending(node, "_spend")
      if not isinstance(node.arg, nodes.Const):
        node.arg = spending(node.arg, "_spend")
      return node

    def visit_Concat(self, node: Any) -> Any:
      return spending(self.generic_visit(node), "_spend")

    def visit_List(self, node: Any) -> Any:
      self.generic_visit(node)
      is_target = getattr(node, "ctx", "load") != "load"
      return node if is_target else spending(node, "_spend_all")

    visit_Tuple = visit_Dict = visit_List

  Bounds().visit(template)


@functools.lru_cache(maxsize=1)
def _sandbox() -> Any:
  """Returns the class of jinja's sandbox whose operations take steps."""
  import jinja2.sandbox
  import jinja2.utils

  class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    @property
    def tick(self) -> bool:
      limits.BUDGET.take(1)
      return True

    def _generate(self, source: Any, *args: Any, **kwargs: Any) -> Any:
      _bound_tree(source)
      source.set_environment(self)
      return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
      if operator == "+":
        return limits.spend(left + right)
      limits.check_operation(operator, left, right)
      return limits.spend(super().call_binop(context, operator, left, right))

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
      owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
      if isinstance(owner, str | bytes | list | tuple):
        limits.spend_read(owner)
      for arg in args:
        limits.spend_read(arg)
      if isinstance(owner, str | bytes | int):
        limits.check_call(called.__name__, (owner, *args, *kwargs.values()))
      elif called is dict:
        limits.spend_all((args, kwargs))
      limits.BUDGET.take(limits.STEPS_OF_CALL)
      return limits.spend(super().call(context, called, *args, **kwargs))

  class Namespace(jinja2.utils.Namespace):
    __repr__ = object.__repr__  # the text of namespaces within namespaces has no end

  def build(**options: object) -> Any:
    environment = Sandbox(finalize=limits.spend, **options)
    for name, function in environment.filters.items():
      environment.filters[name] = _bounded_filter(name, function)
    for name in _READING_TESTS:
      environment.tests[name] = _reading_test(environment.tests[name])
    environment.filters["_spend_read"] = limits.spend_read
    environment.filters["_spend"] = limits.spend
    environment.filters["_spend_all"] = limits.spend_all
    environment.globals["namespace"] = Namespace
    del environment.globals["lipsum"]  # texts of any length
    return environment

  return build


@functools.lru_cache(maxsize=1)
def environment() -> Any:
  """Returns the environment of all templates, with the dialect of transformers."""
  import jinja2.ext
  import jinja2.nodes as nodes

  class GenerationBlock(jinja2.ext.Extension):
    """The tag {% generation %}...{% endgeneration %}, between `generation_marks`."""

    tags = {"generation"}  # noqa: RUF012 (jinja's form)

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

      def mark(place: int) -> Any:
        marks = nodes.Name("generation_marks", "load", lineno=line)
        text = nodes.Getitem(marks, nodes.Const(place), "load", lineno=line)
        return nodes.Output([text], lineno=line)

      # As in transformers, `set` inside the block has no effect outside.
      return nodes.Scope([mark(0), *body, mark(1)], lineno=line)

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes <, >, & and ', which tool schemas may hold.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  made = _sandbox()(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[GenerationBlock, jinja2.ext.loopcontrols],
  )
  made.filters["tojson"] = _bounded_filter("tojson", to_json)
  made.globals["raise_exception"] = raise_exception
  return made
