# SPDX-License-Identifier: Apache-2.0
"""Golden families of visalign.flow: sigma tables and stochastic steps (both frozen in float32)."""

from __future__ import annotations

from typing import Any

import torch

from visalign.flow import Kernel, diffusers_time_grid, time_grid

_GRIDS = ("diffusers", "plain")
_SCHEDULES = {
    "flow": "flow",
    "Flow-SDE": "flow",
    "dance": "dance",
    "Dance-SDE": "dance",
    "cps": "cps",
    "CPS": "cps",
}
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
        sigmas = diffusers_time_grid(params["steps"], shift=params["shift"], num_train_timesteps=train)
    else:
        sigmas = time_grid(params["steps"], shift=params["shift"])
    return {"sigmas": sigmas, "timesteps": sigmas[:-1] * train}


def sde_steps(case: Any) -> dict[str, Any] | None:
    """Mean, total std, log-prob (mean over elements) and its gradient for a given next sample."""
    params = case.params
    if params.get("kind") not in _SCHEDULES or set(params) - _KNOWN_STEP:
        return None
    schedule = _SCHEDULES[params["kind"]]
    if schedule == "flow" and "sigma_max" not in params:
        return None
    kernel = Kernel(
        schedule=schedule,
        noise_level=params["noise_level"],
        sigma_max=params.get("sigma_max", 0.0),
        log_prob_reduction="mean",
    )
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


def tolerance(case: Any, key: str) -> tuple[float, float, str] | None:
    """Float32 peers: see the README of the golden folder."""
    if key.startswith("log_prob"):
        return 2e-3, 1e-5, "element"
    if key.startswith("grad_"):
        return 5e-3, 1e-7, "largest"
    return 1e-4, 1e-6, "largest"


FAMILIES = {"E_sigma_tables": sigma_tables, "E_sde_steps": sde_steps}
TOLERANCES = {"E_sigma_tables": lambda case, key: (1e-6, 1e-7, "largest"), "E_sde_steps": tolerance}
