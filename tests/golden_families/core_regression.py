# SPDX-License-Identifier: Apache-2.0
"""Golden families of the regressions of velocities: DiffusionNFT, AWM, Diffusion-DPO, DGPO and Sol-RL's choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.golden_families import Outputs, Row, family
from visalign.core import velocity_kl
from visalign.core.regression.groupwise import dgpo_loss
from visalign.core.regression.losses import level_weight, matching_error, nft_loss, preference_loss, reward_probability
from visalign.core.regression.signals import best_and_worst, best_worst_pairs, level_position, old_policy_decay
from visalign.flow import flow_sigma, timestep_sigmas

_WEIGHTING = {"Uniform": "uniform", "t": "t", "t**2": "x0", "huber": "huber", "ghuber": "ghuber"}


def _with_gradient(loss: Tensor, v: Tensor, name: str = "loss") -> Outputs:
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    return {name: loss, "grad_v": gradient}


def _nft(case: Any) -> Outputs:
    params = case.params
    x0, noise, sigma = case.tensor("x0"), case.tensor("noise"), case.tensor("t")
    v, v_old, v_ref = case.tensor("v").requires_grad_(), case.tensor("v_old"), case.tensor("v_ref")
    options = {"beta": params["mix_beta"], "bound": params["adv_clip_max"]}
    weighted = "weight_min" in params
    args = (v, v_old, noise - x0, sigma, case.tensor("advantages"))
    policy = nft_loss(*args, **options, weighted=weighted).mean()
    kl = (v - v_ref).square().mean()
    return _with_gradient(policy + params.get("ref_kl_coef", 0.0) * kl, v)


def _probability(case: Any) -> Outputs:
    bound, a = case.params["adv_clip_max"], case.tensor("advantages")
    return {mode: reward_probability(a, bound=bound, mode=mode) for mode in case.expected}  # type: ignore[arg-type]


def _decay(case: Any) -> Outputs:
    types = {"type0": (0, 0.0, 0.0), "type1": (0, 0.001, 0.5), "type2": (75, 0.0075, 0.999)}
    return {
        name: [old_policy_decay(s, start=start, slope=slope, end=end) for s in case.inputs["step"]]
        for name, (start, slope, end) in types.items()
    }


def _awm(case: Any) -> Outputs:
    v, sigma = case.tensor("v").requires_grad_(), case.tensor("timestep") / 1000
    options: dict[str, Any] = {"weighting": _WEIGHTING[case.params["weighting"]], "power": case.params["power"]}
    log_prob = -matching_error(v, case.tensor("target"), sigma, **options)
    return _with_gradient(log_prob, v, "log_prob")


def _dpo(case: Any) -> Outputs:
    target = case.tensor("noise") - case.tensor("x0")
    v, v_ref, one = case.tensor("v").requires_grad_(), case.tensor("v_ref"), torch.ones(len(target)).double()
    error, ref = (matching_error(output, target, one).view(-1, 2) for output in (v, v_ref))
    return _with_gradient(preference_loss(error, ref, beta=case.params["beta"]).mean(), v)


def _pairs(case: Any) -> Outputs:
    group = list(case.inputs["group"])
    pairs = best_worst_pairs(case.tensor("scores"), group)
    return {"indices": pairs.flatten()}


LOSSES: tuple[Row, ...] = (
    (r"nft_(un)?weighted_beta[\d.]+", _nft, ("mix_beta", "adv_clip_max", "?ref_kl_coef", "?weight_min"), ()),
    (r"nft_reward_prob", _probability, ("adv_clip_max",), ()),
    (r"nft_old_policy_decay", _decay, (), ()),
    (r"awm_\w+", _awm, ("weighting", "power", "?dtype"), ()),
    (r"diffusion_dpo_beta[\d.]+", _dpo, ("beta", "?order", "?dtype"), ()),
    (r"online_dpo_pairs", _pairs, (), ()),
)


def _tolerance(case: Any, key: str) -> tuple[float, float, str] | None:
    """The preference loss and AWM were frozen in float32."""
    if case.variant.startswith(("diffusion_dpo", "awm")):
        return (1e-5, 1e-6, "largest")
    return None


def _fine_tuning(case: Any) -> Outputs | None:
    """Levels, weights and losses of diffusers' training scripts."""
    params, kind = case.params, case.variant.split("_")[0]
    scheme: Any = {"none": "uniform"}.get(params.get("weighting_scheme"), params.get("weighting_scheme"))
    if kind == "density":
        draw = case.tensor("draw")
        share = torch.special.ndtr(draw) if scheme == "logit_normal" else draw
        names = {"mean": "logit_mean", "std": "logit_std", "scale": "mode_scale"}
        options = {ours: params[theirs] for ours, theirs in names.items() if params[theirs] is not None}
        return {"u": level_position(share, scheme, **options)}
    if kind == "timestep":
        table, u = timestep_sigmas(1000, shift=params["shift"]), case.tensor("u")
        index = (u * (len(table) - 1)).long().clamp(max=len(table) - 2)
        return {"index": index, "sigmas": table[index], "timesteps": 1000 * table[index]}
    if kind == "min":
        sigma = flow_sigma(case.tensor("alphas_cumprod"))
        predicted: Any = "v" if params["prediction_type"] == "v_prediction" else "epsilon"
        weight = level_weight(sigma, "min_snr", gamma=params["snr_gamma"]) / level_weight(sigma, predicted)
        return {"snr": ((1 - sigma) / sigma).square(), "weights": weight}
    weighting: Any = "uniform" if scheme in ("logit_normal", "mode") else scheme
    outputs = {"weighting": level_weight(case.tensor("sigmas"), weighting)}
    if kind == "loss":
        v, target = case.tensor("model_output").requires_grad_(), case.tensor("noise") - case.tensor("clean_latents")
        loss = matching_error(v, target, case.tensor("sigmas"), weighting=weighting).mean()
        outputs |= {"loss": loss, "grad_model_output": torch.autograd.grad(loss, v)[0]}
    return outputs


