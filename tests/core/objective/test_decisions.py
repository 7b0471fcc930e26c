# SPDX-License-Identifier: Apache-2.0
"""Which row runs on tokens and which on denoising steps, and what a refusal names."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.support.core import objectives, step, step_for
from visalign.core.objective.algorithms import NAMED, named_objective
from visalign.core.objective.data import PolicyOutput
from visalign.core.objective.decisions import TOKEN_SUBSTITUTES, check_decisions
from visalign.core.objective.explain import explain

NOT_ON_STEPS = {
    "ppo": "value function.*'grpo'",
    "safe": "value function.*'grpo'",
    "ppo_kl": "value function.*'grpo'",
    "ppo_ptx": "value function.*'grpo'",
    "remax": r"advantage='remax'.*greedy.*'rloo'",
    "optimal_token_baseline": r"advantage='optimal_token_baseline'.*probability of each token.*'gpg'",
    "opo": r"advantage='opo'.*length.*'dr_grpo'",
    "dppo_tv": r"divergence='tv'.*'flow_dppo'",
    "dppo_kl": r"divergence='kl'.*'flow_dppo'",
    "cppo": r"surrogate='cppo'.*probability of a token.*'flow_dppo'",
    "drpo": r"surrogate='drpo'.*probability of a token.*'spo'",
    **{
        name: rf"selection='{name}'.*denoising steps of fixed variance.*'dapo'"
        for name in ("top_entropy", "clip_cov", "kl_cov", "clip_b", "clip_v", "steer")
    },
    "entrocraft": r"selection='entrocraft'.*variety.*'dapo'",
    **{name: rf"advantage='{name}'.*'canon'" for name in ("aem", "empg", "perplexity", "pear", "ares")},
    "aepo": "advantage='entropy_aware'.*'canon'",
    **{name: r"entropy=0.*denoising steps of fixed variance.*'dapo'" for name in ("siren", "epo", "tea")},
    "par": r"advantage='par'.*reference.*'pref_grpo'",
    **dict.fromkeys(("likelihood", "jepo"), r"reference answer in words.*'grpo'"),
    "rank_bonus": r"hidden states of each token.*'grpo'",
    **dict.fromkeys(("rlfr", "grpo_process", "prime"), r"reward of each step.*objective\.credit"),
    "canon": r"advantage='canon'.*objective\.metric=PART.*'grpo'",
    "riskpo": r"advantage='riskpo'.*bundles.*'copo'",
    "flowrl": r"surrogate='flow_balance'.*log Z.*'grpo'",
}


@pytest.mark.parametrize("name", NAMED)
def test_every_row_runs_on_denoising_steps_or_is_refused_with_its_substitute(name: str) -> None:
    if name in NOT_ON_STEPS:
        with pytest.raises(ValueError, match=rf"The algorithm '{name}' with .*{NOT_ON_STEPS[name]}") as refusal:
            check_decisions(NAMED[name], "denoising_steps", name=name)
        for substitute in re.findall(r"'(\w+)'", str(refusal.value).rpartition("Take")[2]):
            check_decisions(NAMED[substitute], "denoising_steps", name=substitute, available=("metric",))
        return
    check_decisions(NAMED[name], "denoising_steps", name=name)
    trajectories, policy = step_for(name)
    policy = PolicyOutput(
        log_prob=policy.log_prob, kl=torch.full_like(policy.log_prob, 0.5), divergence=policy.divergence
    )
    trajectories = replace(trajectories, decisions="denoising_steps", value=None, entropy=None, uniform=None)
    objective = objectives()[name]
    loss = objective.loss(objective.prepare(trajectories), policy)
    assert torch.isfinite(loss.total)
    if objective.kl and objective.aggregation != "dr_grpo":
        assert float(loss.terms["kl"]) == pytest.approx(0.5 * objective.kl)  # exact, also where kl_weighted


@pytest.mark.parametrize("name", NAMED)
def test_every_row_runs_on_tokens_or_is_refused_with_its_substitute(name: str) -> None:
    if name not in TOKEN_SUBSTITUTES:
        check_decisions(NAMED[name], "tokens", name=name)
        return
    substitute = TOKEN_SUBSTITUTES[name][:8]
    with pytest.raises(ValueError, match=rf"The algorithm '{name}' .*tokens.*Take {substitute}"):
        check_decisions(NAMED[name], "tokens", name=name)
    assert TOKEN_SUBSTITUTES[name].split("'")[1] in NAMED


def test_a_head_that_the_caller_supplies_is_not_missed() -> None:
    check_decisions(NAMED["flowrl"], "denoising_steps", available=("log_z",))
    with pytest.raises(ValueError, match="denoising steps of fixed variance"):
        check_decisions(named_objective("grpo", entropy=0.1), "denoising_steps", available=("log_z",))
    with pytest.raises(ValueError, match=r"decisions must be one of tokens, denoising_steps; got 'steps'"):
        check_decisions(NAMED["grpo"], "steps")  # type: ignore[arg-type]


def test_prepare_looks_at_what_its_trajectories_count() -> None:
    trajectories, _ = step_for("flow_grpo")
    with pytest.raises(ValueError, match=r"decisions='denoising_steps' has no meaning on tokens"):
        named_objective("flow_grpo").prepare(replace(trajectories, decisions="tokens"))
    with pytest.raises(ValueError, match=r"divergence='kl'.*Take 'flow_dppo'"):
        named_objective("dppo_kl").prepare(trajectories)


def test_the_guard_needs_its_zeros_its_weights_and_an_exact_kl() -> None:
    trajectories, policy = step_for("grpo_guard")
    objective = named_objective("grpo_guard")
    with pytest.raises(ValueError, match=r"step_weight='inverse_dt' needs Trajectories\.loss_weight"):
        objective.prepare(replace(trajectories, loss_weight=None))
    with pytest.raises(ValueError, match=r"ratio='guard' takes guard_log_ratio.*old_log_prob is 0"):
        objective.prepare(replace(trajectories, old_log_prob=torch.ones(8, 6)))
    with_kl = replace(objective, kl=0.1)
    with pytest.raises(ValueError, match=r"kl=0.1 .* ratio='guard' needs PolicyOutput\.kl"):
        with_kl.loss(with_kl.prepare(trajectories), policy)
    by_velocity = named_objective("flow_grpo", kl=0.1, kl_form="velocity")
    with pytest.raises(ValueError, match=r"kl_form='velocity'.* needs PolicyOutput\.kl"):
        by_velocity.loss(by_velocity.prepare(step_for("flow_grpo")[0]), policy)
    with pytest.raises(ValueError, match=r"'grpo' with kl_form='velocity'.*tokens.*'divergence'"):
        check_decisions(named_objective("grpo", kl_form="velocity"), "tokens", name="grpo")
    with pytest.raises(ValueError, match=r"kl_in_reward, .* need log-probs.*Take ratio='log_prob'"):
        replace(objective, kl_in_reward=0.1)


def test_loss_weights_multiply_the_policys_loss_and_no_denominator() -> None:
    trajectories, policy = step(3)
    weight = torch.rand(8, 6, dtype=torch.float64)
    weight[trajectories.weight == 0] = float("nan")
    objective = named_objective("grpo", kl=0.1)
    leaf = policy.log_prob.clone().requires_grad_()
    policy = replace(policy, log_prob=leaf)
    plain = objective.loss(objective.prepare(trajectories), policy)
    loss = objective.loss(objective.prepare(replace(trajectories, loss_weight=weight)), policy)
    inside = objective.prepare(trajectories).weight != 0
    torch.testing.assert_close(loss.decisions["policy"][inside], (weight * plain.decisions["policy"])[inside])
    torch.testing.assert_close(loss.terms["kl"], plain.terms["kl"])
    rows = objective.prepare(trajectories).row_tokens
    expected = (loss.decisions["policy"].where(inside, 0.0).sum(1)[rows > 0] / rows[rows > 0]).mean()
    torch.testing.assert_close(loss.terms["policy"], expected)
    (gradient,) = torch.autograd.grad(loss.total, leaf)
    assert bool(torch.isfinite(gradient).all()) and bool((gradient[~inside] == 0).all())
    window = torch.zeros(8, 6, dtype=torch.float64)
    window[:, :2] = 1
    explanation = explain(objective, replace(trajectories, loss_weight=window), policy)
    assert explanation.counts["left out"] == int(inside[:, 2:].sum()) and explanation.counts["clipped"] < 10
    with pytest.raises(ValueError, match="loss_weight is not finite"):
        objective.prepare(replace(trajectories, loss_weight=torch.full((8, 6), float("nan"))))
