# SPDX-License-Identifier: Apache-2.0
"""Tests of code that see it through plain values: honest programs pass, forgeries do not."""

from __future__ import annotations

import math
import re
import sys

import pytest

from tests.support.sandbox import HERE, QUICK
from visalign.rewards.code.code_values import Codec, renew
from visalign.rewards.code.reward import CodeTests
from visalign.rewards.code.sandbox import SandboxLimits

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is exercised on Linux"),
    pytest.mark.filterwarnings("default:The code sandbox runs code with isolation='process'"),
]
# ruff: noqa: E501  # the tables below are programs
HONEST = r"""
import collections, contextlib, dataclasses, enum, fractions, decimal, datetime, math
from typing import List
def f(x): return x * x
class Stack:
    size = 3
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self):
        if not self.items: raise Empty("nothing", 3)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, k): return self.items[k]
    def __str__(self): return f"Stack({self.items})"
    @classmethod
    def of(cls, *items):
        s = cls(); s.items += items; return s
    @property
    def top(self): return self.items[-1]
    def __enter__(self): return self
    def __exit__(self, *e): self.items.clear()
class Empty(ValueError):
    def __init__(self, word, code): super().__init__(word); self.code = code
class Words(Empty):
    def __str__(self): return f"code {self.code}"
class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
def chain(xs):
    head = None
    for x in reversed(xs): head = Node(x, head)
    return head
def length(node):
    n = 0
    while node: n, node = n + 1, node.next
    return n
Point = collections.namedtuple("Point", "x y")
@dataclasses.dataclass
class Pair: a: int; b: int = 2
class Color(enum.Enum): RED = 1; BLUE = 2
class Level(enum.IntEnum): LOW = 1
class Bag(list):
    def total(self): return total(self)
def words(text): return collections.Counter(text.split())
def groups(xs):
    d = collections.defaultdict(list)
    for x in xs: d[x % 2].append(x)
    return d
def sort_in_place(xs): xs.sort()
def zero(m):
    for r in m:
        for i in range(len(r)): r[i] = 0
def put(d): d["k"] = 1
def fill(s): s.add(3)
def half(x): return fractions.Fraction(x, 2)
def price(x): return decimal.Decimal(x) * 2
def day(): return datetime.date(2024, 2, 29) + datetime.timedelta(days=1)
def apply(g, *xs): return [g(x) for x in xs]
def adder(n): return lambda x: x + n
def twice(g):
    def inner(*a): return g(g(*a))
    return inner
def total(xs):
    t = 0
    for x in xs: t += x
    return t
def count():
    n = 0
    while True: yield n; n += 1
def hello(): print("hello"); return None
def ask(): return int(input()) + 1
def bad(x):
    if x < 0: raise ValueError("negative")
    raise Words("w", 7)
@contextlib.contextmanager
def opened():
    yield 5
def fact(n): return math.factorial(n)
def sum(a, b): return a + b
def save(path): open(path, "w").write("text")
memo = {}
def remember(k): memo[k] = True
def ranges(): return range(3), {1: 2}.keys(), b"x", bytearray(b"y"), 1j, None, True
def guess(): return int
def kinds(x): return isinstance(x, (list, tuple))
def solution(n): return n + 1
def swap(items, key): return sorted(items, key=key)
"""
TESTS = r"""
assert f(2) == 4 and f(-1.5) == 2.25

assert abs(f(0.1) - 0.01) < 1e-9

import math
assert math.isclose(f(0.1), 0.01) and math.floor(f(1.5)) == 2

assert math.isclose(f(2), 4.0)

def check(candidate):
    for x in range(5):
        assert candidate(x) == x ** 2, "no"
check(f)

s = Stack()
s.push(1)
assert s.pop() == 1

s = Stack()
s.push(1).push(2)
assert len(s) == 2 and list(s) == [1, 2] and s[0] == 1 and s.top == 2 and s.items == [1, 2]

assert Stack.of(1, 2).pop() == 2 and Stack.size == 3 and str(Stack.of(1)) == "Stack([1])" and f"{Stack.of(1)}" == "Stack([1])"

s = Stack()
assert isinstance(s, Stack) and type(s) is Stack and type(s).__name__ == "Stack" and hasattr(s, "push") and not hasattr(s, "x")

s = Stack()
s.name = "x"
assert s.name == "x"

with Stack.of(1) as s:
    assert s.pop() == 1

try:
    Stack().pop()
except Empty as e:
    assert str(e) == "nothing" and e.code == 3 and isinstance(e, ValueError) and e.args == ("nothing",)
else:
    assert False

try:
    bad(-1)
    assert False
except ValueError as e:
    assert str(e) == "negative"

try:
    bad(1)
except Exception as e:
    assert type(e).__name__ == "Words" and str(e) == "code 7"
else: assert False

try:
    Stack().pop()
    raised = False
except:
    raised = True
assert raised

n = chain([1, 2, 3])
seen = []
while n:
    seen.append(n.val)
    n = n.next
assert seen == [1, 2, 3]

n = chain([1, 2])
while n != None:
    n = n.next
assert n is None and chain([]) is None and chain([1]) is not None

n = Node(1)
n.next = Node(2)
assert length(n) == 2 and n.next.val == 2

p = Point(1, 2)
assert p == (1, 2) and p.x == 1 and p[1] == 2 and len(p) == 2 and list(p) == [1, 2]

a, b = Point(1, 2)
assert a + b == 3 and [Point(1, 2)] == [(1, 2)] and {Point(1, 2): 3}[(1, 2)] == 3

p = Pair(1)
assert p.a == 1 and p.b == 2 and repr(p) == "Pair(a=1, b=2)"

assert Color.RED is Color.RED and Color.RED == Color(1) and Color.RED != None and Color.RED.name == "RED" and [c.value for c in Color] == [1, 2] and Color["BLUE"].value == 2

assert Level.LOW == 1 and Level.LOW + 1 == 2 and Level.LOW.name == "LOW" and Level.LOW < 2

b = Bag([3, 1])
b.append(2)
assert b.total() == 6 and b == [3, 1, 2] and sorted(b) == [1, 2, 3] and 2 in b and b

assert words("a b a") == {"a": 2, "b": 1} and words("a")["z"] == 0 and words("a a").most_common(1) == [("a", 2)]

from collections import Counter
assert words("a b") == Counter(["a", "b"]) and Counter(words("a")) == Counter("a")

assert groups([1, 2, 3]) == {0: [2], 1: [1, 3]} and dict(groups([1]))[1] == [1] and groups([])[5] == []

a = [3, 1, 2]
sort_in_place(a)
assert a == [1, 2, 3]

m = [[1, 2], [3]]
row = m[0]
assert zero(m) is None
assert m == [[0, 0], [0]] and row == [0, 0]

d = {}
put(d)
assert d == {"k": 1}

s = {1}
fill(s)
assert s == {1, 3}

assert half(3) * 2 == 3 and -half(2) == -1 and half(1) == 0.5 and half(1).numerator == 1

from decimal import Decimal
assert price("1.1") == Decimal("2.2")

assert str(day()) == "2024-03-01" and day().month == 3

assert day() == datetime.date(2024, 3, 1)

assert apply(lambda x: x + 1, 1, 2) == [2, 3] and apply(str, 1) == ["1"] and apply(len, "ab") == [2]

def g(x): raise KeyError(x)
try:
    apply(g, 1)
except KeyError as e:
    assert e.args == (1,)
else: assert False

assert adder(2)(3) == 5 and twice(adder(2))(0) == 4 and twice(lambda x: x * 3)(1) == 9

assert list(map(f, [1, 2])) == [1, 4] and sorted([2, -3], key=f) == [2, -3] and max([1, -4], key=f) == -4

assert total(x for x in range(4)) == 6 and total(iter([1])) == 1 and total({1: 2}.keys()) == 1 and total(range(3)) == 3

import itertools
assert list(itertools.islice(count(), 3)) == [0, 1, 2]

c = count()
assert next(c) == 0 and next(c) == 1

import io, contextlib
out = io.StringIO()
with contextlib.redirect_stdout(out):
    hello()
assert out.getvalue() == "hello\n"

import io, sys
sys.stdin = io.StringIO("4\n")
assert ask() == 5

with opened() as x:
    assert x == 5

assert fact(30) == 265252859812191058636308480000000 and fact(2000) % 2003 == fact(2000) % 2003

assert sum(10, 15) == 25

from solution import Stack as S, f as g
import solution as sol
assert g(3) == 9 and S.of(2).pop() == 2 and sol.f(2) == 4

from solution import *
assert f(2) == 4

save("out.txt")
assert open("out.txt").read() == "text"

remember("a")
assert memo == {"a": True}

assert ranges() == (range(3), {1}, b"x", b"y", 1j, None, True)

assert guess() is int and kinds([1]) and kinds((1,)) and not kinds({1})

assert solution(1) == 2

assert swap(["bb", "a"], key=len) == ["a", "bb"] and swap([(1, "b"), (0, "c")], key=lambda t: t[1]) == [(1, "b"), (0, "c")]

import copy
s = Stack.of(1)
t = copy.deepcopy(s)
t.push(2)
assert len(s) == 1 and len(t) == 2

import random
random.seed(0)
for _ in range(20):
    x = random.randint(-9, 9)
    assert f(x) == x * x

class T:
    def run(self): return f(3)
assert T().run() == 9

import unittest
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(f(2), 4)
        self.assertRaises(ValueError, bad, -1)
r = unittest.TestResult()
unittest.defaultTestLoader.loadTestsFromTestCase(T).run(r)
assert r.wasSuccessful() and r.testsRun == 1, r.failures + r.errors

x: List[int] = [1]
def h(a: List[int]): return a
assert h(x) == [1]

assert not f(0) and (f(1) or f(2)) and f(2) in (4, 5) and f(2) not in {1}

import json
assert json.loads(json.dumps({"a": f(2)})) == {"a": 4}

assert {f(1): f(2)} == {1: 4} and {f(1), f(2)} == {4, 1} and (f(1), [f(2)]) == (1, [4])

assert callable(f) and f.__name__ == "f"
"""
"""Tests of `HONEST`, divided by blank lines."""
FORGERIES = dict(
    re.findall(
        r"## (.*)\n((?:(?!## ).*\n)+)",
        r"""
## os._exit before the tests
import os
os._exit(0)
## os._exit in a call
import os
def f(x): os._exit(0)
## atexit
import atexit, os
atexit.register(os._exit, 0)
def f(x): raise SystemExit(0)
## a trace
import sys
sys.settrace(lambda *_: sys.exit(0))
def f(x): return 3
## builtins
import builtins
builtins.abs = builtins.compile = builtins.exec = builtins.isinstance = lambda *a, **k: 0
def f(x): return 3
## builtins in its globals
abs = all = len = isinstance = lambda *a: 0
def f(x): return 3
## the kind of error
import builtins
builtins.AssertionError = None
def f(x): return 3
## tests found in memory
import gc
for o in gc.get_objects():
    if type(o) is dict and 'assert' in o: o['assert'] = 'pass'
def f(x): return 3
## a number with its own ==
class I(int):
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
    __sub__ = __rsub__ = __add__ = lambda *_: 0
    __hash__ = int.__hash__
def f(x): return I(3)
## a text with its own ==
class S(str):
    __eq__ = lambda *_: True
    __hash__ = str.__hash__
def f(x): return S('3')
## a list with its own ==
class L(list):
    __eq__ = __contains__ = lambda *_: True
def f(x): return L([3])
## a float that is everywhere near
class D(float):
    __sub__ = __rsub__ = lambda *_: 0.0
    __float__ = lambda s: 3.0
    __eq__ = lambda *_: True
    __hash__ = float.__hash__
def f(x): return D(3)
## an object equal to everything
class E(object):
    __eq__ = __ge__ = __le__ = __lt__ = __gt__ = __contains__ = __bool__ = __hash__ = lambda *_: True
    __ne__ = lambda *_: False
    __sub__ = __add__ = __abs__ = __getitem__ = __radd__ = __rsub__ = lambda *_: E()
    __float__ = lambda s: 3.0
    __len__ = __index__ = __int__ = lambda s: 3
    __iter__ = lambda s: iter((E(),))
    __getattr__ = lambda s, n: E()
    __call__ = lambda *a, **k: E()
def f(x): return E()
## a class that is equal
class M(type):
    __eq__ = __instancecheck__ = lambda *_: True
    __hash__ = lambda s: 4
class f(metaclass=M):
    def __new__(cls, x): return cls
## an object that says int
class E(object):
    __eq__ = __ge__ = __le__ = __lt__ = __gt__ = __contains__ = __bool__ = __hash__ = lambda *_: True
    __ne__ = lambda *_: False
    __sub__ = __add__ = __abs__ = __getitem__ = __radd__ = __rsub__ = lambda *_: E()
    __float__ = lambda s: 3.0
    __len__ = __index__ = __int__ = lambda s: 3
    __iter__ = lambda s: iter((E(),))
    __getattr__ = lambda s, n: E()
    __call__ = lambda *a, **k: E()
    __class__ = int
E.__name__ = E.__qualname__ = 'int'
E.__module__ = 'builtins'
def f(x): return E()
## a class with the name of a text
class N(str):
    __eq__ = lambda *_: True
    __hash__ = str.__hash__
class E:
    __eq__ = lambda *_: True
    __hash__ = None
E.__name__ = N('int')
def f(x): return E()
## mock.ANY
from unittest.mock import ANY
def f(x): return ANY
## a mock
from unittest.mock import MagicMock
def f(x):
    m = MagicMock()
    m.__eq__.return_value = True
    m.__sub__.return_value = 0
    return m
## an answer that unpickles well
class P:
    __reduce__ = lambda s: (int, ('4',))
def f(x): return P()
## threads that write everywhere
import os, threading
def w():
    for fd in range(3, 60):
        try: os.write(fd, b'{}\n')
        except OSError: pass
threading.Thread(target=w).start()
def f(x): return 3
## a verdict on every pipe
import os, json
line = lambda **r: b'\n' + json.dumps(r).encode() + b'\n'
for fd in range(1, 64):
    try: os.write(fd, line(test=0, value=None) + line(ended=0))
    except OSError: pass
def f(x): return 3
## a verdict in a thread
import os, json
line = lambda **r: b'\n' + json.dumps(r).encode() + b'\n'
import threading, time
def w():
    while True:
        for fd in range(1, 64):
            try: os.write(fd, line(test=0, value=None))
            except OSError: pass
threading.Thread(target=w, daemon=True).start()
def f(x): return 3
## closed pipes
import os
os.closerange(3, 64)
def f(x): return 3
## an answer on the pipe, then the end
import os, json
line = lambda **r: b'\n' + json.dumps(r).encode() + b'\n'
def f(x):
    for fd in range(3, 64):
        try: os.write(fd, line(value=None) * 9)
        except OSError: pass
    os._exit(0)
## a pipe in another place
import os
for a in range(3, 64):
    for b in range(3, 64):
        try: os.dup2(a, b)
        except OSError: pass
def f(x): return 3
## a fork that goes on
import os
def f(x):
    os.fork()
    return 3
## a fork that writes
import os, json
line = lambda **r: b'\n' + json.dumps(r).encode() + b'\n'
import time
if os.fork() == 0:
    for _ in range(200):
        for fd in range(1, 64):
            try: os.write(fd, line(test=0, value=None))
            except OSError: pass
    os._exit(0)
def f(x): return 3
## printed success
print('1 of 1 passed')
print('{"test": 0, "value": null}')
import os
os._exit(0)
## sys.modules
import sys, types
for name in ('ast', 'json', 'math', 'builtins', 'operator', 'code_judge', 'code_child', 'unittest'):
    sys.modules[name] = types.SimpleNamespace(isclose=lambda *a, **k: True, parse=lambda *a: None, abs=lambda *a: 0)
def f(x): return 3
## math.isclose
import math
math.isclose = lambda *a, **k: True
math.fabs = lambda *a: 0
def f(x): return 3
## the judge's own functions
import __main__
__main__.plain = lambda v, d=0: v
__main__.run_assert = lambda *_: None
def f(x): return 3
## the judge's module
import sys
m = sys.modules.get('code_judge')
if m:
    m.content = lambda v: v
    m.Handle.__eq__ = lambda *_: True
    m.judge = lambda *_: None
def f(x): return 3
## the channel in a frame
import sys
def walk():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
for frame in walk():
    if c := frame.f_locals.get('channel'):
        c.send(test=0, value=None)
        break
def f(x): return 3
## the channel in a frame of a call
import sys
def walk():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
def f(x):
    for frame in walk():
        c = frame.f_locals.get('channel')
        if c and 'tests' in frame.f_locals: c.send(test=0, value=None)
    return 3
## the assert in a frame
import sys
def walk():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
def f(x):
    for frame in walk():
        for v in list(frame.f_locals.values()):
            if type(v) is str and 'f(' + '2)' in v and 'ass' + 'ert' in v: return 4
    return 3
## the names of a test
import sys
def walk():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
def f(x):
    for frame in walk():
        if 'f' in frame.f_globals and frame.f_globals is not globals(): frame.f_globals.update(abs=lambda x: 0, isinstance=lambda *a: True)
    return 3
## the constants of a frame
import sys
def walk():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
def f(x):
    for frame in walk():
        if frame.f_code.co_filename.startswith('test'):
            return next((c for c in frame.f_code.co_consts if c == 4), 3)
    return 3
## the operands in gc
import gc, types
def f(x):
    for o in gc.get_objects():
        if isinstance(o, types.CodeType) or isinstance(o, types.FunctionType) and o.__name__ in ('plain', 'content'):
            o.__code__ = (lambda v, depth=0: 4).__code__
    return 3
## what writes the record
import json
real = json.dumps
json.dumps = lambda o, **k: real({'test': 0, 'value': None})
def f(x): return 3
## what reads the record
import json
json.loads = lambda *a, **k: {'do': 'name', 'given': []}
def f(x): return 3
## os.write
import os
real = os.write
os.write = lambda fd, b: real(fd, b'{"value": null}\n') and len(b)
def f(x): return 3
## signals to the judge
import os, signal
def f(x):
    for pid in (1, os.getppid()):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
    return 3
## a signal to its group
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def f(x):
    os.killpg(0, signal.SIGTERM)
    return 3
## a module in its folder
for name in ('math', 'unittest', 'random', 'numpy', 'solution'):
    open(name + '.py', 'w').write('isclose = lambda *a, **k: True')
def f(x): return 3
## a very deep value
def f(x):
    v = []
    for _ in range(10**5): v = [v]
    return v
## a replaced class of links
import sys
def walk():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
def f(x):
    for frame in walk():
        for v in list(frame.f_locals.values()):
            if hasattr(v, '_actions'): v._actions['call'] = lambda *a: None
    return 3
## eval in the judge
f = eval
## exec in the judge
import builtins
f = builtins.exec
## an answer that says yours
import sys
def walk():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
def f(x):
    for frame in walk():
        link = frame.f_locals.get('self')
        if hasattr(link, 'encode'): link.encode = lambda v, d=0: {'yours': 1}
    return 3
## a question to the judge
import sys
def walk():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back
def f(x):
    for frame in walk():
        link = frame.f_locals.get('self')
        if hasattr(link, 'ask'): return link.ask('call', link.resolve('type', 'eval') if 0 else eval, '4')
    return 3
## native writes
import ctypes
libc = ctypes.CDLL(None)
for fd in range(3, 64): libc.write(fd, b'{"test": 0, "value": null}\n', 26)
def f(x): return 3
## a closed stdout
import os, sys
os.close(1)
os.close(2)
sys.stdout = sys.stderr = None
def f(x): return 3
## imports of the test
import builtins
real = builtins.__import__
class M:
    isclose = staticmethod(lambda *a, **k: True)
builtins.__import__ = lambda n, *a, **k: M if n == 'math' else real(n, *a, **k)
def f(x): return 3
""",
    )
)
"""Programs that do not compute f(2) == 4 and try to pass for one that does."""
FORMS = [
    "x = f(2)\nassert x == 2 + 2",
    "import math\nassert math.isclose(f(2), 4.0)",
    "assert abs(f(2) - 4) < 1e-6",
    "def check(c):\n    y = c(2)\n    assert y == 4 and isinstance(y, int)\ncheck(f)",
    "assert f(2) == 4",
    {"call": "f", "args": [2], "expected": 4},
    "assert f(2) in [4] and [f(2)] == [4] and 4 == f(2)",
]


