# SPDX-License-Identifier: Apache-2.0
"""What a vision-language judge replies to requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AnswerLogits:
    """What a model would say next, for B requests."""

    logits: Tensor
    """[B, K] float32 of the asked-for tokens; NaN where there is a reason."""
    log_total: Tensor | None
    """[B] float32 logsumexp over the whole vocabulary; None where it was not asked for."""
    reasons: list[str | None]
    """Why a request could not be judged; None for the others."""


@dataclass(frozen=True)
class HiddenStates:
    """Last hidden states of B requests."""

    states: Tensor
    """[B, H] float32; NaN where there is a reason."""
    reasons: list[str | None]
    """Why a request could not be judged; None for the others."""
