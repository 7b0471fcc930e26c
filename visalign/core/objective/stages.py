# SPDX-License-Identifier: Apache-2.0
"""The names that an `Objective` may pick at each stage, and the functions behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from visalign.core.advantages import baselines, returns, rules
from visalign.core.advantages.combine import gdpo_advantages, normalise_then_sum, weighted_sum
from visalign.core.advantages.copo import consistency_entropy, copo_advantages, copo_weight
from visalign.core.advantages.entropy import (
    aem_advantages,
    empg_advantages,
    entropy_aware_advantages,
    perplexity_advantages,
    position_advantages,
    step_entropy,
)
from visalign.core.advantages.group import Scale, group_advantages, whiten
from visalign.core.groups.group_statistics import group_mean
from visalign.core.groups.labels import group_index
from visalign.core.rewards.entropy import (
    difficulty_entropy_reward,
    difficulty_of,
    phase_entropy_reward,
    window_entropy,
)
from visalign.core.rewards.terms import kl_in_reward, place_terminal
from visalign.core.surrogates import balance, forms, off_policy, weighted
from visalign.core.surrogates.ppo import ppo_clip
from visalign.core.tokens import selection, selection_rules, steer
from visalign.core.tokens.entropy import entrocraft_direction, entrocraft_keep
from visalign.core.tokens.statistics import masked_quantile, weighted_mean

from .data import PolicyOutput, Prepared, Trajectories
from .options import Stage
from .reward_stage import jepo, likelihood, par, rank_bonus, riskpo


@dataclass(frozen=True, kw_only=True)
class SurrogateInputs:
    """What a surrogate may use; [b, T] each."""

    log_ratio: Tensor
    """At the level of the objective."""
    policy: PolicyOutput
    rows: Prepared


def sample_reward(t: Trajectories, beta: float) -> Tensor:
    """[B] reward of each sample: the weighted sum, plus process rewards, minus β Σ_t k1."""
    if beta == 0 and t.process_reward is None:
        return _scalar(t)
    scalar = _scalar(t)  # a completion whose every decision is masked keeps its reward
    return scalar + (decision_reward(t, beta) - place_terminal(scalar, t.weight)).sum(1)


def decision_reward(t: Trajectories, beta: float) -> Tensor:
    """[B, T]: the reward at the last decision, plus process rewards, minus β k1."""
    result = place_terminal(_scalar(t), t.weight)
    if t.process_reward is not None:
        result = result + torch.where(t.weight != 0, t.process_reward.detach().to(result.dtype), 0.0)
    if beta:
        assert t.ref_log_prob is not None
        result = kl_in_reward(result, t.old_log_prob, t.ref_log_prob, beta=beta, weight=t.weight)
    return result


def _scalar(t: Trajectories) -> Tensor:
    if t.reward is None:
        raise ValueError("this advantage needs Trajectories.reward, [B] or [B, M]; got None.")
    return _known(t, weighted_sum(t.reward, t.reward_weights) if t.reward.ndim == 2 else t.reward)


def _matrix(t: Trajectories) -> Tensor:
    if t.reward is None or t.reward.ndim != 2:
        given = "None" if t.reward is None else f"shape {tuple(t.reward.shape)}"
        raise ValueError(f"this advantage needs Trajectories.reward [B, M] of several rewards; got {given}.")
    return _known(t, t.reward)


def _known(t: Trajectories, reward: Tensor) -> Tensor:
    """NaN, which takes no part in anything, where a sample is not valid."""
    if t.valid is None:
        return reward
    valid = t.valid.to(reward.device).bool()
    return torch.where(valid if reward.ndim == 1 else valid[:, None], reward, torch.nan)


Advantages = tuple[Tensor, Tensor | None]
"""Advantages [B] or [B, T], and returns [B, T] where a value function is fitted."""


def _of_reward(function: Callable[..., Tensor]) -> Callable[..., Advantages]:
    def apply(t: Trajectories, beta: float, **options: Any) -> Advantages:
        return function(sample_reward(t, beta), t.group, valid=t.valid, **options), None

    return apply


def _shaped(function: Callable[..., Tensor]) -> Callable[..., Advantages]:
    def apply(t: Trajectories, beta: float, **options: Any) -> Advantages:
        reward = sample_reward(t, 0.0)
        return function(t, reward, reward - sample_reward(t, beta) if beta else 0.0, **options), None

    return apply


def _gain(t: Trajectories, beta: float, scale: Scale) -> Tensor:
    return group_advantages(sample_reward(t, beta), t.group, scale=scale, valid=t.valid)


def _opo(t: Trajectories, beta: float, **options: Any) -> Advantages:
    length = (t.weight != 0).sum(1)
    return baselines.opo_advantages(sample_reward(t, beta), length, t.group, valid=t.valid, **options), None


def _gdpo(t: Trajectories, _beta: float, **options: Any) -> Advantages:
    return gdpo_advantages(_matrix(t), t.reward_weights, t.group, **options), None


def _normalise_then_sum(t: Trajectories, _beta: float, **options: Any) -> Advantages:
    return normalise_then_sum(_matrix(t), t.reward_weights, t.group, **options), None


def _gae(
    t: Trajectories,
    beta: float,
    *,
    whitened: bool = True,
    ddof: int = 0,
    temperature: float = 0.3,
    **options: Any,
) -> Advantages:
    """By `temperature` a trainer makes one V of several critics (`soft_minimum`)."""
    assert t.value is not None
    advantage, target = returns.gae(decision_reward(t, beta), t.value, t.weight, **options)
    return whiten(advantage, t.weight != 0, ddof=ddof) if whitened else advantage, target


def _remax(t: Trajectories, beta: float) -> Advantages:
    assert t.greedy_reward is not None
    return returns.remax_advantages(decision_reward(t, beta), t.greedy_reward, t.weight), None


def _reinforce_pp(t: Trajectories, beta: float, **options: Any) -> Advantages:
    return returns.reinforce_pp_advantages(decision_reward(t, beta), t.weight, **options), None


def _reinforce_pp_baseline(t: Trajectories, beta: float, **options: Any) -> Advantages:
    made = returns.reinforce_pp_baseline_advantages
    return made(sample_reward(t, beta), t.group, t.weight, valid=t.valid, **options), None


def _canon(t: Trajectories, beta: float, **options: Any) -> Advantages:
    assert t.metric is not None
    return rules.conditional_advantages(sample_reward(t, beta), t.metric, t.group, **options), None


def _copo(
    t: Trajectories,
    beta: float,
    *,
    gamma: float = 20.0,
    rho: float = 0.2,
    eps: float = 1e-6,
    ddof: int = 1,
    between_ddof: int = 0,
) -> Advantages:
    """Samples of one reward share an answer, and there are fewer of them than in the paper: ρ is 0.2 nats,
    which one of 16 samples that differs passes, and not 1.5."""
    reward = sample_reward(t, beta)
    known = torch.isfinite(reward)
    entropy = consistency_entropy(torch.unique(reward, return_inverse=True)[1], t.group, known.double())
    weight = copo_weight(entropy.nan_to_num(), gamma=gamma, rho=rho)
    return copo_advantages(reward, t.group, weight, eps=eps, ddof=ddof, between_ddof=between_ddof), None


def _steps(t: Trajectories, _beta: float, **options: Any) -> Advantages:
    assert t.process_reward is not None
    return group_advantages(t.process_reward, t.group, valid=t.valid, **options), None


def _prl(t: Trajectories, beta: float, *, scale: Scale = "group", **options: Any) -> Advantages:
    assert t.ref_log_prob is not None
    away = t.old_log_prob - t.ref_log_prob
    return rules.prl_advantages(_gain(t, beta, scale), away, t.weight, **options), None


def _online_dpo(t: Trajectories, kl_in_reward: float, **options: Any) -> Advantages:
    assert t.ref_log_prob is not None
    present = t.weight != 0
    away = torch.where(present, t.old_log_prob - t.ref_log_prob, 0.0).sum(1)
    away[~present.any(1)] = torch.nan  # masked, it cannot be learnt from in a pair
    return rules.online_dpo_advantages(sample_reward(t, kl_in_reward), away, t.group, **options), None


def _aem(t: Trajectories, beta: float, *, scale: Scale = "group", **options: Any) -> Advantages:
    assert t.entropy is not None
    present = (t.weight != 0) & t.present()[:, None]
    mean = torch.where(present, t.entropy, 0.0).sum(1) / present.sum(1)  # NaN, missing, without a token
    return aem_advantages(_gain(t, beta, scale), mean, t.group, **options), None


def _entropy_aware(t: Trajectories, beta: float, *, scale: Scale = "group", **options: Any) -> Advantages:
    assert t.entropy is not None
    weight = t.weight * t.present()[:, None]
    return entropy_aware_advantages(_gain(t, beta, scale), t.entropy, weight, **options), None


def _empg(t: Trajectories, beta: float, *, scale: Scale = "group", **options: Any) -> Advantages:
    """The steps of a completion stand for the turns of the paper's agents."""
    assert t.entropy is not None and t.step is not None
    gain = torch.where(t.present(), _gain(t, beta, scale), torch.nan)
    made = empg_advantages(gain, *step_entropy(t.entropy, t.step, t.weight), **options)
    return torch.where(t.weight != 0, made.gather(1, t.step.clamp(min=0)), 0.0), None


