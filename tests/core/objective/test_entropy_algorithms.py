# SPDX-License-Identifier: Apache-2.0
"""Rows that look at entropies and log-probs, through `Objective`: golden cases and hand values."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.core import assert_values, f64
from visalign.core.objective.algorithms import named_objective
from visalign.core.objective.data import PolicyOutput, Trajectories
from visalign.core.objective.entropy_stage import entropy_memory
from visalign.core.objective.objective import Objective
from visalign.core.objective.stages import SELECTIONS
from visalign.core.rewards.entropy import (
    difficulty_entropy_reward,
    difficulty_of,
    phase_entropy_reward,
    window_entropy,
)
from visalign.core.tokens.entropy_terms import nucleus_entropy
from visalign.core.tokens.selection_rules import discriminator_scores

NAN = float("nan")


def golden(name: str) -> dict[str, Any]:
    """A case of the papers' rules."""
    path = Path(__file__).parents[2] / "golden" / "H_paper_rules.json"
    (case,) = [c for c in json.loads(path.read_text(encoding="utf-8"))["cases"] if c["name"] == name]
    return case


def with_advantages(advantage: Tensor, **columns: Tensor) -> Trajectories:
    """Samples whose group advantage, without a scale, is given: each has a partner without tokens."""
    size, wide = len(advantage), next(v for v in columns.values() if v.ndim == 2)
    partners = {name: torch.cat([value, torch.zeros_like(value)]) for name, value in columns.items()}
    full = {"weight": torch.ones_like(wide).double(), "old_log_prob": -torch.ones_like(wide).double()}
    full["weight"] = torch.cat([full["weight"], 0 * full["weight"]])
    full["old_log_prob"] = torch.cat([full["old_log_prob"]] * 2)
    reward = torch.cat([2 * advantage, torch.zeros_like(advantage)])
    fields: dict[str, Any] = {**full, **partners}
    return Trajectories(group=[*range(size)] * 2, reward=reward, **fields)


