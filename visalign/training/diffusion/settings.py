# SPDX-License-Identifier: Apache-2.0
"""What a Flow-GRPO run can be told: how to roll out, what to optimize, how to move the weights.

The defaults are Flow-GRPO's published ones for SD3.5-M (arXiv 2505.05470 and its code); each field says where
ours differ. Values are checked when a setting is made, before anything is loaded or written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from visalign.errors import UserError
from visalign.training.loop.optimizer import _above_zero, _at_least


def _choice(name: str, given: str, allowed: Sequence[str]) -> None:
    if given not in allowed:
        raise UserError(f"{name} is {given!r}; it must be one of {', '.join(allowed)}.")


def _steps(name: str, given: Sequence[int], allowed: Sequence[int], which: str) -> None:
    if not given or len(set(given)) != len(given) or not set(given) <= set(allowed):
        raise UserError(
            f"{name} is {list(given)}; it needs at least one step, none twice, all among {which} "
            f"{list(allowed)}."
        )


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How the samples of an iteration are made."""

    prompts_per_iteration: int = 48
    """P, different prompts per iteration (over all processes)."""
    group_size: int = 24
    """G, samples per prompt; at least 2."""
    steps: int = 10
    """T, denoising steps."""
    timestep_schedule: str = "diffusers"
    """Time grid: "diffusers" (the model's scheduler, whose shift is applied twice) or "plain"."""
    schedule: str = "flow"
    """Noise schedule of the stochastic steps: "flow" (Flow-GRPO), "dance" (DanceGRPO), "cps" (coefficients-
    preserving)."""
    noise_level: float = 0.7
    """Noise level a (η for "dance")."""
    sde_steps: list[int] | None = None
    """Steps that are stochastic, 0 to T-1; the others are deterministic. null: all but the last."""
    sde_window: int | None = None
    """Draw this many of `sde_steps` anew in each iteration and make only them stochastic (Flow-GRPO-Fast,
    MixGRPO). null: all of them."""
    train_steps: list[int] | None = None
    """Those of `sde_steps` that are trained on; null: all that are stochastic."""
    log_prob_reduction: str = "mean"
    """Log-probability of a step: "mean" over the latent's numbers, as published, or their "sum"."""
    batch_size: int = 64
    """Samples that go through the network together while sampling; memory only, no effect on a sample."""
    max_failure_rate: float = 0.2
    """Largest share of samples that the reward may fail on before the run stops."""

    def __post_init__(self) -> None:
        _at_least("rollout.steps", self.steps, 1)
        _at_least("rollout.batch_size", self.batch_size, 1)
        _choice("rollout.timestep_schedule", self.timestep_schedule, ("diffusers", "plain"))
        _choice("rollout.schedule", self.schedule, ("flow", "dance", "cps"))
        _choice("rollout.log_prob_reduction", self.log_prob_reduction, ("mean", "sum"))
        if not (math.isfinite(self.noise_level) and self.noise_level > 0):
            raise UserError(
                f"rollout.noise_level is {self.noise_level}; without noise there is no log-probability: set "
                "it above 0."
            )
        if not 0.0 <= self.max_failure_rate <= 1.0:
            raise UserError(
                f"rollout.max_failure_rate is {self.max_failure_rate}; it is a share from 0 to 1."
            )
        noisy = self.stochastic
        _steps("rollout.sde_steps", noisy, range(self.steps), "steps")
        if self.schedule == "cps":
            self._check_cps(noisy)
        if self.train_steps is not None:
            _steps("rollout.train_steps", self.train_steps, noisy, "the stochastic steps")
        if self.sde_window is not None:
            if not 1 <= self.sde_window <= len(noisy):
                raise UserError(
                    f"rollout.sde_window is {self.sde_window}; with {len(noisy)} sde_steps it must "
                    f"be 1 to {len(noisy)}."
                )
            if self.train_steps is not None:
                raise UserError(
                    "rollout.sde_window draws the steps to train anew in each iteration, so "
                    "rollout.train_steps cannot be fixed as well. Remove one of the two."
                )

    def _check_cps(self, noisy: Sequence[int]) -> None:
        """The limits of coefficients-preserving sampling."""
        if self.noise_level > 1:
            raise UserError(
                f"rollout.noise_level is {self.noise_level}; for rollout.schedule=cps it must be at most 1, "
                "which replaces all of the noise (published: 0.8)."
            )
        if self.steps - 1 in noisy:
            raise UserError(
                f"rollout.sde_steps {list(noisy)} holds the last of {self.steps} steps, in which cps adds "
                f"no noise, so it has no log-probability. Take {self.steps - 1} out, or set rollout.schedule "
                "to flow or dance."
            )

    @property
    def stochastic(self) -> list[int]:
        """The steps that may be stochastic, ascending."""
        return list(range(max(1, self.steps - 1))) if self.sde_steps is None else sorted(self.sde_steps)

    @property
    def trained(self) -> list[int]:
        """The steps that may be trained on, ascending."""
        return self.stochastic if self.train_steps is None else sorted(self.train_steps)

    @property
    def trained_per_image(self) -> int:
        """How many steps of one image are trained on in one iteration."""
        return self.sde_window or len(self.trained)


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What is optimized on the samples."""

    ratio: str = "gaussian"
    """"gaussian": exp(log p − log p_old), as published. "guard": exp(mean(ε·Δμ)), GRPO-Guard's ratio (arXiv
    2510.22319) in its per-sample form, where the mean of log r is 0 at every step."""
    eps_low: float = 1e-4
    """Ratios are clipped at 1 − eps_low ..."""
    eps_high: float = 1e-4
    """... and at 1 + eps_high."""
    advantage_scale: str = "batch"
    """What divides the centred reward: std of the "group", of the "batch" (as published), or "none"."""
    baseline: str = "mean"
    """Reward of comparison: "mean" of the group, or "leave_one_out"."""
    advantage_clip: float = 5.0
    """Advantages are clamped to ± this."""
    beta: float = 0.0
    """Weight of the exact Gaussian KL to the reference. Published: 0.04 with a KL that lacks |dt|; above zero
    every sample is trained on and each pair costs one more pass."""
    step_weight: str = "uniform"
    """Weight of a step in the loss: "uniform" (as published) or "inverse_dt" (GRPO-Guard: 1/|dt|, scaled to
    mean 1 over the trained steps)."""
    step_weights: list[float] | None = None
    """Explicit weights instead, one for each of the T steps."""

    ratio_bound: float | None = None
    """Largest |log r| allowed at the run's first update, where r must be 1. null: 1e-5, times the
    latent's numbers where the gaussian ratio sums over them; networks in bfloat16 need more (2e-5 to 5e-4
    were measured)."""

    def __post_init__(self) -> None:
        _choice("objective.ratio", self.ratio, ("gaussian", "guard"))
        _choice("objective.advantage_scale", self.advantage_scale, ("group", "batch", "none"))
        _choice("objective.baseline", self.baseline, ("mean", "leave_one_out"))
        _choice("objective.step_weight", self.step_weight, ("uniform", "inverse_dt"))
        _at_least("objective.beta", self.beta, 0.0)
        for name in ("eps_low", "eps_high", "advantage_clip"):
            if not getattr(self, name) > 0:  # infinity switches the limit off
                raise UserError(f"objective.{name} is {getattr(self, name)}; it must be above 0.")
        if self.ratio_bound is not None:
            _above_zero("objective.ratio_bound", self.ratio_bound)
        if self.step_weights is not None and not all(math.isfinite(w) and w >= 0 for w in self.step_weights):
            raise UserError(
                f"objective.step_weights is {self.step_weights}; weights are finite and not negative."
            )
