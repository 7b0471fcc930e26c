# SPDX-License-Identifier: Apache-2.0
"""Golden families of visalign.flow: sigma tables and stochastic steps (both frozen in float32)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from visalign.core import guard_log_ratio, log_ratio, ppo_clip, velocity_kl
from visalign.flow import Kernel, diffusers_timestep_sigmas, timestep_sigmas
from visalign.flow.parametrization import flow_sigma, preserving_scale, velocity_of_prediction
from visalign.flow.windows import window_steps

_GRIDS = ("diffusers", "plain")
_SCHEDULES = {"flow": "flow", "Flow-SDE": "flow", "dance": "dance", "Dance-SDE": "dance"}
_SCHEDULES |= {"cps": "cps", "CPS": "cps", "precise": "precise", "dance_precise": "dance_precise", "linear": "linear"}
_KNOWN_TABLE = {"shift", "steps", "num_train_timesteps"}
_KNOWN_STEP = {"kind", "noise_level", "shift", "steps", "step_index", "sigma_max", "dtype"}


def sigma_tables(case: Any) -> dict[str, Any] | None:
    """The sigma table, and the model's timesteps."""
    params = case.params
    grid = case.name.split("_")[0]
    if grid not in _GRIDS or set(params) - _KNOWN_TABLE or "shift" not in params or "steps" not in params:
        return None
    train = params.get("num_train_timesteps", 1000)
    if grid == "diffusers":
        sigmas = diffusers_timestep_sigmas(params["steps"], shift=params["shift"], num_train_timesteps=train)
    else:
        sigmas = timestep_sigmas(params["steps"], shift=params["shift"])
    return {"sigmas": sigmas, "timesteps": sigmas[:-1] * train}


def sde_steps(case: Any) -> dict[str, Any] | None:
    """Mean, total std, log-prob (mean over elements) and its gradient for a given next sample."""
    params = case.params
    if params.get("kind") not in _SCHEDULES or set(params) - _KNOWN_STEP:
        return None
    schedule = _SCHEDULES[params["kind"]]
    if schedule == "flow" and "sigma_max" not in params:
        return None
    sizes = {"noise_level": params["noise_level"], "sigma_max": params.get("sigma_max", 0.0)}
    kernel = Kernel(schedule=schedule, **sizes, log_prob_reduction="mean")
    dtype = torch.float64 if params.get("dtype") == "float64" else torch.float32
    names = ("sample", "prev_sample", "sigma", "sigma_next")
    x, x_next, sigma, sigma_next = (case.tensor(name, dtype) for name in names)
    v = case.tensor("model_output", dtype).requires_grad_()
    transition = kernel.step(x, v, sigma, sigma_next)
    ours: dict[str, Any] = {"mean": transition.mean, "std": transition.std}
    root = torch.sqrt(sigma - sigma_next)
    ours |= {"dt": sigma_next - sigma, "std_dev_t": transition.std}
    if schedule != "cps":
        ours |= {"s": transition.std / root, "std_dev_t": transition.std / root}
    quadratic = transition.log_prob(x_next, "mean", form="quadratic")
    ours["log_prob_quadratic"] = quadratic
    if bool((transition.std > 0).all()):
        log_prob = transition.log_prob(x_next, "mean")
        ours |= {"log_prob_gaussian": log_prob, "log_prob": log_prob}
        if "grad_model_output" in case.expected:
            ours["grad_model_output"] = torch.autograd.grad(log_prob.sum(), v, retain_graph=True)[0]
    if params["kind"] == "CPS":  # this peer's log_prob is the quadratic form, which we offer by that name
        ours["log_prob"] = quadratic
    return ours


def step_weights(case: Any) -> dict[str, Any] | None:
    """Steps of a linear rate, weights of steps and losses under them, UniGRPO's ratio."""
    params, kind = case.params, case.variant.split("_")
    clip = {"eps_low": params.get("clip", 0.0), "eps_high": params.get("clip", 0.0)}
    if kind[0] == "unigrpo":
        return _unigrpo(case, clip)
    if kind[:2] == ["flash", "loss"]:
        weight = case.tensor("coefficient") / case.tensor("coefficient").mean()
        return {"weights": weight, **_weighted(case, weight, clip)}
    if params.get("sigma_min", 0.0) or ("sigmas" in case.inputs and case.inputs["sigmas"][-1]):
        return None
    if kind[:2] == ["flash", "step"]:
        sizes = {"noise_level": 1.0, "sigma_max": params["sigma_max"]}
        levels = case.tensor("sigma"), case.tensor("sigma_next")
        coefficient = Kernel(schedule="linear", **sizes).step_weight("inverse_gradient", *levels)
        ours = sde_steps(replace(case, params={"kind": "linear", "dtype": "float64", **sizes}))
        return {"coefficient": coefficient, **(ours or {})}
    sigmas, index = case.tensor("sigmas"), case.inputs["step_index"]
    levels, second = (sigmas[:-1], sigmas[1:]), float(sigmas[1])
    if kind[0] == "tempflow":
        kernel = Kernel(schedule="flow", noise_level=params["noise_level"], sigma_max=second)
        weight = params["weight_scale"] * kernel.step_weight("std", *levels)[index]
        return {"weights": weight, **_weighted(case, weight, clip)}
    kernel = Kernel(schedule="linear", noise_level=params["eta"], sigma_max=second)
    coefficient = kernel.step_weight("inverse_gradient", *levels)
    return {"coefficient": coefficient[index], "weights": (coefficient / coefficient[params["pool"]].mean())[index]}


