# SPDX-License-Identifier: Apache-2.0
"""Distil and align few-step students by distribution matching: DMD2, TDM, and TDM-R1's surrogate reward.

A student predicts x̂0 at each of its K steps. The prediction x [N, ...] is noised to a level σ, where a frozen teacher
and a critic (the fake score, a denoiser of the student's samples) predict x̂_real and x̂_fake: their difference is the
gradient of the student's KL divergence from the teacher. Losses are [N], float32 or better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core.groups.labels import Labels, group_index, group_sum
from visalign.core.objective.options import Stage, change_row, check_row
from visalign.core.precision import float32

from .losses import level_weight


def pull_loss(x: Tensor, direction: Tensor, *, huber: float | None = None) -> Tensor:
    """mean ρ(x − sg(x + d)), which moves x along d; ρ(e) = e²/2, or with c = `huber` √(e² + c²) − c."""
    error = float32(x) - (float32(x) + direction).detach()
    rho = error.square() / 2 if huber is None else (error.square() + huber**2).sqrt() - huber
    return rho.flatten(1).mean(1)


def mean_distance(x: Tensor, other: Tensor, eps: float = 1e-6) -> Tensor:
    """max(mean |x − other|, ε) [N] without gradient, by which DMD2 and TDM normalise."""
    return (float32(x) - other).detach().abs().flatten(1).mean(1).clamp(min=eps)


def dmd_direction(x: Tensor, x_real: Tensor, x_fake: Tensor, *, eps: float = 1e-5) -> Tensor:
    """(x̂_real − x̂_fake) / max(mean |x − x̂_real|, ε), 0 where it is not finite.

    Yin et al., DMD, arXiv 2311.18828, eq. 7 and 8; DMD2, arXiv 2405.14867.
    """
    norm = mean_distance(x, x_real, eps).reshape(-1, *[1] * (x.ndim - 1))
    return torch.nan_to_num((float32(x_real) - x_fake) / norm, nan=0.0, posinf=0.0, neginf=0.0).detach()


def relative_pull_loss(x: Tensor, direction: Tensor, reference: Tensor, *, huber: float | None = None) -> Tensor:
    """R(d, r) = mean ρ(x − sg(x + d)) / max(mean |x − r|, 1e-6).

    d = x̂_real − x̂_fake and r = x̂_real is the student's loss of Luo et al., TDM, arXiv 2503.06674; its gradient with
    the square is DMD2's.
    """
    return pull_loss(x, direction, huber=huber) / mean_distance(x, reference)


def conditional_renoise(
    x0: Tensor, model_noise: Tensor, noise: Tensor, sigma_mid: Tensor, sigma: Tensor, *, clip: float = 20.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Noise x̂0 to σ through the student's own level σ_m < σ: (x_σ, the noise ε' in it, importance [N]).

    a = σ_m (1 − σ)/(1 − σ_m), b = √(σ² − a²), ε' = (a ε_model + b ε)/σ, x_σ = (1 − σ) x̂0 + σ ε'. The importance is
    e^{½ mean ε² − ½ mean ε'²} within [1/clip, clip]. At σ_m = 0, as in DMD2, ε' is ε and the importance 1. TDM, arXiv
    2503.06674; means in place of sums are of a public implementation.
    """
    s, m = (level.reshape(-1, *[1] * (x0.ndim - 1)).to(float32(x0)) for level in (sigma, sigma_mid))
    a = m * (1 - s) / (1 - m)
    b = (s.square() - a.square()).clamp(min=0).sqrt()
    mixed = (a * model_noise + b * noise) / s
    energy = [value.square().flatten(1).mean(1) / 2 for value in (float32(noise), mixed)]
    return (1 - s) * x0 + s * mixed, mixed, (energy[0] - energy[1]).clamp(-math.log(clip), math.log(clip)).exp()


def uniform_level(lower: Tensor, upper: Tensor, share: Tensor, *, shift: float = 1.0) -> Tensor:
    """Map shares in (0, 1) to noise levels σ between `lower` and `upper`, float64, uniform before a flow's shift γ.

    The level before the shift is σ / (γ − (γ − 1) σ); with γ = 1 it is σ. TDM, arXiv 2503.06674.
    """
    low, high = (level / (shift - (shift - 1) * level) for level in (lower.double(), upper.double()))
    level = low + share.double() * (high - low)
    return shift * level / (1 + (shift - 1) * level)


