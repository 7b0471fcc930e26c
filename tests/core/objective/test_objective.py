# SPDX-License-Identifier: Apache-2.0
"""Objectives: the terms against loops over samples and decisions, what is left out, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.core import LABELS, step
from visalign.core.objective.algorithms import named_objective
from visalign.core.objective.data import PolicyOutput, Trajectories
from visalign.core.objective.objective import Objective

CLIP = {"eps_low": 0.2, "eps_high": 0.2}


def _total(objective: Objective, trajectories: Trajectories, policy: PolicyOutput) -> float:
    return float(objective.loss(objective.prepare(trajectories), policy).total)


def _group_advantage(trajectories: Trajectories, i: int) -> float:
    """GRPO's advantage by hand: the valid members of i's group, unbiased std, eps 1e-4."""
    assert trajectories.reward is not None
    rewards = trajectories.reward.tolist()
    mine = [r for r, label in zip(rewards, LABELS, strict=True) if label == LABELS[i] and math.isfinite(r)]
    if len(mine) < 2:
        return 0.0
    mean = sum(mine) / len(mine)
    std = math.sqrt(sum((r - mean) ** 2 for r in mine) / (len(mine) - 1))
    return (rewards[i] - mean) / (std + 1e-4)


def _ppo_loss(trajectories: Trajectories, policy: PolicyOutput, i: int, t: int, low: float, high: float) -> float:
    ratio = math.exp(float(policy.log_prob[i, t] - trajectories.old_log_prob[i, t]))
    gain = _group_advantage(trajectories, i)
    return -min(ratio * gain, min(max(ratio, 1 - low), 1 + high) * gain)


def _rows(trajectories: Trajectories) -> list[int]:
    """Samples that take part: with a reward and at least one decision."""
    return [i for i in range(8) if trajectories.present()[i] and trajectories.weight[i].any()]


def test_grpo_is_the_mean_over_completions_of_the_mean_over_tokens_with_k3() -> None:
    trajectories, policy = step(1)
    assert trajectories.ref_log_prob is not None
    means = []
    for i in _rows(trajectories):
        losses = []
        for t in trajectories.weight[i].nonzero().flatten().tolist():
            d = float(policy.log_prob[i, t] - trajectories.ref_log_prob[i, t])
            losses.append(_ppo_loss(trajectories, policy, i, t, 0.2, 0.2) + 0.04 * (math.exp(-d) - 1 + d))
        means.append(sum(losses) / len(losses))
    expected = sum(means) / len(means)
    assert _total(named_objective("grpo"), trajectories, policy) == pytest.approx(expected, rel=1e-10)


def test_dapo_is_one_mean_over_the_tokens_that_carry_signal() -> None:
    trajectories, policy = step(2)
    losses = [
        _ppo_loss(trajectories, policy, i, t, 0.2, 0.28)
        for i in _rows(trajectories)
        if _group_advantage(trajectories, i) != 0
        for t in trajectories.weight[i].nonzero().flatten().tolist()
    ]
    assert len(losses) > 10
    expected = sum(losses) / len(losses)
    assert _total(named_objective("dapo"), trajectories, policy) == pytest.approx(expected, rel=1e-10)


def test_gspo_takes_one_ratio_per_completion() -> None:
    trajectories, policy = step(3, move=0.002)
    losses = []
    for i in _rows(trajectories):
        inside = trajectories.weight[i] != 0
        s = math.exp(float((policy.log_prob[i] - trajectories.old_log_prob[i])[inside].mean()))
        gain = _group_advantage(trajectories, i)
        losses.append(-min(s * gain, min(max(s, 1 - 3e-4), 1 + 4e-4) * gain))
    expected = sum(losses) / len(losses)
    assert _total(named_objective("gspo"), trajectories, policy) == pytest.approx(expected, rel=1e-10)


def test_ppo_is_policy_value_entropy_and_ptx() -> None:
    trajectories, policy = step(4)
    objective = named_objective("ppo_ptx", entropy=0.01, value=0.7)
    prepared = objective.prepare(trajectories)
    loss = objective.loss(prepared, policy)
    assert list(loss.terms) == ["policy", "entropy", "value", "ptx"]
    assert float(loss.total) == pytest.approx(sum(float(v) for v in loss.terms.values()), rel=1e-12)
    inside = (prepared.weight != 0).nonzero().tolist()
    assert policy.entropy is not None and policy.value is not None and prepared.returns is not None
    assert trajectories.value is not None and policy.ptx_log_prob is not None
    entropy = sum(float(policy.entropy[i, t]) for i, t in inside) / len(inside)
    assert float(loss.terms["entropy"]) == pytest.approx(-0.01 * entropy, rel=1e-10)
    squares = []
    for i, t in inside:
        new, old, target = (float(v[i, t]) for v in (policy.value, trajectories.value, prepared.returns))
        clipped = min(max(new, old - 0.2), old + 0.2)
        squares.append(max((new - target) ** 2, (clipped - target) ** 2) / 2)
    assert float(loss.terms["value"]) == pytest.approx(0.7 * sum(squares) / len(squares), rel=1e-10)
    assert float(loss.terms["ptx"]) == pytest.approx(-27.8 * float(policy.ptx_log_prob.mean()), rel=1e-10)


def test_a_sample_without_a_reward_is_as_good_as_absent() -> None:
    trajectories, policy = step(5)
    keep = torch.tensor([i for i in range(8) if i != 4])
    fewer = Trajectories(
        weight=trajectories.weight[keep],
        old_log_prob=trajectories.old_log_prob[keep],
        group=[LABELS[i] for i in keep],
        reward=trajectories.reward[keep],  # type: ignore[index]
        ref_log_prob=trajectories.ref_log_prob[keep],  # type: ignore[index]
    )
    cut = PolicyOutput(log_prob=policy.log_prob[keep])
    failed = replace(
        trajectories,
        reward=trajectories.reward.nan_to_num(1e6),  # type: ignore[union-attr]
        valid=torch.tensor([i != 4 for i in range(8)]),
    )
    for name in ("grpo", "dapo", "rloo", "reinforce_pp_baseline"):
        objective = named_objective(name)
        expected = _total(objective, fewer, cut)
        assert _total(objective, trajectories, policy) == pytest.approx(expected, rel=1e-10), name
        assert _total(objective, failed, policy) == pytest.approx(expected, rel=1e-10), name


def test_a_sample_that_is_not_valid_has_no_say_in_the_others_of_its_group() -> None:
    """Its entropy moves neither minimum, maximum nor mean (AEM)."""
    t, _ = step(13)
    valid = torch.ones(len(t.weight), dtype=torch.bool)
    valid[2] = False
    advantages = []
    for factor in (1.0, 20.0):
        assert t.entropy is not None
        entropy = t.entropy.clone()
        entropy[2] *= factor
        objective = Objective(advantage="aem", surrogate_options=CLIP)
        advantages.append(objective.prepare(replace(t, entropy=entropy, valid=valid)).advantage[[3, 5]])
    assert torch.equal(*advantages) and advantages[0].abs().sum() > 0


def test_corrections_and_masks_act_on_single_decisions() -> None:
    trajectories, policy = step(6)
    plain = named_objective("grpo", kl=0.0)
    own = plain.loss(plain.prepare(trajectories), policy).decisions["policy"]
    corrected = replace(plain, importance_sampling={"level": "token", "mode": "truncate", "high": 1.05})
    got = corrected.loss(corrected.prepare(trajectories), policy).decisions["policy"]
    assert trajectories.rollout_log_prob is not None
    omega = (trajectories.old_log_prob - trajectories.rollout_log_prob).exp().clamp(max=1.05)
    inside = corrected.prepare(trajectories).weight != 0
    torch.testing.assert_close(got[inside], (own * omega)[inside])
    masked = replace(plain, off_policy_delta=0.0)
    prepared = masked.prepare(trajectories)
    losses = masked.loss(prepared, policy).decisions["policy"]
    gap = trajectories.old_log_prob - policy.log_prob
    for i in _rows(trajectories):
        bad = prepared.advantage[i].sum() < 0 and gap[i][trajectories.weight[i] != 0].mean() > 0
        expected = torch.zeros_like(own[i]) if bad else own[i]
        torch.testing.assert_close(losses[i][inside[i]], expected[inside[i]])


def test_kl_cov_penalises_what_it_selects() -> None:
    trajectories, policy = step(7)
    before = (named_objective("grpo").prepare(trajectories).weight != 0).sum()
    penalised = named_objective("kl_cov", selection_options={"ratio": 0.1})
    rows = penalised.prepare(trajectories)
    assert rows.penalty is not None and int(rows.penalty.sum()) == int(0.1 * before)
    free = replace(penalised, selection=None, selection_options={})
    more = (
        penalised.loss(rows, policy).decisions["policy"]
        - free.loss(free.prepare(trajectories), policy).decisions["policy"]
    )
    moved = (policy.log_prob - trajectories.old_log_prob).abs()
    torch.testing.assert_close(more, rows.penalty * moved)


def test_top_entropy_counts_all_tokens_as_the_paper_does_or_those_it_keeps() -> None:
    """1/Σ|o_i| Σ 1[H ≥ H_ρ] ℓ, and 1/#kept of the same sum; a KL term is over all tokens, or the kept."""
    trajectories, policy = step(7)
    row = named_objective("top_entropy", selection_options={"fraction": 0.5}, drop_zero_signal=False, kl=0.1)
    paper = row.loss(row.prepare(trajectories), policy)
    plain = replace(row, selection=None, selection_options={})
    base = plain.prepare(trajectories)
    plain_loss = plain.loss(base, policy)
    assert trajectories.entropy is not None
    present = base.weight != 0
    keep = present & (trajectories.entropy >= trajectories.entropy[present].median())
    assert 0.4 < float(keep.sum() / present.sum()) < 0.6
    total = plain_loss.decisions["policy"][keep].sum()
    torch.testing.assert_close(paper.terms["policy"], total / present.sum())
    torch.testing.assert_close(paper.terms["kl"], plain_loss.terms["kl"])
    kept_row = replace(row, selection_options={"fraction": 0.5, "denominator": "kept"})
    loss = kept_row.loss(kept_row.prepare(trajectories), policy)
    torch.testing.assert_close(loss.terms["policy"], total / keep.sum())
    torch.testing.assert_close(loss.terms["kl"], plain_loss.decisions["kl"][keep].mean())
    with pytest.raises(ValueError, match="denominator must be one of all, kept; got 'some'"):
        replace(row, selection_options={"denominator": "some"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": "grpo"}, r"no advantage 'grpo'.*Choose one of: group, gdpo"),
        ({"surrogate": "ppo_klip"}, r"no surrogate 'ppo_klip'\. Did you mean 'ppo_clip'"),
        ({"surrogate_options": {"eps_hi": 1}}, r"'ppo_clip' has no option 'eps_hi'\. Did you mean 'eps_high'"),
        ({"surrogate_options": {**CLIP, "dual_clip": 3.0, "delta": 4.0}}, "dual_clip and delta both bound r"),
        ({"kl": -0.1}, r"kl must be a number in \[0, inf\); got -0\.1"),
        ({"kl": {}}, r"kl must be a number in \[0, inf\); got {}"),
        ({"surrogate_options": 3}, "surrogate_options must be a mapping; got 3"),
    ],
)
def test_unknown_choices_name_the_nearest(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**{"surrogate_options": CLIP, **changes})


