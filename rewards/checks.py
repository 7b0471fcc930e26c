# SPDX-License-Identifier: Apache-2.0
"""`check_reward` and `check_text_reward`: the contract of every reward, as functions for those who write one.

Both try the same promises, each a probe that returns the problems with their fix; images have two more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Metadata, PointwiseReward, Prompt, Scores, TextReward, with_capabilities
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import Attempt
from visalign.rewards.base.images import load_images, to_pil
from visalign.rewards.catalogue import load_reward, load_text_reward

_PROMPTS = ("a red circle", "a blue square", "two green triangles", "a white cross left of a red circle")
_COMPLETIONS = ("The answer is 4.", "", "\\boxed{4} 🙂\n", "<think>2+2</think><answer>4</answer>")


@dataclass(frozen=True)
class _Kind:
    """Words that differ between rewards for images and for text."""

    noun: str
    title: str
    function: str
    unit: str
    """An example."""
    reader: str


_IMAGE = _Kind("image", "Reward", "check_reward", "cosine", "read_request")
_TEXT = _Kind("completion", "Text reward", "check_text_reward", "1 = correct", "read_text_request")


def check_reward(
    reward: PointwiseReward | str | Callable[..., Any],
    *,
    images: Any = None,
    prompts: Sequence[str] | None = None,
    metadata: Metadata | None = None,
    tolerance: float = 1e-6,
) -> list[str]:
    """Try a reward against the contract.

    A reward whose `needs_batch` or `needs_group` is true is not held to score a sample as if it were alone.

    Args:
        reward: an object with the reward contract, a name for `load_reward`, or a plain function.
        images: B ≥ 2 images of one size that the reward can judge; four noisy 64×64 images when None.
        prompts: their prompts; shapes-world prompts when None.
        metadata: their records.
        tolerance: how much equal scores may differ, absolute and relative (bf16 towers need more).

    Returns:
        The names of the checks, all of which passed.

    Raises:
        RewardError: lists everything that is wrong, each with its fix.

    Example:
        >>> check_reward("sharpness")[0]
        'declares name, unit, range, direction'
    """
    subject: Any = load_reward(reward) if isinstance(reward, str) else reward
    if callable(subject) and not hasattr(subject, "score"):
        from visalign.rewards.base.callables import FunctionReward

        subject = FunctionReward(subject)
    probes = _PROBES | {
        "PIL, uint8 and float images agree": _image_forms,
        "one unreadable image is invalid alone": _unreadable_image,
    }
    return _check(_IMAGE, subject, lambda: _images(images, prompts), metadata, tolerance, probes)


def check_text_reward(
    reward: TextReward | str | Callable[..., Any],
    *,
    completions: Sequence[str] | None = None,
    prompts: Sequence[Prompt] | None = None,
    metadata: Metadata | None = None,
    tolerance: float = 1e-6,
) -> list[str]:
    """Try a reward for text against the contract.

    A reward whose `needs_batch` or `needs_group` is true is not held to score a text as if it were alone.

    Args:
        reward: an object with the contract, a name for `load_text_reward`, or a plain function.
        completions: B ≥ 2 completions that it can judge; four short texts, one of them empty, when None.
        prompts: their prompts; "2 + 2 = ?" when None.
        metadata: their records.
        tolerance: how much equal scores may differ, absolute and relative (bf16 models need more).

    Returns:
        The names of the checks, all of which passed.

    Raises:
        RewardError: lists everything that is wrong, each with its fix.
        ValueError: fewer than two completions, or prompts of another number.

    Example:
        >>> check_text_reward("repetition")[0]
        'declares name, unit, range, direction'
    """
    texts = list(_COMPLETIONS if completions is None else completions)
    questions: list[Prompt] = ["2 + 2 = ?"] * len(texts) if prompts is None else list(prompts)
    if len(texts) < 2 or len(questions) != len(texts):
        raise ValueError(
            f"check_text_reward got {len(texts)} completions and {len(questions)} prompts; give at least "
            "two, and one prompt each."
        )
    subject: Any = load_text_reward(reward) if isinstance(reward, str) else reward
    if callable(subject) and not hasattr(subject, "score"):
        from visalign.rewards.text.callables import TextFunctionReward

        subject = TextFunctionReward(subject)
    return _check(_TEXT, subject, lambda: (texts, questions), metadata, tolerance, _PROBES)


class _Case:
    """A reward with the samples that it is tried on; images are on the 8-bit grid that PIL can hold."""

    def __init__(
        self,
        kind: _Kind,
        reward: Any,
        samples: Tensor | list[str],
        prompts: list[Any],
        metadata: Metadata | None,
        tolerance: float,
    ) -> None:
        self.kind, self.reward, self.samples, self.prompts = kind, reward, samples, prompts
        self.metadata = None if metadata is None else list(metadata)
        self.tolerance = tolerance
        needs = with_capabilities(reward).capabilities
        self.relative = needs.needs_batch or needs.needs_group
        self.rows = range(len(prompts))
        self.scores = self.run(self.rows)

    def run(self, rows: Iterable[int], samples: Any = None) -> Scores:
        """Score copies of the chosen rows, with other samples in their place if given."""
        rows = list(rows)
        metadata = None if self.metadata is None else [copy.deepcopy(self.metadata[row]) for row in rows]
        if samples is None:
            batch = self.samples
            samples = batch[rows].clone() if isinstance(batch, Tensor) else [batch[row] for row in rows]
        return self.reward.score(samples, [copy.deepcopy(self.prompts[row]) for row in rows], metadata)

    def same(self, scores: Scores, rows: Iterable[int]) -> bool:
        """Return True if `scores` of the chosen rows equal those of the whole batch."""
        index = list(rows)
        expected, valid = self.scores.value[index], self.scores.valid[index]
        if len(scores) != len(index) or not torch.equal(scores.valid, valid):
            return False
        return torch.allclose(scores.value[valid], expected[valid], rtol=self.tolerance, atol=self.tolerance)


_Probe = Callable[[_Case], list[str]]


def _check(
    kind: _Kind,
    subject: Any,
    inputs: Callable[[], tuple[Any, list[Any]]],
    metadata: Metadata | None,
    tolerance: float,
    probes: dict[str, _Probe],
) -> list[str]:
    name = str(getattr(subject, "name", type(subject).__name__))
    if problems := _declaration_problems(kind, subject):
        raise _report(kind, name, problems)
    samples, prompts = inputs()
    with Attempt() as attempt:
        case = _Case(kind, subject, samples, prompts, metadata, tolerance)
    if attempt.error is not None:
        error = attempt.error
        message = f"score({kind.noun}s, prompts, metadata) raised {type(error).__name__}: {error}"
        raise _report(kind, name, [message]) from error
    if problems := _form_problems(case):
        raise _report(kind, name, problems)
    promises = {
        promise.format(noun=kind.noun): probe
        for promise, probe in probes.items()
        if not (case.relative and probe is _independence)
    }
    for promise, probe in promises.items():
        with Attempt() as attempt:
            problems += probe(case)
        if attempt.error is not None:
            problems.append(f"trying '{promise}' raised {attempt.error!r}: accept every allowed input")
    if problems:
        raise _report(kind, name, problems)
    return ["declares name, unit, range, direction", "returns well-formed Scores", *promises]


def _images(images: Any, prompts: Sequence[str] | None) -> tuple[Tensor, list[str]]:
    """Images [B, 3, H, W] on the 8-bit grid, and prompts."""
    if images is None:
        generator = torch.Generator().manual_seed(0)
        count = 4 if prompts is None else len(prompts)
        images = torch.randint(0, 256, (count, 3, 64, 64), generator=generator, dtype=torch.uint8)
    batch = load_images(images)
    loaded = [image for _, image in batch.readable()]
    texts = (
        list(prompts) if prompts is not None else [_PROMPTS[row % len(_PROMPTS)] for row in range(len(batch))]
    )
    if len(loaded) != len(batch) or len(loaded) < 2 or len({image.shape for image in loaded}) != 1:
        raise ValueError("check_reward needs at least two readable images of one size; give such images.")
    if len(texts) != len(loaded):
        raise ValueError(
            f"check_reward got {len(loaded)} images and {len(texts)} prompts; give one prompt per image."
        )
    return torch.stack(loaded).mul(255).round() / 255, texts


def _report(kind: _Kind, name: str, problems: list[str]) -> RewardError:
    listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return RewardError(f"{kind.title} {name!r} breaks its contract in {len(problems)} place(s):\n{listed}")


def _declaration_problems(kind: _Kind, reward: Any) -> list[str]:
    """Check the attributes that say what the numbers mean."""
    expected = {
        "name": "a short string",
        "unit": f'what 1 means, e.g. "{kind.unit}"',
        "range": "(smallest, largest) possible value, infinities allowed",
        "higher_is_better": "True or False",
        "score": f"score(self, {kind.noun}s, prompts, metadata=None) -> Scores",
    }
    if missing := [key for key in expected if not hasattr(reward, key)]:
        return [f"it has no {key}: set it on the class ({expected[key]})" for key in missing]
    problems = [
        f"{key} is {text!r}: make it a non-empty string"
        for key, text in (("name", reward.name), ("unit", reward.unit))
        if not isinstance(text, str) or not text
    ]
    ends = reward.range
    if not isinstance(ends, tuple) or len(ends) != 2 or not ends[0] < ends[1]:
        problems.append(f"range is {ends!r}: make it a pair (smallest, largest) with smallest < largest")
    if not isinstance(reward.higher_is_better, bool):
        problems.append(f"higher_is_better is {reward.higher_is_better!r}: make it True or False")
    return problems


def _form_problems(case: _Case) -> list[str]:
    """Check types and lengths of the scores, which all probes rely on."""
    scores, size, noun, unit = case.scores, len(case.rows), case.kind.noun, case.reward.unit
    if not isinstance(scores, Scores):
        return [f"score() returned a {type(scores).__name__}: return visalign.interfaces.Scores"]
    problems = {
        f"score() gave {len(scores)} values for {size} {noun}s: give one per {noun}, NaN where invalid": (
            len(scores) != size
        ),
        f"value has dtype {scores.value.dtype}: make it {torch.float32}": scores.value.dtype != torch.float32,
        f"valid has dtype {scores.valid.dtype}: make it {torch.bool}": scores.valid.dtype != torch.bool,
        "value carries a gradient graph, which keeps memory: detach it, or score under torch.no_grad()": (
            scores.value.requires_grad
        ),
        f"Scores.unit is {scores.unit!r}, the reward declares {unit!r}: use one of them": scores.unit != unit,
    }
    for key, column in {"std": scores.std, **scores.parts}.items():
        if column is not None:
            shape = tuple(column.shape)
            problems[f"{key!r} has shape {shape}: make it [{size}]"] = shape != (size,)
    for key, texts in (("text", scores.text), ("reason", scores.reason)):
        if texts is not None:
            count = len(texts)
            problems[f"{key} has {count} entries for {size} {noun}s: give one per {noun}"] = count != size
    return [problem for problem, applies in problems.items() if applies]


def _validity(case: _Case) -> list[str]:
    """Check that `valid`, NaN and reasons agree."""
    scores, kind = case.scores, case.kind
    reasons = scores.reason or [None] * len(scores)
    if not scores.valid.any():
        return [
            f"it judged none of the {kind.noun}s ({reasons[0]}): give {kind.function} {kind.noun}s=, "
            "prompts=, metadata= that it can judge"
        ]
    pairs = zip(scores.valid.tolist(), reasons, strict=True)
    problems = {
        "a valid score is NaN or infinite: set valid=False and a reason for that sample": (
            not torch.isfinite(scores.value[scores.valid]).all()
        ),
        "an invalid sample has a number as its value: make it NaN, a failure is no score": (
            not torch.isnan(scores.value[~scores.valid]).all()
        ),
        "an invalid sample has no reason: say in Scores.reason why it could not be judged": any(
            not valid and not reason for valid, reason in pairs
        ),
    }
    return [problem for problem, applies in problems.items() if applies]


def _in_range(case: _Case) -> list[str]:
    low, high = case.reward.range
    outside = [v for v in case.scores.value[case.scores.valid].tolist() if not low <= v <= high]
    return [
        f"the score {value:g} is outside the declared range ({low:g}, {high:g}): declare the true range"
        for value in outside[:1]
    ]


def _determinism(case: _Case) -> list[str]:
    noun = case.kind.noun
    problem = f"the same {noun}s got other scores the second time: seed it, and put a model into eval() mode"
    return [] if case.same(case.run(case.rows), case.rows) else [problem]


def _order(case: _Case) -> list[str]:
    noun, rows = case.kind.noun, case.rows[::-1]
    problem = (
        f"the scores do not follow the {noun}s when their order is reversed: score each {noun} by itself"
    )
    return [] if case.same(case.run(rows), rows) else [problem]


def _independence(case: _Case) -> list[str]:
    article = "an" if case.kind.noun == "image" else "a"
    problem = (
        f"{article} {case.kind.noun} alone scores otherwise than in a batch: take out whatever mixes samples "
        "(batch statistics, padding to the longest, z-scores, ranks and comparisons over the batch)"
    )
    return [] if all(case.same(case.run([row]), [row]) for row in case.rows) else [problem]


def _unchanged_inputs(case: _Case) -> list[str]:
    inputs: list[Any] = copy.deepcopy([case.samples, case.prompts, case.metadata])
    case.reward.score(*inputs)
    samples, *rest = inputs
    original = case.samples
    unchanged = torch.equal(samples, original) if isinstance(original, Tensor) else samples == original
    problem = f"it changed the {case.kind.noun}s, prompts or metadata that it was given: work on copies"
    return [] if unchanged and rest == [case.prompts, case.metadata] else [problem]


def _lengths_refused(case: _Case) -> list[str]:
    with Attempt() as attempt:
        case.reward.score(copy.deepcopy(case.samples), case.prompts[:-1], None)
    noun, reader = case.kind.noun, case.kind.reader
    problem = f"it accepts fewer prompts than {noun}s: raise a ValueError ({reader} does)"
    return [problem] if attempt.error is None else []


def _image_forms(case: _Case) -> list[str]:
    assert isinstance(case.samples, Tensor)
    levels = case.samples.mul(255).round().to(torch.uint8)
    forms = {
        "a list of PIL images": [to_pil(image) for image in case.samples],
        "a uint8 tensor [B, 3, H, W]": levels,
        "a uint8 array [B, H, W, 3]": levels.permute(0, 2, 3, 1).contiguous().numpy(),
    }
    problems = []
    for form, images in forms.items():
        with Attempt() as attempt:
            if not case.same(case.run(case.rows, images), case.rows):
                problems.append(
                    f"{form} gets other scores than the float tensor: read images with load_images"
                )
        if attempt.error is not None:
            problems.append(f"{form} raised {attempt.error!r}: read images with visalign.rewards.load_images")
    return problems


def _unreadable_image(case: _Case) -> list[str]:
    assert isinstance(case.samples, Tensor)
    images: list[Any] = ["no/such/image.png", *(to_pil(image) for image in case.samples[1:])]
    with Attempt() as attempt:
        scores, rest = case.run(case.rows, images), list(case.rows)[1:]
        remaining = Scores(value=scores.value[rest], valid=scores.valid[rest], unit=scores.unit)
        unchanged = bool(remaining.valid.all()) if case.relative else case.same(remaining, rest)
        if scores.valid[0] or not unchanged:
            return [
                "an unreadable image must be invalid and leave the other scores alone: read images with "
                "load_images"
            ]
    if attempt.error is None:
        return []
    return [
        f"one unreadable image stopped the batch ({attempt.error!r}): give valid=False and a reason for it"
    ]


_PROBES: dict[str, _Probe] = {
    "failure is NaN, invalid, and has a reason": _validity,
    "values are inside the range": _in_range,
    "the same {noun}s get the same scores": _determinism,
    "scores follow the order of the {noun}s": _order,
    "a score does not depend on its neighbours": _independence,
    "inputs are left as they were": _unchanged_inputs,
    "unequal lengths are refused": _lengths_refused,
}
