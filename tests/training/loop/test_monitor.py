# SPDX-License-Identifier: Apache-2.0
"""What a run sees of a policy that exploits its reward: the statistics, the trends, the two rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import kendalltau

from tests.support.training.pictures import Brightness, Loud, toy_trainer
from tests.support.training.text import toy_text_trainer
from visalign.interfaces import Scores
from visalign.rewards.combine.weighted_sum import WeightedSum
from visalign.training.loop.judging import judged_metrics, rank_agreement

NAN = math.nan


def test_agreement_is_kendalls_tau_within_groups():
    """Group 1: of three pairs two agree, (2 − 1)/3. Group 2: one tie in t, 2/√(3 · 2). Group 3 says nothing,
    as all of s are equal; group 4 has one sample left."""
    group = torch.tensor([1, 1, 1, 2, 2, 2, 3, 3, 4, 4])
    s = torch.tensor([1.0, 2, 3, 1, 2, 3, 5, 5, 1, NAN]).double()
    t = torch.tensor([1.0, 3, 2, 0, 0, 1, 1, 2, 1, 2]).double()
    assert rank_agreement(s, t, group) == pytest.approx((1 / 3 + 2 / math.sqrt(6)) / 2)
    assert math.isnan(rank_agreement(s[6:], t[6:], group[6:]))


def test_agreement_of_one_group_is_scipys():
    draw = torch.Generator().manual_seed(0)
    s, t = torch.randint(0, 6, (2, 40), generator=draw).double()
    expected: Any = kendalltau(s.numpy(), t.numpy())
    assert rank_agreement(s, t, torch.zeros(40, dtype=torch.int64)) == pytest.approx(expected.statistic)


def test_recorded_rewards_are_turned_so_that_higher_is_better():
    class Fewer(Brightness):
        higher_is_better = False

    reward = WeightedSum({"a": (Brightness(), 1.0), "b": (Fewer(), 0.0)})
    a, group = torch.tensor([1.0, 2, 3, 4]).double(), torch.tensor([0, 0, 1, 1])
    found = judged_metrics(reward, a, torch.tensor([True] * 3 + [False]), group, {"a": a, "b": 2 * a})
    assert found["agreement/b"] == -1 and found["recorded/b"] == -5 and found["reward_part/b"] == 5
    assert found["recorded_std/b"] == pytest.approx(math.sqrt(5))
    assert found["reward_mean"] == 2 and found["reward_group_std"] == pytest.approx(0.25)


class Unsure(Brightness):
    """Says how sure it is."""

    def score(self, images, prompts, metadata=None):
        scores = super().score(images, prompts)
        return Scores(
            value=scores.value,
            valid=scores.valid,
            unit="level",
            std=torch.arange(1.0, 1 + len(scores)),
        )


@pytest.mark.parametrize("summed", [True, False])
def test_a_run_logs_what_the_judge_says_of_its_own_certainty(summed, tmp_path):
    reward = WeightedSum({"unsure": (Unsure(), 1.0)}) if summed else Unsure()
    record = toy_trainer(tmp_path, reward=reward).iterate()
    assert record["reward_part/unsure.std" if summed else "reward_part/std"] == 24.5  # of 1 to 48


def test_pictures_are_judged_by_rewards_that_they_are_not_trained_on(tmp_path):
    reward = WeightedSum({"brightness": (Brightness(), 1.0), "red": (Loud(), 0.0)})
    record = toy_trainer(tmp_path, reward=reward).iterate()
    assert record["recorded/red"] == record["reward_part/red"] and record["recorded_std/red"] > 0
    assert 0 < record["agreement/red"] < 1 and "agreement/brightness" not in record


def test_completions_log_the_spread_within_their_groups(tmp_path):
    record = toy_text_trainer(tmp_path).iterate()
    assert 0 < record["reward_group_std"] <= record["reward_std"]
