# SPDX-License-Identifier: Apache-2.0
"""Tests and the code that they judge, in two processes that exchange plain values; standard library only.

The code's process runs the code and answers questions: what stands under a name, what a call gives, what an
attribute is. The judge's process runs the tests and writes the verdicts; it never imports or executes the
code, and what it does with an answer is Python's own doing:

- Plain values (`code_values.KINDS`, of exactly these types) cross the pipe as copies. What a call changes in
  the lists, dicts and sets that it was given is changed in the test's own afterwards.
- Any other object stays where it is, and the test holds a `Handle`: calls, attributes, items, length,
  iteration, text and `with` are the code's word, as a returned number is. Comparison, arithmetic, `in`, hash
  and truth never are: a handle has none of these (truth: an object whose class defines none is true, as in
  Python), or those of its plain content where it extends a list, int or other plain type.
- Functions and iterators of a test that the code is given can be called and advanced by it, nothing else.
- A module that the code imported under its own name (or numpy as np) is imported again for the test; names
  of builtins are Python's, unless a test names nothing else that the code could define.
- Source that stands before the code is run here too, see `helpers`: its functions and plain values are its
  own, whatever the code puts under their names (what a test hands to the code may be changed by it). Its
  classes are the code's, so that their objects can be too, and so are functions that only hold a place.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import io
import json
import operator
import os
import sys
import types
from _thread import RLock
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from . import code_values as values
    from .code_values import Channel
else:
    values = importlib.import_module("code_values")
CatchAll, Codec = values.CatchAll, values.Codec


class Link(Codec):
    """One end of the talk: it asks, and answers what is asked while it waits."""

    def __init__(
        self,
        reading: int,
        writing: int,
        actions: dict[str, Callable[..., Any]],
        image: Callable[[Link, int], Any],
        may_leave: Callable[[Any], bool],
        gone: Callable[[], Any],
    ) -> None:
        """Join the pipes.

        Args:
            reading: end of a pipe.
            writing: end of another.
            actions: what the other side may ask for.
            image: makes what stands here for an object of the other side, from its number.
            may_leave: whether the other side may ask for things to be done with an object.
            gone: what to do when the other side has ended or speaks another language; it does not return.
        """
        self._reader, self._writing = os.fdopen(reading, "rb"), writing
        self._actions, self._image, self._may_leave, self._gone = actions, image, may_leave, gone
        self._lock = RLock()
        self._mine: dict[int, Any] = {}
        self._theirs: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self.last: Any = None
        """What the other side answered last."""
        self.names: dict[str, Any] = {}
        """Functions and classes of the other side by their names."""

    def receive(self) -> dict[str, Any]:
        """The next message."""
        with CatchAll():
            message = json.loads(self._reader.readline())
            if isinstance(message, dict) and message.keys() & {"do", "value", "error"}:
                return message
        return self._gone()

    def ask(self, action: str, *given: Any, **named: Any) -> Any:
        """The answer of the other side, or its exception, with what it did to containers and streams."""
        question = {"do": action, "given": self.encode([list(given), named])}
        if sys.stdout is not sys.__stdout__:
            question["prints"] = True
        if action == "call" and sys.stdin is not sys.__stdin__:
            question["types"] = sys.stdin.read()
        with self._lock:
            values.write_line(self._writing, question)
            while "do" in (message := self.receive()):
                self.answer(message)
        if message.get("printed"):
            sys.stdout.write(str(message["printed"]))
        if "types" in question:
            sys.stdin = io.StringIO(message.get("unread"))
        if "after" in message:
            values.renew([list(given), named], self.decode(message["after"]))
        if "error" in message:
            raise self.decode(message["error"])
        self.last = self.decode(message["value"])
        return self.last

    def answer(self, message: dict[str, Any]) -> None:
        """Do what is asked, and say what came of it."""
        streams, reply = (sys.stdout, sys.stdin), {}
        with CatchAll() as attempt:
            if "prints" in message:
                sys.stdout = io.StringIO()
            if "types" in message:
                sys.stdin = io.StringIO(message["types"])
            arguments = self.decode(message["given"])
            with CatchAll() as action:
                value = self._actions[message["do"]](*arguments[0], **arguments[1])
            if (after := self.encode(arguments)) != message["given"]:
                reply["after"] = after
            name, found = ("value", value) if action.error is None else ("error", action.error)
            reply[name] = self.encode(found)
        if attempt.error is not None:
            reply = {"error": self.encode(TypeError(values.text_of(attempt.error)))}
        if isinstance(sys.stdout, io.StringIO):
            reply["printed"] = sys.stdout.getvalue()
        if isinstance(sys.stdin, io.StringIO):
            reply["unread"] = sys.stdin.read()
        sys.stdout, sys.stdin = streams
        values.write_line(self._writing, reply)

    def reference(self, value: Any) -> Any:
        number = self._numbers.get(id(value), 0)
        return {"yours" if number > 0 else "mine": abs(number)} if number else None

    def number(self, value: Any) -> int:
        """Of an object of this side: it is kept, so that its identity is its own."""
        if id(value) not in self._numbers:
            self._mine[len(self._mine) + 1] = value
            self._numbers[id(value)] = -len(self._mine)
        return -self._numbers[id(value)]

    def export(self, value: Any) -> Any:
        return {"mine": self.number(value)} if self._may_leave(value) else super().export(value)

    def resolve(self, name: str, parts: Any) -> Any:
        if name == "yours":
            return self._mine[parts]
        if name != "mine" or type(parts) is not int or parts < 1:
            raise ValueError(f"no value is written as {name!r}")
        return self.theirs(parts)

    def theirs(self, number: int) -> Any:
        """What stands here for an object of the other side, always the same."""
        if number not in self._theirs:
            self._theirs[number] = self._image(self, number)
            self._numbers[id(self._theirs[number])] = number
        return self._theirs[number]


# the process of the code


class Outside:
    """A function or an iterator of the test."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._link.ask("call", self, *given, **named)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._link.ask("next", self)


