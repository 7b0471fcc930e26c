# SPDX-License-Identifier: Apache-2.0
"""Advantages weighed by the uncertainty of their rewards: which weight, that it scales advantages, limits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from tests.support.training.images import outcome
from tests.support.training.text import Letters, toy_text_trainer
from visalign.rewards import WeightedTextSum
from visalign.training.text.collect import uncertainty_weights


class Doubtful(Letters):
    """Letters with a deviation: the given one, or that of `_std`."""

    def __init__(self, std: float | None = None, fail: Any = None) -> None:
        super().__init__(fail=fail)
        self.std = std

    def score(self, completions: Any, prompts: Any, metadata: Any = None) -> Any:
        scores = super().score(completions, prompts, metadata)
        std = _std(completions)
        return replace(scores, std=std if self.std is None else torch.full_like(std, self.std))


def _std(completions: Any) -> torch.Tensor:
    return torch.tensor([len(set(text)) + 0.25 for text in completions])


def _sum(reward: Any, strength: float | None = 1.0) -> WeightedTextSum:
    weights = {} if strength is None else {"letters": strength}
    return WeightedTextSum({"letters": (reward, 1.0)}, advantage_weights=weights)


def test_a_factor_is_the_product_over_rewards_and_failed_samples_move_no_median():
    columns = {"part/a.std": torch.tensor([0.0, 1, 2, 90]), "part/b.std": torch.tensor([3.0, 3, 3, 0])}
    valid = torch.tensor([True, True, True, False])
    weights = uncertainty_weights(columns, valid, {"a": 2.0, "b": 1.0})
    expected = [math.exp(-1), math.exp(-3), math.exp(-5), 0]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_an_iteration_learns_with_the_weights_of_its_samples(tmp_path):
    reward = Doubtful(fail=lambda text, record: text.startswith("a"))
    for number, dynamic in enumerate((None, {"rule": "spread"})):
        trainer = toy_text_trainer(tmp_path / str(number), reward=_sum(reward, 0.5), dynamic=dynamic)
        experience = trainer.algorithm.collect(trainer.context).experience
        t = experience.trajectories
        std = torch.where(t.valid, _std(experience.rollout.text).double(), torch.nan)
        expected = torch.exp(-0.5 * std / std[t.valid].quantile(0.5)).nan_to_num(0.0)
        torch.testing.assert_close(t.loss_weight, expected[:, None].expand_as(t.weight).float())
        assert len(expected.unique()) > 2


def test_certain_rewards_train_as_without_it_bit_for_bit(tmp_path):
    for name, strength in (("plain", None), ("weighed", 1.0)):
        toy_text_trainer(tmp_path / name, reward=_sum(Doubtful(std=0.0), strength)).train()
    assert outcome(tmp_path / "plain") == outcome(tmp_path / "weighed")
