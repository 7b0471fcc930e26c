# SPDX-License-Identifier: Apache-2.0
"""Golden family of log-probs and entropies, from logits and from hidden states with a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.golden_families import Outputs
from visalign.core.tokens.fused_head import fused_log_prob_entropy, log_prob_entropy

SIZES = {"N", "H", "V", "B", "T", "shape", "dtype"}
SCALES = {"temperature", "soft_cap"}
HEAD = {"hidden", "weight", "bias", "ids", "cot_logp", "cot_entropy"}


def _logprob_entropy(case: Any) -> Outputs | None:
    """By the inputs: logits, or hidden states with a head; anything else in the case is not ours."""
    names = set(case.inputs)
    if set(case.params) - SIZES - SCALES:
        return None
    scales = {key: case.params[key] for key in SCALES & set(case.params)}
    if {"logits", "ids"} <= names <= {"logits", "ids", "cot"}:
        return _from_logits(case, scales)
    if {"hidden", "weight", "ids"} <= names <= HEAD:
        return _from_hidden(case, scales)
    return None


def _from_logits(case: Any, scales: Mapping[str, Any]) -> Outputs:
    logits = case.tensor("logits").requires_grad_()
    result = log_prob_entropy(logits, case.tensor("ids", torch.long), **scales)
    ours = {"logp": result.log_prob, "entropy": result.entropy, "sum_p2": result.sum_p2}
    ours |= {"verl_logp": result.log_prob, "verl_entropy": result.entropy}
    if "cot" in case.inputs:
        (ours["grad_logits"],) = torch.autograd.grad(result.log_prob, logits, case.tensor("cot"))
    return ours


def _from_hidden(case: Any, scales: Mapping[str, Any]) -> Outputs:
    ours = _head(case, torch.float64, scales)
    single = _head(case, torch.float32, scales)
    for peer in ("trl_chunked", "verl_fused"):
        ours |= {f"{peer}_{key}_fp32": value for key, value in single.items()}
    return ours


def _head(case: Any, dtype: torch.dtype, scales: Mapping[str, Any]) -> dict[str, Tensor]:
    """Values, gradients of each output's cotangent, and of both together."""
    leaves = {
        name: case.tensor(name, dtype).requires_grad_()
        for name in HEAD & {"hidden", "weight", "bias"} & set(case.inputs)
    }
    result = fused_log_prob_entropy(
        leaves["hidden"],
        leaves["weight"],
        case.tensor("ids", torch.long),
        head_bias=leaves.get("bias"),
        sum_p2=True,
        tile=(24, 64),
        **scales,
    )
    assert result.sum_p2 is not None
    values = {"logp": result.log_prob, "entropy": result.entropy}
    upstream = {key: case.tensor(f"cot_{key}", dtype) for key in values if f"cot_{key}" in case.inputs}
    sums = {f"_from_{key}": (values[key] * cotangent).sum() for key, cotangent in upstream.items()}
    if sums:
        sums[""] = torch.stack(list(sums.values())).sum()
    outputs = {**values, "sum_p2": result.sum_p2}
    for source, total in sums.items():
        grads = torch.autograd.grad(total, list(leaves.values()), retain_graph=True)
        outputs |= {f"grad_{name}{source}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {key: value.detach() for key, value in outputs.items()}


def _tolerance(case: Any, key: str) -> tuple[float, float, str]:
    """Float64 arrays 1e-8; the peers' float32 arrays 1e-4 of the largest element."""
    return (1e-4, 1e-4, "largest") if key.endswith("_fp32") else (1e-8, 1e-8, "element")


FAMILIES: Mapping[str, Callable[[Any], Outputs | None]] = {"D_logprob_entropy": _logprob_entropy}
TOLERANCES = {"D_logprob_entropy": _tolerance}
