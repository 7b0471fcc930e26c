# SPDX-License-Identifier: Apache-2.0
"""Flow trajectories: timestep schedules, one SDE kernel and CPS, Gaussian log-probs, rollout and replay.

It needs torch and a `DiffusionPolicy`; it imports no model, reward or objective.

Common to all functions: latents are [B, ...], of any shape beyond the batch, stored in the policy's dtype;
velocities, means and log-probs are float32, or float64 if the latents are. `sigmas` [T + 1] are noise levels
that fall strictly from at most 1 to 0 (`policy.sigmas`, `timestep_sigmas`), σ and σ' those before and after a
step, numbers or [B]. `seeds` are one integer in [0, 2⁶³) per sample (`sample_seed`): all noise of a sample
comes from its seed, so that it depends on neither batch nor device. `batch_size` is the samples per forward,
memory only; None takes all. A final latent that is not finite is a FloatingPointError.
"""

from visalign.core.surrogates.ratio_check import RatioCheck, RatioError, check_log_ratio
from visalign.seeds import sample_seed

from .noise import initial_noise, step_noise
from .parametrization import flow_sigma, preserving_scale, velocity_of_prediction
from .rollout import StepStats, replay, rollout
from .schedules import diffusers_timestep_sigmas, timestep_sigmas
from .search import PathSearch, ZeroOrderSearch
from .steering import steered_rollout
from .trajectory import Pairs, Trajectory
from .transitions import Kernel, Transition, noise_rate, replacement_step, sde_step, velocity_between
from .tree import tree_nodes

__all__ = [
    "Kernel", "Pairs", "PathSearch", "RatioCheck", "RatioError", "StepStats", "Trajectory", "Transition",
    "ZeroOrderSearch", "check_log_ratio", "diffusers_timestep_sigmas", "flow_sigma", "initial_noise",
    "noise_rate", "preserving_scale", "replacement_step", "replay", "rollout", "sample_seed", "sde_step",
    "steered_rollout", "step_noise", "timestep_sigmas", "tree_nodes", "velocity_between",
    "velocity_of_prediction",
]  # fmt: skip
