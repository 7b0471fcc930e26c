# SPDX-License-Identifier: Apache-2.0
"""What a judge can learn from labels: one row per task, from what it says of a batch to a loss.

A batch holds M rows that the judge reads (an image with its prompt, or a request), and labels on rows or on
pairs of rows. What the judge says is a mapping of tensors: "value" [M] always, "log_std" [M], "cosines" and
others where the task needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from visalign.core.preference.bradley_terry import (
    bradley_terry_loss,
    margin_ranking_loss,
    outcome_loss,
    soft_labels,
    tie_log_prob,
    vote_shares,
)
from visalign.core.preference.ict import IctLabels, ict_loss
from visalign.core.preference.uncertainty import (
    log_win_probability,
    pair_deviation,
    uncertain_preference_loss,
)
from visalign.core.preference.yes_no import YesNo, yes_no_loss, yes_no_pair_loss

from .batch import Outputs, RewardBatch
from .rating import Settings, Sums, other_answer_penalty, rating, rating_fidelity


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row of `TASKS`."""

    loss: Callable[[Outputs, RewardBatch, Settings, torch.Generator], Sums]
    log_prob: Callable[[Outputs, RewardBatch], tuple[Tensor, Tensor]] | None = None
    """(ln P, ln (1 − P)) [N] that the left one of each pair is better; None: the judge gives no
    probability."""
    labels: str = "pairs"
    """"pairs", "triples", "rows" (rated images) or "answers" (what a judge wrote): what the labels stand
    on."""


def _sides(outputs: Outputs, batch: RewardBatch, name: str = "value") -> tuple[Tensor, Tensor]:
    """outputs[name] of the left and right rows, [N] each."""
    if batch.left is None or batch.right is None:
        raise ValueError("this task learns from pairs, and the batch has none.")
    value = outputs[name]
    return value[batch.left.to(value.device)], value[batch.right.to(value.device)]


def _labels(batch: RewardBatch, settings: Settings, like: Tensor) -> tuple[Tensor, Tensor]:
    """(p, weight) [N] of the pairs."""
    assert batch.label is not None
    label, weight = batch.label.to(like), torch.ones_like(batch.label).to(like)
    if batch.votes is not None:
        known = torch.isfinite(batch.votes).all(1)
        counts = batch.votes.nan_to_num(0.0)
        share = soft_labels(counts[:, 0], counts[:, 1], counts[:, 2], smoothing=settings.smoothing).to(like)
        label = torch.where(known.to(like.device), share, label)
        if settings.pair_weight == "votes":
            weight = torch.where(known, counts.sum(1), 1.0).to(like)
    if batch.weight is not None:
        weight = weight * batch.weight.to(like)
    return label, torch.where(torch.isnan(label), 0.0, weight)


