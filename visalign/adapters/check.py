# SPDX-License-Identifier: Apache-2.0
"""Test an adapter against the contract of `visalign.interfaces.DiffusionPolicy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch

from visalign.errors import UserError
from visalign.interfaces import DiffusionPolicy, Prediction

from .check_training import Probe, check_forward_count, check_gradients, check_reference, check_save

METHODS = "encode velocity times decode sigmas reference trainable_parameters save".split()
MEMBERS = (
    "latent_shape storage_dtype compute_dtype prediction module device".split() + METHODS + ["forward_count"]
)


class AdapterError(UserError):
    """An adapter breaks its contract; the message says how to fix it."""


def check_adapter(
    policy: DiffusionPolicy,
    *,
    prompts: Sequence[str] = ("a red circle", "two blue squares"),
    seed: int = 0,
    tolerance: float | None = None,
    save: bool = True,
) -> list[str]:
    """Run the contract tests on an adapter, and restore its weights and gradients.

    Args:
        policy: Adapter.
        prompts: Two prompts that the model should tell apart.
        seed: Seed of latents and weight perturbations.
        tolerance: Relative tolerance of equal values; by default 1e-4, or 0.03 for latents in 16 bits.
        save: Test `save` and, if present, `load` in a temporary folder.

    Returns:
        Names of the passed checks.

    Raises:
        AdapterError: At the first failed check; the message says what to fix.
    """
    check_members(policy)
    first, second = prompts
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((3, *policy.latent_shape), generator=generator)
    if tolerance is None:
        tolerance = 1e-4 if policy.storage_dtype.itemsize >= 4 else 0.03
    probe = Probe(
        policy=policy,
        prompts=(first, second),
        condition=policy.encode([first, second, first]),
        x=x.to(policy.device, policy.storage_dtype),
        sigma=torch.tensor([0.9, 0.5, 0.2], device=policy.device),
        tolerance=tolerance,
    )
    for name, check in _CHECKS.items():
        if name != "save" or save:
            _fail_with(name, check(probe))
    return [name for name in ("protocol", "latents", *_CHECKS) if name != "save" or save]


def check_members(policy: Any) -> None:
    """Raise `AdapterError` if a member of the contract is missing or declared wrongly; nothing is
    computed."""
    missing = [name for name in MEMBERS if not hasattr(policy, name)]
    if missing:
        raise AdapterError(
            f"protocol: {type(policy).__name__} has no {', '.join(missing)}. Add what "
            "visalign.interfaces.DiffusionPolicy lists."
        )
    shape = policy.latent_shape
    if not (isinstance(shape, tuple) and shape and all(isinstance(n, int) and n > 0 for n in shape)):
        _fail_with(
            "latents",
            f"latent_shape is {shape!r}. Make it a tuple of positive integers: what follows B, (C, H, W).",
        )
    if not policy.storage_dtype.is_floating_point:
        _fail_with("latents", f"storage_dtype is {policy.storage_dtype}. Make it a floating dtype.")
    if not isinstance(policy.compute_dtype, torch.dtype):
        _fail_with("protocol", f"compute_dtype is {policy.compute_dtype!r}. Make it a torch.dtype.")
    if policy.prediction not in get_args(Prediction):
        _fail_with(
            "protocol",
            f"prediction is {policy.prediction!r}; allowed: {', '.join(get_args(Prediction))}. Declare what "
            "the network gives; velocity() converts it (visalign.flow.velocity_of_prediction).",
        )


def _fail_with(name: str, problem: str | None) -> None:
    """Raise the problem that a check returned."""
    if problem:
        raise AdapterError(f"{name}: {problem}")


def _check_sigmas(probe: Probe) -> str | None:
    for timestep_schedule in ("diffusers", "plain"):
        for steps in (1, 4):
            sigmas = probe.policy.sigmas(steps, timestep_schedule=timestep_schedule)
            if sigmas.shape != (steps + 1,) or sigmas.dtype != torch.float32:
                return (
                    f"sigmas({steps}, timestep_schedule={timestep_schedule!r}) is {sigmas.dtype} "
                    f"{tuple(sigmas.shape)}. Return float32 [steps + 1], the final 0 included."
                )
            starts = sigmas[0] == 1 or (probe.policy.prediction != "velocity" and sigmas[0] < 1)
            if not starts or sigmas[-1] != 0 or not bool((sigmas.diff() < 0).all()):
                return (
                    f"sigmas({steps}, timestep_schedule={timestep_schedule!r}) is {sigmas.tolist()}. It must "
                    "fall strictly from 1 to 0 (from below 1 where the prediction is not the velocity)."
                )
            times = probe.policy.times(sigmas)
            if times.shape != sigmas.shape or times.dtype != torch.float32:
                return (
                    f"times of {steps + 1} noise levels is {times.dtype} {tuple(times.shape)}. Return "
                    "float32, one time per level."
                )
    return None


def _check_encode(probe: Probe) -> str | None:
    condition = probe.condition
    selected = condition.select(torch.zeros(4, dtype=torch.int64))
    if len(condition) != 3 or len(selected) != 4:
        return (
            f"encode of 3 prompts has length {len(condition)}, select of 4 has {len(selected)}. Let __len__ "
            "count samples, not unique prompts."
        )
    return None


def _check_velocity(probe: Probe) -> str | None:
    v = probe.velocity()
    if v.shape != probe.x.shape or v.dtype != torch.float32:
        return (
            f"velocity is {v.dtype} {tuple(v.shape)} for latents {tuple(probe.x.shape)}. Return float32 in "
            "the latents' shape (call .float() on the model's output)."
        )
    if v.requires_grad or not bool(v.isfinite().all()):
        return "velocity under no_grad is not finite, or requires grad. Look for NaN weights or enable_grad."
    with torch.enable_grad():
        with_gradient = probe.policy.velocity(probe.x, probe.sigma, probe.condition).detach()
    difference = float((with_gradient - v).abs().max() / v.abs().max().clamp_min(1e-6))
    if difference > 1e-6:
        return (
            f"velocity with gradient differs by {difference:.2g} (relative) from the one without, so no "
            "ratio is 1. Use the same path in both: guidance in the same number of passes, no dropout."
        )
    return None


def _check_condition(probe: Probe) -> str | None:
    condition, index = probe.condition, torch.tensor([2, 1, 0, 0])
    selected = condition.select(index)
    expected = probe.velocity()
    policy = probe.policy
    with torch.no_grad():
        permuted = policy.velocity(probe.x[index], probe.sigma[index], selected)
        direct = policy.velocity(probe.x[:2], probe.sigma[:2], policy.encode(list(probe.prompts)))
    if probe.differ(permuted, expected[index]) or probe.differ(direct, expected[:2]):
        return (
            "a sample's velocity changes with select() or with the order of prompts. Index the encoded "
            "prompts by sample: select(index) means self.index[index]."
        )
    if not probe.differ(probe.velocity(condition.select(torch.tensor([1, 0, 1]))), expected):
        return (
            f"the prompts {probe.prompts} give the same velocity. Pass the condition to the model, or "
            "give check_adapter two prompts that the model tells apart."
        )
    return None


def _check_neighbours(probe: Probe) -> str | None:
    batched = probe.velocity()
    for i in range(3):
        row = slice(i, i + 1)
        with torch.no_grad():
            single = probe.policy.velocity(
                probe.x[row], probe.sigma[row], probe.condition.select(torch.tensor([i]))
            )
        if probe.differ(single, batched[row]):
            return (
                f"the velocity of sample {i} depends on its neighbours in the batch. Remove statistics "
                "over the batch, padding that is not masked, and one sigma used for all."
            )
    return None


def _check_decode(probe: Probe) -> str | None:
    with torch.no_grad():
        images, single = probe.policy.decode(probe.x), probe.policy.decode(probe.x[1:2])
    if images.ndim != 4 or images.shape[:2] != (3, 3) or images.dtype != torch.float32:
        return f"decode of 3 latents is {images.dtype} {tuple(images.shape)}. Return float32 [B, 3, H, W]."
    if not (bool(images.isfinite().all()) and images.min() >= 0 and images.max() <= 1):
        return (
            f"decoded values reach from {float(images.min()):.3g} to {float(images.max()):.3g}. Map the "
            "autoencoder's [-1, 1] to [0, 1] with (image / 2 + 0.5).clamp(0, 1)."
        )
    if probe.differ(single, images[1:2]):
        return "a decoded image depends on its neighbours in the batch. Put the autoencoder into eval mode."
    return None


def _check_encode_images(probe: Probe) -> str | None:
    policy: Any = probe.policy
    if not hasattr(policy, "encode_images"):
        return None
    draw = torch.Generator().manual_seed(0)
    images = [torch.rand(3, *size, generator=draw) for size in ((40, 56), (64, 64))]
    try:
        batched, single = policy.encode_images(images), policy.encode_images(images[1:])
    except UserError:  # a model without an image encoder says so
        return None
    expected = (2, *policy.latent_shape)
    if batched.shape != expected or batched.dtype != policy.storage_dtype:
        return (
            f"encode_images of 2 images is {batched.dtype} {tuple(batched.shape)}. Return "
            f"{policy.storage_dtype} {expected}, as velocity takes latents."
        )
    if probe.differ(single, batched[1:]):
        return "the latents of an image depend on its neighbours. Take the posterior's mode, not a sample."
    return None


_CHECKS: dict[str, Callable[[Probe], str | None]] = {
    "sigmas": _check_sigmas,
    "encode": _check_encode,
    "velocity": _check_velocity,
    "condition": _check_condition,
    "neighbours": _check_neighbours,
    "gradients": check_gradients,
    "reference": check_reference,
    "decode": _check_decode,
    "encode_images": _check_encode_images,
    "forward_count": check_forward_count,
    "save": check_save,
}