@pytest.mark.parametrize(
    ("changes", "lacking", "message"),
    [
        ({"advantage": "gae"}, "value", r"advantage='gae' needs Trajectories\.value"),
        ({"kl_in_reward": 0.1}, "ref_log_prob", r"kl_in_reward=0\.1 needs Trajectories\.ref_log_prob"),
        ({"value": 1.0}, "value", r"value=1\.0 needs returns to fit.*advantage='group'"),
    ],
)
def test_what_a_step_must_hold(changes: dict, lacking: str, message: str) -> None:
    trajectories, _ = step()
    with pytest.raises(ValueError, match=message):
        Objective(surrogate_options=CLIP, **changes).prepare(replace(trajectories, **{lacking: None}))


def test_what_a_policy_must_say() -> None:
    trajectories, policy = step()
    for name, lacking, message in (
        ("flowrl", "log_z", r"surrogate='flow_balance' needs PolicyOutput\.log_z"),
        ("ppo", "value", r"value=1 needs PolicyOutput\.value"),
    ):
        objective = named_objective(name)
        with pytest.raises(ValueError, match=message):
            objective.loss(objective.prepare(trajectories), replace(policy, **{lacking: None}))
    objective = named_objective("grpo")
    with pytest.raises(ValueError, match=r"kl=0.04 .* needs Trajectories\.ref_log_prob"):
        objective.loss(objective.prepare(replace(trajectories, ref_log_prob=None)), policy)
    with pytest.raises(ValueError, match=r"log_prob \(8, 6\) and the prepared rows \(3, 6\)"):
        objective.loss(objective.prepare(trajectories).rows(slice(0, 3)), policy)


