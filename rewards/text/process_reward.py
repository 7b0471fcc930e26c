# SPDX-License-Identifier: Apache-2.0
"""A process reward model: a transformers token classifier that gives each step a probability of being right,
or what it contributes to the outcome.

The convention is that of TRL's PRMTrainer and of Math-Shepherd (Wang et al., arXiv 2312.08935): two labels,
of which 1 means right; a step is judged at the last token of what follows it, the separator or a marker of
its own. `visalign.text.step_tokens` states it whole; `visalign.training.process.trainer` trains such models.
One with a single label is SPA-RL's progress estimator (arXiv 2505.20732): it gives contributions that add up
to the outcome. The paper's second reward, for actions that an environment could execute, is left out: a
completion of which a tool's call failed is not judged at all.
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
from visalign.rewards.base.contract import RewardError, make_scores
from visalign.text.rollout import TextRollout
from visalign.text.step_tokens import StepEncoder, StepTokens, step_logits
from visalign.text.steps import Span, StepReading, StepRewards, step_index

from .classifier import check_counts, load_classifier, load_tokenizer, longest_text, spelled_out
from .contract import read_text_request

Aggregate = Literal["min", "product", "mean", "last"]
CONTRIBUTIONS = ("sum",)
"""What a progress estimator says of a whole completion: the outcome that it expects."""


@dataclass(frozen=True, kw_only=True)
class StepScores:
    """What a process reward model says of the steps of B completions."""

    span: Sequence[Sequence[Span]]
    """B lists of (first character, one past the last), the separator left out."""
    prob: Sequence[Tensor]
    """B tensors [n_steps] float32, the probability that the step is right, or its contribution; NaN in
    invalid completions."""
    valid: Tensor
    """bool [B]."""
    reason: Sequence[str | None]
    """Why a completion is invalid; None for the valid ones."""

    def __len__(self) -> int:
        return len(self.prob)

    def padded(self) -> Tensor:
        """[B, K] float32, NaN beyond the steps of a row."""
        if not self.prob:
            return torch.zeros(0, 0)
        return pad_sequence(list(self.prob), batch_first=True, padding_value=math.nan)


class ProcessRewardModel:
    """The probability or contribution of each step, and one number of a completion made of them.

    As one number: "min", the weakest step (Math-Shepherd); "product", that all are right (Lightman et al.,
    arXiv 2305.20050); "mean"; "last". "mean" can be raised by writing more good steps, "min" and "product" by
    writing fewer: mind the number of steps, which is among the parts, or set `min_steps`. Contributions of a
    progress estimator have their sum, in the outcome's unit.

    A text longer than the model reads is invalid, not cut; so is one without a step, and one that spells out
    a special token, with which a policy could forge turns.
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
        precision: str = "fp32",
        batch_size: int = 16,
        max_length: int | None = None,
        name: str = "process_reward",
    ) -> None:
        """Load the model.

        Args:
            model: folder or hub name of a token classification model with two labels, or with one of a
                progress estimator, or the module.
            tokenizer: folder, hub name or object; that of the model when None.
            separator: what ends a step in a completion.
            marker: what the model reads after each step; the separator when None.
            aggregate: how `score` makes one number of the steps: "min" (None), "product", "mean" or "last";
                of contributions "sum" alone.
            min_steps: completions with fewer steps are invalid.
            right_label: which of two labels means right, 0 or 1.
            device: where it runs.
            precision: of the weights: "fp32", "bf16" or "fp16".
            batch_size: texts in one forward pass; neighbours in length share a pass.
            max_length: tokens of the longest text; the least of the model's and tokenizer's limits when None.
            name: for messages and logs.

        Raises:
            ValueError: an option that is not allowed.
            RewardError: the model cannot be loaded, or has no trained head or more than two labels.
        """
        check_counts(name, batch_size=batch_size, max_length=max_length, min_steps=min_steps)
        if right_label not in (0, 1):
            raise ValueError(f"{name}: right_label is {right_label!r}; allowed are 0 and 1.")
        self.name, self.device, self.batch_size = name, torch.device(device), batch_size
        self.min_steps, self.right_label = min_steps, right_label
        self.reading = StepReading(separator=separator, marker=marker)
        self.model: Any = load_classifier(
            name, model, AutoModelForTokenClassification, "token", precision, self.device
        )
        self._choose(aggregate)
        self.tokenizer: Any = load_tokenizer(name, model, tokenizer)
        self._encoder = StepEncoder(self.tokenizer, self.reading)
        self.max_length = longest_text(self.model, self.tokenizer, max_length)

    def steps(self, completions: Sequence[str], prompts: Sequence[Prompt]) -> StepScores:
        """Spans and probabilities of every step of each completion."""
        request = read_text_request(self.name, completions, prompts, None)
        spans = [self.reading.spans(completion) for completion in request.completions]
        prob = [torch.full((len(found),), math.nan) for found in spans]
        reasons: list[str | None] = [None] * len(request)
        encoded: dict[int, StepTokens] = {}
        for row, (prompt, completion) in enumerate(zip(request.prompts, request.completions, strict=True)):
            read = self._read(prompt, [completion[start:end] for start, end in spans[row]])
            if isinstance(read, str):
                reasons[row] = read
            else:
                encoded[row] = read
        order = sorted(encoded, key=lambda row: len(encoded[row].ids))
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            for row, judged in zip(rows, self._forward([encoded[row] for row in rows]), strict=True):
                if torch.isfinite(judged).all():
                    prob[row] = judged
                else:
                    reasons[row] = f"the process reward model gave {judged.tolist()} for its steps"
        valid = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
        return StepScores(span=spans, prob=prob, valid=valid, reason=reasons)

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """One number per completion; metadata is not looked at.

        Returns:
            The chosen aggregate; all of the model's are parts, and "steps", their number. The text lists
            what is said of each step.
        """
        read_text_request(self.name, completions, prompts, metadata)
        judged = self.steps(completions, prompts)
        table = judged.padded()
        exists = torch.isfinite(table)
        parts = {how: aggregate_steps(table, how, exists) for how in self.aggregates}
        parts["steps"] = exists.sum(1).float()
        text = [", ".join(f"{value:.3f}" for value in prob.tolist()) for prob in judged.prob]
        return make_scores(parts[self.aggregate], judged.reason, self.unit, parts=parts, text=text)

    def score_rollout(self, rollout: TextRollout, *, tokenizer: Any = None) -> StepRewards:
        """Rewards [B, K] of the steps of a rollout, and which tokens [B, T] they are; `tokens()` gives
        process rewards [B, T]. A completion that met the length limit is judged with its unfinished last
        step. The tokenizer is that of the policy that wrote it; of this model when None.
        """
        judged = self.steps(list(rollout.text), list(rollout.prompt))
        step = step_index(rollout, self.tokenizer if tokenizer is None else tokenizer, self.reading)
        reason = [
            given if generated else "it was not generated: the prompt is too long"
            for given, generated in zip(judged.reason, rollout.generated.tolist(), strict=True)
        ]
        return StepRewards(
            reward=judged.padded(), step=step, valid=judged.valid & rollout.generated, reason=reason
        )

    def _choose(self, aggregate: str | None) -> None:
        """Set what is said of a step and of the whole, by the number of the model's labels."""
        name, labels = self.name, self.model.config.num_labels
        if labels not in (1, 2):
            raise RewardError(
                f"{name}: the model has {labels} labels; a process reward model has two, wrong and right "
                "(num_labels=2), or one, the contribution. Choose one that was trained as such."
            )
        self.aggregates = get_args(Aggregate) if labels == 2 else CONTRIBUTIONS
        if labels == 1:
            self.range, self.unit = (-math.inf, math.inf), "outcome"
        self.aggregate = self.aggregates[0] if aggregate is None else aggregate
        if self.aggregate not in self.aggregates:
            raise ValueError(
                f"{name}: aggregate is {aggregate!r}; allowed are {', '.join(self.aggregates)} of a model "
                f"with {labels} labels."
            )

    def _read(self, prompt: Prompt, steps: list[str]) -> StepTokens | str:
        """What the model reads, or the reason why there is nothing to judge."""
        if len(steps) < self.min_steps:
            return (
                f"it has {len(steps)} steps, cut at {self.reading.separator!r}; at least {self.min_steps} "
                "are needed"
            )
        forged = next(filter(None, (spelled_out(self.tokenizer, step) for step in steps)), None)
        if forged is not None:
            return forged
        tokens = self._encoder.encode(prompt, steps)
        if len(tokens.ids) > self.max_length:
            return (
                f"prompt and steps have {len(tokens.ids)} tokens; the model reads at most {self.max_length}"
            )
        return tokens

    @torch.no_grad()
    def _forward(self, batch: list[StepTokens]) -> list[Tensor]:
        """Probabilities or contributions of each text's steps."""
        said = step_logits(self.model, batch, right_label=self.right_label)
        said = torch.sigmoid(said) if self.model.config.num_labels == 2 else said
        return list(said.cpu().split([len(tokens.ends) for tokens in batch]))
