# SPDX-License-Identifier: Apache-2.0
"""`check_invariance`: test that a loss does not depend on how its batch is split, ordered or padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .data import PolicyOutput, Prepared, Trajectories

Parts = list[tuple[Prepared, PolicyOutput]]
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Change:
    """Effect of one harmless change of the batch."""

    name: str
    loss: float
    """|loss − loss of the whole batch|, relative to that loss."""
    gradient: float
    """Largest change of a gradient with respect to an output of the policy, relative to the largest one."""
    passed: bool


@dataclass(frozen=True)
class InvarianceReport:
    """All changes that were tried; `str` is a table."""

    changes: tuple[Change, ...]

    @property
    def passed(self) -> bool:
        """True if every change stayed within the tolerance."""
        return all(change.passed for change in self.changes)

    def __str__(self) -> str:
        return "\n".join(
            f"{'same   ' if c.passed else 'CHANGED'} {c.name:<36} loss {c.loss:.1e} gradient {c.gradient:.1e}"
            for c in self.changes
        )


def check_invariance(
    objective: Any, trajectories: Trajectories, policy: PolicyOutput, *, rtol: float = 1e-6
) -> InvarianceReport:
    """Split, permute, pad, relabel and duplicate a batch; neither loss nor gradients may change.

    Padding and absent decisions are filled with NaN, and their gradient must be exactly 0. Duplicates are in
    groups of their own: a mean stays, each copy gets half the gradient, a sum ("token_sum") doubles. Use
    float64 tensors. A `dr_grpo` aggregation needs a stated `length`.

    Args:
        objective: an `Objective`, or your own loss with its methods `prepare` and `loss`.
        trajectories: a step of B ≥ 2 samples.
        policy: outputs for all B samples; their values are used, not their graph.
        rtol: largest relative change of loss and gradients.
    """
    loss, gradients = _measure(objective, [(objective.prepare(trajectories), policy)])
    scale = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0) or 1.0
    changes = []
    for name, parts, restore, factor in _variants(objective, trajectories, policy):
        new_loss, new = _measure(objective, parts)
        restored = {k: v if k.startswith("ptx") else restore(v) for k, v in new.items()}
        off = abs(new_loss - factor * loss) / max(abs(factor * loss), scale * 1e-6, 1e-12)
        worst = max(float((restored[k] - factor * g).abs().max()) for k, g in gradients.items() if g.numel())
        # nothing is lost but exact zeros: padding has no gradient
        same_counts = all(
            int((restored[k] != 0).sum()) == int((new[k] != 0).sum()) for k in new if "pad" in name
        )
        passed = off <= rtol and worst / scale <= rtol and same_counts  # NaN compares false
        changes.append(Change(name, off, worst / scale, passed))
    return InvarianceReport(tuple(changes))


def _variants(
    objective: Any, t: Trajectories, policy: PolicyOutput
) -> Iterator[tuple[str, Parts, Callable[[Tensor], Tensor], float]]:
    """Yield name, parts, how gradients are brought back to the first order, and the factor of the loss."""
    generator, (count, length) = torch.Generator().manual_seed(0), t.weight.shape
    prepared, everything = objective.prepare(t), torch.arange(count)
    splits = [(f"micro-batches of {size}", list(everything.split(size))) for size in range(1, count)]
    for i in range(3):
        order = torch.randperm(count, generator=generator)
        ends = sorted({*torch.randint(1, count, (max(1, count // 3),), generator=generator).tolist()})
        splits.append((f"uneven random micro-batches {i + 1}", list(order.tensor_split(ends))))
    for name, parts in splits:
        back = torch.cat(parts).argsort()
        taken = [(prepared.rows(rows), _outputs(policy, rows, i == 0)) for i, rows in enumerate(parts)]
        yield name, taken, lambda g, back=back: g[back], 1.0
    order = torch.randperm(count, generator=generator)
    permuted = (objective.prepare(t.rows(order)), _outputs(policy, order))
    yield "permute", [permuted], lambda g: g[order.argsort()], 1.0
    labels = t.group.tolist() if isinstance(t.group, Tensor) else list(t.group)
    renamed = replace(t, group=[f"group {label}" for label in labels])
    yield "relabel", [(objective.prepare(renamed), policy)], lambda g: g, 1.0
    for left, right, below in ((2, 0, 0), (0, 3, 0), (0, 0, 2), (1, 1, 1)):
        size = (left, right, below)
        wide = {k: _pad(k, v, t.weight, size) for k, v in vars(t).items() if isinstance(v, Tensor)}
        padded = replace(t, **{**wide, "group": [*labels, *(("absent", i) for i in range(below))]})
        outputs = {k: _pad(k, v, t.weight, size) for k, v in vars(policy).items() if v is not None}
        yield (
            f"pad {left} left, {right} right, {below} samples",
            [(objective.prepare(padded), PolicyOutput(**outputs))],
            lambda g, left=left: g[:count, left : left + length] if g.ndim > 1 else g[:count],
            1.0,
        )
    twice = everything.repeat(2)
    copied = replace(t.rows(twice), group=[(label, i >= count) for i, label in enumerate(labels * 2)])
    factor = 2.0 if getattr(objective, "aggregation", None) == "token_sum" else 1.0
    both = [(objective.prepare(copied), _outputs(policy, twice))]
    yield "duplicate", both, lambda g: g[:count] + g[count:], factor


def _outputs(policy: PolicyOutput, index: Tensor, first: bool = True) -> PolicyOutput:
    """Rows of the policy's outputs; the pretraining tokens go to the first part."""
    taken = {
        k: v[: len(v) if first else 0] if "ptx" in k else v[index]
        for k, v in vars(policy).items()
        if v is not None
    }
    return PolicyOutput(**taken)


def _pad(name: str, value: Tensor, weight: Tensor, size: tuple[int, int, int]) -> Tensor:
    """Add absent decisions on both sides and absent samples; everything absent is NaN where it can be."""
    left, right, below = size
    if name.startswith("ptx") or name == "group":
        return value
    per_decision = value.shape[:2] == weight.shape and name not in ("reward", "reference_reward", "rank")
    fill = {"weight": 0.0, "uniform": 0.5, "log_z": 0.0}.get(name, float("nan"))
    if not value.is_floating_point():
        fill = 0 if value.dtype == torch.bool else -1
    if per_decision and fill != fill:
        value = value.masked_fill((weight == 0).reshape(*weight.shape, *[1] * (value.ndim - 2)), fill)
    sides = [0, 0] * (value.ndim - 1 - per_decision) + [left, right] * per_decision + [0, below]
    return pad(value, sides, value=fill)


def _measure(objective: Any, parts: Parts) -> tuple[float, Gradients]:
    """Sum the shares, and take their gradients with respect to every output of the policy."""
    total, gradients = 0.0, []
    for rows, policy in parts:
        values = {k: v for k, v in vars(policy).items() if v is not None and k != "ptx_weight"}
        leaves = {k: v.detach().clone().requires_grad_() for k, v in values.items()}
        share = objective.loss(rows, replace(policy, **leaves)).total
        grads = torch.autograd.grad(share, list(leaves.values()), allow_unused=True, materialize_grads=True)
        gradients.append(dict(zip(leaves, grads, strict=True)))
        total += float(share.detach())
    return total, {k: torch.cat([part[k] for part in gradients]) for k in gradients[0]}
