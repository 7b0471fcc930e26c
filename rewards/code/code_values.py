# SPDX-License-Identifier: Apache-2.0
"""Plain values as JSON that keeps their types, and lines of it on pipes; standard library only."""

from __future__ import annotations

import ast
import importlib
import json
import operator
import os
from collections import deque
from collections.abc import Callable
from typing import Any

DEPTH = 50
"""How deep a value may nest."""
SMALL = 2**63
"""Whole numbers from here on cross in base 16: Python limits the digits that it reads in base 10."""


RAW = {bool, str, type(None)}
READ = RAW | {int}
"""Types that JSON keeps by itself, in writing (small numbers too) and in reading."""


class Channel:
    """Records as lines of JSON on a pipe that the code's process does not hold."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def send(self, **record: Any) -> None:
        """Write one record; a pipe that is full waits for its reader."""
        write_line(self.descriptor, record)


def write_line(descriptor: int, record: dict[str, Any]) -> None:
    """One record, all of it."""
    line = memoryview(json.dumps(record).encode() + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


class CatchAll:
    """Keeps whatever the generated code raises, the end of the interpreter included."""

    error: BaseException | None = None

    def __enter__(self) -> CatchAll:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self.error = error
        return True

    def words(self) -> str:
        """The kind of error and the start of its message."""
        with CatchAll() as inner:
            return f"{type(self.error).__name__}: {self.error}"[:300]
        return f"{type(self.error).__name__} ({type(inner.error).__name__} in its message)"


KINDS: dict[str, tuple[Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "int": (lambda v: [hex(v)], lambda kind, text: kind(text, 16)),
    "float": (lambda v: [v.hex()], lambda kind, text: kind.fromhex(text)),
    "complex": (lambda v: [v.real, v.imag], lambda kind, *parts: kind(*parts)),
    "range": (lambda v: [v.start, v.stop, v.step], lambda kind, *parts: kind(*parts)),
    "dict": (lambda v: list(v.items()), lambda kind, *parts: kind(parts)),
    "dict_keys": (list, lambda _, *parts: dict.fromkeys(parts).keys()),
    "dict_values": (list, lambda _, *parts: dict(enumerate(parts)).values()),
    "dict_items": (list, lambda _, *parts: dict(parts).items()),
    "collections.deque": (lambda v: [list(v), v.maxlen], lambda kind, *parts: kind(*parts)),
    "collections.defaultdict": (lambda v: [v.default_factory, dict(v)], lambda kind, *parts: kind(*parts)),
    "datetime.timedelta": (lambda v: [v.days, v.seconds, v.microseconds], lambda kind, *parts: kind(*parts)),
    **dict.fromkeys(("bytes", "bytearray"), (lambda v: [v.hex()], lambda kind, text: kind.fromhex(text))),
    **dict.fromkeys(("list", "tuple", "set", "frozenset"), (list, lambda kind, *parts: kind(parts))),
    **dict.fromkeys(
        ("collections.Counter", "collections.OrderedDict"),
        (lambda v: [dict(v)], lambda kind, parts: kind(parts)),
    ),
    **dict.fromkeys(
        ("fractions.Fraction", "decimal.Decimal"), (lambda v: [str(v)], lambda kind, text: kind(text))
    ),
    **dict.fromkeys(
        ("datetime.date", "datetime.datetime", "datetime.time"),
        (lambda v: [v.isoformat()], lambda kind, text: kind.fromisoformat(text)),
    ),
}
"""Name of a type -> its value as parts, the value of (type, *parts). None, bool and str are themselves."""


def name_of(kind: type) -> str:
    """Under which `KINDS` may have a type."""
    module, name = kind.__module__, kind.__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def find_type(name: str) -> Any:
    """A type of `KINDS` or of Python's own; None for those without a name."""
    module, _, word = name.rpartition(".")
    if (module and name not in KINDS) or word[:1] == "_":
        return None
    kind = getattr(importlib.import_module(module or "builtins"), word, None)
    return kind if isinstance(kind, type) else None


