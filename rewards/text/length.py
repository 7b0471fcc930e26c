# SPDX-License-Identifier: Apache-2.0
"""Rewards for the length of a completion and its repetitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from visalign.core.rewards.terms import soft_overlong
from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import check_choices, check_counts

from .contract import Prompt, TextRule, TextVerdict, read_text_request, text_scores

RULES: dict[str, tuple[set[str], ...]] = {
    "target": ({"target", "scale"}, {"target_field", "scale"}),
    "linear": ({"scale"},),
    "soft_overlong": ({"max_length", "cache"},),
}
"""rule -> sets of options that it takes, one of them exactly."""


class LengthReward:
    """Penalty in [-1, 0] for the length n of a completion.

    - "target": -min(|n - target| / scale, 1). Distance to a target length as in L1, arXiv 2503.04697 (LCPO),
      bounded here;
    - "linear": -min(n / scale, 1): shorter is better;
    - "soft_overlong": `visalign.core.soft_overlong`, 0 up to max_length - cache, -1 from max_length on.
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
        """Choose the rule and the unit of length.

        Args:
            rule: see the class.
            count: "words" (between white space), "characters", a function of the text that returns a number
                or a list of tokens, or a transformers tokenizer. Tokenizing the text again can give another
                length than was generated; prefer length_field where the trainer provides it.
            length_field: metadata field with the number of generated tokens; then nothing is counted.
            target: target length, for "target".
            target_field: metadata field with the sample's own target.
            scale: length that costs the full penalty, for "target" and "linear".
            max_length: L of "soft_overlong".
            cache: c of "soft_overlong", 1 … L.
            name: for messages and logs.
        """
        check_choices(name, rule=(rule, RULES))
        options = {"target": target, "target_field": target_field, "scale": scale}
        options |= {"max_length": max_length, "cache": cache}
        names = {key for key, value in options.items() if value is not None}
        if names not in RULES[rule]:
            needed = " or ".join(" and ".join(sorted(option)) for option in RULES[rule])
            raise ValueError(
                f"{name}: rule {rule!r} takes {needed}, no more and no less; given: "
                f"{', '.join(sorted(names)) or 'nothing'}."
            )
        for key, value in (("target", target), ("scale", scale)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: {key} is {value}; allowed are finite numbers above 0.")
        if max_length is not None and cache is not None and not 1 <= cache <= max_length:
            raise ValueError(f"{name}: cache is {cache}; allowed are 1 to max_length, which is {max_length}.")
        self.name = name
        self._rule, self._target, self._target_field = rule, target, target_field
        self._length_field, self._scale = length_field, scale or 1.0
        self._max_length, self._cache = max_length or 1, cache or 1
        self._count = _counter(name, count)

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """Penalise each completion; the part "length" has the lengths."""
        request = read_text_request(self.name, completions, prompts, metadata)
        if self._length_field is None:
            lengths = [self._count(completion) for completion in request.completions]
        else:
            lengths = request.column(self._length_field)
        targets = request.column(self._target_field) if self._target_field else [self._target] * len(request)
        part = [float(length) if _is_length(length) else math.nan for length in lengths]
        return text_scores(list(map(self._judge, lengths, targets)), self.unit, parts={"length": part})

    def _judge(self, length: Any, target: Any) -> TextVerdict:
        checked = [(length, self._length_field)]
        if self._rule == "target":
            checked.append((target, self._target_field))
        for value, field in checked:
            if not _is_length(value):
                return TextVerdict(reason=f"its metadata has {value!r} as {field!r}, needed is a length")
        if self._rule == "soft_overlong":
            tensor = torch.tensor([length], dtype=torch.float64)
            value = soft_overlong(tensor, max_length=self._max_length, cache=self._cache).item()
        else:
            distance = length if self._rule == "linear" else abs(length - target)
            value = -min(distance / self._scale, 1.0)
        return TextVerdict(value=value, remark=f"length {length:g}")


class RepetitionPenalty(TextRule):
    """-(1 - distinct / all) over the n-grams of a completion: 0 without repetition, near -1 for a loop.

    A completion of fewer than n units scores 0. The n-gram penalty of Yeo et al., arXiv 2502.03373, as a
    score of the whole text.
    """

    range = (-1.0, 0.0)
    unit = "share of repeated n-grams"

    def __init__(self, n: int = 3, *, by: str = "words", name: str = "repetition") -> None:
        """Choose the n-gram.

        Args:
            n: units in one n-gram.
            by: "words" (between white space, case-insensitive) or "characters".
            name: for messages and logs.
        """
        check_counts(name, n=n)
        check_choices(name, by=(by, ("words", "characters")))
        self.name = name
        self._n, self._by = n, by

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        """Penalise repetition; the record is ignored."""
        lower = completion.casefold()
        units = lower.split() if self._by == "words" else list(lower)
        grams = list(zip(*(units[start:] for start in range(self._n)), strict=False))
        if not grams:
            return TextVerdict(value=0.0, remark=f"fewer than {self._n} {self._by}")
        repeated = len(grams) - len(set(grams))
        return TextVerdict(value=-repeated / len(grams), remark=f"{repeated} of {len(grams)} repeat")


def _counter(name: str, count: Any) -> Callable[[str], Any]:
    if count == "words":
        return lambda text: len(text.split())
    if count == "characters":
        return len
    if hasattr(count, "encode") and not isinstance(count, str):
        return lambda text: len(count.encode(text, add_special_tokens=False))
    if not callable(count):
        raise ValueError(
            f"{name}: count is {count!r}; allowed are 'words', 'characters', a function of the text, or a "
            "tokenizer."
        )

    def measure(text: str) -> Any:
        length: Any = count(text)
        return length if isinstance(length, int | float) else len(length)

    return measure


def _is_length(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
