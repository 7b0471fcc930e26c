# SPDX-License-Identifier: Apache-2.0
"""The operations that a network takes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count


def _attention(q: Any, k: Any, v: Any, *_: Any, out_val: Any = None, **options: Any) -> int:
    # torch 2.11 refuses keys that queries share
    return sdpa_flop_count(q.shape, *((x.shape[0], q.shape[1], *x.shape[2:]) for x in (k, v)))


_attention._get_raw = True  # type: ignore[attr-defined]


def counted_operations() -> FlopCounterMode:
    """Counts inside of it; the CPU's fused attention too, which torch before 2.15 passes over."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={} if fused in flop_registry else {fused: _attention})
