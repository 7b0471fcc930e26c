# SPDX-License-Identifier: Apache-2.0
"""Worker process of `symbolic`: reads lines of JSON [answer, truth], writes lines of JSON true or false."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from contextlib import suppress
from typing import Any

MEMORY = 4 * 2**30  # Limit of the address space in bytes: a power tower must not fill the machine
DIGITS = 1000  # Digits to which the difference of two irrational numbers is computed
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")


def install_exact_numbers() -> None:
    """Make math-verify compare scalars exactly: it rounds absolutely, so 1/40! equals 3/40!."""
    from math_verify import grader
    from sympy import MatrixBase, MatrixExpr

    by_elements = grader.sympy_numeric_eq

    def numbers_equal(left: Any, right: Any, *precision: int) -> bool:
        if isinstance(left, MatrixBase | MatrixExpr) and isinstance(right, MatrixBase | MatrixExpr):
            return by_elements(left, right, *precision)
        with suppress(Exception):  # of what cannot be subtracted; what has unknowns is simplified later
            left, right = left.doit(), right.doit()
            difference = left - right
            if not difference.is_number or difference.is_Rational:
                return difference == 0
            size, error = (abs(value.evalf(15, maxn=DIGITS)) for value in (left, difference))
            return bool(error <= size * 10 ** -(DIGITS // 2))
        return False

    grader.sympy_numeric_eq = numbers_equal


def main() -> None:
    """Answer until the input ends."""
    from math_verify import LatexExtractionConfig, parse, verify

    install_exact_numbers()
    logging.disable(logging.CRITICAL)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # Windows, macOS: the clock is the only limit
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the library's prints must not mix with the replies
    config = [LatexExtractionConfig(boxed_match_priority=-1)]

    def read(text: str) -> list:
        # decimals as exact fractions: the library rounds them
        exact = _DECIMAL.sub(lambda hit: rf"\frac{{{int(hit[1] + hit[2])}}}{{1{'0' * len(hit[2])}}}", text)
        no_timeout: Any = None  # the library's timeout needs a signal; the parent kills this process instead
        return parse(f"${exact}$", extraction_config=config, parsing_timeout=no_timeout, fallback_mode="no_fallback")

    for line in sys.stdin:
        answer, truth = json.loads(line)
        equal = False  # also for text that is no mathematics
        with suppress(Exception):
            parsed = read(truth), read(answer)
            options = {"float_rounding": 20, "numeric_precision": 40, "strict": True, "timeout_seconds": None}
            equal = all(parsed) and verify(*parsed, **options)
        replies.write(json.dumps(bool(equal)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
