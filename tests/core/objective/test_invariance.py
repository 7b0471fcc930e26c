# SPDX-License-Identifier: Apache-2.0
"""`check_invariance` finds the faults that public trainers have had; `explain` says where gradients go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.core import step
from visalign.core.objective.algorithms import named_objective
from visalign.core.objective.data import Loss, PolicyOutput, Prepared, Trajectories
from visalign.core.objective.explain import CAUSES, explain
from visalign.core.objective.invariance import check_invariance
from visalign.core.objective.objective import Objective

Share = Callable[[Tensor, Prepared], Tensor]


class _OwnLoss:
    """A user's loss: −A log π per decision, averaged in its own way."""

    def __init__(self, share: Share) -> None:
        self._objective = Objective(surrogate="reinforce", aggregation="token_mean")
        self._share = share

    def prepare(self, trajectories: Trajectories) -> Prepared:
        return self._objective.prepare(trajectories)

    def loss(self, rows: Prepared, policy: PolicyOutput) -> Loss:
        losses = self._objective.loss(rows, policy).decisions["policy"]
        return Loss(self._share(losses, rows))


def _changed(loss: _OwnLoss) -> set[str]:
    report = check_invariance(loss, *step())
    return {name.split(" of ")[0].rstrip("0123456789 ") for name, moved in report.items() if moved > 1e-6}


def _mean(x: Tensor, rows: Prepared) -> Tensor:
    return (x * rows.weight).sum() / rows.counts.tokens


class _Leaks(_OwnLoss):
    """Lets NaN behind the end of a completion into the loss."""

    def loss(self, rows: Prepared, policy: PolicyOutput) -> Loss:
        return Loss((-policy.log_prob * rows.advantage * rows.weight).sum() / rows.counts.tokens)


class _FirstIsBaseline(_OwnLoss):
    """Depends on the order of the samples."""

    def prepare(self, trajectories: Trajectories) -> Prepared:
        prepared = super().prepare(trajectories)
        return replace(prepared, advantage=prepared.advantage - prepared.advantage[0].max())


class _Numbers(_OwnLoss):
    """Takes group labels as numbers."""

    def prepare(self, trajectories: Trajectories) -> Prepared:
        prepared = super().prepare(trajectories)
        lengths = torch.tensor([float(len(str(label))) for label in trajectories.group]).double()
        return replace(prepared, advantage=prepared.advantage * lengths[:, None])


PADS = {f"pad {p} samples" for p in ("2 left, 0 right, 0", "0 left, 3 right, 0", "1 left, 1 right, 1")}
ROWS = "pad 0 left, 0 right, 2 samples"


@pytest.mark.parametrize(
    ("loss", "changed"),
    [
        (_OwnLoss(_mean), set()),
        # a mean over the micro-batch
        (
            _OwnLoss(lambda x, rows: (x * rows.weight).sum() / rows.weight.sum().clamp(min=1)),
            {"micro-batches", "uneven micro-batches"},
        ),
        # over the padded length
        (_OwnLoss(lambda x, rows: (x * rows.weight).sum() / (rows.counts.sequences * x.shape[1])), PADS),
        # without 1/B
        (_OwnLoss(lambda x, rows: (x * rows.weight).sum() / rows.counts.length.clamp(max=6)), {"duplicate"}),
        (_Leaks(_mean), {*PADS, ROWS}),
    ],
)
def test_faults_of_public_trainers_are_found(loss: _OwnLoss, changed: set[str]) -> None:
    assert _changed(loss) == changed


def test_order_labels_and_absent_samples_as_numbers_are_found() -> None:
    order, labels = _changed(_FirstIsBaseline(_mean)), _changed(_Numbers(_mean))
    assert "permute" in order and "relabel" not in order
    assert "relabel" in labels and "permute" not in labels
    counted = _changed(_OwnLoss(lambda x, rows: _mean(x, rows) * (len(x) / 8)))
    assert ROWS in counted and "micro-batches" in counted


def test_a_padded_length_in_dr_grpo_is_found_and_a_sum_may_double() -> None:
    assert max(check_invariance(named_objective("dr_grpo"), *step()).values()) > 1e-3
    for row in (named_objective("dr_grpo", length=6), named_objective("grpo", aggregation="token_sum")):
        assert max(check_invariance(row, *step()).values()) < 1e-6


