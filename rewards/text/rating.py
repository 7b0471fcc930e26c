# SPDX-License-Identifier: Apache-2.0
"""Rewards for what is said of images: ratings by order or by nearness, verdicts on pairs.

Deviations from VisualQuality-R1's released code: an answer that cannot be read is no random number, one
image alone is no error, and images are compared over all answers that are judged together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from visalign.core.preference.fidelity import FLOOR, answer_statistics, fidelity_rewards
from visalign.interfaces import Metadata, Prompt, RewardCapabilities, Scores
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import FORMS, first_word
from visalign.rewards.reading.verdicts import OPTIONS, verdict

from .contract import TextRule, TextVerdict, read_text_request, text_scores

RULES = ("fidelity", "binary", "regression")


class RatingReward:
    """How good a written rating of an image is, from its record's `image`, `mos` and, where given, `set`.

    - "fidelity": mean over the other images of the set of √(p q) + √((1 − p)(1 − q)), q = Φ(this rating's
      lead over the other image's mean in deviations), p by the labels 1, ½ or 0; in [0, 1];
    - "binary": mean over the other images of 1 where the lead has the labels' sign, ½ for equal ratings;
    - "regression": 1 − |rating − mos| / (largest − smallest rating).

    The K answers of an image are those of its prompt that are judged together. An answer that cannot be read
    takes no part in its image's mean; it gets 0 where there is a bonus for the form, and is masked without.

    Wu et al., VisualQuality-R1, arXiv 2505.14460, section 3; its ablations.
    """

    higher_is_better = True
    unit = "1 = right order"

    def __init__(
        self,
        rule: str = "fidelity",
        *,
        form: float = 0.0,
        reads: str = "answer",
        prefilled: str = "",
        floor: float = FLOOR,
        name: str = "rating",
    ) -> None:
        """Choose the rule.

        Args:
            rule: see the class.
            form: added for an answer that can be read, ≥ 0.
            reads: how it is written, a row of `rewards.reading.ratings.FORMS`: "answer" (1 to 5), "boxed" (1
                to 10) or "yes_no" (1 or 0).
            prefilled: what the prompt opened the answer with, e.g. "<answer>".
            floor: γ of "fidelity", in squared rating steps.
            name: for messages and logs.

        Raises:
            ValueError: another rule, or a number out of range.
        """
        if rule not in RULES:
            raise ValueError(f"{name}: rule is {rule!r}; allowed are {', '.join(RULES)}.")
        if reads not in FORMS:
            raise ValueError(f"{name}: reads is {reads!r}; allowed are {', '.join(FORMS)}.")
        if not 0 <= form < math.inf or not 0 < floor < math.inf:
            raise ValueError(f"{name}: form is {form} and floor {floor}; form is ≥ 0 and floor > 0.")
        self.name, self.rule, self.form, self.floor = name, rule, form, floor
        self.prefilled, self.range = prefilled, (0.0, 1.0 + form)
        self.reader, self.low, self.high = FORMS[reads]
        self.capabilities = RewardCapabilities(needs_batch=rule != "regression")

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """Judge all answers together; the remark is the rating, the part "rating" too."""
        request = read_text_request(self.name, completions, prompts, metadata)
        read = [self._read(completion) for completion in request.completions]
        images, labels, sets = (request.column(field) for field in ("image", "mos", "set"))
        lacking = [self._lacking(image, mos) for image, mos in zip(images, labels, strict=True)]
        places_of: dict[tuple[str, str, str], list[int]] = {}
        for n, shown in enumerate(zip(images, labels, sets, strict=True)):
            image, mos, within = map(str, shown)
            places_of.setdefault((image, mos, within), []).append(n)
        rows = list(places_of.values())
        answers = torch.full((len(rows), max(map(len, rows), default=1)), torch.nan, dtype=torch.float64)
        for row, places in enumerate(rows):
            known = [read[n][0] if lacking[n] is None else math.nan for n in places]
            answers[row, : len(places)] = torch.tensor(known, dtype=torch.float64)
        firsts = [places[0] for places in rows]
        target = torch.tensor([_number(labels[n]) for n in firsts], dtype=torch.float64)
        value = self._values(answers, target, [str(sets[n]) for n in firsts])
        verdicts = [TextVerdict()] * len(request)
        for row, places in enumerate(rows):
            for column, n in enumerate(places):
                verdicts[n] = self._verdict(float(value[row, column]), *read[n], lacking[n])
        return text_scores(verdicts, self.unit, parts={"rating": [rating for rating, _ in read]})

    def _lacking(self, image: Any, mos: Any) -> str | None:
        if not isinstance(image, str) or not math.isfinite(_number(mos)):
            return "its record has no image and finite mos"
        if self.rule == "regression" and not self.low <= mos <= self.high:
            return (
                f"its mos is {mos:g}, and regression compares ratings of {self.low:g} to {self.high:g} "
                "with it"
            )
        return None

    def _read(self, completion: str) -> tuple[float, str]:
        """(rating, or NaN, why there is none)."""
        try:
            return self.reader(self.prefilled + completion), ""
        except AnswerError as error:
            return math.nan, str(error)

    def _values(self, answers: torch.Tensor, target: torch.Tensor, sets: Sequence[str]) -> torch.Tensor:
        """[B, K] of [B, K] ratings; NaN where there is none."""
        if self.rule == "regression":
            return 1 - (answers - target[:, None]).abs() / (self.high - self.low)
        if self.rule == "fidelity":
            found = fidelity_rewards(answers, target, within=sets, floor=self.floor)
        else:
            found = _in_order(answers, target, sets)
        # With nothing to compare with all answers are worth the same, and nothing is learnt of them.
        return torch.where(torch.isfinite(answers), found.nan_to_num(0.0), torch.nan)

    def _verdict(self, value: float, rating: float, why: str, lacking: str | None) -> TextVerdict:
        if lacking is not None:
            return TextVerdict(reason=lacking)
        if why:
            return TextVerdict(value=0.0, remark=why) if self.form else TextVerdict(reason=why)
        return TextVerdict(value=value + self.form, remark=f"{rating:g}")


class VerdictReward(TextRule):
    """1 where the answer about a pair prefers what its record's `label` does, the share of the votes for the
    first image, and else −1: another answer, a tie, or one that cannot be read.

    Rule-based reward of SPCT, DeepSeek-GRM, arXiv 2504.02495.
    """

    range = (-1.0, 1.0)
    unit = "1 = right, -1 = wrong"

    def __init__(
        self, *, words: Sequence[str] | None = None, options: Sequence[str] = OPTIONS, name: str = "verdict"
    ) -> None:
        """Choose how answers are read.

        Args:
            words: two words, of which the answer begins with one: the first for the first image; None: a
                sentence in which one of `options` is asserted.
            options: the two sentences that are asked for, "NAME is better".
            name: for messages and logs.

        Raises:
            ValueError: not two different words or options.
        """
        for what, two in (("words", words), ("options", options)):
            texts = {one for one in two or () if isinstance(one, str)}
            if two is not None and (isinstance(two, str) or len(two) != 2 or len(texts) != 2):
                raise ValueError(
                    f"{name}: {what} is {two!r}; give two texts that differ, of the first image first (in "
                    "YAML 'yes' needs its quotes)."
                )
        self.name, self.words, self.options = name, words, tuple(options)

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        """Compare the answer with the record."""
        label = _number(record.get("label"))
        if not 0 <= label <= 1 or label == 0.5:
            return TextVerdict(reason="its record has no label from 0 to 1 that prefers one of the images")
        try:
            side = verdict(completion, options=self.options) if self.words is None else self._word(completion)
        except AnswerError as error:
            return TextVerdict(value=-1.0, remark=str(error))
        right = side == (1 if label > 0.5 else 2)
        return TextVerdict(value=1.0 if right else -1.0, remark=("a tie", "the first", "the second")[side])

    def _word(self, completion: str) -> int:
        assert self.words is not None
        first = first_word(completion)
        for side, word in enumerate(self.words, 1):
            if first == word.casefold():
                return side
        raise AnswerError(f"the answer begins with neither {self.words[0]!r} nor {self.words[1]!r}")


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _in_order(answers: torch.Tensor, target: torch.Tensor, sets: Sequence[str]) -> torch.Tensor:
    """[B, K] share of the other images of the set whose mean lies on the labels' side of the answer."""
    mean = answer_statistics(answers).mean
    same = torch.tensor([[one == two for two in sets] for one in sets]) & ~torch.eye(
        len(sets), dtype=torch.bool
    )
    wanted = torch.sign(target[:, None] - target[None, :])[:, None, :]
    lead = torch.sign(answers[:, :, None] - mean[None, None, :])
    known = same[:, None, :] & torch.isfinite(lead) & torch.isfinite(wanted)
    worth = torch.where(known, 1 - (lead - wanted).abs().clamp(max=2) / 2, 0.0)
    return worth.sum(2) / known.sum(2)