def prepared(name: str, t: Trajectories, **options: Any) -> Tensor:
    """[B, T] advantages of the samples that have tokens."""
    row = named_objective(name, advantage_options={"scale": "none", **options})
    return row.prepare(t).advantage[: len(t.weight) // 2]


def test_empg_is_the_golden_case_where_each_token_is_a_step_and_where_a_step_has_several() -> None:
    case = golden("empg_s1")
    entropy, advantage = (torch.tensor(case["inputs"][k]).double() for k in ("segment_entropy", "advantages"))
    step = torch.arange(entropy.shape[1]).expand_as(entropy)
    expected = torch.tensor(case["outputs"]["centred"]).double()
    t = with_advantages(advantage, entropy=entropy, step=step)
    torch.testing.assert_close(prepared("empg", t), expected, rtol=1e-6, atol=1e-8)
    twice = [torch.stack([x, x], 2).flatten(1) for x in (entropy, step)]
    deviation = torch.tensor([0.1, -0.1]).repeat(entropy.shape[1])  # the mean of a step counts
    t = with_advantages(advantage, entropy=twice[0] + deviation, step=twice[1])
    torch.testing.assert_close(prepared("empg", t)[:, ::2], expected, rtol=1e-6, atol=1e-8)
    assert bool((prepared("empg", t)[:, ::2] == prepared("empg", t)[:, 1::2]).all())


def test_low_perplexity_and_late_tokens_count_more() -> None:
    log_prob = -f64(0.2, 0.4, 0.6)[:, None].expand(3, 2)
    t = with_advantages(f64(1, 1, -1), old_log_prob=log_prob)
    reward = f64(3, 3, -3, -3, NAN, -1)  # of one group: mean 0, the fifth has none
    t.old_log_prob[3:] = -100.0  # of absent tokens
    one_group = replace(t, group=[0] * 6, reward=reward / 3)
    row = named_objective("perplexity", advantage_options={"scale": "none"})
    plain = named_objective("grpo", kl=0.0, advantage_options={"scale": "none"}).prepare(one_group).advantage
    assert_values(row.prepare(one_group).advantage[:3, 0] / plain[:3, 0], 1.1, 1.0, 0.9)
    row = named_objective("perplexity", advantage_options={"scale": "none", "alpha": 20.0})
    assert_values(row.prepare(one_group).advantage[:3, 1] / plain[:3, 1], 21, 1, 0)  # no sign turns
    assert_values(prepared("perplexity", t)[:, 0], 1.0, 1.0, -1.0)  # alone in its group
    low, high = 1 / (1 + f64(-0.5).exp()), 1 / (1 + f64(-1.0).exp())
    advantage = prepared("position", t)
    torch.testing.assert_close(advantage[0], torch.cat([1 + 0.1 * low, 1 + 0.1 * high]))
    torch.testing.assert_close(advantage[2], -advantage[0])
    at_mean = named_objective("position").prepare(replace(one_group, reward=torch.tensor([0.5, 0.6, 0.7, *[NAN] * 3])))
    assert float(at_mean.advantage[1].abs().max()) < 1e-5  # rounding has no sign


def test_unsure_tokens_count_more_by_aepo_and_its_clip_keeps_the_gradient() -> None:
    entropy = f64(0.1, 0.2, 0.3, 0.4, 9.0, NAN).view(2, 3)
    t = with_advantages(f64(2, -1), entropy=entropy)
    t.weight[1, 1] = 0  # the 9 nats belong to no token, and one token's entropy is unknown
    away = (f64(0.1, 0.2, 0.3, 0.4) - 0.25) / f64(0.1, 0.2, 0.3, 0.4).std(correction=0)
    advantage = prepared("aepo", t)
    torch.testing.assert_close(advantage[0], 2 * (1 + 0.2 * away[:3]))
    assert_values(advantage[1], -(1 + 0.2 * float(away[3])), 0.0, -1.0)
    missing = replace(t, valid=torch.tensor([True, False, True, False]))  # nor do its entropies count
    torch.testing.assert_close(prepared("aepo", missing)[0], 2 * (1 + 0.2 * 1.5**0.5 * f64(-1, 0, 1)))
    alike = replace(t, entropy=torch.full((4, 3), 0.3).double())
    assert prepared("aepo", alike).tolist()[0] == [2.0] * 3
    assert prepared("aepo", t, a=9.0).tolist()[0][0] == 0.0  # no sign turns
    row = named_objective("aepo", advantage_options={"scale": "none", "a": 0.0})
    prepared_row = row.prepare(t)
    policy = PolicyOutput(log_prob=(t.old_log_prob + 0.5).requires_grad_())
    loss = row.loss(prepared_row, policy).decisions["policy"]
    (gradient,) = torch.autograd.grad(loss[0, 0], policy.log_prob)
    assert_values(gradient[0, :1], -1.2 * float(prepared_row.advantage[0, 0]))


def test_aem_is_the_golden_case() -> None:
    case = golden("aem_worked")
    entropy = torch.tensor(case["inputs"]["response_entropy"]).double()[:, None].expand(-1, 2)
    advantage = torch.tensor(case["inputs"]["advantages"]).double()
    t = replace(with_advantages(advantage, entropy=entropy), group=case["inputs"]["group"] * 2)
    assert_values(prepared("aem", t)[:, 0], *case["outputs"]["advantages"])


def test_siren_is_the_golden_case_and_zero_where_it_starts() -> None:
    case = golden("siren_s0")
    logits = torch.tensor(case["inputs"]["logits"]).double().requires_grad_()
    weight, expected = torch.tensor(case["inputs"]["mask"]).double(), case["outputs"]
    entropy = nucleus_entropy(logits, p=0.8)
    t = Trajectories(
        weight=weight,
        old_log_prob=-torch.ones_like(weight),
        group=range(3),
        reward=f64(1, 2, 3),
        entropy=torch.ones_like(weight),
        nucleus_entropy=torch.where(weight != 0, entropy.detach(), NAN),
        entropy_before=case["params"]["anchor"],
    )
    row = named_objective("siren")
    policy = PolicyOutput(log_prob=t.old_log_prob, nucleus_entropy=entropy)
    term = row.loss(row.prepare(t), policy).terms["entropy"]
    assert_values(term[None], expected["term"])
    (gradient,) = torch.autograd.grad(term, logits, retain_graph=True)
    peaks = torch.tensor(expected["peak_mask"]).bool()
    assert bool((gradient[~peaks] == 0).all()) and bool((gradient[peaks] != 0).any())
    assert entropy_memory(row, t, []) == [pytest.approx(expected["aggregate"]), 1.0]
    assert entropy_memory(row, t, [0.3, 1.0]) == [0.3, 2.0]  # the first one stays
    start = row.loss(row.prepare(replace(t, entropy_before=None)), policy).terms["entropy"]
    assert float(start.detach()) == 0 and not bool(torch.autograd.grad(start, logits)[0].any())


def test_epo_draws_a_completion_back_into_the_band_of_the_past() -> None:
    weight = torch.tensor([[1.0, 1, 0], [1, 1, 1]]).double()
    entropy = torch.tensor([[1.4, 1.6, NAN], [1.0, 1.0, 1.0]]).double().requires_grad_()
    t = Trajectories(
        weight=weight,
        old_log_prob=-torch.ones_like(weight),
        group=[0, 1],
        reward=f64(1, 2),
        entropy=entropy.detach(),
        entropy_before=1.0,
    )
    row, c = named_objective("epo", entropy=0.01), 0.01
    policy = PolicyOutput(log_prob=t.old_log_prob, entropy=entropy)
    # mean_i −c (H̄_i − λ_s pen_i): 1.5 is 0.3 above 1.2, 1.0 inside
    term = row.loss(row.prepare(t), policy).terms["entropy"]
    assert_values(term[None].detach(), -c * ((1.5 - 0.1 * 0.3) + 1.0) / 2)
    (gradient,) = torch.autograd.grad(term, entropy)
    assert_values(gradient[0], *[-c * 0.9 / 4] * 2, 0)
    assert_values(gradient[1], *[-c / 6] * 3)
    below = row.loss(row.prepare(replace(t, entropy_before=2.0)), policy).terms["entropy"]
    assert_values(below[None].detach(), -c * ((1.5 - 0.1 * 0.1) + (1.0 - 0.1 * 0.6)) / 2)
    first = row.loss(row.prepare(replace(t, entropy_before=None)), policy).terms["entropy"]
    assert_values(first[None].detach(), -c * 2.5 / 2)
    memory = entropy_memory(row, t, [])
    assert memory == [pytest.approx(6 / 5), 1.0]
    assert entropy_memory(row, t, [0.3, 2.0]) == [pytest.approx((0.3 * 2 + 1.2) / 3), 3.0]
    with pytest.raises(ValueError, match=r"low must be ≤ high; got 2\.0 and 1\.2 .*'epo'"):
        named_objective("epo", entropy_term_options={"low": 2.0})
    with pytest.raises(ValueError, match=r"low_end must be ≤ high_end; got 0\.9 and 0\.7 .*'entrocraft'"):
        SELECTIONS["entrocraft"].check("selection", "entrocraft", {"low_end": 0.9})


def test_tea_is_the_golden_case() -> None:
    case = golden("tea_covariance_worked")
    log_prob, advantage, entropy = (
        torch.tensor(case["inputs"][name]).double()[None] for name in ("log_prob", "advantages", "entropy")
    )
    t = Trajectories(weight=torch.ones_like(log_prob), old_log_prob=log_prob, group=[0], advantage=advantage)
    row = named_objective("tea", advantage="given")
    policy = PolicyOutput(log_prob=log_prob, entropy=entropy)
    assert_values(row.loss(row.prepare(t), policy).terms["entropy"][None], -0.05 * 0.75)


def chosen(name: str, advantage: Tensor, **columns: Any) -> tuple[Objective, Trajectories]:
    """A row on given advantages [B, T]."""
    one = torch.ones_like(advantage)
    t = Trajectories(**{"weight": one, "old_log_prob": -one, "group": range(len(one)), **columns}, advantage=advantage)
    return named_objective(name, advantage="given", kl=0.0), t


def test_clip_v_drops_the_tokens_of_the_golden_case() -> None:
    case = golden("clip_v_entropy_dynamics_s0")
    log_p = torch.tensor(case["inputs"]["logits"]).double().log_softmax(-1)
    ids, advantage = torch.tensor(case["inputs"]["ids"]), torch.tensor(case["inputs"]["advantages"]).double()
    scores = discriminator_scores(log_p)
    row, t = chosen(
        "clip_v",
        advantage[None],
        old_log_prob=log_p.gather(-1, ids[:, None]).T,
        entropy=scores.entropy[None],
        expected_score=scores.expected[None],
    )
    options = {key: case["params"][key] for key in ("mu", "max_fraction")}
    drop = replace(row, selection_options=options).prepare(t).weight == 0
    assert drop[0].tolist() == [bool(d) for d in case["outputs"]["drop"]] and bool(drop.any())
    assert bool((row.prepare(t).weight != 0).all())  # of 24 tokens none is 1e-4


def test_steer_and_entrocraft_are_their_golden_cases() -> None:
    case = golden("steer_worked")
    names = {"old_log_prob": "old_log_prob", "entropy": "entropy", "weight": "mask"}
    columns = {name: torch.tensor(case["inputs"][key]).double() for name, key in names.items()}
    row, t = chosen("steer", torch.tensor(case["inputs"]["advantages"]).double(), **columns)
    weights = row.prepare(t).loss_weight
    assert weights is not None
    assert_values(weights[0], *case["outputs"]["weight_linear"][0])
    for name in ("entrocraft_low", "entrocraft_high", "entrocraft_inside"):
        case = golden(name)
        advantage = torch.tensor(case["inputs"]["advantages"]).double()[:, None].expand(-1, 2)
        entropy = case["inputs"]["entropy"] + torch.tensor([-0.2, 0.2]).double().expand_as(advantage)
        row, t = chosen("entrocraft", advantage, entropy=entropy)
        prepared_row = row.prepare(t)
        assert (prepared_row.weight[:, 0] != 0).tolist() == [bool(k) for k in case["outputs"]["keep"]]
        assert float(prepared_row.counts.sequences) == sum(case["outputs"]["keep"])


def test_entrocrafts_band_moves_and_may_leave_nothing() -> None:
    advantage = f64(1, 1, -1)[:, None].expand(3, 2)
    row, t = chosen("entrocraft", advantage, entropy=torch.full((3, 2), 0.45).double())
    live = [(row.prepare(replace(t, iteration=i)).weight[:, 0] != 0).tolist() for i in (0, 49, 51, 200, 900)]
    assert live[:2] == [[False, False, True]] * 2 and live[2:] == [[True] * 3] * 3
    none = row.prepare(replace(t, advantage=advantage.abs()))
    assert not bool(none.weight.any()) and float(none.counts.sequences) == 0
    with pytest.raises(ValueError, match=r"over must be a whole number in \[1, inf\); got 0"):
        replace(row, selection_options={**row.selection_options, "over": 0})


def test_pear_takes_the_entropy_of_thinking_off_a_right_answer() -> None:
    """H̄ of thinking and answer: (.8, .3), (.3, .5), (.8, none), wrong, right with a reward of 2."""
    phases = [(0.8, 0.3), (0.3, 0.5), (0.8, 0.8), (0.9, 0.1), (0.3, 0.3)]
    entropy = torch.tensor([[think, think, answer, NAN] for think, answer in phases]).double()
    step = torch.tensor([[0, 0, 1, -1]] * 5)
    step[2] = 0
    weight = torch.tensor([[1.0, 1, 1, 0]] * 5).double()
    reward = f64(1, 1, 1, 0.25, 2)
    shaped = phase_entropy_reward(reward, entropy, step, weight)
    assert_values(shaped, 0.5, 1, 0.2, 0.25, 1)
    t = Trajectories(weight=weight, old_log_prob=-weight, group=[0] * 5, reward=reward, entropy=entropy, step=step)
    row = named_objective("pear", advantage_options={"scale": "none"})
    assert_values(row.prepare(t).advantage[:, 0], *(shaped - shaped.mean()).tolist())
    halved = named_objective("pear", advantage_options={"scale": "none", "alpha": 0.0}).prepare(t).advantage
    assert float(halved[0, 0] - halved[1, 0]) == pytest.approx(-0.5)


def test_ares_by_hand() -> None:
    """Easy, target 10 and 14 windows: d − m = 2.5, Huber over κ = 2 is 1.5, 0.5 · 1.5/(1.5 + 2)."""
    right = torch.tensor([True] * 6 + [False] * 3)
    hard, count = torch.tensor([0, 0, 1, 2, 2, 1, 0, 1, 2]), f64(14, 11.5, 5, 10, 2, 10, 10, 30, 8)
    shaped = difficulty_entropy_reward(count, torch.full((9,), 10.0).double(), right, hard)
    assert_values(shaped[:3], -0.2142857142857143, 0, -0.5 * (2.5**2 / 6) / 5.5)
    assert_values(shaped[3:6], 0.6 / (1 + math.exp(-3.5 / 3)), -0.5 * 0.6 * (4.5 - 2) / 7.5, 0)
    assert_values(shaped[6:], 0, 0.4 * (2 / (1 + math.exp(-17.5 / 2.5)) - 1), 0)
    assert difficulty_of(f64(1, 2 / 3, 0.5, 1 / 3, 0.3)).tolist() == [0, 0, 1, 1, 2]
    entropy = torch.tensor([[1.0, NAN, 3, 5, 7], [1, 2, NAN, NAN, NAN]]).double()
    weight = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    means, complete = window_entropy(entropy, weight, window=3)
    assert means[0, :2].tolist() == [3, 5] and complete.tolist() == [[True, True, False, False, False], [False] * 5]


def test_ares_compares_completions_of_one_difficulty_and_keeps_its_threshold() -> None:
    entropy = torch.full((4, 20), 0.1).double()
    entropy[0, :12] = 1.0
    t = Trajectories(
        weight=torch.ones_like(entropy),
        old_log_prob=-torch.ones_like(entropy),
        group=[0] * 4,
        reward=f64(1, 1, 1, 0),
        entropy=entropy,
        entropy_before=0.5,
    )
    options = {"scale": "none", "window": 1}
    # an easy prompt: 12, 0, 0, 0 windows of high entropy, usual are 3; d − m = 9 − 1
    row = named_objective("ares", advantage_options=options)
    reward = f64(1 - 0.5 * min(1, (8 - 1) / 3), 1, 1, 0)
    assert_values(row.prepare(t).advantage[:, 0], *(reward - reward.mean()).tolist())
    unusual = row.prepare(replace(t, entropy_before=2.0)).advantage[:, 0]  # nothing is above it
    assert_values(unusual, 0.25, 0.25, 0.25, -0.75)
    assert entropy_memory(row, t, []) == [1.0, 1.0]
    assert entropy_memory(row, t, [0.5, 3.0]) == [pytest.approx(0.505), 4.0]
    with pytest.raises(ValueError, match="'ares' and entropy_term='epo' each keep a number of their own"):
        named_objective("ares", entropy=0.1, entropy_term="epo")


def test_the_rest_of_the_rows_are_their_golden_cases() -> None:
    """80/20, Clip_B and the gradient-keeping clip."""
    case = golden("top_entropy_s0")
    entropy, mask = (torch.tensor(case["inputs"][key]).double()[None] for key in ("entropy", "mask"))
    row, t = chosen("top_entropy", torch.ones_like(mask), entropy=entropy, weight=mask)
    keep = replace(row, selection_options={"fraction": case["params"]["rho"]}).prepare(t).keep
    assert keep is not None and keep[0].tolist() == [bool(k) for k in case["outputs"]["mask"]]
    for name in ("clip_b_worked25", "clip_b_worked20"):
        case = golden(name)
        score, advantage = (torch.tensor(case["inputs"][key]).double()[None] for key in ("S", "advantages"))
        # with log p = −1, S = e⁻¹ (H − 1)
        row, t = chosen("clip_b", advantage, entropy=score * math.e + 1)
        live = replace(row, selection_options={"mu": case["params"]["mu"]}).prepare(t).weight[0] != 0
        assert live.tolist() == [bool(k) for k in case["outputs"]["keep"]]
    case = golden("aepo_clip_s0")
    new, old, advantage = (
        torch.tensor(case["inputs"][key]).double() for key in ("log_prob", "old_log_prob", "advantages")
    )
    row, t = chosen("aepo_clip", advantage, old_log_prob=old)
    row = replace(row, surrogate_options=case["params"])
    policy = PolicyOutput(log_prob=new.requires_grad_())
    loss = row.loss(row.prepare(t), policy).decisions["policy"]
    torch.testing.assert_close(loss, torch.tensor(case["outputs"]["loss_per_token"]).double())
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    torch.testing.assert_close(gradient, torch.tensor(case["outputs"]["grad_of_sum"]).double())
