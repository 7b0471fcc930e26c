# SPDX-License-Identifier: Apache-2.0
"""EditReward: human preference for an edit of an image and its instruction, by two heads of HPSv3's kind.

Source: Wu et al., "EditReward", arXiv 2509.26346; the forward is that of github.com/TIGER-AI-Lab/EditReward
(configs with "ranknet_multi_head" and "mean"). Checkpoints: the collection TIGER-Lab/editreward, one weight
file under the names of HPSv3's, with two heads `rm_heads.head_0`, `rm_heads.head_1`. As with HPSv3, the
language model gets embeddings without ids, so that positions are plain ("1d"), except in Qwen3-VL; a reward
token in a prompt is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity
from visalign.rewards.vlm.engine import VisionLanguageEngine, check_loading
from visalign.rewards.vlm.published import published_prompt
from visalign.rewards.vlm.requests import requests
from visalign.rewards.vlm.template import question
from visalign.rewards.weights.checkpoint_files import dtype_of

from .head import RanknetHead
from .loading import find_weights, published_engine
from .model import REWARD_TOKEN, mark_not_finite

QUESTIONS = (
    question("edit_reward_following", published_prompt("edit_reward_following"), images=("", "")),
    question("edit_reward_quality", published_prompt("edit_reward_quality"), images=("", "")),
)
"""Question of each head; the source image comes first."""


class EditReward:
    """Mean of two heads' rewards in Bradley-Terry logits, unbounded; the source is the record's "source".

    The parts "following" and "quality" are the heads' means. `std` is the geometric mean of the heads' deviations, as
    published; it is trained like HPSv3's, and is as uninformative. The model is loaded at the first score.

    Args:
        model: the published file, its folder, or hub id.
        base: folder or hub id of the model that it was trained from, whose config and processor are needed
            where the folder has none: "Qwen/Qwen2.5-VL-7B-Instruct", "XiaomiMiMo/MiMo-VL-7B-SFT-2508", ...
    """

    name = "edit_reward"
    unit = "logit"
    range = (-math.inf, math.inf)
    higher_is_better = True

    def __init__(
        self,
        model: str | Path,
        *,
        base: str | Path | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        **options: Any,
    ) -> None:
        check_loading(self.name, options)
        self._model, self._base = model, base
        self._options = {"device": device, "dtype": dtype_of(precision, "edit_reward: ", device), **options}

    @cached_property
    def _loaded(self) -> tuple[VisionLanguageEngine, list[RanknetHead]]:
        path = find_weights(self._model)
        engine, state = published_engine(path, self._base, default_base=None, heads="rm_heads.", **self._options)
        if engine.model.config.model_type == "qwen3_vl" and engine.positions == "1d":
            raise RewardError(
                "The base is a Qwen3-VL; give positions='mrope', min_pixels and max_pixels, as it was trained."
            )
        engine.model.eval().requires_grad_(False)
        heads = []
        for prefix in ("rm_heads.head_0.", "rm_heads.head_1."):
            keys = [key for key in state if key.startswith(prefix)]
            head = RanknetHead.from_state_dict({f"rm_head.{key.removeprefix(prefix)}": state.pop(key) for key in keys})
            heads.append(head.to(engine.network.device))
        if state:
            raise RewardError(f"{path.name} holds more than two heads: {', '.join(sorted(state)[:4])}.")
        return engine, heads

    @property
    def identity(self) -> Identity:
        engine = self._loaded[0]
        texts = "".join(engine.template(template.name, template).text for template in QUESTIONS)
        return Identity(judge=self.name, **{**engine.identity_fields(QUESTIONS[0]), "template": texts})

    @torch.no_grad()
    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B edits; the prompt is the instruction, and the metadata holds the "source"."""
        request = read_request(self.name, images, prompts, metadata)
        reasons, size = list(request.images.reasons), len(request)
        engine, heads = self._loaded
        rows, queries = requests(request, QUESTIONS[0], reasons, source=True)
        outputs: list[Tensor] = []
        for template, head in zip(QUESTIONS, heads, strict=True):
            hidden = engine.hidden(engine.template(template.name, template), queries, at=REWARD_TOKEN)
            outputs.append(head(hidden.states.to(engine.network.device)).cpu())
            for row, reason in zip(rows, hidden.reasons, strict=True):
                reasons[row] = reasons[row] or reason
        following, quality = (scatter(output[:, 0], rows, size) for output in outputs)
        # √(σ₁ σ₂) from the log-deviations
        std = scatter((outputs[0][:, 1] + outputs[1][:, 1]) / 2, rows, size).exp()
        value = (following + quality) / 2
        mark_not_finite(rows, value, std, reasons)
        parts = {"following": following, "quality": quality}
        return make_scores(value, reasons, self.unit, std=std, parts=parts)
