# SPDX-License-Identifier: Apache-2.0
"""`check_invariance`: does a loss depend on how its batch happens to be cut, ordered or padded?

Public trainers' losses have changed with the micro-batch size, the padding side, the number of devices and
with NaN behind the end of a completion. A loss is handed in as an `Objective`, or as anything with its two
methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from .batch_changes import labels, pad_outputs, pad_samples, take_outputs, take_samples
from .data import Loss, PolicyOutput, Prepared, Trajectories


class CheckableObjective(Protocol):
    """What `check_invariance` needs."""

    def prepare(self, trajectories: Trajectories) -> Prepared:
        """Everything that depends on the whole step."""
        ...

    def loss(self, rows: Prepared, policy: PolicyOutput) -> Loss:
        """The share of a micro-batch."""
        ...


@dataclass(frozen=True)
class Change:
    """What one harmless change of the batch did."""

    name: str
    loss: float
    """|loss − loss of the whole batch|, relative to that loss."""
    gradient: float
    """Largest change of a gradient with respect to a number of the policy, relative to the largest one."""
    passed: bool


@dataclass(frozen=True)
class InvarianceReport:
    """The changes in the order in which they were tried."""

    changes: tuple[Change, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing changed beyond the tolerance."""
        return all(change.passed for change in self.changes)

    def __str__(self) -> str:
        width = max(len(change.name) for change in self.changes)
        verdict = {True: "same   ", False: "CHANGED"}
        return "\n".join(
            f"{verdict[c.passed]} {c.name:<{width}}  loss {c.loss:.1e}  gradient {c.gradient:.1e}"
            for c in self.changes
        )


_Part = tuple[Prepared, PolicyOutput]
_Gradients = dict[str, Tensor]


def check_invariance(
    objective: CheckableObjective,
    trajectories: Trajectories,
    policy: PolicyOutput,
    *,
    rtol: float = 1e-6,
    seed: int = 0,
) -> InvarianceReport:
    """Split the batch every way, permute, pad, relabel and duplicate it, and say what changed.

    * split: micro-batches of every size from 1 to B − 1, and uneven random ones;
    * permute: the samples in another order;
    * pad: absent decisions on both sides and absent samples, filled with NaN, as are the absent decisions
      that are there already; their gradient has to be exactly 0;
    * relabel: other names for the groups;
    * duplicate: every sample twice, in a group of its own: the loss of a mean stays, each copy gets half the
      gradient. A sum over decisions ("token_sum") is expected to double.

    Use float64 tensors: the tolerance is for those. A `dr_grpo` aggregation needs a stated `length`, since
    the padded length is not a property of the data; the check shows it otherwise, as it shows that
    `mean_rows` looks at the order of the samples and `empty="keep"` at absent ones.

    Args:
        objective: an `Objective`, or a loss of your own with its two methods.
        trajectories: of a step, B ≥ 2 samples.
        policy: numbers of all B samples; their values are used, not their graph.
        rtol: largest relative change of loss and gradients that counts as none.
        seed: of the permutations.

    Returns:
        The report; `str(report)` is a table, `report.passed` its verdict.
    """
    generator = torch.Generator().manual_seed(seed)
    loss, gradients = _measure(objective, [(objective.prepare(trajectories), policy)])
    changes = []
    for variants in (_cuts, _orders, _paddings, _copies):
        for variant in variants(objective, trajectories, policy, generator):
            got_loss, got = _measure(objective, variant.parts)
            exact = variant.clean(got)
            factor = variant.factor
            changes.append(
                _change(
                    variant.name,
                    loss * factor,
                    gradients,
                    got_loss,
                    variant.restore(got),
                    factor,
                    rtol,
                    exact,
                )
            )
    return InvarianceReport(tuple(changes))


@dataclass(frozen=True)
class _Variant:
    """The batch in another shape, and how its gradients are brought back into the first one's."""

    name: str
    parts: list[_Part]
    restore: Callable[[_Gradients], _Gradients] = dict
    factor: float = 1.0
    clean: Callable[[_Gradients], bool] = lambda _: True


