# SPDX-License-Identifier: Apache-2.0
"""Golden families of token selection: entropy, covariance, Clip_B, Clip_V, STEER, SIREN, Entrocraft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.golden_families import Outputs, Row, family
from visalign.core.surrogates.aggregation import MODES, aggregate, count_step
from visalign.core.surrogates.ppo import ppo_clip
from visalign.core.surrogates.ratios import log_ratio
from visalign.core.tokens.entropy import entrocraft_direction, entrocraft_keep, token_covariance
from visalign.core.tokens.entropy_terms import (
    anchored_entropy_loss,
    nucleus_entropy,
    nucleus_mask,
    peak_entropy,
    siren_keep,
)
from visalign.core.tokens.selection import (
    clip_cov_keep,
    clip_cov_thresholds,
    kl_cov_penalty,
    kl_cov_select,
    kl_cov_thresholds,
    top_entropy_keep,
    top_entropy_thresholds,
)
from visalign.core.tokens.selection_rules import (
    clip_b_keep,
    clip_b_thresholds,
    clip_v_keep,
    clip_v_thresholds,
    discriminator_scores,
    entropy_discriminator,
)
from visalign.core.tokens.statistics import ppo_clipped
from visalign.core.tokens.steer import steer_change, steer_thresholds, steer_weights


def _clip_cov(case: Any) -> Outputs | None:
    params, weight = case.params, case.tensor("mask")
    new, advantage = case.tensor("log_prob"), case.tensor("advantages")
    bounds = {"eps_low": params["eps_low"], "eps_high": params["eps_high"]}
    noise = torch.zeros_like(weight)
    if "selected_indices" in case.inputs:
        noise = torch.ones_like(weight)
        for row, column in case.inputs["selected_indices"]:
            noise[row, column] = 0.0
    elif params["ratio"] != 1:
        return None  # drawn at random, and which were drawn is not stored
    ratio = log_ratio(new, case.tensor("old_log_prob"), weight)
    excluded = ppo_clipped(ratio, advantage, **bounds)
    options = {key: params[key] for key in ("ratio", "cov_low", "cov_high")}
    thresholds = clip_cov_thresholds(new, advantage, weight, noise, excluded=excluded, **options)
    keep = clip_cov_keep(new, advantage, weight, noise, thresholds, excluded=excluded)

    def loss(value: Tensor) -> Tensor:
        log_r = log_ratio(value, case.tensor("old_log_prob"), weight)
        return torch.where(keep, ppo_clip(log_r, advantage, **bounds), 0.0)

    selected = {
        "mask": (weight != 0) & ~keep,
        "covariance": token_covariance(new, advantage, weight, thresholds.statistics),
    }
    return _under_each_mode(case, loss) | {"outputs_selected": selected}


def _kl_cov(case: Any) -> Outputs:
    weight, new, advantage = case.tensor("mask"), case.tensor("log_prob"), case.tensor("advantages")
    thresholds = kl_cov_thresholds(new, advantage, weight, ratio=case.params["ratio"])
    selected = kl_cov_select(new, advantage, weight, thresholds)

    def loss(value: Tensor) -> Tensor:
        log_r = log_ratio(value, case.tensor("old_log_prob"), weight)
        penalty = kl_cov_penalty(log_r, selected, coefficient=case.params["coef"])
        return ppo_clip(log_r, advantage, eps_low=1.0, eps_high=float("inf")) + penalty

    return _under_each_mode(case, loss) | {"outputs_selected": {"mask": selected}}


def _under_each_mode(case: Any, loss: Callable[[Tensor], Tensor]) -> Outputs:
    weight, result = case.tensor("mask"), {}
    for mode in case.expected:
        if mode in MODES and mode != "group_token_mean":
            new = case.tensor("log_prob").requires_grad_()
            value = aggregate(loss(new), weight, mode, count_step(weight))
            result[mode] = {"loss": value, "grad_log_prob": torch.autograd.grad(value, new)[0]}
    return result


def _top_entropy(case: Any) -> Outputs | None:
    entropy, weight = case.tensor("entropy"), _weight(case, "entropy")
    fraction = case.params["rho"] if "rho" in case.params else 1 - case.params["q"]
    if not 0 < fraction <= 1:
        return None
    thresholds = top_entropy_thresholds(entropy, weight, fraction=fraction)
    return {"threshold": thresholds, "mask": top_entropy_keep(entropy, weight, thresholds)}


def _clip_b(case: Any) -> Outputs:
    if "S" in case.inputs:
        score = case.tensor("S")
    else:
        score = entropy_discriminator(case.tensor("log_prob"), case.tensor("entropy"))
    weight = case.tensor("mask") if "mask" in case.inputs else torch.ones_like(score)
    thresholds = clip_b_thresholds(score, weight, mu=case.params["mu"])
    keep = clip_b_keep(score, case.tensor("advantages"), weight, thresholds)
    return {"S": score, "mean": thresholds.mean, "std": thresholds.std, "keep": keep}


def _clip_v(case: Any) -> Outputs:
    scores = discriminator_scores(case.tensor("logits"))
    ids = case.tensor("ids", torch.int64)
    score = scores.score.gather(-1, ids[..., None]).squeeze(-1)
    advantage, weight = case.tensor("advantages"), _weight(case, "advantages")
    options = {"mu": case.params["mu"], "max_fraction": case.params["max_fraction"]}
    thresholds = clip_v_thresholds(score, scores.expected, advantage, weight, **options)
    keep = clip_v_keep(score, scores.expected, advantage, weight, thresholds)
    return {
        "entropy": scores.entropy,
        "S": score,
        "expected_S": scores.expected,
        "dH_all": scores.entropy_change(),
        "drop": (weight != 0) & ~keep,
        "keep": keep,
    }


def _steer(case: Any) -> Outputs | None:
    bounds = {"w_min": case.params["w_min"], "w_max": case.params["w_max"]}
    if not 0 < bounds["w_min"] <= min(1, bounds["w_max"]):
        return None
    weight = _weight(case, "log_prob")
    old, entropy = case.tensor("old_log_prob"), case.tensor("entropy")
    change = steer_change(case.tensor("log_prob"), old, entropy, case.tensor("advantages"), weight)
    thresholds = steer_thresholds(change, weight, **bounds)
    return {
        "omega": change,
        "k": thresholds.decay,
        "weight_linear": steer_weights(change, weight, thresholds, decay="linear"),
        "weight_exp": steer_weights(change, weight, thresholds, decay="exponential"),
    }


def _siren(case: Any) -> Outputs:
    logits, p = case.tensor("logits").requires_grad_(), case.params["p"]
    entropy = nucleus_entropy(logits, p=p)
    result: Outputs = {"nucleus_entropy": entropy, "full_entropy": nucleus_entropy(logits, p=1.0)}
    if "keep" in case.expected:
        shape = torch.tensor(case.expected["keep"]).shape
        result["keep"] = nucleus_mask(logits, p=p).reshape(shape)
    if "mask" not in case.inputs:
        return result
    weight = case.tensor("mask")
    keep = siren_keep(entropy, weight, quantile=case.params["quantile"])
    counts = count_step(weight)
    peaks = peak_entropy(entropy, weight, keep)
    measured = aggregate(peaks, weight, "seq_mean_token_mean", counts)
    options = {"coefficient": case.params["beta"]}
    losses = anchored_entropy_loss(peaks, measured, case.params["anchor"], **options)
    term = aggregate(losses, weight, "seq_mean_token_mean", counts)
    (gradient,) = torch.autograd.grad(term, logits)
    return result | {"peak_mask": keep, "aggregate": measured, "term": term, "grad_logits": gradient}


def _entrocraft(case: Any) -> Outputs:
    edges = case.params["low"], case.params["high"]
    direction = entrocraft_direction(case.inputs["entropy"], *edges)
    return {"m": direction, "keep": entrocraft_keep(case.tensor("advantages"), direction)}


def _weight(case: Any, like: str) -> Tensor:
    return case.tensor("mask") if "mask" in case.inputs else torch.ones_like(case.tensor(like))


POLICY = ("log_prob", "old_log_prob", "advantages", "mask")
SURROGATES: tuple[Row, ...] = (
    (r"clip_cov_\w+", _clip_cov, ("eps_low", "eps_high", "cov_low", "cov_high", "ratio"), POLICY),
    (r"kl_cov(_\w+)?", _kl_cov, ("ratio", "coef"), POLICY),
    (r"top_entropy_mask(_\w+)?", _top_entropy, ("q",), ("entropy",)),
)
RULES: tuple[Row, ...] = (
    (r"top_entropy(_\w+)?", _top_entropy, ("rho",), ("entropy",)),
    (r"clip_b(_\w+)?", _clip_b, ("mu",), ("S", "advantages")),
    (r"clip_b(_\w+)?", _clip_b, ("mu",), ("log_prob", "entropy", "advantages")),
    (r"clip_v(_\w+)?", _clip_v, ("mu", "max_fraction"), ("logits", "ids", "advantages")),
    (r"steer(_\w+)?", _steer, ("w_min", "w_max"), ("log_prob", "old_log_prob", "entropy", "advantages")),
    (r"siren(_\w+)?", _siren, ("p", "quantile", "beta", "anchor"), ("logits", "mask")),
    (r"siren(_\w+)?", _siren, ("p",), ("logits",)),
    (r"entrocraft(_\w+)?", _entrocraft, ("low", "high"), ("entropy", "advantages")),
)


FAMILIES: Mapping[str, Callable[[Any], Outputs | None]] = {
    "B_surrogates": family(SURROGATES),
    "H_paper_rules": family(RULES),
}