def _perplexity(t: Trajectories, beta: float, *, scale: Scale = "group", **options: Any) -> Advantages:
    gain = torch.where(t.present(), _gain(t, beta, scale), torch.nan)
    return perplexity_advantages(gain, t.old_log_prob, t.weight, t.group, **options), None


def _position(t: Trajectories, beta: float, *, scale: Scale = "group", **options: Any) -> Advantages:
    return position_advantages(_gain(t, beta, scale), t.weight, **options), None


def _pear(t: Trajectories, beta: float, *, scale: Scale = "group", **options: Any) -> Advantages:
    """The first step is the thinking, what follows it the answer."""
    assert t.entropy is not None and t.step is not None
    shaped = phase_entropy_reward(sample_reward(t, beta), t.entropy, t.step > 0, t.weight, **options)
    return group_advantages(shaped, t.group, scale=scale, valid=t.valid), None


def ares_threshold(t: Trajectories, *, window: int = 4, quantile: float = 0.95) -> Tensor:
    """The quantile of all entropies of windows of a rollout; 0-dim float64, NaN without a window."""
    assert t.entropy is not None
    found, there = window_entropy(t.entropy, t.weight * t.present()[:, None], window=window)
    return masked_quantile(found, there.double(), quantile)


def _ares(
    t: Trajectories,
    beta: float,
    *,
    window: int = 4,
    quantile: float = 0.95,
    right_at: float = 1.0,
    scale: Scale = "group",
) -> Advantages:
    """Threshold: the earlier rollouts' (at first its own); target: the mean of the same difficulty."""
    assert t.entropy is not None
    reward, present = sample_reward(t, beta), t.present()
    before = t.entropy_before
    threshold = ares_threshold(t, window=window, quantile=quantile) if before is None else before
    found, there = window_entropy(t.entropy, t.weight, window=window)
    count = (there & (found > threshold)).sum(1).double()
    index, groups = group_index(t.group, len(reward), reward.device)
    right = present & (reward >= right_at)
    difficulty = difficulty_of(group_mean(right.double(), present, index, groups)[index])
    target = group_mean(count, present, difficulty, 3)[difficulty]
    shaped = reward + difficulty_entropy_reward(count, target, right, difficulty).to(reward.dtype)
    return group_advantages(shaped, t.group, scale=scale, valid=t.valid), None


