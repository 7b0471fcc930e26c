# SPDX-License-Identifier: Apache-2.0
"""`check_text_reward`: the contract that every reward for text keeps, for people who write their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from visalign.interfaces import Metadata, Scores, TextReward
from visalign.rewards.base.attempt import Attempt
from visalign.rewards.base.contract import RewardError
from visalign.rewards.text.contract import Prompt

from .form import declaration_problems, form_problems

_COMPLETIONS = ("The answer is 4.", "", "\\boxed{4} 🙂\n", "<think>2+2</think><answer>4</answer>")


class TextCase:
    """One reward with the inputs that it is tried on."""

    def __init__(
        self,
        reward: Any,
        completions: list[str],
        prompts: list[Prompt],
        metadata: list[Any] | None,
        tolerance: float,
    ) -> None:
        self.reward, self.completions, self.prompts = reward, completions, prompts
        self.metadata, self.tolerance = metadata, tolerance
        self.scores = self.run(range(len(completions)))

    def run(self, rows: Sequence[int]) -> Scores:
        """Score the chosen rows on copies."""
        metadata = None if self.metadata is None else [copy.deepcopy(self.metadata[row]) for row in rows]
        prompts = [copy.deepcopy(self.prompts[row]) for row in rows]
        return self.reward.score([self.completions[row] for row in rows], prompts, metadata)

    def same(self, rows: Sequence[int]) -> bool:
        """Whether the chosen rows score as in the whole batch."""
        index, scores = list(rows), self.run(rows)
        expected, valid = self.scores.value[index], self.scores.valid[index]
        if len(scores) != len(index) or not torch.equal(scores.valid, valid):
            return False
        return torch.allclose(scores.value[valid], expected[valid], rtol=self.tolerance, atol=self.tolerance)


def check_text_reward(
    reward: TextReward | str | Callable[..., Any],
    *,
    completions: Sequence[str] | None = None,
    prompts: Sequence[Prompt] | None = None,
    metadata: Metadata | None = None,
    tolerance: float = 1e-6,
) -> list[str]:
    """Try a reward for text against the contract.

    Args:
        reward: an object with the contract, a name for `load_text_reward`, or a plain function.
        completions: B ≥ 2 completions that it can judge; four short texts, one of them empty, when None.
        prompts: their prompts; "2 + 2 = ?" when None.
        metadata: their records.
        tolerance: how much equal scores may differ, absolute and relative (bf16 models need more).

    Returns:
        The names of the checks, all of which passed.

    Raises:
        RewardError: lists everything that is wrong, each with its mend.
        ValueError: fewer than two completions, or prompts of another number.

    Example:
        >>> check_text_reward("repetition")[0]
        'declares name, unit, range, direction'
    """
    texts = list(_COMPLETIONS if completions is None else completions)
    asked: list[Prompt] = ["2 + 2 = ?"] * len(texts) if prompts is None else list(prompts)
    if len(texts) < 2 or len(asked) != len(texts):
        raise ValueError(
            f"check_text_reward got {len(texts)} completions and {len(asked)} prompts; give at least two, "
            "and one prompt each."
        )
    subject = _resolve(reward)
    name = str(getattr(subject, "name", type(subject).__name__))
    signature = "score(self, completions, prompts, metadata=None) -> Scores"
    if problems := declaration_problems(subject, unit="1 = correct", signature=signature):
        raise _report(name, problems)
    with Attempt() as attempt:
        case = TextCase(subject, texts, asked, None if metadata is None else list(metadata), tolerance)
    if attempt.error is not None:
        message = (
            f"score(completions, prompts, metadata) raised {type(attempt.error).__name__}: {attempt.error}"
        )
        raise _report(name, [message]) from attempt.error
    if problems := form_problems(case.scores, len(texts), unit=subject.unit, noun="completion"):
        raise _report(name, problems)
    for promise, probe in TEXT_PROBES.items():
        with Attempt() as attempt:
            problems += probe(case)
        if attempt.error is not None:
            problems.append(f"trying '{promise}' raised {attempt.error!r}: accept every allowed input")
    if problems:
        raise _report(name, problems)
    return ["declares name, unit, range, direction", "returns well-formed Scores", *TEXT_PROBES]


def _resolve(reward: Any) -> Any:
    if isinstance(reward, str):
        from visalign.rewards.catalogue import load_text_reward

        return load_text_reward(reward)
    if callable(reward) and not hasattr(reward, "score"):
        from visalign.rewards.text.callables import TextFunctionReward

        return TextFunctionReward(reward)
    return reward


def _report(name: str, problems: list[str]) -> RewardError:
    listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return RewardError(f"Text reward {name!r} breaks its contract in {len(problems)} place(s):\n{listed}")


def _validity(case: TextCase) -> list[str]:
    scores, problems = case.scores, []
    reasons = scores.reason or [None] * len(scores)
    if not scores.valid.any():
        return [
            f"it judged none of the completions ({reasons[0]}): give check_text_reward completions=, "
            "prompts=, metadata= that it can judge"
        ]
    if not torch.isfinite(scores.value[scores.valid]).all():
        problems.append("a valid score is NaN or infinite: set valid=False and a reason for that sample")
    if not torch.isnan(scores.value[~scores.valid]).all():
        problems.append("an invalid sample has a number as its value: make it NaN, a failure is no score")
    if any(not ok and not reason for ok, reason in zip(scores.valid.tolist(), reasons, strict=True)):
        problems.append("an invalid sample has no reason: say in Scores.reason why it could not be judged")
    return problems


def _in_range(case: TextCase) -> list[str]:
    low, high = case.reward.range
    outside = [value for value in case.scores.value[case.scores.valid].tolist() if not low <= value <= high]
    if not outside:
        return []
    return [
        f"the score {outside[0]:g} is outside the declared range ({low:g}, {high:g}): declare the true range"
    ]


def _determinism(case: TextCase) -> list[str]:
    if case.same(range(len(case.completions))):
        return []
    return ["the same completions got other scores the second time: seed it, put a model into eval() mode"]


def _order(case: TextCase) -> list[str]:
    if case.same(list(reversed(range(len(case.completions))))):
        return []
    return ["the scores do not follow the completions when their order is reversed: score each by itself"]


def _independence(case: TextCase) -> list[str]:
    if all(case.same([row]) for row in range(len(case.completions))):
        return []
    return [
        "a completion alone scores otherwise than in a batch: take out whatever mixes samples (batch "
        "statistics, ranks, comparisons with the neighbours)"
    ]


def _inputs_kept(case: TextCase) -> list[str]:
    given = [case.completions, case.prompts, case.metadata]
    before = copy.deepcopy(given)
    case.reward.score(*given)
    return [] if given == before else ["it changed what it was given: work on copies"]


def _lengths_refused(case: TextCase) -> list[str]:
    with Attempt() as attempt:
        case.reward.score(list(case.completions), case.prompts[:-1], None)
    if attempt.error is not None:
        return []
    return ["it accepts fewer prompts than completions: raise a ValueError (read_text_request does)"]


TEXT_PROBES: dict[str, Callable[[TextCase], list[str]]] = {
    "failure is NaN, invalid, and has a reason": _validity,
    "values are inside the range": _in_range,
    "the same completions get the same scores": _determinism,
    "scores follow the order of the completions": _order,
    "a score does not depend on its neighbours": _independence,
    "inputs are left as they were": _inputs_kept,
    "unequal lengths are refused": _lengths_refused,
}
