# SPDX-License-Identifier: Apache-2.0
"""Train a process reward model: a token classifier learns which steps are right from step labels, or what
each step contributes from outcomes.

A record is {"prompt": text or conversation, "steps": [text, …], "labels": [1, 0, …]}. A label is right (1,
True), wrong (0, False), between them the share of continuations that reach the answer (the soft labels of
Math-Shepherd), or None if unknown. Each step is scored at the last token of the separator that follows it
(`visalign.text.step_tokens`). The loss of a batch is the mean over its labelled steps, so that a text counts
by its number of steps, as in TRL's PRMTrainer.

A classifier with one label is SPA-RL's progress estimator: its output at the end of a step, c_k, is trained
so that Σ_k c_k = R, by the mean over the completions of (Σ_k c_k − R)². Its records are scored completions,
{"prompt", "completion", "reward"}, as text_sample writes them; those without a step or a finite reward are
left out. The released code overwrites the values of the steps by one of the whole trajectory, and leaves the
last step without a reward; this is the paper's formula.

Sources: Lightman et al., "Let's verify step by step", arXiv 2305.20050; Wang et al., Math-Shepherd, arXiv
    2312.08935, eqs. 2-4; Wang et al., SPA-RL, arXiv 2505.20732.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils.rnn import pad_sequence

from visalign.core.rewards.steps import progress_loss
from visalign.data.sets.prompt_files import is_prompt
from visalign.errors import UserError
from visalign.text.step_tokens import StepEncoder, StepLimits, StepTokens, step_logits
from visalign.text.steps import StepReading
from visalign.training.loop.trainer import Trainer

from .implicit import ImplicitTexts
from .label_fit import FitSettings, LabelFit, LabelOutputs, LabelReport, fit_labels, label_trainer, report_labels

StepRecord = Mapping[str, Any]  # {"prompt", "steps", "labels"} or {"prompt", "completion", "reward"}, as above


def step_label_loss(odds: Tensor, label: Tensor) -> Tensor:
    """Compute the cross-entropy of a step's label: ℓ = −y ln σ(z) − (1 − y) ln σ(−z), per step [n].

    z are log-odds that the step is right (of two logits their difference), y the labels in [0, 1]; without
    one, NaN, loss and gradient are 0. Wang et al., Math-Shepherd, arXiv 2312.08935, eq. 2.
    """
    labelled = torch.isfinite(label)
    target = torch.where(labelled, label, 0.5).to(odds.dtype)
    value = torch.where(labelled, odds, 0.0)
    return torch.where(labelled, binary_cross_entropy_with_logits(value, target, reduction="none"), 0.0)


class StepTexts:
    """Tokenized records of a process reward model, and its loss on them, for `LabelFit`.

    The model is a token classifier with two labels (`AutoModelForTokenClassification`, num_labels=2) for
    labelled texts, or with one, a progress estimator, for scored completions. `reading` has the separator,
    and a marker if the model reads another; `numbers` name the records in messages. Those above the model's
    length are refused ("refuse") or left out ("drop").
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        records: Sequence[StepRecord],
        *,
        reading: StepReading | None = None,
        numbers: Sequence[int] | None = None,
        too_long: str = "refuse",
        cut: StepLimits | None = None,
    ) -> None:
        self.model = model
        config = getattr(model, "config", None)
        self.learns_outcomes = getattr(config, "num_labels", 2) == 1
        encoder = StepEncoder(tokenizer, reading or StepReading(), cut)
        longest = getattr(config, "max_position_embeddings", None) or math.inf
        self.texts: list[tuple[StepTokens, Tensor]] = []
        for number, record in zip(numbers or range(len(records)), records, strict=True):
            steps, labels = read_record(number, record, encoder.reading, outcomes=self.learns_outcomes)
            tokens = encoder.encode(record["prompt"], steps)
            if len(tokens.ids) > longest and too_long == "drop":
                continue
            if len(tokens.ids) > longest:
                raise UserError(
                    f"Record {number} has {len(tokens.ids)} tokens; the model reads at most {longest}. Drop "
                    f"it (data.too_long=drop), or cut records with labels (data.cut.max_length={longest})."
                )
            labels = labels if self.learns_outcomes else labels[: len(tokens.ends)]
            self.texts.append((tokens, torch.tensor(labels)))

    @property
    def rows(self) -> list[int]:
        """Indices of the texts with a label."""
        return [row for row, (_, label) in enumerate(self.texts) if torch.isfinite(label).any()]

    def length(self, row: int) -> int:
        return len(self.texts[row][0].ids)

    def outputs(self, rows: Sequence[int]) -> LabelOutputs:
        """Evaluate the model on some texts, with gradient.

        The odds of a progress estimator are Σ_k c_k − ½: above 0 the completion counts as right.
        """
        texts = [self.texts[row] for row in rows]
        logits = step_logits(self.model, [tokens for tokens, _ in texts])
        label = torch.cat([label for _, label in texts]).to(logits.device)
        if not self.learns_outcomes:
            return LabelOutputs(odds=logits, label=label, loss=step_label_loss(logits, label))
        contributions = pad_sequence(list(logits.split([len(tokens.ends) for tokens, _ in texts])), batch_first=True)
        loss = progress_loss(contributions, label)
        return LabelOutputs(odds=contributions.sum(1) - 0.5, label=label, loss=loss)


