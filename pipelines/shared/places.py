# SPDX-License-Identifier: Apache-2.0
"""Device and dtype that a model or a reward computes with, found by its networks and said before the work."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from visalign.interfaces import RewardCapabilities
from visalign.precision import default_device
from visalign.remote import ServerConnection
from visalign.rewards.weights.checkpoint_files import PRECISIONS, precision_on

from .plan import parts_of


def place_of(part: Any, options: Mapping[str, Any] | None = None) -> str:
    """Return device and dtype of the largest weight of a model or reward, such as "cuda:0 (NVIDIA H200) in bfloat16".

    A reward that loads its network later has those of the `options` that it was made with. Others compute on a server,
    where their images are, or on the CPU.
    """
    weights = [weight for network in parts_of(part, nn.Module, set()) for weight in network.parameters()]
    if not weights and any(True for _ in parts_of(part, ServerConnection, set())):
        return "a server"
    if not weights:
        arguments, options = inspect.signature(type(part)).parameters, options or {}
        device = str(options.get("device") or default_device())
        if "device" not in arguments:
            follows = getattr(part, "capabilities", RewardCapabilities()).takes_gpu_images
            return "the device of its images" if follows and default_device() != "cpu" else "cpu"
        takes_precision = "precision" in arguments or any(a.kind == a.VAR_KEYWORD for a in arguments.values())
        precision = precision_on(device, options.get("precision", "auto"))
        is_known = takes_precision and precision in PRECISIONS
        return f"{device} in {_name(PRECISIONS[precision])}" if is_known else device
    largest = max(weights, key=lambda weight: weight.numel())
    card = f" ({torch.cuda.get_device_name(largest.device)})" if largest.is_cuda else ""
    autocast = getattr(part, "autocast", None)
    under = f" under {_name(autocast)} autocast" if isinstance(autocast, torch.dtype) else ""
    return f"{largest.device}{card} in {_name(largest.dtype)}{under}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def say_place(label: str, options: Mapping[str, Any], part: Any) -> None:
    say_places({label: place_of(part, options)})


def say_places(locations: Mapping[str, str]) -> None:
    """Print where models and rewards compute (label -> `place_of`) to the error stream."""
    labels: dict[str, list[str]] = {}
    for label, location in locations.items():
        labels.setdefault(location, []).append(label)
    if labels:
        line = "; ".join(f"{', '.join(names)} on {location}" for location, names in labels.items())
        print(f"Computing: {line}.", file=sys.stderr)
