# SPDX-License-Identifier: Apache-2.0
"""Rewards for a judge's answers: ratings of images by order or distance, verdicts on pairs, scores of n responses.

Deviations from VisualQuality-R1's code: an unreadable answer is no random number, a single image is no error, and
images are compared over all answers of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from visalign.core import best_response_reward
from visalign.core.preference.fidelity import FLOOR, answer_statistics, fidelity_rewards
from visalign.interfaces import Metadata, Prompt, RewardCapabilities, Scores
from visalign.rewards.base.contract import check_choices, check_rules
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import FORMS, boxed_scores, first_word
from visalign.rewards.reading.verdicts import OPTIONS, verdict

from .contract import TextRule, TextVerdict, read_text_request, text_scores

RULES = ("fidelity", "binary", "regression")


class RatingReward:
    """Score a written rating of an image against its record's `image`, `mos` and (optional) `set`.

    - "fidelity": mean over the other images of the set of √(p q) + √((1 − p)(1 − q)), q = Φ(this rating's lead over
      the other image's mean in deviations), p by the labels 1, ½ or 0; in [0, 1];
    - "binary": mean over the other images of 1 where the lead has the labels' sign, ½ for equal ratings;
    - "regression": 1 − |rating − mos| / (largest − smallest rating).

    The K answers of an image are those with its record in one call. An unreadable answer is left out of its image's
    mean; it scores 0 where there is a bonus for the form, and is masked without. Wu et al., VisualQuality-R1, arXiv
    2505.14460, section 3; its ablations.

    Args:
        form: bonus for a readable answer, ≥ 0.
        reads: form of the rating, a key of `rewards.reading.ratings.FORMS`: "answer" (1 to 5), "boxed" (1 to 10) or
            "yes_no" (1 or 0).
        prefilled: start of the answer that the prompt wrote, e.g. "<answer>".
        floor: γ of "fidelity", in squared rating steps.
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
        check_choices(name, rule=(rule, RULES), reads=(reads, FORMS))
        bounds = f"form is {form} and floor {floor}; form is ≥ 0 and floor > 0"
        check_rules(name, {bounds: 0 <= form < math.inf and 0 < floor < math.inf})
        self.name, self.rule, self.form, self.floor = name, rule, form, floor
        self.prefilled, self.range = prefilled, (0.0, 1.0 + form)
        self.reader, self.low, self.high = FORMS[reads]
        self.capabilities = RewardCapabilities(needs_batch=rule != "regression")

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Score all answers together; the remark and the part "rating" are the rating."""
        request = read_text_request(self.name, completions, prompts, metadata)
        ratings = [_read_rating(self.reader, self.prefilled + text) for text in request.completions]
        images, labels, sets = (request.column(field) for field in ("image", "mos", "set"))
        problems = [self._record_problem(image, mos) for image, mos in zip(images, labels, strict=True)]
        groups: dict[tuple[str, ...], list[int]] = {}
        for answer, record in enumerate(zip(images, labels, sets, strict=True)):
            groups.setdefault(tuple(map(str, record)), []).append(answer)
        cells = [(row, k, answer) for row, group in enumerate(groups.values()) for k, answer in enumerate(group)]
        table = torch.full((len(groups), max(map(len, groups.values()), default=1)), torch.nan, dtype=torch.float64)
        for row, k, answer in cells:
            table[row, k] = ratings[answer][0] if problems[answer] is None else math.nan
        target = torch.tensor([_number(labels[group[0]]) for group in groups.values()], dtype=torch.float64)
        values = self._values(table, target, [key[2] for key in groups])
        verdicts = [TextVerdict()] * len(request)
        for row, k, answer in cells:
            verdicts[answer] = self._verdict(float(values[row, k]), *ratings[answer], problems[answer])
        return text_scores(verdicts, self.unit, parts={"rating": [rating for rating, _ in ratings]})

    def _record_problem(self, image: Any, mos: Any) -> str | None:
        if not isinstance(image, str) or not math.isfinite(_number(mos)):
            return "its record has no image and finite mos"
        if self.rule == "regression" and not self.low <= mos <= self.high:
            scale = f"{self.low:g} to {self.high:g}"
            return f"its mos is {mos:g}, and regression compares ratings of {scale} with it"
        return None

    def _values(self, answers: torch.Tensor, target: torch.Tensor, sets: Sequence[str]) -> torch.Tensor:
        """Rewards [B, K] of ratings [B, K]; NaN where there is none."""
        if self.rule == "regression":
            return 1 - (answers - target[:, None]).abs() / (self.high - self.low)
        if self.rule == "fidelity":
            values = fidelity_rewards(answers, target, within=sets, floor=self.floor)
        else:
            values = _order_rewards(answers, target, sets)
        # An image with nothing to compare with scores 0 for all answers, so that they teach nothing.
        return torch.where(torch.isfinite(answers), values.nan_to_num(0.0), torch.nan)

    def _verdict(self, value: float, rating: float, unreadable: str, problem: str | None) -> TextVerdict:
        if problem is not None:
            return TextVerdict(reason=problem)
        if unreadable:
            return TextVerdict(value=0.0, remark=unreadable) if self.form else TextVerdict(reason=unreadable)
        return TextVerdict(value=value + self.form, remark=f"{rating:g}")


class VerdictReward(TextRule):
    """1 for an answer about a pair that agrees with its record's `label`, else −1, also if unreadable.

    `label` is the share of votes for the first image. `words` are two with which an answer may begin, that of the
    first image first; without them the answer asserts one of the sentences `options`, "NAME is better". Rule-based
    reward of SPCT (DeepSeek-GRM, arXiv 2504.02495) for one decision; `ScoresReward` has its rule for n responses.
    """

    range = (-1.0, 1.0)
    unit = "1 = right, -1 = wrong"

    def __init__(
        self, *, words: Sequence[str] | None = None, options: Sequence[str] = OPTIONS, name: str = "verdict"
    ) -> None:
        for key, pair in (("words", OPTIONS if words is None else words), ("options", options)):
            is_pair = not isinstance(pair, str) and len(pair) == 2 and pair[0] != pair[1]
            if not is_pair or not all(isinstance(text, str) for text in pair):  # YAML reads yes as True
                raise ValueError(f"{name}: {key} is {pair!r}; give two texts that differ, the first image's first.")
        self.name, self.words, self.options = name, words, tuple(options)

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        label = _number(record.get("label"))
        if not 0 <= label <= 1 or label == 0.5:
            return TextVerdict(reason="its record has no label from 0 to 1 that prefers one of the images")
        try:
            side = verdict(completion, options=self.options) if self.words is None else self._read_word(completion)
        except AnswerError as error:
            return TextVerdict(value=-1.0, remark=str(error))
        right = side == (1 if label > 0.5 else 2)
        return TextVerdict(value=1.0 if right else -1.0, remark=("a tie", "the first", "the second")[side])

    def _read_word(self, completion: str) -> int:
        first, second = self.words or OPTIONS
        side = {first.casefold(): 1, second.casefold(): 2}.get(first_word(completion))
        if side is None:
            raise AnswerError(f"the answer begins with neither {first!r} nor {second!r}")
        return side


class ScoresReward(TextRule):
    r"""1 for an answer whose scores put its record's best response alone in front, else −1, also if unreadable.

    The answer scores all n responses of its prompt in one box, \boxed{7, 3}. `rewards` of the record are their true
    rewards in the order shown; a single response's score must equal its own. The rule of SPCT (DeepSeek-GRM, arXiv
    2504.02495, section 3.2), `visalign.core.best_response_reward`.
    """

    name = "spct"
    range = (-1.0, 1.0)
    unit = "1 = right, -1 = wrong"

    def judge(self, completion: str, record: Mapping[str, Any]) -> TextVerdict:
        listed = record.get("rewards")
        rewards = [_number(value) for value in listed] if isinstance(listed, list | tuple) else []
        finite = bool(rewards) and all(map(math.isfinite, rewards))
        if not finite or (len(rewards) > 1 and rewards.count(max(rewards)) > 1):
            return TextVerdict(reason="its record has no 'rewards', one number per response of which one is highest")
        try:
            scores = boxed_scores(completion, count=len(rewards))
        except AnswerError as error:
            return TextVerdict(value=-1.0, remark=str(error))
        pair = torch.tensor([scores, rewards], dtype=torch.float64)
        return TextVerdict(value=float(best_response_reward(*pair)), remark=", ".join(f"{s:g}" for s in scores))


def _read_rating(reader: Callable[[str], float], text: str) -> tuple[float, str]:
    try:
        return reader(text), ""
    except AnswerError as error:
        return math.nan, str(error)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _order_rewards(answers: torch.Tensor, target: torch.Tensor, sets: Sequence[str]) -> torch.Tensor:
    """Share [B, K] of the other images of the set whose mean lies on the labels' side of the answer."""
    mean = answer_statistics(answers).mean
    position = {name: number for number, name in enumerate(sets)}
    label = torch.tensor([position[name] for name in sets])
    comparable = (label[:, None] == label[None, :]).fill_diagonal_(False)
    label_sign = torch.sign(target[:, None] - target[None, :])[:, None, :]
    answer_sign = torch.sign(answers[:, :, None] - mean[None, None, :])
    counts = comparable[:, None, :] & torch.isfinite(answer_sign) & torch.isfinite(label_sign)
    # 1 for the same sign, ½ where one of them is 0, 0 for opposite signs
    agreement = torch.where(counts, 1 - (answer_sign - label_sign).abs().clamp(max=2) / 2, 0.0)
    return agreement.sum(2) / counts.sum(2)
