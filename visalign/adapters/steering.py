# SPDX-License-Identifier: Apache-2.0
"""Feynman-Kac steering of a plain diffusers pipeline, as its `callback_on_step_end`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from visalign.errors import UserError
from visalign.flow.noise import step_noise
from visalign.flow.parametrization import flow_sigma, preserving_scale
from visalign.flow.steering import check_steering, resample_particles
from visalign.flow.transitions import Kernel, velocity_between
from visalign.seeds import sample_seed

from .pipeline.call import PipelineCall

_SAMPLERS = (FlowMatchEulerDiscreteScheduler, DDIMScheduler, EulerDiscreteScheduler)
_EXTRA_STEPS = ("stochastic_sampling", "invert_sigmas", "clip_sample", "thresholding")
"""Settings of a scheduler under which a step is more than an Euler step down the ODE."""


class SteeringCallback:
    """Resamples groups within the batch of a pipeline's call by the rewards of their predicted images.

        steering = SteeringCallback(pipe, reward, particles=4, resample_after=[3, 5, 7])
        pipe(prompts, num_images_per_prompt=4, callback_on_step_end=steering)

    A callback is given the latents after a step and no prediction of the network. But a step of these
    samplers is an Euler step of an ODE, so two consecutive latents give the prediction: on the flow's scale
    v = (x' − x) / (σ' − σ) and x̂0 = x − σ v, exact but for the rounding of latents that are stored in half
    precision, which 1 / (σ − σ') enlarges. Particles are drawn as in `steered_rollout`, in proportion to
    exp(λ (r(x̂0) − r_prev)). The sampler draws no noise, so children of one parent would stay equal: a step
    after which is resampled is taken again, out of the parent's x along its v, as the SDE with the same
    marginals (`sde_step`; with "flow" and "dance" x' = x + [v + s²/(2σ)·(x + (1 − σ) v)] (σ' − σ) +
    s √(σ − σ')·ε), for every particle. All other steps are the pipeline's own; DDIM's `eta` stays 0.

    It costs no pass of the network; images are decoded by the call of a copy of the pipeline, which shares
    its weights. One callback serves any number of calls, one at a time.

    Singhal et al., Feynman-Kac steering, arXiv 2501.06848.

    `pipe` is of a family in `FAMILIES` and not changed. `reward` maps the call's images [B, 3, H, W] to [B], higher is
    better, NaN where unknown; such an image has no child, unless its whole group is unknown. `particles` images make a
    group, side by side (`num_images_per_prompt`). `resample_after` are rising steps of 1 to T − 2: a callback does not
    get the latents before step 0, and after the last there is no noise. `strength` is λ, per unit of the reward;
    `schedule` is as in `visalign.flow.Kernel`. `decode` maps clean latents as the pipeline has them to images in [0,
    1]; None decodes as the pipeline does (of a video the middle frame). `image_size` and `num_frames` are the call's.
    """

    def __init__(
        self,
        pipe: Any,
        reward: Callable[[Tensor], Tensor],
        *,
        particles: int = 4,
        resample_after: Sequence[int],
        strength: float = 10.0,
        schedule: str = "flow",
        noise_level: float = 0.7,
        seed: int = 0,
        decode: Callable[[Tensor], Tensor] | None = None,
        image_size: int | tuple[int, int] | None = None,
        num_frames: int | None = None,
        decode_batch: int = 8,
    ) -> None:
        if "callback_on_step_end" not in inspect.signature(type(pipe).__call__).parameters:
            raise UserError(
                f"A call of {type(pipe).__name__} takes no callback_on_step_end, so it cannot be steered. Take a "
                "classic pipeline of diffusers, or `flow.steered_rollout`."
            )
        after = list(resample_after)
        check_steering(particles, after, 1, max(after, default=1), strength)
        self._kernel = Kernel(schedule=schedule, noise_level=noise_level)
        if not self._kernel.std(torch.tensor(0.5), torch.tensor(0.4)) > 0:
            raise ValueError(
                f'schedule "{schedule}" at noise_level {noise_level} draws no noise, so children of one '
                "parent would stay equal. Raise noise_level; every schedule but none draws it then."
            )
        _check_sampler(pipe.scheduler)
        self._reward, self._particles, self._after = reward, particles, after
        self._strength, self._seed = strength, seed
        self._shape: tuple[int, ...] | None = None
        self._decode = decode
        if decode is None:
            call = PipelineCall(copy.copy(pipe), image_size, num_frames)
            self._shape, self._decode = call.latent_shape, lambda latents: call.images(latents, decode_batch)

    @torch.no_grad()
    def __call__(self, pipe: Any, step: int, timestep: Any, callback_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Resample after a step; diffusers calls this at each step's end and goes on with these latents."""
        latents = callback_kwargs["latents"]
        if step == 0:
            self._begin(pipe, latents)
        if step in self._after:
            latents = self._resampled(_levels(pipe.scheduler, timestep), latents, step)
        self._before = latents
        return {"latents": latents}

    def _begin(self, pipe: Any, latents: Tensor) -> None:
        steps, count = getattr(pipe, "num_timesteps", len(pipe.scheduler.timesteps)), len(latents)
        try:
            check_steering(self._particles, self._after, 1, steps - 2, self._strength)
        except ValueError as error:
            raise UserError(f"The call has {steps} steps. {error}") from error
        if count % self._particles:
            raise UserError(
                f"The call makes {count} images, which are no groups of {self._particles}: set num_images_per_prompt "
                "to it."
            )
        if self._shape is not None and tuple(latents.shape[1:]) != self._shape:
            raise UserError(
                f"The call denoises latents of {list(latents.shape[1:])}, the callback decodes {list(self._shape)}: "
                "give SteeringCallback the call's image_size (and num_frames)."
            )
        self._seeds = [sample_seed("callback", self._seed, i) for i in range(count)]
        self._last_reward = torch.zeros(count, dtype=torch.float64)

    def _resampled(self, levels: Sequence[tuple[float, float]], latents: Tensor, step: int) -> Tensor:
        (sigma, scale), (sigma_next, scale_next) = levels
        x = self._before.float() * scale
        v = velocity_between(x, latents.float() * scale_next, sigma, sigma_next)
        assert self._decode is not None
        images = self._decode((x - sigma * v).to(latents.dtype)).float().cpu()
        parents, self._last_reward = resample_particles(
            self._reward(images), self._last_reward, self._strength, self._particles, self._seeds, step
        )
        parents = parents.to(x.device)
        noise = step_noise(self._seeds, step, x.shape[1:])
        moved = self._kernel.step(x[parents], v[parents], sigma, sigma_next).sample(noise)
        return (moved / scale_next).to(latents.dtype)


def _check_sampler(scheduler: Any) -> None:
    kind = type(scheduler)
    changed = [f"{name}={scheduler.config[name]}" for name in _EXTRA_STEPS if scheduler.config.get(name)]
    if kind not in _SAMPLERS or changed:
        replacement = "FlowMatchEulerDiscrete" if "Flow" in kind.__name__ else "DDIM"
        raise UserError(
            f"The pipeline samples with {kind.__name__}{' of ' if changed else ''}{', '.join(changed)}, whose steps "
            f"do not say what the network predicted. Without {', '.join(_EXTRA_STEPS)}, set pipe.scheduler = "
            f"{replacement}Scheduler.from_config(pipe.scheduler.config)."
        )


def _levels(scheduler: Any, timestep: Any) -> list[tuple[float, float]]:
    """Return (σ on the flow, scale) before and after a step: latents times the scale are the flow's at σ."""
    if isinstance(scheduler, DDIMScheduler):  # x_t = √ᾱ x0 + √(1 − ᾱ) ε, at t and at the end as DDIM counts
        settings: Any = scheduler.config
        end = int(timestep) - settings.num_train_timesteps // (scheduler.num_inference_steps or 1)
        last = scheduler.alphas_cumprod[end] if end >= 0 else scheduler.final_alpha_cumprod
        sigmas = flow_sigma(torch.stack([scheduler.alphas_cumprod[int(timestep)], last]).double())
        scales = preserving_scale(sigmas)
    else:
        noise = scheduler.sigmas[scheduler.step_index - 1 :][:2].double()  # step_index is of the next step
        # x = x0 + s ε, divided by 1 + s, is the flow at σ = s / (1 + s)
        scales = 1 / (1 + noise) if isinstance(scheduler, EulerDiscreteScheduler) else torch.ones_like(noise)
        sigmas = noise / (1 + noise) if isinstance(scheduler, EulerDiscreteScheduler) else noise
    return list(zip(sigmas.tolist(), scales.tolist(), strict=True))
