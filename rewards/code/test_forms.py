# SPDX-License-Identifier: Apache-2.0
"""What generated code and its tests look like: the fenced block of a completion, the forms of a test."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from visalign.rewards.text.contract import shortened

_FORMS = '{"stdin", "stdout"}, {"call", "args", "expected"}, "assert ..." or {"inputs", "outputs"}'


class UnreadableTests(ValueError):
    """The tests of a sample cannot be read: a missing ground truth, not a failure of the code."""


def read_tests(given: Any) -> list[dict[str, Any]]:
    """Tests in any of the allowed forms as a list of mappings.

    Args:
        given: see the module; a string that holds JSON is read first.

    Returns:
        At least one of {"stdin", "stdout"}, {"call", "args", "kwargs", "expected"}, {"assert"}, and
        {"eval", "literal"} for an assert that compares with a literal.

    Raises:
        UnreadableTests: another form, or none.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = [given]
    if isinstance(given, Mapping) and "inputs" in given:
        given = _apps(given)
    if isinstance(given, Mapping | str) or not isinstance(given, Sequence) or not given:
        raise UnreadableTests(f"{shortened(given)} is no list of at least one test; a test is {_FORMS}")
    return [_read_test(test) for test in given]


def _apps(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs, function = given["inputs"], given.get("outputs"), given.get("fn_name")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise UnreadableTests("inputs and outputs must be lists of one length")
    if function:
        return [
            {"call": function, "args": arguments, "expected": expected}
            for arguments, expected in zip(inputs, outputs, strict=True)
        ]
    return [{"stdin": text, "stdout": expected} for text, expected in zip(inputs, outputs, strict=True)]


def _read_test(test: Any) -> dict[str, Any]:
    if isinstance(test, str):
        test = {"assert": test}
    if not isinstance(test, Mapping):
        raise UnreadableTests(f"{shortened(test)} is no test; a test is {_FORMS}")
    if set(test) == {"stdin", "stdout"} and all(isinstance(part, str) for part in test.values()):
        return dict(test)
    if set(test) == {"assert"} and isinstance(test["assert"], str):
        return _read_assert(test["assert"])
    named = isinstance(test.get("call"), str) and "expected" in test
    if not named or not set(test) <= {"call", "args", "kwargs", "expected"}:
        raise UnreadableTests(f"{shortened(dict(test))} is no test; a test is {_FORMS}")
    call = {"args": [], "kwargs": {}, **test}
    if not isinstance(call["args"], list | tuple) or not isinstance(call["kwargs"], Mapping):
        raise UnreadableTests(f"args must be a list and kwargs a mapping in {shortened(dict(test))}")
    try:
        json.dumps([call["args"], call["kwargs"]])
    except (TypeError, ValueError) as error:
        raise UnreadableTests(f"the arguments of {shortened(call['call'])} are no JSON ({error})") from error
    return call


def _read_assert(source: str) -> dict[str, Any]:
    """An assert as a call whose expected value stays outside, where it compares with a literal."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UnreadableTests(f"{shortened(source)} is no Python ({error})") from error
    if len(body) == 1 and isinstance(body[0], ast.Assert) and isinstance(body[0].test, ast.Compare):
        compare = body[0].test
        sides = [compare.left, *compare.comparators]
        literal = [_literal(side) for side in sides]
        if (
            len(sides) == 2
            and isinstance(compare.ops[0], ast.Eq)
            and (literal[0] is None) != (literal[1] is None)
        ):
            known = 0 if literal[0] is not None else 1
            return {"eval": ast.unparse(sides[1 - known]), "literal": literal[known]}
    return {"assert": source}


def _literal(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal in a tuple, or None."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, RecursionError):
        return None
