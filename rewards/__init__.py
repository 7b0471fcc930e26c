# SPDX-License-Identifier: Apache-2.0
"""Visual rewards: one file per judge, a catalogue, composition. Everything is imported at its first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callables import FunctionReward
    from .catalogue import CATALOGUE, load_reward
    from .check import check_reward
    from .compose import WeightedSum
    from .contract import RewardError, make_scores, read_request
    from .failure import failure_reasons
    from .images import ImageBatch, load_images, to_pil

__all__ = [
    "CATALOGUE",
    "FunctionReward",
    "ImageBatch",
    "RewardError",
    "WeightedSum",
    "check_reward",
    "failure_reasons",
    "load_images",
    "load_reward",
    "make_scores",
    "read_request",
    "to_pil",
]

_HOME = {
    "CATALOGUE": "catalogue",
    "FunctionReward": "callables",
    "ImageBatch": "images",
    "RewardError": "contract",
    "WeightedSum": "compose",
    "check_reward": "check",
    "failure_reasons": "failure",
    "load_images": "images",
    "load_reward": "catalogue",
    "make_scores": "contract",
    "read_request": "contract",
    "to_pil": "images",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
