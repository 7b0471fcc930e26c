# SPDX-License-Identifier: Apache-2.0
"""RewardDance: a vision-language model's log-odds of "yes" to one question about a picture, or about two.

Source: Wu et al., "RewardDance: Reward Scaling in Visual Generation", arXiv 2509.08826; no code is out.
The reward is P("yes") where the answer begins, after one prefill; a reason, where one is wanted, is written
behind the decision and is not needed for the score. Choices of ours, because the paper leaves them open or
because a reward needs them: log-odds over all spellings of yes and no instead of the probability of one token
(a probability saturates, its left-over mass is reported beside it); a pair asked in both orders; the wording
of the questions. A model folder's `judge.json` replaces the wording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity
from visalign.rewards.vlm.requests import check_fields, engine_of, requests
from visalign.rewards.vlm.template import Template
from visalign.rewards.vlm.yes_no import MIN_MASS, YesNoReader

from .reward_dance_questions import EXPLAIN, UNITS, YES_NO, Value, check_options, reasons_behind


class RewardDance:
    """Log-odds (or probability) that the answer to a yes/no question about one picture is yes.

    Parts of the scores: "log_odds", "prob" (σ of it), "mass" (what yes and no have of the whole vocabulary's
    probability) and "prob_vocabulary" (what yes alone has of it).
    """

    name = "reward_dance"
    higher_is_better = True

    def __init__(
        self,
        model: Any = "shapes-vlm",
        *,
        value: Value = "log_odds",
        instruction: str = "",
        decision_first: bool = False,
        write_reasons: bool = False,
        template: Template | None = None,
        yes: Sequence[str] | None = None,
        no: Sequence[str] | None = None,
        min_mass: float = MIN_MASS,
        max_new_tokens: int = 128,
        device: str | torch.device = "cpu",
        precision: str = "fp32",
    ) -> None:
        """Load the model and choose the question.

        Args:
            model: folder, hub id or packaged name of a Qwen2-VL, Qwen2.5-VL, Qwen3-VL or InternVL model; or a
                loaded `rewards.vlm.VisionLanguageJudge`.
            value: "log_odds", or "prob" as in the paper, over yes and no.
            instruction: task-specific criteria, put where the template has {instruction}.
            decision_first: ask for reasons behind the decision (template "explain"); the score is read at the
                decision all the same.
            write_reasons: also have them written, into `Scores.text`; needs decision_first.
            template: instead of the folder's "yes_no" or "explain", or ours.
            yes: spellings of yes instead of the template's, each one token of the model.
            no: spellings of no.
            min_mass: smallest probability of yes and no together that counts as an answer.
            max_new_tokens: of a reason.
            device: where the model runs.
            precision: of its weights: "fp32", "bf16" or "fp16".

        Raises:
            ValueError: options that are not allowed, or an instruction that the template has no place for.
            RewardError: the model or its answer tokens cannot be used.
        """
        check_options(self.name, value, decision_first, write_reasons)
        self.engine = engine_of(model, device=device, precision=precision)
        kind = ("explain", EXPLAIN) if decision_first else ("yes_no", YES_NO)
        self.template = template or self.engine.template(*kind)
        self._fields = check_fields(self.template, instruction=instruction)
        self._read = YesNoReader(self.engine, self.template, yes=yes, no=no, min_mass=min_mass)
        self.value, self.unit, self.range = value, *UNITS[value]
        self._tokens = max_new_tokens if write_reasons else 0
        fixed = {"value": value, "instruction": instruction, "min_mass": min_mass}
        self._options = {**fixed, **self._read.spellings}

    @property
    def identity(self) -> Identity:
        """What the scores depend on."""
        return Identity(judge=self.name, **self.engine.identity_fields(self.template, **self._options))

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score per (image, prompt); metadata is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, asks = requests(request, self.template, reasons, self._fields)
        odds = self._read(asks)
        for row, reason in zip(rows, odds.reasons, strict=True):
            reasons[row] = reason
        prob = odds.log_odds.sigmoid()
        columns = {
            "log_odds": odds.log_odds,
            "prob": prob,
            "mass": odds.mass,
            "prob_vocabulary": prob * odds.mass,
        }
        parts = {key: scatter(column, rows, len(request)) for key, column in columns.items()}
        text = None
        if self._tokens:
            said = reasons_behind(self.engine, self.template, asks, odds, self._tokens)
            text = [""] * len(request)
            for row, reason in zip(rows, said, strict=True):
                text[row] = reason
        return make_scores(parts[self.value], reasons, self.unit, parts=parts, text=text)
