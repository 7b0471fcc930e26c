# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of an objective: `Trajectories`, `PolicyOutput`, `Prepared`, `Loss`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from visalign.core.checks import check_axes
from visalign.core.groups.labels import Labels
from visalign.core.surrogates.aggregation import Counts

from .loss_statistics import LossStatistics, no_statistics

Decisions = Literal["tokens", "denoising_steps"]
"""Meaning of the axis T: generated tokens, or denoising steps."""

PER_DECISION = (
    *("old_log_prob", "process_reward", "ref_log_prob", "rollout_log_prob", "value", "entropy"),
    *("expected_score", "nucleus_entropy", "step", "uniform", "loss_weight", "sum_p2"),
)
"""Fields of `Trajectories` that are [B, T]."""
PER_SAMPLE = ("valid", "greedy_reward", "metric", "bundle", "likelihood", "answer")
"""Fields of `Trajectories` that are [B]."""


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """Samples of one optimizer step as the rollout left them; B samples of at most T decisions.

    With several devices: the samples of all of them. These tensors are small next to the model; gather them,
    prepare, and take the rows of the device.
    """

    weight: Tensor
    """[B, T], 0 for absent decisions: padding on either side, holes, steps that are not trained."""
    old_log_prob: Tensor
    """[B, T] log π_old, nats; 0 under Objective.ratio="guard"."""
    group: Labels
    """[B] labels of the prompts."""
    reward: Tensor | None = None
    """[B], or [B, M] of M rewards; NaN is missing."""
    reward_weights: Sequence[float] = ()
    """M numbers, for rewards [B, M]."""
    process_reward: Tensor | None = None
    """[B, T] added to the reward of each decision (`span_rewards` spreads the rewards of steps)."""
    advantage: Tensor | None = None
    """[B] or [B, T], for advantage="given"."""
    valid: Tensor | None = None
    """bool [B]; False: the sample's reward failed, and the sample is left out everywhere."""
    ref_log_prob: Tensor | None = None
    """[B, T] log π_ref."""
    rollout_log_prob: Tensor | None = None
    """[B, T] log μ of the sampling engine (another engine or precision), for the off-policy correction."""
    value: Tensor | None = None
    """[B, T] V of the rollout."""
    entropy: Tensor | None = None
    """[B, T] nats, under the policy at the beginning of the step."""
    sum_p2: Tensor | None = None
    """[B, T] Σ_v π_v² under the policy at the beginning of the step, for advantage="optimal_token_baseline"."""
    expected_score: Tensor | None = None
    """[B, T] E_p[S] of `discriminator_scores`, for selection="clip_v"."""
    nucleus_entropy: Tensor | None = None
    """[B, T] nats, of the same policy inside its nucleus, for entropy_term="siren"."""
    entropy_before: float | None = None
    """Result of `entropy_memory` for the earlier rollouts; None at the first."""
    step: Tensor | None = None
    """[B, T] int64, step of its sample that a decision belongs to, −1 none, for advantage="empg" or "process"."""
    answer: Tensor | None = None
    """[B] int64, label of each sample's answer, for advantage="copo"; None where the reward names none."""
    bundle: Tensor | None = None
    """[B] int64, number of the bundle that a sample is scored in, for advantage="riskpo"."""
    rank: Tensor | None = None
    """[B, 3] `rank_dynamics` of each sample's hidden states, for advantage="rank_bonus"."""
    rank_average: tuple[float, float, float] | None = None
    """Moving average of `rank_average` over the earlier rollouts; None at the first."""
    quantiles: tuple[float, float] | None = None
    """Result of `riskpo_quantiles` for the earlier rollouts; None at the first."""
    greedy_reward: Tensor | None = None
    """[B] reward of the greedy completion of the same prompt, for ReMax."""
    reference_reward: Tensor | None = None
    """[B, M] rewards of M completions of the reference to the same prompt, for advantage="par"."""
    likelihood: Tensor | None = None
    """[B] `likelihood_reward` of the reference answer after each sample, for advantage="likelihood"; for
    "jepo" its log-prob, nats."""
    uniform: Tensor | None = None
    """[B, T] numbers in [0, 1), drawn once per step, for Clip-Cov."""
    metric: Tensor | None = None
    """[B] a second number of each sample, for advantage="canon": length, entropy, another score."""
    loss_weight: Tensor | None = None
    """[B, T] ≥ 0 factor of each decision's policy loss, not of a denominator; None is 1. E.g. `guard_step_weight`."""
    ptx_weight: Tensor | None = None
    """[B', T'] weights of the step's pretraining tokens, for PPO-ptx."""
    iteration: int = 0
    """Number of rollouts before this one, for bounds that move."""
    decisions: Decisions = "tokens"
    """Meaning of the axis T."""

    def __post_init__(self) -> None:
        axes = dict.fromkeys(PER_DECISION, "B T") | dict.fromkeys(PER_SAMPLE, "B")
        axes |= {"reward": f"B {len(self.reward_weights)}" if self.reward_weights else "B"}
        axes |= {"advantage": "B" if self.advantage is not None and self.advantage.ndim == 1 else "B T"}
        axes |= {"reference_reward": "B M", "rank": "B 3"}
        for name, letters in axes.items():
            check_axes(weight=(self.weight, "B T"), **{name: (getattr(self, name), letters)})

    def rows(self, index: Tensor | slice) -> Trajectories:
        """Select the samples `index` (integers, booleans or a slice); ptx_weight stays whole."""
        # positions, as labels in a list take neither booleans nor tensors
        rows = torch.arange(len(self.weight))[index.cpu() if isinstance(index, Tensor) else index]
        tensors = {
            name: value[rows.to(value.device)]
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "ptx_weight"
        }
        if not isinstance(self.group, Tensor):
            return replace(self, group=[self.group[i] for i in rows.tolist()], **tensors)
        return replace(self, **tensors)

    def present(self) -> Tensor:
        """bool [B]: samples that are valid and whose single reward is finite."""
        present = torch.ones_like(self.weight[:, 0], dtype=torch.bool) if self.valid is None else self.valid
        if self.reward is not None and self.reward.ndim == 1:
            present = present & torch.isfinite(self.reward)
        return present.bool()


