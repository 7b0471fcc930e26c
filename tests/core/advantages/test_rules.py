# SPDX-License-Identifier: Apache-2.0
"""CANON, PRL, SPEAR: hand values, independent loops, exact gradients, what is missing."""

from __future__ import annotations

import pytest
import torch

from tests.support.core import assert_values, f64, normal
from visalign.core.advantages.rules import (
    conditional_advantages,
    online_dpo_advantages,
    prl_advantages,
    replay_advantages,
    replay_weight,
)
from visalign.core.objective.algorithms import named_objective
from visalign.core.objective.data import PolicyOutput, Trajectories
from visalign.core.preference.direct import direct_preference_loss

NAN = float("nan")
INF = float("inf")


class TestConditional:
    reward = f64(1, 0, 1, 1)
    metric = f64(0.1, 0.2, 0.3, 0.4)

    def test_equals_loops_over_interleaved_groups(self) -> None:
        reward, metric = normal(23), normal(23, seed=1)
        group = [i * i % 5 for i in range(23)]
        ours = conditional_advantages(reward, metric, group, mu=0.7, alpha=0.8, side="low")
        for label in set(group):
            members = sorted((i for i in range(23) if group[i] == label), key=lambda i: metric[i].item())
            low, high = members[: len(members) // 2], members[len(members) // 2 :]
            for half, other, a_own, a_other in ((low, high, 0.8, 1.0), (high, low, 1.0, 0.8)):
                for i in half if len(members) > 1 else []:
                    between = a_own * reward[i] - a_other * reward[other].mean()
                    expected = 0.7 * between + 0.3 * (reward[i] - reward[half].mean())
                    assert ours[i].item() == pytest.approx(expected.item(), abs=1e-12)

    def test_equal_rewards_single_samples_and_equal_metrics(self) -> None:
        reward = torch.full((7,), 0.1)
        assert conditional_advantages(reward, torch.rand(7), [0, 0, 0, 1, 1, 1, 2], mu=0.3).eq(0).all()
        assert_values(conditional_advantages(self.reward, torch.zeros(4), [0] * 4), 0.25, -0.75, 0.25, 0.25)
        assert_values(conditional_advantages(f64(5), f64(1), ["a"]), 0)

    def test_missing_samples_leave_the_halves(self) -> None:
        reward = torch.cat([f64(NAN, 9), self.reward, f64(INF)])
        metric = torch.cat([f64(0, NAN), self.metric, f64(9)])
        assert_values(conditional_advantages(reward, metric, [0] * 7), 0, 0, 0, -1, 0.5, 0.5, 0)
        assert conditional_advantages(f64(NAN, NAN), f64(0, 1), [0, 1]).eq(0).all()


class TestPrl:
    def test_a_block_that_ends_in_zero_is_a_block(self) -> None:
        """Its value is exactly 0 and must not be taken for a block without an end."""
        assert_values(prl_advantages(f64(0), f64(5, 0, 3, 0)[None], eta=1, block=2)[0], -3, -3, 0, 0)

    @pytest.mark.parametrize("block", [1, 2, 3, 5])
    def test_padding_and_holes_change_nothing(self, block: int) -> None:
        generator = torch.Generator().manual_seed(4)
        weight = (torch.rand(6, 11, generator=generator) < 0.6).long()
        weight[0], weight[1] = 0, 1
        log_ratio = torch.where(weight == 1, normal(6, 11, seed=5), NAN)
        advantage = normal(6, seed=6)
        ours = prl_advantages(advantage, log_ratio, weight, eta=3, block=block)
        assert ours[weight == 0].eq(0).all()
        for row in range(6):
            inside = weight[row] == 1
            values = log_ratio[row, inside].tolist()
            for t, value in enumerate(ours[row, inside].tolist()):
                end = min((t // block + 1) * block, len(values)) - 1
                assert value == pytest.approx(advantage[row].item() - sum(values[end:]) / 3, abs=1e-12)


class TestOnlineDpo:
    @pytest.mark.parametrize(("row", "eps"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("robust", 0.2), ("hinge", 0.0)])
    def test_the_gradient_is_that_of_dpo_on_best_and_worst(self, row: str, eps: float) -> None:
        """Three groups, the last without a preference; a missing reward, tokens that are not there."""
        group, reward = [0] * 4 + [1] * 3 + [2] * 2, f64(3, NAN, -1, 2, 0, 5, 5, 1, 1)
        weight = (torch.rand(9, 6, generator=torch.Generator().manual_seed(1)) < 0.7).double()
        old, ref = -normal(9, 6, seed=2).abs(), -normal(9, 6, seed=3).abs()
        options = {"beta": 0.5, "row": row, "eps": eps}
        objective = named_objective("online_dpo", advantage_options=options)
        trajectories = Trajectories(
            weight=weight, old_log_prob=old, ref_log_prob=ref, group=group, reward=reward,
            valid=torch.isfinite(reward)
        )  # fmt: skip
        policy = old.clone().requires_grad_()
        objective.loss(objective.prepare(trajectories), PolicyOutput(log_prob=policy)).total.backward()
        exact = old.clone().requires_grad_()
        policy_sum, ref_sum = ((x * weight).sum(1) for x in (exact, ref))
        best, worst = [0, 5], [2, 4]
        loss = direct_preference_loss(policy_sum[best], policy_sum[worst], ref_sum[best], ref_sum[worst], **options)
        (loss * f64(3, 3)).sum().div(8).backward()  # a mean over the samples that can be judged
        torch.testing.assert_close(policy.grad, exact.grad, rtol=1e-9, atol=1e-12)
        assert loss.unique().numel() == 2

    def test_what_has_no_preference_teaches_nothing(self) -> None:
        assert online_dpo_advantages(f64(1, 1, 2), f64(0, 0, 0), [0, 0, 1]).eq(0).all()
        assert online_dpo_advantages(f64(NAN, 1), f64(0, 0), [0, 0]).eq(0).all()
        assert_values(online_dpo_advantages(f64(0, 1), f64(0, 0), [0, 0], beta=0.2), -0.2, 0.2)
        with pytest.raises(ValueError, match=r"row must be one of sigmoid, robust, hinge; got 'simpo'"):
            named_objective("online_dpo", advantage_options={"row": "simpo"})


class TestReplay:
    def test_hand_values(self) -> None:
        advantage, keep = replay_advantages(f64(1, 0.5, 0.3), f64(0.2, 0.4, 0.6, 0.5))
        assert_values(advantage, 0.55, 0.05, -0.15)
        assert keep.tolist() == [True, True, False]
        assert_values(replay_weight(f64(0, 50, 100, 200, 300)), 0, 0.14644661, 0.5, 1, 1)
        assert replay_weight(5, warmup=10, ceiling=0.4).item() == pytest.approx(0.2)

    def test_missing(self) -> None:
        advantage, keep = replay_advantages(f64(NAN, 2, INF), f64(NAN, 1, 3, INF, 0))
        assert_values(advantage, 0, 1, 0)
        assert keep.tolist() == [False, True, False]
        advantage, keep = replay_advantages(torch.ones(2).half(), torch.tensor([NAN]))
        assert advantage.dtype == torch.float32 and advantage.eq(0).all() and not keep.any()
