# SPDX-License-Identifier: Apache-2.0
"""The contract of a text policy: what algorithms ask of a language model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from .distribution import Sampling
from .rollout import Prompt, TextRollout
from .stopping import StoppingCriteria

Distribution = Literal["sampled", "full"]
"""Whose log-probs: the distribution that was sampled (temperature, top-k, top-p), or the full vocabulary at
the temperature. The two are one without top-k and top-p."""


@dataclass(frozen=True, kw_only=True)
class TokenOutput:
    """What a policy says of b completions; 0 where the rollout's loss mask is 0."""

    log_prob: Tensor
    """[b, T] float32 log π of the drawn tokens, differentiable."""
    entropy: Tensor
    """[b, T] float32 nats, differentiable."""
    statistic: Tensor | None = None
    """[b, T] float32, differentiable, of each token's distribution; only where one was asked for."""
    value: Tensor | None = None
    """[b, T] float32 V of the state before each token, differentiable; only with a value head."""


@runtime_checkable
class TextPolicy(Protocol):
    """A language model as the algorithms see it."""

    @property
    def module(self) -> torch.nn.Module:
        """The network that is trained."""
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
        """Complete P prompts G times each: B = P·G samples, the samples of a prompt next to each other.

        Args:
            prompts: P texts or conversations.
            seeds: one for the call, or B of them.
            num_generations: G, at least 1.
            sampling: how tokens are drawn; by default from the model itself.
            stopping: what ends a completion.
            group: P labels of the prompts; by default 0 to P-1.
            images: P lists of images in the prompts, for policies that see.
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
        """Log-prob and entropy of the rollout's tokens, differentiable unless gradients are off.

        Args:
            rollout: B samples.
            rows: which of them; None is all.
            distribution: whose log-probs.
            statistic: of that distribution, [n, V] log-probs to [n]; its logits are made in pieces.
        """
        ...

    def reference(self) -> AbstractContextManager[None]:
        """A context in which the policy is the model before training."""
        ...

    def trainable_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that the optimizer moves, in a fixed order."""
        ...

    def save(self, folder: Path) -> None:
        """Write what was trained in the format of the model's library."""
        ...
