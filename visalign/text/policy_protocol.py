# SPDX-License-Identifier: Apache-2.0
"""Protocol of a text policy: the methods that algorithms call on a language model, and its own log-probs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from .distribution import Sampling
from .rollout import Prompt, TextRollout
from .stopping import StoppingCriteria

Distribution = Literal["sampled", "full"]
"""Distribution of the log-probs: the one that was sampled (temperature, top-k, top-p), or the full vocabulary
at the temperature. Without top-k and top-p the two are equal."""


@dataclass(frozen=True, kw_only=True)
class TokenOutput:
    """Per-token outputs of a policy on b completions; 0 where the rollout's loss mask is 0."""

    log_prob: Tensor  # [b, T] float32 log π of the drawn tokens, differentiable
    entropy: Tensor  # [b, T] float32 nats, differentiable
    statistic: Tensor | None = None
    """[b, T] float32, differentiable, the requested statistic of each token's distribution."""
    value: Tensor | None = None
    """[b, T] float32 V of the state before each token, differentiable; only with a value head."""


@runtime_checkable
class TextPolicy(Protocol):
    """Language model that the algorithms train."""

    @property
    def module(self) -> torch.nn.Module:
        """Trained network."""
        ...

    @property
    def device(self) -> torch.device: ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: int | Sequence[int],
        num_generations: int = 1,
        sampling: Sampling | None = None,
        stopping: StoppingCriteria | None = None,
        group: Sequence[Hashable] | None = None,
        images: Sequence[Sequence[Any]] | None = None,
    ) -> TextRollout:
        """Complete P prompts G times each: B = P·G samples, those of a prompt next to each other.

        `seeds` is one or B; `group` labels the prompts, 0 to P − 1; `images` are P lists.
        """
        ...

    def log_probs(
        self,
        rollout: TextRollout,
        rows: Tensor | slice | None = None,
        *,
        distribution: Distribution = "sampled",
        statistic: Callable[[Tensor], Tensor] | None = None,
    ) -> TokenOutput:
        """Compute log-prob and entropy of the tokens, differentiable unless gradients are off; rows None is all.

        `statistic` maps [n, V] log-probs to [n], called on chunks.
        """
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Return a context in which the policy is the model before training."""
        ...

    def trainable_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return names and parameters that the optimizer updates, in a fixed order."""
        ...

    def save(self, folder: Path) -> None:
        """Write the trained weights in the format of the model's library."""
        ...


def model_log_prob(policy: TextPolicy, rollout: TextRollout, rows: Tensor | slice | None = None) -> Tensor:
    """Compute log π(y_t | y_<t) [b, T] at temperature 1, full vocabulary, own routing; 0 where the loss mask is 0."""
    return policy.log_probs(replace(rollout, sampling=Sampling(), kept=None, routes=None), rows).log_prob


@torch.no_grad()
def reference_log_prob(policy: TextPolicy, rollout: TextRollout, *, reference: TextPolicy | None = None) -> Tensor:
    """Compute `model_log_prob` [B, T] of the reference: another model, or `policy.reference()`."""
    if reference is not None:
        return model_log_prob(reference, rollout)
    with policy.reference():
        return model_log_prob(policy, rollout)
