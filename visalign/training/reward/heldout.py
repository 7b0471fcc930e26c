# SPDX-License-Identifier: Apache-2.0
"""Held-out quality of a reward: accuracy, likelihood, calibration, use of its standard deviation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from scipy import stats
from torch import Tensor

from visalign.core.preference.uncertainty import pair_deviation

from .batch import Outputs, RewardBatch, TrainableJudge
from .tasks import Task

BINS = 10  # Bins of the calibration error, equally wide over [0, 1]
LOW = 0.01  # Quantile of the answers' probability mass that is reported


@dataclass(frozen=True, kw_only=True)
class HeldoutPairs:
    """Outputs of a reward on N held-out pairs, [N] each, float64."""

    difference: Tensor  # Score of the left minus that of the right image
    prob: Tensor | None  # P(left better), None where the task gives none
    std: Tensor | None  # Standard deviation of the difference, None where the reward gives none
    truth: Tensor
    """Probability that the left image is truly better: 1, 0 or, where only votes are known, their majority;
    NaN or ½ where there is none."""
    share: Tensor  # Share of the votes for the left image, ties half; NaN where there are none
    weight: Tensor  # Votes behind `share`
    clear: Tensor  # Bool: True where the truth is clear
    example: Tensor | None = None  # Number of the example that each pair is of; None where each is its own
    mass: Tensor | None = None
    """Probability of all allowed answers, the smaller of the pair's two; None for models without answers."""


@torch.no_grad()
def score_pairs(model: TrainableJudge, batches: Iterable[RewardBatch], task: Task) -> HeldoutPairs:
    """Score held-out pairs, with labels (the truth), votes, or both, without dropout."""
    model.train(False)
    return concatenate_pairs([score_batch(model(batch.inputs), batch, task) for batch in batches])


def concatenate_pairs(parts: Sequence[HeldoutPairs]) -> HeldoutPairs:
    """Concatenate pairs that were scored in parts by one model and task."""
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(HeldoutPairs)}
    return HeldoutPairs(**{n: None if values[0] is None else torch.cat(values) for n, values in columns.items()})  # type: ignore[arg-type]


def score_batch(outputs: Outputs, batch: RewardBatch, task: Task) -> HeldoutPairs:
    left, right, label, votes = batch.left, batch.right, batch.label, batch.votes
    assert left is not None and right is not None and label is not None
    value = outputs["value"].cpu()
    columns: dict[str, Tensor | None] = dict.fromkeys(("prob", "std", "mass"))
    columns |= {"difference": value[left] - value[right], "truth": label, "example": batch.example}
    if votes is None:
        columns |= {"share": label, "weight": torch.ones_like(label)}
    else:
        total = votes.sum(1)
        columns |= {"share": (votes[:, 0] + votes[:, 2] / 2) / total, "weight": total}
    if task.log_prob is not None:
        columns["prob"] = task.log_prob(outputs, batch)[0].exp()
    if "log_mass" in outputs:
        mass = outputs["log_mass"].cpu().exp()
        columns["mass"] = torch.minimum(mass[left], mass[right])
    if "log_std" in outputs:
        log_std = outputs["log_std"].cpu().float()
        columns["std"] = pair_deviation(log_std[left].exp(), log_std[right].exp())
    clear = torch.ones(len(label), dtype=torch.bool) if batch.clear is None else batch.clear
    doubles = {name: None if column is None else column.cpu().double() for name, column in columns.items()}
    return HeldoutPairs(**doubles, clear=clear)  # type: ignore[arg-type]


def pair_measures(pairs: HeldoutPairs) -> dict[str, float]:
    """Compute accuracy, accuracy_all, and where available nll, ece, std_mean, std_auroc*, and mass_low.

    Accuracy: pairs whose truth is clear (accuracy_all: known) and not ½; an equal score counts half. NLL and
    ECE: against the votes, weighted by their number; nll in nats per vote. std_auroc: is the standard
    deviation of a pair larger where its sign is wrong; std_auroc_votes: where it is against the majority of
    the votes; std_auroc_lead: the latter among pairs of equal lead. NaN where all are right or all wrong.
    mass_low: the LOW quantile of the allowed answers' total probability.
    """
    decided = torch.isfinite(pairs.truth) & (pairs.truth != 0.5)
    sign = torch.sign(pairs.difference[decided]) * torch.sign(pairs.truth[decided] - 0.5)
    hit = (sign + 1) / 2
    measures = {"accuracy": _mean(hit[pairs.clear[decided]]), "accuracy_all": _mean(hit)}
    voted = torch.isfinite(pairs.share) & (pairs.weight > 0)
    if pairs.prob is not None:
        prob, share, weight = pairs.prob[voted], pairs.share[voted], pairs.weight[voted]
        chance = prob.clamp(1e-12, 1 - 1e-12)
        loss = -(share * chance.log() + (1 - share) * (1 - chance).log())
        measures["nll"] = float((loss * weight).sum() / weight.sum()) if len(weight) else math.nan
        measures["ece"] = calibration_error(prob, share, weight)
    if pairs.std is not None:
        measures["std_mean"] = _mean(pairs.std)
        measures["std_auroc"] = auroc(pairs.std[decided], sign < 0)
        split = voted & (pairs.share != 0.5)
        against = torch.sign(pairs.difference[split]) * torch.sign(pairs.share[split] - 0.5)
        measures["std_auroc_votes"] = auroc(pairs.std[split], against < 0)
        measures["std_auroc_lead"] = auroc(pairs.std[split], against < 0, lead_stratum(pairs.difference[split]))
    if pairs.mass is not None and len(pairs.mass):
        measures["mass_low"] = float(pairs.mass.quantile(LOW))
    return measures


def calibration_error(prob: Tensor, share: Tensor, weight: Tensor) -> float:
    """Compute the expected calibration error of P(left better), ECE = Σ_b W_b/W |mean p − mean share| over `BINS`.

    Both orders of each pair count, so swapping sides changes nothing. Shares are those that were observed, 0
    and 1 for single outcomes.

    Guo et al., "On calibration of modern neural networks", arXiv 1706.04599, eq. 3.
    """
    both = torch.cat([prob, 1 - prob]), torch.cat([share, 1 - share]), torch.cat([weight, weight])
    index = (both[0] * BINS).long().clamp(0, BINS - 1)
    gap = torch.zeros(BINS, dtype=prob.dtype).index_add_(0, index, both[2] * (both[0] - both[1]))
    total = both[2].sum()
    return float(gap.abs().sum() / total) if total > 0 else math.nan


def auroc(score: Tensor, positive: Tensor, stratum: Tensor | None = None) -> float:
    """Compute the probability that a positive outscores a negative of its stratum [N], ties half; NaN without both."""
    above, compared = 0.0, 0
    for label in [None] if stratum is None else stratum.unique().tolist():
        rows = slice(None) if stratum is None else stratum == label
        scores, is_positive = score[rows].double().numpy(), positive[rows].numpy()
        if 0 < is_positive.sum() < len(is_positive):
            above += stats.mannwhitneyu(scores[is_positive], scores[~is_positive], method="asymptotic")[0]
            compared += is_positive.sum() * (~is_positive).sum()
    return float(above / compared) if compared else math.nan


def lead_stratum(difference: Tensor, *, strata: int = 10) -> Tensor:
    """Assign pairs [N] to equally large strata of similar lead |l − r|: standard deviation and lead correlate."""
    order = difference.abs().argsort(stable=True).argsort(stable=True)
    return order * strata // max(len(difference), 1)


def _mean(value: Tensor) -> float:
    return float(value.mean()) if len(value) else math.nan
