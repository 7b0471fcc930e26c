# SPDX-License-Identifier: Apache-2.0
"""Aggregate losses per decision to one number, so that micro-batches sum to exactly the full batch.

Denominators are counted once over the whole optimizer step (all micro-batches, all devices) and passed in;
`aggregate` returns a micro-batch's share. The sum of the shares equals one big batch, however uneven the
parts. With DDP, which averages gradients over W devices, multiply each share by W.

Counts of parts with whole sequences and groups add up: `a + b`, or an all-reduce of each field (sum; maximum
for `length`). If a group is split over devices, gather `row_tokens(weight)` and the labels of all rows, [N]
each, and use `count_step(tokens, group=labels, length=L)` and `row_tokens(tokens, labels)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core.checks import check_choice, check_same
from visalign.core.groups.labels import Labels, group_index
from visalign.core.precision import float32

Mode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo", "token_sum", "group_token_mean"]

MODES: dict[str, str] = {
    "token_mean": "Σ w ℓ / Σ w",
    "seq_mean_token_mean": "mean_i (Σ_t w ℓ / n_i), n_i = Σ_t w",
    "seq_mean_token_sum": "mean_i Σ_t w ℓ",
    "dr_grpo": "Σ w ℓ / (B L)",
    "token_sum": "Σ w ℓ",
    "group_token_mean": "mean_g (Σ_{i∈g} Σ_t w ℓ / Σ_{i∈g} n_i)",
}
"""Formula of each mode. GRPO: seq_mean_token_mean; DAPO: token_mean (released), group_token_mean."""


@dataclass(frozen=True)
class Counts:
    """Denominators of one optimizer step, 0-dim float64 tensors; `a + b` merges disjoint parts."""

    tokens: Tensor
    """Σ w over all decisions."""
    sequences: Tensor
    """Number of sequences in the average."""
    length: Tensor
    """L of "dr_grpo", a constant of the step."""
    groups: Tensor | None = None
    """Number of groups; None if not counted."""

    def __add__(self, other: Counts) -> Counts:
        """Merge the counts of two parts; no group may be split between them."""
        return Counts(
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
            length=torch.maximum(self.length, other.length),
            groups=None if self.groups is None or other.groups is None else self.groups + other.groups,
        )

    def to(self, device: torch.device) -> Counts:
        moved: dict[str, Any] = {k: None if v is None else v.to(device) for k, v in vars(self).items()}
        return Counts(**moved)


def count_step(
    weight: Tensor, *, length: int | None = None, group: Labels | None = None, empty: Literal["drop", "keep"] = "drop"
) -> Counts:
    """Count tokens, sequences and groups of one optimizer step, or of a part of it.

    `weight` is [B, T], or [N] for single decisions. `length` is the L of "dr_grpo", in decisions, equal for every
    part; T by default. `group` labels are for "group_token_mean". "drop" (verl) leaves rows and groups without a
    present decision out of the average; "keep" (TRL) counts them as losses of zero. The papers leave this open.
    """
    check_choice("empty", empty, ("drop", "keep"))
    rows = _rows("weight", weight)
    present = (rows != 0).any(1)
    total = rows.double()
    groups = None
    if group is not None:
        index, number = group_index(group, rows.shape[0], rows.device)
        occupied = total.new_zeros(number).index_add(0, index, present.double())
        groups = (occupied > 0).double().sum() if empty == "drop" else total.new_tensor(number)
    return Counts(
        tokens=total.sum(),
        sequences=present.double().sum() if empty == "drop" else total.new_tensor(rows.shape[0]),
        length=total.new_tensor(rows.shape[1] if length is None else length),
        groups=groups,
    )


def row_tokens(weight: Tensor, group: Labels | None = None) -> Tensor:
    """Compute Σ_t w of each row's sequence or, with labels, of its group; [B] float64.

    Compute it over the whole step, slice it like the micro-batches, and pass it to `aggregate` where a
    micro-batch lacks part of the sequence or group.
    """
    row_sum = _rows("weight", weight).double().sum(1)
    if group is None:
        return row_sum
    index, number = group_index(group, row_sum.shape[0], row_sum.device)
    return row_sum.new_zeros(number).index_add(0, index, row_sum)[index]


def aggregate(
    loss: Tensor, weight: Tensor, mode: Mode, counts: Counts, *, denominator: Tensor | None = None
) -> Tensor:
    """Aggregate one micro-batch's losses to its exact share of the step's loss, a number, by a formula of `MODES`.

    `loss` is [B, T], or [N] for single decisions, e.g. (image, step) pairs; `counts` are of the whole step.
    `denominator` [B] from `row_tokens` is required by "group_token_mean", and by "seq_mean_token_mean" if a
    sequence is split over rows; without it a row is a whole sequence. To reweight steps without renormalizing
    (GRPO-Guard's 1/(−dt)), multiply the loss instead. Liu et al., Dr.GRPO, arXiv 2503.20783 (dr_grpo); Yu et
    al., DAPO, arXiv 2503.14476, eq. 8 and 12 (group_token_mean as the formulas state it, token_mean as its
    code averages); Shao et al., DeepSeekMath, arXiv 2402.03300, eq. 3 (seq_mean_token_mean).
    """
    check_choice("mode", mode, MODES)
    check_same(loss=loss, weight=weight)
    values, rows = float32(_rows("loss", loss)), _rows("weight", weight)
    check_same(denominator=denominator, rows=rows[:, 0])
    total = (torch.where(rows != 0, values, 0.0) * rows.to(values.dtype)).sum(1)
    if mode in ("seq_mean_token_mean", "group_token_mean"):
        if mode == "group_token_mean" and (counts.groups is None or denominator is None):
            raise ValueError(
                "group_token_mean needs count_step(weight, group=g) and denominator=row_tokens(weight, g)."
            )
        tokens = rows.double().sum(1) if denominator is None else denominator
        total = total / _nonzero(tokens).to(values.dtype)
    # Σ_i (Σ_t w ℓ [/ n_i]) / divisor
    divisors = {
        "token_mean": counts.tokens,
        "seq_mean_token_mean": counts.sequences,
        "seq_mean_token_sum": counts.sequences,
        "dr_grpo": counts.sequences * counts.length,
        "token_sum": torch.ones_like(counts.tokens),
        "group_token_mean": counts.groups,
    }
    divisor = divisors[mode]
    assert divisor is not None
    return total.sum() / _nonzero(divisor).to(values.dtype)


def _rows(name: str, value: Tensor) -> Tensor:
    if value.ndim not in (1, 2):
        raise ValueError(f"{name} must be [B, T] or [N]; got shape {tuple(value.shape)}.")
    return value[:, None] if value.ndim == 1 else value


def _nonzero(count: Tensor) -> Tensor:
    """Replace 0 by 1; the numerator is 0 there too."""
    return torch.where(count == 0, 1.0, count)