def _group_returns(t: Trajectories, beta: float, **options: Any) -> Advantages:
    """A_t = A_i + Σ_{s≥t} r_s: the group's, and the rewards of single decisions that are to come."""
    assert t.process_reward is not None
    outcome = sample_reward(replace(t, process_reward=None), beta)
    made = group_advantages(outcome, t.group, valid=t.valid, **options)[:, None]
    return made + returns.discounted_returns(t.process_reward, t.weight), None


def _given(t: Trajectories, _beta: float) -> Advantages:
    assert t.advantage is not None
    return t.advantage, None


def _plain(function: Callable[..., Tensor]) -> Stage:
    return Stage(function, _of_reward(function))


ADVANTAGES = {
    "group": _plain(group_advantages),
    "gdpo": Stage(gdpo_advantages, _gdpo),
    "normalise_then_sum": Stage(normalise_then_sum, _normalise_then_sum),
    "opo": Stage(baselines.opo_advantages, _opo),
    "gpg": _plain(baselines.gpg_advantages),
    "pass_at_k": _plain(baselines.pass_at_k_advantages),
    "best_of_group": _plain(baselines.best_of_group_advantages),
    "gae": Stage(returns.gae, _gae, ("value",)),
    "remax": Stage(returns.remax_advantages, _remax, ("greedy_reward",)),
    "reinforce_pp": Stage(returns.reinforce_pp_advantages, _reinforce_pp),
    "reinforce_pp_baseline": Stage(returns.reinforce_pp_baseline_advantages, _reinforce_pp_baseline),
    "canon": Stage(rules.conditional_advantages, _canon, ("metric",)),
    "copo": Stage(copo_advantages, _copo),
    "steps": Stage(group_advantages, _steps, ("process_reward",)),
    "prl": Stage(rules.prl_advantages, _prl, ("ref_log_prob",)),
    "online_dpo": Stage(rules.online_dpo_advantages, _online_dpo, ("ref_log_prob",)),
    "aem": Stage(aem_advantages, _aem, ("entropy",)),
    "entropy_aware": Stage(entropy_aware_advantages, _entropy_aware, ("entropy",)),
    "empg": Stage(empg_advantages, _empg, ("entropy", "step")),
    "perplexity": Stage(perplexity_advantages, _perplexity),
    "position": Stage(position_advantages, _position),
    "pear": Stage(phase_entropy_reward, _pear, ("entropy", "step")),
    "ares": Stage(difficulty_entropy_reward, _ares, ("entropy",)),
    "par": Stage(par, _shaped(par), ("reference_reward",)),
    "likelihood": Stage(likelihood, _shaped(likelihood), ("likelihood",)),
    "jepo": Stage(jepo, _shaped(jepo), ("likelihood",)),
    "riskpo": Stage(riskpo, _shaped(riskpo), ("bundle",)),
    "rank_bonus": Stage(rank_bonus, _shaped(rank_bonus), ("rank",)),
    "group_returns": Stage(group_advantages, _group_returns, ("process_reward",)),
    "given": Stage(_given, _given, ("advantage",)),
}
"""Name -> how rewards become advantages."""


