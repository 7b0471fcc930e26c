# SPDX-License-Identifier: Apache-2.0
"""Distil and align few-step students by distribution matching: DMD2, TDM, and TDM-R1's surrogate reward.

A student predicts x̂0 at each of its K steps. The prediction x [N, ...] is noised again to a level σ, where a frozen
teacher and a critic (the fake score, a denoiser of the student's own samples) predict x̂_real and x̂_fake: their
difference is the gradient of a KL divergence of the student from the teacher. Losses are [N], float32 or better.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core.checks import check_rules
from visalign.core.groups.labels import Labels, group_index, group_sum
from visalign.core.objective.options import change_row
from visalign.core.precision import float32

from .losses import level_weight

Density = Literal["uniform", "logit_normal"]


def pull_loss(x: Tensor, direction: Tensor, *, huber: float | None = None) -> Tensor:
    """mean ρ(x − sg(x + d)), which moves x along d; ρ(e) = e²/2, or with c = `huber` √(e² + c²) − c."""
    error = float32(x) - (float32(x) + direction).detach()
    rho = error.square() / 2 if huber is None else (error.square() + huber**2).sqrt() - huber
    return rho.flatten(1).mean(1)


def mean_distance(x: Tensor, other: Tensor, eps: float = 1e-6) -> Tensor:
    """max(mean |x − other|, ε) [N] without gradient, by which DMD2 and TDM normalise."""
    return (float32(x) - other).detach().abs().flatten(1).mean(1).clamp(min=eps)


def dmd_direction(x: Tensor, x_real: Tensor, x_fake: Tensor, *, eps: float = 1e-5) -> Tensor:
    """−ĝ = (x̂_real − x̂_fake) / max(mean |x − x̂_real|, ε), 0 where it is not finite.

    Yin et al., DMD, arXiv 2311.18828, eq. 7 and 8; DMD2, arXiv 2405.14867.
    """
    norm = mean_distance(x, x_real, eps).reshape(-1, *[1] * (x.ndim - 1))
    return torch.nan_to_num((float32(x_real) - x_fake) / norm, nan=0.0, posinf=0.0, neginf=0.0).detach()


def relative_pull_loss(x: Tensor, direction: Tensor, reference: Tensor, *, huber: float | None = None) -> Tensor:
    """R(d, r) = mean ρ(x − sg(x + d)) / max(mean |x − r|, 1e-6).

    With d = x̂_real − x̂_fake and r = x̂_real it is the student's loss of Luo et al., TDM, arXiv 2503.06674; with the
    square its gradient is DMD2's.
    """
    return pull_loss(x, direction, huber=huber) / mean_distance(x, reference)


def conditional_renoise(
    x0: Tensor, model_noise: Tensor, noise: Tensor, sigma_mid: Tensor, sigma: Tensor, *, clip: float = 20.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Noise x̂0 to σ through the student's own level σ_m < σ: (x_σ, the noise ε' in it, importance [N]).

    a = σ_m (1 − σ)/(1 − σ_m), b = √(σ² − a²), ε' = (a ε_model + b ε)/σ, x_σ = (1 − σ) x̂0 + σ ε'. The importance is
    e^{½ mean ε² − ½ mean ε'²} within [1/clip, clip]. At σ_m = 0 the noise is ε alone, as in DMD2, and the importance
    1. TDM, arXiv 2503.06674; means in place of sums are of a public implementation.
    """
    s, m = (level.reshape(-1, *[1] * (x0.ndim - 1)).to(float32(x0)) for level in (sigma, sigma_mid))
    a = m * (1 - s) / (1 - m)
    b = (s.square() - a.square()).clamp(min=0).sqrt()
    mixed = (a * model_noise + b * noise) / s
    energy = [value.square().flatten(1).mean(1) / 2 for value in (float32(noise), mixed)]
    bound = math.log(clip)
    return (1 - s) * x0 + s * mixed, mixed, (energy[0] - energy[1]).clamp(-bound, bound).exp()


