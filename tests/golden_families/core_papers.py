# SPDX-License-Identifier: Apache-2.0
"""Golden families of recent papers: shaped rewards, step rewards, advantages."""

from __future__ import annotations

from typing import Any

import torch

from tests.golden_families import Outputs, Row, family
from visalign.core.advantages.copo import between_group_advantages, consistency_entropy, copo_advantages, copo_weight
from visalign.core.advantages.entropy import aem_advantages, aem_scale, empg_advantages, empg_scale
from visalign.core.advantages.group import group_advantages
from visalign.core.advantages.returns import discounted_returns
from visalign.core.advantages.risk import (
    conditional_value_at_risk,
    mixed_value_at_risk,
    range_value_at_risk,
    track_quantile,
)
from visalign.core.advantages.rules import conditional_advantages, prl_advantages, replay_advantages, replay_weight
from visalign.core.rewards.likelihood import jepo_credit
from visalign.core.rewards.steps import (
    clip_step_rewards,
    delta_step_rewards,
    implicit_prm_loss,
    implicit_step_rewards,
    turning_point_rewards,
)
from visalign.core.rewards.terms import preference_as_reward
from visalign.core.surrogates.value import soft_minimum
from visalign.core.tokens.entropy import covariance_statistics, token_covariance
from visalign.core.tokens.entropy_terms import tea_weights


def _par(case: Any) -> Outputs:
    reward = case.tensor("rewards").requires_grad_()
    shaped = preference_as_reward(reward, case.tensor("reference_rewards"), k=case.params["k"])
    (slope,) = torch.autograd.grad(shaped.sum(), reward)
    return {"shaped": shaped, "derivative": slope}


def _par_zscore(case: Any) -> Outputs:
    x = case.tensor("x")
    one = [0] * len(x)
    shaped = preference_as_reward(x, torch.full_like(x, case.params["ref"])[:, None])
    rewards = {"z_raw": x, "z_affine": 3 * x + 5, "z_shaped": shaped}
    ddof = case.params["ddof"]
    return {"shaped": shaped} | {
        key: group_advantages(value, one, ddof=ddof, eps=0.0) for key, value in rewards.items()
    }


def _copo_weight(case: Any) -> Outputs:
    rows = case.inputs["cluster_probs"]
    group = [i for i, row in enumerate(rows) for _ in row]
    first = [group.index(i) for i in range(len(rows))]
    mass = torch.tensor([p for row in rows for p in row], dtype=torch.float64)
    entropy = consistency_entropy(list(range(len(group))), group, mass)[first]
    weight = copo_weight(entropy, gamma=case.params["gamma"], rho=case.params["rho"])
    return {"entropy": entropy, "weight": weight}


def _copo_answers(case: Any) -> Outputs:
    """Entropy and weight of each group; "outputs_by_reward" clusters equal rewards instead."""

    def weigh(rows: Any) -> Outputs:
        group = [i for i, row in enumerate(rows) for _ in row]
        entropy = consistency_entropy([label for row in rows for label in row], group, torch.ones(len(group)).double())
        entropy = entropy[[group.index(i) for i in range(len(rows))]]
        return {"entropy": entropy, "weight": copo_weight(entropy, **case.params)}

    return {**weigh(case.inputs["answers"]), "outputs_by_reward": weigh(case.inputs["rewards"])}


def _copo_blend(case: Any) -> Outputs:
    reward = case.tensor("rewards")
    group = torch.arange(len(reward)).repeat_interleave(reward.shape[1])
    weight = case.tensor("weight").repeat_interleave(reward.shape[1])
    flat, eps = reward.flatten(), case.params["eps"]
    return {
        "local": group_advantages(flat, group, eps=eps).view_as(reward),
        "global_": between_group_advantages(flat, group, eps=eps).view_as(reward)[:, 0],
        "blended": copo_advantages(flat, group, weight, eps=eps).view_as(reward),
    }


def _canon(case: Any) -> Outputs | None:
    side = case.params["alpha_side"]
    if side not in ("high", "low"):
        return None
    reward, metric = case.tensor("rewards"), case.tensor("metric")
    group = case.inputs.get("group", [0] * len(reward))
    mu, alpha = case.params["mu"], case.params["alpha"]
    return {"advantages": conditional_advantages(reward, metric, group, mu=mu, alpha=alpha, side=side)}


