# SPDX-License-Identifier: Apache-2.0
"""Is the wanted text in the picture? An OCR engine reads it, an edit distance compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request, scatter
from visalign.rewards.base.failure import Naming
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import to_uint8
from visalign.rewards.pairs.asking import distinct_images

from .ocr_rules import RULES, normal_text, quoted_texts, text_score

Engine = Callable[[np.ndarray], str]
"""From a picture, uint8 [H, W, 3] RGB, to all text that is read in it, in reading order."""
INSTALL = 'python -m pip install "visalign[ocr]" (or: python -m pip install rapidocr onnxruntime)'


class OcrReward:
    """Edit-distance score of the text read in a picture against the wanted text, in [0, 1].

    The wanted text is the record's "text" (a string or several) or what stands in quotation marks in the
    prompt. Without either, or without a character in it, the row is invalid. `text` holds what was read; the
    parts hold "extra", the share of the read characters beyond the wanted number.

    `ocr_rules.text_score` has the rules. The default, "window", charges for every character too many.
    """

    name = "ocr"
    unit = "1 = text as wanted"
    range = (0.0, 1.0)
    higher_is_better = True

    def __init__(
        self, engine: Engine | None = None, *, rule: str = "window", min_confidence: float = 0.5
    ) -> None:
        """Choose engine and rule.

        Args:
            engine: reads a picture; RapidOCR (PP-OCR models inside the package, on onnxruntime) when None,
                loaded at the first score.
            rule: of `text_score`: "window", "plain", "flow_grpo" or "verl_omni".
            min_confidence: lines that RapidOCR is less sure of are left out; not used with your own engine.

        Raises:
            ValueError: an unknown rule, or a confidence outside [0, 1].
            TypeError: `engine` cannot be called.
        """
        if rule not in RULES:
            raise ValueError(f"ocr: rule is {rule!r}; allowed are {', '.join(RULES)}.")
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"ocr: min_confidence is {min_confidence}; allowed are numbers in [0, 1].")
        if engine is not None and not callable(engine):
            raise TypeError(
                f"ocr: engine is a {type(engine).__name__}; give a function from a uint8 picture [H, W, 3] "
                "to the text in it, or None for RapidOCR."
            )
        self.rule, self.min_confidence = rule, min_confidence
        self._given = engine

    @cached_property
    def engine(self) -> Engine:
        """What reads a picture."""
        return self._given or load_rapidocr(self.min_confidence)

    @cached_property
    def identity(self) -> Identity:
        """What the scores depend on."""
        model = (
            getattr(self._given, "__qualname__", type(self._given).__name__) if self._given else _version()
        )
        options = {"rule": self.rule, "min_confidence": self.min_confidence}
        return Identity(judge=self.name, model=model, options=options)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Judge B pictures; each distinct one is read once.

        Raises:
            RewardError: the engine is not installed, raised, or returned no text.
        """
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, pictures, targets = [], [], []
        for row, image in request.images.readable():
            found = wanted_texts(request.prompts[row], request.metadata[row])
            if isinstance(found, str):
                reasons[row] = found
                continue
            rows.append(row)
            pictures.append(image)
            targets.append(found)
        first, index = distinct_images(pictures, [0] * len(pictures))
        seen = [self._read(to_uint8(pictures[i])) for i in first]
        size = len(request)
        values, extra, text = [], [], [""] * size
        for row, number, target in zip(rows, index, targets, strict=True):
            found = text_score(target, seen[number], rule=self.rule)
            if found is None:
                reasons[row] = f"the wanted text holds no character that the rule {self.rule!r} compares"
            values.append(math.nan if found is None else found)
            wanted, got = (len(normal_text(part)) for part in ("".join(target), seen[number]))
            extra.append(max(0, got - wanted) / max(got, 1))
            text[row] = seen[number]
        parts = {"extra": scatter(extra, rows, size)}
        return make_scores(scatter(values, rows, size), reasons, self.unit, parts=parts, text=text)

    def _read(self, picture: np.ndarray) -> str:
        with Naming(self.name):
            text = self.engine(picture)
        if not isinstance(text, str):
            raise RewardError(
                f"ocr: the engine returned a {type(text).__name__}; it must return the text in the picture "
                'as a string, "" for none.'
            )
        return text


def wanted_texts(prompt: str, record: Mapping[str, Any] | None) -> list[str] | str:
    """The wanted texts, or the reason why there are none."""
    given = (record or {}).get("text")
    if given is None:
        texts = quoted_texts(prompt)
        where = "the quotation marks of the prompt"
        if not texts:
            return 'no wanted text: give metadata "text", or put it into quotation marks in the prompt'
    else:
        texts = (
            [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else [given]
        )
        where = 'metadata "text"'
        if not all(isinstance(text, str) for text in texts):
            return f'metadata "text" is {given!r}; needed is a string or a list of strings'
    kept = [text for text in texts if normal_text(text)]
    return kept or f"the wanted text is empty: {where} holds no character"


def load_rapidocr(min_confidence: float = 0.5) -> Engine:
    """RapidOCR as an engine; its models come with the package, lines below `min_confidence` are left out."""
    try:
        import onnxruntime  # noqa: F401  # rapidocr finds out only at the first picture
        from PIL import Image
        from rapidocr import RapidOCR
    except ModuleNotFoundError as error:
        raise RewardError(
            f"ocr: the OCR engine is not installed ({error.name} is missing). Run: {INSTALL}; or give your "
            "own engine, a function from a uint8 picture [H, W, 3] to the text in it."
        ) from error
    reader = RapidOCR(params={"Global.text_score": min_confidence, "Global.log_level": "critical"})

    def read(picture: np.ndarray) -> str:
        return " ".join(reader(Image.fromarray(picture)).txts or ())  # type: ignore[union-attr]  # all stages are on

    return read


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"rapidocr {version('rapidocr')}"
    except PackageNotFoundError:
        return "rapidocr"
