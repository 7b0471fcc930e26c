# SPDX-License-Identifier: Apache-2.0
"""The training of judges: each task's loss is the core's, and what is measured and refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.training.rewards import ToyJudge, ToyPairs, pair_batch
from visalign.core import yes_no_answer
from visalign.core.preference.bradley_terry import bradley_terry_loss, outcome_loss, soft_labels, tie_log_prob
from visalign.core.preference.ict import hp_loss, ict_labels, ict_loss
from visalign.core.preference.uncertainty import uncertain_preference_loss
from visalign.core.preference.yes_no import yes_no_loss, yes_no_pair_loss
from visalign.errors import UserError
from visalign.training.loop.trainer import RunSettings, Trainer
from visalign.training.reward.batch import RewardBatch
from visalign.training.reward.heldout import auroc, calibration_error, lead_stratum, pair_measures, score_pairs
from visalign.training.reward.settings import RewardObjectiveSettings, RewardOptimizerSettings
from visalign.training.reward.tasks import TASKS
from visalign.training.reward.trainer import RewardModeling

NOISE = torch.Generator().manual_seed(0)


def _trainer(
    folder: Path,
    iterations: int = 4,
    *,
    judge: nn.Module | None = None,
    data: Any = None,
    task: str = "uncertainty",
    seed: int = 3,
    run: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **more: Any,
) -> Trainer[RewardModeling]:
    pace: dict[str, Any] = {"lr": 1e-2, "updates_per_iteration": 5, "warmup_updates": 2, **(optimizer or {})}
    run_options: dict[str, Any] = {"config": {"seed": seed}, "checkpoint_every": 2, **(run or {})}
    algorithm = RewardModeling(
        judge or ToyJudge(),  # type: ignore[arg-type]
        data or ToyPairs(),
        objective=RewardObjectiveSettings(task=task, **more.pop("objective", {})),
        accelerator=Accelerator(cpu=True),
        seed=seed,
    )
    return Trainer(
        algorithm,
        optimizer=RewardOptimizerSettings(**pace),
        run=RunSettings(folder=folder, iterations=iterations, **run_options),
        **more,
    )


def _loss(task: str, outputs: dict[str, Tensor], batch: RewardBatch, **settings: Any) -> float:
    objective = RewardObjectiveSettings(task=task, **settings)
    total, weight = TASKS[task].loss(outputs, batch, objective, torch.Generator().manual_seed(1))
    return float(total / weight)


SCORES = torch.tensor([0.3, -1.0, 2.0, 0.5, 0.1, 1.5])
LOG_STD = torch.tensor([0.0, -1.0, 0.5, 0.2, -2.0, 0.1])
LABEL = torch.tensor([1.0, 0.0, 0.7])
VOTES = torch.tensor([[7.0, 2.0, 0.0], [1.0, 3.0, 2.0], [math.nan] * 3])
PAIRS = RewardBatch(inputs=None, size=3, left=torch.arange(3), right=torch.arange(3, 6), label=LABEL, votes=VOTES)
SHARE = torch.tensor([7.5 / 10, 2.5 / 7, 0.7])
"""Jeffreys' labels of the votes; the third pair has its label alone."""


def test_bradley_terry_is_the_cores_on_the_votes():
    losses = bradley_terry_loss(SCORES[:3], SCORES[3:], SHARE, margin=0.2, centre=0.01)
    assert soft_labels(VOTES[:2, 0], VOTES[:2, 1], VOTES[:2, 2], smoothing=0.5).tolist() == pytest.approx(
        SHARE[:2].tolist()
    )
    outputs = {"value": SCORES}
    settings = {"margin": 0.2, "centre": 0.01}
    assert _loss("bradley_terry", outputs, PAIRS, **settings) == pytest.approx(float(losses.mean()))
    counted = _loss("bradley_terry", outputs, PAIRS, pair_weight="votes", **settings)
    count = torch.tensor([9.0, 6.0, 1.0])
    assert counted == pytest.approx(float((losses * count).sum() / count.sum()))


