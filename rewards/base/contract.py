# SPDX-License-Identifier: Apache-2.0
"""The two ends of every reward: a checked request goes in; out come `Scores`, where failure is no number.

A reward that looks at the prompt masks rows whose prompt has no visible character (`prompt_problem`).
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.data.sets.prompt_files import record_key
from visalign.errors import RewardError as RewardError
from visalign.interfaces import Metadata, Preferences, Scores

from .failure import failure_reasons
from .images import ImageBatch, as_contract, load_images

_INVISIBLE = ("Zs", "Zl", "Zp", "Cc", "Cf")  # Unicode's categories of separators, control and format characters

GROUP_KEY = "group_id"  # Key of the metadata by which a reward that compares inside groups (`needs_group`) knows them


def check_rules(name: str, rules: Mapping[str, bool]) -> None:
    """Raise a ValueError with the first message whose rule does not hold."""
    for message, holds in rules.items():
        if not holds:
            raise ValueError(f"{name}: {message}.")


def check_counts(name: str, **counts: int | None) -> None:
    """Refuse options that are neither whole numbers from 1 nor None."""
    for key, number in counts.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}: {key} is {number!r}; allowed are whole numbers from 1.")


def check_choices(name: str, **choices: tuple[Any, Iterable[Any]]) -> None:
    """Refuse options, each given as (value, allowed values), whose value is not allowed."""
    for key, (value, allowed) in choices.items():
        names = tuple(allowed)
        if value not in names:
            raise ValueError(f"{name}: {key} is {value!r}; allowed are {', '.join(map(str, names))}.")


def check_scales(name: str, scales: Mapping[str, tuple[float, float]], labels: Iterable[str]) -> None:
    """Check label -> (mean, std) of rewards that are brought to one scale: one for each of `labels`."""
    if missing := [label for label in labels if label not in scales]:
        raise ValueError(f"{name} has no (mean, std) for {', '.join(missing)}; give one for each reward.")
    for label, (mean, std) in scales.items():
        if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise ValueError(f"{name}[{label!r}] is ({mean}, {std}); needed are finite numbers with std above 0.")


@dataclass(frozen=True)
class Request:
    """B images with B prompts and B metadata records (None where there is none), lengths checked."""

    images: ImageBatch
    prompts: list[str]
    metadata: list[Mapping[str, Any] | None]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def rows(self) -> list[int]:
        """Rows whose images can be read."""
        return [row for row, _ in self.images.readable()]

    def select(self, rows: Sequence[int], *, stack: bool = True) -> tuple[Any, list[str], list[Any]]:
        """Return images, prompts and records of readable rows, as a reward takes them; a `stack` copies the images."""
        images: Any = [image for row in rows if (image := self.images.images[row]) is not None]
        texts = [self.prompts[row] for row in rows], [self.metadata[row] for row in rows]
        return as_contract(images) if stack else images, *texts


def read_request(
    name: str, images: Any, prompts: Sequence[str], metadata: Metadata | None, *, texts: bool = False
) -> Request:
    """Check what a reward was asked to judge; `images` (or `texts`) come in any form that `load_images` takes."""
    check_list(name, "prompts", prompts, "string", is_text)
    batch = load_images(images, texts=texts)
    if len(batch) != len(prompts):
        raise ValueError(f"{name}: {len(batch)} images and {len(prompts)} prompts; give one prompt per image.")
    return Request(batch, list(prompts), read_metadata(name, metadata, len(prompts), noun="image"))


def check_list(name: str, argument: str, values: Any, item: str, is_item: Callable[[Any], bool]) -> None:
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise TypeError(f"{name}: {argument} is a {type(values).__name__}; needed is a list, one {item} per sample.")
    for index, value in enumerate(values):
        if not is_item(value):
            description = f"{type(value).__name__} {value!r:.40}"
            raise TypeError(f"{name}: {argument}[{index}] is the {description}; needed is a {item}.")


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def read_pairs(
    name: str, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None, *, texts: bool = False
) -> tuple[Request, Tensor]:
    """Read B pairs of images of B prompts as one request of 2B images, and their numbers [B, 2] in it."""
    first, second = read_request(name, left, prompts, metadata, texts=texts), load_images(right, texts=texts)
    if len(second) != len(first):
        raise ValueError(f"{name}: {len(first)} left and {len(second)} right images; give pairs.")
    both = ImageBatch(first.images.images + second.images, first.images.reasons + second.reasons)
    numbers = torch.arange(2 * len(first)).view(2, -1).T
    return Request(both, first.prompts * 2, first.metadata * 2), numbers


def prompt_problem(prompt: str) -> str | None:
    """Return why a reward that looks at the prompt masks a row; None for a text with a visible character."""
    if any("\ud800" <= sign <= "\udfff" for sign in prompt):
        return "the prompt is no text in Unicode: it holds half of a surrogate pair"
    if any(unicodedata.category(sign) not in _INVISIBLE for sign in prompt):
        return None
    return "the prompt is empty, so there is nothing to compare the image with"


def read_metadata(name: str, metadata: Metadata | None, size: int, *, noun: str) -> list[Mapping[str, Any] | None]:
    """Check the metadata: one record or None per sample; `noun` names a sample in messages."""
    if metadata is None:
        return [None] * size
    check_list(name, "metadata", metadata, "mapping or None", lambda record: isinstance(record, Mapping | None))
    if len(metadata) != size:
        raise ValueError(f"{name}: {len(metadata)} metadata records for {size} {noun}s; give one each, or None.")
    return list(metadata)


def group_labels(name: str, request: Request) -> list[Hashable]:
    """Return the group of each row: its record's, or if no record has one its prompt and source image."""
    records = [record or {} for record in request.metadata]
    has_key = [GROUP_KEY in record for record in records]
    if not any(has_key):
        samples = zip(request.prompts, records, strict=True)
        return [record_key({**record, "prompt": prompt}) for prompt, record in samples]
    if not all(has_key):
        raise ValueError(f"{name}: metadata[{has_key.index(False)}] has no {GROUP_KEY!r}; give each one, or none.")
    labels: list[Hashable] = [record[GROUP_KEY] for record in records]
    prompt_of: dict[Hashable, str] = {}
    for label, prompt in zip(labels, request.prompts, strict=True):
        if prompt_of.setdefault(label, prompt) != prompt:
            raise ValueError(f"{name}: group {label!r} has the prompts {prompt_of[label]!r} and {prompt!r}; split it.")
    return labels


