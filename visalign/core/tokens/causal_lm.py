# SPDX-License-Identifier: Apache-2.0
"""Log-prob of each token from a causal language model, token ids and a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from visalign.core.checks import check_axes

from .fused_head import LogProbEntropy, log_prob_entropy


def token_log_probs(
    model: Callable[..., Any],
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    **inputs: Any,
) -> LogProbEntropy:
    """Compute log π(id_t | id_<t) and entropy [B, T] of each token of a batch, aligned with the ids, differentiable.

    The logits before a token, z_{t−1}, are its distribution: log p = log softmax(z_{t−1}/τ)[id_t]. They are held for
    all present tokens; if they do not fit, give the last hidden states to `fused_log_prob_entropy`. Results are 0 with
    exactly zero gradient at padding and at a row's first token, which nothing predicts. Prompts have log-probs too:
    `Trajectories.weight` is 0 there.

    `model` is called as model(input_ids=ids, attention_mask=mask, **inputs) and returns logits [B, T, V], or an object
    with `logits`; `soft_cap` is one that it has not applied itself. `ids` may be padded on either side (`mask` 0, any
    id); rows padded on the left get `position_ids` from 0 on, unless `inputs` has them.
    """
    check_axes(ids=(ids, "B T"), mask=(mask, "B T"))
    present = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    if "position_ids" not in inputs and not bool(present[:, :1].all()):
        inputs = {**inputs, "position_ids": (present.long().cumsum(1) - 1).clamp(min=0)}
    output = model(input_ids=ids, attention_mask=present.long() if mask is None else mask, **inputs)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None or logits.shape[:2] != ids.shape:
        got = type(output).__name__ if logits is None else f"logits {tuple(logits.shape)}"
        raise ValueError(f"the model must give logits [B, T, V] for ids {tuple(ids.shape)}; got {got}.")
    predicted = present[:, 1:] & present[:, :-1]
    tokens = log_prob_entropy(
        logits[:, :-1][predicted], ids[:, 1:][predicted], temperature=temperature, soft_cap=soft_cap
    )
    positions = pad(predicted, (1, 0))

    def unpack(values: Tensor | None) -> Tensor:
        assert values is not None
        return values.new_zeros(ids.shape).masked_scatter(positions, values)

    return LogProbEntropy(unpack(tokens.log_prob), unpack(tokens.entropy), unpack(tokens.sum_p2))
