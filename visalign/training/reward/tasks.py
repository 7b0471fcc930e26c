# SPDX-License-Identifier: Apache-2.0
"""Losses of reward training: one entry of `TASKS` per task, from a model's outputs on a batch to a loss.

A batch holds M rows (an image with its prompt, or a request), and labels on rows or on pairs of rows. The outputs are
a mapping of tensors: "value" [M] always, "log_std" [M], "cosines" and others where the task needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visalign.core.preference.bradley_terry import (
    bradley_terry_loss,
    margin_ranking_loss,
    outcome_loss,
    plackett_luce_loss,
    soft_labels,
    tie_log_prob,
    vote_shares,
)
from visalign.core.preference.fidelity import fidelity_loss, quality_preferences, thurstone_score
from visalign.core.preference.ict import IctLabels, hp_loss, ict_hp_loss, ict_loss
from visalign.core.preference.uncertainty import log_win_probability, pair_deviation, uncertain_preference_loss
from visalign.core.preference.yes_no import YesNo, yes_no_loss, yes_no_pair_loss

from .batch import Outputs, RewardBatch

Settings = Any  # Class of the task in `settings`
Sums = tuple[Tensor, Tensor]  # (Σ weight · loss, Σ weight): micro-batches and processes add up to the whole batch


@dataclass(frozen=True, kw_only=True)
class Task:
    """Entry of `TASKS`."""

    loss: Callable[[Outputs, RewardBatch, Settings, torch.Generator], Sums]
    log_prob: Callable[[Outputs, RewardBatch], tuple[Tensor, Tensor]] | None = None
    """(ln P, ln (1 − P)) [N] that the left image of each pair is better; None: no probability."""
    labels: str = "pairs"
    """Unit of the labels: "pairs", "triples", "rows" (rated images), "answers" (written critiques), "faults"
    (boxes) or "checks" (answers to a checklist)."""


def _sums(loss: Tensor, weight: Tensor) -> Sums:
    return (loss * weight).sum(), weight.sum()


def _sides(outputs: Outputs, batch: RewardBatch, name: str = "value") -> tuple[Tensor, Tensor]:
    assert batch.left is not None and batch.right is not None
    value = outputs[name]
    return value[batch.left.to(value.device)], value[batch.right.to(value.device)]


def _labels(batch: RewardBatch, settings: Settings, like: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (p, weight) [N] of the pairs."""
    assert batch.label is not None
    label, weight = batch.label.to(like), torch.ones_like(batch.label).to(like)
    if batch.votes is not None:
        voted = torch.isfinite(batch.votes).all(1)
        counts = batch.votes.nan_to_num(0.0)
        share = soft_labels(counts[:, 0], counts[:, 1], counts[:, 2], smoothing=settings.smoothing).to(like)
        label = torch.where(voted.to(like.device), share, label)
        if settings.pair_weight == "votes":
            weight = torch.where(voted, counts.sum(1), 1.0).to(like)
    if batch.weight is not None:
        weight = weight * batch.weight.to(like)
    return label, torch.where(torch.isnan(label), 0.0, weight)


