# SPDX-License-Identifier: Apache-2.0
"""Denoising steps as Gaussians: mean and total std of x' from (x, v, σ, σ'), samples and log-probs.

Two kernels. `sde_step` is Flow-SDE, Dance-SDE, the linear rate of Wan and the ODE: one mean formula, four noise rates.
`replacement_step` replaces part of the predicted noise: Coefficients-Preserving Sampling, DDIM with η (DDPO's),
Precise. `std` has one meaning: the standard deviation of x', √(−dt) included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_choice, check_same
from visalign.core.surrogates.ratios import LogProbReduction, gaussian_log_prob, guard_step_weight, reduce_event

NOISE_SCHEDULES = ("flow", "dance", "linear", "none")
"""Noise schedules of the SDE kernel: Flow-SDE, Dance-SDE, a rate linear in σ, and none (the ODE)."""
REPLACING = ("cps", "ddim", "precise", "dance_precise")
"""Schedules that replace predicted noise by fresh noise, and so add none in the last step (σ' = 0)."""
SHARES = ("cps", "ddim")
"""Schedules whose noise level is a share, 0 to 1."""
Solver = Literal["euler", "dpmpp_2m"]
"""Solver of the ODE, see `ODESolver`."""
SOLVERS: tuple[str, ...] = get_args(Solver)
LogProbForm = Literal["gaussian", "quadratic"]


@dataclass(frozen=True)
class Transition:
    """x' ~ N(mean, std²·I), row by row."""

    mean: Tensor
    """[B, ...] float32 (float64 if the inputs were)."""
    std: Tensor
    """[B] total standard deviation of x', same dtype; 0 where the step is deterministic."""

    def sample(self, noise: Tensor) -> Tensor:
        """x' = mean + std·noise, [B, ...], for standard normal `noise` [B, ...]."""
        return self.mean + _rows(self.std, self.mean) * noise.to(self.mean)

    def log_prob(
        self, x_next: Tensor, log_prob_reduction: LogProbReduction = "mean", *, form: LogProbForm = "gaussian"
    ) -> Tensor:
        """Compute the log-probability of x' per row, reduced over the latent's dimensions.

        gaussian: −(x' − μ)²/(2 std²) − log std − ½ log 2π; quadratic: −(x' − μ)², as in the published CPS.
        The quadratic form lacks 1/(2 std²): the exponential of its difference is not a likelihood ratio.

        x_next [B, ...] is rounded to the dtype in which it is stored. The reduction is "mean" (Flow-GRPO: per
        latent dimension) or "sum" (log-density of the whole latent).
        """
        x_next = x_next.to(self.mean)
        if form == "quadratic":
            return reduce_event(-(x_next - self.mean).square(), 1, log_prob_reduction)
        # a GPU would wait for the check; `rollout` makes it on the CPU before its first step
        if self.std.device.type == "cpu" and not bool((self.std > 0).all()):
            raise ValueError(
                f"The log-probability is undefined: the smallest std is {float(self.std.min()):.3g}. A step "
                "has none under the ODE, at noise level 0, where σ' is not below σ, and in the last step "
                f"(σ' = 0) of {', '.join(REPLACING)}. Leave such steps out of sde_steps."
            )
        return gaussian_log_prob(x_next, self.mean, self.std, log_prob_reduction=log_prob_reduction)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Kind of a rollout's steps, and the convention of their log-probability; a replay needs the same."""

    schedule: str
    """"flow", "dance", "linear", "none" (noise schedules of the SDE kernel), "cps", "ddim", "precise",
    "dance_precise"."""
    noise_level: float
    """a of Flow-SDE (paper: 0.7), η of Dance (0.3), a of CPS (0.8), η of DDIM (1), of Precise (1.5) and of its
    Dance form; not read by "none"."""
    sigma_max: float = 0.0
    """Flow-SDE's stand-in for σ = 1, or the factor of "linear", in [0, 1); the others ignore it."""
    log_prob_reduction: LogProbReduction = "mean"
    """Reduction over the latent's dimensions in the log-prob: "mean" or "sum"."""
    log_prob: LogProbForm = "gaussian"
    """"gaussian", or "quadratic" (CPS as published)."""

    def __post_init__(self) -> None:
        schedule, noise_level, sigma_max = self.schedule, self.noise_level, self.sigma_max
        check_choice("schedule", schedule, (*NOISE_SCHEDULES, *REPLACING))
        largest = 1.0 if schedule in SHARES else math.inf
        if schedule != "none" and not (0 <= noise_level <= largest and noise_level < math.inf):
            raise ValueError(f"noise_level of {schedule} must lie in [0, {largest:g}]; got {noise_level}.")
        if schedule in ("flow", "linear") and not 0 <= sigma_max < 1:
            raise ValueError(f"sigma_max stands in for σ = 1 and must lie in [0, 1); got {sigma_max}.")
        forms = (
            get_args(LogProbForm) if schedule == "cps" else ("gaussian",)
        )  # a misspelt form would be read as Gaussian
        check_choice(f"log_prob under schedule {schedule}", self.log_prob, forms)

    def std(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Compute the total std of x' for noise levels σ, σ' of equal shape, in their shape and dtype."""
        if self.schedule in REPLACING:
            kept = _kept_variance(sigma, sigma_next, self.schedule, self.noise_level)
            return sigma_next * (1 - kept).sqrt()
        rate = noise_rate(sigma, self.sigma_max, schedule=self.schedule, noise_level=self.noise_level)
        return rate * torch.sqrt(sigma - sigma_next)

    def slope(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Compute b [N] of the step's mean, which is linear in v: μ(x, v) = μ(x, 0) + b v."""
        return self.step(torch.zeros_like(sigma), torch.ones_like(sigma), sigma, sigma_next).mean

    def step_weight(self, kind: str, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Compute the loss weight [N] of steps: inverse_dt 1/(−dt), std, or inverse_gradient std/|b|.

        A log-prob's gradient with respect to v is (x' − μ) b/std², of size |b|/std: the last takes that factor out.
        GRPO-Guard, arXiv 2510.22319; TempFlow-GRPO, arXiv 2508.04324 (std); Flash-GRPO, arXiv 2605.15980 (std/|b|).
        """
        if kind == "inverse_dt":
            return guard_step_weight(sigma_next - sigma)
        std = self.std(sigma, sigma_next)
        return std if kind == "std" else std / self.slope(sigma, sigma_next).abs()

    def step(self, x: Tensor, v: Tensor, sigma: Tensor | float, sigma_next: Tensor | float) -> Transition:
        """Compute the transition out of x [B, ...] along v [B, ...]; σ and σ' are scalars or [B]."""
        if self.schedule in REPLACING:
            return replacement_step(x, v, sigma, sigma_next, schedule=self.schedule, noise_level=self.noise_level)
        options = {"noise_level": self.noise_level, "sigma_max": self.sigma_max}
        return sde_step(x, v, sigma, sigma_next, schedule=self.schedule, **options)

    def log_prob_of(self, transition: Transition, x_next: Tensor) -> Tensor:
        """Compute the log-probability [B] of x_next [B, ...] under this kernel's convention."""
        return transition.log_prob(x_next, self.log_prob_reduction, form=self.log_prob)


def noise_rate(sigma: Tensor, sigma_max: float, *, schedule: str, noise_level: float) -> Tensor:
    """Compute the noise rate s(σ) of dx = [v + s²/(2σ)·(x + (1 − σ)v)] dσ + s dw, per √σ.

    flow: s = a·√(σ/(1 − σ̂)) with σ̂ = `sigma_max` where σ = 1 and σ elsewhere; dance: s = η; linear: s = ησ̂σ; none:
    s = 0. The published code takes the second of the sigmas for sigma_max, so the noise of the first step depends on
    the number of steps. The total std of the next sample is s·√(−dt).

    Source: Flow-GRPO, arXiv 2505.05470, σ_t = a√(t/(1 − t)); DanceGRPO, arXiv 2505.07818, constant η; Flash-GRPO,
    arXiv 2605.15980, linear with η = 1, as Flow-GRPO's code has it for Wan.
    """
    check_choice("schedule", schedule, NOISE_SCHEDULES)
    if schedule == "none":
        return torch.zeros_like(sigma)
    if schedule == "dance":
        return torch.full_like(sigma, noise_level)
    if schedule == "linear":
        return noise_level * sigma_max * sigma
    sigma_hat = torch.where(sigma == 1, sigma_max, sigma)
    return noise_level * torch.sqrt(sigma / (1 - sigma_hat))


def sde_step(
    x: Tensor,
    v: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    *,
    schedule: str,
    noise_level: float = 0.0,
    sigma_max: float = 0.0,
) -> Transition:
    """Take an Euler–Maruyama step of the reverse SDE with the marginals of the flow.

    μ = x·(1 + s²/(2σ)·dt) + v·(1 + s²(1 − σ)/(2σ))·dt, std = s·√(−dt), dt = σ' − σ, s = `noise_rate`. With
    schedule "none" it is the Euler step of the ODE, x + v·dt, with std 0. Source: Flow-GRPO, arXiv
    2505.05470, the ODE-to-SDE conversion; DanceGRPO, arXiv 2505.07818 (the same mean with s = η).
    """
    x, v, sigma, sigma_next = _working(x, v, sigma, sigma_next)
    rate = noise_rate(sigma, sigma_max, schedule=schedule, noise_level=noise_level)
    dt = sigma_next - sigma
    drift = rate**2 / (2 * sigma)
    mean = x * _rows(1 + drift * dt, x) + v * _rows((1 + drift * (1 - sigma)) * dt, x)
    return Transition(mean, rate * torch.sqrt(-dt) if schedule != "none" else rate)


class ODESolver:
    """Deterministic steps of one path: "euler", x + v·dt, or "dpmpp_2m", DPM-Solver++(2M).

    The latter is linear in x̂0 = x − σv of this step and of the one before, λ = ln((1 − σ)/σ): x' = (σ'/σ)·x
    − (1 − σ')·(e^(−h) − 1)·(x̂0 + (x̂0 − x̂0_before)·h / (2 h_before)), h = λ' − λ; without the last term in
    the first step and in the step to σ' = 0, whose h is infinite. The x̂0 of a stochastic step counts as one
    before if it is handed to `observe`, as in MixGRPO-Flash, arXiv 2507.21802. Source: Lu et al.,
    DPM-Solver++, arXiv 2211.01095, algorithm 2; diffusers' flow sigmas.
    """

    def __init__(self, name: str = "euler") -> None:
        check_choice("solver", name, SOLVERS)
        self.name = name
        self._before: tuple[Tensor, Tensor] | None = None

    def step(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
        """Step from x [B, ...] at σ [B] along v to σ'."""
        if self.name == "euler":
            return sde_step(x, v, sigma, sigma_next, schedule="none").mean
        x, v, sigma, sigma_next = _working(x, v, sigma, sigma_next)
        before = self._before
        clean, h = self._predict(x, v, sigma, sigma_next)
        target = clean
        if before is not None:
            clean_before, h_before = before
            # 0 after pure noise, whose h is infinite, and in the step to σ' = 0
            share = torch.where(sigma_next > 0, h / (2 * h_before), 0.0)
            target = clean + _rows(share, x) * (clean - clean_before)
        return _rows(sigma_next / sigma, x) * x - _rows((1 - sigma_next) * torch.expm1(-h), x) * target

    def observe(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> None:
        """Remember the x̂0 of a stochastic step from x at σ to σ' for the steps that follow."""
        if self.name != "euler":
            self._predict(*_working(x, v, sigma, sigma_next))

    def _predict(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
        clean = x - _rows(sigma, x) * v
        h = torch.special.logit(1 - sigma_next) - torch.special.logit(1 - sigma)
        self._before = clean, h
        return clean, h


def velocity_between(x: Tensor, x_next: Tensor, sigma: Tensor | float, sigma_next: Tensor | float) -> Tensor:
    """Compute v = (x' − x) / (σ' − σ), the velocity of an Euler step, which enlarges rounding of stored latents."""
    x, x_next, sigma, sigma_next = _working(x, x_next, sigma, sigma_next)
    return (x_next - x) / _rows(sigma_next - sigma, x)


def replacement_step(
    x: Tensor, v: Tensor, sigma: Tensor | float, sigma_next: Tensor | float, *, schedule: str, noise_level: float
) -> Transition:
    """Take a step in which fresh noise replaces part of the predicted noise.

    With x̂0 = x − σv and x̂1 = x + (1 − σ)v:  μ = (1 − σ')·x̂0 + √κ σ'·x̂1,  std = √(1 − κ) σ'. κ is the share of
    the noise's variance that is kept; with ρ = σ'(1 − σ) / (σ(1 − σ')), the fall of the noise-to-signal ratio:

    cps: κ = cos²(aπ/2), a = `noise_level` in [0, 1]; Wang and Yu, arXiv 2509.05952.
    ddim: κ = 1 − η²(1 − ρ²), DDPO's kernel on the flow's scale: x is DDIM's latent times n = √((1 − σ)² + σ²),
        and a log-probability differs by ln n' a dimension. η = 1 is ancestral sampling; Song et al., DDIM,
        arXiv 2010.02502, eq. 12 and 16; Black et al., DDPO, arXiv 2305.13301.
    precise: κ = ρ^(η²); arXiv 2605.23522. At η = √2 it is that of ddim at η = 1.
    dance_precise: κ = exp(−η²(1/σ' − 1/σ)), its form of Dance-SDE.

    Noise level 0 is the ODE. In the last step (σ' = 0) std is 0 and the log-probability undefined.
    """
    x, v, sigma, sigma_next = _working(x, v, sigma, sigma_next)
    kept = _kept_variance(sigma, sigma_next, schedule, noise_level)
    clean, noise = x - _rows(sigma, x) * v, x + _rows(1 - sigma, x) * v
    mean = _rows(1 - sigma_next, x) * clean + _rows(sigma_next * kept.sqrt(), x) * noise
    return Transition(mean, sigma_next * (1 - kept).sqrt())


def _kept_variance(sigma: Tensor, sigma_next: Tensor, schedule: str, level: float) -> Tensor:
    """κ of `replacement_step`, in [0, 1]."""
    if schedule == "cps":
        return torch.cos(torch.full_like(sigma_next, level * torch.pi / 2)).square()
    if schedule == "dance_precise":
        product = (sigma * sigma_next).clamp_min(torch.finfo(sigma.dtype).tiny)  # or 0 / 0 at level 0
        return torch.exp(-(level**2) * (sigma - sigma_next).clamp_min(0) / product)
    ratio = (sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))).clamp_max(1)
    return 1 - level**2 * (1 - ratio.square()) if schedule == "ddim" else ratio ** (level**2)


def _working(
    x: Tensor, v: Tensor, sigma: Tensor | float, sigma_next: Tensor | float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast to the working dtype, and expand sigmas to [B]."""
    check_same(x=x, v=v)
    dtype = torch.float64 if torch.float64 in (x.dtype, v.dtype) else torch.float32
    levels = []
    for name, value in (("sigma", sigma), ("sigma_next", sigma_next)):
        level = torch.as_tensor(value, dtype=dtype, device=x.device)
        if level.shape not in (torch.Size([]), x.shape[:1]):
            raise ValueError(f"{name} must be a number or [{len(x)}]; got shape {list(level.shape)}.")
        levels.append(level.expand(x.shape[0]))
    return x.to(dtype), v.to(dtype), levels[0], levels[1]


def _rows(per_row: Tensor, like: Tensor) -> Tensor:
    return per_row.reshape(-1, *([1] * (like.ndim - 1)))