def _bradley_terry(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    left, right = _sides(outputs, batch)
    label, weight = _labels(batch, settings, left)
    if settings.ties != "half":
        share = _outcome_shares(batch, settings, left)
        chances = tie_log_prob(left, right, settings.tie_strength, model=settings.ties)  # type: ignore[arg-type]
        loss = outcome_loss(chances, share)
    else:
        loss = bradley_terry_loss(
            left,
            right,
            label,
            margin=settings.margin,
            centre=settings.centre,
            displacement=settings.displacement,
        )
    return (loss * weight).sum(), weight.sum()


def _outcome_shares(batch: RewardBatch, settings: Settings, like: Tensor) -> Tensor:
    """[N, 3] shares of (left, equal, right): of the votes, or where there are none the label; ½ is a tie."""
    assert batch.label is not None
    label = batch.label.to(like)
    tied = (label == 0.5).to(like)
    share = torch.stack([label * (1 - tied), tied, (1 - label) * (1 - tied)], -1)
    if batch.votes is None:
        return share
    known = torch.isfinite(batch.votes).all(1).to(like.device)
    counts = batch.votes.nan_to_num(0.0).to(like)
    voted = vote_shares(counts[:, 0], counts[:, 1], counts[:, 2], smoothing=settings.smoothing)
    return torch.where(known[:, None], voted, share)


def _uncertainty(mode: str) -> Callable[..., Sums]:
    def loss_of(outputs: Outputs, batch: RewardBatch, settings: Settings, generator: torch.Generator) -> Sums:
        left, right = _sides(outputs, batch)
        label, weight = _labels(batch, settings, left)
        left_std, right_std = (side.exp() for side in _sides(outputs, batch, "log_std"))
        drawn = {"samples": settings.samples} if mode == "upstream_monte_carlo" else {}
        loss = uncertain_preference_loss(
            left,
            right,
            left_std,
            right_std,
            label,
            mode=mode,  # type: ignore[arg-type]  # one of its three, below
            **drawn,
            generator=generator,
        )
        if settings.centre:
            loss = loss + settings.centre * (left + right).square()
        return (loss * weight).sum(), weight.sum()

    return loss_of


def _hp(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """A pair counts as far as people agreed on it, |2p − 1|."""
    left, right = _sides(outputs, batch)
    label, weight = _labels(batch, settings, left)
    agreed = torch.where(torch.isnan(label), 0.0, 2 * label - 1)
    wins = agreed >= 0
    loss = margin_ranking_loss(
        torch.where(wins, left, right), torch.where(wins, right, left), margin=settings.margin
    )
    weight = weight * agreed.abs()
    return (loss * weight).sum(), weight.sum()


def _ict(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    if batch.ict is None:
        raise ValueError("the task ict learns from triples, and the batch has none.")
    images = outputs["image"]
    labels = IctLabels(*(getattr(batch.ict, name).to(images) for name in IctLabels.__dataclass_fields__))
    loss = ict_loss(
        outputs["easy"],
        outputs["refined"],
        images.view(3, -1, images.shape[-1]),
        labels,
        negative_weight=settings.negatives,
    )
    weight = loss.new_tensor(float(batch.size))
    return loss * weight, weight


def _yes_no(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """On rows the likelihood of the answer; on pairs Bradley-Terry on the log-odds, with some likelihood.

    With mass 1 the former is the likelihood over the vocabulary, `yes_no_loss(over="vocabulary")`.
    """
    away = other_answer_penalty(outputs, settings)
    if batch.target is not None:
        odds = outputs["value"]
        target = batch.target.to(odds)
        known = ~torch.isnan(target)
        loss = yes_no_loss(_answer(odds), target) + torch.where(known, away, 0.0)
        return loss.sum(), known.sum().to(odds)
    left, right = _sides(outputs, batch)
    label, weight = _labels(batch, settings, left)
    loss = yes_no_pair_loss(_answer(left), _answer(right), label, likelihood_weight=settings.likelihood)
    loss = loss + (away[batch.left] + away[batch.right]) / 2
    return (loss * weight).sum(), weight.sum()


def _checklist(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """Logistic regression on the difference of weighted answers, λ/2 |w|² added per pair."""
    left, right = _sides(outputs, batch)
    label, weight = _labels(batch, settings, left)
    away = other_answer_penalty(outputs, settings)
    loss = bradley_terry_loss(left, right, label) + (away[batch.left] + away[batch.right]) / 2
    penalty = settings.penalty / 2 * outputs["weights"].square().sum()
    return (loss * weight).sum() + penalty * weight.sum(), weight.sum()


def _answer(odds: Tensor) -> YesNo:
    """What log-odds say of yes and no among the two."""
    return YesNo(odds, F.logsigmoid(odds), F.logsigmoid(-odds))


def _logistic(outputs: Outputs, batch: RewardBatch) -> tuple[Tensor, Tensor]:
    left, right = _sides(outputs, batch)
    return F.logsigmoid(left - right), F.logsigmoid(right - left)


def _quadrature(outputs: Outputs, batch: RewardBatch) -> tuple[Tensor, Tensor]:
    left, right = _sides(outputs, batch)
    std = pair_deviation(*(side.exp() for side in _sides(outputs, batch, "log_std")))
    return log_win_probability(left - right, std), log_win_probability(right - left, std)


TASKS: dict[str, Task] = {
    "bradley_terry": Task(loss=_bradley_terry, log_prob=_logistic),
    "uncertainty": Task(loss=_uncertainty("paper"), log_prob=_quadrature),
    "uncertainty_upstream": Task(loss=_uncertainty("upstream"), log_prob=_quadrature),
    "upstream_monte_carlo": Task(loss=_uncertainty("upstream_monte_carlo"), log_prob=_quadrature),
    "ict": Task(loss=_ict, labels="triples"),
    "hp": Task(loss=_hp),
    "yes_no": Task(loss=_yes_no, log_prob=_logistic),
    "rating": Task(loss=rating, labels="rows"),
    "rating_fidelity": Task(loss=rating_fidelity, labels="rows"),
    "critique": Task(loss=_yes_no, labels="answers"),
    "checklist": Task(loss=_checklist, log_prob=_logistic),
}
"""Name -> what is learned. uncertainty_upstream and upstream_monte_carlo are HPSv3's released code, which
drives
the standard deviation to 0."""
