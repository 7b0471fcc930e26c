# SPDX-License-Identifier: Apache-2.0
"""Input and output of a reward for text: a checked request in, `Scores` out; failures are no numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from visalign.interfaces import (
    Metadata,
    Prompt,
    RewardCapabilities,
    Scores,
    TextReward,
    is_message,
    policy_text,
    score_named,
)
from visalign.rewards.base.contract import check_list, is_text, make_scores, read_metadata


@dataclass(frozen=True)
class TextRequest:
    """B completions with B prompts and B metadata records (None where there is none), lengths checked."""

    completions: list[str]
    prompts: list[Prompt]
    metadata: list[Mapping[str, Any] | None]

    def __len__(self) -> int:
        return len(self.completions)

    def column(self, field: str) -> list[Any]:
        """The entries of one metadata field, None where a record lacks it."""
        return [None if record is None else record.get(field) for record in self.metadata]

    def score_with(self, label: str, reward: TextReward) -> Scores:
        """Score the completions by a reward, which errors call `label`."""
        return score_named(reward, self.completions, self.prompts, self.metadata, name=label)


@dataclass(frozen=True, kw_only=True)
class TextVerdict:
    """Result for one completion: a value with a remark, or the reason why there is none."""

    value: float = math.nan
    remark: str = ""
    reason: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class TextRule:
    """Base of rewards that score each completion by itself, with its record: subclasses define `judge`."""

    name: str
    unit: str
    range = (0.0, 1.0)
    higher_is_better = True
    capabilities = RewardCapabilities()
    judge: Callable[[str, Mapping[str, Any]], TextVerdict]  # Score one completion with its record

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Score each completion, whatever its prompt; `text` holds the remarks."""
        request = read_text_request(self.name, completions, prompts, metadata)
        records = [record or {} for record in request.metadata]
        return text_scores(list(map(self.judge, request.completions, records)), self.unit)


def read_text_request(
    name: str, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None
) -> TextRequest:
    """Check B completions, prompts and records (None for none); answers of tools and environments are left out."""
    check_list(name, "completions", completions, "string", is_text)
    form = "string, or list of messages as {'role': 'user', 'content': 'text'}"
    check_list(name, "prompts", prompts, form, is_prompt)
    if len(prompts) != len(completions):
        raise ValueError(f"{name}: {len(completions)} completions and {len(prompts)} prompts; give one prompt each.")
    records = read_metadata(name, metadata, len(completions), noun="completion")
    return TextRequest([*map(policy_text, completions)], list(prompts), records)


def is_prompt(prompt: Any) -> bool:
    """True for a string, and for a list of at least one message."""
    is_list = isinstance(prompt, Sequence) and len(prompt) > 0
    return isinstance(prompt, str) or (is_list and all(map(is_message, prompt)))


def text_scores(
    verdicts: Sequence[TextVerdict], unit: str, *, parts: Mapping[str, Sequence[float]] | None = None
) -> Scores:
    """Collect B verdicts as scores, NaN in the rows that have a reason; the remarks become `text`."""
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.parts)
    columns = {name: [verdict.parts.get(name, math.nan) for verdict in verdicts] for name in names}
    return make_scores(
        torch.tensor([verdict.value for verdict in verdicts], dtype=torch.float32),
        [verdict.reason for verdict in verdicts],
        unit,
        parts={key: torch.tensor(part, dtype=torch.float32) for key, part in {**columns, **(parts or {})}.items()},
        text=[verdict.remark for verdict in verdicts],
    )


def after_marker(completion: str, marker: str | None) -> str | None:
    """Text behind the last occurrence of the marker, or None if it is absent; all of it without a marker."""
    if marker is None:
        return completion
    _, separator, rest = completion.rpartition(marker)
    return rest if separator else None


def regular_expression(name: str, pattern: str | None) -> re.Pattern[str] | None:
    """Compile a user's pattern, in which "." matches line ends too."""
    try:
        return None if pattern is None else re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{name}: pattern {pattern!r} is no regular expression ({error}).") from error


def shortened(text: object, limit: int = 60) -> str:
    """Quote the start of a text, for a remark."""
    text = text if isinstance(text, str) else repr(text)
    return repr(text if len(text) <= limit else text[:limit] + "…")
