# SPDX-License-Identifier: Apache-2.0
"""Results as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def pretty(result: Any) -> str:
    """A result as indented JSON with a line feed; a number that is not finite is an error."""
    return json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """JSON values: null where a number is not finite.

    Args:
        value: numbers, texts, mappings and lists of such.
    """
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
