# SPDX-License-Identifier: Apache-2.0
"""`check_reward` and `check_text_reward`: the contract of every reward, as functions for those who write one.

Both try the same promises: each probe yields the problems that it finds, with their fix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from visalign.errors import CaughtError
from visalign.interfaces import Metadata, PointwiseReward, Prompt, Scores, TextReward, with_capabilities
from visalign.rewards.base.callables import FunctionReward
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.images import load_images, to_pil
from visalign.rewards.catalogue import load_reward, load_text_reward
from visalign.rewards.text.callables import TextFunctionReward

_PROMPTS = ("a red circle", "a blue square", "two green triangles", "a white cross left of a red circle")
_COMPLETIONS = ("The answer is 4.", "", "\\boxed{4} 🙂\n", "<think>2+2</think><answer>4</answer>")


def check_reward(
    reward: PointwiseReward | str | Callable[..., Any],
    *,
    images: Any = None,
    prompts: Sequence[str] | None = None,
    metadata: Metadata | None = None,
    tolerance: float = 1e-6,
) -> list[str]:
    """Try a reward against the contract and return the names of the checks; a RewardError lists all faults and fixes.

    A reward whose `needs_batch` or `needs_group` is true need not score a sample by itself as in a batch. Without
    `images` (two or more of one size) four noisy ones of 64×64 are tried. `tolerance` is absolute and relative; bf16
    towers need more.

    Example:
        >>> check_reward("sharpness")[0]
        'declares name, unit, range, direction'
    """
    subject: Any = load_reward(reward) if isinstance(reward, str) else reward
    if callable(subject) and not hasattr(subject, "score"):
        subject = FunctionReward(subject)
    if images is None:
        generator = torch.Generator().manual_seed(0)
        count = 4 if prompts is None else len(prompts)
        images = torch.randint(0, 256, (count, 3, 64, 64), generator=generator, dtype=torch.uint8)
    batch = load_images(images)
    loaded = [image for _, image in batch.readable()]
    captions = [_PROMPTS[row % len(_PROMPTS)] for row in range(len(batch))] if prompts is None else list(prompts)
    is_batch = len(loaded) == len(batch) and len({image.shape for image in loaded}) == 1
    if not is_batch or not len(loaded) == len(captions) > 1:
        raise ValueError(
            f"check_reward got {len(loaded)} readable images and {len(captions)} prompts; give two of one size "
            "or more, and one prompt each."
        )
    levels = torch.stack(loaded).mul(255).round() / 255  # PIL can hold no others
    probes = _PROBES | {
        "PIL, uint8 and float images agree": _image_forms,
        "one unreadable image is invalid alone": _unreadable_image,
    }
    return _check(_Case("image", subject, levels, captions, metadata, tolerance), probes)


def check_text_reward(
    reward: TextReward | str | Callable[..., Any],
    *,
    completions: Sequence[str] | None = None,
    prompts: Sequence[Prompt] | None = None,
    metadata: Metadata | None = None,
    tolerance: float = 1e-6,
) -> list[str]:
    """Try a reward for text against the contract, as `check_reward` does.

    Without `completions` four short texts are tried, one of them empty; without `prompts` "2 + 2 = ?".

    Example:
        >>> check_text_reward("repetition")[0]
        'declares name, unit, range, direction'
    """
    texts = list(_COMPLETIONS if completions is None else completions)
    questions: list[Prompt] = ["2 + 2 = ?"] * len(texts) if prompts is None else list(prompts)
    if not len(texts) == len(questions) > 1:
        raise ValueError(
            f"check_text_reward got {len(texts)} completions and {len(questions)} prompts; give two or more of both."
        )
    subject: Any = load_text_reward(reward) if isinstance(reward, str) else reward
    if callable(subject) and not hasattr(subject, "score"):
        subject = TextFunctionReward(subject)
    return _check(_Case("completion", subject, texts, questions, metadata, tolerance), _PROBES)


@dataclass(frozen=True)
class _Case:
    """A reward with the samples that it is tried on; `noun` is what a sample is, "image" or "completion"."""

    noun: str
    reward: Any
    samples: Tensor | list[str]
    prompts: list[Any]
    metadata: Metadata | None
    tolerance: float

    @property
    def rows(self) -> range:
        return range(len(self.prompts))

    @cached_property
    def scores(self) -> Scores:
        return self.run(self.rows)

    @property
    def is_relative(self) -> bool:
        """True where a score may depend on the other samples."""
        return with_capabilities(self.reward).capabilities.compares_samples

    def run(self, rows: Iterable[int], samples: Any = None) -> Scores:
        """Score copies of the chosen rows, or other samples with their prompts and records."""
        rows = list(rows)
        metadata = None if self.metadata is None else [copy.deepcopy(self.metadata[row]) for row in rows]
        if samples is None:
            batch = self.samples
            samples = batch[rows].clone() if isinstance(batch, Tensor) else [batch[row] for row in rows]
        return self.reward.score(samples, [copy.deepcopy(self.prompts[row]) for row in rows], metadata)

    def agrees(self, scores: Scores, rows: Iterable[int]) -> bool:
        """Return True if `scores` of the chosen rows equal those of the whole batch."""
        index = list(rows)
        expected, valid = self.scores.value[index], self.scores.valid[index]
        if len(scores) != len(index) or not torch.equal(scores.valid, valid):
            return False
        return torch.allclose(scores.value[valid], expected[valid], rtol=self.tolerance, atol=self.tolerance)


_Probe = Callable[[_Case], Iterator[str]]


def _check(case: _Case, probes: dict[str, _Probe]) -> list[str]:
    """Report the problems of one stage before the next stage relies on it."""
    _report(case, _declaration_problems(case))
    with CaughtError() as attempt:
        _ = case.scores
    if (error := attempt.error) is not None:
        call = f"score({case.noun}s, prompts, metadata)"
        _report(case, [f"{call} raised {type(error).__name__}: {error}"], cause=error)
    _report(case, _form_problems(case))
    probes = {
        promise.format(noun=case.noun): probe
        for promise, probe in probes.items()
        if not (case.is_relative and probe is _independence)
    }
    problems: list[str] = []
    for promise, probe in probes.items():
        with CaughtError() as attempt:
            problems += probe(case)
        if attempt.error is not None:
            problems.append(f"trying '{promise}' raised {attempt.error!r}: accept every allowed input")
    _report(case, problems)
    return ["declares name, unit, range, direction", "returns well-formed Scores", *probes]


def _report(case: _Case, problems: Iterable[str], cause: BaseException | None = None) -> None:
    if numbered := [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)]:
        name = str(getattr(case.reward, "name", type(case.reward).__name__))
        listed = "\n".join(numbered)
        raise RewardError(f"Reward {name!r} breaks its contract in {len(numbered)} place(s):\n{listed}") from cause


def _declaration_problems(case: _Case) -> Iterator[str]:
    reward = case.reward
    expected = {
        "name": "a short string",
        "unit": 'what 1 means, e.g. "cosine" or "1 = correct"',
        "range": "(smallest, largest) possible value, infinities allowed",
        "higher_is_better": "True or False",
        "score": f"score(self, {case.noun}s, prompts, metadata=None) -> Scores",
    }
    if missing := [key for key in expected if not hasattr(reward, key)]:
        yield from (f"it has no {key}: set it on the class ({expected[key]})" for key in missing)
        return
    for key, text in (("name", reward.name), ("unit", reward.unit)):
        if not isinstance(text, str) or not text:
            yield f"{key} is {text!r}: make it a non-empty string"
    ends = reward.range
    if not isinstance(ends, tuple) or len(ends) != 2 or not ends[0] < ends[1]:
        yield f"range is {ends!r}: make it a pair (smallest, largest) with smallest < largest"
    if not isinstance(reward.higher_is_better, bool):
        yield f"higher_is_better is {reward.higher_is_better!r}: make it True or False"


def _form_problems(case: _Case) -> Iterator[str]:
    scores, size, noun, unit = case.scores, len(case.rows), case.noun, case.reward.unit
    if not isinstance(scores, Scores):
        yield f"score() returned a {type(scores).__name__}: return visalign.interfaces.Scores"
        return
    if len(scores) != size:
        yield f"score() gave {len(scores)} values for {size} {noun}s: give one per {noun}, NaN where invalid"
    if scores.value.dtype != torch.float32:
        yield f"value has dtype {scores.value.dtype}: make it torch.float32"
    if scores.value.requires_grad:
        yield "value carries a gradient graph, which keeps memory: detach it, or score under torch.no_grad()"
    if scores.unit != unit:
        yield f"Scores.unit is {scores.unit!r}, the reward declares {unit!r}: use one of them"


def _validity(case: _Case) -> Iterator[str]:
    scores, noun = case.scores, case.noun
    reasons = scores.reason or [None] * len(scores)
    if not scores.valid.any():
        check = "check_reward" if noun == "image" else "check_text_reward"
        yield f"it judged none of the {noun}s ({reasons[0]}): give {check} {noun}s=, prompts=, metadata= that it can"
        return
    if not torch.isfinite(scores.value[scores.valid]).all():
        yield "a valid score is NaN or infinite: set valid=False and a reason for that sample"
    if not torch.isnan(scores.value[~scores.valid]).all():
        yield "an invalid sample has a number as its value: make it NaN, a failure is no score"
    if any(not ok and not reason for ok, reason in zip(scores.valid.tolist(), reasons, strict=True)):
        yield "an invalid sample has no reason: say in Scores.reason why it could not be judged"


def _in_range(case: _Case) -> Iterator[str]:
    low, high = case.reward.range
    outside = [v for v in case.scores.value[case.scores.valid].tolist() if not low <= v <= high]
    if outside:
        yield f"the score {outside[0]:g} is outside the declared range ({low:g}, {high:g}): declare the true range"


def _determinism(case: _Case) -> Iterator[str]:
    if not case.agrees(case.run(case.rows), case.rows):
        yield f"the same {case.noun}s got other scores the second time: seed it, and put a model into eval() mode"


def _order(case: _Case) -> Iterator[str]:
    if not case.agrees(case.run(case.rows[::-1]), case.rows[::-1]):
        yield f"the scores do not follow the {case.noun}s when their order is reversed: score each by itself"


def _independence(case: _Case) -> Iterator[str]:
    if not all(case.agrees(case.run([row]), [row]) for row in case.rows):
        mixing = "batch statistics, padding, z-scores, ranks, comparisons"
        yield f"a single {case.noun} scores otherwise than in a batch: take out what mixes samples ({mixing})"


def _unchanged_inputs(case: _Case) -> Iterator[str]:
    inputs: list[Any] = copy.deepcopy([case.samples, case.prompts, case.metadata])
    case.reward.score(*inputs)
    samples, *rest = inputs
    original = case.samples
    unchanged = torch.equal(samples, original) if isinstance(original, Tensor) else samples == original
    if not unchanged or rest != [case.prompts, case.metadata]:
        yield f"it changed the {case.noun}s, prompts or metadata that it was given: work on copies"


def _lengths_refused(case: _Case) -> Iterator[str]:
    with CaughtError() as attempt:
        case.reward.score(copy.deepcopy(case.samples), case.prompts[:-1], None)
    if attempt.error is None:
        reader = "read_request" if case.noun == "image" else "read_text_request"
        yield f"it accepts fewer prompts than {case.noun}s: raise a ValueError ({reader} does)"


def _image_forms(case: _Case) -> Iterator[str]:
    assert isinstance(case.samples, Tensor)
    levels = case.samples.mul(255).round().to(torch.uint8)
    forms = {
        "a list of PIL images": [to_pil(image) for image in case.samples],
        "a uint8 tensor [B, 3, H, W]": levels,
        "a uint8 array [B, H, W, 3]": levels.permute(0, 2, 3, 1).contiguous().numpy(),
    }
    for form, images in forms.items():
        with CaughtError() as attempt:
            agrees = case.agrees(case.run(case.rows, images), case.rows)
        if attempt.error is not None:
            yield f"{form} raised {attempt.error!r}: read images with visalign.rewards.load_images"
        elif not agrees:
            yield f"{form} gets other scores than the float tensor: read images with load_images"


def _unreadable_image(case: _Case) -> Iterator[str]:
    assert isinstance(case.samples, Tensor)
    images: list[Any] = ["no/such/image.png", *(to_pil(image) for image in case.samples[1:])]
    rest = list(case.rows)[1:]
    with CaughtError() as attempt:
        scores = case.run(case.rows, images)
        remaining = Scores(value=scores.value[rest], valid=scores.valid[rest], unit=scores.unit)
        agrees = bool(remaining.valid.all()) if case.is_relative else case.agrees(remaining, rest)
    if attempt.error is not None:
        yield f"one unreadable image stopped the batch ({attempt.error!r}): give valid=False and a reason"
    elif scores.valid[0] or not agrees:
        yield "an unreadable image must be invalid and leave the other scores as they are: use load_images"


_PROBES: dict[str, _Probe] = {
    "failure is NaN, invalid, and has a reason": _validity,
    "values are inside the range": _in_range,
    "the same {noun}s get the same scores": _determinism,
    "scores follow the order of the {noun}s": _order,
    "a score does not depend on its neighbours": _independence,
    "inputs are left as they were": _unchanged_inputs,
    "unequal lengths are refused": _lengths_refused,
}