def logit_normal_level(lower: Tensor, upper: Tensor, share: Tensor, *, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Map shares as `uniform_level`, to the sigmoid of a normal number that is cut to the interval."""
    z = torch.stack([(torch.logit(level.double()) - mean) / std for level in (lower, upper)])
    sign = torch.where(z[0] > 0, -1.0, 1.0).to(z)  # a right tail is mirrored: Φ near 1 has no digits left
    cdf = torch.special.ndtr(sign * z)
    return torch.sigmoid(mean + std * sign * torch.special.ndtri(cdf[0] + share.double() * (cdf[1] - cdf[0])))


DENSITIES = {"uniform": uniform_level, "logit_normal": logit_normal_level}


def preference_weights(
    error: Tensor, ref_error: Tensor, advantage: Tensor, group: Labels, *, beta: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(σ(z) A [N], z [K]) of a group preference, z = Σ A β (D − D_ref)/n over the n samples of a group.

    D is the denoising error mean |v − u|², lower for likelier samples. The loss mean σ(z) A D has the gradient of mean
    ln(1 + e^z), over β. Luo et al., DGPO, arXiv 2510.08425; TDM-R1, arXiv 2603.07700.
    """
    index, groups = group_index(group, len(error), error.device)
    columns = [advantage * beta * (error - ref_error), torch.ones_like(error)]
    total, count = group_sum(torch.stack(columns, 1).detach(), index, groups).T
    return torch.sigmoid(total / count)[index] * advantage, total / count


def stopped_samples(
    error: Tensor, ref_error: Tensor, slow_error: Tensor, advantage: Tensor, *, clip: float, threshold: float
) -> Tensor:
    """Mark bool [N, 2] samples whose surrogate has moved far enough the way that their advantage asks for.

    First against a slow copy, e^{D_slow − D} beyond 1 ± clip (0 is off); then past the reference, with
    (D − D_ref)² > threshold. TDM-R1, arXiv 2603.07700.
    """
    up, ratio = advantage > 0, (slow_error - error).exp()
    far = torch.where(up, ratio > 1 + clip, ratio < 1 - clip) & (clip > 0)
    past = torch.where(up, error < ref_error, error > ref_error) & ((error - ref_error).square() > threshold)
    return torch.stack([far, past], 1)


def surrogate_loss(
    error: Tensor, ref_error: Tensor, weight: Tensor, stopped: Tensor, time_weight: Tensor, *, anchor: float
) -> Tensor:
    """w (σ(z) A D + β_ref (D − D_ref)²) [N] of TDM-R1's surrogate, the first term without gradient where stopped.

    `weight` are `preference_weights`; w = (k + 1)/K at step k, nearer the image that was scored. arXiv 2603.07700.
    """
    free = torch.where(stopped, error.detach(), error)
    return time_weight * (weight * free + anchor * (error - ref_error.detach()).square())


@dataclass(frozen=True, kw_only=True)
class FewStep:
    """Choices that make one way to train a few-step student."""

    source: str = ""
    """Paper."""
    interval: bool = False
    """Compare at noise levels of each step's own interval, through the student's level (TDM); else at any (DMD2)."""
    level_low: float = 0.02
    """Lowest noise level that is compared at."""
    level_high: float = 0.98
    """Highest noise level that is compared at."""
    density: Literal["uniform", "logit_normal"] = "uniform"
    """Density of the levels, a key of `DENSITIES`."""
    density_options: Mapping[str, float] = field(default_factory=dict)
    """mean and std of logit_normal, shift of uniform."""
    huber: float | None = None
    """c of the student's loss √(e² + c²) − c; None: the square."""
    min_snr: float | None = None
    """γ of the critic's weight min(snr, γ) of the error of x̂0 (TDM: 5); None: the error of the velocity."""
    critic_updates: int = 5
    """Updates of the critic before each of the student (DMD2: 5)."""
    role_rate: float = 1.0
    """Learning rate of critic and surrogate over the student's."""
    warmup: int = 0
    """First iterations in which critic and surrogate learn alone."""
    teacher_guidance: float | None = 4.5
    """Guidance scale of the teacher, which the student learns to do without; None: the model's own."""
    surrogate: bool = False
    """Learn the reward by a surrogate denoiser, whose distance from the teacher moves the student (TDM-R1)."""
    beta: float = 1.0
    """β of the group preference."""
    advantage_clip: float = 5.0
    """Bound of |A|."""
    clip: float = 1e-3
    """Trust region of the surrogate against its slow copy; 0 is off."""
    threshold: float = 0.05
    """(D − D_ref)² at which a sample past the reference moves the surrogate no further."""
    anchor: float = 1e-3
    """β_ref of the surrogate's (D − D_ref)²."""
    slow_decay_end: float = 0.3
    """Largest share of the slow copy that stays after an update of the surrogate; .001 more after each."""
    guidance_share: float = 0.3
    """m, share of the teacher's guidance as a reward beside 1 − m of the surrogate's."""
    guidance_scale: float = 3.5
    """κ of that guidance."""

    def __post_init__(self) -> None:
        check_row("few_step", self)
        Stage(DENSITIES[self.density]).check(f"density {self.density} of", "few_step", self.density_options)
        for name in () if self.surrogate else _OF_SURROGATE:
            if (value := getattr(self, name)) != getattr(FewStep, name):
                raise ValueError(
                    f"{name} is {value}, and surrogate is False, so nothing uses it. Leave it out, or take the "
                    "algorithm tdm_r1."
                )

    @property
    def roles(self) -> tuple[str, ...]:
        """Networks that are trained beside the student, adapters on the same base."""
        return ("critic", "surrogate") if self.surrogate else ("critic",)

    def levels(self, sigma: Tensor, sigma_next: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (σ_m, σ) [N], the student's level after a step and the level to compare at, of shares in (0, 1)."""
        low, high = torch.full_like(share, self.level_low), torch.full_like(share, self.level_high)
        mid = sigma_next.to(share) if self.interval else torch.zeros_like(share)
        if self.interval:  # a step that lies outside of the range keeps its own interval
            start = sigma.to(share)
            high = torch.where(mid < high, torch.minimum(start, high), start)
            low = torch.maximum(mid, torch.minimum(low, high / 2))
        return mid, DENSITIES[self.density](low, high, share, **self.density_options)

    def critic_loss(self, v: Tensor, target: Tensor, sigma: Tensor, importance: Tensor) -> Tensor:
        """[N] error of the critic's velocity, mean |v − u|², or of its x̂0 under min-SNR."""
        error = importance * (float32(v) - target).square().flatten(1).mean(1)
        return error if self.min_snr is None else level_weight(sigma, "min_snr", gamma=self.min_snr) * error

    def student_loss(self, x: Tensor, x_real: Tensor, x_fake: Tensor) -> Tensor:
        """[N] distribution-matching loss of the student's prediction x, in DMD2's form or TDM's."""
        if not self.interval:
            return pull_loss(x, dmd_direction(x, x_real, x_fake), huber=self.huber)
        return relative_pull_loss(x, float32(x_real) - x_fake, x_real, huber=self.huber)

    def reward_loss(self, x: Tensor, x_real: Tensor, x_surrogate: Tensor, x_conditional: Tensor | None) -> Tensor:
        """m R(κ/(s − 1) (x̂_real − x̂_cond), x̂_real) + (1 − m) R(x̂_sur − x̂_real, x̂_sur), s the teacher's guidance.

        x̂_cond is the teacher's without guidance; None leaves the first term out. TDM-R1, arXiv 2603.07700.
        """
        m, loss = self.guidance_share, x.new_zeros(())
        if x_conditional is not None:
            scale = self.guidance_scale / ((self.teacher_guidance or 1.0) - 1)
            loss = m * relative_pull_loss(x, scale * (float32(x_real) - x_conditional), x_real, huber=self.huber)
        direction = float32(x_surrogate) - x_real
        return loss + (1 - m) * relative_pull_loss(x, direction, x_surrogate, huber=self.huber)

    def slow_decay_at(self, step: int) -> float:
        """Compute the share of the surrogate's slow copy that stays after update 0, 1, ..."""
        return min(self.slow_decay_end, 1e-3 + 1e-3 * step)

    @property
    def rewards_guidance(self) -> bool:
        """True if the teacher's guidance is a reward."""
        return self.surrogate and self.guidance_share * self.guidance_scale > 0 and (self.teacher_guidance or 1) > 1

    def planned(self, student: int, teacher: int) -> tuple[float, float]:
        """(passes with gradient, others) of a sample and student update; a velocity takes `own` passes, or `teacher`
        under the teacher's guidance.
        """
        trained, untrained = 1.0 + self.critic_updates, float(teacher + student)
        more = 3 * student + teacher + student * self.rewards_guidance
        return (trained + 1, untrained + more) if self.surrogate else (trained, untrained)


_OF_SURROGATE = ("beta", "advantage_clip", "clip", "threshold", "anchor")
_OF_SURROGATE += ("slow_decay_end", "guidance_share", "guidance_scale")
_TDM: dict[str, Any] = {"interval": True, "huber": 1e-3, "min_snr": 5.0}
FEW_STEP = {
    "dmd2": FewStep(source="Yin et al., DMD2, arXiv 2405.14867; without its GAN loss"),
    "tdm": FewStep(source="Luo et al., TDM, arXiv 2503.06674", **_TDM),
    "tdm_r1": FewStep(source="Luo et al., TDM-R1, arXiv 2603.07700", surrogate=True, **_TDM),
}
"""Name -> row; `objective.changes` and `objective.changes_for.NAME` change its fields."""


def named_few_step(name: str, **changes: Any) -> FewStep:
    """Look up a row of `FEW_STEP` and change its fields; see `change_row`."""
    return change_row("few-step algorithm", FEW_STEP, name, changes)
