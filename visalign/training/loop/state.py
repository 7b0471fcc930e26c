# SPDX-License-Identifier: Apache-2.0
"""All that a run is made of between two iterations: counters, weights, averages, AdamW's moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checkpoint import Checkpoint, CheckpointError
from .ema import EMA

Parameters = Sequence[tuple[str, torch.nn.Parameter]]

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for each parameter."""


@dataclass(kw_only=True)
class RunState:
    """The counters of a run; they and the tensors are all that a checkpoint needs."""

    iteration: int = 0
    """Iterations finished."""
    updates: int = 0
    skipped: int = 0
    images: int = 0
    forward_equivalents: int = 0
    seconds: float = 0.0
    """Wall-clock seconds, those before a resume included."""


def tensors_of(
    parameters: Parameters, ema: EMA, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint: file stem -> name -> tensor; a moment is named "parameter.moment"."""
    moments = {
        f"{name}.{key}": optimizer.state[parameter][key]
        for name, parameter in parameters
        if parameter in optimizer.state
        for key in MOMENTS
    }
    return {
        "trainable": {name: p.detach() for name, p in parameters},
        "ema": ema.state(),
        "optimizer": moments,
    }


@torch.no_grad()
def restore_tensors(
    loaded: Checkpoint, parameters: Parameters, ema: EMA, optimizer: torch.optim.Optimizer
) -> None:
    """Put a checkpoint's tensors back in place.

    Raises:
        CheckpointError: the checkpoint has other parameters than the model.
    """
    weights, moments = loaded.tensors["trainable"], loaded.tensors["optimizer"]
    there = {name: tuple(value.shape) for name, value in weights.items()}
    here = {name: tuple(parameter.shape) for name, parameter in parameters}
    if there != here:
        odd = sorted(there.items() ^ here.items())[:4]
        raise CheckpointError(
            f"the checkpoint of step {loaded.step} has other trained parameters than the model, for example "
            f"{odd}: the model folder has changed. Resume with the model that the run began with."
        )
    ema.load(loaded.tensors["ema"])
    for name, parameter in parameters:
        parameter.copy_(weights[name])
        if f"{name}.step" in moments:
            own = {key: moments[f"{name}.{key}"] for key in MOMENTS}
            optimizer.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device) for key, value in own.items()
            }
