# SPDX-License-Identifier: Apache-2.0
"""Golden families of the rest of the advantages, of combined and pairwise rewards, and of reward terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.golden_families import Outputs, Row, family
from visalign.core.advantages.baselines import (
    best_of_group_advantages,
    gpg_advantages,
    opo_advantages,
    pass_at_k_advantages,
)
from visalign.core.advantages.combine import gdpo_advantages, normalise_then_sum, weighted_mean, weighted_sum
from visalign.core.advantages.group import group_advantages, whiten
from visalign.core.advantages.returns import discounted_returns, gae, reinforce_pp_advantages, remax_advantages
from visalign.core.preference.pairwise import win_rates
from visalign.core.rewards.terms import adaptive_kl_coefficient, kl_in_reward, soft_overlong

NAN = float("nan")


def _mask(case: Any) -> torch.Tensor | None:
    return case.tensor("mask") if "mask" in case.inputs else None


def _opo(case: Any) -> Outputs:
    rewards, lengths = case.tensor("rewards"), case.tensor("lengths")
    return {"advantages": opo_advantages(rewards, lengths, case.inputs["group"])}


def _pass_at_k(case: Any) -> Outputs | None:
    options: Outputs = {"scale": "none"}
    if case.params["normalize"]:
        if not {"eps", "ddof"} <= set(case.params):
            return None
        options = {"scale": "group", "eps": case.params["eps"], "ddof": case.params["ddof"]}
    rewards = case.tensor("rewards")
    return {"advantages": pass_at_k_advantages(rewards, case.inputs["group"], **options)}


def _gpg(case: Any) -> Outputs:
    options: Any = {"f_norm": case.params["f_norm"], "counted": "nonzero_reward"}
    return {"advantages": gpg_advantages(case.tensor("rewards"), case.inputs["group"], **options)}


def _remax(case: Any) -> Outputs:
    """At holes, where nothing is trained, the record keeps the return without its baseline; ours is 0."""
    reward, mask = case.tensor("token_rewards"), case.tensor("mask") != 0
    advantages = remax_advantages(reward, case.tensor("baseline"), mask)
    at_holes = discounted_returns(torch.where(mask, reward, 0.0))
    return {"advantages": torch.where(mask, advantages, at_holes)}


def _reinforce_pp(case: Any) -> Outputs:
    reward, gamma = case.tensor("token_rewards"), case.params["gamma"]
    return {
        "advantages": reinforce_pp_advantages(reward, _mask(case), gamma=gamma),
        "returns": discounted_returns(reward, _mask(case), gamma=gamma),
    }


def _gae(case: Any) -> Outputs:
    mask = _mask(case)
    options = {"gamma": case.params["gamma"], "lam": case.params["lam"]}
    raw, returns = gae(case.tensor("token_rewards"), case.tensor("values"), mask, **options)
    whitened = whiten(raw, None if mask is None else mask != 0)
    return {"advantages_raw": raw, "returns": returns, "advantages_whitened": whitened}


def _tracker(case: Any) -> Outputs | None:
    rewards, group, kind = case.tensor("rewards"), case.inputs["group"], case.params["type"]
    if kind == "rwr":
        return {"advantages": weighted_sum(rewards[:, None], [1.0])}
    worst = {"sft": 0.0, "dpo": -1.0}.get(kind)
    if worst is None:
        return None
    return {"advantages": best_of_group_advantages(rewards, group, worst=worst)}


def _kl_in_reward(case: Any) -> Outputs | None:
    if case.params["kl"] != "k1":
        return None
    score, old, ref = (case.tensor(name) for name in ("token_scores", "old_log_prob", "ref_log_prob"))
    return {"token_rewards": kl_in_reward(score, old, ref, beta=case.params["beta"], weight=_mask(case))}


def _adaptive_kl(case: Any) -> Outputs:
    beta: Any = case.params["init"]
    path = []
    for kl, samples in zip(case.inputs["kl"], case.inputs["n_steps"], strict=True):
        limits = {"target": case.params["target"], "horizon": case.params["horizon"]}
        beta = adaptive_kl_coefficient(beta, kl, samples=samples, **limits)
        path.append(beta)
    return {"beta": torch.stack(path)}


def _preferences(values: list[Any]) -> torch.Tensor | None:
    """1 first better, 2 second better, 0 tie, None failed -> probability that the first is better."""
    meaning = {1: 1.0, 2: 0.0, 0: 0.5, None: NAN}
    if not all(value in meaning for value in values):
        return None
    return torch.tensor([meaning[value] for value in values], dtype=torch.float64)


def _win_rate(case: Any) -> Outputs | None:
    preference = _preferences(case.inputs["preference"])
    if preference is None:
        return None
    pairs, size = torch.tensor(case.inputs["pairs"]), case.params["n"]
    return {
        "win_rate_failures_excluded": win_rates(pairs, preference, size),
        "win_rate": win_rates(pairs, preference.nan_to_num(0.5), size),
    }


def _flex(case: Any) -> Outputs | None:
    """Overall and per category; with failed answers the record does not say what it expects."""
    columns = [case.inputs["winner"], *zip(*case.inputs["category_winners"], strict=True)]
    preferences = [_preferences(list(column)) for column in columns]
    complete = [p for p in preferences if p is not None and not p.isnan().any()]
    if len(complete) < len(preferences):
        return None
    size = 1 + max(max(pair) for pair in case.inputs["pairs"])
    rates = win_rates(torch.tensor(case.inputs["pairs"]), torch.stack(complete, 1), size)
    weights = case.params
    categories = weighted_mean(rates[:, 1:], weights["category_weights"])
    blended = weighted_mean(
        torch.stack([rates[:, 0], categories], 1), [weights["overall_weight"], weights["dim_weight"]]
    )
    return {"overall": rates[:, 0], "dim_mean": categories, "reward": blended}


def _weighted_advantages(case: Any) -> Outputs:
    names = list(case.inputs["rewards"])
    rewards = torch.tensor([case.inputs["rewards"][name] for name in names], dtype=torch.float64).T
    weights = [case.params["weights"][name] for name in names]
    numbers = torch.arange(rewards.shape[0])
    group = numbers // case.params["group_size"] if case.params["use_group"] else torch.zeros_like(numbers)
    spread = {"ddof": case.params["ddof"], "eps": case.params["eps"]}
    combine = gdpo_advantages if case.params["gdpo"] else normalise_then_sum
    combined = combine(rewards, weights, group, missing="skip", **spread)
    separate = group_advantages(rewards, group, **spread)
    return {
        "advantages": combined,
        "per_reward": {name: separate[:, k] for k, name in enumerate(names)},
        "outputs_float64": {"advantages": combined},
    }


def _equal_group(case: Any) -> Outputs:
    rewards = case.tensor("rewards")
    group = torch.arange(len(rewards)) // case.params["group_size"]
    return {"advantages": group_advantages(rewards, group, eps=case.params["eps"])}


def _soft_overlong(case: Any) -> Outputs | None:
    limit, cache = case.params["max_length"], case.params["cache"]
    if not (isinstance(cache, int) and isinstance(limit, int) and 1 <= cache <= limit):
        return None
    return {"reward": soft_overlong(case.tensor("lengths"), max_length=limit, cache=cache)}


ADVANTAGES: tuple[Row, ...] = (
    (r"verl_opo_(ragged|singleton)\w*", _opo, (), ("rewards", "group", "lengths")),
    (r"verl_passk(_nostd)?", _pass_at_k, ("normalize",), ("rewards", "group")),
    (r"verl_gpg", _gpg, ("f_norm",), ("rewards", "group")),
    (r"verl_remax", _remax, (), ("token_rewards", "baseline", "mask")),
    (r"verl_reinforce_pp\w*", _reinforce_pp, ("gamma",), ("token_rewards",)),
    (r"verl_gae\w*", _gae, ("gamma", "lam"), ("token_rewards", "values")),
    (r"flow_grpo_tracker_\w+", _tracker, ("type",), ("rewards", "group")),
    (r"verl_kl_in_reward", _kl_in_reward, ("beta", "kl"), ("token_scores", "old_log_prob", "ref_log_prob")),
    (r"verl_adaptive_kl", _adaptive_kl, ("init", "target", "horizon"), ("kl", "n_steps")),
)
PAIRWISE: tuple[Row, ...] = (
    (r"win_rate_n\d+", _win_rate, ("n",), ("pairs", "preference")),
    (
        r"flex_n\d+",
        _flex,
        ("overall_weight", "dim_weight", "category_weights"),
        ("pairs", "winner", "category_winners"),
    ),
    (
        r"weighted_adv_\w+",
        _weighted_advantages,
        ("weights", "group_size", "use_group", "gdpo", "eps", "ddof"),
        ("rewards",),
    ),
    (r"equal_group_fp32", _equal_group, ("group_size", "eps"), ("rewards",)),
)
OVERLONG: tuple[Row, ...] = ((r"soft_overlong", _soft_overlong, ("max_length", "cache"), ("lengths",)),)


def _tolerance(case: Any, key: str) -> tuple[float, float, str] | None:
    """The usual 1e-6, but of the largest element, for what a peer computed in float32 near zero."""
    single = case.params.get("dtype") == "float32" and not key.startswith("outputs_float64")
    return (1e-6, 1e-8, "largest") if single and "weights" in case.params else None


FAMILIES: Mapping[str, Callable[[Any], Outputs | None]] = {
    "A_advantages": family(ADVANTAGES),
    "F_pairwise_multireward": family(PAIRWISE),
    "C_kl_overlong_passk": family(OVERLONG),
}
TOLERANCES = {"F_pairwise_multireward": _tolerance}
