# SPDX-License-Identifier: Apache-2.0
"""The reference of a KL term, the model before training or the policy at the last reset; SAFE's gated KL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from visalign.core import Objective, Trajectories
from visalign.core.objective.stages import sample_reward
from visalign.core.surrogates.kl_gate import KLGate, gated_coefficient, next_gate
from visalign.swapping import swapped_weights
from visalign.training.loop.algorithm import Context

from .settings import ObjectiveSettings

KEY = "reference"  # File stem of the reference's weights in a checkpoint, and key of the iteration of the last reset


class Reference:
    """Reset θ_ref ← θ every N iterations, or once the divergence from it exceeds a bound.

    An old reference pulls a better policy back; one that follows bounds how fast the policy moves. Until the
    first reset it is `policy.reference()`, the model before training.

    GARDO, arXiv 2512.24138 (its adaptive regularisation).
    """

    def __init__(self, policy: Any, settings: ObjectiveSettings) -> None:
        self.policy = policy
        self.every, self.above = settings.reset_reference_every, settings.reset_reference_above
        self._stored: dict[str, Tensor] | None = None

    def applied(self) -> AbstractContextManager[None]:
        """Turn the policy into the reference inside the block; nothing is copied, so older graphs stay valid."""
        if self._stored is None:
            return self.policy.reference()
        parameters = self.policy.trainable_parameters()
        return swapped_weights([p for _, p in parameters], [self._stored[name] for name, _ in parameters])

    def finish(self, run: Context, divergence: float | None) -> None:
        """Reset at the end of an iteration if due, by the mean divergence of its updates (None or NaN: unknown)."""
        counters = run.counters
        waited = counters.iteration - counters.own.get(KEY, 0)
        far = self.above is not None and divergence is not None and divergence > self.above
        if far or (self.every is not None and waited >= self.every):
            self._stored = {name: parameter.detach().clone() for name, parameter in self.policy.trainable_parameters()}
            counters.own[KEY] = counters.iteration
            run.tensors[KEY] = self._stored

    def restore(self, run: Context) -> None:
        """Load the reference of a checkpoint."""
        stored = run.tensors.get(KEY)
        if stored is not None:
            parameters = self.policy.trainable_parameters()
            self._stored = {name: stored[name].to(parameter.device) for name, parameter in parameters}
            run.tensors[KEY] = self._stored


class GatedKL:
    """SAFE's KL term, whose coefficient follows the measured KL from a threshold `base` on, nats per token."""

    def __init__(self, base: float | None) -> None:
        self._base = 0.3 if base is None else base
        self._gate, self._entropy = KLGate(), 0.0

    def applied(self, objective: Objective) -> Objective:
        """Return the objective with the present coefficient; its own is the scale."""
        return replace(objective, kl=gated_coefficient(self._gate, self._entropy, scale=objective.kl, base=self._base))

    def move(self, t: Trajectories, kl: float | None) -> None:
        """Update the gate after an iteration; `kl` is the mean divergence of its updates, None is unknown."""
        reward = sample_reward(t, 0.0)
        valid, present = t.present() & torch.isfinite(reward), t.weight != 0
        mean = float(reward[valid].double().mean()) if bool(valid.any()) else math.nan
        self._gate = next_gate(self._gate, kl=math.nan if kl is None else kl, reward=mean)
        if t.entropy is not None and bool(present.any()):
            self._entropy = float(t.entropy[present].double().mean())

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint."""
        return {**asdict(self._gate), "entropy": self._entropy}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore from a checkpoint."""
        self._entropy = state["entropy"]
        self._gate = KLGate(**{name: value for name, value in state.items() if name != "entropy"})
