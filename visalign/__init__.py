# SPDX-License-Identifier: Apache-2.0
"""visalign: align visual generation with rewards; one objective core for images and text.

The names here are those that most programs need, each imported at its first use; the faces of the wings
(`visalign.core`, `visalign.rewards`, `visalign.training`, ...) have the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visalign.adapters import CausalLMPolicy, LoraSettings, SD3Policy, check_adapter
    from visalign.core import (
        Objective,
        PolicyOutput,
        Trajectories,
        check_invariance,
        explain,
        named_objective,
    )
    from visalign.evaluation import compare, evaluate
    from visalign.interfaces import Preferences, Scores
    from visalign.rewards import (
        as_pairwise,
        as_pointwise,
        check_reward,
        check_text_reward,
        load_judge,
        load_reward,
        load_text_reward,
        rank,
    )
    from visalign.training import (
        SFT,
        DiffusionObjectiveSettings,
        FlowGRPO,
        OptimizerSettings,
        RewardModeling,
        RolloutSettings,
        RunSettings,
        TextObjectiveSettings,
        TextRL,
        TextRolloutSettings,
        Trainer,
    )

    __version__: str

__all__ = [
    "SFT",
    "CausalLMPolicy",
    "DiffusionObjectiveSettings",
    "FlowGRPO",
    "LoraSettings",
    "Objective",
    "OptimizerSettings",
    "PolicyOutput",
    "Preferences",
    "RewardModeling",
    "RolloutSettings",
    "RunSettings",
    "SD3Policy",
    "Scores",
    "TextObjectiveSettings",
    "TextRL",
    "TextRolloutSettings",
    "Trainer",
    "Trajectories",
    "__version__",
    "as_pairwise",
    "as_pointwise",
    "check_adapter",
    "check_invariance",
    "check_reward",
    "check_text_reward",
    "compare",
    "evaluate",
    "explain",
    "load_judge",
    "load_reward",
    "load_text_reward",
    "named_objective",
    "rank",
]

_FACES = {
    "adapters": ("CausalLMPolicy", "LoraSettings", "SD3Policy", "check_adapter"),
    "core": (
        "Objective",
        "PolicyOutput",
        "Trajectories",
        "check_invariance",
        "explain",
        "named_objective",
    ),
    "evaluation": ("compare", "evaluate"),
    "interfaces": ("Preferences", "Scores"),
    "rewards": (
        "as_pairwise",
        "as_pointwise",
        "check_reward",
        "check_text_reward",
        "load_judge",
        "load_reward",
        "load_text_reward",
        "rank",
    ),
    "training": (
        "SFT",
        "DiffusionObjectiveSettings",
        "FlowGRPO",
        "OptimizerSettings",
        "RewardModeling",
        "RolloutSettings",
        "RunSettings",
        "TextObjectiveSettings",
        "TextRL",
        "TextRolloutSettings",
        "Trainer",
    ),
}
"""wing -> the names of its face that are offered here too."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("visalign.versions").own_version()
    for face, names in _FACES.items():
        if name in names:
            return getattr(importlib.import_module(f"visalign.{face}"), name)
    raise AttributeError(
        f"module 'visalign' has no attribute {name!r}. It offers {', '.join(__all__)}; wings have the rest."
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
