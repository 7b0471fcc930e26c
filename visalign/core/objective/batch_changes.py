# SPDX-License-Identifier: Apache-2.0
"""Changes of a batch that must not change a loss: other samples' order, copies, and padding with NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from .data import PolicyOutput, Trajectories

PER_DECISION = (
    "old_log_prob",
    "process_reward",
    "ref_log_prob",
    "rollout_log_prob",
    "value",
    "entropy",
    "expected_score",
    "nucleus_entropy",
    "loss_weight",
)
PER_SAMPLE = (
    "reward",
    "greedy_reward",
    "reference_reward",
    "likelihood",
    "metric",
    "rank",
    "valid",
    "advantage",
    "bundle",
)
POLICY_PER_DECISION = ("log_prob", "entropy", "nucleus_entropy", "value", "kl", "divergence")


def labels(t: Trajectories) -> list[object]:
    """The group labels as a list."""
    return list(t.group.tolist()) if isinstance(t.group, Tensor) else list(t.group)


def _per_sample(t: Trajectories, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Every tensor with a row per sample, changed."""
    names = (f.name for f in fields(t) if f.name not in ("ptx_weight", "group"))
    held = {name: getattr(t, name) for name in names}
    return {name: change(value) for name, value in held.items() if isinstance(value, Tensor)}


def take_samples(t: Trajectories, index: Tensor) -> Trajectories:
    """The samples `index`, which may repeat."""
    names = labels(t)
    return replace(t, **_per_sample(t, lambda v: v[index]), group=[names[i] for i in index.tolist()])


def take_outputs(policy: PolicyOutput, index: Tensor, *, first: bool = True) -> PolicyOutput:
    """Rows of the policy's numbers; the pretraining tokens go to one part."""
    taken = {}
    for f in fields(policy):
        value = getattr(policy, f.name)
        if value is None:
            continue
        whole = f.name.startswith("ptx")
        taken[f.name] = (value if first else value[:0]) if whole else value[index]
    return PolicyOutput(**taken)


def _frame(value: Tensor, left: int, right: int, below: int, fill: float) -> Tensor:
    """[B, T] -> [B + below, left + T + right], the new places filled."""
    made = value.new_full((value.shape[0] + below, left + value.shape[1] + right), fill)
    made[: value.shape[0], left : left + value.shape[1]] = value
    return made


def pad_samples(t: Trajectories, left: int, right: int, below: int) -> Trajectories:
    """Absent decisions on both sides and `below` absent samples; whatever is absent is NaN."""
    nan = float("nan")
    absent = t.weight == 0
    new: dict[str, object] = {"weight": _frame(t.weight, left, right, below, 0.0)}
    for name in PER_DECISION:
        value = getattr(t, name)
        if value is not None:
            new[name] = _frame(value.masked_fill(absent, nan), left, right, below, nan)
    for name, fill in (("uniform", 0.5), ("step", -1)):
        value = getattr(t, name)
        if value is not None:
            new[name] = _frame(value, left, right, below, fill)
    for name in PER_SAMPLE:
        value = getattr(t, name)
        if value is None:
            continue
        if name == "advantage" and value.ndim == 2:
            new[name] = _frame(value.masked_fill(absent, nan), left, right, below, nan)
        else:
            filler = value.new_full((below, *value.shape[1:]), {"valid": 0, "bundle": -1}.get(name, nan))
            new[name] = torch.cat([value, filler])
    return replace(t, **new, group=[*labels(t), *(("absent", i) for i in range(below))])  # type: ignore[arg-type]


def pad_outputs(policy: PolicyOutput, weight: Tensor, left: int, right: int, below: int) -> PolicyOutput:
    """The policy's numbers for `pad_samples` of trajectories with these weights."""
    new = {}
    for name in POLICY_PER_DECISION:
        value = getattr(policy, name)
        if value is not None:
            new[name] = _frame(value.masked_fill(weight == 0, float("nan")), left, right, below, float("nan"))
    if policy.log_z is not None:
        new["log_z"] = torch.cat([policy.log_z, policy.log_z.new_zeros(below)])
    return replace(policy, **new)
