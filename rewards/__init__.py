# SPDX-License-Identifier: Apache-2.0
"""Rewards for pictures and for text: one file per judge, catalogues, composition. Imported at first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calibrated import Calibrated
    from .callables import FunctionReward
    from .catalogue import CATALOGUE, load_judge, load_reward
    from .chat_server import ChatServer
    from .check import check_reward
    from .checklist import VisionReward
    from .checklist_data import Checklist
    from .code_tests import CodeTests
    from .comparing import as_pairwise
    from .compose import WeightedSum
    from .contract import RewardError, make_scores, read_request
    from .ensemble import Ensemble
    from .explanation import Explanation
    from .failure import failure_reasons
    from .geneval import GenEval
    from .grm import DeepSeekGRM
    from .heie import Heie
    from .hpsv3 import HPSv3, HPSv3Model
    from .images import ImageBatch, load_images, to_pil
    from .implicit_process_reward import ImplicitProcessReward
    from .lift import Lift
    from .lora_ensemble_judge import LoraEnsembleReward
    from .ocr import OcrReward
    from .process_reward import ProcessRewardModel
    from .ranking import Ranking, rank
    from .reward_dance import RewardDance
    from .reward_dance_pairs import RewardDancePairs
    from .reward_dance_reference import ReferenceReward, select_references
    from .text_answers import VerifiableAnswer
    from .text_callables import TextFunctionReward
    from .text_catalogue import TEXT_CATALOGUE, load_text_reward
    from .text_check import check_text_reward
    from .text_compose import WeightedTextSum
    from .text_format import JsonFormat, TextFormat
    from .text_length import LengthReward, RepetitionPenalty
    from .text_reward_model import RewardModel
    from .uncertainty_use import UncertaintyUsed
    from .unified_reward import UnifiedReward
    from .unified_reward_pairs import UnifiedRewardPairs
    from .visual_quality import VisualQuality
    from .vlm import Ask, VisionLanguageJudge
    from .win_rate import GroupWinRate, as_pointwise
    from .yes_no_server import YesNoServer

__all__ = [
    "CATALOGUE",
    "TEXT_CATALOGUE",
    "Ask",
    "Calibrated",
    "ChatServer",
    "Checklist",
    "CodeTests",
    "DeepSeekGRM",
    "Ensemble",
    "Explanation",
    "FunctionReward",
    "GenEval",
    "GroupWinRate",
    "HPSv3",
    "HPSv3Model",
    "Heie",
    "ImageBatch",
    "ImplicitProcessReward",
    "JsonFormat",
    "LengthReward",
    "Lift",
    "LoraEnsembleReward",
    "OcrReward",
    "ProcessRewardModel",
    "Ranking",
    "ReferenceReward",
    "RepetitionPenalty",
    "RewardDance",
    "RewardDancePairs",
    "RewardError",
    "RewardModel",
    "TextFormat",
    "TextFunctionReward",
    "UncertaintyUsed",
    "UnifiedReward",
    "UnifiedRewardPairs",
    "VerifiableAnswer",
    "VisionLanguageJudge",
    "VisionReward",
    "VisualQuality",
    "WeightedSum",
    "WeightedTextSum",
    "YesNoServer",
    "as_pairwise",
    "as_pointwise",
    "check_reward",
    "check_text_reward",
    "failure_reasons",
    "load_images",
    "load_judge",
    "load_reward",
    "load_text_reward",
    "make_scores",
    "rank",
    "read_request",
    "select_references",
    "to_pil",
]

_HOME = {
    "as_pairwise": "comparing",
    "as_pointwise": "win_rate",
    "Ask": "vlm",
    "CATALOGUE": "catalogue",
    "check_reward": "check",
    "check_text_reward": "text_check",
    "Checklist": "checklist_data",
    "Calibrated": "calibrated",
    "CodeTests": "code_tests",
    "Ensemble": "ensemble",
    "Explanation": "explanation",
    "failure_reasons": "failure",
    "FunctionReward": "callables",
    "GenEval": "geneval",
    "GroupWinRate": "win_rate",
    "Heie": "heie",
    "HPSv3": "hpsv3",
    "HPSv3Model": "hpsv3",
    "ImageBatch": "images",
    "ImplicitProcessReward": "implicit_process_reward",
    "JsonFormat": "text_format",
    "LengthReward": "text_length",
    "load_images": "images",
    "load_judge": "catalogue",
    "load_reward": "catalogue",
    "load_text_reward": "text_catalogue",
    "make_scores": "contract",
    "LoraEnsembleReward": "lora_ensemble_judge",
    "OcrReward": "ocr",
    "ProcessRewardModel": "process_reward",
    "rank": "ranking",
    "Ranking": "ranking",
    "read_request": "contract",
    "ReferenceReward": "reward_dance_reference",
    "RepetitionPenalty": "text_length",
    "RewardDance": "reward_dance",
    "RewardDancePairs": "reward_dance_pairs",
    "RewardError": "contract",
    "RewardModel": "text_reward_model",
    "select_references": "reward_dance_reference",
    "TEXT_CATALOGUE": "text_catalogue",
    "TextFormat": "text_format",
    "TextFunctionReward": "text_callables",
    "to_pil": "images",
    "UncertaintyUsed": "uncertainty_use",
    "VerifiableAnswer": "text_answers",
    "VisionLanguageJudge": "vlm",
    "VisionReward": "checklist",
    "VisualQuality": "visual_quality",
    "WeightedSum": "compose",
    "WeightedTextSum": "text_compose",
    "ChatServer": "chat_server",
    "DeepSeekGRM": "grm",
    "Lift": "lift",
    "UnifiedReward": "unified_reward",
    "UnifiedRewardPairs": "unified_reward_pairs",
    "YesNoServer": "yes_no_server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
