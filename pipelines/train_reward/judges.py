# SPDX-License-Identifier: Apache-2.0
"""From the configuration to a judge that the reward trainer can train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from visalign.training.reward.batch import RewardBatch, TrainableJudge

from .config import ChecklistModel, HpModel, Hpsv3Model, IctModel, TrainRewardConfig
from .examples import Example, Examples


class TrainedJudge(TrainableJudge, Protocol):
    """A judge with its reading of examples and its folder."""

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        """Rows and labels; with `heldout` the labels are the truth."""
        ...

    def save(self, folder: Path) -> None:
        """What the judge's `from_pretrained` reads."""
        ...


def build_judge(config: TrainRewardConfig, device: torch.device) -> TrainedJudge:
    """The judge on its device, ready to train.

    Args:
        config: of the job.
        device: where it is trained.

    Raises:
        UserError, FileNotFoundError, RewardError: the model cannot be loaded or is of another kind.
    """
    model, seed = config.model, config.seed
    if isinstance(model, IctModel | HpModel):
        from .clip_judges import HpJudge, IctJudge

        is_ict = isinstance(model, IctModel)
        return IctJudge(model, config.data.theta, device) if is_ict else HpJudge(model, seed, device)
    if isinstance(model, ChecklistModel):
        from .checklist_judge import ChecklistJudge

        return ChecklistJudge(model, seed, device)
    from .vlm_judges import AnswerJudge, Hpsv3Judge

    judge = Hpsv3Judge if isinstance(model, Hpsv3Model) else AnswerJudge
    return judge(model, seed, device)  # type: ignore[arg-type]  # of its own kind


def remembered(judge: TrainedJudge, examples: Examples) -> Examples:
    """The examples as the judge keeps them: one whose model is frozen reads each picture once."""
    keep = getattr(judge, "remember", None)
    return examples if keep is None else keep(examples)