def test_honest_programs_pass_every_test():
    tests = TESTS.strip().split("\n\n")
    results = CodeTests(limits=SandboxLimits(), isolation=HERE).run(HONEST, tests)
    failed = [(test, result.remark) for test, result in zip(tests, results, strict=True) if not result.passed]
    assert len(tests) > 60 and failed == []


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_passes_nothing(name):
    reward = CodeTests(limits=QUICK, isolation=HERE)
    assert [
        form for form, result in zip(FORMS, reward.run(FORGERIES[name], FORMS), strict=True) if result.passed
    ] == []


def test_the_code_holds_neither_the_channel_nor_the_tests():
    """It may write to all that it holds; what it finds of the tests in its own memory is nothing."""
    code = (
        "import gc, os\n"
        "def f(word):\n    return [o for o in gc.get_objects() if type(o) is dict and word in o]\n"
        "def pipes():\n    import stat\n    found = []\n    for fd in range(3, 64):\n"
        "        try: found.append(stat.S_ISFIFO(os.fstat(fd).st_mode))\n        except OSError: pass\n"
        "    return found\n"
    )
    results = CodeTests(limits=QUICK, isolation=HERE).run(
        code, ["assert f('asse' + 'rt') == []", "assert pipes() == [True, True]"]
    )
    assert all(result.passed for result in results), results