def _weighted(case: Any, weight: torch.Tensor, clip: dict[str, float]) -> dict[str, Any]:
    limit, log_prob = case.params["adv_clip_max"], case.tensor("log_prob").requires_grad_()
    ratio = log_ratio(log_prob, case.tensor("old_log_prob"))
    loss = (weight * ppo_clip(ratio, case.tensor("advantages").clamp(-limit, limit), **clip)).mean()
    return {"loss": loss, "grad_log_prob": torch.autograd.grad(loss, log_prob)[0]}


def _unigrpo(case: Any, clip: dict[str, float]) -> dict[str, Any]:
    """GRPO-Guard's ratio, its steps' weights over their mean, and the KL of velocities."""
    params, shape = case.params, case.tensor("model_output").shape[:2]
    kernel = Kernel(schedule="flow", noise_level=params["noise_level"], sigma_max=params["sigma_max"])
    x, x_next, v, old, ref = (
        case.tensor(name).flatten(0, 1)
        for name in ("sample", "prev_sample", "model_output", "old_model_output", "ref_model_output")
    )
    sigma, sigma_next = (case.tensor(name).repeat(shape[0]) for name in ("sigma", "sigma_next"))
    step, before = kernel.step(x, v.requires_grad_(), sigma, sigma_next), kernel.step(x, old, sigma, sigma_next)
    noise = (x_next - before.mean) / before.std.view(-1, *[1] * (x.ndim - 1))
    normed = guard_log_ratio(noise, step.mean, before.mean)
    weight = torch.ones_like(sigma)
    if params["grad_reweight"]:
        weight = kernel.step_weight("inverse_dt", sigma, sigma_next)
        weight = weight / weight.mean()
    advantage = case.tensor("advantages").repeat_interleave(shape[1])
    policy, distance = (weight * ppo_clip(normed, advantage, **clip)).mean(), velocity_kl(v, ref).mean()
    loss = policy + params["mse_weight"] * distance
    gradient = torch.autograd.grad(loss, v)[0].unflatten(0, shape)
    outputs = {"log_ratio_normed": normed.view(shape), "policy_loss": policy, "velocity_mse": distance, "loss": loss}
    outputs |= {"log_prob": step.log_prob(x_next).view(shape), "old_log_prob": before.log_prob(x_next).view(shape)}
    return outputs | {"grad_model_output": gradient}


def precise_steps(case: Any) -> dict[str, Any] | None:
    """Steps as above with |∂μ/∂v|, or the variances of a chain of them on Gaussian data with the exact velocity."""
    if "data_std" not in case.params:
        ours = sde_steps(case)
        if ours and "abs_dmean_dv" in case.expected:
            names = ("sample", "sigma", "sigma_next")
            x, sigma, sigma_next = (case.tensor(name) for name in names)
            kernel = Kernel(schedule=case.params["kind"], noise_level=case.params["noise_level"])
            v = torch.zeros_like(x).requires_grad_()
            (slope,) = torch.autograd.grad(kernel.step(x, v, sigma, sigma_next).mean.sum(), v)
            ours["abs_dmean_dv"] = slope.flatten(1)[:, 0].abs()
        return ours
    schedule = str(case.params["kind"]).replace("ode", "none")
    kernel = Kernel(schedule=schedule, **{name: case.params[name] for name in ("noise_level", "sigma_max")})
    spread, sigmas, one = case.params["data_std"] ** 2, case.tensor("sigmas"), torch.ones(1, 1, dtype=torch.float64)
    factors, stds, variance = [], [], [1.0]
    for sigma, sigma_next in pairwise(sigmas):
        v = (sigma - (1 - sigma) * spread) / ((1 - sigma) ** 2 * spread + sigma**2)
        step = kernel.step(one, one * v, sigma, sigma_next)
        factors.append(float(step.mean))
        stds.append(float(step.std))
        variance.append(factors[-1] ** 2 * variance[-1] + stds[-1] ** 2)
    return {"mean_factor": factors, "std": stds, "variance": variance, "ratio": variance[-1] / spread}