def _cuts(
    objective: CheckableObjective, t: Trajectories, policy: PolicyOutput, generator: torch.Generator
) -> Iterator[_Variant]:
    prepared = objective.prepare(t)
    count = t.weight.shape[0]
    cuts = [(f"micro-batches of {size}", list(torch.arange(count).split(size))) for size in range(1, count)]
    for i in range(3):
        order = torch.randperm(count, generator=generator)
        ends = sorted({int(c) for c in torch.randint(1, count, (max(1, count // 3),), generator=generator)})
        cuts.append((f"uneven random micro-batches {i + 1}", list(order.tensor_split(ends))))
    for name, parts in cuts:
        back = torch.cat(parts).argsort()
        taken = [
            (prepared.rows(rows), take_outputs(policy, rows, first=i == 0)) for i, rows in enumerate(parts)
        ]
        yield _Variant(name, taken, lambda g, back=back: _by_sample(g, lambda v: v[back]))


def _orders(
    objective: CheckableObjective, t: Trajectories, policy: PolicyOutput, generator: torch.Generator
) -> Iterator[_Variant]:
    order = torch.randperm(t.weight.shape[0], generator=generator)
    parts = [(objective.prepare(take_samples(t, order)), take_outputs(policy, order))]
    yield _Variant("permute", parts, lambda g: _by_sample(g, lambda v: v[order.argsort()]))
    named = replace(t, group=[f"group {label}" for label in labels(t)])
    yield _Variant("relabel", [(objective.prepare(named), policy)])


def _paddings(
    objective: CheckableObjective, t: Trajectories, policy: PolicyOutput, _: torch.Generator
) -> Iterator[_Variant]:
    count, length = t.weight.shape
    for left, right, below in ((2, 0, 0), (0, 3, 0), (0, 0, 2), (1, 1, 1)):

        def inside(v: Tensor, left: int = left) -> Tensor:
            return v[:count, left : left + length] if v.ndim == 2 else v[:count]

        def clean(gradients: _Gradients, inside: Callable[[Tensor], Tensor] = inside) -> bool:
            outside = _by_sample(gradients, torch.clone)
            _by_sample(outside, lambda v: inside(v).zero_())
            return not any(bool((v != 0).any()) for k, v in outside.items() if not k.startswith("ptx"))

        padded = objective.prepare(pad_samples(t, left, right, below))
        yield _Variant(
            f"pad {left} left, {right} right, {below} samples",
            [(padded, pad_outputs(policy, t.weight, left, right, below))],
            lambda g, inside=inside: _by_sample(g, inside),
            clean=clean,
        )


def _copies(
    objective: CheckableObjective, t: Trajectories, policy: PolicyOutput, _: torch.Generator
) -> Iterator[_Variant]:
    count = t.weight.shape[0]
    twice = torch.arange(count).repeat(2)
    groups = [(label, i >= count) for i, label in enumerate(labels(t) * 2)]
    parts = [(objective.prepare(replace(take_samples(t, twice), group=groups)), take_outputs(policy, twice))]
    sums = getattr(objective, "aggregation", None) == "token_sum"
    yield _Variant(
        "duplicate",
        parts,
        lambda g: _by_sample(g, lambda v: v[:count] + v[count:]),
        factor=2.0 if sums else 1.0,
    )


def _by_sample(gradients: _Gradients, change: Callable[[Tensor], Tensor]) -> _Gradients:
    """Gradients with a row per sample changed, those of pretraining tokens as they are."""
    return {name: v if name.startswith("ptx") else change(v) for name, v in gradients.items()}


def _measure(objective: CheckableObjective, parts: list[_Part]) -> tuple[float, _Gradients]:
    """Sum of the shares, and its gradients with respect to every number of the policy."""
    total = 0.0
    collected: dict[str, list[Tensor]] = {}
    for rows, policy in parts:
        leaves = {
            f.name: value.detach().clone().requires_grad_()
            for f in fields(policy)
            if (value := getattr(policy, f.name)) is not None and f.name != "ptx_weight"
        }
        share = objective.loss(rows, replace(policy, **leaves)).total
        grads = torch.autograd.grad(share, list(leaves.values()), allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            collected.setdefault(name, []).append(torch.zeros_like(leaf) if grad is None else grad)
        total += float(share.detach())
    return total, {name: torch.cat(grads) for name, grads in collected.items()}


def _change(
    name: str,
    expected: float,
    gradients: _Gradients,
    loss: float,
    got: _Gradients,
    factor: float,
    rtol: float,
    exact: bool,
) -> Change:
    scale = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0) or 1.0
    off = abs(loss - expected) / max(abs(expected), scale * 1e-6, 1e-12)
    worst = max(
        (float((got[k] - factor * v).abs().max()) / scale for k, v in gradients.items() if v.numel()),
        default=0.0,
    )
    passed = off <= rtol and worst <= rtol and exact  # NaN compares false
    return Change(name=name, loss=off, gradient=worst, passed=passed)