@dataclass(frozen=True, kw_only=True)
class PolicyOutput:
    """Outputs of the policy under training for a micro-batch of b samples, in the order of its rows."""

    log_prob: Tensor
    """[b, T] log π, differentiable."""
    entropy: Tensor | None = None
    """[b, T] nats, differentiable, for an entropy term."""
    nucleus_entropy: Tensor | None = None
    """[b, T] nats, differentiable, for entropy_term="siren"."""
    value: Tensor | None = None
    """[b, T] V, differentiable, for a value term; or [b, T, C] of C critics, each of which is fitted."""
    log_z: Tensor | None = None
    """[b] learned log-partition of each sample's prompt, for FlowRL."""
    kl: Tensor | None = None
    """[b, T] exact KL(π‖π_ref) per decision, differentiable: Gaussian steps have it, see `gaussian_kl`; or
    `velocity_kl`, for kl_form="velocity"."""
    divergence: Tensor | None = None
    """[b, T] exact divergence from the rollout policy, for DPPO and PPO-KL of Gaussian steps."""
    ptx_log_prob: Tensor | None = None
    """[b', T'] log π of pretraining tokens, differentiable."""
    ptx_weight: Tensor | None = None
    """[b', T'] weights of the pretraining tokens."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Values that are fixed before the first micro-batch (advantages, selections, denominators), without gradient."""

    weight: Tensor
    """[B, T], 0 also for samples without a reward and for what a selection leaves out."""
    old_log_prob: Tensor
    advantage: Tensor
    """[B, T]; 0 where absent."""
    row_tokens: Tensor
    """[B] float64: Σ_t w of the row, or of its group for "group_token_mean"."""
    counts: Counts
    importance_weight: Tensor | None = None
    """[B, T] off-policy weights ω."""
    keep: Tensor | None = None
    """bool [B, T]: False takes the decision's loss out and leaves the counts."""
    penalty: Tensor | None = None
    """[B, T] coefficient of each decision's `kl_cov_penalty`."""
    loss_weight: Tensor | None = None
    """[B, T] factor of the policy's loss; 0 where absent."""
    entropy_weight: Tensor | None = None
    """[B, T] factor of each decision's entropy in the entropy term."""
    entropy_level: Tensor | None = None
    """[B, n] target levels of the entropy term, the same in each row."""
    returns: Tensor | None = None
    """[B, T] targets of the value function."""
    ref_log_prob: Tensor | None = None
    value: Tensor | None = None
    ptx_counts: Counts | None = None

    def rows(self, index: Tensor | slice) -> Prepared:
        """Select the samples `index` (integers, booleans, or a slice)."""
        return replace(self, **{k: v[index] for k, v in vars(self).items() if isinstance(v, Tensor)})

    def to(self, device: torch.device) -> Prepared:
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor | Counts)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Loss:
    """Share of a micro-batch in the step's loss; shares add up to the loss of the whole step."""

    total: Tensor
    """0-dim, to be minimised: Σ coefficient · term."""
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """Term -> its share, coefficient included: policy, kl, value, entropy, ptx."""
    decisions: Mapping[str, Tensor] = field(default_factory=dict)
    """Term -> loss per decision [b, T], not weighted."""
    statistics: LossStatistics = field(default_factory=no_statistics)
    """Ratio and clip of this micro-batch; `plus` adds micro-batches."""


def check_finite(name: str, value: Tensor, weight: Tensor) -> None:
    """Refuse NaN and infinities where a decision is present; this waits for the device once."""
    bad = ~torch.isfinite(value.detach()) & (weight != 0)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name} is not finite at {int(bad.sum())} present decisions of {int(bad.any(1).sum())} rows; "
            f"first is row {row}, decision {column}: {float(value[row, column])}. Set their weight to 0, or "
            "the sample's valid to False."
        )