@pytest.mark.parametrize(("task", "mode"), [("uncertainty", "paper"), ("uncertainty_upstream", "upstream")])
def test_uncertainty_is_the_cores_on_the_votes(task, mode):
    std = LOG_STD.exp()
    losses = uncertain_preference_loss(SCORES[:3], SCORES[3:], std[:3], std[3:], SHARE, mode=mode)
    loss = _loss(task, {"value": SCORES, "log_std": LOG_STD}, PAIRS)
    assert loss == pytest.approx(float(losses.mean()))


def test_with_a_model_of_ties_a_pair_without_votes_has_its_label():
    label = torch.tensor([1.0, 0.5, 0.7])
    votes = torch.tensor([[7.0, 2.0, 1.0], [math.nan] * 3, [math.nan] * 3])
    batch = replace(PAIRS, label=label, votes=votes)
    share = torch.tensor([[0.7, 0.1, 0.2], [0.0, 1.0, 0.0], [0.7, 0.0, 0.3]])
    log_prob = tie_log_prob(SCORES[:3], SCORES[3:], 2.0, model="davidson")
    options: dict[str, Any] = {"ties": "davidson", "smoothing": 0.0}
    loss = _loss("bradley_terry", {"value": SCORES}, batch, **options)
    assert loss == pytest.approx(float(outcome_loss(log_prob, share).mean()))
    share[0] = torch.tensor([1.0, 0.0, 0.0])
    loss = _loss("bradley_terry", {"value": SCORES}, replace(batch, votes=None), **options)
    assert loss == pytest.approx(float(outcome_loss(log_prob, share).mean()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tie_strength": 3.0}, "objective.ties=half does not use it"),
        ({"ties": "rao_kupper", "tie_strength": 1.0}, "for rao_kupper it must be above 1"),
        ({"ties": "davidson", "margin": 0.3}, "are of the plain loss, and objective.ties is davidson"),
    ],
)
def test_a_model_of_ties_has_its_own_settings(values, message):
    with pytest.raises(UserError, match=message):
        RewardObjectiveSettings(task="bradley_terry", **values)


def test_a_pair_without_a_label_counts_nothing():
    label = torch.tensor([1.0, math.nan, 0.7])
    batch = replace(PAIRS, label=label, votes=None)
    rows = [0, 2]
    losses = bradley_terry_loss(SCORES[:3][rows], SCORES[3:][rows], label[rows])
    assert _loss("bradley_terry", {"value": SCORES}, batch) == pytest.approx(float(losses.mean()))


@pytest.mark.parametrize("task", ["bradley_terry", "uncertainty", "hp", "yes_no"])
def test_a_pair_counts_as_it_weighs(task):
    """Weights (2, 0, 1): the loss of pairs 1, 1 and 3."""
    outputs = {"value": SCORES, "log_std": LOG_STD, "mass": torch.zeros(6)}
    rows = torch.tensor([0, 0, 2])
    doubled = replace(PAIRS, left=rows, right=rows + 3, label=LABEL[rows], votes=VOTES[rows])
    weighed = replace(PAIRS, weight=torch.tensor([2.0, 0.0, 1.0]))
    assert _loss(task, outputs, weighed) == pytest.approx(_loss(task, outputs, doubled))
    assert _loss(task, outputs, weighed) != pytest.approx(_loss(task, outputs, PAIRS))


def test_hp_on_the_pairs_of_a_triple_is_half_of_the_published_sum():
    """Pairs (I2, I1) and (I3, I2); hp_loss adds both hinges per triple."""
    hp = torch.tensor([[0.0, 1.0], [0.1, 0.4], [0.5, 0.2]])
    left, right = torch.arange(2, 6), torch.arange(4)
    triple = RewardBatch(inputs=None, size=4, left=left, right=right, label=torch.ones(4))
    loss = _loss("hp", {"value": hp.flatten()}, triple, margin=0.3)
    assert 2 * loss == pytest.approx(float(hp_loss(hp, margin=0.3)))
    flipped = replace(triple, left=right, right=left, label=torch.zeros(4))
    assert _loss("hp", {"value": hp.flatten()}, flipped, margin=0.3) == pytest.approx(loss)


