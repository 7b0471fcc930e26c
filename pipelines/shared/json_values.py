# SPDX-License-Identifier: Apache-2.0
"""Numbers as JSON can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


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