def ddim_steps(case: Any) -> dict[str, Any] | None:
    """DDIM with η: the peer's latents are ours divided by n = √((1 − σ)² + σ²)."""
    kind = {"epsilon": "epsilon", "v_prediction": "v"}.get(case.params.get("prediction_type"))
    if kind is None or "eta" not in case.params:
        return None
    alpha, alpha_next = (case.tensor(n).reshape(-1) for n in ("alpha_cumprod", "alpha_cumprod_prev"))
    sigma, sigma_next = flow_sigma(alpha), flow_sigma(alpha_next)
    x, x_next = (case.tensor(name) for name in ("sample", "prev_sample"))
    ones = [1] * (x.ndim - 1)
    size, size_next = (preserving_scale(level).reshape(-1, *ones) for level in (sigma, sigma_next))
    output = case.tensor("model_output").requires_grad_()
    levels = [level.expand(len(x)) for level in (sigma, sigma_next)]
    v = velocity_of_prediction(output, x * size, levels[0], kind)  # type: ignore[arg-type]
    transition = Kernel(schedule="ddim", noise_level=case.params["eta"]).step(x * size, v, *levels)
    outputs: dict[str, Any] = {"mean_float64": transition.mean / size_next}
    outputs["std"] = (transition.std / size_next.flatten())[0]
    if bool((transition.std > 0).all()):
        log_prob = transition.log_prob(x_next * size_next) + size_next.flatten().log()
        outputs |= {"log_prob": log_prob, "grad_model_output": torch.autograd.grad(log_prob.sum(), output)[0]}
    return outputs


def windows(case: Any) -> dict[str, Any] | None:
    """MixGRPO's windows; the peer's known error, a turn at an empty window (for good where it does not begin
    anew), is put in here."""
    params = case.params
    if case.variant == "mixgrpo_window_random":
        size, steps = params["group_size"], params["max_timesteps"]
        draws = (np.random.default_rng(seed) for seed in case.inputs["seeds"])
        return {"start": [window_steps(steps, size, 0, order="random", draw=draw)[0] for draw in draws]}
    order: Any = params.get("sample_strategy", "progressive")
    if not case.variant.startswith("mixgrpo_window") or order not in ("progressive", "decay", "exp_decay"):
        return None
    size, steps, every = (params[name] for name in ("group_size", "max_timesteps", "iters_per_group"))
    roll_back = params.get("roll_back", False)
    every = params.get("max_iters_per_group", every) if order == "decay" else every
    more: Any = {
        "order": order,
        "every": every,
        "stride": params.get("prog_overlap_step", 1) if params.get("prog_overlap") else size,
        "least": params.get("min_iters_per_group"),
        "threshold": params.get("exp_decay_thre_timestep", 13),
        "rate": params.get("exp_decay_k", 0.1),
    }

    def stay(start: int) -> int:
        if order == "decay":
            return more["least"] or max(1, every // 4)
        late = max(0, start - more["threshold"]) if order == "exp_decay" else 0
        return math.ceil(every * math.exp(-more["rate"] * late))

    turn = [window_steps(steps, size, i, **more) for i in range(case.inputs["iterations"])]
    own = next((i for i in range(1, len(turn)) if turn[i][0] < turn[i - 1][0]), len(turn))
    runs: list[list[int]] = []
    for iteration in range(case.inputs["iterations"]):
        at = iteration % (own + stay(steps)) if roll_back else iteration
        window = [turn[at][0], turn[at][-1] + 1] if at < own else [steps, steps]
        if runs and runs[-1][:2] == window:
            runs[-1][2] += 1
        else:
            runs.append([*window, 1])
    return {"runs_start_stop_length": runs}


def tolerance(case: Any, key: str) -> tuple[float, float, str] | None:
    """Float32 peers: see the README of the golden folder."""
    if key.startswith("log_prob"):
        return 2e-3, 1e-5, "element"
    if key.startswith("grad_"):
        return 5e-3, 1e-7, "largest"
    return 1e-4, 1e-6, "largest"


FAMILIES = {"E_sigma_tables": sigma_tables, "E_sde_steps": sde_steps, "E_ddim_steps": ddim_steps}
FAMILIES |= {"E_windows_steps": windows, "L_precise_steps": precise_steps, "L_step_weights": step_weights}
TOLERANCES = {"E_sigma_tables": lambda case, key: (1e-6, 1e-7, "largest"), "E_sde_steps": tolerance}
TOLERANCES["E_ddim_steps"] = tolerance
