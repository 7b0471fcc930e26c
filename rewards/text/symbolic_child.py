# SPDX-License-Identifier: Apache-2.0
"""The process that `symbolic` asks: a line of JSON [answer, truth] comes in, a line of JSON goes out."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from contextlib import suppress
from typing import Any

MEMORY = 4 * 2**30
"""Bytes of address space: a power tower is no reason to fill the machine."""
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")


def main() -> None:
    """Answer until the input ends."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # Windows, macOS: the clock is the only limit
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the library prints is no reply
    config = [LatexExtractionConfig(boxed_match_priority=-1)]

    def read(text: str) -> list:
        # decimals as what they are, exactly: the library rounds them
        exact = _DECIMAL.sub(lambda hit: rf"\frac{{{int(hit[1] + hit[2])}}}{{1{'0' * len(hit[2])}}}", text)
        without: Any = None  # a clock of its own, which would need this process's only signal
        return parse(
            f"${exact}$", extraction_config=config, parsing_timeout=without, fallback_mode="no_fallback"
        )

    for line in sys.stdin:
        answer, truth = json.loads(line)
        equal = False  # as for text that is no mathematics
        with suppress(Exception):
            found = read(truth), read(answer)
            equal = all(found) and verify(
                *found, float_rounding=20, numeric_precision=40, strict=True, timeout_seconds=None
            )
        replies.write(json.dumps(bool(equal)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