def test_numbers_that_are_none_are_named_with_their_row() -> None:
    trajectories, policy = step()
    trajectories.weight[2, 3] = 1.0
    broken = policy.log_prob.clone()
    broken[2, 3] = float("nan")
    objective = named_objective("grpo")
    with pytest.raises(ValueError, match=r"log_prob is not finite at 1 present decisions of 1 rows.*row 2"):
        objective.loss(objective.prepare(trajectories), replace(policy, log_prob=broken))
    with pytest.raises(ValueError, match="old_log_prob is not finite at 1 present"):
        objective.prepare(replace(trajectories, old_log_prob=broken))


def test_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"old_log_prob \[B, T\]; got \(8, 6\) and \(8, 5\)"):
        replace(step()[0], old_log_prob=torch.zeros(8, 5))


@pytest.mark.parametrize("beta", [0.0, 1e-9])
def test_a_masked_completion_keeps_its_reward_in_its_group(beta: float) -> None:
    """Overlong filtering takes a completion's tokens out of the loss; others are still compared with it."""
    weight = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    trajectories = Trajectories(
        weight=weight,
        old_log_prob=torch.zeros(4, 2),
        ref_log_prob=torch.zeros(4, 2),
        group=[0, 0, 0, 0],
        reward=torch.tensor([1.0, 1.0, 0.0, 0.0]),
    )
    advantages = named_objective("rloo", kl_in_reward=beta).prepare(trajectories).advantage[:, 0]
    assert advantages[[0, 2, 3]].tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3])