def _simple(reward: list[float], ratio: list[list[float]]) -> tuple[Trajectories, PolicyOutput]:
    """Two groups of two, three decisions each."""
    old = torch.full((4, 3), -1.0, dtype=torch.float64)
    trajectories = Trajectories(
        weight=torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]]).double(),
        old_log_prob=old,
        group=[0, 0, 1, 1],
        reward=torch.tensor(reward, dtype=torch.float64),
    )
    return trajectories, PolicyOutput(log_prob=old + torch.tensor(ratio, dtype=torch.float64).log())


def test_explain_counts_each_decision_once_under_its_cause() -> None:
    moved = [[1.0, 1.5, 0.5], [1.0, 0.5, 9.0], [1.0, 1.1, 1.0], [1.0, 1.0, 1.0]]
    trajectories, policy = _simple([1.0, 0.0, 5.0, 5.0], moved)
    explanation = explain(named_objective("grpo", kl=0.0), trajectories, policy)
    assert explanation.counts == {**dict.fromkeys(CAUSES, 0), "absent": 1, "no signal": 6, "clipped": 2, "live": 3}
    names = list(CAUSES)
    assert [names[i] for i in explanation.cause[0]] == ["live", "clipped", "live"]  # A > 0: above 1.2 is clipped
    assert [names[i] for i in explanation.cause[1]] == ["live", "clipped", "absent"]  # A < 0: below 0.8 is
    assert "27.3% of 11 present decisions carry gradient" in explanation.conclusion
    assert "clipped" in str(explanation) and "loss: policy" in str(explanation)


def test_explain_says_why_a_loss_is_zero() -> None:
    even = [[1.0] * 3] * 4
    trajectories, policy = _simple([2.0, 2.0, 5.0, 5.0], even)
    for name in ("grpo", "dapo"):
        explanation = explain(named_objective(name, kl=0.0), trajectories, policy)
        assert "gradient is zero: 11 of 11 present decisions are 'no signal'" in explanation.conclusion
    pulled = replace(trajectories, ref_log_prob=trajectories.old_log_prob - 1.0)
    assert "The KL term still pulls" in explain(named_objective("grpo"), pulled, policy).conclusion
    failed = replace(trajectories, valid=torch.zeros(4, dtype=torch.bool))
    assert "are 'no reward'" in explain(named_objective("grpo", kl=0.0), failed, policy).conclusion
    nothing = replace(trajectories, weight=torch.zeros(4, 3).double())
    assert "no decision is present" in explain(named_objective("grpo", kl=0.0), nothing, policy).conclusion
    far, away = _simple([1.0, 0.0, 1.0, 0.0], [[3.0] * 3, [0.1] * 3, [3.0] * 3, [0.1] * 3])
    assert "are 'clipped'" in explain(named_objective("grpo", kl=0.0), far, away).conclusion


def test_explain_tells_selections_and_corrections_apart() -> None:
    trajectories, policy = step(3)
    wide = {"ratio": 0.2, "cov_low": -1e9, "cov_high": 1e9}
    counts = explain(named_objective("clip_cov", selection_options=wide), trajectories, policy).counts
    assert counts["left out"] > 0
    counts = explain(named_objective("top_entropy"), trajectories, policy).counts
    assert counts["left out"] > counts["live"] > 0
    masked = named_objective("grpo", kl=0.0, importance_sampling={"level": "token", "mode": "mask", "high": 1.0})
    counts = explain(masked, trajectories, policy).counts
    assert counts["importance weight 0"] > 0
    far = _simple([1.0, 0.0, 1.0, 0.0], [[0.9] * 3] * 4)  # the bad completions are the second and the fourth
    counts = explain(named_objective("grpo", kl=0.0, off_policy_delta=0.1), *far).counts
    assert counts["off-policy mask"] == 5 and counts["live"] == 6
    on_policy = replace(policy, log_prob=trajectories.old_log_prob)
    assert "Every ratio is exactly 1" in explain(named_objective("grpo", kl=0.0), trajectories, on_policy).conclusion
