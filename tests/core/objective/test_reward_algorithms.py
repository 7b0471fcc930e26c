# SPDX-License-Identifier: Apache-2.0
"""Rows that shape rewards or look at batches of them, through `Objective`: golden cases and hand values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.core.objective.test_entropy_algorithms import golden, prepared, with_advantages
from tests.support.core import assert_values, f64
from visalign.core.objective.algorithms import named_objective
from visalign.core.objective.data import PolicyOutput, Trajectories
from visalign.core.objective.objective import Objective
from visalign.core.objective.reward_stage import riskpo_quantiles

NAN = float("nan")


def samples(reward: torch.Tensor, **columns: Any) -> Trajectories:
    """One sample of two decisions for each reward."""
    wide = torch.ones(len(reward), 2, dtype=torch.float64)
    columns.setdefault("group", [0] * len(reward))
    return Trajectories(weight=wide, old_log_prob=-wide, reward=reward, **columns)


def tracked(row: Objective, t: Trajectories) -> torch.Tensor:
    """The quantiles after a rollout."""
    assert t.reward is not None
    return f64(*riskpo_quantiles(t, t.reward, **row.advantage_options))


def test_riskpo_is_the_golden_case_over_its_std_and_tracks_its_quantiles() -> None:
    """A score of one sample is that of a bundle of five whose mean is a fifth."""
    for name in ("riskpo_worked", "riskpo_s0", "riskpo_s1"):
        case = golden(name)
        score = torch.tensor(case["inputs"]["scores"]).double()
        down, up = case["inputs"]["q_down"], case["inputs"]["q_up"]
        bundle = torch.arange(len(score)).repeat(5)
        t = samples((score / 5).repeat(5), bundle=bundle, quantiles=(down, up))
        row = named_objective("riskpo")
        advantages = row.prepare(t).advantage[:, 0]
        expected = torch.tensor(case["outputs"]["mixed"]).double() / (score.std() + 1e-6)
        torch.testing.assert_close(advantages, expected.repeat(5), rtol=1e-6, atol=1e-8)
        assert_values(tracked(row, t), *[case["outputs"][f"q_{x}_next"] for x in ("down", "up")])


def test_canon_copo_and_prl_are_their_golden_cases() -> None:
    """Three samples of different rewards have the entropy ln 3, from which a ρ gives COPO's weight w."""
    for name in ("canon_worked_alpha", "canon_mu0.7_al0.8_low_s0", "canon_mu1_al1_high_s1"):
        case = golden(name)
        reward, metric = (torch.tensor(case["inputs"][key]).double() for key in ("rewards", "metric"))
        t = samples(reward, metric=metric)
        canon_options = {key.removeprefix("alpha_"): value for key, value in case["params"].items()}
        advantages = named_objective("canon", advantage_options=canon_options).prepare(t).advantage[:, 0]
        assert_values(advantages, *case["outputs"]["advantages"])
    case, w = golden("copo_blend_s0"), 0.4
    reward, local = (torch.tensor(values).double() for values in (case["inputs"]["rewards"], case["outputs"]["local"]))
    between = torch.tensor(case["outputs"]["global_"]).double()[:, None]
    options = {"rho": math.log(3) - math.log(w / (1 - w)) / 20}
    t = samples(reward.flatten(), group=torch.arange(4).repeat_interleave(3).tolist())
    labels = torch.arange(12)
    for answer, more in ((None, {}), (labels, {}), (labels // 3, {"consistency": "rewards"})):
        row = named_objective("copo", advantage_options=options | more)
        advantages = row.prepare(replace(t, answer=answer)).advantage[:, 0]
        assert_values(advantages, *(w * local + (1 - w) * between).flatten().tolist())
    agree = named_objective("copo", advantage_options=options).prepare(replace(t, answer=labels // 3))
    assert_values(agree.advantage[:, 0], *between.expand(4, 3).flatten().tolist())  # w is 2e-10
    for name in ("prl_worked", "prl_block1_s0", "prl_block3_s1"):
        case = golden(name)
        away, mask, advantage = (torch.tensor(case["inputs"][k]).double() for k in ("log_ratio", "mask", "advantage"))
        t = with_advantages(advantage, ref_log_prob=-1 - away)
        t = replace(t, weight=torch.cat([mask, 0 * mask]))
        expected = torch.tensor(case["outputs"]["advantages"]).double()
        torch.testing.assert_close(prepared("prl", t, **case["params"]), expected)


def test_flowrl_is_the_golden_case_with_the_weight_that_the_paper_clips() -> None:
    for name in ("flowrl_s0", "flowrl_s1", "flowrl_s2"):
        case = golden(name)
        inputs = {key: torch.tensor(value).double() for key, value in case["inputs"].items()}
        t = Trajectories(
            weight=inputs["mask"],
            old_log_prob=inputs["old_log_prob"],
            ref_log_prob=inputs["ref_log_prob"],
            advantage=inputs["reward"],
            group=[*range(len(inputs["reward"]))],
        )
        row = named_objective("flowrl", advantage="given", advantage_options={})
        new = inputs["log_prob"].requires_grad_()
        loss = row.loss(row.prepare(t), PolicyOutput(log_prob=new, log_z=inputs["log_z"])).total
        expected = case["outputs_paper"]
        assert_values(loss[None], expected["loss"])
        (gradient,) = torch.autograd.grad(loss, new)
        torch.testing.assert_close(gradient, torch.tensor(expected["grad_log_prob"]).double())


def test_riskpo_begins_with_the_rollouts_own_quantiles_and_leaves_out_what_is_missing() -> None:
    """Sums of two: 1, 3, 5; the fourth bundle has one reward alone, 2, which counts twice."""
    bundle = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
    t = samples(f64(0, 1, 2, 2, 1, 2, 3, NAN, NAN), bundle=bundle)
    row = named_objective("riskpo", advantage_options={"bundle": 2, "natural_baseline": False})
    low, high = 2.2, 4.4  # quantiles 0.2 and 0.8 of 1, 3, 4, 5
    raw = f64(1.5 * -(low - 1) / 0.2, (3 - low) / 0.6, (4 - low) / 0.6, (high - low) / 0.6) / 2.5
    expected = raw / (f64(1, 3, 4, 5).std() + 1e-6)
    prepared = row.prepare(t)
    assert_values(prepared.advantage[:, 0], *expected[torch.tensor([0, 1, 3, 2, 0, 1, 3])].tolist(), 0, 0)
    assert prepared.weight.bool()[:, 0].tolist() == [True] * 7 + [False] * 2
    assert_values(tracked(row, t), 2.2 + 0.1 * (0.2 - 0.25), 4.4 + 0.1 * (0.8 - 0.75))
    same = replace(t, reward=torch.ones(9, dtype=torch.float64))
    assert float(row.prepare(same).advantage.abs().max()) == 0.0


def test_grpo_with_process_rewards_sums_the_z_scores_of_the_steps_still_to_come() -> None:
    """Rewards (1, 0) and (0, 0) of two steps of two tokens; a third sample fails, the outcome plays no part."""
    step = torch.tensor([[0, 0, 1, 1]] * 3)
    reward = f64(0, 1, 0, 0) * f64(1, 0, 5)[:, None]
    wide = torch.ones(3, 4).double()
    t = Trajectories(weight=wide, old_log_prob=-wide, ref_log_prob=-wide, group=[0] * 3, reward=f64(7, 3, NAN))
    row = named_objective("grpo_process", advantage_options={"eps": 0.0})
    advantage = row.prepare(replace(t, step=step, process_reward=reward)).advantage
    assert_values(advantage.flatten(), 1, 1, -0.5, -0.5, -1, -1, -0.5, -0.5, 0, 0, 0, 0)


def test_riskpo_divides_by_the_std_of_the_bundles_of_the_same_prompts() -> None:
    """Prompts a and b make bundles of sums 0, 4; c and d of 1, 3; e alone, std 1, and f equal ones, which get 0."""
    group = ["a", "b", "a", "b", "c", "d", "c", "d", "e", "f", "f"]
    bundle = torch.tensor([0, 0, 1, 1, 20, 20, 21, 21, 40, 60, 61])
    t = samples(f64(0, 0, 2, 2, 0, 1, 1, 2, 0, 1, 1), bundle=bundle, group=group, quantiles=(5.0, 6.0))
    advantages = named_objective("riskpo", advantage_options={"bundle": 2}).prepare(t).advantage[:, 0]
    raw = [(1.5 * -(5 - s) / 0.2 - 1 / 0.6) / 2.5 for s in (0, 4, 1, 3, 0)]
    first, second = 8**0.5 + 1e-6, 2**0.5 + 1e-6
    expected = [raw[0] / first] * 2 + [raw[1] / first] * 2 + [raw[2] / second] * 2 + [raw[3] / second] * 2
    assert_values(advantages, *expected, raw[4] / (1 + 1e-6), 0, 0)


def test_par_is_the_golden_case_before_the_group_and_takes_the_kl_off_what_it_shaped() -> None:
    case = golden("par_worked")
    reward, reference = (torch.tensor(case["inputs"][k]).double() for k in ("rewards", "reference_rewards"))
    t = samples(reward, reference_reward=reference, ref_log_prob=-torch.ones(3, 2).double())
    options = {"references": 2, "scale": "none"}
    row = named_objective("par", advantage_options=options)
    shaped = torch.tensor(case["outputs"]["shaped"]).double()
    assert_values(row.prepare(t).advantage[:, 0], *(shaped - shaped.mean()).tolist())
    assert t.ref_log_prob is not None
    t.ref_log_prob[0, 0] = -3.0  # k1 = 2
    moved = shaped - 0.1 * f64(2, 0, 0)
    row = named_objective("par", advantage_options=options, kl_in_reward=0.1)
    assert_values(row.prepare(t).advantage[:, 0], *(moved - moved.mean()).tolist())
    with pytest.raises(ValueError, match=r"reference_reward must be \[B, 1\]; got shape \(3, 2\)"):
        named_objective("par").prepare(t)
    with pytest.raises(ValueError, match=r"weight must be \[B, T\] and reference_reward \[B, M\]; got \(3, 2\)"):
        replace(t, reference_reward=torch.zeros(2, 2))


def test_likelihoods_are_compared_with_the_others_and_jepo_takes_what_each_adds() -> None:
    """By hand from ℓ = −1, −2, −3 (arXiv 2602.03979); the judge's reward plays no part."""
    t = samples(f64(5, 7, 9, 1), likelihood=f64(-1, -2, -3, NAN), ref_log_prob=-torch.ones(4, 2).double())
    prepared_row = named_objective("likelihood").prepare(t)
    assert_values(prepared_row.advantage[:, 0], 1.5, 0, -1.5, 0)
    assert prepared_row.weight.bool()[:, 0].tolist() == [True] * 3 + [False]
    assert_values(named_objective("jepo").prepare(t).advantage[:, 0], 0.68888, -0.12479, -0.31112, 0, atol=1e-5)
    failed = replace(t, valid=torch.tensor([True, True, False, True]))
    without = named_objective("jepo").prepare(failed)
    assert_values(without.advantage[:2, 0], 0.620115, -0.379885, atol=1e-5)  # ln((e⁻¹ + e⁻²)/2) = −1.379885
    assert t.ref_log_prob is not None
    t.ref_log_prob[0, 1] = -3.0
    assert_values(named_objective("likelihood", kl_in_reward=0.5).prepare(t).advantage[:3, 0], 0.5, 0.5, -1)
    with pytest.raises(ValueError, match="kind must be one of log_prob, mean_log_prob, prob, mean_prob"):
        named_objective("likelihood", advantage_options={"kind": "logprob"}).prepare(t)
