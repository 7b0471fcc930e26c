# SPDX-License-Identifier: Apache-2.0
"""Calculator tool: evaluates the arithmetic expression that a text ends with."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from threading import Lock
from typing import Any

_SIGNS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_EXPRESSION = re.compile(r"[\d\s()+\-*/%.]+$")
_CONTINUES = re.compile(r"[\w,]$|[×÷^√]\s*$")
"""Text before an expression that is part of a larger one: 1,000 + 5, or x-3 + 4."""
LONGEST = 200  # Most characters of an expression
_PARSING = Lock()


def calculator(text: str) -> str | None:
    """Evaluate the arithmetic expression at the end of a text: numbers, + - * / // %, brackets.

    The value is exact where it is whole, else has six digits; "error" is a division by zero. None: the text
    ends with no expression, or with a number alone.

    >>> calculator("First 12 * 3 = 36, then 36 + 5")
    '41'
    """
    end = text[-LONGEST:]
    match = _EXPRESSION.search(end)
    expression = match[0].lstrip() if match else ""
    if _CONTINUES.search(end.removesuffix(expression)):
        return None
    for start in re.finditer(r"[\d(\-]", expression):
        try:
            tree = parse_python(expression[start.start() :].strip(), mode="eval").body
            if not isinstance(tree, ast.BinOp):
                return None
            value = _value(tree)
        except ZeroDivisionError:
            return "error"
        except (SyntaxError, RecursionError, MemoryError):
            continue
        except ValueError:
            return None  # a part of 2 ** 3 + 4, say 3 + 4, must not be evaluated
        return str(value) if value.denominator == 1 else f"{float(value):.6g}"
    return None


def parse_python(source: str, mode: str = "exec") -> Any:
    """Parse Python source as `ast.parse` does, one thread at a time.

    Before CPython 3.12, threads share its count of the depth, and parsing ends in a SystemError now and then.
    """
    with _PARSING:
        return ast.parse(source, mode=mode)


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return Fraction(_SIGNS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    raise ValueError("not arithmetic")
