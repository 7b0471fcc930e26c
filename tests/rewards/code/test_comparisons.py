# SPDX-License-Identifier: Apache-2.0
"""What counts as equal in tests of generated code: objects that lie, floats, keys of JSON."""

from __future__ import annotations

import sys

import pytest

from tests.support.sandbox import HERE, QUICK, judge
from visalign.rewards.code.reward import CodeTests

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is exercised on Linux"),
    pytest.mark.filterwarnings("default:The code sandbox runs code with isolation='process'"),
]

LIES = (
    "class E:\n    __eq__ = __ge__ = __le__ = __contains__ = lambda *_: True\n"
    "    __sub__ = __abs__ = __getitem__ = lambda *_: E()\n    __lt__ = __bool__ = lambda *_: True\n"
    "    __class__ = int\n"
)


@pytest.mark.parametrize(
    "test",
    [
        *("assert f(2) == f(3) + 1", "assert abs(f(2) - 4) < 1e-6", "assert f(2) in (4, 5) and f(2) > 3"),
        *("assert 4 in f(2)", "assert f(2)", "assert isinstance(f(2), int)", "assert [f(2)] == [2 + 2]"),
        *(
            "assert all(f(x) == x * x for x in range(3))",
            "x = f(2)\nassert x == 2 + 2",
            "assert not (f(2) != 4)",
        ),
        *("assert {1: f(2)} == {1: int('4')}", "assert f(2)[0] == int('4')"),
    ],
)
def test_objects_that_are_equal_to_everything_pass_nothing(test):
    value, remark = judge(f"{LIES}def f(x): return E()", [test])
    assert value == 0 and "a E" in remark
    value, remark = judge(f"{LIES}E.__module__ = E.__qualname__ = 'int'\ndef f(x): return E()", [test])
    assert value == 0, remark


def test_the_interpreters_own_functions_judge():
    code = "import builtins\nbuiltins.abs = builtins.all = builtins.len = lambda *_: 0\ndef f(x): return 3"
    assert judge(code, ["assert abs(f(2) - 4) < 1e-6"])[0] == 0


def test_expected_values_are_json():
    code = (
        "def f(k): return [0.1 + 0.2, {1: (1, 0.1 + 0.2), None: 2, True: 3}, {1: 2, '1': 3}, 10**20, 3, "
        "True][k]"
    )
    expected = [0.3, {"1": [1, 0.3], "null": 2}, {"1": 2}, 10**20 + 1, 3.0, 1]
    tests = [{"call": "f", "args": [k], "expected": value} for k, value in enumerate(expected)]
    passed = [result.passed for result in CodeTests(limits=QUICK, isolation=HERE).run(code, tests)]
    assert passed == [True, False, False, False, True, True]
    exact = CodeTests(limits=QUICK, isolation=HERE, tolerance=0).run(code, tests[:1])
    assert not exact[0].passed
    keys = CodeTests(limits=QUICK, isolation=HERE).run(
        "def f(): return {1: 2.5, None: [(3,)]}", [{"call": "f", "expected": {"1": 2.5, "null": [[3]]}}]
    )
    assert keys[0].passed
    nan = CodeTests(limits=QUICK, isolation=HERE).run(
        "def f(): return float('inf')", [{"call": "f", "expected": 1e300}]
    )
    assert not nan[0].passed
