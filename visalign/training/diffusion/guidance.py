# SPDX-License-Identifier: Apache-2.0
"""Temporary guidance scales: of the rollout, or of the reference."""

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
def guidance_scale(policy: DiffusionPolicy, scale: float | None) -> Iterator[None]:
    """Set the policy's guidance scale inside the block; None leaves its own.

    Raises:
        UserError: the policy has no scale that can be set.
    """
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


@torch.no_grad()
def check_guidance(policy: DiffusionPolicy, scale: float | None, record: Mapping[str, Any]) -> None:
    """Refuse a guidance scale that changes neither the passes of a velocity nor its numbers.

    Raises:
        UserError: see above, or as `guidance_scale`.
    """
    if scale is None or scale == getattr(policy, "guidance", None):
        return
    condition, count, results = policy.encode(encoder_inputs(policy, [record])), policy.forward_count, []
    x = initial_noise([0], policy.latent_shape).to(policy.device, policy.storage_dtype)
    sigma = policy.sigmas(2)[1:2].to(policy.device)
    for value in (None, scale):
        before = count.forward
        with guidance_scale(policy, value):
            results.append((velocity_of(policy, x, sigma, condition), count.forward - before))
    (default, default_passes), (changed, changed_passes) = results
    if default_passes == changed_passes == 1 and torch.equal(default, changed):
        raise UserError(
            f"A guidance of {scale} changes nothing in this {type(policy).__name__}: it has no unconditional "
            "half or does not receive the scale. Set rollout.guidance and reference_guidance to null."
        )
