# SPDX-License-Identifier: Apache-2.0
"""Rewards for pictures and for text: one file per judge, catalogues, composition. Imported at first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callables import FunctionReward
    from .catalogue import CATALOGUE, load_reward
    from .check import check_reward
    from .code_tests import CodeTests
    from .compose import WeightedSum
    from .contract import RewardError, make_scores, read_request
    from .failure import failure_reasons
    from .images import ImageBatch, load_images, to_pil
    from .implicit_process_reward import ImplicitProcessReward
    from .process_reward import ProcessRewardModel
    from .text_answers import VerifiableAnswer
    from .text_callables import TextFunctionReward
    from .text_catalogue import TEXT_CATALOGUE, load_text_reward
    from .text_check import check_text_reward
    from .text_compose import WeightedTextSum
    from .text_format import JsonFormat, TextFormat
    from .text_length import LengthReward, RepetitionPenalty
    from .text_reward_model import RewardModel

__all__ = [
    "CATALOGUE",
    "TEXT_CATALOGUE",
    "CodeTests",
    "FunctionReward",
    "ImageBatch",
    "ImplicitProcessReward",
    "JsonFormat",
    "LengthReward",
    "ProcessRewardModel",
    "RepetitionPenalty",
    "RewardError",
    "RewardModel",
    "TextFormat",
    "TextFunctionReward",
    "VerifiableAnswer",
    "WeightedSum",
    "WeightedTextSum",
    "check_reward",
    "check_text_reward",
    "failure_reasons",
    "load_images",
    "load_reward",
    "load_text_reward",
    "make_scores",
    "read_request",
    "to_pil",
]

_HOME = {
    "CATALOGUE": "catalogue",
    "CodeTests": "code_tests",
    "FunctionReward": "callables",
    "ImageBatch": "images",
    "ImplicitProcessReward": "implicit_process_reward",
    "JsonFormat": "text_format",
    "LengthReward": "text_length",
    "ProcessRewardModel": "process_reward",
    "RepetitionPenalty": "text_length",
    "RewardError": "contract",
    "RewardModel": "text_reward_model",
    "TEXT_CATALOGUE": "text_catalogue",
    "TextFormat": "text_format",
    "TextFunctionReward": "text_callables",
    "VerifiableAnswer": "text_answers",
    "WeightedSum": "compose",
    "WeightedTextSum": "text_compose",
    "check_reward": "check",
    "check_text_reward": "text_check",
    "failure_reasons": "failure",
    "load_images": "images",
    "load_reward": "catalogue",
    "load_text_reward": "text_catalogue",
    "make_scores": "contract",
    "read_request": "contract",
    "to_pil": "images",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