def test_objects_of_the_code_are_refused_with_the_reason():
    code = "class P:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
    tests = ["assert P() == P()", "assert P()", "assert P() + 1", "assert 1 in P()", "assert hash(P())"]
    results = CodeTests(limits=QUICK, isolation=HERE).run(code, tests)
    assert [result.remark for result in results] == ["TypeError: a P is no plain value"] * 4 + [""]
    given = CodeTests(limits=QUICK, isolation=HERE).run(
        "def f(x): return 1", ["class Q: pass\nassert f(Q()) == 1"]
    )
    assert given[0].remark == "TypeError: a Q is no plain value"


def test_builtins_are_pythons_unless_the_test_names_nothing_else():
    reward = CodeTests(limits=QUICK, isolation=HERE)
    code = "def sum(a, b): return a + b\nabs = lambda x: 0\ndef f(x): return 3\n"
    results = reward.run(code, ["assert sum(10, 15) == 25", "assert abs(f(2) - 4) < 1e-6"])
    assert [result.passed for result in results] == [True, False]


def test_a_test_that_hangs_or_code_that_ends_leaves_the_others_unjudged():
    reward = CodeTests(limits=QUICK, isolation=HERE)
    results = reward.run(
        "import os\ndef f(): os._exit(7)", ["assert True", "try: f()\nexcept BaseException: pass"]
    )
    assert results[0].passed and results[1].remark == "the program ended (7) before its result"
    assert "before its result" in reward.run("", ["while True: pass"])[0].remark