def without_group(metadata: Sequence[Mapping[str, Any] | None]) -> list[Mapping[str, Any] | None]:
    """Drop the group's name from records, as it is no property of the prompt."""
    return [record and {key: value for key, value in record.items() if key != GROUP_KEY} for record in metadata]


def scatter(values: Sequence[float] | Tensor, rows: Sequence[int], size: int) -> Tensor:
    """Make a [size] float32 tensor with `values` at `rows` and NaN elsewhere."""
    full = torch.full((size,), torch.nan)
    if len(rows):
        full[torch.tensor(rows)] = torch.as_tensor(values, dtype=torch.float32).detach().cpu()
    return full


def scatter_scores(
    columns: Mapping[str, Tensor],
    rows: Sequence[int],
    reasons: Sequence[str | None],
    unit: str,
    text: Sequence[str] | None = None,
) -> Scores:
    """Make scores of the columns "value", perhaps "std", and parts, each with the numbers of `rows`."""
    parts = {name: scatter(column, rows, len(reasons)) for name, column in columns.items()}
    return make_scores(parts.pop("value"), reasons, unit, std=parts.pop("std", None), parts=parts, text=text)


def make_scores(
    value: Tensor,
    reasons: Sequence[str | None],
    unit: str,
    *,
    std: Tensor | None = None,
    parts: Mapping[str, Tensor] | None = None,
    text: Sequence[str] | None = None,
) -> Scores:
    """Make scores [B] whose invalid rows (those with a reason) are NaN in value, std and every part."""
    valid = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
    nan = torch.tensor(torch.nan)
    return Scores(
        value=torch.where(valid, value, nan),
        valid=valid,
        unit=unit,
        std=None if std is None else torch.where(valid, std, nan),
        parts={key: torch.where(valid, part, nan) for key, part in (parts or {}).items()},
        text=text,
        reason=list(reasons),
    )


def rows_of(answer: Scores | Preferences) -> list[dict[str, Any]]:
    """Split an answer into rows of plain values: numbers by column, text, and the reason of a failed one.

    A valid row without a finite number becomes invalid.
    """
    main = answer.value if isinstance(answer, Scores) else answer.prob
    columns = {"main": main, "std": answer.std, **{f"part.{name}": part for name, part in answer.parts.items()}}
    if isinstance(answer, Preferences):
        columns["log_odds"] = answer.log_odds
    numbers = {name: column.tolist() for name, column in columns.items() if column is not None}
    texts, reasons = answer.text or [None] * len(answer), failure_reasons(answer)
    for row, number in enumerate(numbers["main"]):
        if reasons[row] is None and not math.isfinite(number):
            reasons[row], numbers["main"][row] = f"the judge's answer is {number}, which is no score", math.nan
    return [
        {"columns": {name: column[row] for name, column in numbers.items()}, "text": text, "reason": reason}
        for row, (text, reason) in enumerate(zip(texts, reasons, strict=True))
    ]


def answer_of(rows: Sequence[Mapping[str, Any]], unit: str | None) -> Scores | Preferences:
    """Reverse `rows_of`: scores where there is a unit, else preferences; a missing number is NaN."""
    names = dict.fromkeys(["main", *(name for row in rows for name in row["columns"])])
    columns = {name: torch.tensor([row["columns"].get(name, math.nan) for row in rows]).float() for name in names}
    reasons, texts = [row.get("reason") for row in rows], [row["text"] for row in rows]
    shared: dict[str, Any] = {
        "valid": torch.tensor([reason is None for reason in reasons], dtype=torch.bool),
        "std": columns.get("std"),
        "parts": {name.removeprefix("part."): part for name, part in columns.items() if name.startswith("part.")},
        "text": [text or "" for text in texts] if any(texts) else None,
        "reason": reasons,
    }
    if unit is not None:
        return Scores(value=columns["main"], unit=unit, **shared)
    return Preferences(prob=columns["main"], log_odds=columns.get("log_odds"), **shared)
