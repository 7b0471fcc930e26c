# SPDX-License-Identifier: Apache-2.0
"""Golden families of the surrogates: ratio levels, policy losses, off-policy weights, FlowRL, AEPO's clip."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.golden_families import Outputs, Row, family, gradients
from visalign.core.surrogates.aggregation import MODES, aggregate, count_step
from visalign.core.surrogates.balance import dro, flow_balance
from visalign.core.surrogates.forms import gmpo, gradient_keeping_clip, sapo
from visalign.core.surrogates.kl import gaussian_kl, kl_estimate
from visalign.core.surrogates.off_policy import importance_weights, off_policy_mask
from visalign.core.surrogates.ppo import ppo_clip
from visalign.core.surrogates.ratios import gaussian_log_prob, log_ratio, ratio_level
from visalign.core.surrogates.weighted import binary_kl, binary_tv, cispo, dppo, gamma_weight, reinforce, vespo

TOKENS = ("log_prob", "old_log_prob", "advantages", "mask")
NEUTRAL = ("mask_kind", "dtype", "empty_rows")
"""Parameters that describe the inputs and change no formula."""


class Tokens(NamedTuple):
    """Tensors of one case, [B, T]."""

    new: Tensor
    old: Tensor
    weight: Tensor
    advantage: Tensor
    reference: Tensor | None
    ratio: Tensor
    """Per token."""

    def level(self, level: Any) -> Tensor:
        return ratio_level(self.ratio, self.weight, level)


def _tokens(case: Any) -> Tokens:
    new, old, weight = (case.tensor("log_prob").requires_grad_(), case.tensor("old_log_prob"), case.tensor("mask"))
    reference = case.tensor("ref_log_prob") if "ref_log_prob" in case.inputs else None
    return Tokens(new, old, weight, case.tensor("advantages"), reference, log_ratio(new, old, weight))


def _eps(params: Mapping[str, Any]) -> dict[str, float]:
    return {"eps_low": params["eps_low"], "eps_high": params["eps_high"]}


def _clip(p: Mapping[str, Any], t: Tokens) -> Tensor | None:
    if p.get("level", "token") not in ("token", "sequence", "sequence_token"):
        return None
    ratio = t.level(p.get("level", "token"))
    loss = ppo_clip(ratio, t.advantage, **_eps(p), dual_clip=p.get("c"), delta=p.get("delta"))
    return _with_kl(p, t, loss)


def _with_kl(p: Mapping[str, Any], t: Tokens, loss: Tensor) -> Tensor | None:
    if "beta" not in p:
        return loss
    kind = p.get("kl", "k3")
    if kind not in ("k3", "k3*ratio") or t.reference is None:
        return None
    live = t.ratio if kind == "k3*ratio" else None
    return loss + p["beta"] * kl_estimate(t.new, t.reference, "k3", log_ratio=live, weight=t.weight)


def _luspo(p: Mapping[str, Any], t: Tokens) -> Tensor:
    return ppo_clip(t.level("sequence"), t.advantage, **_eps(p))


def _cispo(p: Mapping[str, Any], t: Tokens) -> Tensor:
    bounds = {"bound_low": p["bound_low"], "bound_high": p["bound_high"]}
    return cispo(t.new, t.ratio, t.advantage, **bounds, weight=t.weight)


def _sapo(p: Mapping[str, Any], t: Tokens) -> Tensor:
    return sapo(t.ratio, t.advantage, tau_pos=p["tau_pos"], tau_neg=p["tau_neg"])


def _gmpo(p: Mapping[str, Any], t: Tokens) -> Tensor | None:
    return _with_kl(p, t, gmpo(t.ratio, t.advantage, t.weight, **_eps(p)))


def _gpg(p: Mapping[str, Any], t: Tokens) -> Tensor:
    return reinforce(t.new, t.advantage, weight=t.weight)


def _dppo(measure: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Mapping[str, Any], Tokens], Tensor]:
    def run(p: Mapping[str, Any], t: Tokens) -> Tensor:
        limits = {"limit_low": p["div_low"], "limit_high": p["div_high"], "cap": p["c"]}
        distance = measure(t.new, t.old)
        return dppo(t.ratio, t.advantage, distance, **limits, log_prob=t.new, weight=t.weight)

    return run


def _dro(p: Mapping[str, Any], t: Tokens) -> Tensor:
    return dro(t.new, t.ratio, t.advantage, beta=p["beta"], weight=t.weight)


GAMMA = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")


def _vespo(p: Mapping[str, Any], t: Tokens) -> Tensor:
    return vespo(t.new, t.level("sequence_sum"), t.advantage, **{k: p[k] for k in GAMMA}, weight=t.weight)


Form = Callable[[Mapping[str, Any], Tokens], Tensor | None]
CLIP = ("eps_low", "eps_high")

FORMS: tuple[tuple[str, Form, tuple[str, ...], tuple[str, ...]], ...] = (
    (r"(ppo_clip|clip_higher)", _clip, CLIP, ()),
    (r"dual_clip", _clip, (*CLIP, "c"), ()),
    (r"two_sided_delta", _clip, (*CLIP, "delta"), ()),
    (r"grpo_k3", _clip, (*CLIP, "beta", "kl"), ()),
    (r"gspo", _clip, (*CLIP, "level"), ()),
    (r"luspo", _luspo, CLIP, ()),
    (r"cispo", _cispo, ("bound_low", "bound_high"), ()),
    (r"sapo", _sapo, ("tau_pos", "tau_neg"), ()),
    (r"gmpo", _gmpo, CLIP, ("beta", "kl")),
    (r"gpg", _gpg, (), ()),
    (r"dppo_tv", _dppo(binary_tv), ("div_low", "div_high", "c"), ()),
    (r"dppo_kl", _dppo(binary_kl), ("div_low", "div_high", "c"), ()),
    (r"dro", _dro, ("beta",), ()),
    (r"vespo", _vespo, GAMMA, ()),
)
"""Name -> loss, the parameters it needs, those it may have. Any other parameter makes the case unknown."""

AGGREGATIONS: dict[str, Any] = {m: m for m in MODES if m != "group_token_mean"}
AGGREGATIONS["seq_mean"] = "seq_mean_token_mean"


def _surrogates(case: Any) -> Outputs | None:
    if (form := _form(case)) is None:
        return None
    blocks = {"": case.expected} if case.expected else {}
    blocks |= {k: case.record[k] for k in ("outputs_verl", "outputs_trl") if k in case.record}
    if not blocks and "outputs_peer" in case.record:
        blocks = {"outputs_peer": case.record["outputs_peer"]}
    result: Outputs = {}
    for key, block in blocks.items():
        modes = [mode for mode in block if mode in AGGREGATIONS]
        values: Outputs = {}
        for mode in modes:
            tokens = _tokens(case)
            losses = form(case.params, tokens)
            if losses is None:
                return None
            values[mode] = _aggregated(losses, tokens, AGGREGATIONS[mode], _empty(case, key))
        if "phi" in block:
            values["phi"] = _phi(case)
        result |= values if not key else {key: values}
    return result or None


def _form(case: Any) -> Form | None:
    if case.params.get("dtype", "float64") != "float64":
        return None
    for name, form, needed, optional in FORMS:
        if re.fullmatch(rf"((trl|verl)_)?{name}(_\w+)?", case.variant):
            names = set(case.params) - set(NEUTRAL)
            return form if set(needed) <= names <= {*needed, *optional} else None
    return None


def _aggregated(losses: Tensor, tokens: Tokens, mode: Any, empty: Any) -> Outputs:
    loss = aggregate(losses, tokens.weight, mode, count_step(tokens.weight, empty=empty))
    return gradients(loss, log_prob=tokens.new)


def _empty(case: Any, key: str) -> str:
    """TRL counts rows without a token as sequences, verl does not."""
    of_trl = key == "outputs_trl" or (not key and str(case.record.get("source", "")).startswith("trl"))
    return "keep" if of_trl else "drop"


def _phi(case: Any) -> Tensor:
    tokens = _tokens(case)
    phi = gamma_weight(tokens.level("sequence_sum"), tokens.advantage, **{k: case.params[k] for k in GAMMA})
    return phi.gather(1, (tokens.weight != 0).double().argmax(1, keepdim=True))


def _off_policy_mask(case: Any) -> Outputs:
    tokens = _tokens(case)
    keep = off_policy_mask(tokens.ratio, tokens.advantage, tokens.weight, delta=case.params["delta"])
    return {"keep": keep.double()}


def _truncated(case: Any) -> Outputs | None:
    levels: dict[Any, Any] = {"token": "token", "sequence": "sequence_sum"}
    if case.params["level"] not in levels:
        return None
    level = levels[case.params["level"]]
    weights = importance_weights(
        case.tensor("log_ratio"), case.tensor("mask"), level=level, mode="truncate", high=case.params["C"]
    )
    return {"weights": weights.value}


def _flowrl(case: Any) -> Outputs:
    clip = case.params["clip"]
    return {**_balance(case, clip, clip), "outputs_peer": _balance(case, 1.0, float("inf"))}


def _balance(case: Any, eps_low: float, eps_high: float) -> Outputs:
    new, weight = case.tensor("log_prob").requires_grad_(), case.tensor("mask")
    ratio = ratio_level(log_ratio(new, case.tensor("old_log_prob"), weight), weight, "sequence_sum")
    ref, log_z, reward = (case.tensor(name) for name in ("ref_log_prob", "log_z", "reward"))
    options = {"beta": case.params["beta"], "log_ratio": ratio, "eps_low": eps_low, "eps_high": eps_high}
    losses = flow_balance(new, ref, log_z, reward, weight, **options)
    return gradients(aggregate(losses, weight, "seq_mean_token_mean", count_step(weight)), log_prob=new)


def _aepo(case: Any) -> Outputs:
    new = case.tensor("log_prob").requires_grad_()
    ratio = log_ratio(new, case.tensor("old_log_prob"))
    losses = gradient_keeping_clip(ratio, case.tensor("advantages"), **_eps(case.params))
    return {"loss_per_token": losses, "grad_of_sum": torch.autograd.grad(losses.sum(), new)[0]}


def _flow_dppo(case: Any) -> Outputs:
    mean, std, limit = case.tensor("mean").requires_grad_(), case.tensor("std"), case.params["kl_threshold"]
    new = gaussian_log_prob(case.tensor("x_next"), mean, std, log_prob_reduction="mean")
    ratio = log_ratio(new, case.tensor("old_log_prob"))
    kl = gaussian_kl(mean, case.tensor("mean_old"), std, log_prob_reduction="mean")
    limits = {"limit_low": limit, "limit_high": limit, "cap": float("inf")}
    losses = dppo(ratio, case.tensor("advantages"), kl, **limits)
    loss = aggregate(losses, torch.ones_like(losses), "token_mean", count_step(torch.ones_like(losses)))
    return {**gradients(loss, mean=mean), "kl": kl, "ratio": ratio.exp()}


SURROGATES: tuple[Row, ...] = (
    (r"opsm.*", _off_policy_mask, ("delta",), TOKENS),
    (r"tis_.*", _truncated, ("C", "level"), ("log_ratio", "mask")),
    (r".*", _surrogates, (), TOKENS),
)
BALANCE = ("log_prob", "old_log_prob", "ref_log_prob", "log_z", "reward", "mask")
PAPERS: tuple[Row, ...] = (
    (r"flowrl.*", _flowrl, ("beta", "clip"), BALANCE),
    (r"aepo_clip.*", _aepo, CLIP, TOKENS[:3]),
)
MOVED = ("mean", "mean_old", "x_next", "std", "old_log_prob", "advantages")
STEPS: tuple[Row, ...] = ((r"flow_dppo", _flow_dppo, ("kl_threshold",), MOVED),)
FAMILIES: Mapping[str, Callable[[Any], Outputs | None]] = {
    "B_surrogates": family(SURROGATES),
    "E_diffusion_losses": family(STEPS),
    "H_paper_rules": family(PAPERS),
}
