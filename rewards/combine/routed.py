# SPDX-License-Identifier: Apache-2.0
"""A reward for the samples of some records alone, chosen by their fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import NOT_FOR_SAMPLE, Metadata, Scores, with_capabilities

from .weighted_sum import spread_scores

Where = Mapping[str, Any]
"""Field of a record -> its value, or a list of values of which it has one."""


def matches(record: Mapping[str, Any] | None, where: Where) -> bool:
    """Check whether a record has the values; a table's texts equal YAML's numbers and booleans.

    >>> matches({"task": "ocr", "level": "2"}, {"task": ["ocr", "text"], "level": 2})
    True
    """
    return all(_texts((record or {}).get(field)) & _texts(value) for field, value in where.items())


def _texts(value: Any) -> set[str]:
    return {str(item).casefold() for item in (value if isinstance(value, list | tuple) else [value])}


class Routed:
    """A reward that is asked about the records that match `where`; other samples are not for it, and no failures."""

    identity = None

    def __init__(self, reward: Any, where: Where) -> None:
        self.reward, self.where = with_capabilities(reward), where
        self.name, self.unit, self.range = reward.name, reward.unit, reward.range
        self.higher_is_better, can = reward.higher_is_better, self.reward.capabilities
        at = can.at_iteration
        self.capabilities = replace(can, at_iteration=at and (lambda iteration: Routed(at(iteration), where)))

    def score(self, samples: Any, prompts: Sequence[Any], metadata: Metadata | None = None) -> Scores:
        records = metadata or [None] * len(prompts)
        rows = [row for row, record in enumerate(records) if matches(record, self.where)]
        if not rows:
            none = torch.full((len(prompts),), torch.nan), torch.zeros(len(prompts), dtype=torch.bool)
            return Scores(value=none[0], valid=none[1], unit=self.unit, reason=[NOT_FOR_SAMPLE] * len(prompts))
        some = samples[rows] if isinstance(samples, Tensor) else [samples[row] for row in rows]
        scores = self.reward.score(some, [prompts[row] for row in rows], [records[row] for row in rows])
        return spread_scores(scores, rows, len(prompts), missing=NOT_FOR_SAMPLE)
