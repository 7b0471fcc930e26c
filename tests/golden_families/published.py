# SPDX-License-Identifier: Apache-2.0
"""Golden families of released diffusion trainers: AWM, advantages of groups and trees, Flow-GRPO's filter, Flash.

Known deviations, so no outputs here: AWM's KL weighted as in the ELBO; the trimmed groups of MixGRPO; BranchGRPO's
weights by edge probabilities; DPM-Solver++ of order 3 and Heun's form; the points that the released Flash takes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from tests.golden_families import Outputs
from visalign.core import PolicyOutput, Trajectories, group_advantages, named_objective, velocity_kl
from visalign.core.advantages.combine import gdpo_advantages, normalise_then_sum
from visalign.core.regression.rows import PairOutput, named_regression
from visalign.core.rewards.steps import branch_advantages, branch_rewards
from visalign.flow import timestep_sigmas
from visalign.flow.rollout import visited_steps
from visalign.flow.transitions import ODESolver

_WEIGHTING = {"t": "t", "t**2": "x0", "huber": "huber", "ghuber": "ghuber"}


def awm(case: Any) -> Outputs | None:
    """Signal, log-probs, ratio and losses; or the advantages of the tracker."""
    params = case.params
    clip: dict[str, Any] = {"clamp": float(params["adv_clip_max"]), "clamp_to": params["advantage_max"]}
    if "groups" in case.inputs:
        options = {"scale": "batch" if params["global_std"] else "group", "ddof": 0, "eps": params["eps"]}
        row, reward, group = named_regression("awm", signal_options=options, **clip), case.tensor("rewards"), []
        group = case.inputs["groups"]
        return {"signal": row.prepare(reward, group)[0], "advantages": group_advantages(reward, group, **options)}
    options = {"eps_low": params["clip_range"], "eps_high": params["clip_range"]}
    kl: dict[str, Any] = {"kl": params["beta"], "average_kl": params["ema_beta"]}
    row = named_regression(
        "awm", weighting=_WEIGHTING[params["weighting"]], loss_options=options, signal="reward", **clip, **kl
    )
    v, shape = case.tensor("model_output").requires_grad_(), case.tensor("timesteps").shape
    target = (case.tensor("noise") - case.tensor("clean_latents")).flatten(0, 1)
    old, ref, average = (case.tensor(f"{name}_model_output").flatten(0, 1) for name in ("old", "ref", "ema"))
    sigma, flat = case.tensor("timesteps").flatten(), v.flatten(0, 1)
    single = row.prepare(case.tensor("advantages"), list(range(shape[1])))[0]
    pairs = PairOutput(v=flat, target=target, sigma=sigma, anchor=old)
    error, old_error, _ = row.errors(pairs)
    result = {"signal": single, "log_prob": -error.view(shape), "old_log_prob": -old_error.view(shape)}
    policy = row.pair_loss(pairs, single.expand(shape).flatten()).mean()
    result |= {"ratio": (old_error - error).exp(), "policy_loss": policy}
    if params["kl_weight"] != "Uniform":
        return result
    kl_loss, pull = (velocity_kl(flat, other).mean() for other in (ref, average))
    loss = policy + row.kl * kl_loss + row.average_kl * pull
    gradient = torch.autograd.grad(loss, v)[0]
    return result | {"kl_loss": kl_loss, "ema_kl_loss": pull, "loss": loss, "grad_model_output": gradient}


def groups(case: Any) -> Outputs | None:
    """Advantages with ddof 1 and eps 1e-8, of one reward and of two."""
    params, rewards = case.params, case.inputs.get("rewards")
    if params.get("trimmed_ratio"):
        return None
    options: dict[str, Any] = {"ddof": params["ddof"], "eps": params["eps"]}
    dtype = torch.float32 if params["dtype"] == "float32" else torch.float64
    if "bestofn" in params:
        columns = {name: torch.tensor(case.inputs[f"{name}_rewards"], dtype=dtype) for name in ("vq", "mq")}
        return {f"{k}_advantages": group_advantages(v, [0] * len(v), **options) for k, v in columns.items()}
    columns = rewards if isinstance(rewards, dict) else {"a": rewards}
    matrix = torch.tensor(list(columns.values()), dtype=dtype).T
    group = [i // params.get("num_generations", len(matrix)) for i in range(len(matrix))]
    if len(columns) == 1:
        weight = params.get("weights", {}).get("a", 1.0)
        return {"advantages": weight * group_advantages(matrix[:, 0], group, **options)}
    combine = gdpo_advantages if params["apply_gdpo"] else normalise_then_sum
    return {"advantages": combine(matrix, list(params["weights"].values()), group, **options)}


def tree(case: Any) -> Outputs | None:
    """Rewards and advantages of the nodes; a column of `node` is a depth, a row a leaf."""
    if case.params["prob_weighted"]:
        return None
    parent, leaves = case.inputs["parent"], dict(case.inputs["leaf_rewards"])
    paths = []
    for leaf in leaves:
        path = [int(leaf)]
        while parent[path[0]] >= 0:
            path.insert(0, parent[path[0]])
        paths.append(path)
    name = torch.tensor(paths)
    first = (name[:, None, :] == name[None, :, :]).double().argmax(1)
    reward = torch.tensor(list(leaves.values()), dtype=torch.float64)
    values = branch_rewards(reward, first), branch_advantages(reward, first, [0] * len(paths))
    size = len(parent)
    flat = [torch.zeros(size, dtype=torch.float64).scatter(0, name.flatten(), v.flatten()) for v in values]
    depth = torch.zeros(size, dtype=torch.int64)
    depth = depth.scatter(0, name.flatten(), torch.arange(name.shape[1]).expand_as(name).flatten())
    return {"node_reward": flat[0], "advantages": flat[1], "depth": depth}


def zero_signal(case: Any) -> Outputs:
    """Loss and gradient over what the filter keeps; samples that it adds by chance count, so none is dropped then."""
    added = case.inputs.get("zero_signal_kept") or []
    log_prob, advantage = case.tensor("log_prob").requires_grad_(), case.tensor("advantages")
    signal = (advantage != 0).any(1)
    weight = torch.ones_like(advantage)
    if added:
        weight[[i for i in range(len(weight)) if not signal[i] and i not in added]] = 0
    clip = {"eps_low": case.params["clip"], "eps_high": case.params["clip"]}
    changes: dict[str, Any] = {"kl": 0.0, "surrogate_options": clip, "advantage_clamp": case.params["adv_clip_max"]}
    row = named_objective("flow_grpo", advantage="given", advantage_options={}, drop_zero_signal=not added, **changes)
    trajectories = Trajectories(
        weight=weight,
        old_log_prob=case.tensor("old_log_prob"),
        group=list(range(len(weight))),
        advantage=advantage,
        decisions="denoising_steps",
    )
    prepared = row.prepare(trajectories)
    loss = row.loss(prepared, PolicyOutput(log_prob=log_prob)).total
    mask = (prepared.weight != 0).any(1)
    result = {"mask": mask.tolist(), "kept": mask.nonzero()[:, 0].tolist(), "loss": loss}
    unfiltered = replace(row, drop_zero_signal=False)
    prepared = unfiltered.prepare(replace(trajectories, weight=torch.ones_like(advantage)))
    result["loss_over_all"] = unfiltered.loss(prepared, PolicyOutput(log_prob=log_prob)).total
    return result | {"grad_log_prob": torch.autograd.grad(loss, log_prob)[0]}


def flash(case: Any) -> Outputs | None:
    """The steps after the window, along the peer's own noise levels; order 1 is a solver without history."""
    params = case.params
    if params["order"] > 2 or params["solver_type"] != "midpoint":
        return None
    levels = [torch.tensor(sigma, dtype=torch.float64) for sigma in case.inputs["sigmas_after"]]
    if "outputs_paper" in case.record:  # the peer ends at a level above 0
        begin = params["window"][1]
        visited = visited_steps(params["steps"], range(*params["window"]), params["compression"])
        sigmas = timestep_sigmas(params["steps"], shift=params["shift"])[visited[visited.index(begin) :]]
        return {"sigmas_after": sigmas, "post_steps": len(sigmas) - 1}
    x, solver = case.tensor("sample"), ODESolver("dpmpp_2m")
    before = [torch.tensor(sigma, dtype=torch.float64) for sigma in case.inputs["history_sigmas"]]
    window = itertools.pairwise([*before, levels[0]])
    for (sigma, sigma_next), clean in zip(window, case.inputs["history_clean"], strict=True):
        velocity = -torch.tensor(clean, dtype=torch.float64) / sigma  # of the state 0, whose x̂0 is −σ v
        solver.observe(torch.zeros_like(velocity), velocity, sigma, sigma_next)
    states = []
    for sigma, sigma_next, v in zip(levels, levels[1:], case.inputs["model_outputs"], strict=False):
        solver = ODESolver("dpmpp_2m") if params["order"] == 1 else solver
        x = solver.step(x, torch.tensor(v, dtype=torch.float64), sigma, sigma_next)
        states.append(x)
    return {"latents_after": torch.stack(states), "post_steps": len(states)}


def tolerance(case: Any, key: str) -> tuple[float, float, str] | None:
    """The trainer's noise levels are float32."""
    return (1e-6, 1e-7, "element") if key == "sigmas_after" else None


FAMILIES = {
    "L_awm_published": awm,
    "L_group_advantages": groups,
    "L_tree_advantages": tree,
    "L_zero_signal": zero_signal,
    "L_flash_steps": flash,
}
TOLERANCES = {"L_flash_steps": tolerance}
