# SPDX-License-Identifier: Apache-2.0
"""Metrics of the entropy mechanism by hand, over a run, and their panels."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.training.text import toy_text_trainer
from visalign.core import Objective, Trajectories
from visalign.evaluation.pages.curves import known_curves, panels
from visalign.evaluation.pages.entropy_fit import entropy_panels
from visalign.interfaces import RewardCapabilities
from visalign.training.text.entropy_metrics import answer_entropy, covariance_metrics, entropy_drop, policy_entropy


def test_entropies_of_completions_tokens_and_answers() -> None:
    """Lengths 2 and 6, entropies 1 and 0 of each token; a completion without a token does not count."""
    entropies = policy_entropy(torch.tensor([2.0, 0.0, 0.0]), torch.tensor([2, 6, 0]))
    assert entropies == {"entropy": 0.5, "entropy_token": 0.25}
    assert policy_entropy(torch.zeros(1), torch.zeros(1)) == {"entropy": 0.0, "entropy_token": 0.0}
    answers = torch.tensor([3, 4, 7, 7, 3, 3])  # ln 2, 0, and a group of one
    expected = {"entropy_answer": pytest.approx(math.log(2) / 3)}
    assert answer_entropy(answers, [9, 9, 5, 5, 2, 2]) == expected


def test_the_covariance_and_its_largest_shares_by_hand() -> None:
    """log π −1, −2, −3, −4 and A 2, 0, 0, −2: deviations 1.5 · 2, 0, 0, −1.5 · −2; a masked token is left out."""
    log_prob = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -9.0, -9.0]])
    advantage = torch.tensor([[2.0, 0.0, 0.0], [-2.0, 9.0, 9.0]])
    weight = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    t = Trajectories(old_log_prob=log_prob, weight=weight, group=[0, 0], advantage=advantage)
    objective = Objective(advantage="given", surrogate="reinforce")
    prepared = objective.prepare_steps(t, [torch.tensor([0]), torch.tensor([1])])
    metrics = covariance_metrics(prepared)
    assert metrics == pytest.approx(
        {"covariance/mean": 1.5, **{f"covariance/top_{s}": 3.0 for s in (0.02, 0.2, 2, 20, 50)}}
    )


def test_a_run_sets_the_entropy_it_spent_beside_what_the_covariance_foresees(tmp_path) -> None:
    trainer = toy_text_trainer(tmp_path, "grpo")
    first = RewardCapabilities(read_answer=lambda text, record: text[:1])
    object.__setattr__(trainer.algorithm.parts.reward, "capabilities", first)
    earlier, later = trainer.iterate(), trainer.iterate()
    assert "entropy_drop" not in earlier and 0 < earlier["entropy_answer"] < math.log(6)
    assert later["entropy_drop"] == pytest.approx(earlier["entropy"] - later["entropy"])
    assert later["entropy_drop_foreseen"] == pytest.approx(2 * 3e-3 * earlier["covariance/mean"]), "two updates"
    assert earlier["covariance/top_2"] >= earlier["covariance/top_50"] >= earlier["covariance/mean"]


def test_an_entropy_that_no_engine_reports_is_not_remembered() -> None:
    memory = {"entropy": 0.5, "entropy_drop_foreseen": 0.1}
    assert entropy_drop(math.nan, memory) == {} and memory == {}
    assert entropy_drop(0.4, memory) == {} and memory == {"entropy": 0.4}
    assert entropy_drop(0.3, memory | {"entropy_drop_foreseen": 0.2}) == pytest.approx(
        {"entropy_drop": 0.1, "entropy_drop_foreseen": 0.2}
    )


def test_the_report_draws_the_fit_and_its_ceiling() -> None:
    rows = [
        {
            "iteration": n,
            "entropy": h,
            "reward_mean": 0.9 - 0.3 * math.exp(h),
            "covariance/mean": 0.1,
            "entropy_drop": 0.2,
        }
        for n, h in enumerate((0.5, 0.4, 0.3, 0.2, 0.1))
    ]
    (panel,) = entropy_panels(rows)
    assert "a 0.3, b 0.9; ceiling b − a, where all entropy is spent: 0.6 ±" in panel.note
    assert panel.curve.unit == "training reward" and panel.svg.count("<circle") == 5
    assert {p.curve.title for p in panels(rows, known_curves(rows))[0]} >= {"Entropy spent", "Entropy"}
    heldout = [{**row, "heldout/accuracy": 0.5 + 0.1 * n} for n, row in enumerate(rows)]
    assert entropy_panels(heldout)[0].curve.unit == "held-out accuracy"
    for few in (rows[:4], [{**row, "entropy": 0.2} for row in rows], [{"entropy": None, "reward_mean": 1.0}] * 9, []):
        assert entropy_panels(few) == ()
