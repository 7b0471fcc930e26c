# SPDX-License-Identifier: Apache-2.0
"""Plug-ins of the golden runner, one file per wing; their contract opens `tests/golden_runner.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Outputs = dict[str, Any]
Row = tuple[str, Callable[[Any], Outputs | None], tuple[str, ...], tuple[str, ...]]
"""Pattern of the whole variant name, function, parameters and inputs that a case must have."""


def family(rows: tuple[Row, ...], *, exact: bool = False) -> Callable[[Any], Outputs | None]:
    """The first row that fits the case; with `exact`, the case has no other parameter, and "?" marks optional ones."""

    def run(case: Any) -> Outputs | None:
        names = set(case.params)
        for pattern, function, params, inputs in rows:
            needed = {name for name in params if name[0] != "?"}
            fits = needed <= names and (not exact or names <= {name.removeprefix("?") for name in params})
            if fits and set(inputs) <= set(case.inputs) and re.fullmatch(pattern, case.variant):
                return function(case)
        return None

    return run


def gradients(loss: Tensor, **leaves: Tensor) -> Outputs:
    """The loss and grad_<name> of each leaf."""
    slopes = torch.autograd.grad(loss, list(leaves.values()))
    return {"loss": loss, **{f"grad_{name}": slope for name, slope in zip(leaves, slopes, strict=True)}}
