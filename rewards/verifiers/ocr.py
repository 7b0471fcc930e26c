# SPDX-License-Identifier: Apache-2.0
"""Is the wanted text in the image? An OCR engine reads it, an edit distance compares."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
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

Engine = Callable[[np.ndarray], str]
"""From an image, uint8 [H, W, 3] RGB, to all text that is read in it, in reading order."""
INSTALL = 'python -m pip install "visalign[ocr]" (or: python -m pip install rapidocr onnxruntime)'

RULES = ("window", "plain", "flow_grpo", "verl_omni")
MAX_ORDERED = 4
"""Up to so many wanted texts are matched in any order; more are matched in the order given."""

_QUOTED = re.compile(
    r'"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]|«([^»]*)»|「([^」]*)」'
    r"|(?<!\w)'([^']*(?:'\w[^']*)*)'(?!\w)|(?<!\w)‘([^’]*(?:’\w[^’]*)*)’(?!\w)"
)


class OcrReward:
    """Edit-distance score of the text read in an image against the wanted text, in [0, 1].

    The wanted text is the record's "text" (a string or several) or what stands in quotation marks in the
    prompt. Without either, or without a character in it, the row is invalid. `text` holds what was read; the
    parts hold "extra", the share of the read characters beyond the wanted number.

    `text_score` has the rules. The default, "window", charges for every character too many.
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
            engine: reads an image; RapidOCR (PP-OCR models inside the package, on onnxruntime) when None,
                loaded at the first score.
            rule: of `text_score`: "window", "plain", "flow_grpo" or "verl_omni".
            min_confidence: lines that RapidOCR is less sure of are left out; not used with your own engine.
        """
        if rule not in RULES:
            raise ValueError(f"ocr: rule is {rule!r}; allowed are {', '.join(RULES)}.")
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"ocr: min_confidence is {min_confidence}; allowed are numbers in [0, 1].")
        if engine is not None and not callable(engine):
            raise TypeError(
                f"ocr: engine is a {type(engine).__name__}; give a function from a uint8 image [H, W, 3] "
                "to the text in it, or None for RapidOCR."
            )
        self.rule, self.min_confidence = rule, min_confidence
        self._given = engine

    @cached_property
    def engine(self) -> Engine:
        """What reads an image."""
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
        """Judge B readable_images; each distinct one is read once."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, readable_images, targets = [], [], []
        for row, image in request.images.readable():
            found = wanted_texts(request.prompts[row], request.metadata[row])
            if isinstance(found, str):
                reasons[row] = found
                continue
            rows.append(row)
            readable_images.append(image)
            targets.append(found)
        first, index = distinct_images(readable_images, [0] * len(readable_images))
        seen = [self._read(to_uint8(readable_images[i])) for i in first]
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

    def _read(self, image: np.ndarray) -> str:
        with Naming(self.name):
            text = self.engine(image)
        if not isinstance(text, str):
            raise RewardError(
                f"ocr: the engine returned a {type(text).__name__}; it must return the text in the image "
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
        import onnxruntime  # noqa: F401  # rapidocr finds out only at the first image
        from PIL import Image
        from rapidocr import RapidOCR
    except ModuleNotFoundError as error:
        raise RewardError(
            f"ocr: the OCR engine is not installed ({error.name} is missing). Run: {INSTALL}; or give your "
            "own engine, a function from a uint8 image [H, W, 3] to the text in it."
        ) from error
    reader = RapidOCR(params={"Global.text_score": min_confidence, "Global.log_level": "critical"})

    def read(image: np.ndarray) -> str:
        return " ".join(reader(Image.fromarray(image)).txts or ())  # type: ignore[union-attr]  # all stages are on

    return read


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"rapidocr {version('rapidocr')}"
    except PackageNotFoundError:
        return "rapidocr"


def levenshtein(a: str, b: str) -> int:
    """The fewest insertions, deletions and substitutions of one character that turn a into b."""
    if len(a) < len(b):
        a, b = b, a
    return _distances(a, b, list(range(len(b) + 1)))[-1]


def window_distance(target: str, text: str) -> int:
    """The least `levenshtein` of the target to any stretch of the text, the empty one too.

    Sellers, Journal of Algorithms 1 (1980) 359.
    """
    return min(_distances(target, text, [0] * (len(text) + 1)))


def _distances(a: str, b: str, row: list[int]) -> list[int]:
    """Of a to each beginning of b; `row` are those of the empty text."""
    for i, left in enumerate(a, 1):
        current = [i]
        for j, right in enumerate(b, 1):
            current.append(min(row[j] + 1, current[-1] + 1, row[j - 1] + (left != right)))
        row = current
    return row


def quoted_texts(prompt: str) -> list[str]:
    """What stands in quotation marks, in order: "…", “…”, „…“, «…», 「…」, '…' and ‘…’ around whole words.

    An apostrophe inside a word (it's) opens and closes nothing.

    Example:
        >>> quoted_texts("a sign that says “Open”, it's under 'Bob's Bar'")
        ['Open', "Bob's Bar"]
    """
    return [next(part for part in match.groups() if part is not None) for match in _QUOTED.finditer(prompt)]


def normal_text(text: str) -> str:
    """Unicode NFKC, case folded, all white space removed."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def text_score(target: str | Sequence[str], recognised: str, *, rule: str = "window") -> float | None:
    """How well an image's text is the wanted one, in [0, 1].

    - "window": (|t| − d) / max(|t|, |s|) on `normal_text`, d the least distance of t to a stretch of s. Text
      beyond the wanted length lowers the score, wherever it stands and whatever it is, and characters that
      are not in t never raise it: a perfect sign with as much other text again has ½. For several wanted
      texts t is they joined in the order that fits best (up to `MAX_ORDERED`), because the order in which an
      engine reads an image is not the prompt's.
    - "plain": 1 − min(lev, |t|) / |t|, as "verl_omni" but without its substring rule.
    - "flow_grpo": lower case without blanks; 1 if t is a substring of s, else "plain". Flooding the image
      with text satisfies it.
    - "verl_omni": the same without any white space.

    Args:
        target: wanted text, or several (which the last three rules join).
        recognised: all that was read in the image.
        rule: see above.

    Returns:
        The score; None for a target without characters ("plain" and "verl_omni" then say whether nothing was
        read, as the latter's code does).

    Levenshtein 1966; the two named rules are those of the released code of flow_grpo (arXiv 2505.05470) and
    verl-omni.
    """
    if rule not in RULES:
        raise ValueError(f"ocr: rule is {rule!r}; allowed are {', '.join(RULES)}.")
    texts = [target] if isinstance(target, str) else list(target)
    if rule == "window":
        wanted, seen = [normal_text(text) for text in texts], normal_text(recognised)
        if not any(wanted):
            return None
        orders = itertools.permutations(wanted) if len(wanted) <= MAX_ORDERED else [tuple(wanted)]
        longest = max(sum(map(len, wanted)), len(seen))
        length = sum(map(len, wanted))
        return (length - min(window_distance("".join(order), seen) for order in orders)) / longest
    return _published("".join(texts), recognised, rule)


def _published(target: str, recognised: str, rule: str) -> float | None:
    if rule == "flow_grpo":
        wanted, seen = (text.replace(" ", "").lower() for text in (target, recognised))
    else:
        wanted, seen = ("".join(text.split()).lower() for text in (target, recognised))
    if not wanted:
        return None if rule == "flow_grpo" else float(not seen)
    if rule != "plain" and wanted in seen:
        return 1.0
    return 1 - min(levenshtein(wanted, seen), len(wanted)) / len(wanted)
