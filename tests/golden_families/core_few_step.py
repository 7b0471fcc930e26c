# SPDX-License-Identifier: Apache-2.0
"""Golden family of few-step students: DMD2, DMDR, TDM, TDM-R1."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.golden_families import Outputs
from visalign.core.regression import few_step as fs
from visalign.core.regression.losses import level_weight


def _gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


def _masked_mean(value: Tensor, case: Any) -> Tensor:
    return value[case.tensor("gradient_mask").bool()].mean() if "gradient_mask" in case.inputs else value.mean()


def _dmd(case: Any) -> Outputs:
    x, real = case.tensor("x_generated").requires_grad_(), case.tensor("x0_real")
    eps = case.params["normalization_epsilon"]
    direction = fs.dmd_direction(x, real, case.tensor("x0_fake"), eps=eps)
    loss = fs.pull_loss(x, direction).mean()
    if "gradient_mask" in case.inputs:
        loss = _masked_mean((x - (x + direction).detach()).square() / 2, case)
    outputs = {"direction": -direction, "normalizer": fs.mean_distance(x, real, eps), "loss": loss}
    return outputs | {"grad_x_generated": _gradient(loss, x)}


def _critic(case: Any) -> Outputs:
    v, target = case.tensor("model_output").requires_grad_(), case.tensor("noise") - case.tensor("x_generated")
    loss = fs.FewStep().critic_loss(v, target, torch.ones(len(v)), torch.ones(len(v), dtype=v.dtype)).mean()
    if "gradient_mask" in case.inputs:
        loss = _masked_mean((v - target).square(), case)
    return {"target": target, "loss": loss, "grad_model_output": _gradient(loss, v)}


def _transitions(case: Any) -> Outputs:
    x, v, noise = (case.tensor(name) for name in ("sample", "model_output", "noise"))
    sigma, after = case.tensor("sigma"), case.tensor("sigma_next")
    x0 = x - sigma.view(-1, 1, 1, 1) * v
    consistency = (1 - after.view(-1, 1, 1, 1)) * x0 + after.view(-1, 1, 1, 1) * noise
    inner = after > 0
    args = x0[inner], x0[inner], noise[inner], torch.zeros_like(after[inner]), after[inner]
    consistency[inner] = fs.conditional_renoise(*args)[0]
    return {"x0": x0, "euler": x + (after - sigma).view(-1, 1, 1, 1) * v, "consistency": consistency}


def _renoise(case: Any) -> Outputs:
    names = ("x0", "model_noise", "fresh_noise", "sigma_mid", "sigma")
    clip = case.params["importance_clip"]
    noised, mixed, importance = fs.conditional_renoise(*(case.tensor(name) for name in names), clip=clip)
    return {"noised": noised, "mixed_noise": mixed, "importance": importance}


def _tdm_critic(case: Any) -> Outputs:
    x, target, sigma = case.tensor("x0_fake").requires_grad_(), case.tensor("x0_target"), case.tensor("sigma")
    row = fs.FewStep(min_snr=case.params["snr_gamma"])
    v = (target - x) / sigma.view(-1, *[1] * (x.ndim - 1))  # v − u of x̂ = x_σ − σ v
    loss = row.critic_loss(v, torch.zeros_like(v), sigma, case.tensor("importance")).mean()
    weights = level_weight(sigma, "min_snr", gamma=case.params["snr_gamma"]) / sigma**2
    return {"loss": loss, "weights": weights, "grad_x0_fake": _gradient(loss, x)}


def _row(case: Any) -> fs.FewStep:
    params = case.params
    names = {"tdm_weight": "guidance_share", "cfg_reward_scale": "guidance_scale"}
    options = {names[name]: value for name, value in params.items() if name in names}
    huber = params["huber_c"] if params["use_huber"] else None
    return fs.FewStep(
        interval=True,
        huber=huber,
        teacher_guidance=max(1.0, params.get("reference_guidance_scale", 1.0)),
        surrogate=bool(options),
        **options,
    )


def _tdm_student(case: Any) -> Outputs:
    x = case.tensor("x_student").requires_grad_()
    loss = _row(case).student_loss(x, case.tensor("x0_real"), case.tensor("x0_fake")).mean()
    return {"loss": loss, "grad_x_student": _gradient(loss, x)}


def _r1_student(case: Any) -> Outputs:
    row, x = _row(case), case.tensor("x_student").requires_grad_()
    real, surrogate = case.tensor("x0_real"), case.tensor("x0_surrogate")
    is_guided = case.params["reference_guidance_scale"] > 1 and row.guidance_scale > 0
    conditional = case.tensor("x0_conditional") if is_guided else None
    matching = row.student_loss(x, real, case.tensor("x0_fake")).mean()
    rewards = row.reward_loss(x, real, surrogate, conditional).mean()
    by_surrogate = fs.relative_pull_loss(x, surrogate - real, surrogate, huber=row.huber).mean()
    share = row.guidance_share
    guidance = (rewards - (1 - share) * by_surrogate) / share if share else torch.zeros(())
    outputs = {"matching_loss": matching, "guidance_loss": guidance, "surrogate_loss": by_surrogate}
    return outputs | {"loss": matching + rewards, "grad_x_student": _gradient(matching + rewards, x)}


def _surrogate(case: Any) -> Outputs | None:
    params, leaf = case.params, case.tensor("model_output").requires_grad_()
    target = case.tensor("target_velocity")
    outputs = leaf, case.tensor("ref_model_output"), case.tensor("slow_model_output")
    value, ref, slow = ((target - v).square().flatten(1).mean(1) for v in outputs)
    bound, group = params["advantage_clip_range"], torch.tensor(case.inputs["group"])
    advantage = case.tensor("advantages").clamp(-bound, bound)
    strict, signs = params["require_both_signs"], case.tensor("advantages") > 0
    if strict and any(signs[group == g].unique().numel() < 2 for g in group.unique()):
        return None  # a group whose advantages have one sign: those of a group have two, or are 0
    weight, z = fs.preference_weights(value, ref, advantage, group, beta=params["preference_beta"])
    limits = {"clip": params["clip_range"], "threshold": params["reference_threshold"]}
    stopped = fs.stopped_samples(value.detach(), ref, slow, advantage, **limits)
    share = (params["boundary_index"] + 1) / params["num_steps"] if params["time_weighting"] else 1.0
    time_weight = torch.full_like(ref, share)
    loss = fs.surrogate_loss(value, ref, weight, stopped.any(1), time_weight, anchor=params["reference_beta"]).mean()
    preference, penalty = (weight * value).mean(), (value - ref).square().mean()
    gradient = _gradient(loss, leaf)
    if strict:  # there the value is that of the published loss
        logits = torch.nn.functional.softplus(z)
        loss = loss + share * (logits.mean() - preference)
        preference = logits.mean()
    return {
        "values": value,
        "reference_values": ref,
        "slow_values": slow,
        "trust_clipped": stopped[:, 0].double(),
        "runaway_clipped": stopped[:, 1].double(),
        "group_logit": z,
        "preference_loss": preference,
        "reference_penalty": penalty,
        "loss": loss,
        "grad_model_output": gradient,
    }


def _slow_copy(case: Any) -> Outputs | None:
    if case.params["decay_min"] != 1e-3:
        return None
    row = fs.FewStep(surrogate=True, slow_decay_end=case.params["decay_max"])
    decay = row.slow_decay_at(case.params["step"])
    return {"decay": decay, "slow": case.tensor("slow").lerp(case.tensor("surrogate"), 1 - decay)}


def _query(case: Any) -> Outputs | None:
    params = case.params
    densities = {"conditional_logit_normal": "logit_normal", "actual_uniform": "uniform", "source_uniform": "uniform"}
    if params["distribution"] not in densities:
        return None
    density, options = densities[params["distribution"]], dict[str, Any]()
    if density == "logit_normal":
        options |= {"mean": params["logit_mean"], "std": params["logit_std"]}
    elif params["distribution"] == "source_uniform":
        shift = next((params[name] for name in ("gamma", "shift", "source_shift") if name in params), None)
        if shift is None:
            return None
        options["shift"] = shift
    ends = (case.tensor(name) for name in ("lower", "upper", "draw"))
    return {"sigma": fs.DENSITIES[density](*ends, **options)}


_VARIANTS: dict[str, Callable[[Any], Outputs | None]] = {
    "dmd2_student": _dmd,
    "dmdr_student": _dmd,
    "fake_score": _critic,
    "few_step_transitions": _transitions,
    "tdm_renoise": _renoise,
    "tdm_fake": _tdm_critic,
    "tdm_student": _tdm_student,
    "tdm_r1_student": _r1_student,
    "tdm_r1_slow_copy": _slow_copy,
    "tdm_query": _query,
}


def few_step(case: Any) -> Outputs | None:
    """L_few_step_rl."""
    if "target_velocity" in case.inputs:
        return _surrogate(case)
    name = next((name for name in _VARIANTS if re.match(rf"{name}(_|$)", case.variant)), None)
    return None if name is None else _VARIANTS[name](case)


FAMILIES = {"L_few_step_rl": few_step}