def _clip_delta(case: Any) -> Outputs:
    steps = case.tensor("step_rewards")
    rows = steps.reshape(-1, steps.shape[-1])
    mask = case.tensor("mask").view_as(rows) if "mask" in case.inputs else None
    delta, clip = delta_step_rewards(rows, mask), clip_step_rewards(rows, mask, eta=case.params["eta"])
    both = delta_step_rewards(clip, mask)
    result = {
        "delta": delta,
        "delta_returns": discounted_returns(delta, mask),
        "clip": clip,
        "clip_delta": both,
        "clip_delta_returns": discounted_returns(both, mask),
    }
    return {key: value.view_as(steps) for key, value in result.items()}


def _implicit(case: Any) -> Outputs:
    log_ratio, mask, beta = (case.tensor("log_ratio").requires_grad_(), case.tensor("mask"), case.params["beta"])
    loss = implicit_prm_loss(log_ratio, case.tensor("label"), mask, beta=beta).mean()
    (gradient,) = torch.autograd.grad(loss, log_ratio)
    rewards = implicit_step_rewards(log_ratio, mask, beta=beta)
    return {
        "loss": loss,
        "grad_log_ratio": gradient,
        "step_reward": rewards.step,
        "prefix_value": rewards.prefix,
        "q": rewards.total,
    }


def _prl(case: Any) -> Outputs:
    advantage, log_ratio, mask = case.tensor("advantage"), case.tensor("log_ratio"), case.tensor("mask")
    eta, block = case.params["eta"], case.params["block"]
    return {"advantages": prl_advantages(advantage, log_ratio, mask, eta=eta, block=block)}


def _riskpo(case: Any) -> Outputs:
    score, down, up = case.tensor("scores"), case.inputs["q_down"], case.inputs["q_up"]
    low, high = case.params["level_down"], case.params["level_up"]
    levels: Any = {"level_down": low, "level_up": high}
    mixed: Any = levels | {"tail_weight": case.params["w"]}
    rate = case.params["track_rate"]
    return {
        "rvar": range_value_at_risk(score, down, up, **levels),
        "cvar": conditional_value_at_risk(score, down, level_down=low),
        "mixed": mixed_value_at_risk(score, down, up, **mixed),
        "rvar_plain": range_value_at_risk(score, down, up, natural_baseline=False, **levels),
        "mixed_plain": mixed_value_at_risk(score, down, up, natural_baseline=False, **mixed),
        "q_down_next": track_quantile(down, score, level=low, rate=rate),
        "q_up_next": track_quantile(up, score, level=high, rate=rate),
    }


def _empg(case: Any) -> Outputs:
    entropy, advantage = case.tensor("segment_entropy"), case.tensor("advantages")
    mask = case.tensor("mask") if "mask" in case.inputs else None
    k, zeta = case.params["k"], case.params["zeta"]
    options: Any = {"k": k, "k_bonus": case.params["k_bonus"], "zeta": zeta}
    return {
        "g": empg_scale(entropy, mask, k=k),
        "modulated": empg_advantages(advantage, entropy, mask, centre=False, **options),
        "centred": empg_advantages(advantage, entropy, mask, **options),
    }


def _aem(case: Any) -> Outputs:
    entropy, group = case.tensor("response_entropy"), case.inputs["group"]
    options: Any = {"lam": case.params["lam"], "min_range": case.params["min_range"]}
    return {
        "alpha": aem_scale(entropy, group, **options),
        "advantages": aem_advantages(case.tensor("advantages"), entropy, group, **options),
    }


def _tp_grpo(case: Any) -> Outputs:
    levels, final = case.tensor("reward_sequence"), case.tensor("r_sde")
    steps = turning_point_rewards(final[None], levels[:1], levels[None, 1:], eta=case.params["eta"], balanced=False)
    return {"d": steps.increment[0], "s": steps.sign[0], "turn": steps.turn[0], "step_rewards": steps.step_reward[0]}


