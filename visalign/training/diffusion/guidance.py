# SPDX-License-Identifier: Apache-2.0
"""Another guidance scale for a while: while samples are made, or for the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from visalign.errors import UserError
from visalign.flow.noise import initial_noise
from visalign.flow.rollout import encoder_inputs, velocity_of
from visalign.interfaces import DiffusionPolicy


@contextmanager
def guided(policy: DiffusionPolicy, scale: float | None) -> Iterator[None]:
    """Inside, the policy has another guidance scale; None leaves its own.

    Raises:
        UserError: the policy has no scale that can be set.
    """
    own: Any = getattr(policy, "guidance", None)
    if scale is None:
        yield
        return
    if not isinstance(own, int | float):
        raise UserError(
            f"{type(policy).__name__} has no attribute guidance that can be set, so rollout.guidance and "
            "reference_guidance must be null."
        )
    changed: Any = policy
    try:
        changed.guidance = float(scale)
        yield
    finally:
        changed.guidance = own


@torch.no_grad()
def check_guidance(policy: DiffusionPolicy, scale: float | None, record: Mapping[str, Any]) -> None:
    """Refuse a guidance scale that changes nothing: neither the passes of a velocity nor its numbers.

    Raises:
        UserError: see above, or as `guided`.
    """
    if scale is None or scale == getattr(policy, "guidance", None):
        return
    condition, count, seen = policy.encode(encoder_inputs(policy, [record])), policy.forward_count, []
    x = initial_noise([0], policy.latent_shape).to(policy.device, policy.storage_dtype)
    sigma = policy.sigmas(2)[1:2].to(policy.device)
    for tried in (None, scale):
        before = count.forward
        with guided(policy, tried):
            seen.append((velocity_of(policy, x, sigma, condition), count.forward - before))
    if seen[0][1] == seen[1][1] == 1 and torch.equal(seen[0][0], seen[1][0]):
        raise UserError(
            f"A guidance of {scale} changes nothing in this {type(policy).__name__}: it has no unconditional "
            "half or is not told. Set rollout.guidance and reference_guidance to null."
        )
