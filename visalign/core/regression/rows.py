# SPDX-License-Identifier: Apache-2.0
"""The named regressions: one row each, with the numbers of its paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core.advantages.combine import gdpo_advantages, normalise_then_sum
from visalign.core.advantages.group import clamp_advantages, group_advantages
from visalign.core.checks import check_choice, check_rules
from visalign.core.groups.labels import Labels
from visalign.core.groups.moments import present_entries
from visalign.core.objective.options import Stage, change_row, check_row, pick
from visalign.core.surrogates.ppo import ppo_clip

from .groupwise import dgpo_loss, diffusion_kto_loss, group_gdro_loss
from .losses import (
    Weighting,
    covariance_guidance,
    covariance_loss,
    crd_loss,
    distillation_loss,
    error_log_ratio,
    fdfo_loss,
    level_weight,
    matching_error,
    nft_loss,
    pair_guidance,
    pair_preference_loss,
    ram_loss,
    weighted_error,
)
from .signals import best_share, old_policy_decay, soft_clip, tilted_weights

Anchor = Literal["none", "old", "reference", "expert"]
Noise = Literal["sample", "group", "start"]
Density = Literal["sampler", "uniform", "logit_normal", "mode", "prediction"]
Signal = Literal["advantage", "gdpo", "normalise_then_sum", "tilt", "best", "reward"]


@dataclass(frozen=True, kw_only=True)
class PairOutput:
    """Network outputs and targets of N (sample, noise level) pairs."""

    v: Tensor
    """[N, ...] velocity, differentiable."""
    target: Tensor
    """[N, ...] u = ε − x0."""
    sigma: Tensor
    """[N]."""
    anchor: Tensor | None = None
    """[N, ...] velocity of the row's anchor."""
    old: Tensor | None = None
    """[N, ...] that of the policy that sampled, where a loss beside its anchor asks for it."""
    guidance: Tensor | None = None
    """[N, ...] change of velocity towards better end points of each sample's group, see `GUIDANCE`."""


ON_VELOCITIES = {
    "nft": Stage(nft_loss, v_old="anchor", advantage="signal"),
    "ram": Stage(ram_loss, v_ref="anchor", advantage="signal"),
    "covariance": Stage(covariance_loss),
    "distil": Stage(distillation_loss),
    "fdfo": Stage(fdfo_loss),
}
"""Losses of single pairs on the velocity itself."""
GUIDANCE = {"covariance": covariance_guidance, "fdfo": pair_guidance}
"""Losses that take a direction of the group: name -> function of (end points [K, ...], signal [K])."""
ON_ERRORS = {
    "elbo": Stage(ppo_clip, log_ratio=Stage(error_log_ratio), advantage="signal"),
    "weighted": Stage(weighted_error),
}
"""Losses of single pairs on their `matching_error`."""
OF_GROUPS = {
    "crd": Stage(crd_loss, advantage="signal"),
    "dpo": Stage(pair_preference_loss),
    "gdro": Stage(group_gdro_loss),
    "dgpo": Stage(dgpo_loss),
    "kto": Stage(diffusion_kto_loss),
}
"""Losses that compare the errors of several samples of a prompt at one noise level."""
LOSSES = {**ON_VELOCITIES, **ON_ERRORS, **OF_GROUPS}

SIGNALS: dict[str, Callable[..., Tensor]] = {
    "advantage": group_advantages,
    "tilt": tilted_weights,
    "best": best_share,
    "reward": lambda reward, group, *, valid=None: reward.double(),
}
"""What of the rewards a loss gets: name -> function of (reward [B], group, valid)."""

MATRIX_SIGNALS = {"gdpo": gdpo_advantages, "normalise_then_sum": normalise_then_sum}
"""The same of several rewards: name -> function of (rewards [B, M], M weights, group)."""

_ANCHORS: dict[str, tuple[Anchor, ...]] = {
    **dict.fromkeys(("nft", "ram", "covariance", "crd", "dpo", "gdro", "kto"), ("old", "reference")),
    **dict.fromkeys(("elbo", "fdfo"), ("old",)),
    "dgpo": ("reference",),
    "weighted": ("none",),
    "distil": ("expert",),
}