def _targets(batch: RewardBatch, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the targets of rows, NaN where there is none, and where there is one."""
    assert batch.target is not None
    target = batch.target.to(like)
    return target, ~torch.isnan(target)


def _bradley_terry(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    left, right = _sides(outputs, batch)
    label, weight = _labels(batch, settings, left)
    if settings.ties != "half":
        log_prob = tie_log_prob(left, right, settings.tie_strength, model=settings.ties)
        return _sums(outcome_loss(log_prob, _outcome_shares(batch, settings, left)), weight)
    options = {name: getattr(settings, name) for name in ("margin", "centre", "displacement", "sign", "l2")}
    if batch.margin is not None:
        options["margin"] = settings.margin + batch.margin.to(left)
    return _sums(bradley_terry_loss(left, right, label, **options), weight)


def _outcome_shares(batch: RewardBatch, settings: Settings, like: Tensor) -> Tensor:
    """Compute shares [N, 3] of (left, equal, right) of the votes; without votes the label, whose ½ is a tie."""
    assert batch.label is not None
    label = batch.label.to(like)
    tied = (label == 0.5).to(like)
    share = torch.stack([label * (1 - tied), tied, (1 - label) * (1 - tied)], -1)
    if batch.votes is None:
        return share
    counts = batch.votes.nan_to_num(0.0).to(like)
    voted = torch.isfinite(batch.votes).all(1).to(like.device)
    shares = vote_shares(counts[:, 0], counts[:, 1], counts[:, 2], smoothing=settings.smoothing)
    return torch.where(voted[:, None], shares, share)


def _uncertainty(mode: str) -> Callable[..., Sums]:
    def loss_sums(outputs: Outputs, batch: RewardBatch, settings: Settings, generator: torch.Generator) -> Sums:
        left, right = _sides(outputs, batch)
        label, weight = _labels(batch, settings, left)
        left_std, right_std = (side.exp() for side in _sides(outputs, batch, "log_std"))
        options = {"samples": settings.samples} if mode == "upstream_monte_carlo" else {}
        sides: Any = left, right, left_std, right_std
        loss = uncertain_preference_loss(*sides, label, mode=mode, **options, generator=generator)  # type: ignore[arg-type]
        if settings.centre:
            loss = loss + settings.centre * (left + right).square()
        return _sums(loss, weight)

    return loss_sums


def _hp(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """Weigh each pair by the agreement of the votes, |2p − 1|."""
    left, right = _sides(outputs, batch)
    label, weight = _labels(batch, settings, left)
    agreement = torch.where(torch.isnan(label), 0.0, 2 * label - 1)
    wins = agreement >= 0
    loss = margin_ranking_loss(torch.where(wins, left, right), torch.where(wins, right, left), margin=settings.margin)
    return _sums(loss, weight * agreement.abs())


def _ict(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    images = outputs["image"]
    labels = IctLabels(*(getattr(batch.ict, name).to(images) for name in IctLabels.__dataclass_fields__))
    triples = images.view(3, -1, images.shape[-1])
    loss = ict_loss(outputs["easy"], outputs["refined"], triples, labels, negative_weight=settings.negatives)
    weight = loss.new_tensor(float(batch.size))
    return loss * weight, weight


def _ict_hp(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """Add both margins of HP's scores of triples and, weighted, those of ICT's cosine times HP's share."""
    hp, cosine = (outputs[name].view(3, -1) for name in ("value", "cosine"))
    loss = hp_loss(hp, margin=settings.margin) + settings.product * ict_hp_loss(cosine, hp, margin=settings.margin)
    weight = loss.new_tensor(float(batch.size))
    return loss * weight, weight


def _yes_no(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """Compute the likelihood of the answer on rows, Bradley-Terry on the log-odds (and some likelihood) on pairs.

    With mass 1 the former is the likelihood over the vocabulary.
    """
    penalty = other_answer_penalty(outputs, settings)
    if batch.target is not None:
        odds = outputs["value"]
        target, labelled = _targets(batch, odds)
        loss = yes_no_loss(_answer(odds), target) + torch.where(labelled, penalty, 0.0)
        return loss.sum(), labelled.sum().to(odds)
    left, right = _sides(outputs, batch)
    label, weight = _labels(batch, settings, left)
    loss = yes_no_pair_loss(_answer(left), _answer(right), label, likelihood_weight=settings.likelihood)
    return _sums(loss + (penalty[batch.left] + penalty[batch.right]) / 2, weight)


def _checklist(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """Compute logistic regression on the difference of weighted answers, λ/2 |w|² added per pair."""
    left, right = _sides(outputs, batch)
    label, weight = _labels(batch, settings, left)
    penalty = other_answer_penalty(outputs, settings)
    loss = bradley_terry_loss(left, right, label) + (penalty[batch.left] + penalty[batch.right]) / 2
    total, count = _sums(loss, weight)
    return total + settings.penalty / 2 * outputs["weights"].square().sum() * count, count


def _checklist_answers(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """Compute the cross-entropy of all answers [M, Q] that people gave."""
    odds = outputs["odds"]
    target, answered = _targets(batch, odds)
    loss = yes_no_loss(_answer(odds), target) + other_answer_penalty(outputs, settings)[:, None]
    return torch.where(answered, loss, 0.0).sum(), answered.sum().to(odds)


def _heie(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """Add the losses of the maps and the cross-entropy of the score with the plausibility."""
    value = outputs["value"]
    target = _targets(batch, value)[0]
    loss = outputs["map_loss"] + F.binary_cross_entropy_with_logits(value, target, reduction="none")
    return _sums(loss, torch.ones_like(loss))


def _rating(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """Compute the squared error of the expectation over the score tokens."""
    value = outputs["value"]
    target, rated = _targets(batch, value)
    error = (value - target.nan_to_num(0.0)).square() + other_answer_penalty(outputs, settings)
    return torch.where(rated, error, 0.0).sum(), rated.sum().to(value)


def _rating_distribution(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """Compute KL(teacher‖student) over the score tokens; the targets are the teacher's distributions [M, K]."""
    log_prob = outputs["log_prob"]
    target, labelled = _targets(batch, log_prob)
    loss = F.kl_div(log_prob, target.nan_to_num(0.0), reduction="none").sum(1)
    loss = loss + other_answer_penalty(outputs, settings)
    return _sums(loss, labelled.all(1).to(loss))


def _plackett_luce(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    assert batch.rank is not None and batch.row is not None and batch.weight is not None
    value = outputs["value"]
    loss = plackett_luce_loss(value[batch.row.to(value.device)], batch.rank.to(value))
    return _sums(loss, batch.weight.to(loss))


def _regression(loss: Callable[..., Tensor]) -> Callable[..., Sums]:
    def loss_sums(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
        value = outputs["value"]
        target, labelled = _targets(batch, value)
        return _sums(loss(value, target.nan_to_num(0.0), reduction="none"), labelled.to(value))

    return loss_sums


def _rating_fidelity(outputs: Outputs, batch: RewardBatch, settings: Settings, _: torch.Generator) -> Sums:
    """Compute VisualQuality-R1's fidelity of Thurstone's probability between all images of a micro-batch."""
    mean, variance = outputs["value"], (2 * outputs["log_std"]).exp()
    label = quality_preferences(_targets(batch, mean)[0]).fill_diagonal_(math.nan)
    score = thurstone_score(mean[:, None], mean[None, :], variance[:, None], variance[None, :])
    count = (~torch.isnan(label)).sum().to(mean)
    penalty = other_answer_penalty(outputs, settings)
    return fidelity_loss(score, label).sum() + penalty.mean() * count, count


def other_answer_penalty(outputs: Outputs, settings: Settings) -> Tensor:
    """Compute −mass · ln P(any allowed answer), [M]: the penalty of answers other than those asked for.

    0 for models without "log_mass", ln P [M].
    """
    log_mass = outputs.get("log_mass")
    return torch.zeros_like(outputs["value"]) if log_mass is None else -settings.mass * log_mass


def _answer(odds: Tensor) -> YesNo:
    """Convert log-odds of yes against no to log-probabilities of the two."""
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
    "ict_hp": Task(loss=_ict_hp, labels="triples"),
    "yes_no": Task(loss=_yes_no, log_prob=_logistic),
    "rating": Task(loss=_rating, labels="rows"),
    "rating_fidelity": Task(loss=_rating_fidelity, labels="rows"),
    "rating_distribution": Task(loss=_rating_distribution, labels="rows"),
    "plackett_luce": Task(loss=_plackett_luce, log_prob=_logistic),
    "mse": Task(loss=_regression(F.mse_loss), labels="rows"),
    "bce": Task(loss=_regression(F.binary_cross_entropy_with_logits), labels="rows"),
    "critique": Task(loss=_yes_no, labels="answers"),
    "checklist": Task(loss=_checklist, log_prob=_logistic),
    "checklist_answers": Task(loss=_checklist_answers, labels="checks"),
    "heie": Task(loss=_heie, labels="faults"),
}
"""Task -> its loss. uncertainty_upstream and upstream_monte_carlo are HPSv3's released code, which drives
the standard deviation to 0."""
