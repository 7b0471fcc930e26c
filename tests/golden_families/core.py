# SPDX-License-Identifier: Apache-2.0
"""Golden families of the objective core: advantages, aggregation, diffusion losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.golden_families import Outputs, Row, family, gradients
from visalign.core import (
    MODES,
    aggregate,
    clamp_advantages,
    count_step,
    gaussian_kl,
    group_advantages,
    guard_log_ratio,
    guard_step_weight,
    log_ratio,
    normalise_then_sum,
    ppo_clip,
    row_tokens,
    weighted_sum,
    whiten,
)


def _group_norm(case: Any) -> Outputs | None:
    scale = case.params.get("scale")
    if scale not in ("group", "batch", "none"):
        return None
    return {"advantages": _relative(case, case.tensor("rewards"), scale)}


def _relative(case: Any, reward: Tensor, scale: Any, **options: Any) -> Tensor:
    spread = {"ddof": case.params["ddof"], "eps": case.params["eps"]}
    return group_advantages(reward, case.inputs["group"], scale=scale, **spread, **options)


def _global_or_group(case: Any) -> Outputs:
    scale = "batch" if case.params["global_std"] else "group"
    if not case.params.get("normalize", True):
        scale = "none"
    return {"advantages": _relative(case, case.tensor("rewards"), scale)}


def _several(case: Any) -> Outputs | None:
    rewards, weights = case.tensor("rewards_per_function"), case.params["weights"]
    gdpo = case.variant == "trl_gdpo" or case.params.get("aggregation") == "normalize_then_sum"
    if case.params.get("scale", "group") != "group" and gdpo:
        return None
    if not gdpo:
        combined = weighted_sum(rewards, weights, missing="skip")
        return {"combined": combined, "advantages": _relative(case, combined, case.params["scale"])}
    spread = {"ddof": case.params["ddof"], "eps": case.params["eps"]}
    combined = normalise_then_sum(rewards, weights, case.inputs["group"], missing="skip", **spread)
    return {"advantages": whiten(combined, eps_inside=False, **spread)}


def _gdpo_tokens(case: Any) -> Outputs:
    rewards, mask = case.tensor("rewards_per_function"), case.tensor("mask") != 0
    combined = normalise_then_sum(
        rewards, case.params["weights"], case.inputs["group"], eps=case.params["eps"], missing="skip"
    )
    return {"advantages": whiten(combined[:, None].expand(mask.shape), mask)}


def _rloo(case: Any) -> Outputs:
    result = group_advantages(case.tensor("rewards"), case.inputs["group"], scale="none", baseline="leave_one_out")
    if case.params.get("normalize"):
        present = torch.isfinite(case.tensor("rewards"))
        result = whiten(result, present, eps=case.params["eps"], eps_inside=False)
    return {"advantages": result}


def _ragged(case: Any) -> Outputs:
    if case.variant.startswith("verl_rloo"):
        return _rloo(case)
    scale = "group" if case.variant.startswith("verl_grpo") else "none"
    return {"advantages": _relative(case, case.tensor("rewards"), scale)}


def _reinforce_baseline(case: Any) -> Outputs:
    mask = case.tensor("mask") != 0
    centred = group_advantages(case.tensor("rewards"), case.inputs["group"], scale="none")
    return {"advantages": whiten(centred[:, None].expand(mask.shape), mask)}


def _aggregate(case: Any) -> Outputs:
    loss, weight, group = case.tensor("loss"), case.tensor("mask"), case.inputs["group"]
    counts = count_step(weight, group=group)
    limited = count_step(weight, length=case.params["L_max"])
    tokens = row_tokens(weight, group)
    shares = {
        mode: [aggregate(loss[a:b], weight[a:b], mode, counts) for a, b in case.params.get("micro_batches", [])]
        for mode in case.expected.get("micro_batch_shares", {})
    }
    modes: Any = [mode for mode in MODES if mode != "group_token_mean"]
    return {
        **{mode: aggregate(loss, weight, mode, counts) for mode in modes},
        "dr_grpo_Lmax": aggregate(loss, weight, "dr_grpo", limited),
        "group_token_mean": aggregate(loss, weight, "group_token_mean", counts, denominator=tokens),
        "micro_batch_shares": shares,
    }


def _whiten(case: Any) -> Outputs:
    values, valid, eps = case.tensor("values"), case.tensor("mask") != 0, case.params["eps"]
    return {
        "whitened": whiten(values, valid, eps=eps),
        "whitened_keep_mean": whiten(values, valid, eps=eps, keep_mean=True),
    }


def _mean(losses: Tensor) -> Tensor:
    weight = torch.ones_like(losses)
    return aggregate(losses, weight, "token_mean", count_step(weight))


def _clipped(case: Any, ratio: Tensor) -> Tensor:
    advantage = clamp_advantages(case.tensor("advantages"), case.params["adv_clip_max"])
    return ppo_clip(ratio, advantage, eps_low=case.params["clip"], eps_high=case.params["clip"])


def _flow_grpo(case: Any) -> Outputs:
    new = case.tensor("log_prob").requires_grad_()
    losses = _clipped(case, log_ratio(new, case.tensor("old_log_prob")))
    if "weights" in case.inputs:
        losses = losses * case.tensor("weights")
    outputs = gradients(_mean(losses), log_prob=new)
    if "beta" not in case.params:
        return outputs
    std = case.tensor("s") * (-case.tensor("dt")).sqrt()
    kl = gaussian_kl(case.tensor("mean"), case.tensor("mean_ref"), std, log_prob_reduction="mean")
    policy_loss = outputs.pop("loss")
    total = policy_loss + case.params["beta"] * _mean(kl)
    peer = {"policy_loss": policy_loss, **outputs}
    return {"kl_per_sample": kl, "kl_loss": _mean(kl), "loss": total, "outputs_peer": peer}


def _kl(case: Any) -> Outputs:
    mean = case.tensor("mean").requires_grad_()
    std = case.tensor("std" if "std" in case.inputs else "s").expand(mean.shape[0])
    return gradients(_mean(gaussian_kl(mean, case.tensor("mean_ref"), std, log_prob_reduction="mean")), mean=mean)


def _guard(case: Any) -> Outputs:
    mean = case.tensor("mean").requires_grad_()
    ratio = guard_log_ratio(case.tensor("noise"), mean, case.tensor("mean_old"))
    loss = _mean(_clipped(case, ratio) * guard_step_weight(case.tensor("dt")))
    return {**gradients(loss, mean=mean), "log_ratio": ratio, "ratio": ratio.exp()}


STEP = ("clip", "adv_clip_max")
MOVED = ("mean", "mean_old", "noise", "dt", "advantages")
TOKENS = ("log_prob", "old_log_prob", "advantages")

ADVANTAGES: tuple[Row, ...] = (
    (r"trl_(grpo_(group|batch|none)|equal_group)", _group_norm, ("ddof", "eps"), ("rewards", "group")),
    (
        r"trl_(weighted_sum|gdpo|missing_(sum_then_normalize|normalize_then_sum))",
        _several,
        ("weights", "ddof", "eps"),
        ("rewards_per_function", "group"),
    ),
    (r"verl_gdpo_tokenwhiten", _gdpo_tokens, ("weights", "eps"), ("rewards_per_function", "group", "mask")),
    (r"trl_rloo(_normalized|_missing)?", _rloo, (), ("rewards", "group")),
    (r"verl_(grpo|drgrpo|rloo)_(ragged|singleton)\w*", _ragged, ("ddof", "eps"), ("rewards", "group")),
    (r"verl_reinforce_pp_baseline", _reinforce_baseline, (), ("rewards", "group", "mask")),
    (
        r"(flow_grpo_tracker(_steps)?|verl_omni_flow_grpo)_global\d(_std\d)?",
        _global_or_group,
        ("global_std", "ddof", "eps"),
        ("rewards", "group"),
    ),
)
AGGREGATION: tuple[Row, ...] = (
    (r"aggregate", _aggregate, ("L_max",), ("loss", "mask", "group")),
    (r"masked_whiten", _whiten, ("eps",), ("values", "mask")),
)
DIFFUSION: tuple[Row, ...] = (
    (r"flow_grpo_(vec|mat)", _flow_grpo, STEP, TOKENS),
    (r"flow_grpo_weighted", _flow_grpo, STEP, (*TOKENS, "weights")),
    (r"flow_grpo_with_kl", _flow_grpo, (*STEP, "beta"), (*TOKENS, "mean", "mean_ref", "s", "dt")),
    (r"verl_omni_kl", _kl, (), ("mean", "mean_ref", "s")),
    (r"pref_grpo_kl", _kl, (), ("mean", "mean_ref", "std")),
    (r"grpo_guard_(same|mixed)|pref_grpo_rationorm", _guard, STEP, MOVED),
)


def _tolerance(case: Any, key: str) -> tuple[float, float, str] | None:
    """Float32 peers: 1e-4 of the largest element for steps; 1e-5 where only the statistics were float32."""
    dtype = str(case.params.get("dtype", ""))
    if not dtype.startswith("float32"):
        return None
    return (1e-5, 1e-6, "largest") if case.family == "A_advantages" else (1e-4, 1e-8, "largest")


FAMILIES: Mapping[str, Callable[[Any], Outputs | None]] = {
    "A_advantages": family(ADVANTAGES),
    "B_value_aggregation": family(AGGREGATION),
    "E_diffusion_losses": family(DIFFUSION),
}
TOLERANCES = {"A_advantages": _tolerance, "E_diffusion_losses": _tolerance}