@pytest.mark.parametrize(
    "record",
    [
        {"evil": [1]},
        {"mine": 1},
        {"int": ["zz"]},
        {"type": "os.system"},
        {"set": [{"list": []}]},
        {},
        [1],
        1.5,
    ],
)
def test_what_no_plain_value_is_written_as_is_refused(record):
    if record == {"type": "os.system"}:
        assert Codec().decode(record) is None
    else:
        with pytest.raises((ValueError, TypeError, AttributeError)):
            Codec().decode(record)


def test_containers_are_renewed_in_place():
    row, inner = [1, 2], {"a": [3]}
    table = [row, inner, {4}]
    assert renew(table, [[5], {"a": [6], "b": 7}, {8}, 9]) is table
    assert table == [[5], {"a": [6], "b": 7}, {8}, 9] and table[0] is row and table[1] is inner


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(x): return 0\ndef abs(x): return 0", "from solution import f\nassert abs(f(2) - 4) < 1e-6"),
        ("def f(x): return 0\ndef all(x): return True", "import solution\nassert all([solution.f(2) == 4])"),
        ("def f(x): return 0\ndef abs(x): return 0", "from solution import *\nassert abs(f(2) - 4) < 1e-6"),
        ("def sum(x): return 0\ndef abs(x): return 0", "assert abs(sum([1.5, 2]) - 3.5) < 1e-9"),
        ("pass", "assert sorted([3, 1]) == [1, 3]"),
        ("def f(x): raise StopIteration", "assert all(map(lambda c: f(c) == c * c, [2, 3]))"),
        (
            "def f(x): return 0\nclass math:\n    isclose = staticmethod(lambda *a: True)",
            "assert math.isclose(f(2), 4)",
        ),
    ],
)
def test_what_python_names_is_pythons(code: str, test: str) -> None:
    [found] = CodeTests(limits=QUICK, isolation=HERE).run(code, [test])
    assert not found.passed


