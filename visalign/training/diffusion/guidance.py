# SPDX-License-Identifier: Apache-2.0
"""Temporary guidance scales: of the rollout, or of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from visalign.errors import UserError
from visalign.interfaces import DiffusionPolicy


@contextmanager
def guidance_scale(policy: DiffusionPolicy, scale: float | None) -> Iterator[None]:
    """Set the policy's guidance scale inside the block; None leaves its own."""
    changed: Any = policy
    before = getattr(policy, "guidance", None)
    if scale is None:
        yield
        return
    if not isinstance(before, int | float):
        raise UserError(
            f"{type(policy).__name__} has no attribute guidance that can be set, so rollout.guidance and "
            "reference_guidance must be null."
        )
    try:
        changed.guidance = float(scale)
        yield
    finally:
        changed.guidance = before
