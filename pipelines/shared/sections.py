# SPDX-License-Identifier: Apache-2.0
"""Sections that the configurations of several jobs share: adapters, rewards, length and machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from visalign.errors import UserError, suggestion

DTYPES = ("float32", "bfloat16", "float16")


def check_dtype(name: str, given: str | None) -> None:
    """Refuse a dtype that is none of `DTYPES`; None passes."""
    if given is not None and given not in DTYPES:
        raise UserError(f"{name} is {given!r}. {suggestion(given, DTYPES)}Allowed: {', '.join(DTYPES)}.")


def at_least(name: str, given: float | None, least: float) -> None:
    """Refuse a number below the least, or one that is not finite; None passes."""
    if given is not None and not (math.isfinite(given) and given >= least):
        raise UserError(f"{name} is {given}; it must be at least {least} and finite.")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters that are trained."""

    rank: int = 32
    """r, inner width; Flow-GRPO uses 32."""
    alpha: float = 64.0
    """α; an adapter's output is scaled by α / r."""
    target_modules: list[str] | None = None
    """Ends of the names of the layers that get an adapter; null: the attention projections."""


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """One reward of the sum."""

    weight: float = 1.0
    """At least 0; a weight of 0 only records the reward. Direction is the reward's own matter."""
    name: str | None = None
    """Catalogue name, package.module:Name or path/to/file.py:Name; null: the label of the term."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""
    mean: float = 0.0
    """With rewards.normalise=fixed: what is taken off ..."""
    std: float = 1.0
    """... and what divides."""


@dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """The sum that is optimized."""

    terms: dict[str, RewardTerm] = field(default_factory=lambda: {"shapes_verifier": RewardTerm()})
    """label -> term."""
    normalise: str = "none"
    """none, fixed (each term's mean and std) or batch (z-scores over the batch; one process only)."""
    allow_mixed_units: bool = False
    """Sum raw scores of different units all the same."""

    def __post_init__(self) -> None:
        if self.normalise not in ("none", "fixed", "batch"):
            raise UserError(f"rewards.normalise is {self.normalise!r}; it must be none, fixed or batch.")
        if not self.terms:
            raise UserError(
                "rewards.terms is empty; name at least one reward, e.g. shapes_verifier: {weight: 1}."
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, checkpoints, machine."""

    iterations: int = 100
    """Iterations: each samples, judges and updates."""
    max_seconds: float | None = None
    """Stop training at the end of the iteration that reaches this; makes the length depend on the machine.
    A run that has used it up trains on only when it is resumed with more."""
    checkpoint_every: int = 10
    """Iterations between two checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    device: str = "auto"
    """auto (an accelerator where there is one) or cpu."""
    threads: int | None = None
    """CPU threads; null: as torch chooses. Another number may change the last bits."""
    trackers: list[str] = field(default_factory=list)
    """Trackers of accelerate besides metrics.jsonl: tensorboard, wandb, ..."""

    def __post_init__(self) -> None:
        for name in ("iterations", "checkpoint_every", "keep_checkpoints", "threads"):
            at_least(f"run.{name}", getattr(self, name), 1)
        if self.device not in ("auto", "cpu"):
            raise UserError(f"run.device is {self.device!r}; it must be auto or cpu.")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise UserError(
                f"run.max_seconds is {self.max_seconds}; it must be above 0, or null for no limit."
            )


def check_correctness(judge: str | None, trained: RewardsConfig, reported: dict[str, RewardTerm]) -> None:
    """Refuse a judge of correctness that is no label of the rewards; None passes."""
    known = {**trained.terms, **reported}
    if judge is not None and judge not in known:
        raise UserError(
            f"evaluation.correctness is {judge!r}, which is no label of rewards.terms or "
            f"evaluation.rewards. {suggestion(judge, known)}Labels: {', '.join(known)}; or null."
        )


FREE_KEYS = (
    "run.iterations",
    "run.max_seconds",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.trackers",
)
"""Keys that may differ when a run is resumed: they do not change what an iteration computes."""