@dataclass(frozen=True, kw_only=True)
class Regression:
    """Choices that make one regression of a diffusion policy, as `Objective` does for log-probs.

    >>> named_regression("diffusion_nft", loss_options={"beta": 0.1}).loss_options["beta"]
    0.1
    """

    source: str = ""
    """Paper and equation."""
    loss: str = "nft"
    """A key of `LOSSES`."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    anchor: Anchor = "old"
    """Whose velocity the loss leans on: the policy that sampled, the reference (before training), the expert
    of the sample's prompt, or none."""
    visited: bool = False
    """Learn at the states before the sampler's stochastic steps, in place of noised end points."""
    weighting: Weighting | Literal["prediction"] = "uniform"
    """w(σ) of the errors that a loss is made of, see `matching_error`, or of "ram", "covariance" and
    "distil", see `level_weight`; "nft" has its own. "prediction" is that of what the network predicts, the
    velocity unless the trainer knows better."""
    signal: Signal = "advantage"
    """What of the rewards the loss gets: a key of `SIGNALS`, or of `MATRIX_SIGNALS`."""
    signal_options: Mapping[str, Any] = field(default_factory=dict)
    clamp: float | None = None
    """Bound of |A|."""
    clamp_to: float | None = None
    """What the bound becomes, A clamp_to / clamp (AWM: clamp(A, ±5)/5 with clamp 5 and clamp_to 1); None: itself."""
    soft_clip: float | None = None
    """η of η tanh(A/η)."""
    levels: int | None = None
    """Noise levels S that are trained per sample and pass; None: one fewer than the sampler's steps."""
    level_range: tuple[float, float] = (0.0, 1.0)
    """Part of the sampler's steps whose levels are trained: (0, 0.5) is the noisier half."""
    continuous: bool = False
    """Levels between those of the sampler's timestep schedule too."""
    density: Density = "sampler"
    """Levels that are trained: those of the sampler's timesteps, or the model's 1,000 training levels by a density of
    `level_position`; "prediction" is logit_normal for a velocity and uniform for the others."""
    density_options: Mapping[str, float] = field(default_factory=dict)
    """mean and std of logit_normal, scale of mode."""
    noise: Noise = "sample"
    """Level and noise are drawn per "sample", once for a "group", or are the sample's own ("start")."""
    old_decay: tuple[float, float, float] = (0, 0.0, 0.0)
    """(start, slope, end) of `old_policy_decay`: how much of the old policy, which samples, stays after an
    iteration; (0, 0, 0) makes it the newest one."""
    kl: float = 0.0
    """k of k · mean |v − v_ref|², the pull to the reference."""
    kl_until: int | None = None
    """Iteration from which the reference is not asked, k falling linearly to 0 until it; None: it stays."""
    average_kl: float = 0.0
    """k of k · mean |v − v_avg|², the pull to a moving average of the policy (AWM's code: 1); one pass more."""
    average_decay: tuple[float, float, float] = (0, 0.001, 0.3)
    """(start, slope, end) of `old_policy_decay`: how much of that average stays after an iteration; AWM's code."""
    reference_guidance: float | None = None
    """Guidance scale w of the reference and of experts, v_ref = v(∅) + w (v(prompt) − v(∅)), so that a policy that
    samples without guidance is drawn to what guidance gives (`kl_cfg` of CRD's code); None: the policy's own."""

    def __post_init__(self) -> None:
        for name in ("old_decay", "average_decay", "level_range"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        check_row("regression", self)
        pick("regression loss", self.loss, LOSSES).check("regression loss", self.loss, self.loss_options)
        check_choice(f"anchor of loss={self.loss!r}", self.anchor, _ANCHORS[self.loss])
        function = {**SIGNALS, **MATRIX_SIGNALS}[self.signal]
        Stage(function).check("regression signal", self.signal, self.signal_options)
        check_rules(self, RULES)

    @property
    def of_groups(self) -> bool:
        """True if the loss couples the samples of a group."""
        return self.loss in OF_GROUPS

    @property
    def compares(self) -> bool:
        """True if samples are learnt from by what the others of their group are worth."""
        return self.of_groups or self.signal != "reward"

    @property
    def learns_alike(self) -> bool:
        """True if every image is learnt alike, as those with captions are."""
        return self.loss == "weighted" and self.density != "sampler" and not self.compares

    @property
    def pulls(self) -> bool:
        """True if a sample without signal has a gradient once the policy has left its anchor."""
        return self.loss in ("nft", "ram", "covariance", "crd", "distil")

    def kl_at(self, iteration: int) -> float:
        """k after so many finished iterations."""
        return self.kl * (1.0 if self.kl_until is None else max(0.0, 1 - iteration / self.kl_until))

    def decay_at(self, iteration: int, *, of_average: bool = False) -> float:
        """Return the decay of the old policy, or of the average, after that many iterations."""
        start, slope, end = self.average_decay if of_average else self.old_decay
        return old_policy_decay(iteration, start=int(start), slope=slope, end=end)

    @property
    def asks_reference(self) -> bool:
        """True if each pair needs a pass of the reference."""
        return self.kl > 0 or self.anchor == "reference"

    @property
    def asks_old(self) -> bool:
        """True if each pair may need a pass of the policy that sampled."""
        return self.anchor == "old" or (self.loss == "dgpo" and bool({"eps_low", "eps_high"} & {*self.loss_options}))

    @property
    def keeps_old(self) -> bool:
        """True if the old policy outlives an iteration."""
        return self.old_decay[2] > 0

    def level_count(self, steps: int) -> int:
        """S for a sampler of so many steps."""
        return self.levels or max(1, steps - 1)

    def prepare(
        self, reward: Tensor, group: Labels, *, valid: Tensor | None = None, weights: Sequence[float] = ()
    ) -> tuple[Tensor, Tensor]:
        """Compute (signal [B] float64, present bool [B]) over all samples of an iteration.

        `reward` is [B], or [B, M] with M weights for `MATRIX_SIGNALS`; NaN is missing. The signal of what is
        missing is 0, and so is that of groups of equal rewards, but for "reward".
        """
        if self.signal in MATRIX_SIGNALS:
            counts = torch.tensor([weight != 0 for weight in weights])
            present = present_entries(reward[:, counts].sum(1), valid)
            present_reward = torch.where(present[:, None], reward.double(), torch.nan)
            signal = MATRIX_SIGNALS[self.signal](present_reward, weights, group, **self.signal_options)
        else:
            present = present_entries(reward, valid)
            signal = SIGNALS[self.signal](reward.double(), group, valid=valid, **self.signal_options)
        if self.clamp is not None:
            signal = clamp_advantages(signal, self.clamp)
            signal = signal if self.clamp_to is None else signal * (self.clamp_to / self.clamp)
        if self.soft_clip is not None:
            signal = soft_clip(signal, self.soft_clip)
        return torch.where(present, signal, 0.0).double(), present

    def pair_loss(self, pairs: PairOutput, signal: Tensor) -> Tensor:
        """ℓ [N] of single pairs with their signals [N]."""
        signal = signal.to(pairs.sigma.dtype)
        if self.loss in ON_ERRORS:
            return self.group_loss(self.errors(pairs), signal)
        loss = LOSSES[self.loss](SimpleNamespace(**vars(pairs), signal=signal), self.loss_options)
        return loss if self.loss == "nft" else level_weight(pairs.sigma, self._weighting) * loss

    @property
    def _weighting(self) -> Any:
        return "uniform" if self.weighting == "prediction" else self.weighting

    def errors(self, pairs: PairOutput) -> tuple[Tensor, Tensor, Tensor]:
        """(error [N] differentiable, that of the anchor [N], that of the old policy [N]) of a loss on errors."""
        against = partial(matching_error, target=pairs.target, sigma=pairs.sigma, weighting=self._weighting)
        error = against(pairs.v)
        with torch.no_grad():
            anchor, old = (error.detach() if v is None else against(v) for v in (pairs.anchor, pairs.old))
        return error, anchor, old

    def group_loss(self, errors: Sequence[Tensor], signal: Tensor) -> Tensor:
        """ℓ of samples [K] of one prompt at one level, a scalar, from `errors`; of "dpo" two, the better first."""
        columns = dict(zip(("error", "anchor_error", "old_error"), errors, strict=True))
        return LOSSES[self.loss](SimpleNamespace(**columns, signal=signal.to(errors[0].dtype)), self.loss_options)


def _has_density_options(r: Regression) -> bool:
    """True if the options are those of the density and in their range; beyond it a mode leaves [0, 1]."""
    names = {"logit_normal": ("mean", "std"), "prediction": ("mean", "std"), "mode": ("scale",)}.get(r.density, ())
    options = r.density_options
    numbers = all(name in names and isinstance(v, int | float) and math.isfinite(v) for name, v in options.items())
    return numbers and options.get("std", 1) > 0 and -1 <= options.get("scale", 0) <= 1.75


RULES: tuple[tuple[Callable[[Regression], bool], str], ...] = (
    (
        lambda r: r.loss == "nft" and r.weighting != "uniform",
        "weighting is {weighting!r}, and loss='nft' has a weight of its own, of the predicted x0. Set "
        "weighting='uniform'.",
    ),
    (
        lambda r: r.reference_guidance is not None and not (r.asks_reference or r.anchor == "expert"),
        "reference_guidance is set, and nothing leans on the reference. Set kl, e.g. kl=1, or anchor='reference'.",
    ),
    (
        lambda r: (
            (r.visited or r.loss == "fdfo")
            and (r.visited and r.loss in ("distil", "fdfo"), r.levels, r.continuous, r.level_range, r.noise)
            != (True, None, False, (0.0, 1.0), "sample")
        ),
        "visited=True learns at the sampler's own states, by loss='distil' or always 'fdfo', without levels, "
        "level_range, continuous and noise, which are of noised end points. The sampler's steps are chosen "
        "by rollout.sde_steps and rollout.train_steps.",
    ),
    (
        lambda r: (r.visited and r.density != "sampler") or not _has_density_options(r),
        "density is {density!r} with density_options {density_options}; options are numbers, mean and std (above 0) "
        "of logit_normal, or scale (-1 to 1.75) of mode, and visited=True learns at the sampler's own levels.",
    ),
    (
        lambda r: r.visited and r.keeps_old,
        "old_decay is {old_decay}, and visited=True learns where the newest policy went. Leave it out.",
    ),
    (
        lambda r: r.kl_until is not None and not r.kl,
        "kl_until is {kl_until} with kl={kl}; it is an iteration until which a kl above 0 falls.",
    ),
    (
        lambda r: r.clamp_to is not None and r.clamp is None,
        "clamp_to is {clamp_to}, and clamp is None. Set clamp, e.g. clamp=5, or leave clamp_to out.",
    ),
    *(
        (
            lambda r, name=name: len(d := getattr(r, name)) != 3 or not 0 <= d[2] < 1 or min(d) < 0,
            f"{name} is {{{name}}}; give [start, slope, end], none below 0 and the end below 1, e.g. [0, 0.001, 0.5].",
        )
        for name in ("old_decay", "average_decay")
    ),
    (
        lambda r: len(r.level_range) != 2 or not 0 <= r.level_range[0] < r.level_range[1] <= 1,
        "level_range is {level_range}; give [low, high] with 0 ≤ low < high ≤ 1.",
    ),
    (
        lambda r: r.of_groups and r.noise == "start",
        "loss={loss!r} compares samples at one noise; noise='start' gives each its own.",
    ),
)
"""(condition that is refused, message)."""


_BATCH = {"scale": "batch", "ddof": 0}
_NFT = Regression(
    source="Zheng et al., DiffusionNFT, arXiv 2509.16117, as published: self-normalised, KL 1e-4",
    loss_options={"beta": 1.0, "bound": 5.0, "weighted": True},
    signal_options=_BATCH,
    clamp=5.0,
    old_decay=(0, 0.001, 0.5),
    kl=1e-4,
)
_AWM = Regression(
    source="Xue et al., AWM, arXiv 2509.25050; bound of a public implementation, `sd35_awm` has the authors'",
    loss="elbo",
    loss_options={"eps_low": 1.0, "eps_high": 1.0},
    signal_options=_BATCH,
    clamp=1.0,
)

REGRESSIONS: dict[str, Regression] = {
    "diffusion_nft": _NFT,
    "diffusion_nft_closed": replace(
        _NFT,
        source="DiffusionNFT without self-normalisation, arXiv 2509.16117, eq. 5; on-policy, without KL",
        loss_options={"beta": 1.0, "bound": 5.0, "weighted": False},
        old_decay=(0, 0.0, 0.0),
        kl=0.0,
    ),
    "awm": _AWM,
    "v_grpo": replace(
        _AWM,
        source="Tang et al., V-GRPO, arXiv 2604.23380, eq. 14 and 17; there the ratio is of a sample",
        loss_options={"eps_low": 1.0, "eps_high": float("inf")},
        weighting="adaptive",
        signal_options={"scale": "group", "ddof": 0},
        clamp=None,
        soft_clip=3.0,
        levels=4,
        continuous=True,
        noise="group",
    ),
    "ram": Regression(
        source="Bergmeister et al., RAM, arXiv 2605.10759, eq. 17, on advantages, there rewards in [0, 1]",
        loss="ram",
        loss_options={"scale": 1.0},
        anchor="reference",
        signal_options={"scale": "none"},
        continuous=True,
    ),
    "group_covariance": Regression(
        source="group estimate of the guidance in the form of arXiv 2604.17415",
        loss="covariance",
        loss_options={"scale": 1.0},
        signal_options={"scale": "group", "ddof": 0},
    ),
    "fdfo": Regression(
        source="McAllister et al., FDFO, arXiv 2603.12893: pairs of one path; ε of SPO, arXiv 2401.16025",
        loss="fdfo",
        loss_options={"epsilon": 0.2},
        visited=True,
        signal_options={"scale": "none"},
    ),
    "opd": Regression(
        source="on-policy distillation: Fang et al., Flow-OPD, arXiv 2605.08063; velocities, without its SDE "
        "weights and its task-agnostic teacher, for which there is kl",
        loss="distil",
        anchor="expert",
        visited=True,
        signal="reward",
    ),
    "reward_weighted": Regression(
        source="Lee et al., arXiv 2302.12192; exponential weights, Fan et al., arXiv 2502.06061",
        loss="weighted",
        anchor="none",
        signal="tilt",
        signal_options={"temperature": 1.0},
    ),
    "rejection": Regression(
        source="Dong et al., RAFT, arXiv 2304.06767: fine-tuning on the best of a group",
        loss="weighted",
        anchor="none",
        signal="best",
        signal_options={"share": 0.25},
    ),
    "sft": Regression(
        source="fine-tuning on images with captions: flow matching with SD3's levels, Esser et al., arXiv 2403.03206",
        loss="weighted",
        anchor="none",
        signal="reward",
        weighting="prediction",
        density="prediction",
        levels=1,
    ),
    "crd": Regression(
        source="Centered Reward Distillation, arXiv 2603.14128",
        loss="crd",
        loss_options={"beta": 1.0, "bound": 5.0},
        signal_options=_BATCH,
        clamp=5.0,
    ),
    "gdro": Regression(
        source="GDRO, arXiv 2601.02036; of samples that are stored as there, or of the iteration",
        loss="gdro",
        loss_options={"beta": 12.0, "gamma": 0.5, "tau": 0.05},
        anchor="reference",
        signal="reward",
        noise="group",
    ),
    "dgpo": Regression(
        source="Luo et al., DGPO, arXiv 2510.08425; without the clip to the old policy of Flow-Factory",
        loss="dgpo",
        loss_options={"beta": 100.0},
        anchor="reference",
        signal_options={"scale": "group", "ddof": 0},
        clamp=5.0,
        noise="group",
    ),
    "diffusion_dpo": Regression(
        source="Wallace et al., Diffusion-DPO, arXiv 2311.12908, eq. 14; of stored pairs, or best and worst",
        loss="dpo",
        loss_options={"beta": 2000.0},
        anchor="reference",
        weighting="prediction",
        signal="reward",
        noise="group",
    ),
    "diffusion_kto": Regression(
        source="Li et al., Diffusion-KTO, arXiv 2404.04465, eq. 8; good: above the mean of the group",
        loss="kto",
        loss_options={"beta": 5000.0},
        anchor="reference",
        weighting="prediction",
        signal_options={"scale": "none"},
        noise="group",
    ),
}
"""Name -> row. The numbers are the papers' where they give them."""


def named_regression(name: str, **changes: Any) -> Regression:
    """Look up a row of `REGRESSIONS` and change fields of `Regression`; see `change_row`."""
    return change_row("regression", REGRESSIONS, name, changes)
