# SPDX-License-Identifier: Apache-2.0
"""Process reward model: a transformers token classifier that scores each step of a completion.

As in TRL's PRMTrainer and Math-Shepherd (Wang et al., arXiv 2312.08935) it has two labels, of which 1 means right, and
scores a step at the last token of the separator or marker behind it (`visalign.text.step_tokens`).

With a single label it is SPA-RL's progress estimator (arXiv 2505.20732): contributions that add up to the outcome. The
paper's second reward, for executable actions, is left out: completions with a failed tool call are not scored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForTokenClassification

from visalign.core.advantages.process import aggregate_steps
from visalign.interfaces import Metadata, Prompt, Scores
from visalign.rewards.base.contract import RewardError, check_choices, check_counts, make_scores
from visalign.text.rollout import TextRollout
from visalign.text.step_tokens import StepEncoder, StepTokens, step_logits
from visalign.text.steps import Span, StepReading, StepRewards, step_index

from .classifier import batches_by_length, load_classifier, load_tokenizer, longest_text, spelled_out
from .contract import read_text_request

Aggregate = Literal["min", "product", "mean", "last"]
CONTRIBUTIONS = ("sum",)  # Aggregates of a progress estimator: the sum of contributions is the expected outcome


@dataclass(frozen=True, kw_only=True)
class StepScores:
    span: Sequence[Sequence[Span]]  # B lists of (first character, one past the last), the separator left out
    prob: Sequence[Tensor]
    """B tensors [n_steps] float32, the probability that the step is right, or its contribution; NaN in
    invalid completions."""
    valid: Tensor  # bool [B]
    reason: Sequence[str | None]  # Why a completion is invalid; None for the valid ones

    def __len__(self) -> int:
        return len(self.prob)

    def padded(self) -> Tensor:
        """[B, K] float32, NaN beyond the steps of a row."""
        if not self.prob:
            return torch.zeros(0, 0)
        return pad_sequence(list(self.prob), batch_first=True, padding_value=math.nan)


class ProcessRewardModel:
    """Probability or contribution of each step, and an aggregate of them per completion.

    Aggregates: "min", the weakest step (Math-Shepherd); "product", that all are right (Lightman et al., arXiv
    2305.20050); "mean"; "last"; "sum" for contributions of a progress estimator, in the outcome's unit. A policy can
    raise "mean" by writing more good steps, "min" and "product" by writing fewer: watch the part "steps", or set
    `min_steps`.

    Texts longer than the model's limit are invalid, not cut; so are texts without a step, and texts that spell out a
    special token, with which a policy could forge turns.

    Args:
        model: folder or hub name of a token classification model with two labels, or with one (a progress estimator),
            or the module.
        tokenizer: folder, hub name or object; that of the model when None.
        separator: text that ends a step in a completion.
        marker: text that the model reads after each step; the separator when None.
        aggregate: "min" (default), "product", "mean" or "last"; "sum" for contributions.
        min_steps: completions with fewer steps are invalid.
        right_label: which of two labels means right, 0 or 1.
        precision: of the weights: "fp32", "bf16", "fp16", or "auto": "bf16" on a GPU, else "fp32".
        max_length: tokens of the longest text; the smaller one of the model's and tokenizer's limits when None.
    """

    range = (0.0, 1.0)
    higher_is_better = True
    unit = "probability"

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        *,
        tokenizer: Any = None,
        separator: str = "\n",
        marker: str | None = None,
        aggregate: Aggregate | Literal["sum"] | None = None,
        min_steps: int = 1,
        right_label: int = 1,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        batch_size: int = 16,
        max_length: int | None = None,
        name: str = "process_reward",
    ) -> None:
        check_counts(name, batch_size=batch_size, max_length=max_length, min_steps=min_steps)
        check_choices(name, right_label=(right_label, (0, 1)))
        self.name, self.device, self.batch_size = name, torch.device(device), batch_size
        self.min_steps, self.right_label = min_steps, right_label
        self.reading = StepReading(separator=separator, marker=marker)
        self.model = load_classifier(name, model, AutoModelForTokenClassification, precision, self.device)
        labels = self.model.config.num_labels
        if labels not in (1, 2):
            raise RewardError(f"{name}: the model has {labels} labels; needed are two, wrong and right, or one.")
        self.aggregates = get_args(Aggregate) if labels == 2 else CONTRIBUTIONS
        if labels == 1:
            self.range, self.unit = (-math.inf, math.inf), "outcome"
        self.aggregate = aggregate or self.aggregates[0]
        check_choices(name, aggregate=(self.aggregate, self.aggregates))
        self.tokenizer: Any = load_tokenizer(name, model, tokenizer)
        self._encoder = StepEncoder(self.tokenizer, self.reading)
        self.max_length = longest_text(self.model, self.tokenizer, max_length)

    def steps(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> StepScores:
        """Compute spans and probabilities of the steps of each completion; metadata is ignored."""
        request = read_text_request(self.name, completions, prompts, metadata)
        spans = [self.reading.spans(completion) for completion in request.completions]
        prob = [torch.full((len(steps),), math.nan) for steps in spans]
        reasons: list[str | None] = [None] * len(request)
        encoded: dict[int, StepTokens] = {}
        for row, (prompt, completion) in enumerate(zip(request.prompts, request.completions, strict=True)):
            steps = [completion[start:end] for start, end in spans[row]]
            reasons[row] = next(filter(None, (spelled_out(self.tokenizer, step) for step in steps)), None)
            if len(steps) < self.min_steps:
                cut = f"cut at {self.reading.separator!r}"
                reasons[row] = f"it has {len(steps)} steps, {cut}; at least {self.min_steps} are needed"
            if reasons[row] is not None:
                continue
            tokens = self._encoder.encode(prompt, steps)
            if len(tokens.ids) <= self.max_length:
                encoded[row] = tokens
            else:
                length = f"prompt and steps have {len(tokens.ids)} tokens"
                reasons[row] = f"{length}; the model reads at most {self.max_length}"
        for rows in batches_by_length({row: len(tokens.ids) for row, tokens in encoded.items()}, self.batch_size):
            for row, values in zip(rows, self._forward([encoded[row] for row in rows]), strict=True):
                if torch.isfinite(values).all():
                    prob[row] = values
                else:
                    reasons[row] = f"the process reward model gave {values.tolist()} for its steps"
        valid = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
        return StepScores(span=spans, prob=prob, valid=valid, reason=reasons)

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Aggregate the steps of each completion; parts are all aggregates and "steps", the number of steps."""
        scores = self.steps(completions, prompts, metadata)
        table = scores.padded()
        exists = torch.isfinite(table)
        parts = {how: aggregate_steps(table, how, exists) for how in self.aggregates}
        parts["steps"] = exists.sum(1).float()
        text = [", ".join(f"{value:.3f}" for value in prob.tolist()) for prob in scores.prob]
        return make_scores(parts[self.aggregate], scores.reason, self.unit, parts=parts, text=text)

    def score_rollout(self, rollout: TextRollout, *, tokenizer: Any = None) -> StepRewards:
        """Score the steps of a rollout, also a last one cut off; the result's `tokens()` are process rewards [B, T].

        `tokenizer` is that of the policy that wrote it; the model's when None.
        """
        scores = self.steps(list(rollout.text), list(rollout.prompt))
        step = step_index(rollout, self.tokenizer if tokenizer is None else tokenizer, self.reading)
        reasons = [
            reason if generated else "it was not generated: the prompt is too long"
            for reason, generated in zip(scores.reason, rollout.generated.tolist(), strict=True)
        ]
        return StepRewards(reward=scores.padded(), step=step, valid=scores.valid & rollout.generated, reason=reasons)

    @torch.no_grad()
    def _forward(self, batch: list[StepTokens]) -> list[Tensor]:
        values = step_logits(self.model, batch, right_label=self.right_label)
        values = torch.sigmoid(values) if self.model.config.num_labels == 2 else values
        return list(values.cpu().split([len(tokens.ends) for tokens in batch]))