def _of_ratio(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda i, **options: function(i.log_ratio, i.rows.advantage, **options)


def _of_log_prob(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(i: SurrogateInputs, **options: Any) -> Tensor:
        return function(i.policy.log_prob, i.log_ratio, i.rows.advantage, weight=i.rows.weight, **options)

    return apply


def _ppo_kl(i: SurrogateInputs, **options: Any) -> Tensor:
    return forms.ppo_kl(i.log_ratio, i.rows.advantage, kl=i.policy.divergence, **options)


def _gmpo(i: SurrogateInputs, **options: Any) -> Tensor:
    return forms.gmpo(i.log_ratio, i.rows.advantage, i.rows.weight, **options)


def _policy_gradient(i: SurrogateInputs) -> Tensor:
    return weighted.reinforce(i.policy.log_prob, i.rows.advantage, weight=i.rows.weight)


def _weighted_policy_gradient(i: SurrogateInputs) -> Tensor:
    given = i.policy.log_prob, i.rows.advantage, i.log_ratio
    return weighted.reinforce(*given, weight=i.rows.weight)


def _dppo(i: SurrogateInputs, *, divergence: str = "tv", **options: Any) -> Tensor:
    measures = {"tv": weighted.binary_tv, "kl": weighted.binary_kl}
    if divergence == "exact":
        if i.policy.divergence is None:
            raise ValueError("divergence='exact' needs PolicyOutput.divergence, [b, T]; got None.")
        measured = i.policy.divergence
    elif divergence in measures:
        measured = measures[divergence](i.policy.log_prob, i.rows.old_log_prob)
    else:
        raise ValueError(f"divergence must be one of tv, kl, exact; got {divergence!r}.")
    return weighted.dppo(i.log_ratio, i.rows.advantage, measured, weight=i.rows.weight, **options)


def _flow_balance(i: SurrogateInputs, *, weighted: bool = True, **options: Any) -> Tensor:
    assert i.policy.log_z is not None and i.rows.ref_log_prob is not None
    present = i.rows.weight != 0
    # R̂_i: the mean advantage of the row
    reward = torch.where(present, i.rows.advantage, 0.0).sum(1) / present.sum(1).clamp(min=1)
    return balance.flow_balance(
        i.policy.log_prob,
        i.rows.ref_log_prob,
        i.policy.log_z,
        reward,
        i.rows.weight,
        log_ratio=i.log_ratio if weighted else None,
        **options,
    )


SURROGATES = {
    "ppo_clip": Stage(ppo_clip, _of_ratio(ppo_clip)),
    "ppo_kl": Stage(forms.ppo_kl, _ppo_kl),
    "gradient_keeping_clip": Stage(forms.gradient_keeping_clip, _of_ratio(forms.gradient_keeping_clip)),
    "sapo": Stage(forms.sapo, _of_ratio(forms.sapo)),
    "gmpo": Stage(forms.gmpo, _gmpo),
    "reinforce": Stage(weighted.reinforce, _policy_gradient),
    "weighted_reinforce": Stage(weighted.reinforce, _weighted_policy_gradient),
    "cispo": Stage(weighted.cispo, _of_log_prob(weighted.cispo)),
    "vespo": Stage(weighted.vespo, _of_log_prob(weighted.vespo)),
    "dppo": Stage(weighted.dppo, _dppo),
    "dro": Stage(balance.dro, _of_log_prob(balance.dro)),
    "flow_balance": Stage(balance.flow_balance, _flow_balance, ("log_z", "ref_log_prob")),
}
"""Name -> loss per decision."""


@dataclass(frozen=True, kw_only=True)
class Selected:
    """What a selection changes; None: nothing."""

    weight: Tensor | None = None
    keep: Tensor | None = None
    penalised: Tensor | None = None
    loss_weight: Tensor | None = None


def _top_entropy(
    t: Trajectories, _advantage: Tensor, weight: Tensor, *, denominator: str = "all", **options: Any
) -> Selected:
    """The paper's mean counts all tokens: 1/Σ|o_i| Σ 1[H ≥ H_ρ] ℓ; "kept" counts those that are left."""
    assert t.entropy is not None
    if denominator not in ("all", "kept"):
        raise ValueError(f"denominator of top_entropy must be 'all' or 'kept'; got {denominator!r}.")
    found = selection.top_entropy_thresholds(t.entropy, weight, **options)
    keep = selection.top_entropy_keep(t.entropy, weight, found)
    return Selected(keep=keep) if denominator == "all" else Selected(weight=weight * keep)


def _clip_cov(t: Trajectories, advantage: Tensor, weight: Tensor, **options: Any) -> Selected:
    assert t.uniform is not None
    given = (t.old_log_prob, advantage, weight, t.uniform)
    found = selection.clip_cov_thresholds(*given, **options)
    return Selected(keep=selection.clip_cov_keep(*given, found))


def _kl_cov(t: Trajectories, advantage: Tensor, weight: Tensor, **options: Any) -> Selected:
    given = (t.old_log_prob, advantage, weight)
    found = selection.kl_cov_thresholds(*given, **options)
    return Selected(penalised=selection.kl_cov_select(*given, found))


def _clip_b(t: Trajectories, advantage: Tensor, weight: Tensor, **options: Any) -> Selected:
    assert t.entropy is not None
    score = selection_rules.entropy_discriminator(t.old_log_prob, t.entropy)
    found = selection_rules.clip_b_thresholds(score, weight, **options)
    return Selected(weight=weight * selection_rules.clip_b_keep(score, advantage, weight, found))


def _clip_v(t: Trajectories, advantage: Tensor, weight: Tensor, **options: Any) -> Selected:
    assert t.entropy is not None and t.expected_score is not None
    score = selection_rules.entropy_discriminator(t.old_log_prob, t.entropy)
    given = (score, t.expected_score, advantage, weight)
    found = selection_rules.clip_v_thresholds(*given, **options)
    return Selected(weight=weight * selection_rules.clip_v_keep(*given, found))


def _entrocraft(
    t: Trajectories,
    advantage: Tensor,
    weight: Tensor,
    *,
    low: float = 0.5,
    high: float = 0.7,
    low_end: float | None = None,
    high_end: float | None = None,
    over: int = 1,
) -> Selected:
    """The band of the mean token entropy goes from (low, high) to (low_end, high_end), where they are given,
    in so many iterations."""
    assert t.entropy is not None
    ends = low if low_end is None else low_end, high if high_end is None else high_end
    if not (low <= high and ends[0] <= ends[1] and over >= 1):
        raise ValueError(
            "entrocraft needs low ≤ high at both ends, in nats, and over ≥ 1 iterations; got low="
            f"{low}, high={high}, low_end={ends[0]}, high_end={ends[1]}, over={over}."
        )
    share = min(1.0, t.iteration / over)
    band = [start + share * (end - start) for start, end in zip((low, high), ends, strict=True)]
    monitor = weighted_mean(t.entropy.detach().double(), (weight != 0).double())
    return Selected(weight=weight * entrocraft_keep(advantage, entrocraft_direction(monitor, *band)))


def _steer(
    t: Trajectories, advantage: Tensor, weight: Tensor, *, decay: steer.Decay = "linear", **options: Any
) -> Selected:
    """Ω of the first update, where π is π_old."""
    assert t.entropy is not None
    change = steer.steer_change(t.old_log_prob, t.old_log_prob, t.entropy, advantage, weight)
    found = steer.steer_thresholds(change, weight, **options)
    return Selected(loss_weight=steer.steer_weights(change, weight, found, decay=decay))


SELECTIONS = {
    "top_entropy": Stage(selection.top_entropy_thresholds, _top_entropy, ("entropy",)),
    "clip_cov": Stage(selection.clip_cov_thresholds, _clip_cov, ("uniform",)),
    "kl_cov": Stage(selection.kl_cov_thresholds, _kl_cov),
    "clip_b": Stage(selection_rules.clip_b_thresholds, _clip_b, ("entropy",)),
    "clip_v": Stage(selection_rules.clip_v_thresholds, _clip_v, ("entropy", "expected_score")),
    "entrocraft": Stage(entrocraft_keep, _entrocraft, ("entropy",)),
    "steer": Stage(steer.steer_thresholds, _steer, ("entropy",)),
}
"""Name -> which decisions are left out of the mean, lose their loss or a part of it, or bear a penalty."""

IMPORTANCE_SAMPLING = {
    "importance_weights": Stage(off_policy.importance_weights, off_policy.importance_weights)
}
"""The off-policy correction; `Objective.importance_sampling` holds its options."""

PENALTIES = {"kl_cov": Stage(selection.kl_cov_penalty, selection.kl_cov_penalty)}
"""Name -> the penalty of what a selection picks."""
