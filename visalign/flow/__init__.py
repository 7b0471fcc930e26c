# SPDX-License-Identifier: Apache-2.0
"""Flow trajectories: timestep schedules, one SDE kernel and CPS, Gaussian log-probs, rollout and replay.

It needs torch and a `DiffusionPolicy`; it imports no model, reward or objective.
"""

from visalign.core.surrogates.ratio_check import RatioCheck, RatioError, check_log_ratio
from visalign.seeds import sample_seed

from .noise import initial_noise, step_noise
from .parametrization import flow_sigma, preserving_scale, velocity_of_prediction
from .replay import StepStats, replay
from .rollout import rollout
from .schedules import diffusers_timestep_sigmas, noise_rate, timestep_sigmas
from .search import PathSearch, ZeroOrderSearch
from .steering import steered_rollout
from .trajectory import Pairs, Trajectory
from .transitions import Kernel, Transition, cps_step, sde_step, velocity_between
from .tree import tree_nodes

__all__ = [
    "Kernel",
    "Pairs",
    "PathSearch",
    "RatioCheck",
    "RatioError",
    "StepStats",
    "Trajectory",
    "Transition",
    "ZeroOrderSearch",
    "check_log_ratio",
    "cps_step",
    "diffusers_timestep_sigmas",
    "flow_sigma",
    "initial_noise",
    "noise_rate",
    "preserving_scale",
    "replay",
    "rollout",
    "sample_seed",
    "sde_step",
    "steered_rollout",
    "step_noise",
    "timestep_sigmas",
    "tree_nodes",
    "velocity_between",
    "velocity_of_prediction",
]