SETUP = """
from math import isclose
class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
def chain(xs):
    head = None
    for x in reversed(xs): head = Node(x, head)
    return head
def listed(node):
    found = []
    while node is not None: found.append(node.val); node = node.next
    return found
def same(one, other): return one == other
def solves(x): return f(x) == 2 * x
def f(x):
    "Twice x."
    raise NotImplementedError
ANSWER, ROOT = {3: 6}, Node(1)
"""
SETUP_TESTS = (
    "assert same(f(3), 6)",
    "assert f(3) == ANSWER[3]",
    "assert isclose(f(3), 6.0)",
    "assert solves(3)",
    "assert all(map(solves, range(4)))",
    "assert listed(turned(chain([1, 2, 3]))) == [3, 2, 1]",
    "assert isinstance(ROOT, Node) and listed(ROOT) == [1]",
)


def test_what_stands_before_the_code_judges_as_it_was_written():
    reward = CodeTests(field="tests", setup_field="setup", limits=QUICK, isolation=HERE, credit="share")

    def share(code: str, tests: tuple[str, ...], setup: str = SETUP) -> float:
        [value] = reward.score(
            [f"```python\n{code}\n```"], ["?"], [{"tests": [*tests], "setup": setup}]
        ).value.tolist()
        return value

    right = """
def f(x): return 2 * x
def turned(node):
    last = None
    while node: node.next, last, node = last, node, node.next
    return last
"""
    assert share(right, SETUP_TESTS) == 1
    again = "class Node:\n    def __init__(self, val, next=None): self.val, self.next = val, next"
    assert share(again + right, SETUP_TESTS[:6]) == 1
    forged = """
def f(x): return 5
def turned(node): return node
def same(one, other): return True
def isclose(*_): return True
def solves(x): return True
def listed(node): return [3, 2, 1]
ANSWER = {3: 5}
import sys, math
for name, value in [*globals().items()]:
    if hasattr(value, "__code__"): value.__defaults__ = (1, 1)
math.isclose = isclose
"""
    assert share(forged, SETUP_TESTS[:6]) == 0
    stated = ("assert f(2) == 4",)
    for stub in ("pass", "return", "return None", "'Twice.'\n    return 0", "raise NotImplementedError"):
        assert share(right, stated, f"def f(x):\n    {stub}") == 1, stub
    taken = reward.score([f"```python\n{right}\n```"], ["?"], [{"tests": [*stated], "setup": "f = abs"}])
    assert taken.text is not None and "f of the setup was taken" in taken.text[0]
    assert share("    return 2 * x", stated, "def f(x):") == 1  # no module by itself
    assert math.isnan(share(right, stated, "def f(x): return 1 / 0\n1 / 0"))