def call(function: Any, /, *given: Any, **named: Any) -> Any:
    """The function's answer."""
    return function(*given, **named)


def serve(source: str, reading: int, writing: int) -> None:
    """Run the code as a module when asked to, and answer questions about it to the end."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module

    def load() -> str | None:
        with CatchAll() as attempt:
            exec(compile(source, "solution.py", "exec"), module.__dict__)
        return attempt.words() if attempt.error is not None else None

    def describe(number: int) -> list[Any]:
        """Of a class: name, bases, has it plain content, a truth of its own; of an object: its class."""
        value = link.resolve("yours", number)
        if not isinstance(value, type):
            return [link.number(type(value))]
        truth = any({"__bool__", "__len__"} & vars(kind).keys() for kind in value.__mro__)
        bases = [base if issubclass(base, BaseException) else link.number(base) for base in value.__bases__]
        return [value.__name__, bases, issubclass(value, values.PLAIN), truth]

    actions = {
        "load": load,
        "describe": describe,
        "name": module.__dict__.__getitem__,
        "names": lambda: [name for name in module.__dict__ if name[:1] != "_"],
        "content": values.plain_content,
        "call": call,
        "enter": lambda value: type(value).__enter__(value),
        "exit": lambda value, *error: type(value).__exit__(value, *error),
        "getitem": operator.getitem,
        "setitem": operator.setitem,
        "delitem": operator.delitem,
        "copy": lambda value: values.copied(value, "copy"),
        "deepcopy": lambda value, _=None: values.copied(value, "deepcopy"),
    }
    for function in (getattr, setattr, delattr, len, iter, next, reversed, str, repr, format):
        actions[function.__name__] = function
    link = Link(reading, writing, actions, lambda link, _: Outside(link), lambda _: True, lambda: os._exit(0))
    while True:
        link.answer(link.receive())


# the process of the judge


def asked(action: str) -> Callable[..., Any]:
    """A method that asks the code."""

    def method(self: Any, *given: Any, **named: Any) -> Any:
        try:
            return self.__link__.ask(action, self, *given, **named)
        except StopIteration as error:  # it would end a map or zip of the test
            if action == "next":
                raise
            raise RuntimeError("the code raised StopIteration") from error

    return method


class Mirror(type):
    """What the test holds of a class of the code."""

    __link__: Link
    __content__ = __truth__ = False
    __call__ = asked("call")
    __getattr__, __getitem__, __iter__, __len__ = map(asked, ("getattr", "getitem", "iter", "len"))

    def __bool__(cls) -> bool:
        return True

    def __setattr__(cls, name: str, value: Any) -> None:
        cls.__link__.ask("setattr", cls, name, value)


def content(value: Any) -> Any:
    """A plain value itself, or the plain content of an object of the code.

    Raises:
        TypeError: it has none.
    """
    kind = type(value)
    if not isinstance(kind, Mirror):
        return value
    if not kind.__content__:
        raise TypeError(f"a {kind.__name__} is no plain value")
    return kind.__link__.ask("content", value)


def judged(operation: Callable[..., Any]) -> Callable[..., Any]:
    """A method that computes with plain content only."""
    return lambda self, *others: operation(content(self), *map(content, others))


class Handle(metaclass=Mirror):
    """What the test holds of an object of the code."""

    def __eq__(self, other: object) -> bool:
        return other is self or (other is not None and content(self) == content(other))

    def __hash__(self) -> int:
        return hash(content(self)) if type(self).__content__ else id(self)

    def __bool__(self) -> bool:
        return bool(content(self)) if type(self).__content__ or type(self).__truth__ else True


QUESTIONS = (
    "getattr setattr delattr call getitem setitem delitem len iter next reversed str repr format "
    "enter exit copy deepcopy"
).split()
SWAPPED = "add sub mul truediv floordiv mod pow and or xor".split()
OPERATORS = [*SWAPPED, *"lt le gt ge contains neg pos abs invert index".split()]


def swapped(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation with its sides exchanged."""
    return lambda one, other: operation(other, one)


