# SPDX-License-Identifier: Apache-2.0
"""For tests of judges on the vision-language engine: tiny engines, and one whose answers are written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.support.tiny_judges import tile_processor, tiny_tile_model
from tests.support.tiny_vision_language_models import tiny_processor, tiny_seeing_model
from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm.engine import AnswerLogits, JudgeAnswers, Query, VisionLanguageEngine
from visalign.rewards.vlm.template import Template

T = TypeVar("T")
PROMPTS = ["a red circle", "a blue square", "two green triangles", "a white cross"]


def images(count: int = 4, size: int = 16, seed: int = 0) -> Tensor:
    """Noise on the 8-bit grid, [count, 3, size, size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), generator=generator).float() / 255


def tiny_engine(kind: str = "qwen2_vl", **options: Any) -> VisionLanguageEngine:
    """A random model, whose tokens are single letters."""
    if kind == "internvl":
        return VisionLanguageEngine(tiny_tile_model(), tile_processor(), name="tiny", **options)
    longer = {"max_position_embeddings": 1024, "initializer_range": 0.2}
    return VisionLanguageEngine(tiny_seeing_model(kind, **longer), tiny_processor(), name="tiny", **options)


def ask_text(*texts: str, pictures: int = 1, **more: Any) -> Template:
    """A template of some pictures and a text."""
    content = [*({"type": "image"} for _ in range(pictures)), {"type": "text", "text": "".join(texts)}]
    return Template(name="test", messages=[{"role": "user", "content": content}], **more)


class _Words:
    """A tokenizer in which every known word is one token."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[one] for one in ids)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.words[one] for one in ids]


class ScriptedEngine:
    """An engine whose next-word probabilities and answers are functions of the request.

    Args:
        probability: (template, ask) -> word -> probability; the rest is any other word. None refuses.
        answers: (template, ask) -> texts, for `generate`.
        words: that are one token each.
        templates: of the model's folder.
    """

    def __init__(
        self,
        probability: Callable[[Template, Query], Mapping[str, float] | None] | None = None,
        answers: Callable[[Template, Query], list[str]] | None = None,
        words: Sequence[str] = ("yes", "Yes", " yes", "no", "No", *"0123456789"),
        templates: Mapping[str, Template] | None = None,
    ) -> None:
        self._probability, self._answers = probability, answers
        self._words, self._templates = list(words), dict(templates or {})
        self.processor = type("Processor", (), {"tokenizer": _Words(words)})()
        self.asked: list[Query] = []
        self.generated: list[Query] = []

    def template(self, kind: str, default: Template) -> Template:
        return self._templates.get(kind, default)

    def token_ids(self, words: Sequence[str], *, skip_missing: bool = False) -> list[int]:
        missing = [word for word in words if word not in self._words]
        found = [self._words.index(word) for word in words if word in self._words]
        if (missing and not skip_missing) or not found:
            raise RewardError(f"The word {missing[0]!r} is several tokens of this model.")
        return list(dict.fromkeys(found))

    def identity_fields(self, template: Template, **options: Any) -> dict[str, Any]:
        return {"model": "scripted", "template": template.text, "options": options}

    def answer_logits(
        self, template: Template, asks: Sequence[Query], ids: Sequence[int], *, left_over: bool = False
    ) -> AnswerLogits:
        assert self._probability is not None
        self.asked += asks
        logits = torch.full((len(asks), len(ids)), math.nan)
        reasons: list[str | None] = []
        for row, ask in enumerate(asks):
            found = self._probability(template, ask)
            reasons.append("too long" if found is None else None)
            if found is not None:
                shift = 3.0  # logits are log-probabilities up to a constant
                said = [found.get(self._words[one], 0.0) for one in ids]
                logits[row] = torch.tensor(said, dtype=torch.float64).log().float() + shift
        total = torch.full((len(asks),), 3.0) if left_over else None
        return AnswerLogits(logits, total, reasons)

    def generate(self, template: Template, asks: Sequence[Query], **options: Any) -> JudgeAnswers:
        assert self._answers is not None
        self.generated += asks
        texts = [self._answers(template, ask) for ask in asks]
        return JudgeAnswers(texts, [[True] * len(one) for one in texts], [None] * len(asks))


def given(value: T | None) -> T:
    """The value, which must be there."""
    assert value is not None
    return value


def why(told: Any, row: int) -> str:
    """The reason of a row of scores or preferences, which must have one."""
    return given(given(told.reason)[row])