def test_ict_is_the_cores():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(9, 5, generator=generator)
    easy, refined = torch.randn(3, 5, generator=generator), torch.randn(3, 5, generator=generator)
    easy_hp, refined_hp = torch.tensor([0.2, 0.5, 0.1]), torch.tensor([0.6, 0.9, 0.3])
    labels = ict_labels(easy_hp, refined_hp, torch.ones(3), theta=0.7)
    batch = RewardBatch(inputs=None, size=3, ict=labels)
    outputs = {"value": images[:, 0], "image": images, "easy": easy, "refined": refined}
    expected = ict_loss(easy, refined, images.view(3, 3, 5), labels, negative_weight=0.25)
    assert _loss("ict", outputs, batch, negatives=0.25) == pytest.approx(float(expected))


def test_yes_no_is_the_cores_on_rows_and_on_pairs():
    logits = torch.randn(6, 4, generator=NOISE)
    answer = yes_no_answer(logits.log_softmax(-1), range(2), range(2, 4), normalised=True)
    target = torch.tensor([1.0, 0.0, 0.3, math.nan, 1.0, 0.0])
    rows = RewardBatch(inputs=None, size=6, target=target)
    labelled = ~torch.isnan(target)
    expected = yes_no_loss(answer, target)[labelled].mean()
    assert _loss("yes_no", {"value": answer.log_odds}, rows) == pytest.approx(float(expected), rel=1e-5)
    left, right = (type(answer)(*(f[s] for f in answer.__dict__.values())) for s in (slice(3), slice(3, 6)))
    both = yes_no_pair_loss(left, right, SHARE, likelihood_weight=0.4).mean()
    loss = _loss("yes_no", {"value": answer.log_odds}, PAIRS, likelihood=0.4)
    assert loss == pytest.approx(float(both), rel=1e-5)


def test_rating_is_the_squared_error_and_fidelity_is_small_for_the_right_order():
    target = torch.tensor([1.0, 3.0, 5.0, math.nan])
    batch = RewardBatch(inputs=None, size=4, target=target)
    value = torch.tensor([2.0, 3.0, 4.5, 1.0])
    assert _loss("rating", {"value": value}, batch) == pytest.approx((1 + 0 + 0.25) / 3)
    log_std = torch.full((4,), -1.0)
    right = _loss("rating_fidelity", {"value": value, "log_std": log_std}, batch)
    wrong = _loss("rating_fidelity", {"value": -value, "log_std": log_std}, batch)
    assert 0 < right < 0.1 < wrong


def test_saying_something_else_costs_its_logarithm():
    odds, log_mass = torch.tensor([1.0, -2.0, 0.5, 0.0]), torch.tensor([-0.1, -0.7, -3.0, 0.0])
    value = {"value": odds, "log_mass": log_mass}
    rows = RewardBatch(inputs=None, size=4, target=torch.tensor([1.0, 0.3, math.nan, 0.0]))
    log_yes, log_no = F.logsigmoid(odds) + log_mass, F.logsigmoid(-odds) + log_mass
    share = torch.tensor([1.0, 0.3, 0.0, 0.0])
    expected = -(share * log_yes + (1 - share) * log_no)[[0, 1, 3]].sum() / 3  # over the whole vocabulary
    assert _loss("yes_no", value, rows) == pytest.approx(float(expected), rel=1e-5)
    ratio = _loss("yes_no", value, rows, mass=0.0)
    assert _loss("yes_no", value, rows, mass=2.0) - ratio == pytest.approx(2 * 0.8 / 3, rel=1e-4)

    left, right = torch.arange(2), torch.arange(2, 4)
    pairs = RewardBatch(inputs=None, size=2, left=left, right=right, label=torch.tensor([1.0, 0.0]))
    assert _loss("yes_no", value, pairs) - _loss("yes_no", value, pairs, mass=0.0) == pytest.approx(3.8 / 4)

    rated = RewardBatch(inputs=None, size=4, target=torch.tensor([1.0, 2.0, math.nan, 4.0]))
    spread = {**value, "log_std": torch.zeros(4)}
    for task, cost in (("rating", 0.8 / 3), ("rating_fidelity", 3.8 / 4)):
        difference = _loss(task, spread, rated) - _loss(task, spread, rated, mass=0.0)
        assert difference == pytest.approx(cost, rel=1e-4), task


