"""A Jinja environment in which a hostile or broken template can not run away.

Templates come with checkpoints, so they are foreign code. Jinja's immutable sandbox keeps them from
Python's internals; this adds limits on what they may consume, in any thread and without a signal:

- time: every loop iteration, call, filter and operation looks at the thread's processor time;
- memory: every value that can grow is weighed (fully expanded characters, plus 8 per item) before
  it is built where one operation can multiply it, and right after it is built otherwise. Filters,
  methods and globals that no limit covers do not exist.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

MAX_SECONDS = 5.0  # processor time of one rendering
MAX_WEIGHT = 32_000_000  # of one value, and characters of the output
_MAX_PRODUCED = 8 * MAX_WEIGHT  # by all filters of one rendering: lazy ones can keep results
_MAX_WIDTH = 100_000  # of padding, indentation and batches
_MAX_INTEGER_BITS = 16_384
_ITEM_WEIGHT = 8

_ABSENT_FILTERS = (
    "filesizeformat",
    "forceescape",
    "pprint",
    "random",
    "striptags",
    "urlencode",
    "urlize",
    "wordwrap",
    "xmlattr",
)
_ABSENT_METHODS = {"encode", "expandtabs", "from_bytes", "maketrans", "to_bytes", "translate"}
_PADDING = {"batch", "center", "ljust", "rjust", "round", "slice", "zfill"}
_LONG_NUMBER = re.compile(r"\d{6}")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")


class RunawayTemplate(SecurityError):
    """The template asked for more time or memory than a chat prompt can need."""


class _Budget:
    """What one rendering has used."""

    __slots__ = ("_deadline", "_produced")

    def __init__(self) -> None:
        self._deadline = time.thread_time() + MAX_SECONDS
        self._produced = 0

    def tick(self) -> None:
        if time.thread_time() > self._deadline:
            raise RunawayTemplate(f"it ran for more than {MAX_SECONDS:g} s")

    def produce(self, weight: int) -> None:
        self._produced += weight
        if self._produced > _MAX_PRODUCED:
            raise RunawayTemplate(f"its filters made more than {_MAX_PRODUCED} characters")


_budget: ContextVar[_Budget] = ContextVar("_budget")


def _admit(weight: float) -> None:
    if weight > MAX_WEIGHT:
        raise RunawayTemplate(f"it makes a value or output of more than {MAX_WEIGHT} characters")


def _weigh(value: Any) -> int:
    """Characters of `value` with every shared part counted as often as it is reached.

    Stops soon after MAX_WEIGHT and raises, so it ends on values that are exponentially large.
    """
    if isinstance(value, str):
        _admit(len(value))
        return len(value)
    weight = 0
    stack = [value]
    while stack:
        item = stack.pop()
        weight += _ITEM_WEIGHT
        if isinstance(item, str):
            weight += len(item)
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        elif isinstance(item, _Attributes):
            stack.append(item.attributes())
        _admit(weight + _ITEM_WEIGHT * len(stack))
    return weight


class _Attributes(Namespace):
    """`namespace()`; private names are refused, for they lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` is taken from args so that it can also be the name of an attribute.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        _weigh(attributes)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        _weigh(value)
        Namespace.__setitem__(self, name, value)

    def attributes(self) -> dict[str, Any]:
        found = object.__getattribute__(self, "_Namespace__attrs")
        assert isinstance(found, dict)
        return found

    def __getattribute__(self, name: str) -> Any:
        if name == "attributes":
            return object.__getattribute__(self, name)
        return Namespace.__getattribute__(self, name)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} starts with an underscore")


def _check_operands(name: str, operands: tuple[Any, ...]) -> None:
    """Refuse, before it runs, a filter or method whose result can be larger than its operands."""
    if name in _PADDING:
        for operand in operands[1:]:
            if isinstance(operand, (int, float)) and abs(operand) > _MAX_WIDTH:
                raise RunawayTemplate(f"{name}({operand}) is wider than {_MAX_WIDTH}")
        if name in ("batch", "slice"):
            _admit(_MAX_WIDTH * sum(map(_weigh, operands[2:])))
    elif name == "replace":
        text, old, new = (str(operand) for operand in operands[:3])
        _admit(len(text) + text.count(old) * len(new))
    elif name == "indent":
        width = operands[1] if len(operands) > 1 else 4
        size = len(width) if isinstance(width, str) else int(width)
        text = str(operands[0])
        _admit(len(text) + (text.count("\n") + text.count("\r") + 1) * size)


def _check_format(text: str, marker: str, operands: Iterable[Any]) -> None:
    """`marker` opens a field: "%" or "{". Widths may stand in the text or in operands."""
    values = list(operands)
    _admit(len(text) + text.count(marker) * sum(map(_weigh, values)))
    takes_widths = "*" in text if marker == "%" else _NESTED_FIELD.search(text) is not None
    if any(_LONG_NUMBER.search(str(part)) for part in (text, *(values if takes_widths else ()))):
        raise RunawayTemplate("a format holds a number of six digits or more")


def _join(separator: Any, values: Iterable[Any]) -> list[Any]:
    """`values` as a list, which is refused if joining it would give too long a text."""
    items: list[Any] = []
    weight = 0
    step = len(str(separator))
    for item in values:
        weight += _weigh(item) + step
        _admit(weight)
        items.append(item)
    return items


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    own = 1 if hasattr(function, "jinja_pass_arg") else 0  # arguments that Jinja itself gives

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.tick()
        operands = args[own:]
        if kwargs:
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            operands = bound.args[own:]
        if name == "join":
            separator = operands[1] if len(operands) > 1 else ""
            args = (*args[:own], _join(separator, args[own]), *args[own + 1 :])
        elif name == "format":
            _check_format(str(args[own]), "%", operands[1:])
        else:
            _check_operands(name, operands)
        result = function(*args, **kwargs)
        budget.produce(_weigh(result))
        return result

    return guarded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escaping of HTML, which is no part of a prompt."""
    if isinstance(value, Undefined):
        raise jinja2.UndefinedError("tojson was given a value that is undefined")
    _weigh(value)
    if isinstance(indent, int) and indent > _MAX_WIDTH:
        raise RunawayTemplate(f"tojson(indent={indent}) is wider than {_MAX_WIDTH}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    # Indentation multiplies with depth: watch the text grow instead of guessing.
    chunks = []
    length = 0
    for chunk in encoder.iterencode(value):
        length += len(chunk)
        _admit(length)
        chunks.append(chunk)
    return "".join(chunks)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@pass_context
def _weighed_output(context: Context, value: Any) -> Any:
    _weigh(value)
    return value


class _Generator(CodeGenerator):
    """Compiles literals and `~` into calls of the environment, which weighs them."""

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.weighed(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.weighed(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.weighed(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates: what transformers offers them, with the limits above."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            # Folding constants would run operations while compiling, outside any limit.
            optimized=False,
            finalize=_weighed_output,
        )
        self.filters["tojson"] = _to_json
        for name in _ABSENT_FILTERS:
            del self.filters[name]
        self.filters = {name: _guarded(name, filter) for name, filter in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "dict": _new_dict,
            "namespace": _Attributes,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render within a fresh budget. Raises whatever the template raises."""
        token = _budget.set(_Budget())
        try:
            return template.render(variables)
        finally:
            _budget.reset(token)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick")))
        return tree

    @property
    def tick(self) -> None:
        """Read by compiled loops at the start of each iteration."""
        _budget.get().tick()

    def weighed(self, value: Any) -> Any:
        _weigh(value)
        return value

    def joined(self, values: tuple[Any, ...]) -> str:
        _budget.get().tick()
        _admit(sum(map(_weigh, values)))
        return str_join(values)

    def concat(self, parts: Iterable[str]) -> str:
        length = 0
        kept = []
        for part in parts:
            length += len(part)
            _admit(length)
            kept.append(part)
        return "".join(kept)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _ABSENT_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__

        @functools.wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(text, "{", (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().tick()
        receiver = getattr(__obj, "__self__", None)
        if isinstance(receiver, str):
            if __obj.__name__ == "join" and args:
                args = (_join(receiver, args[0]), *args[1:])
            else:
                _check_operands(__obj.__name__, (receiver, *args, *kwargs.values()))
        result = super().call(__context, __obj, *args, **kwargs)
        _weigh(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget.get().tick()
        if operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(sized, (str, list, tuple)) and isinstance(count, int):
                    _admit((_weigh(sized) + _ITEM_WEIGHT) * count)
            if isinstance(left, int) and isinstance(right, int):
                _admit_bits(left.bit_length() + right.bit_length())
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _admit_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, (tuple, dict)) else (right,)
            _check_format(left, "%", values.values() if isinstance(values, dict) else values)
        elif isinstance(left, str) and isinstance(right, str):
            _admit(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        _weigh(result)
        return result


def _admit_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise RunawayTemplate(f"it makes a number of more than {_MAX_INTEGER_BITS} bits")