class Codec:
    """Plain values as JSON that keeps their types."""

    def encode(self, value: Any, depth: int = 0) -> Any:
        """The value as JSON.

        Raises:
            TypeError: something that is no plain value, or too deep.
        """
        if depth > DEPTH:
            raise TypeError(f"nests deeper than {DEPTH}")
        kind = type(value)
        if value is None or kind in (bool, str) or (kind is int and abs(value) < SMALL):
            return value
        if isinstance(value, type) and find_type(name_of(value)) is value:
            return {"type": name_of(value)}
        if (known := self.reference(value)) is not None:
            return known
        name = name_of(kind)
        if name in KINDS:
            parts = KINDS[name][0](value)
            if all(type(part) in RAW or (type(part) is int and abs(part) < SMALL) for part in parts):
                return {name: parts}
            return {name: [self.encode(part, depth + 1) for part in parts]}
        if name == "numpy.ndarray" and not value.dtype.hasobject:
            return {"array": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
        if name.startswith("numpy.") and hasattr(value, "item"):
            return self.encode(value.item(), depth + 1)
        if isinstance(value, BaseException):
            parts = [kind, value.args, vars(value), text_of(value)]
            return {"error": [self.encode(part, depth + 1) for part in parts]}
        return self.export(value)

    def decode(self, record: Any) -> Any:
        """The value of what `encode` wrote.

        Raises:
            ValueError, TypeError, KeyError: `encode` did not write this.
        """
        if record is None or isinstance(record, bool | int | str):
            return record
        ((name, parts),) = record.items()
        if name in KINDS:
            inner = [part if type(part) in READ else self.decode(part) for part in parts]
            return KINDS[name][1](find_type(name), *inner)
        if name == "type":
            return find_type(parts)
        if name == "error":
            return error_of(*map(self.decode, parts))
        if name == "array":
            numpy = importlib.import_module("numpy")
            return numpy.frombuffer(bytes.fromhex(parts[2]), parts[0]).reshape(parts[1]).copy()
        return self.resolve(name, parts)

    def reference(self, value: Any) -> Any:
        """What stands for a value that the other side owns, or None."""
        return None

    def export(self, value: Any) -> Any:
        """What stands for an object that is no plain value."""
        raise TypeError(f"a {type(value).__name__} is no plain value")

    def resolve(self, name: str, parts: Any) -> Any:
        """What `reference` and `export` of the other side stand for."""
        raise ValueError(f"no value is written as {name!r}")


def text_of(error: BaseException) -> str:
    """What it says of itself."""
    with CatchAll() as inner:
        return str(error)
    return f"{type(inner.error).__name__} in its message"


def error_of(kind: Any, given: Any, attributes: Any, text: Any) -> BaseException:
    """An exception that is raised here as it was there."""
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        kind = Exception
    try:
        error = kind(*given)
    except TypeError:
        error = kind.__new__(kind)
        error.args = given
    vars(error).update(attributes, __text__=text)
    return error


def renew(old: Any, new: Any) -> Any:
    """What a container of the test becomes after a call: the same object with the new content."""
    if type(old) is not type(new):
        return new
    if type(old) is list:
        old[:] = [*map(renew, old, new), *new[len(old) :]]
    elif type(old) is tuple and len(old) == len(new):
        renewed = tuple(map(renew, old, new))
        return old if all(map(operator.is_, old, renewed)) else renewed
    elif isinstance(old, dict):
        content = {key: renew(old[key], part) if key in old else part for key, part in new.items()}
        old.clear()
        old.update(content)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray | deque):
        old.clear()
        old.extend(new)
    else:
        return new
    return old


PLAIN: tuple[Any, ...] = (int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)


def plain_content(value: Any) -> Any:
    """What an object of a class that extends a plain type holds as such."""
    return next(kind(value) for kind in PLAIN if isinstance(value, kind))


def copied(value: Any, name: str) -> Any:
    """By a function of the copy module."""
    return getattr(importlib.import_module("copy"), name)(value)


def is_stub(node: ast.stmt) -> bool:
    """Whether it is a function that only holds the place of the code's: nothing, an error, a constant."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and all(
        isinstance(part, ast.Expr | ast.Pass | ast.Raise)
        or (isinstance(part, ast.Return) and isinstance(part.value, ast.Constant | None))
        for part in node.body
    )
