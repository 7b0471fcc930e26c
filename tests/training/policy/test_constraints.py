# SPDX-License-Identifier: Apache-2.0
"""Rewards held at a bound: the multipliers by hand, their resume, what a constrained training ends at, what
is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.training.images import Brightness, Loud, check_resume, toy_trainer
from visalign.errors import UserError
from visalign.rewards import WeightedSum
from visalign.training.policy.constraints import KEY, RewardConstraints


def _sum(bound: float = 6000.0, weight: float = 1e-4) -> WeightedSum:
    """Light against red: dark prompts want no light."""
    terms = {"light": (Brightness(), 1.0), "red": (Loud(), weight)}
    return WeightedSum(terms, allow_mixed_units=True, bounds={"red": bound})


def test_multipliers_by_hand() -> None:
    constraints = RewardConstraints(_sum(), rate=2.0)
    assert constraints.bounds == {"red": pytest.approx(0.6)}
    run: Any = SimpleNamespace(counters=SimpleNamespace(own={}))
    valid = torch.tensor([True, True, True, False])
    nan = float("nan")
    light = torch.tensor([1.0, 0.1, 0.1, nan], dtype=torch.float64)
    for red, expected in (([0.7, 0.7, 0.7], 0.0), ([0.1, 0.3, 0.5], 0.6), ([0.8, 0.7, 0.9], 0.2)):
        term = torch.tensor([*red, nan], dtype=torch.float64)
        value, metrics = constraints.apply(valid, {"light.weighted": light, "red.weighted": term}, run)
        assert metrics == {"reward_multiplier/red": pytest.approx(expected)}
        torch.testing.assert_close(value[:3], light[:3] + expected * term[:3])
        assert value[3].isnan() and run.counters.own[KEY] == {"red": pytest.approx(expected)}
        if not expected:
            assert value[1] == value[2], "a bound that holds leaves no rounding behind"


def test_where_lower_is_better_the_bound_is_a_ceiling() -> None:
    low: Any = Brightness()
    low.higher_is_better = False
    terms: Any = {"light": (low, 2.0), "red": (Loud(), 1.0)}
    normalise = {"light": (0.1, 0.5), "red": (0.0, 1.0)}
    total = WeightedSum(terms, normalise=normalise, bounds={"light": 0.4})
    assert total.capabilities.constraints == {"light": pytest.approx(-2.0 * (0.4 - 0.1) / 0.5)}


def test_a_resume_is_exact_and_the_value_is_the_lagrangian(tmp_path) -> None:
    objective = {"algorithm": "diffusion_nft", "multiplier_rate": 0.5}
    outcome, trainer = check_resume(
        lambda folder, run: toy_trainer(folder, reward=_sum(), objective=objective, run=run), tmp_path, 2, 3
    )
    last = 0.0
    for row in outcome[2]:
        last = max(0.0, last + 0.5 * (0.6 - row["reward_part/red.weighted"]))
        assert row["reward_multiplier/red"] == pytest.approx(last, abs=1e-6)
        expected = row["reward_part/light.weighted"] + last * row["reward_part/red.weighted"]
        assert row["reward_mean"] == pytest.approx(expected, abs=1e-6)
    assert trainer.counters.own[KEY] == {"red": pytest.approx(last, abs=1e-6)} and last > 0


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"algorithm": "gdpo"}, r"a bound \(red\).*objective.algorithm=gdpo takes each reward by itself"),
        ({"balance_every": 2}, "objective.balance_every=2 weighs them"),
        ({"credit": "one_step"}, "objective.credit=one_step scores more than images"),
        ({"multiplier_rate": 0.0}, r"objective.multiplier_rate is 0.0. Input should be greater than 0"),
    ],
)
def test_refused_beside_other_uses_of_the_terms(objective: dict[str, Any], message: str, tmp_path) -> None:
    with pytest.raises(UserError, match=message):
        toy_trainer(tmp_path, reward=_sum(), objective=objective)
