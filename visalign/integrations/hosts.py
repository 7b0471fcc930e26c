# SPDX-License-Identifier: Apache-2.0
"""Shared by the host plugins: finding hosts, and the inputs that an algorithm needs from one."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from visalign.core import NAMED, Objective, check_decisions
from visalign.core.objective.entropy_stage import remembers

INSTALL = {
    "verl": "verl 0.9.1 was tested: python -m pip install verl==0.9.1",
    "trl": "TRL 1.16.0 was tested: python -m pip install trl==1.16.0",
    "flow_factory": "it is installed from github.com/X-GenGroup/Flow-Factory",
    "unirl": "it is installed from github.com/Tencent-Hunyuan/UniRL",
}
"""Package of a host -> where it comes from."""


def host(module: str) -> Any:
    """Import a module of a host; where that is not installed, the error says where it comes from."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"visalign.integrations.{package} works inside {package}, which is not installed here; "
            f"{INSTALL[package]}.",
            name=package,
        ) from error


def required_inputs(objective: Objective) -> dict[str, str]:
    """Field of `Trajectories` or `PolicyOutput` besides tokens, groups, rewards -> the choice that needs it."""
    o = objective
    needs = {**o.output_needs(), **o.trajectory_needs()}
    if o.kl:
        needs["ref_log_prob"] = f"kl={o.kl:g}"
    if {"low_end", "high_end"} & o.selection_options.keys():
        needs["iteration"] = f"selection={o.selection!r}"
    if (name := remembers(o)) is not None:
        needs["entropy_before"] = repr(name)
    if o.surrogate_options.get("divergence") == "exact":
        needs["divergence"] = "divergence='exact'"
    return needs


def refuse_what_is_missing(name: str, objective: Objective, available: Collection[str], where: str) -> None:
    """Raise if an algorithm means nothing on tokens, or needs a field that a host (`where`) does not have."""
    check_decisions(objective, "tokens", name=name)
    for field, choice in required_inputs(objective).items():
        if field not in available:
            raise ValueError(
                f"the objective {name!r} has {choice}, which needs {field}, and {where} has none. Take another row "
                f"({', '.join(fitting(available))}), or a trainer of visalign."
            )


def fitting(available: Collection[str]) -> list[str]:
    """Return the rows of tokens that need no field but the `available`."""
    rows = {name: row for name, row in NAMED.items() if row.decisions != "denoising_steps"}
    return [name for name, row in rows.items() if required_inputs(row).keys() <= set(available)]