def complete(handle: type) -> None:
    """Give a class the methods that ask, and those that compute with plain content."""
    methods = {name: asked(name) for name in QUESTIONS}
    methods |= {name: judged(getattr(operator, f"__{name}__")) for name in OPERATORS}
    methods |= {f"r{name}": judged(swapped(getattr(operator, f"__{name}__"))) for name in SWAPPED}
    methods |= {kind.__name__: judged(kind) for kind in (int, float, complex, round)}
    for name, method in methods.items():
        type.__setattr__(handle, f"__{name}__", method)


complete(Handle)


def image_of(link: Link, number: int) -> Any:
    """A class like the code's, or an object of such a class."""
    name, *more = link.ask("describe", number)
    if not more:
        return object.__new__(link.theirs(name))
    bases, has_content, has_truth = more
    mirrored = [base if isinstance(base, type) else link.theirs(base) for base in bases]
    if errors := tuple(base for base in mirrored if issubclass(base, BaseException)):
        return type(str(name), errors, {"__str__": lambda self: vars(self).get("__text__") or ""})
    namespace = {"__link__": link, "__content__": has_content, "__truth__": has_truth}
    return Mirror(str(name), tuple(mirrored) or (Handle,), namespace)


class Names(dict):  # type: ignore[type-arg]
    """The names of one test: its own, then those of the code."""

    def __init__(self, link: Link, tree: ast.AST, is_test: bool = True) -> None:
        """See the names that the test reads and writes.

        Args:
            link: to the code.
            tree: of the test.
            is_test: whether it must name something of the code.
        """
        super().__init__(__name__="test")
        self._link = link
        read, made, self._of_modules = set(), set(), dict[str, set[str]]()
        imports = False
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (read if isinstance(node.ctx, ast.Load) else made).add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                self._of_modules.setdefault(node.value.id, set()).add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                imports |= node.module == "solution" and node.names[0].name != "*"
            elif isinstance(node, ast.alias | ast.Constant):
                word = node.name if isinstance(node, ast.alias) else node.value
                imports |= word == "solution"
            made |= {getattr(node, key) for key in ("name", "asname", "arg") if hasattr(node, key)}
        named = read - made
        self._asks_builtins = is_test and not imports and not named - vars(builtins).keys()
        if self._asks_builtins and len(named) > 1:
            raise NameError(
                f"only Python's own names are in the test ({', '.join(sorted(named))}): import what it "
                "tests from solution"
            )

    def __missing__(self, name: str) -> Any:
        if name[:2] == "__" or (hasattr(builtins, name) and not self._asks_builtins):
            raise KeyError(name)
        if name in self._link.names:
            return self._link.names[name]
        if name in self._of_modules and name in {*sys.stdlib_module_names, "np", "numpy"}:
            with contextlib.suppress(ImportError):
                module = importlib.import_module("numpy" if name == "np" else name)
                if all(hasattr(module, word) for word in self._of_modules[name]):
                    return module
        try:
            value = self._link.ask("name", name)
        except KeyError:
            if hasattr(builtins, name):
                raise NameError(f"the code defines no {name}") from None
            raise
        if type(value).__name__ == "module" and name in {*sys.stdlib_module_names, "np", "numpy"}:
            return importlib.import_module("numpy" if name == "np" else name)
        if isinstance(value, Mirror) or type(value).__name__ == "function":
            self._link.names[name] = value
        return value