def _groups(case: Any) -> Outputs | None:
    """DGPO's loss of groups of one size, the copy that it clips to, and the rows kept of a pool."""
    params, inputs = case.params, case.inputs
    if case.variant.startswith("sol_rl"):
        reward, size = case.tensor("rewards"), params["group_size"]
        group, counts = [i // size for i in range(len(reward))], {"best": params["top_k"], "worst": params["bottom_k"]}
        try:
            return {"selected": best_and_worst(reward, group, **counts)}
        except ValueError:
            return {"refused": True}
    if "ramp_rate" in params:
        decay = old_policy_decay(params["step"], start=0, slope=params["ramp_rate"], end=params["max_decay"])
        return {"decay": decay, "old": decay * case.tensor("old") + (1 - decay) * case.tensor("current")}
    if params["clip_kl"] or params["use_ema_ref"]:
        return None
    group, signal, v = torch.tensor(inputs["group"]), case.tensor("advantages"), case.tensor("model_output")
    references = [case.tensor(f"{name}_model_output") for name in ("ref", "old")]
    target, one = case.tensor("target_velocity"), torch.ones(len(group), dtype=torch.float64)
    error, ref, old = (matching_error(output, target, one) for output in (v.requires_grad_(), *references))
    low, high = params["clip_range"]
    clip = {"eps_low": -low, "eps_high": high} if params["clip_dsm"] else {}
    members = [group == label for label in group.unique()]
    losses = [dgpo_loss(error[m], ref[m], signal[m], old[m], beta=params["dpo_beta"], **clip) for m in members]
    logit = torch.stack([params["dpo_beta"] * (signal[m] * (error - ref)[m]).mean() for m in members]).detach()
    policy = torch.stack(losses).mean()
    loss = policy + params["kl_beta"] * velocity_kl(v, references[0]).mean()
    gradient = torch.autograd.grad(loss, v)[0]
    outputs = {"dsm": error, "group_logit": logit, "group_weight": logit.sigmoid(), "dgpo_loss": policy, "loss": loss}
    return outputs | {"grad_model_output": gradient}


FAMILIES = {
    "L_dgpo_selection": _groups,
    "E_diffusion_losses": family(LOSSES, exact=True),
    "L_sft_weighting": _fine_tuning,
}
TOLERANCES = {"E_diffusion_losses": _tolerance}
