# SPDX-License-Identifier: Apache-2.0
"""`check_invariance`: test that a loss does not depend on how its batch is split, ordered or padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .data import PolicyOutput, Prepared, Trajectories

Parts = list[tuple[Prepared, PolicyOutput]]


def check_invariance(objective: Any, trajectories: Trajectories, policy: PolicyOutput) -> dict[str, float]:
    """Split, permute, relabel, pad and duplicate a batch: change -> how much the loss or a gradient moved.

    Numbers are relative to the largest gradient, or to the loss: with float64 tensors a right loss stays
    below 1e-6. Padding is filled with NaN, and must have a gradient of exactly 0, else infinity is reported.
    Duplicates are in groups of their own: a mean stays, each copy gets half the gradient, a sum ("token_sum")
    doubles. A `dr_grpo` aggregation needs a stated `length`. `objective` may be your own loss with `prepare`
    and `loss`; the policy's values for all B ≥ 2 samples are used, not their graph.
    """
    t, (count, length) = trajectories, trajectories.weight.shape
    prepared, everything = objective.prepare(t), torch.arange(count)
    loss, gradients = _measure(objective, [(prepared, policy)])
    scale = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0) or 1.0
    report: dict[str, float] = {}

    def compare(
        name: str, parts: Parts, restore: Callable[[Tensor], Tensor] = lambda g: g, factor: float = 1.0
    ) -> None:
        new_loss, new = _measure(objective, parts)
        moved = [abs(new_loss - factor * loss) / max(abs(factor * loss), scale * 1e-6, 1e-12)]
        for key, gradient in gradients.items():
            restored = new[key] if key.startswith("ptx") else restore(new[key])
            moved += (restored - factor * gradient).abs().flatten().div(scale).tolist()
            if name.startswith("pad") and int((restored != 0).sum()) != int((new[key] != 0).sum()):
                moved.append(torch.inf)
        report[name] = float(torch.tensor(moved).nan_to_num(torch.inf, torch.inf).max())

    order = torch.arange(count).flip(0)
    splits = {f"micro-batches of {size}": everything.split(size) for size in range(1, count)}
    for name, split in {**splits, "uneven micro-batches": order.tensor_split([1, count // 2])}.items():
        back = torch.cat(split).argsort()
        parts = [(prepared.rows(rows), _rows(policy, rows, i == 0)) for i, rows in enumerate(split)]
        compare(name, parts, lambda g, back=back: g[back])
    compare("permute", [(objective.prepare(t.rows(order)), _rows(policy, order))], lambda g: g[order.argsort()])
    labels = t.group.tolist() if isinstance(t.group, Tensor) else list(t.group)
    renamed = replace(t, group=[f"group {label}" for label in labels])
    compare("relabel", [(objective.prepare(renamed), policy)])
    for left, right, below in ((2, 0, 0), (0, 3, 0), (0, 0, 2), (1, 1, 1)):
        size = (left, right, below)
        wide = {k: _pad(k, v, t.weight, size) for k, v in vars(t).items() if isinstance(v, Tensor)}
        padded = replace(t, **{**wide, "group": [*labels, *(("absent", i) for i in range(below))]})
        outputs = {k: _pad(k, v, t.weight, size) for k, v in vars(policy).items() if v is not None}
        compare(
            f"pad {left} left, {right} right, {below} samples",
            [(objective.prepare(padded), PolicyOutput(**outputs))],
            lambda g, left=left: g[:count, left : left + length] if g.ndim > 1 else g[:count],
        )
    twice = everything.repeat(2)
    copied = replace(t.rows(twice), group=[(label, i >= count) for i, label in enumerate(labels * 2)])
    factor = 2.0 if getattr(objective, "aggregation", None) == "token_sum" else 1.0
    both = [(objective.prepare(copied), _rows(policy, twice))]
    compare("duplicate", both, lambda g: g[:count] + g[count:], factor)
    return report


def _rows(policy: PolicyOutput, index: Tensor, first: bool = True) -> PolicyOutput:
    """Rows of the policy's outputs; the pretraining tokens go to the first part."""
    outputs = {k: v for k, v in vars(policy).items() if v is not None}
    return PolicyOutput(**{k: v[: len(v) * first] if "ptx" in k else v[index] for k, v in outputs.items()})


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


def _measure(objective: Any, parts: Parts) -> tuple[float, dict[str, Tensor]]:
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
