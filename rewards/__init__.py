# SPDX-License-Identifier: Apache-2.0
"""Rewards for pictures and for text: one file per judge, catalogues, composition. Imported at first use.

It needs `interfaces` and `core`; no policy and no training loop comes in.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visalign.rewards.base.callables import FunctionReward
    from visalign.rewards.base.contract import RewardError, make_scores, read_request
    from visalign.rewards.base.explanation import Explanation
    from visalign.rewards.base.failure import failure_reasons
    from visalign.rewards.base.images import ImageBatch, load_images, to_pil
    from visalign.rewards.chat.deepseek_grm import DeepSeekGRM
    from visalign.rewards.chat.lift import Lift
    from visalign.rewards.chat.server import ChatServer
    from visalign.rewards.chat.unified_reward import UnifiedReward
    from visalign.rewards.chat.unified_reward_pairs import UnifiedRewardPairs
    from visalign.rewards.chat.yes_no import YesNoServer
    from visalign.rewards.checks.image_reward import check_reward
    from visalign.rewards.checks.text_reward import check_text_reward
    from visalign.rewards.code.reward import CodeTests
    from visalign.rewards.combine.calibrated import Calibrated
    from visalign.rewards.combine.ensemble import Ensemble
    from visalign.rewards.combine.uncertainty import UncertaintyUsed
    from visalign.rewards.combine.weighted_sum import WeightedSum
    from visalign.rewards.heie.judge import Heie
    from visalign.rewards.hpsv3.ensemble_judge import LoraEnsembleReward
    from visalign.rewards.hpsv3.judge import HPSv3, HPSv3Model
    from visalign.rewards.pairs.as_pairwise import as_pairwise
    from visalign.rewards.pairs.as_pointwise import GroupWinRate, as_pointwise
    from visalign.rewards.pairs.ranking import Ranking, rank
    from visalign.rewards.questions.checklist_data import Checklist
    from visalign.rewards.questions.reward_dance import RewardDance
    from visalign.rewards.questions.reward_dance_pairs import RewardDancePairs
    from visalign.rewards.questions.reward_dance_reference import ReferenceReward, select_references
    from visalign.rewards.questions.vision_reward import VisionReward
    from visalign.rewards.questions.visual_quality_r1 import VisualQuality
    from visalign.rewards.text.callables import TextFunctionReward
    from visalign.rewards.text.catalogue import TEXT_CATALOGUE, load_text_reward
    from visalign.rewards.text.format import JsonFormat, TextFormat
    from visalign.rewards.text.implicit_process_reward import ImplicitProcessReward
    from visalign.rewards.text.length import LengthReward, RepetitionPenalty
    from visalign.rewards.text.process_reward import ProcessRewardModel
    from visalign.rewards.text.reward_model import RewardModel
    from visalign.rewards.text.verifiable import VerifiableAnswer
    from visalign.rewards.text.weighted_sum import WeightedTextSum
    from visalign.rewards.verifiers.geneval import GenEval
    from visalign.rewards.verifiers.ocr import OcrReward
    from visalign.rewards.vlm.engine import Ask, VisionLanguageJudge

    from .catalogue import CATALOGUE, load_judge, load_reward

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
    "as_pairwise": "pairs.as_pairwise",
    "as_pointwise": "pairs.as_pointwise",
    "Ask": "vlm.engine",
    "CATALOGUE": "catalogue",
    "check_reward": "checks.image_reward",
    "check_text_reward": "checks.text_reward",
    "Checklist": "questions.checklist_data",
    "Calibrated": "combine.calibrated",
    "CodeTests": "code.reward",
    "Ensemble": "combine.ensemble",
    "Explanation": "base.explanation",
    "failure_reasons": "base.failure",
    "FunctionReward": "base.callables",
    "GenEval": "verifiers.geneval",
    "GroupWinRate": "pairs.as_pointwise",
    "Heie": "heie.judge",
    "HPSv3": "hpsv3.judge",
    "HPSv3Model": "hpsv3.judge",
    "ImageBatch": "base.images",
    "ImplicitProcessReward": "text.implicit_process_reward",
    "JsonFormat": "text.format",
    "LengthReward": "text.length",
    "load_images": "base.images",
    "load_judge": "catalogue",
    "load_reward": "catalogue",
    "load_text_reward": "text.catalogue",
    "make_scores": "base.contract",
    "LoraEnsembleReward": "hpsv3.ensemble_judge",
    "OcrReward": "verifiers.ocr",
    "ProcessRewardModel": "text.process_reward",
    "rank": "pairs.ranking",
    "Ranking": "pairs.ranking",
    "read_request": "base.contract",
    "ReferenceReward": "questions.reward_dance_reference",
    "RepetitionPenalty": "text.length",
    "RewardDance": "questions.reward_dance",
    "RewardDancePairs": "questions.reward_dance_pairs",
    "RewardError": "base.contract",
    "RewardModel": "text.reward_model",
    "select_references": "questions.reward_dance_reference",
    "TEXT_CATALOGUE": "text.catalogue",
    "TextFormat": "text.format",
    "TextFunctionReward": "text.callables",
    "to_pil": "base.images",
    "UncertaintyUsed": "combine.uncertainty",
    "VerifiableAnswer": "text.verifiable",
    "VisionLanguageJudge": "vlm.engine",
    "VisionReward": "questions.vision_reward",
    "VisualQuality": "questions.visual_quality_r1",
    "WeightedSum": "combine.weighted_sum",
    "WeightedTextSum": "text.weighted_sum",
    "ChatServer": "chat.server",
    "DeepSeekGRM": "chat.deepseek_grm",
    "Lift": "chat.lift",
    "UnifiedReward": "chat.unified_reward",
    "UnifiedRewardPairs": "chat.unified_reward_pairs",
    "YesNoServer": "chat.yes_no",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
