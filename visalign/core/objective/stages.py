# SPDX-License-Identifier: Apache-2.0
"""Names that an `Objective` may pick at each stage, and the functions behind them.

A new choice is one function, whose parameters are named like fields of the step, and one entry of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core.advantages import baselines, returns, rules
from visalign.core.advantages.combine import gdpo_advantages, normalise_then_sum, weighted_sum
from visalign.core.advantages.copo import consistency_entropy, copo_advantages
from visalign.core.advantages.copo import copo_weight as copo_weight_of
from visalign.core.advantages.entropy import (
    aem_advantages,
    empg_advantages,
    entropy_aware_advantages,
    perplexity_advantages,
    position_advantages,
    step_entropy,
)
from visalign.core.advantages.group import group_advantages, whiten
from visalign.core.advantages.process import prime_advantages, process_advantages
from visalign.core.groups.labels import Labels
from visalign.core.rewards.entropy import phase_entropy_reward
from visalign.core.rewards.terms import kl_in_reward, place_terminal
from visalign.core.surrogates import balance, forms, off_policy, weighted
from visalign.core.surrogates.ppo import ppo_clip
from visalign.core.surrogates.ratios import log_ratio
from visalign.core.tokens import selection, selection_rules, steer
from visalign.core.tokens.entropy import entrocraft_direction, entrocraft_keep
from visalign.core.tokens.statistics import weighted_mean

from .data import Trajectories
from .options import Stage
from .reward_stage import ares_reward, jepo, likelihood, par, rank_bonus, riskpo


def sample_reward(t: Trajectories, beta: float) -> Tensor:
    """Compute the reward of each sample, [B]: the weighted sum, plus process rewards, minus β Σ_t k1."""
    single = _single_reward(t)
    if beta == 0 and t.process_reward is None:
        return single
    # added to the reward: a completion whose every decision is masked keeps its own
    return single + (decision_reward(t, beta) - place_terminal(single, t.weight)).sum(1)


def decision_reward(t: Trajectories, beta: float) -> Tensor:
    """Compute rewards [B, T]: the sample's reward at the last decision, plus process rewards, minus β k1."""
    result = place_terminal(_single_reward(t), t.weight)
    if t.process_reward is not None:
        result = result + torch.where(t.weight != 0, t.process_reward.detach().to(result.dtype), 0.0)
    if beta:
        assert t.ref_log_prob is not None
        result = kl_in_reward(result, t.old_log_prob, t.ref_log_prob, beta=beta, weight=t.weight)
    return result


def _single_reward(t: Trajectories) -> Tensor:
    if t.reward is None:
        raise ValueError("this advantage needs Trajectories.reward, [B] or [B, M]; got None.")
    return _drop_invalid(t, weighted_sum(t.reward, t.reward_weights) if t.reward.ndim == 2 else t.reward)


def _several_rewards(t: Trajectories, _: float) -> Tensor:
    if t.reward is None or t.reward.ndim != 2:
        shape = "None" if t.reward is None else f"shape {tuple(t.reward.shape)}"
        raise ValueError(f"this advantage needs Trajectories.reward [B, M] of several rewards; got {shape}.")
    return _drop_invalid(t, t.reward)


def _drop_invalid(t: Trajectories, reward: Tensor) -> Tensor:
    if t.valid is None:
        return reward
    valid = t.valid.to(reward.device).bool()
    return torch.where(valid if reward.ndim == 1 else valid[:, None], reward, torch.nan)


class AdvantageInputs:
    """Fields that an advantage function may take: those of `DERIVED`, and the trajectories' own."""

    def __init__(self, t: Trajectories, kl_in_reward: float, importance_weight: Tensor | None) -> None:
        self.t, self.beta, self.importance_weight = t, kl_in_reward, importance_weight

    def __getattr__(self, name: str) -> Any:
        return DERIVED[name](self.t, self.beta) if name in DERIVED else getattr(self.t, name)


