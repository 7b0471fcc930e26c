# SPDX-License-Identifier: Apache-2.0
"""Golden families of KL, value loss, pass@k and best-of-k."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from tests.golden_families import Outputs, Row, family
from visalign.core.rewards.best_of import best_of_n_kl_bound, expected_best_of_k, pass_at_k
from visalign.core.surrogates.aggregation import MODES, aggregate, count_step, row_tokens
from visalign.core.surrogates.kl import Estimator, categorical_kl, kl_estimate, kl_penalty
from visalign.core.surrogates.ppo import ppo_clip
from visalign.core.surrogates.ratios import log_ratio
from visalign.core.surrogates.value import value_clip_fraction, value_loss

ESTIMATORS = get_args(Estimator)


def _estimate(name: str, new: Tensor, ref: Tensor, old: Tensor | None, weight: Tensor) -> Tensor | None:
    """Per decision: "k3", "k3+" (gradient of k2) or "k3_times_ratio"; None for other names."""
    plain = name.removesuffix("+").removesuffix("_times_ratio")
    if plain not in ESTIMATORS or name not in (plain, f"{plain}+", f"{plain}_times_ratio"):
        return None
    estimator: Any = plain
    if name.endswith("+"):
        return kl_penalty(new, ref, value=estimator, gradient="k2", weight=weight)
    if name == plain:
        return kl_estimate(new, ref, estimator, weight=weight)
    if old is None:
        return None
    return kl_estimate(new, ref, estimator, log_ratio=log_ratio(new, old, weight), weight=weight)


def _kl(case: Any) -> Outputs | None:
    new, ref = case.tensor("log_prob").requires_grad_(), case.tensor("ref_log_prob")
    weight = case.tensor("mask") if "mask" in case.inputs else torch.ones_like(new)
    old = case.tensor("old_log_prob") if "old_log_prob" in case.inputs else None
    values = _estimate(str(case.params["estimator"]), new, ref, old, weight)
    mode = case.params.get("aggregation", "seq_mean_token_mean")
    if values is None or mode not in MODES or mode == "group_token_mean":
        return None
    result = {"value": values, "grad_of_sum": _gradient(values.sum(), new)}
    losses = {key: aggregate(values, weight, mode, count_step(weight, empty=key)) for key in ("drop", "keep")}
    blocks = {key: {"loss": loss, "grad_log_prob": _gradient(loss, new)} for key, loss in losses.items()}
    return result | blocks["drop"] | {"outputs_verl": blocks["drop"], "outputs_trl": blocks["keep"]}


def _gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def _expected_gradients(case: Any) -> Outputs:
    """Every outcome once, weighted by its probability."""
    logits, ref = case.tensor("logits").requires_grad_(), case.tensor("ref_log_prob")
    new = logits.log_softmax(-1)
    chance = new.detach().exp()
    counts = count_step(chance)
    ratio = log_ratio(new, new.detach())

    def expected(values: Tensor) -> Tensor:
        return _gradient(aggregate(values, chance, "token_sum", counts), logits)

    reward = -kl_estimate(new, ref, "k1").detach()
    return {
        "reverse_kl": _gradient(categorical_kl(logits, ref).sum(), logits),
        "forward_kl": _gradient(categorical_kl(logits, ref, direction="forward").sum(), logits),
        "as_loss": {name: expected(kl_estimate(new, ref, name)) for name in ESTIMATORS},
        "as_loss_times_ratio": {name: expected(kl_estimate(new, ref, name, log_ratio=ratio)) for name in ESTIMATORS},
        "k1_in_reward": expected(ppo_clip(ratio, reward, eps_low=1.0, eps_high=float("inf"))),
    }


def _pass_at_k(case: Any) -> Outputs:
    return {"pass_at_k": pass_at_k(*(case.tensor(name, torch.int64) for name in ("n", "c", "k")))}


def _best_of_k(case: Any) -> Outputs:
    scores = case.tensor("scores")
    return {"expected_max": {str(k): expected_best_of_k(scores, k) for k in range(1, scores.shape[-1] + 1)}}


def _bound(case: Any) -> Outputs:
    return {"bound": best_of_n_kl_bound(case.tensor("N"))}


def _value(case: Any) -> Outputs | None:
    """Each aggregation asked for, and the share that the clip holds."""
    clip = case.params["clip"]
    if clip is not None and "old_values" not in case.inputs:
        return None
    options = {} if clip is None else {"old_values": case.tensor("old_values"), "clip": clip}
    blocks = {"": case.expected}
    blocks |= {key: case.record[key] for key in ("outputs_verl", "outputs_trl") if key in case.record}
    returns, weight = case.tensor("returns"), case.tensor("mask")
    result: Outputs = {}
    for key, block in blocks.items():
        empty: Any = "keep" if key == "outputs_trl" else "drop"
        values = {mode: _value_mode(case, mode, empty, options) for mode in block if _offered(case, mode)}
        result |= values if not key else {key: values}
    if clip is not None:
        share = value_clip_fraction(case.tensor("values"), returns, weight=weight, **options)
        result["clip_fraction"] = share
    return result


def _offered(case: Any, mode: str) -> bool:
    return mode in MODES and (mode != "group_token_mean" or "group" in case.inputs)


def _value_mode(case: Any, mode: Any, empty: Any, options: Any) -> Outputs:
    values, weight = case.tensor("values").requires_grad_(), case.tensor("mask")
    group = case.inputs.get("group") if mode == "group_token_mean" else None
    counts = count_step(weight, length=case.params.get("L_max"), group=group, empty=empty)
    tokens = None if group is None else row_tokens(weight, group)
    losses = value_loss(values, case.tensor("returns"), weight=weight, **options)
    loss = aggregate(losses, weight, mode, counts, denominator=tokens)
    return {"loss": loss, "grad_values": _gradient(loss, values)}


KL: tuple[Row, ...] = (
    (".*", _kl, ("estimator",), ("log_prob", "ref_log_prob")),
    (".*", _expected_gradients, (), ("logits", "ref_log_prob")),
    (".*", _pass_at_k, (), ("n", "c", "k")),
    (".*", _best_of_k, (), ("scores",)),
)
VALUE: tuple[Row, ...] = ((".*", _value, ("clip",), ("values", "returns", "mask")),)
PAPERS: tuple[Row, ...] = (("bon_kl_bound.*", _bound, (), ("N",)),)


FAMILIES: Mapping[str, Callable[[Any], Outputs | None]] = {
    "B_value_aggregation": family(VALUE),
    "C_kl_overlong_passk": family(KL),
    "H_paper_rules": family(PAPERS),
}
