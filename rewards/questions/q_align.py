# SPDX-License-Identifier: Apache-2.0
"""Q-Align and DeQA-Score: the mean of five levels of quality under the next word's probabilities.

Sources: Wu et al., "Q-Align", arXiv 2312.17090; You et al., "DeQA-Score", arXiv 2501.11561, which differ in training.
Their checkpoints (q-future/one-align, zhiyuanyou/DeQA-Score-Mix3) are mPLUG-Owl2, whose code comes with them and is
never run here. Any model of `rewards.vlm` can be asked; it sees images in their own shape, where upstream pads them to
squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.rewards.base.contract import RewardError, check_choices, check_rules, read_request, scatter_scores
from visalign.rewards.vlm.engine import EngineJudge
from visalign.rewards.vlm.requests import requests
from visalign.rewards.vlm.template import Template
from visalign.rewards.vlm.yes_no import MIN_MASS

Task = Literal["quality", "aesthetics"]
LEVELS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}


class QAlign(EngineJudge):
    """Σ p·s over the levels s = 5 to 1, with p the softmax over the five words; the prompt is ignored.

    `std` is √Σ p·(s − value)², the width of the distribution (DeQA-Score's), not an error. The parts hold each level's
    p, and "mass", the probability of all five among everything that the model may write.

    Args:
        template: replaces the folder's "q_align_quality" or "q_align_aesthetics", or the published words; it ends
            where the level begins.
        min_mass: smallest probability of the five words together that counts as an answer; 0 upstream.
    """

    name = "q_align"
    unit = "points from 1 to 5"
    range = (1.0, 5.0)
    higher_is_better = True
    capabilities = RewardCapabilities(needs_prompt=False, takes_gpu_images=True)

    def __init__(
        self,
        model: Any,
        *,
        task: Task = "quality",
        template: Template | None = None,
        min_mass: float = MIN_MASS,
        device: str | torch.device = "cpu",
        **loading: Any,
    ) -> None:
        check_choices(self.name, task=(task, get_args(Task)))
        bounds = f"min_mass is {min_mass}; allowed are probabilities below 1"
        check_rules(self.name, {bounds: 0 <= min_mass < 1})
        text = f"How would you rate the {task} of this image?\n"
        messages = [{"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]}]
        prefix = f"The {task} of the image is"
        published = Template(name=f"q_align_{task}", messages=messages, answer_prefix=prefix)
        super().__init__(model, published, template, device=device, **loading)
        self.min_mass, self._level_ids = min_mass, _first_tokens(self.engine.processor.tokenizer)
        self.options = {"min_mass": min_mass, "levels": self._level_ids}

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        reasons, size = list(request.images.reasons), len(request)
        rows, queries = requests(replace(request, prompts=["-"] * size), self.template, reasons)
        if not rows:
            return scatter_scores({"value": torch.zeros(0)}, rows, reasons, self.unit)
        answer = self.engine.answer_logits(self.template, queries, self._level_ids, left_over=True)
        for row, reason, row_mass in zip(rows, answer.reasons, answer.mass.tolist(), strict=True):
            reasons[row] = reason
            if reason is None and not row_mass >= self.min_mass:
                share = f"the five words have {row_mass:.2g} of the probability, and min_mass is {self.min_mass:g}"
                reasons[row] = f"the model names no level: {share}"
        prob = answer.logits.double().softmax(-1)
        mean, std = moments(prob, torch.tensor(list(LEVELS.values()), dtype=torch.float64))
        columns = {**dict(zip(LEVELS, prob.unbind(1), strict=True)), "mass": answer.mass, "value": mean, "std": std}
        return scatter_scores(columns, rows, reasons, self.unit)


def moments(prob: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean Σ p·s and standard deviation √Σ p·(s − mean)² [B] of values [L] under probabilities [B, L]."""
    mean = (prob * values).sum(-1)
    return mean, (prob * (values - mean[:, None]).square()).sum(-1).sqrt()


def _first_tokens(tokenizer: Any) -> list[int]:
    """Return the first token of each level's word, behind a blank where that gives different tokens."""
    for blank in (" ", ""):
        ids = [int(tokenizer(blank + word, add_special_tokens=False)["input_ids"][0]) for word in LEVELS]
        if len(set(ids)) == len(LEVELS):
            return ids
    raise RewardError(f"The levels {', '.join(LEVELS)} do not begin with five tokens here; give another model.")
