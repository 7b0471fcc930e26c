# SPDX-License-Identifier: Apache-2.0
"""Test an adapter against the contract of `visalign.interfaces.DiffusionPolicy`.

Each check yields pairs (broken, problem and its fix); the first that is broken is raised.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.interfaces import Condition, DiffusionPolicy, Prediction

METHODS = "encode velocity times decode sigmas reference trainable_parameters save".split()
MEMBERS = "latent_shape storage_dtype compute_dtype prediction module device".split() + METHODS + ["forward_count"]

Problems = Generator[tuple[object, str], None, None]


class AdapterError(UserError):
    """An adapter breaks its contract; the message says how to fix it."""


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """Fixed inputs of the checks: three samples of two prompts."""

    policy: DiffusionPolicy
    prompts: Sequence[str]
    condition: Condition
    x: Tensor
    sigma: Tensor
    tolerance: float

    @torch.no_grad()
    def velocity(self, condition: Condition | None = None) -> Tensor:
        return self.policy.velocity(self.x, self.sigma, condition or self.condition)

    def differ(self, a: Tensor, b: Tensor) -> bool:
        """Return True if the tensors differ by more than the tolerance relative to the largest |b|."""
        return bool((a - b).abs().max() > self.tolerance * b.abs().max().clamp_min(1e-6))


def check_adapter(
    policy: DiffusionPolicy, *, prompts: Sequence[str] = ("a red circle", "two blue squares"), save: bool = True
) -> list[str]:
    """Run the contract tests on an adapter, restore its weights, and return the passed checks, or raise
    `AdapterError`.

    `prompts` are two that the model tells apart; `save` also tests `save` and `load` in a temporary folder.
    """
    check_members(policy)
    first, second = prompts
    x = torch.randn((3, *policy.latent_shape), generator=torch.Generator().manual_seed(0))
    probe = _Probe(
        policy=policy,
        prompts=prompts,
        condition=policy.encode([first, second, first]),
        x=x.to(policy.device, policy.storage_dtype),
        sigma=torch.tensor([0.9, 0.5, 0.2], device=policy.device),
        tolerance=1e-4 if policy.storage_dtype.itemsize >= 4 else 0.03,
    )
    passed = ["protocol", "latents"]
    for check in _CHECKS if save else _CHECKS[:-1]:
        name, problems = check.__name__[1:].removesuffix("_problems"), check(probe)
        if message := next((message for broken, message in problems if broken), None):
            problems.close()  # its blocks restore the weights
            raise AdapterError(f"{name}: {message}")
        passed.append(name)
    return passed


def check_members(policy: Any) -> None:
    """Raise `AdapterError` if a member of the contract is missing or declared wrongly, without computing."""
    missing = [name for name in MEMBERS if not hasattr(policy, name)]
    if missing:
        raise AdapterError(
            f"protocol: {type(policy).__name__} has no {', '.join(missing)}: see visalign.interfaces.DiffusionPolicy."
        )
    shape, predictions = policy.latent_shape, get_args(Prediction)
    is_shape = isinstance(shape, tuple) and shape and all(isinstance(n, int) and n > 0 for n in shape)
    rules = {
        f"latents: latent_shape is {shape!r}. Make it a tuple of positive integers, (C, H, W).": is_shape,
        f"latents: storage_dtype is {policy.storage_dtype}. Make it a floating dtype.": (
            policy.storage_dtype.is_floating_point
        ),
        f"protocol: prediction is {policy.prediction!r}; allowed: {', '.join(predictions)}, as the network gives it; "
        "velocity() converts it.": policy.prediction in predictions,
    }
    if broken := next((message for message, valid in rules.items() if not valid), None):
        raise AdapterError(broken)


def _other(what: str, tensor: Tensor, shape: Sequence[int], hint: str = "") -> tuple[bool, str]:
    """Return whether a tensor is not float32 of this shape, and the problem."""
    broken = tuple(tensor.shape) != tuple(shape) or tensor.dtype != torch.float32
    return broken, f"{what} is {tensor.dtype} {tuple(tensor.shape)}. Return float32 {tuple(shape)}{hint}."


def _sigmas_problems(probe: _Probe) -> Problems:
    for timestep_schedule in ("diffusers", "plain"):
        for steps in (1, 4):
            sigmas = probe.policy.sigmas(steps, timestep_schedule=timestep_schedule)
            call = f"sigmas({steps}, timestep_schedule={timestep_schedule!r})"
            yield _other(call, sigmas, (steps + 1,), ", the final 0 included")
            starts = sigmas[0] == 1 or (probe.policy.prediction != "velocity" and sigmas[0] < 1)
            yield (
                not starts or sigmas[-1] != 0 or not bool((sigmas.diff() < 0).all()),
                f"{call} is {sigmas.tolist()}. It must fall strictly from 1 to 0 (from below 1 where the "
                "prediction is not the velocity).",
            )
            yield _other("times of noise levels", probe.policy.times(sigmas), sigmas.shape)


def _encode_problems(probe: _Probe) -> Problems:
    selected = probe.condition.select(torch.zeros(4, dtype=torch.int64))
    yield (
        len(probe.condition) != 3 or len(selected) != 4,
        f"encode of 3 prompts has length {len(probe.condition)}, select of 4 has {len(selected)}. Let "
        "__len__ count samples, not unique prompts.",
    )


def _velocity_problems(probe: _Probe) -> Problems:
    v = probe.velocity()
    yield _other("velocity", v, probe.x.shape, " (call .float() on the model's output)")
    yield (
        v.requires_grad or not bool(v.isfinite().all()),
        "velocity under no_grad is not finite, or requires grad. Look for NaN weights or enable_grad.",
    )
    with torch.enable_grad():
        with_gradient = probe.policy.velocity(probe.x, probe.sigma, probe.condition).detach()
    difference = float((with_gradient - v).abs().max() / v.abs().max().clamp_min(1e-6))
    yield (
        difference > 1e-6,
        f"velocity with gradient differs by {difference:.2g} (relative) from the one without, so no ratio is "
        "1. Use the same path in both: guidance in the same number of passes, no dropout.",
    )


def _condition_problems(probe: _Probe) -> Problems:
    condition, index, policy = probe.condition, torch.tensor([2, 1, 0, 0]), probe.policy
    expected = probe.velocity()
    with torch.no_grad():
        permuted = policy.velocity(probe.x[index], probe.sigma[index], condition.select(index))
        direct = policy.velocity(probe.x[:2], probe.sigma[:2], policy.encode(list(probe.prompts)))
    yield (
        probe.differ(permuted, expected[index]) or probe.differ(direct, expected[:2]),
        "a sample's velocity changes with select() or with the order of prompts. Index the encoded prompts "
        "by sample: select(index) means self.index[index].",
    )
    yield (
        not probe.differ(probe.velocity(condition.select(torch.tensor([1, 0, 1]))), expected),
        f"the prompts {probe.prompts} give the same velocity. Pass the condition to the model, or give "
        "check_adapter two prompts that the model tells apart.",
    )


def _neighbours_problems(probe: _Probe) -> Problems:
    batched = probe.velocity()
    for i in range(3):
        row, condition = slice(i, i + 1), probe.condition.select(torch.tensor([i]))
        with torch.no_grad():
            single = probe.policy.velocity(probe.x[row], probe.sigma[row], condition)
        yield (
            probe.differ(single, batched[row]),
            f"the velocity of sample {i} depends on its neighbours in the batch. Remove statistics over the "
            "batch, padding that is not masked, and one sigma used for all.",
        )


def _gradients_problems(probe: _Probe) -> Problems:
    parameters = probe.policy.trainable_parameters()
    names = [name for name, _ in parameters]
    yield (
        not names or len(set(names)) < len(names),
        f"trainable_parameters() gives {len(names)} names, {len(set(names))} different. Name each once.",
    )
    frozen = next((name for name, p in parameters if not p.requires_grad), None)
    yield frozen, f"{frozen} is listed as trainable but frozen. List the parameters with requires_grad."
    trainable = {id(p) for _, p in parameters}
    untrained = [(n, p) for n, p in probe.policy.module.named_parameters() if id(p) not in trainable]
    saved_gradients = [(p, p.grad) for _, p in (*parameters, *untrained)]
    try:
        for p, _ in saved_gradients:
            p.grad = None
        with torch.enable_grad():
            probe.policy.velocity(probe.x, probe.sigma, probe.condition).square().sum().backward()
        unreached = [name for name, p in parameters if p.grad is None]
        leaked = next((name for name, p in untrained if p.grad is not None), None)
        dead = all(p.grad is None or not bool(p.grad.any()) for _, p in parameters)
    finally:
        for p, grad in saved_gradients:
            p.grad = grad
    yield (
        unreached or dead,
        f"no gradient reaches {unreached[0] if unreached else 'any parameter'}. Compute velocity with the "
        "module that trainable_parameters() names, outside of no_grad; leave unused parameters out.",
    )
    yield leaked, f"{leaked} gets a gradient but is not listed as trainable. Freeze it: requires_grad_(False)."


@contextmanager
def _perturbed(policy: DiffusionPolicy) -> Iterator[None]:
    generator = torch.Generator().manual_seed(1)
    originals = [(p, p.detach().clone()) for _, p in policy.trainable_parameters()]
    for p, _ in originals:
        p.data.add_((0.1 * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype))
    try:
        yield
    finally:
        for p, value in originals:
            p.data.copy_(value)


def _reference_problems(probe: _Probe) -> Problems:
    policy = probe.policy
    with policy.reference():
        before = probe.velocity()
    with _perturbed(policy):
        flags = [p.requires_grad for _, p in policy.trainable_parameters()]
        trained = probe.velocity()
        with policy.reference():
            with policy.reference():
                pass
            inside = probe.velocity()
        after = probe.velocity()
        flags_after = [p.requires_grad for _, p in policy.trainable_parameters()]
    yield (
        not probe.differ(trained, before),
        "changing the trainable parameters does not change the velocity. Check what velocity() calls.",
    )
    yield (
        probe.differ(inside, before),
        "inside reference(), also after a nested one has ended, the policy must be the model before "
        "training. Switch adapters off (or the original weights in) at the outermost entry only.",
    )
    yield (
        probe.differ(after, trained) or flags_after != flags,
        "reference() did not restore the policy: weights and requires_grad must come back. Restore them in a "
        "finally block.",
    )


def _decode_problems(probe: _Probe) -> Problems:
    with torch.no_grad():
        images, single = probe.policy.decode(probe.x), probe.policy.decode(probe.x[1:2])
    yield _other("decode of 3 latents [B, 3, H, W]", images, (3, 3, *images.shape[2:4]))
    yield (
        not (bool(images.isfinite().all()) and images.min() >= 0 and images.max() <= 1),
        f"decoded values reach from {float(images.min()):.3g} to {float(images.max()):.3g}. Map the "
        "autoencoder's [-1, 1] to [0, 1] with (image / 2 + 0.5).clamp(0, 1).",
    )
    yield (
        probe.differ(single, images[1:2]),
        "a decoded image depends on its neighbours in the batch. Put the autoencoder into eval mode.",
    )


def _encode_images_problems(probe: _Probe) -> Problems:
    policy: Any = probe.policy
    if not hasattr(policy, "encode_images"):
        return
    draw = torch.Generator().manual_seed(0)
    images = [torch.rand(3, *size, generator=draw) for size in ((40, 56), (64, 64))]
    try:
        batched, single = policy.encode_images(images), policy.encode_images(images[1:])
    except UserError:  # a model without an image encoder says so
        return
    expected = (2, *policy.latent_shape)
    yield (
        batched.shape != expected or batched.dtype != policy.storage_dtype,
        f"encode_images of 2 images is {batched.dtype} {tuple(batched.shape)}. Return {policy.storage_dtype} "
        f"{expected}, as velocity takes latents.",
    )
    yield (
        probe.differ(single, batched[1:]),
        "the latents of an image depend on its neighbours. Take the posterior's mode, not a sample.",
    )


def _forward_count_problems(probe: _Probe) -> Problems:
    start = astuple(probe.policy.forward_count)
    probe.velocity()
    middle = astuple(probe.policy.forward_count)
    with torch.enable_grad():
        probe.policy.velocity(probe.x, probe.sigma, probe.condition)
    end = astuple(probe.policy.forward_count)
    yield (
        middle[0] - start[0] not in (3, 6) or middle[1] != start[1] or end[1] - middle[1] != 3,
        f"3 latents without and then with gradient counted (forward, forward_backward) {start} -> {middle} "
        f"-> {end}. Count latents: forward without gradient (twice under guidance), forward_backward with.",
    )


def _save_problems(probe: _Probe) -> Problems:
    policy: Any = probe.policy
    with tempfile.TemporaryDirectory() as name, _perturbed(policy):
        folder = Path(name) / "saved"
        policy.save(folder)
        yield (
            not folder.is_dir() or not any(folder.iterdir()),
            f"save(folder) wrote nothing to {folder}. Write the trained weights into that folder.",
        )
        if not hasattr(policy, "load"):
            return
        saved = probe.velocity()
        for _, p in policy.trainable_parameters():
            p.data.mul_(0.5)
        policy.load(folder)
        yield (
            probe.differ(probe.velocity(), saved),
            "load(folder) does not restore what save(folder) wrote. Save all of trainable_parameters().",
        )


_CHECKS: tuple[Callable[[_Probe], Problems], ...] = (
    *(_sigmas_problems, _encode_problems, _velocity_problems, _condition_problems, _neighbours_problems),
    *(_gradients_problems, _reference_problems, _decode_problems, _encode_images_problems),
    *(_forward_count_problems, _save_problems),
)
"""In this order; `save` is the last, since it can be left out."""