DERIVED: dict[str, Callable[[Trajectories, float], Any]] = {
    "reward": sample_reward,
    "decision_reward": decision_reward,
    "raw_reward": lambda t, beta: sample_reward(t, 0.0),  # [B] without the KL cost
    "kl_cost": lambda t, beta: sample_reward(t, 0.0) - sample_reward(t, beta) if beta else 0.0,  # [B] β Σ_t k1
    "outcome_reward": lambda t, beta: sample_reward(replace(t, process_reward=None), beta),  # [B]
    "rewards": _several_rewards,  # [B, M]; NaN where a sample is not valid
    "length": lambda t, beta: (t.weight != 0).sum(1),  # [B] present decisions
    "present": lambda t, beta: t.present(),  # bool [B]
    "present_weight": lambda t, beta: t.weight * t.present()[:, None],  # [B, T]
}
"""Name -> function of the trajectories and β of the KL cost in the reward."""


def present_advantage(advantage: Tensor, present: Tensor) -> Tensor:
    """Replace the advantage of samples that take no part by NaN."""
    return torch.where(present, advantage, torch.nan)


def sample_log_ratio(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """Sum log π_old/π_ref over the present decisions, [B]; NaN without one: no pair learns from it."""
    total = torch.where(weight != 0, log_ratio, 0.0).sum(1)
    return torch.where((weight != 0).any(1), total, torch.nan)


def sample_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Average [B, T] over the present decisions, [B]; NaN without one."""
    present = weight != 0
    return torch.where(present, values, 0.0).sum(1) / present.sum(1)


def copo_weight(
    reward: Tensor,
    group: Labels,
    answer: Tensor | None = None,
    *,
    consistency: Literal["answers", "rewards"] = "answers",
    gamma: float = 20.0,
    rho: float | None = None,
) -> Tensor:
    """Weigh groups by the entropy of their answers, or of their rewards where no reward names answers.

    `rho` None is 1.5 nats for answers, as published. Of rewards there are fewer than answers: 0.2, which one
    differing sample of 16 exceeds.
    """
    clusters = answer
    if clusters is None or consistency == "rewards":
        clusters, rho = torch.unique(reward, return_inverse=True)[1], 0.2 if rho is None else rho
    entropy = consistency_entropy(clusters, group, torch.isfinite(reward).double())
    return copo_weight_of(entropy.nan_to_num(), gamma=gamma, rho=1.5 if rho is None else rho)


def whitened_gae(
    decision_reward: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whitened: bool = True,
    ddof: int = 0,
    temperature: float = 0.3,
) -> tuple[Tensor, Tensor]:
    """Compute advantages by generalised advantage estimation, whitened over the rollout, and returns; see `gae`.

    GAE, arXiv 1506.02438. A trainer that reduces several critics to one V reads `temperature` (`soft_minimum`).
    """
    advantage, target = returns.gae(decision_reward, value, weight, gamma=gamma, lam=lam)
    return whiten(advantage, weight != 0, ddof=ddof) if whitened else advantage, target


def empg(
    advantage: Tensor,
    entropy: Tensor,
    step: Tensor,
    weight: Tensor,
    *,
    k: float = 1.0,
    k_bonus: float = 1.0,
    zeta: float = 0.1,
    centre: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Compute `empg_advantages`; the steps of a completion stand for the turns of the paper's agents."""
    of_steps = step_entropy(entropy, step, weight)
    gain = empg_advantages(advantage, *of_steps, k=k, k_bonus=k_bonus, zeta=zeta, centre=centre, eps=eps)
    return torch.where(weight != 0, gain.gather(1, step.clamp(min=0)), 0.0)


def group_returns(advantage: Tensor, process_reward: Tensor, weight: Tensor) -> Tensor:
    """A_t = A_i + Σ_{s≥t} r_s: the group's advantage plus the process rewards that are still to come."""
    return advantage[:, None] + returns.discounted_returns(process_reward, weight)


def process(
    process_reward: Tensor,
    step: Tensor,
    weight: Tensor,
    group: Labels,
    present: Tensor,
    *,
    ddof: int = 1,
    eps: float = 1e-4,
) -> Tensor:
    """Compute `process_advantages` from rewards [B, T] of decisions; the reward of the whole sample plays no part."""
    inside, steps = (step >= 0) & (weight != 0), max(1, int(step.max()) + 1)
    total = process_reward.new_zeros(len(step), steps + 1)
    total = total.scatter_add(1, torch.where(inside, step, steps), torch.where(inside, process_reward, 0.0))
    reward = torch.where(present[:, None], total[:, :steps], torch.nan)
    return process_advantages(reward, step, group, weight=weight, ddof=ddof, eps=eps)


def given(advantage: Tensor) -> Tensor:
    """Take Trajectories.advantage as it is."""
    return advantage


_GROUP_SCALE: dict[str, Any] = {"baseline": None, "ddof": None, "eps": None}
"""The group's advantage that a rule starts from has `scale` as its only option."""
_GROUP = Stage(group_advantages, **_GROUP_SCALE)
_PRESENT = Stage(present_advantage, advantage=_GROUP)
_MEAN_ENTROPY = Stage(sample_mean, values="entropy", weight="present_weight")
_REFERENCE = Stage(log_ratio, log_prob="old_log_prob", old_log_prob="ref_log_prob")
_MATRIX: dict[str, Any] = {"weights": "reward_weights"}

ADVANTAGES = {
    "group": Stage(group_advantages),
    "gdpo": Stage(gdpo_advantages, **_MATRIX),
    "normalise_then_sum": Stage(normalise_then_sum, **_MATRIX),
    "opo": Stage(baselines.opo_advantages),
    "gpg": Stage(baselines.gpg_advantages),
    "pass_at_k": Stage(baselines.pass_at_k_advantages),
    "best_of_group": Stage(baselines.best_of_group_advantages),
    "decoupled": Stage(baselines.decoupled_advantages),
    "gae": Stage(whitened_gae),
    "remax": Stage(returns.remax_advantages, reward="decision_reward", baseline="greedy_reward"),
    "reinforce_pp": Stage(returns.reinforce_pp_advantages, reward="decision_reward"),
    "reinforce_pp_baseline": Stage(returns.reinforce_pp_baseline_advantages),
    "optimal_token_baseline": Stage(returns.optimal_token_baseline, reward="decision_reward", log_prob="old_log_prob"),
    "canon": Stage(rules.conditional_advantages),
    "copo": Stage(copo_advantages, weight=Stage(copo_weight)),
    "steps": Stage(group_advantages, reward="process_reward"),
    "prl": Stage(rules.prl_advantages, advantage=_GROUP, log_ratio=_REFERENCE),
    "online_dpo": Stage(rules.online_dpo_advantages, log_ratio=Stage(sample_log_ratio, log_ratio=_REFERENCE)),
    "aem": Stage(aem_advantages, advantage=_GROUP, entropy=_MEAN_ENTROPY),
    "entropy_aware": Stage(entropy_aware_advantages, advantage=_GROUP, weight="present_weight"),
    "empg": Stage(empg, advantage=_PRESENT),
    "perplexity": Stage(perplexity_advantages, advantage=_PRESENT, log_prob="old_log_prob"),
    "position": Stage(position_advantages, advantage=_GROUP),
    "pear": Stage(group_advantages, reward=Stage(phase_entropy_reward), **_GROUP_SCALE),
    "ares": Stage(group_advantages, reward=Stage(ares_reward), **_GROUP_SCALE),
    "par": Stage(par),
    "likelihood": Stage(likelihood),
    "jepo": Stage(jepo),
    "riskpo": Stage(riskpo, bundle_index="bundle"),
    "rank_bonus": Stage(rank_bonus),
    "group_returns": Stage(group_returns, advantage=Stage(group_advantages, reward="outcome_reward")),
    "process": Stage(process),
    "prime": Stage(prime_advantages, reward="outcome_reward"),
    "given": Stage(given),
}
"""Name -> function from rewards to advantages [B] or [B, T], or to (advantages, returns [B, T])."""


def decision_divergence(
    log_prob: Tensor, old_log_prob: Tensor, exact: Tensor | None, *, divergence: Literal["tv", "kl", "exact"] = "tv"
) -> Tensor:
    """Measure D(π_old, π) of each decision, [b, T]: `binary_tv`, `binary_kl` or PolicyOutput.divergence."""
    if divergence != "exact":
        return {"tv": weighted.binary_tv, "kl": weighted.binary_kl}[divergence](log_prob, old_log_prob)
    if exact is None:
        raise ValueError("divergence='exact' needs PolicyOutput.divergence, [b, T]; got None.")
    return exact


def importance_log_ratio(log_ratio: Tensor, *, weighted: bool = True) -> Tensor | None:
    """Return the log-ratio whose importance weight `flow_balance` clips, or None for no weight."""
    return log_ratio if weighted else None


def prefix_divergence(
    log_prob: Tensor,
    old_log_prob: Tensor,
    weight: Tensor,
    *,
    limit: float = 0.15,
    smallest: float = 0.8,
    budget: float = 0.02,
) -> Tensor:
    """Measure `prefix_excess` of the binary total variation, [b, T]."""
    distance = weighted.binary_tv(log_prob, old_log_prob)
    return weighted.prefix_excess(distance, weight, limit=limit, smallest=smallest, budget=budget)


SURROGATES = {
    "ppo_clip": Stage(ppo_clip),
    "ppo_kl": Stage(forms.ppo_kl, kl="divergence"),
    "gradient_keeping_clip": Stage(forms.gradient_keeping_clip),
    "sapo": Stage(forms.sapo),
    "gmpo": Stage(forms.gmpo),
    "reinforce": Stage(weighted.reinforce, log_ratio=None),
    "weighted_reinforce": Stage(weighted.reinforce),
    "cispo": Stage(weighted.cispo),
    "vespo": Stage(weighted.vespo),
    # without log π, dppo's gradient goes through the log-ratio of the objective's level
    "dppo": Stage(weighted.dppo, log_prob=None, divergence=Stage(decision_divergence, exact="divergence")),
    "cppo": Stage(weighted.dppo, log_prob=None, divergence=Stage(prefix_divergence)),
    "drpo": Stage(forms.drpo),
    "spo": Stage(forms.drpo, old_log_prob=None),
    "dro": Stage(balance.dro),
    "flow_balance": Stage(
        balance.flow_balance,
        reward=Stage(sample_mean, values="advantage"),  # FlowRL's
        log_ratio=Stage(importance_log_ratio),
    ),
}
"""Name -> loss per decision. Fields: `Prepared`, `PolicyOutput`, and `log_ratio` at the objective's level."""


@dataclass(frozen=True, kw_only=True)
class Selected:
    """Changes that a selection makes, [B, T]; None is no change."""

    weight: Tensor | None = None
    keep: Tensor | None = None
    penalty: Tensor | None = None
    loss_weight: Tensor | None = None


def top_entropy(
    entropy: Tensor, weight: Tensor, thresholds: Any, *, denominator: Literal["all", "kept"] = "all"
) -> Selected:
    """Keep the tokens of the highest entropy: 1/Σ|o_i| Σ 1[H ≥ H_ρ] ℓ; "kept" counts those alone."""
    keep = selection.top_entropy_keep(entropy, weight, thresholds)
    return Selected(keep=keep) if denominator == "all" else Selected(weight=weight * keep)


def clip_cov(old_log_prob: Tensor, advantage: Tensor, weight: Tensor, uniform: Tensor, thresholds: Any) -> Selected:
    """Drop the loss of a random share of the decisions of high covariance."""
    return Selected(keep=selection.clip_cov_keep(old_log_prob, advantage, weight, uniform, thresholds))


def kl_cov(
    old_log_prob: Tensor, advantage: Tensor, weight: Tensor, thresholds: Any, *, coefficient: float = 1.0
) -> Selected:
    """Penalise the decisions of the highest covariance by `kl_cov_penalty`."""
    selected = selection.kl_cov_select(old_log_prob, advantage, weight, thresholds)
    return Selected(penalty=coefficient * selected.to(advantage.dtype))


def clip_b(score: Tensor, advantage: Tensor, weight: Tensor, thresholds: Any) -> Selected:
    """Leave out decisions whose entropy discriminator is outside its band."""
    return Selected(weight=weight * selection_rules.clip_b_keep(score, advantage, weight, thresholds))


def clip_v(score: Tensor, expected_score: Tensor, advantage: Tensor, weight: Tensor, thresholds: Any) -> Selected:
    """Leave out decisions whose centred entropy discriminator is outside its band."""
    keep = selection_rules.clip_v_keep(score, expected_score, advantage, weight, thresholds)
    return Selected(weight=weight * keep)


def entrocraft(
    advantage: Tensor,
    weight: Tensor,
    entropy: Tensor,
    iteration: int,
    *,
    low: float = 0.5,
    high: float = 0.7,
    low_end: float | None = None,
    high_end: float | None = None,
    over: int = 1,
) -> Selected:
    """Leave out samples that would move the mean token entropy away from its band, which goes from (low,
    high) to (low_end, high_end), where they are given, in `over` iterations.
    """
    share = min(1.0, iteration / over)
    band = [
        start + share * ((start if end is None else end) - start) for start, end in ((low, low_end), (high, high_end))
    ]
    monitor = weighted_mean(entropy.detach().double(), (weight != 0).double())
    return Selected(weight=weight * entrocraft_keep(advantage, entrocraft_direction(monitor, *band)))


def steer_loss(change: Tensor, weight: Tensor, thresholds: Any, *, decay: steer.Decay = "linear") -> Selected:
    """Weigh the loss by the entropy change Ω of the first update, where π is π_old."""
    return Selected(loss_weight=steer.steer_weights(change, weight, thresholds, decay=decay))


_AT_START: dict[str, Any] = {"log_prob": "old_log_prob"}
_SCORE = Stage(selection_rules.entropy_discriminator, **_AT_START)
_CHANGE = Stage(steer.steer_change, **_AT_START)

SELECTIONS = {
    "top_entropy": Stage(top_entropy, thresholds=Stage(selection.top_entropy_thresholds)),
    "clip_cov": Stage(clip_cov, thresholds=Stage(selection.clip_cov_thresholds, noise="uniform", **_AT_START)),
    "kl_cov": Stage(kl_cov, thresholds=Stage(selection.kl_cov_thresholds, **_AT_START)),
    "clip_b": Stage(clip_b, score=_SCORE, thresholds=Stage(selection_rules.clip_b_thresholds, score=_SCORE)),
    "clip_v": Stage(
        clip_v,
        score=_SCORE,
        thresholds=Stage(selection_rules.clip_v_thresholds, score=_SCORE, expected="expected_score"),
    ),
    "entrocraft": Stage(entrocraft),
    "steer": Stage(steer_loss, change=_CHANGE, thresholds=Stage(steer.steer_thresholds, change=_CHANGE)),
}
"""Name -> `Selected`. Fields: `Trajectories`, with the step's final `advantage` and `weight`, [B, T] each."""

IMPORTANCE_WEIGHTS = Stage(off_policy.importance_weights)
"""Off-policy correction; `Objective.importance_sampling` holds its options."""
