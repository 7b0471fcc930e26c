# SPDX-License-Identifier: Apache-2.0
"""Rewards that only count, the length of a completion or its repetitions, and random rewards as a control."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from visalign.core.rewards.terms import soft_overlong
from visalign.interfaces import Metadata, Prompt, Scores
from visalign.rewards.base.contract import check_choices, check_counts, check_rules
from visalign.seeds import sample_seed

from .contract import TextRule, TextVerdict, read_text_request, text_scores

RULES: dict[str, tuple[set[str], ...]] = {
    "target": ({"target", "scale"}, {"target_field", "scale"}),
    "linear": ({"scale"},),
    "soft_overlong": ({"max_length", "cache"},),
}
"""rule -> sets of options that it takes, one of them exactly."""
UNITS = ("words", "characters")


class LengthReward:
    """Penalty in [-1, 0] for the length n of a completion.

    - "target": -min(|n - target| / scale, 1). Distance to a target length as in L1, arXiv 2503.04697 (LCPO), bounded
      here;
    - "linear": -min(n / scale, 1): shorter is better;
    - "soft_overlong": `visalign.core.soft_overlong`, 0 up to max_length - cache, -1 from max_length on.

    Args:
        count: unit of length, "words" (between white space), "characters", tokens of a transformers tokenizer, or a
            function of the text. Tokenizing again can give another length than was generated: prefer length_field.
        length_field: metadata field with the number of generated tokens, as DAPO counts; replaces `count`.
        target_field: metadata field with the sample's own target.
        scale: length that costs the full penalty, for "target" and "linear".
    """

    range = (-1.0, 0.0)
    higher_is_better = True
    unit = "1 = full penalty"

    def __init__(
        self,
        rule: str = "soft_overlong",
        *,
        count: Any = "words",
        length_field: str | None = None,
        target: float | None = None,
        target_field: str | None = None,
        scale: float | None = None,
        max_length: int | None = None,
        cache: int | None = None,
        name: str = "length",
    ) -> None:
        check_choices(name, rule=(rule, RULES))
        options = {"target": target, "target_field": target_field, "scale": scale}
        options |= {"max_length": max_length, "cache": cache}
        names = {key for key, value in options.items() if value is not None}
        needed = " or ".join(" and ".join(sorted(option)) for option in RULES[rule])
        listed = ", ".join(sorted(names)) or "nothing"
        sizes = {key: value for key, value in options.items() if key in names - {"target_field"}}
        are_sizes = all(_is_length(size) and size for size in sizes.values())
        self.name, self._rule, self._target, self._scale = name, rule, target, scale or 1.0
        self._max_length, self._cache = max_length or 1, cache or 1
        self._length_field, self._target_field = length_field, target_field
        self._count = _counter(name, count)
        rules = {
            f"rule {rule!r} takes {needed}, no more and no less; given: {listed}": names in RULES[rule],
            f"the sizes are {sizes}; allowed are finite numbers above 0": are_sizes,
        }
        check_rules(name, rules)
        top = f"cache is {cache}; allowed are 1 to max_length ({max_length})"
        check_rules(name, {top: 1 <= self._cache <= self._max_length})

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Penalise each completion; the part "length" has the lengths."""
        request = read_text_request(self.name, completions, prompts, metadata)
        if self._length_field is None:
            lengths: Sequence[Any] = [self._count(text) for text in request.completions]
        else:
            lengths = request.column(self._length_field)
        targets = request.column(self._target_field) if self._target_field else [self._target] * len(request)
        parts = {"length": [float(length) if _is_length(length) else math.nan for length in lengths]}
        return text_scores(list(map(self._judge, lengths, targets)), self.unit, parts=parts)

    def _judge(self, length: Any, target: Any) -> TextVerdict:
        for value, field in ((length, self._length_field), (target, self._target_field)):
            if field and not _is_length(value):
                return TextVerdict(reason=f"its metadata has {value!r} as {field!r}, needed is a length")
        if self._rule == "soft_overlong":
            tensor = torch.tensor([length], dtype=torch.float64)
            value = soft_overlong(tensor, max_length=self._max_length, cache=self._cache).item()
        else:
            value = -min(abs(length - (target or 0)) / self._scale, 1.0)  # "linear" has no target
        return TextVerdict(value=value, remark=f"length {length}")


class RepetitionPenalty(TextRule):
    """-(1 - distinct / all) over the n-grams of a completion: 0 without repetition, near -1 for a loop.

    A completion of fewer than n units scores 0. The n-gram penalty of Yeo et al., arXiv 2502.03373, for the whole
    text.
    """

    range = (-1.0, 0.0)
    unit = "share of repeated n-grams"

    def __init__(self, n: int = 3, *, by: str = "words", name: str = "repetition") -> None:
        """Choose the number n of units in an n-gram, "words" (case-insensitive) or "characters"."""
        check_counts(name, n=n)
        check_choices(name, by=(by, UNITS))
        self.name = name
        self._n, self._by = n, by

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        lower = completion.casefold()
        units = lower.split() if self._by == "words" else list(lower)
        grams = list(zip(*(units[start:] for start in range(self._n)), strict=False))
        if not grams:
            return TextVerdict(value=0.0, remark=f"fewer than {self._n} {self._by}")
        repeated = len(grams) - len(set(grams))
        return TextVerdict(value=-repeated / len(grams), remark=f"{repeated} of {len(grams)} repeat")


class RandomReward:
    """Random 1 or 0, a function of seed, prompt and completion; a control for clipping and drift, arXiv 2512.16912."""

    unit = "by lot"
    range = (0.0, 1.0)
    higher_is_better = True

    def __init__(self, share: float = 0.5, *, seed: int = 0, name: str = "random") -> None:
        """Set the probability `share` of a 1, and the random seed."""
        check_rules(name, {f"share is {share}; allowed are numbers between 0 and 1, without them": 0 < share < 1})
        self.name, self._share, self._seed = name, share, seed

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        request = read_text_request(self.name, completions, prompts, metadata)
        keys = [json.dumps(prompt, sort_keys=True, default=str) for prompt in request.prompts]
        pairs = zip(keys, request.completions, strict=True)
        uniform = [sample_seed(self._seed, "random reward", *pair) / 2**63 for pair in pairs]
        return text_scores([TextVerdict(value=float(number < self._share)) for number in uniform], self.unit)


def _counter(name: str, count: Any) -> Callable[[str], int]:
    if isinstance(count, str):
        check_choices(name, count=(count, UNITS))
        return (lambda text: len(text.split())) if count == "words" else len
    if hasattr(count, "encode"):
        return lambda text: len(count.encode(text, add_special_tokens=False))
    forms = f"{', '.join(UNITS)}, a tokenizer, or a function of the text"
    check_rules(name, {f"count is {count!r}; allowed are {forms}": callable(count)})
    return count


def _is_length(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
