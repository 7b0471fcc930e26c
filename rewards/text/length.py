# SPDX-License-Identifier: Apache-2.0
"""Rewards for how much a completion says: its length, and its repetitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from visalign.core.rewards.terms import soft_overlong
from visalign.interfaces import Metadata, Scores

from .contract import Prompt, TextRule, TextVerdict, read_text_request, text_scores

RULES = ("target", "linear", "soft_overlong")


class LengthReward:
    """A penalty in [-1, 0] for the length n of a completion.

    - "target": -min(|n - target| / scale, 1). Distance to a wanted length as in L1, arXiv 2503.04697 (LCPO),
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
        """Choose the rule and what is counted.

        Args:
            rule: see the class.
            count: "words" (between white space), "characters", a function of the text that gives a number or
                a list of tokens, or a transformers tokenizer. A text that is tokenised anew can have
                another length than what was generated: where the trainer knows that, use length_field.
            length_field: metadata field with the number of generated tokens; then nothing is counted.
            target: wanted length, for "target".
            target_field: metadata field with the sample's own target.
            scale: length that costs the full penalty, for "target" and "linear".
            max_length: L of "soft_overlong".
            cache: c of "soft_overlong", 1 … L.
            name: for messages and logs.

        Raises:
            ValueError: an unknown rule, or numbers that it lacks, that are not its own, or out of range.
        """
        if rule not in RULES:
            raise ValueError(f"{name}: rule is {rule!r}; allowed are {', '.join(RULES)}.")
        given = {"target": target, "target_field": target_field, "scale": scale}
        given |= {"max_length": max_length, "cache": cache}
        _check_rule(name, rule, {key for key, value in given.items() if value is not None})
        for key in ("target", "scale"):
            value: Any = given[key]
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
        size = len(request)
        if self._length_field is None:
            lengths = [self._count(completion) for completion in request.completions]
        else:
            lengths = request.column(self._length_field)
        targets = request.column(self._target_field) if self._target_field else [self._target] * size
        pairs = list(zip(lengths, targets, strict=True))
        read = [float(length) if _is_length(length) else math.nan for length in lengths]
        return text_scores([self._judge(*pair) for pair in pairs], self.unit, parts={"length": read})

    def _judge(self, length: Any, target: Any) -> TextVerdict:
        if not _is_length(length):
            return TextVerdict(
                reason=f"its metadata has {length!r} as {self._length_field!r}, needed is a length"
            )
        remark = f"length {length:g}"
        if self._rule == "soft_overlong":
            tensor = torch.tensor([length], dtype=torch.float64)
            value = soft_overlong(tensor, max_length=self._max_length, cache=self._cache)
            return TextVerdict(value=value.item(), remark=remark)
        if self._rule == "linear":
            return TextVerdict(value=-min(length / self._scale, 1.0), remark=remark)
        if not _is_length(target):
            return TextVerdict(
                reason=f"its metadata has {target!r} as {self._target_field!r}, needed is a length"
            )
        return TextVerdict(value=-min(abs(length - target) / self._scale, 1.0), remark=remark)


class RepetitionPenalty(TextRule):
    """-(1 - distinct / all) over the n-grams of a completion: 0 where none repeats, near -1 for a loop.

    A completion of fewer than n units has no n-gram and scores 0. The n-gram penalty of Yeo et al., arXiv
    2502.03373, as a whole-text score.
    """

    range = (-1.0, 0.0)
    unit = "share of repeated n-grams"

    def __init__(self, n: int = 3, *, by: str = "words", name: str = "repetition") -> None:
        """Choose the n-gram.

        Args:
            n: units in one n-gram.
            by: "words" (between white space, case does not count) or "characters" (for scripts without
                blanks).
            name: for messages and logs.

        Raises:
            ValueError: n below 1, or an unknown unit.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"{name}: n is {n!r}; allowed are whole numbers from 1.")
        if by not in ("words", "characters"):
            raise ValueError(f"{name}: by is {by!r}; allowed are 'words' and 'characters'.")
        self.name = name
        self._n, self._by = n, by

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        """Penalise it; the record is not looked at."""
        lower = completion.casefold()
        units = lower.split() if self._by == "words" else list(lower)
        grams = list(zip(*(units[start:] for start in range(self._n)), strict=False))
        if not grams:
            return TextVerdict(value=0.0, remark=f"fewer than {self._n} {self._by}")
        repeated = len(grams) - len(set(grams))
        return TextVerdict(value=-repeated / len(grams), remark=f"{repeated} of {len(grams)} repeat")


def _check_rule(name: str, rule: str, given: set[str]) -> None:
    """Each rule with its own numbers, all of them and no others."""
    allowed = {
        "target": ({"target", "scale"}, {"target_field", "scale"}),
        "linear": ({"scale"},),
        "soft_overlong": ({"max_length", "cache"},),
    }[rule]
    if given not in allowed:
        needed = " or ".join(" and ".join(sorted(one)) for one in allowed)
        raise ValueError(
            f"{name}: rule {rule!r} takes {needed}, no more and no less; given: "
            f"{', '.join(sorted(given)) or 'nothing'}."
        )


def _counter(name: str, count: Any) -> Callable[[str], Any]:
    """A function that measures a text."""
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

    def measured(text: str) -> Any:
        found: Any = count(text)
        return found if isinstance(found, int | float) else len(found)

    return measured


def _is_length(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given < math.inf
