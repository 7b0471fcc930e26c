# SPDX-License-Identifier: Apache-2.0
"""The reference that a policy is drawn to, the model before training or the policy at the last reset; and how
strongly, where a gate decides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from visalign.core import Objective, Trajectories
from visalign.core.objective.stages import sample_reward
from visalign.core.surrogates.kl_gate import KLGate, gated_coefficient, next_gate
from visalign.training.loop.algorithm import Context

from .settings import ObjectiveSettings

KEY = "reference"
"""File stem of the reference's weights in a checkpoint, and key of the iteration of the last reset."""


@contextmanager
def lent(policy: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the trained parameters hold other weights; a graph built before stays good, as nothing is
    copied."""
    named = policy.trainable_parameters()
    own = [parameter.data for _, parameter in named]
    try:
        for name, parameter in named:
            parameter.data = weights[name]
        yield
    finally:
        for (_, parameter), kept in zip(named, own, strict=True):
            parameter.data = kept


class Reference:
    """θ_ref ← θ every N iterations since the last reset, or once the divergence from it exceeds a bound.

    A reference that stays behind pulls a better policy back; one that follows bounds how fast it moves. Until
    the first reset it is `policy.reference()`, the model before training.

    GARDO, arXiv 2512.24138 (its adaptive regularisation).
    """

    def __init__(self, policy: Any, settings: ObjectiveSettings) -> None:
        self.policy = policy
        self.every, self.above = settings.reset_reference_every, settings.reset_reference_above
        self._stored: dict[str, Tensor] | None = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the policy is the reference; a graph built before stays good, as nothing is copied."""
        if self._stored is None:
            with self.policy.reference():
                yield
            return
        with lent(self.policy, self._stored):
            yield

    def finish(self, run: Context, divergence: float | None) -> None:
        """Reset at the end of an iteration where it is due.

        Args:
            run: keeps the weights for checkpoints.
            divergence: of the iteration's updates from the reference; None or NaN where none was measured.
        """
        counters = run.counters
        waited = counters.iteration - counters.own.get(KEY, 0)
        far = self.above is not None and divergence is not None and divergence > self.above
        if far or (self.every is not None and waited >= self.every):
            named = self.policy.trainable_parameters()
            self._stored = {name: parameter.detach().clone() for name, parameter in named}
            counters.own[KEY] = counters.iteration
            run.tensors[KEY] = self._stored

    def restore(self, run: Context) -> None:
        """Take up the reference of a checkpoint."""
        stored = run.tensors.get(KEY)
        if stored is not None:
            named = self.policy.trainable_parameters()
            self._stored = {name: stored[name].to(parameter.device) for name, parameter in named}
            run.tensors[KEY] = self._stored


class GatedKL:
    """SAFE's KL term: its coefficient follows what the iterations measure; see `gated_coefficient`.

    Args:
        base: threshold, nats per token; None is the paper's 0.3.
    """

    def __init__(self, base: float | None) -> None:
        self._base = 0.3 if base is None else base
        self._gate, self._entropy = KLGate(), 0.0

    def applied(self, row: Objective) -> Objective:
        """The row with the present coefficient; its own is the scale."""
        return replace(row, kl=gated_coefficient(self._gate, self._entropy, scale=row.kl, base=self._base))

    def move(self, t: Trajectories, kl: float | None) -> None:
        """Take in an iteration.

        Args:
            t: its samples.
            kl: mean divergence from the reference that its updates measured; None: none was.
        """
        reward = sample_reward(t, 0.0)
        known, present = t.present() & torch.isfinite(reward), t.weight != 0
        mean = float(reward[known].double().mean()) if bool(known.any()) else math.nan
        self._gate = next_gate(self._gate, kl=math.nan if kl is None else kl, reward=mean)
        if t.entropy is not None and bool(present.any()):
            self._entropy = float(t.entropy[present].double().mean())

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON values."""
        return {**asdict(self._gate), "entropy": self._entropy}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        kept = dict(state)
        self._entropy = kept.pop("entropy")
        self._gate = KLGate(**kept)