def train_process_reward(
    model: nn.Module,
    tokenizer: Any,
    records: Sequence[StepRecord],
    *,
    settings: FitSettings | None = None,
    reading: StepReading | None = None,
    trainer: Trainer[LabelFit] | None = None,
    sharding: bool = False,
) -> list[LabelReport]:
    """Fit a token classifier to step labels, or one with a single label to outcomes, in place; report each epoch.

    The data are described at `StepTexts`. A run is reproducible by its seed; afterwards the model's dropout
    is on or off as before. With `trainer` a fit continues, else one begins by the settings, with `sharding`
    on a model that is divided among the processes (FSDP2) and stays so.
    """
    texts = StepTexts(model, tokenizer, records, reading=reading)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    was_training = model.training
    model.train()
    try:
        trainer = trainer or label_trainer(trained, settings, divided=model if sharding else None)
        return fit_labels(texts.outputs, texts.rows, trainer)
    finally:
        model.train(was_training)


def evaluate_process_reward(
    model: nn.Module,
    tokenizer: Any,
    records: Sequence[StepRecord],
    *,
    reading: StepReading | None = None,
    batch_size: int = 16,
) -> LabelReport:
    """Compute loss and accuracy on labelled texts without dropout; arguments as in `train_process_reward`."""
    return measure_steps(StepTexts(model, tokenizer, records, reading=reading), batch_size)


@torch.no_grad()
def measure_steps(texts: StepTexts | ImplicitTexts, batch_size: int = 16) -> LabelReport:
    """Compute loss and accuracy on tokenized texts without dropout."""
    order = sorted(texts.rows, key=texts.length)  # little padding in a batch
    starts, was_training = range(0, len(order), batch_size), texts.model.training
    texts.model.eval()
    try:
        return report_labels([texts.outputs(order[start : start + batch_size]) for start in starts])
    finally:
        texts.model.train(was_training)


def read_record(
    number: int, record: StepRecord, reading: StepReading, *, outcomes: bool
) -> tuple[list[str], list[float]]:
    """Read the steps of a record, and their labels or the outcome; NaN where there is none."""
    needed = ("prompt", "completion", "reward") if outcomes else ("prompt", "steps", "labels")
    if missing := [key for key in needed if key not in record]:
        learns = "A progress estimator reads text_sample's dataset.jsonl of selection.rule=all."
        raise UserError(
            f"Record {number} has no {', '.join(missing)}; its keys are {', '.join(map(str, record))}, and "
            f"needed are {', '.join(needed)}. {learns if outcomes else 'TRL calls the steps completions.'}"
        )
    if not is_prompt(record["prompt"]):
        raise UserError(
            f"The prompt of record {number} is {record['prompt']!r}; needed is text, or a list of messages "
            'with "role" and "content".'
        )
    return (_read_outcome if outcomes else _read_steps)(number, record, reading)


def _read_outcome(number: int, record: StepRecord, reading: StepReading) -> tuple[list[str], list[float]]:
    """Read the steps of a scored completion and its reward; NaN without a reward or a step."""
    reward, completion = record["reward"], record["completion"]
    if not isinstance(completion, str) or not (reward is None or isinstance(reward, SupportsFloat)):
        raise UserError(
            f"Record {number} has the completion {completion!r} and the reward {reward!r}; needed are text, "
            "and a number or null."
        )
    steps = reading.split(completion)
    outcome = math.nan if reward is None or not steps else float(reward)
    return steps, [outcome if math.isfinite(outcome) else math.nan]


def _read_steps(number: int, record: StepRecord, reading: StepReading) -> tuple[list[str], list[float]]:
    """Read steps without separators, and labels as numbers, NaN for None."""
    steps, labels = record["steps"], record["labels"]
    are_lists = isinstance(steps, list | tuple) and isinstance(labels, list | tuple)
    if not (are_lists and 0 < len(steps) == len(labels) and all(isinstance(step, str) for step in steps)):
        raise UserError(
            f"Record {number} has the steps {steps!r} and the labels {labels!r}; needed are two lists of "
            "equal length, texts and one label each, None if unknown."
        )
    texts = []
    for index, step in enumerate(steps):
        pieces = reading.split(step)
        if len(pieces) != 1:
            problem = "is empty" if not pieces else f"has the separator {reading.separator!r} in its middle"
            raise UserError(
                f"Step {index} of record {number} {problem}, so a completion with it would be split "
                "differently. Join or split the steps with their labels, or choose another separator."
            )
        texts += pieces
    return texts, [_read_label(number, index, label) for index, label in enumerate(labels)]


def _read_label(number: int, index: int, label: Any) -> float:
    if label is None:
        return math.nan
    if not isinstance(label, SupportsFloat) or not 0 <= float(label) <= 1:
        raise UserError(
            f"Label {index} of record {number} is {label!r}; allowed are 1 (right), 0 (wrong), a share "
            "between them, or None."
        )
    return float(label)
