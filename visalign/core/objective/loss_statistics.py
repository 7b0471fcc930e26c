# SPDX-License-Identifier: Apache-2.0
"""Statistics of an update's ratio and clip: sums over decisions, added up over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossStatistics:
    """Sums over a micro-batch's present decisions, 0-dim float64; divide by `decisions` at the end."""

    decisions: Tensor
    """Number of present decisions."""
    samples: Tensor
    """Number of rows with a present decision."""
    shift: Tensor
    """Σ (r − 1)."""
    square: Tensor
    """Σ (r − 1)²."""
    dead_low: Tensor
    """Number of decisions with A < 0 whose policy term has no gradient; NaN if log π carries none."""
    dead_high: Tensor
    """The same for A > 0."""
    moved: Tensor
    """Σ (r − 1 − log r): KL(π_old‖π), k3."""
    reference: Tensor | None
    """Σ KL(π‖π_ref), exact where PolicyOutput.kl is given, else k3; None without a reference."""
    largest: Tensor
    """max |log r|; the only field that is not a sum."""

    def plus(self, other: LossStatistics) -> LossStatistics:
        summed: dict[str, Any] = dict(vars(other))
        for name, value in vars(self).items():
            if value is not None:
                summed[name] = value if summed[name] is None else value + summed[name]
        return LossStatistics(**{**summed, "largest": torch.maximum(self.largest, other.largest)})

    def stack(self) -> Tensor:
        """Stack the sums [8] in the order of the fields, for one all-reduce; a `reference` of None is 0."""
        zero = torch.zeros_like(self.decisions)
        return torch.stack([zero if value is None else value for name, value in vars(self).items() if name in SUMS])

    def with_sums(self, sums: Tensor, largest: Tensor) -> LossStatistics:
        """Replace the fields by the reduced sums of `stack` and the reduced maximum."""
        reduced = dict(zip(SUMS, sums.unbind(), strict=True))
        if self.reference is None:
            reduced.pop("reference")
        return replace(self, **reduced, largest=largest)


SUMS = tuple(item.name for item in fields(LossStatistics) if item.name != "largest")


def no_statistics(device: torch.device | None = None) -> LossStatistics:
    """Return zero statistics, for a process that holds no row of a step."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return LossStatistics(**dict.fromkeys({*SUMS, "largest"} - {"reference"}, zero), reference=None)


def loss_statistics(
    policy_term: Tensor,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    kl: Tensor | None = None,
    ref_log_prob: Tensor | None = None,
) -> LossStatistics:
    """Compute the statistics of a micro-batch, without waiting for the device.

    `policy_term` is the policy's term of the loss, still with its graph: dead decisions are those of this
    term alone, so that a KL term hides no clip. `log_prob` is as the term has used it; `kl` is the exact
    KL(π‖π_ref), `ref_log_prob` for k3 where it is not given.
    """
    has_graph = log_prob.requires_grad and torch.is_grad_enabled()
    gradient = None
    if has_graph and policy_term.requires_grad:
        # ends at log π: no second pass through the network
        (gradient,) = torch.autograd.grad(policy_term, [log_prob], retain_graph=True, allow_unused=True)
    with torch.no_grad():
        present = weight != 0
        log_r = torch.where(present, log_prob.double() - old_log_prob.double(), 0.0)
        shift = log_r.expm1()  # r − 1 of a ratio near 1
        dead = present if gradient is None else present & (gradient == 0)
        reference = None
        if kl is not None:
            reference = torch.where(present, kl.double(), 0.0).sum()
        elif ref_log_prob is not None:
            # k3: e^−d − 1 + d, d = log π − log π_ref
            d = torch.where(present, log_prob.double() - ref_log_prob.double(), 0.0)
            reference = (torch.expm1(-d) + d).sum()
        unknown = log_r.new_full((), float("nan"))
        return LossStatistics(
            decisions=present.sum().double(),
            samples=present.any(1).sum().double(),
            shift=shift.sum(),
            square=shift.square().sum(),
            dead_low=(dead & (advantage < 0)).sum().double() if has_graph else unknown,
            dead_high=(dead & (advantage > 0)).sum().double() if has_graph else unknown,
            moved=(shift - log_r).sum(),
            reference=reference,
            largest=log_r.abs().max() if log_r.numel() else log_r.new_zeros(()),  # max of nothing raises
        )
