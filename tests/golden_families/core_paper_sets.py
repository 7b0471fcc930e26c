# SPDX-License-Identifier: Apache-2.0
"""Golden families of recent papers: gradient balance, neighbours, rankings, diversity, Flow-Factory."""

from __future__ import annotations

from typing import Any

import torch

from tests.golden_families import Outputs, Row, family, gradients
from visalign.core.advantages.combine import normalise_then_sum, weighted_sum
from visalign.core.advantages.gradient_balance import combine_gradients, min_norm_weights, smooth_weights
from visalign.core.advantages.group import group_advantages, whiten
from visalign.core.advantages.hidden_states import effective_rank
from visalign.core.regression.groupwise import gdro_loss, soft_plackett_luce
from visalign.core.regression.losses import reward_probability
from visalign.core.rewards.fusion import neighbour_weights, reward_fusion
from visalign.core.rewards.sets import vendi_gains, vendi_score
from visalign.evaluation.statistics.diversity import starc_distance, support_metrics


def _marble(case: Any) -> Outputs:
    gradient = case.tensor("gradients")
    alpha, plain = min_norm_weights(gradient), min_norm_weights(gradient, normalise=False)
    direction = combine_gradients(gradient, alpha)
    unit = torch.stack([combine_gradients(gradient, row) for row in torch.eye(len(gradient)).double()])
    start = torch.full_like(alpha, 1 / len(alpha))
    return {
        "alpha": alpha,
        "direction": direction,
        "norm": direction.norm(),
        "scaled": combine_gradients(gradient, alpha, rescale=True),
        "dots_with_unit_gradients": unit @ direction,
        "alpha_without_normalisation": plain,
        "direction_without_normalisation": combine_gradients(gradient, plain, normalise=False),
        "combined_advantages": weighted_sum(case.tensor("advantages"), alpha.tolist()),
        "ema_from_uniform": smooth_weights(start, alpha, rho=case.params["rho"]),
    }


def _affine_probability(case: Any) -> Outputs:
    advantage, alpha = case.tensor("advantages").T, case.inputs["alpha"]  # [K, B] there
    bound = case.params["A_max"]
    return {
        "of_combination": reward_probability(weighted_sum(advantage, alpha), bound=bound),
        "combination_of": weighted_sum(reward_probability(advantage, bound=bound), alpha),
    }


def _gdro(case: Any) -> Outputs:
    score = case.tensor("scores").requires_grad_()
    rows, reward = torch.atleast_2d(score), torch.atleast_2d(case.tensor("rewards"))
    loss = soft_plackett_luce(rows, reward, tau=case.params["tau"]).mean()
    return gradients(loss, scores=score)


def _gdro_full(case: Any) -> Outputs:
    error = case.tensor("error").requires_grad_()
    options: Any = {name: case.params[name] for name in ("beta", "gamma", "tau")}
    loss = gdro_loss(error, case.tensor("error_ref"), case.tensor("rewards"), **options).mean()
    return gradients(loss, error=error)


def _starc(case: Any) -> Outputs:
    first, second = case.tensor("r1"), case.tensor("r2")
    return {
        "distance": starc_distance(first, second),
        "affine_copy": starc_distance(first, 3 * first + 5),
        "negated": starc_distance(first, -first),
    }


def _effective_rank(case: Any) -> Outputs:
    return {"effective_rank": effective_rank(case.tensor("Z"))}


def _vendi(case: Any) -> Outputs:
    return {"vendi": vendi_score(case.tensor("Z")), "loo": vendi_gains(case.tensor("Z"))}


def _support(case: Any) -> Outputs:
    metrics = support_metrics(**{name: int(case.inputs[name]) for name in ("preserved", "expanded", "shrunk")})
    return {"SRR": metrics.retention, "NDR": metrics.discovery, "SDS": metrics.dynamics, "NSCR": metrics.net_change}


def _fusion(case: Any) -> Outputs:
    own, near, close = (
        torch.atleast_1d(case.tensor("self_reward")),
        torch.atleast_2d(case.tensor("neighbour_rewards")),
        torch.atleast_2d(case.tensor("similarity")),
    )
    options: Any = {"threshold": case.params["threshold"], "top": case.params["top"]}
    fused, used = reward_fusion(own, near, close, **options), neighbour_weights(close, **options) > 0
    single = case.tensor("self_reward").ndim == 0
    return {"fused": fused[0] if single else fused, "kept": used.sum(1)[0] if single else used.sum(1)}


def _flow_factory(case: Any) -> Outputs | None:
    """eps = 0 stands for max(std, floor): they differ only for groups spread by less than the floor, 1e-6."""
    columns, weights, ddof = case.inputs["rewards"], case.params["weights"], case.params["ddof"]
    if set(columns) != set(weights):
        return None
    rewards = torch.tensor([columns[name] for name in weights], dtype=torch.float64).T
    factors, group = [float(weights[name]) for name in weights], case.inputs["group"]
    if case.variant.startswith("flow_factory_gdpo"):
        combined = normalise_then_sum(rewards, factors, group, ddof=ddof, eps=0.0)
        return {"advantages": whiten(combined, ddof=ddof, eps=0.0, eps_inside=False)}
    scale = "batch" if case.params["global_std"] else "group"
    combined = weighted_sum(rewards, factors)
    return {"advantages": group_advantages(combined, group, scale=scale, ddof=ddof, eps=0.0)}


SETS: tuple[Row, ...] = (
    (r"reward_fusion(_worked)?", _fusion, ("threshold", "top"), ("self_reward", "neighbour_rewards", "similarity")),
    (r"marble(_worked\d)?", _marble, ("rho",), ("gradients", "advantages")),
    (r"marble_affine_reward_prob", _affine_probability, ("A_max",), ("advantages", "alpha")),
    (r"gdro(_worked\w*)?", _gdro, ("tau",), ("scores", "rewards")),
    (r"gdro_full", _gdro_full, ("beta", "gamma", "tau"), ("error", "error_ref", "rewards")),
    (r"starc(_bandit)?", _starc, (), ("r1", "r2")),
    (r"effective_rank\w*", _effective_rank, (), ("Z",)),
    (r"vendi\w*", _vendi, (), ("Z",)),
    (r"support_metrics", _support, (), ("preserved", "expanded", "shrunk")),
)
STEPS: tuple[Row, ...] = (
    (
        r"flow_factory_(weighted_sum|gdpo)_global[01]",
        _flow_factory,
        ("weights", "global_std", "ddof", "floor"),
        ("rewards", "group"),
    ),
)


FAMILIES = {"H_paper_rules": family(SETS, exact=True), "E_windows_steps": family(STEPS, exact=True)}
