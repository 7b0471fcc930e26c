# SPDX-License-Identifier: Apache-2.0
"""Schedulers that replace a pipeline's own: they record its sigmas and hand over the prediction.

A pipeline calls `set_timesteps` once and `step` at each time. Before a velocity is computed, `at` holds the
time; the one step that follows leaves its model output in `taken` and the sample as it was.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from visalign.errors import UserError
from visalign.flow.parametrization import flow_sigma
from visalign.flow.schedules import timestep_sigmas
from visalign.interfaces import Prediction

_PREDICTIONS: dict[str, Prediction] = {"epsilon": "epsilon", "v_prediction": "v", "sample": "x0"}
"""diffusers' `prediction_type` -> our name."""


class _Handing:
    """Common part of both schedulers, combined with diffusers' own class."""

    at: Tensor | None = None
    """Time of the one step to take, as the pipeline passes it on; None: `set_timesteps` makes the schedule."""
    taken: Tensor | None = None

    def step(
        self, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any
    ) -> SchedulerOutput | tuple[Tensor]:
        """Keep the model output, with its gradient; the sample stays."""
        self.taken = model_output
        return SchedulerOutput(prev_sample=sample) if kwargs.get("return_dict", True) else (sample,)

    def _stand_at(self) -> None:
        self.timesteps = torch.empty(0) if self.at is None or not self.at.numel() else self.at[None]
        self.num_inference_steps = len(self.timesteps)


class HandingFlow(_Handing, FlowMatchEulerDiscreteScheduler):
    """For pipelines of flows."""

    prediction: Prediction = "velocity"
    mu: float | None = None  # Shift that the pipeline computed from the image's size, with dynamic shifting

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: Any = None,
        mu: float | None = None,
        timesteps: Any = None,
    ) -> None:
        """Make the schedule as diffusers does and keep it; then stand at the time of the one step."""
        if self.at is None:
            single_step = 1 in (num_inference_steps, 0 if sigmas is None else len(sigmas))
            settings: Any = self.config
            if single_step and settings.shift_terminal:  # which stretches between two levels; here is one
                self.schedule = torch.tensor([1.0, 0.0]), torch.tensor([float(settings.num_train_timesteps)])
            else:
                options = {"sigmas": sigmas, "mu": mu, "timesteps": timesteps}
                super().set_timesteps(num_inference_steps, device="cpu", **options)
                self.schedule = self.sigmas.float().clone(), self.timesteps.float().clone()
            self.mu = mu
        self._stand_at()
        self.sigmas = torch.zeros(len(self.timesteps) + 1)
        self._step_index = self._begin_index = None

    def levels(self, steps: int) -> tuple[Tensor, Tensor]:
        """(σ [steps + 1], time [steps]) of the paper's schedule, shifted once; `set_timesteps` told `mu`."""
        settings: Any = self.config
        dynamic = settings.use_dynamic_shifting and self.mu is not None
        linear = settings.time_shift_type == "linear"
        dynamic_shift = (self.mu or 1.0) if linear else math.exp(self.mu or 0.0)
        sigmas = timestep_sigmas(steps, shift=dynamic_shift if dynamic else self.shift)
        return sigmas, sigmas[:-1] * settings.num_train_timesteps


class HandingNoise(_Handing, DDIMScheduler):
    """For pipelines that predict noise (or v, or the clean latent) on a variance-preserving path.

    The last level is 0, the clean latent, where others stop at the first training step's noise.
    """

    @property
    def prediction(self) -> Prediction:
        """Prediction type by our names."""
        settings: Any = self.config
        return _PREDICTIONS[settings.prediction_type]

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        """Set the timesteps as `HandingFlow.set_timesteps` does."""
        if self.at is None:
            super().set_timesteps(num_inference_steps, device="cpu")
            self.schedule = self._levels(self.timesteps)
        self._stand_at()

    def levels(self, steps: int) -> tuple[Tensor, Tensor]:
        """(σ [steps + 1], time [steps]) of times spaced evenly from the last one, arXiv 2305.08891."""
        count = len(self.alphas_cumprod)
        return self._levels(torch.arange(count, 0, -count / steps).round().long()[:steps] - 1)

    def _levels(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        sigmas = flow_sigma(self.alphas_cumprod[timesteps].double())
        return torch.cat([sigmas, torch.zeros(1)]).float(), timesteps.float()


Handing = HandingFlow | HandingNoise


def handing_scheduler(scheduler: Any) -> Handing:
    """Return the scheduler to exchange a pipeline's own for."""
    config = dict(scheduler.config)
    kind: Any = HandingFlow
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return kind.from_config(scheduler.config)
    if config.get("prediction_type") == "flow_prediction" or config.get("use_flow_sigmas"):
        return HandingFlow(shift=config.get("flow_shift") or 1.0)  # another solver of the same flow
    if hasattr(scheduler, "alphas_cumprod") and config.get("prediction_type", "epsilon") in _PREDICTIONS:
        kind = HandingNoise
        options = {name: value for name, value in config.items() if name != "_class_name"}
        return kind.from_config({**options, "set_alpha_to_one": True})
    raise UserError(
        f"The pipeline samples with {type(scheduler).__name__}, neither a flow nor a noise schedule with "
        "alphas_cumprod. Set pipe.scheduler to a FlowMatchEulerDiscreteScheduler or DDIMScheduler."
    )


def time_of(scheduler: Handing, sigmas: Tensor, schedule: tuple[Tensor, Tensor]) -> Tensor:
    """Return the network's times at any noise levels; `schedule` (σ, times) of a flow is fine, to interpolate."""
    if isinstance(scheduler, HandingFlow):
        levels, times = (part.numpy() for part in schedule)
        settings: Any = scheduler.config
        count = settings.num_train_timesteps
        if np.allclose(times, levels[:-1] * count, rtol=1e-5, atol=1e-3):
            return sigmas.float() * count
        level_grid, values = levels[::-1], np.append(times, 0.0)[::-1]  # a shift that the times do not share
    else:
        level_grid = flow_sigma(scheduler.alphas_cumprod.double()).numpy()
        values = np.arange(len(level_grid), dtype=np.float64)
    interpolated = np.interp(sigmas.cpu().double().numpy(), level_grid, values)
    return torch.as_tensor(interpolated, dtype=torch.float32, device=sigmas.device)