def test_micro_batches_and_processes_add_up_to_the_batch(tmp_path):
    """The gradient of one update, from one batch of 48, from parts of 7, and from two processes' shares."""
    updates = []
    for micro in (48, 7):
        trainer = _trainer(tmp_path, judge=ToyJudge(dropout=0.0), data=ToyPairs(48, micro=micro))
        sums = trainer.algorithm._accumulate(0, 1.0)
        gradient = torch.cat([p.grad.flatten() for _, p in trainer.weights.named if p.grad is not None])
        updates.append((sums, gradient))
    torch.testing.assert_close(updates[0][0], updates[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(updates[0][1], updates[1][1], rtol=1e-4, atol=1e-5)
    votes = next(iter(ToyPairs(48).batch(0))).votes
    parts = [next(iter(ToyPairs(48).batch(0, (i, 2)))).votes for i in range(2)]
    assert votes is not None and parts[0] is not None and parts[1] is not None
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), votes)  # type: ignore[arg-type]


def test_measures_by_hand():
    class Fixed(nn.Module):
        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            return {"value": inputs[:, 0], "log_std": inputs[:, 1]}

    points = [[[1.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]]
    batch = pair_batch(torch.tensor(points).numpy(), label=[1.0, 0.0, 1.0])
    measures = pair_measures(score_pairs(Fixed(), [batch], TASKS["bradley_terry"]))  # type: ignore[arg-type]
    assert measures["accuracy"] == pytest.approx((1 + 0 + 0.5) / 3)
    win = 1 / (1 + math.exp(-1))
    assert measures["nll"] == pytest.approx(-(math.log(win) + math.log(1 - win) + math.log(0.5)) / 3, rel=1e-5)
    assert measures["std_mean"] == pytest.approx(math.sqrt(2) * (1 + math.e + 1) / 3, rel=1e-5)
    assert measures["std_auroc"] == 1.0
    prob, share = torch.tensor([0.9, 0.9, 0.1]), torch.tensor([1.0, 0.5, 0.0])
    gap = calibration_error(prob.double(), share.double(), torch.ones(3, dtype=torch.float64))
    assert gap == pytest.approx((2.7 - 2.5) / 3, rel=1e-5)  # all three fall into one bin
    assert auroc(torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([False, True, False, True])) == 0.875
    assert math.isnan(auroc(torch.ones(2), torch.tensor([True, True])))
    stratum = torch.tensor([0, 0, 1, 1])  # 1 < 2 in the first, 3 > 2 in the second: both right
    assert auroc(torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([False, True, False, True]), stratum) == 1.0
    assert lead_stratum(torch.tensor([3.0, -0.1, 0.5, -2.0]), strata=2).tolist() == [1, 0, 0, 1]


def test_wrong_input_by_message(tmp_path):
    with pytest.raises(UserError, match=r"objective.task is 'uncertanty'. Did you mean 'uncertainty'"):
        RewardObjectiveSettings(task="uncertanty")
    with pytest.raises(UserError, match="no trainable parameter"):
        judge = ToyJudge()
        judge.trainable_parameters = lambda: []  # type: ignore[method-assign]
        _trainer(tmp_path, judge=judge)

    class Ties(ToyPairs):
        def batch(self, number, part=(0, 1)):
            yield pair_batch(torch.zeros(2, 2, 2).numpy(), label=[0.5, 0.5])

    with pytest.raises(UserError, match="Batch 0 has 2 examples and none with a label to learn from"):
        _trainer(tmp_path, data=Ties(), task="hp").train()