class Solution(types.ModuleType):
    """The code as a module, for tests that import it."""

    def __init__(self, link: Link) -> None:
        super().__init__("solution")
        self.__link__ = link

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [word for word in self.__link__.ask("names") if not hasattr(builtins, str(word))]
        try:
            return self.__link__.ask("name", name)
        except KeyError:
            raise AttributeError(f"module 'solution' has no attribute {name!r}") from None


class Contents(Codec):
    """Plain values, objects of the code by their plain content."""

    def export(self, value: Any) -> Any:
        inner = content(value)
        return super().export(value) if inner is value else self.encode(inner)


def judge_link(reading: int, writing: int, gone: Callable[[], Any]) -> Link:
    """The judge's end of the talk: the code may call functions of the tests and advance their iterators."""

    def own(value: Any) -> Any:
        if "mine" not in (link.reference(value) or {}):
            raise TypeError(f"a {type(value).__name__} was not given to the code")
        return value

    actions = {
        "call": lambda function, /, *given, **named: own(function)(*given, **named),
        "next": lambda iterator: next(own(iterator)),
    }
    link = Link(
        reading,
        writing,
        actions,
        image_of,
        lambda value: callable(value) or isinstance(value, Iterator),
        gone,
    )
    type.__setattr__(Handle, "__link__", link)
    return link


def helpers(setup: str, link: Link) -> dict[str, Any]:
    """Functions and plain values of the source before the code, run here; no functions without a body."""
    try:
        tree = ast.parse(setup)
    except SyntaxError:  # the head of a function whose body is the code
        return {}
    empty = {getattr(node, "name", "") for node in tree.body if values.is_stub(node)}
    names = Names(link, tree, is_test=False)
    exec(compile(tree, "setup", "exec"), names)

    def is_own(name: str, value: Any) -> bool:
        if callable(value):
            kind = value if isinstance(value, type) else type(value)
            return name not in empty and kind.__module__ != names["__name__"]
        with CatchAll() as attempt:
            Codec().encode(value)
        return attempt.error is None or isinstance(value, types.ModuleType)

    own = {name: value for name, value in names.items() if name[:2] != "__" and is_own(name, value)}
    for name in names.keys() - own.keys() - {"__name__", "__builtins__"}:
        del names[name]  # its functions find the code's instead
    return own


def shown(value: Any) -> str:
    """A value in a remark."""
    kind = type(value)
    return f"a {kind.__name__}" if isinstance(kind, Mirror) else f"{value!r:.60}"


def judge(setup: str, tests: list[dict[str, Any]], link: Link, channel: Channel) -> None:
    """Make the setup, have the code loaded behind it, then run each test; one record for each."""
    sys.modules["solution"] = solution = Solution(link)
    mine: dict[str, Any] = {}
    channel.send(ready=True)  # the setup may end this process before the code's has said so
    with CatchAll() as attempt:
        mine = helpers(setup, link)
    channel.send(setup=None if attempt.error is None else f"raised {attempt.words()}")
    if attempt.error is not None:
        return
    if (failed := link.ask("load")) is not None:
        channel.send(load_error=str(failed))
        return
    link.names.update(mine)
    for number, test in enumerate(tests):
        link.last, value = None, None
        with CatchAll() as attempt:
            if "assert" in test:
                tree = ast.parse(test["assert"])
                exec(compile(tree, f"test {number + 1}", "exec"), Names(link, tree))
            else:
                function: Any = solution
                for part in test["call"].split("."):
                    function = function() if isinstance(function, type) else function
                    function = getattr(function, part)
                value = Contents().encode(function(*test.get("args", ()), **test.get("kwargs", {})))
        if attempt.error is None:
            channel.send(test=number, value=value)
            continue
        words = attempt.words()
        if isinstance(attempt.error, AssertionError):
            with CatchAll():
                words = f"{words.rstrip(': ')}; the code answered {shown(link.last)} last"
                if own := mine.keys() & {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}:
                    words += f"; {', '.join(sorted(own))} of the setup was taken"
        channel.send(test=number, error=words)