def _turning_points(case: Any) -> Outputs:
    options: Any = {name: case.params[name] for name in ("eta", "replace", "balanced")}
    steps = turning_point_rewards(case.tensor("r_sde"), case.tensor("r_ode"), case.tensor("r_mid"), **options)
    return {"step_rewards": steps.step_reward, "d": steps.increment, "s": steps.sign, "bonus": steps.bonus}


def _spear(case: Any) -> Outputs:
    reward, history = case.tensor("rewards"), case.tensor("history")
    advantage, keep = replay_advantages(reward, history)
    zero = torch.zeros_like(reward[:1])
    return {
        "baseline": -replay_advantages(zero, history)[0][0],
        "advantages": advantage,
        "keep": keep,
        "weight": replay_weight(case.tensor("steps"), warmup=case.params["T"], ceiling=case.params["c0"]),
    }


def _tea(case: Any) -> Outputs:
    log_prob, advantage = case.tensor("log_prob"), case.tensor("advantages")
    mask = case.tensor("mask") if "mask" in case.inputs else torch.ones_like(log_prob)
    statistics = covariance_statistics(log_prob, advantage, mask)
    covariance = token_covariance(log_prob, advantage, mask, statistics)
    weight = tea_weights(covariance, mask, tau=case.params["tau"])
    return {"covariance": covariance, "weight": weight, "weighted_entropy": (weight * case.tensor("entropy")).sum()}


def _likelihood(case: Any) -> Outputs:
    value = case.tensor("sum_log_prob")
    one = [0] * len(value)
    bound, credit = jepo_credit(value, one)
    rloo = group_advantages(value, one, scale="none", baseline="leave_one_out")
    return {"log_mean_exp": bound[0], "loo_credit": credit, "rloo": rloo}


def _soft_minimum(case: Any) -> Outputs:
    return {"V": soft_minimum(case.tensor("values"), temperature=case.params["a"])}


PAPERS: tuple[Row, ...] = (
    (r"par(_worked)?", _par, ("k",), ("rewards", "reference_rewards")),
    (r"par_zscore", _par_zscore, ("ref", "ddof"), ("x",)),
    (r"copo_weight(_worked)?", _copo_weight, ("gamma", "rho"), ("cluster_probs",)),
    (r"copo_blend", _copo_blend, ("eps",), ("rewards", "weight")),
    (r"canon_.*", _canon, ("mu", "alpha", "alpha_side"), ("rewards", "metric")),
    (r"clip_delta(_worked)?", _clip_delta, ("eta",), ("step_rewards",)),
    (r"implicit_prm(_worked)?", _implicit, ("beta",), ("log_ratio", "label", "mask")),
    (r"prl_.*", _prl, ("eta", "block"), ("log_ratio", "advantage", "mask")),
    (r"riskpo(_worked)?", _riskpo, ("level_down", "level_up", "w", "track_rate"), ("scores", "q_down", "q_up")),
    (r"empg(_worked)?", _empg, ("k", "k_bonus", "zeta"), ("segment_entropy", "advantages")),
    (r"aem(_worked)?", _aem, ("lam", "min_range"), ("response_entropy", "group", "advantages")),
    (r"tp_grpo(_worked_\w)?", _tp_grpo, ("eta",), ("reward_sequence", "r_sde")),
    (r"spear", _spear, ("T", "c0"), ("history", "rewards", "steps")),
    (r"tea_covariance(_worked)?", _tea, ("tau",), ("log_prob", "advantages", "entropy")),
    (r"likelihood_rewards", _likelihood, (), ("sum_log_prob",)),
    (r"soft_min_critic", _soft_minimum, ("a",), ("values",)),
)
STEPS: tuple[Row, ...] = (
    (r"turning_point_\w+", _turning_points, ("eta", "balanced", "replace"), ("r_ode", "r_mid", "r_sde")),
)
ANSWERS: tuple[Row, ...] = ((r"copo_answers", _copo_answers, ("gamma", "rho"), ("answers", "rewards")),)


FAMILIES = {
    "H_paper_rules": family(PAPERS, exact=True),
    "E_windows_steps": family(STEPS, exact=True),
    "N_reward_rules": family(ANSWERS, exact=True),
}
