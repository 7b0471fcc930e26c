# SPDX-License-Identifier: Apache-2.0
"""Training checks of `check_adapter`: gradients, reference, counting, saving.

Each check returns a problem and its fix, or None.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Condition, DiffusionPolicy


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Fixed inputs of the checks: three samples of two prompts."""

    policy: DiffusionPolicy
    prompts: tuple[str, str]
    condition: Condition
    x: Tensor
    sigma: Tensor
    tolerance: float

    def velocity(self, condition: Condition | None = None) -> Tensor:
        """Compute the velocity without gradient."""
        with torch.no_grad():
            return self.policy.velocity(self.x, self.sigma, condition or self.condition)

    def differ(self, a: Tensor, b: Tensor) -> bool:
        """Return True if the tensors differ by more than the tolerance relative to the largest |b|."""
        return bool((a - b).abs().max() > self.tolerance * b.abs().max().clamp_min(1e-6))


def check_gradients(probe: Probe) -> str | None:
    """Check that gradients reach all trainable parameters and no others."""
    parameters = probe.policy.trainable_parameters()
    names = [name for name, _ in parameters]
    if not names or len(set(names)) < len(names):
        return (
            f"trainable_parameters() gives {len(names)} names, {len(set(names))} different. Name each once."
        )
    frozen = [name for name, p in parameters if not p.requires_grad]
    if frozen:
        return f"{frozen[0]} is listed as trainable but frozen. List the parameters with requires_grad."
    trainable = {id(p) for _, p in parameters}
    untrained = [(n, p) for n, p in probe.policy.module.named_parameters() if id(p) not in trainable]
    saved_gradients = [p.grad for _, p in (*parameters, *untrained)]
    for _, p in (*parameters, *untrained):
        p.grad = None
    try:
        with torch.enable_grad():
            probe.policy.velocity(probe.x, probe.sigma, probe.condition).square().sum().backward()
        unreached = [name for name, p in parameters if p.grad is None]
        leaked = [name for name, p in untrained if p.grad is not None]
        dead = all(p.grad is None or not bool(p.grad.any()) for _, p in parameters)
    finally:
        for (_, p), grad in zip((*parameters, *untrained), saved_gradients, strict=True):
            p.grad = grad
    if unreached or dead:
        return (
            f"no gradient reaches {unreached[0] if unreached else 'any parameter'}. Compute velocity with "
            "the module that trainable_parameters() names, outside of no_grad; leave unused parameters "
            "out."
        )
    if leaked:
        return (
            f"{leaked[0]} gets a gradient but is not listed as trainable. Freeze it: requires_grad_(False)."
        )
    return None


@contextmanager
def _perturbed(probe: Probe) -> Iterator[None]:
    """Add noise to the trainable weights inside the block."""
    generator = torch.Generator().manual_seed(1)
    parameters = [p for _, p in probe.policy.trainable_parameters()]
    original = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.add_((0.1 * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, original, strict=True):
                p.copy_(value)


def check_reference(probe: Probe) -> str | None:
    """Check that `reference()` restores the model before training inside, and nothing outside."""
    policy = probe.policy
    with policy.reference():
        before = probe.velocity()
    with _perturbed(probe):
        flags = [p.requires_grad for _, p in policy.trainable_parameters()]
        trained = probe.velocity()
        with policy.reference():
            with policy.reference():
                pass
            inside = probe.velocity()
        after = probe.velocity()
        flags_after = [p.requires_grad for _, p in policy.trainable_parameters()]
    if not probe.differ(trained, before):
        return "changing the trainable parameters does not change the velocity. Check what velocity() calls."
    if probe.differ(inside, before):
        return (
            "inside reference(), also after a nested one has ended, the policy must be the model before "
            "training. Switch adapters off (or the original weights in) at the outermost entry only."
        )
    if probe.differ(after, trained) or flags_after != flags:
        return (
            "reference() did not restore the policy: weights and requires_grad must come back. "
            "Restore them in a finally block."
        )
    return None


def check_forward_count(probe: Probe) -> str | None:
    """Check that passes are counted in latents, with and without backward."""
    policy = probe.policy
    start = policy.forward_count.forward, policy.forward_count.forward_backward
    probe.velocity()
    middle = policy.forward_count.forward, policy.forward_count.forward_backward
    with torch.enable_grad():
        policy.velocity(probe.x, probe.sigma, probe.condition)
    end = policy.forward_count.forward, policy.forward_count.forward_backward
    if middle[0] - start[0] not in (3, 6) or middle[1] != start[1] or end[1] - middle[1] != 3:
        return (
            f"3 latents without and then with gradient counted (forward, forward_backward) {start} -> "
            f"{middle} -> {end}. Count latents: forward without gradient (twice under guidance), "
            "forward_backward with."
        )
    return None


def check_save(probe: Probe) -> str | None:
    """Check that `save` writes and `load` restores the weights."""
    policy: Any = probe.policy
    with tempfile.TemporaryDirectory() as name, _perturbed(probe):
        folder = Path(name) / "saved"
        policy.save(folder)
        if not folder.is_dir() or not any(folder.iterdir()):
            return f"save(folder) wrote nothing to {folder}. Write the trained weights into that folder."
        if not hasattr(policy, "load"):
            return None
        saved = probe.velocity()
        with torch.no_grad():
            for _, p in policy.trainable_parameters():
                p.mul_(0.5)
        policy.load(folder)
        if probe.differ(probe.velocity(), saved):
            return (
                "load(folder) does not restore what save(folder) wrote. Save all of trainable_parameters()."
            )
    return None
