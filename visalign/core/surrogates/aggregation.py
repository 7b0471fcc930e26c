# SPDX-License-Identifier: Apache-2.0
"""From losses per decision to one number, so that micro-batches sum to exactly the full batch.

The counts in the denominators are taken once over the whole optimizer step (all micro-batches, all devices)
and handed in; `aggregate` then returns a share. Adding the shares, or calling backward on each, equals one
big batch, however uneven the parts are. With DDP, which averages gradients over W devices, multiply each
share by W.

Counts of parts that hold whole sequences and whole groups add up: `a + b`, or an all-reduce of each field
(sum; `length` maximum). If a group is split over devices, gather `row_tokens(weight)` and the labels of all
rows, [N] each, and take `count_step(tokens, group=labels, length=L)` and `row_tokens(tokens, labels)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visalign.core.checks import check_choice, check_same
from visalign.core.groups.labels import Labels, group_index
from visalign.core.precision import float32

Mode = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "dr_grpo", "token_sum", "group_token_mean"
]

MODES: dict[str, str] = {
    "token_mean": "Σ w ℓ / Σ w",
    "seq_mean_token_mean": "mean_i (Σ_t w ℓ / n_i), n_i = Σ_t w",
    "seq_mean_token_sum": "mean_i Σ_t w ℓ",
    "dr_grpo": "Σ w ℓ / (B L)",
    "token_sum": "Σ w ℓ",
    "group_token_mean": "mean_g (Σ_{i∈g} Σ_t w ℓ / Σ_{i∈g} n_i)",
}
"""Name -> formula. GRPO: seq_mean_token_mean; DAPO as released: token_mean, as written: group_token_mean."""


@dataclass(frozen=True)
class Counts:
    """Denominators of one optimizer step; 0-dim float64 tensors. `a + b` joins two disjoint parts of it."""

    tokens: Tensor
    """Σ w over all decisions."""
    sequences: Tensor
    """Sequences B that are averaged over."""
    length: Tensor
    """L of "dr_grpo": a constant, at most once per step."""
    groups: Tensor | None = None
    """Groups with at least one present decision, or all; None when they were not counted."""

    def __add__(self, other: Counts) -> Counts:
        """Counts of both parts together; groups must not be split between the parts."""
        return Counts(
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
            length=torch.maximum(self.length, other.length),
            groups=None if self.groups is None or other.groups is None else self.groups + other.groups,
        )

    def to(self, device: torch.device) -> Counts:
        """The same on another device."""
        held = (self.tokens, self.sequences, self.length)
        return Counts(
            *(count.to(device) for count in held),
            groups=None if self.groups is None else self.groups.to(device),
        )


def count_step(
    weight: Tensor,
    *,
    length: int | None = None,
    group: Labels | None = None,
    empty: Literal["drop", "keep"] = "drop",
) -> Counts:
    """Count what one optimizer step (or a part of it, to be added up) holds.

    Args:
        weight: [B, T], or [N] for decisions that stand alone; 0 for absent decisions, a mask is the special
            case.
        length: L of "dr_grpo", in decisions; T when not given. Give the same number for every part.
        group: [B] labels, for "group_token_mean".
        empty: whether rows without a present decision count as sequences. The papers' 1/G is over responses
            of at least one token and leaves this open: "drop" (verl) averages over what takes part, "keep"
            (TRL) counts them as losses of zero. Groups alike.

    Returns:
        The counts.
    """
    check_choice("empty", empty, ("drop", "keep"))
    rows = _rows("weight", weight)
    if length is not None and length < 1:
        raise ValueError(f"length must be at least 1 decision; got {length}.")
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
    """Σ_t w of each row's own sequence, or, with labels, of its whole group; [B] float64.

    Computed over the whole step, sliced like the rows of a micro-batch, and passed to `aggregate` where a
    micro-batch does not hold the sequence, or the group, as a whole.
    """
    own = _rows("weight", weight).double().sum(1)
    if group is None:
        return own
    index, number = group_index(group, own.shape[0], own.device)
    return own.new_zeros(number).index_add(0, index, own)[index]


def aggregate(
    loss: Tensor, weight: Tensor, mode: Mode, counts: Counts, *, denominator: Tensor | None = None
) -> Tensor:
    """Sum one micro-batch's losses into its exact share of the step's loss.

    Positions of weight 0 take no part: their loss may be NaN and gets exactly zero gradient. The formulas are
    in `MODES`. To reweight steps without renormalising (GRPO-Guard's 1/(−dt)), multiply the loss instead.

    Args:
        loss: [B, T], or [N] for decisions that stand alone, e.g. flat (image, step) pairs.
        weight: the same shape, ≥ 0.
        mode: a key of `MODES`.
        counts: of the whole step, from `count_step`.
        denominator: [B] from `row_tokens`; needed by "group_token_mean", and by "seq_mean_token_mean" when a
            sequence is split over rows or micro-batches. Without it a row is a whole sequence.

    Returns:
        0-dim share, in the dtype of loss, float32 or better; 0 with zero gradients when nothing is present.

    Raises:
        ValueError: shapes that do not fit, an unknown mode, or a denominator or group count that is missing.

    Liu et al., Dr.GRPO, arXiv 2503.20783 (dr_grpo); Yu et al., DAPO, arXiv 2503.14476, eq. 8 and 12
    (group_token_mean as the formulas state it, token_mean as its code averages);
    Shao et al., DeepSeekMath, arXiv 2402.03300, eq. 3 (seq_mean_token_mean).
    """
    check_choice("mode", mode, MODES)
    check_same(loss=loss, weight=weight)
    values, rows = _rows("loss", loss), _rows("weight", weight)
    values = float32(values)
    if denominator is not None and denominator.shape != rows.shape[:1]:
        raise ValueError(
            f"denominator needs one entry per row, [{rows.shape[0]}]; got shape {tuple(denominator.shape)}."
        )
    inside = rows != 0
    total = (torch.where(inside, values, 0.0) * rows.to(values.dtype)).sum(1)
    if mode in ("seq_mean_token_mean", "group_token_mean"):
        if mode == "group_token_mean" and (counts.groups is None or denominator is None):
            raise ValueError(
                "group_token_mean needs count_step(weight, group=g) and denominator=row_tokens(weight, g)."
            )
        own = rows.double().sum(1) if denominator is None else denominator
        total = total / _nonzero(own).to(values.dtype)
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
    """1 where the count is 0: the numerator is 0 there too."""
    return torch.where(count == 0, 1.0, count)