def query_level(
    lower: Tensor,
    upper: Tensor,
    share: Tensor,
    *,
    density: Density = "uniform",
    mean: float = 0.0,
    std: float = 1.0,
    shift: float = 1.0,
) -> Tensor:
    """Map shares in (0, 1), uniform, to noise levels between `lower` and `upper`, float64.

    "uniform" is so in σ / (γ − (γ − 1) σ), the level before a flow's shift γ; with γ = 1 in σ. "logit_normal" is the
    sigmoid of a normal number that is cut to the interval. TDM, arXiv 2503.06674.
    """
    low, high, share = lower.double(), upper.double(), share.double()
    if density == "uniform":
        low, high = (level / (shift - (shift - 1) * level) for level in (low, high))
        level = low + share * (high - low)
        return shift * level / (1 + (shift - 1) * level)
    z = torch.stack([(torch.logit(level) - mean) / std for level in (low, high)])
    # a right tail is mirrored: Φ near 1 has no digits left
    sign = torch.where(z[0] > 0, -1.0, 1.0).to(z)
    cdf = torch.special.ndtr(sign * z)
    return torch.sigmoid(mean + std * sign * torch.special.ndtri(cdf[0] + share * (cdf[1] - cdf[0])))


def preference_weights(
    error: Tensor, ref_error: Tensor, advantage: Tensor, group: Labels, *, beta: float = 1.0, both_signs: bool = False
) -> tuple[Tensor, Tensor]:
    """(σ(z) A [N], z [K]) of a group preference, z = Σ A β (D − D_ref)/n over the n samples of a group.

    D is the denoising error mean |v − u|², lower for likelier samples. The loss mean σ(z) A D has the gradient of
    mean ln(1 + e^z), over β. With `both_signs` a group whose advantages have one sign gets 0. Luo et al., DGPO, arXiv
    2510.08425; TDM-R1, arXiv 2603.07700.
    """
    index, groups = group_index(group, len(error), error.device)
    columns = [advantage * beta * (error - ref_error), torch.ones_like(error), (advantage > 0).to(error)]
    total, count, positive = group_sum(torch.stack(columns, 1).detach(), index, groups).T
    z = total / count
    mixed = (positive > 0) & (positive < count) | (not both_signs)
    return (torch.sigmoid(z) * mixed)[index] * advantage, z


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
    """Compare at noise levels within each step's own interval, reached through the student's level (TDM); else at any
    level (DMD2)."""
    level_range: tuple[float, float] = (0.02, 0.98)
    """Lowest and highest noise level that is compared at."""
    density: Density = "uniform"
    """Density of the levels, see `query_level`."""
    density_options: dict[str, float] | None = None
    """mean and std of logit_normal, shift of uniform."""
    huber: float | None = None
    """c of the student's loss √(e² + c²) − c; None: the square."""
    min_snr: float | None = None
    """γ of the critic's weight min(snr, γ) of the error of x̂0 (TDM: 5); None: the error of the velocity."""
    critic_updates: int = 5
    """Updates of the critic before each of the student (DMD2: 5)."""
    critic_rate: float = 1.0
    """Learning rate of the critic over the student's."""
    warmup: int = 0
    """First iterations in which the critic and the surrogate learn alone."""
    teacher_guidance: float | None = 4.5
    """Guidance scale of the teacher, which the student learns to do without; None: the model's own."""
    surrogate: bool = False
    """Learn the reward by a surrogate denoiser, whose distance from the teacher moves the student (TDM-R1)."""
    surrogate_rate: float = 1.0
    """Learning rate of the surrogate over the student's."""
    beta: float = 1.0
    """β of the group preference."""
    advantage_clip: float = 5.0
    """Bound of |A|."""
    clip: float = 1e-3
    """Trust region of the surrogate against its slow copy; 0 is off."""
    threshold: float = 0.05
    """(D − D_ref)² at which a sample past the reference moves the surrogate no further."""
    both_signs: bool = False
    """Let only groups with advantages of both signs move the surrogate."""
    anchor: float = 1e-3
    """β_ref of the surrogate's (D − D_ref)²."""
    slow_decay: tuple[float, float] = (1e-3, 0.3)
    """Share of the slow copy that stays after an update: the first, .001 more after each, at most the second."""
    guidance_share: float = 0.3
    """m, share of the teacher's guidance as a reward beside 1 − m of the surrogate's."""
    guidance_scale: float = 3.5
    """κ of that guidance."""

    def __post_init__(self) -> None:
        for name in ("level_range", "slow_decay"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_rules(self, RULES)

    @property
    def roles(self) -> tuple[str, ...]:
        """Networks that are trained beside the student, adapters on the same base."""
        return ("critic", "surrogate") if self.surrogate else ("critic",)

    def levels(self, sigma: Tensor, sigma_next: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (σ_m, σ) [N], the student's level after a step and the level to compare at, of shares in (0, 1)."""
        low, high = (torch.full_like(share, bound) for bound in self.level_range)
        mid = sigma_next.to(share) if self.interval else torch.zeros_like(share)
        if self.interval:  # a step below the range keeps its own interval
            high = sigma.to(share).clamp(max=self.level_range[1])
            low = torch.where(mid < high, torch.maximum(mid, torch.minimum(low, high / 2)), high / 2)
        return mid, query_level(low, high, share, density=self.density, **(self.density_options or {}))

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

        x̂_cond is the teacher's without guidance; None (s ≤ 1) leaves the first term out. TDM-R1, arXiv 2603.07700.
        """
        m, loss = self.guidance_share, x.new_zeros(())
        if x_conditional is not None:
            scale = self.guidance_scale / ((self.teacher_guidance or 1.0) - 1)
            loss = m * relative_pull_loss(x, scale * (float32(x_real) - x_conditional), x_real, huber=self.huber)
        direction = float32(x_surrogate) - x_real
        return loss + (1 - m) * relative_pull_loss(x, direction, x_surrogate, huber=self.huber)

    def slow_decay_at(self, step: int) -> float:
        """Compute the share of the surrogate's slow copy that stays after update 0, 1, ..."""
        return min(self.slow_decay[1], self.slow_decay[0] + 1e-3 * step)

    def planned(self, own: int, teacher: int) -> tuple[float, float]:
        """(passes with gradient, other passes) of one sample and student update, where a velocity takes `own` passes
        and one under the teacher's guidance `teacher`.
        """
        trained, others = 1.0 + self.critic_updates, float(teacher + own)
        if not self.surrogate:
            return trained, others
        return trained + 1, others + 3 * own + teacher + own * self.rewards_guidance

    @property
    def rewards_guidance(self) -> bool:
        """True if the teacher's guidance is a reward."""
        return self.guidance_share * self.guidance_scale > 0 and (self.teacher_guidance or 1.0) > 1


_POSITIVE = ("huber", "min_snr", "critic_rate", "surrogate_rate", "beta", "advantage_clip", "threshold")
_LIMITS = {**dict.fromkeys(_POSITIVE, (1e-12, math.inf)), **dict.fromkeys(("clip", "anchor"), (0, math.inf))}
_LIMITS |= {"guidance_scale": (0, math.inf), "guidance_share": (0, 1), "teacher_guidance": (1, math.inf)}
_LIMITS |= {"critic_updates": (1, 1000), "warmup": (0, 2**20)}

RULES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    *(
        (
            lambda s, name=name, low=low, high=high: (
                (value := getattr(s, name)) is not None and not (low <= value <= high and value < math.inf)
            ),
            f"{name} is {{{name}!r}}; it must be {'above 0' if name in _POSITIVE else f'from {low} to {high}'}.",
        )
        for name, (low, high) in _LIMITS.items()
    ),
    *(
        (lambda s, name=name: type(getattr(s, name)) is not int, f"{name} is {{{name}!r}}; it is a whole number.")
        for name in ("critic_updates", "warmup")
    ),
    (
        lambda s: not (len(s.level_range) == 2 and 0 < s.level_range[0] < s.level_range[1] < 1),
        "level_range is {level_range}; give two noise levels, 0 < low < high < 1.",
    ),
    (
        lambda s: not (len(s.slow_decay) == 2 and 0 <= s.slow_decay[0] <= s.slow_decay[1] < 1),
        "slow_decay is {slow_decay}; give two shares, 0 <= first <= last < 1.",
    ),
    (
        lambda s: bool(set(s.density_options or {}) - ({"shift"} if s.density == "uniform" else {"mean", "std"})),
        "density_options is {density_options}; density='uniform' has shift, 'logit_normal' mean and std.",
    ),
)
"""(condition that is refused, message)."""

_TDM = FewStep(
    source="Luo et al., TDM, arXiv 2503.06674",
    interval=True,
    huber=1e-3,
    min_snr=5.0,
)

FEW_STEP = {
    "dmd2": FewStep(source="Yin et al., DMD2, arXiv 2405.14867; without its GAN loss"),
    "tdm": _TDM,
    "tdm_r1": FewStep(**{**vars(_TDM), "source": "Luo et al., TDM-R1, arXiv 2603.07700", "surrogate": True}),
}
"""Name -> row; `objective.changes` and `objective.changes_for.NAME` change its fields."""


def named_few_step(name: str, **changes: Any) -> FewStep:
    """Look up a row of `FEW_STEP` and change its fields; see `change_row`."""
    return change_row("few-step algorithm", FEW_STEP, name, changes)
