# SPDX-License-Identifier: Apache-2.0
"""OCR reward: edit distance between the text in an image and the wanted text."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from visalign.errors import Naming
from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, check_choices, check_rules, make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import to_uint8
from visalign.rewards.pairs.asking import distinct_images

Engine = Callable[[np.ndarray], str]
"""Map from an image, uint8 [H, W, 3] RGB, to all text in it, in reading order."""
INSTALL = 'python -m pip install "visalign[ocr]" (or: python -m pip install rapidocr onnxruntime)'

RULES = ("window", "plain", "flow_grpo", "verl_omni")
MAX_ORDERED = 4
"""Most wanted texts that are matched in any order; more are matched in the order given."""

_CLOSING = {
    **{'"': '"”', "“": '”“"', "„": '“”"', "”": "”", "＂": "＂", "〝": "〞〟", "「": "」", "『": "』"},
    **{"«": "»", "»": "«»", "‹": "›", "›": "‹›", "'": "'", "‘": "’'", "‚": "‘’", "’": "’"},
}
"""Opening quotation mark -> the marks that may close it, of all languages' habits."""
_DIRECTED = "“„〝「『«‹"
"""Marks that open also behind a letter."""
_SINGLE = re.compile("['‘‚’]")
_WORD = re.compile(r"[^\W\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff]")
"""A letter or digit of a script that separates words by blanks."""
_ELIDED = re.compile(r"['‘’](?:n['’]|(?:\d\ds?|till?|tis|twas|em|cause|cuz|bout|round|neath)\b)", re.IGNORECASE)
"""An apostrophe that opens a word ('70s, 'til, 'n')."""
_ALIKE = str.maketrans(dict.fromkeys("‘’‚‛ʼʹ′`´", "'") | dict.fromkeys("“”„‟″", '"'))


class OcrReward:
    """Edit-distance score of the text read in an image against the wanted text, in [0, 1].

    The wanted text is the record's "text" (a string or several), else the prompt's text in quotation marks.
    Without any the row is invalid. `text` holds the recognised text; the part "extra" is the share of its
    characters beyond the wanted number.

    `text_score` has the rules. The default, "window", charges for every extra character.

    Args:
        engine: reads an image; RapidOCR (PP-OCR models inside the package, on onnxruntime) when None, loaded
            at the first score.
        rule: of `text_score`: "window", "plain", "flow_grpo" or "verl_omni".
        min_confidence: least confidence of RapidOCR's lines; unused with your own engine.
    """

    name = "ocr"
    unit = "1 = text as wanted"
    range = (0.0, 1.0)
    higher_is_better = True

    def __init__(self, engine: Engine | None = None, *, rule: str = "window", min_confidence: float = 0.5) -> None:
        check_choices(self.name, rule=(rule, RULES))
        bounds = f"min_confidence is {min_confidence}; allowed are numbers in [0, 1]"
        check_rules(self.name, {bounds: 0 <= min_confidence <= 1})
        self.rule, self.min_confidence = rule, min_confidence
        self._user_engine = engine

    @cached_property
    def engine(self) -> Engine:
        """OCR engine; RapidOCR is loaded here."""
        return self._user_engine or load_rapidocr(self.min_confidence)

    @cached_property
    def identity(self) -> Identity:
        engine = self._user_engine
        model = getattr(engine, "__qualname__", type(engine).__name__) if engine else _version()
        options = {"rule": self.rule, "min_confidence": self.min_confidence}
        return Identity(judge=self.name, model=model, options=options)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images; each distinct one is read once."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, readable_images, targets = [], [], []
        for row, image in request.images.readable():
            target = wanted_texts(request.prompts[row], request.metadata[row])
            if isinstance(target, str):
                reasons[row] = target
                continue
            rows.append(row)
            readable_images.append(image)
            targets.append(target)
        first, index = distinct_images(readable_images, [0] * len(readable_images))
        recognised = [self._read(to_uint8(readable_images[i])) for i in first]
        size = len(request)
        values, extra, text = [], [], [""] * size
        for row, number, target in zip(rows, index, targets, strict=True):
            text[row] = recognised[number]
            score = text_score(target, text[row], rule=self.rule)
            if score is None:
                reasons[row] = f"the wanted text holds no character that the rule {self.rule!r} compares"
            values.append(math.nan if score is None else score)
            target_length, length = (len(normal_text(part)) for part in ("".join(target), text[row]))
            extra.append(max(0, length - target_length) / max(length, 1))
        parts = {"extra": scatter(extra, rows, size)}
        return make_scores(scatter(values, rows, size), reasons, self.unit, parts=parts, text=text)

    def _read(self, image: np.ndarray) -> str:
        with Naming(self.name):
            text = self.engine(image)
        if isinstance(text, str):
            return text
        raise RewardError(f"ocr: the engine returned a {type(text).__name__}; it must return a string.")


def wanted_texts(prompt: str, record: Mapping[str, Any] | None) -> list[str] | str:
    """Return the wanted texts, or the reason why there are none."""
    field = (record or {}).get("text")
    if field is None:
        texts, source = quoted_texts(prompt), "the quotation marks of the prompt"
        if not texts:
            return 'no wanted text: give metadata "text", or put it into quotation marks in the prompt'
    else:
        texts, source = list(field) if isinstance(field, list | tuple) else [field], 'metadata "text"'
        if not all(isinstance(text, str) for text in texts):
            return f'metadata "text" is {field!r}; needed is a string or a list of strings'
    texts = [text for text in texts if normal_text(text)]
    return texts or f"the wanted text is empty: {source} holds no character"


def load_rapidocr(min_confidence: float = 0.5) -> Engine:
    """Load RapidOCR as an engine; lines below `min_confidence` are left out."""
    try:
        import onnxruntime  # noqa: F401  # rapidocr finds out only at the first image
        from PIL import Image
        from rapidocr import RapidOCR
    except ModuleNotFoundError as error:
        raise RewardError(
            f"ocr: the engine is not installed ({error.name} is missing). Run: {INSTALL}; or give a function."
        ) from error
    reader = RapidOCR(params={"Global.text_score": min_confidence, "Global.log_level": "critical"})

    def read(image: np.ndarray) -> str:
        return " ".join(reader(Image.fromarray(image)).txts or ())  # type: ignore[union-attr]  # all stages are on

    return read


def _version() -> str:
    try:
        return f"rapidocr {version('rapidocr')}"
    except PackageNotFoundError:
        return "rapidocr"


def levenshtein(a: str, b: str) -> int:
    """Least number of insertions, deletions and substitutions of one character that turn a into b."""
    if len(a) < len(b):
        a, b = b, a
    return _distances(a, b, list(range(len(b) + 1)))[-1]


def window_distance(target: str, text: str) -> int:
    """Least `levenshtein` of the target to any substring of the text, the empty one included.

    Sellers, Journal of Algorithms 1 (1980) 359.
    """
    return min(_distances(target, text, [0] * (len(text) + 1)))


def _distances(a: str, b: str, row: list[int]) -> list[int]:
    """Distances of a to each prefix of b; `row` holds those of the empty text."""
    for i, left in enumerate(a, 1):
        current = [i]
        for j, right in enumerate(b, 1):
            current.append(min(row[j] + 1, current[-1] + 1, row[j - 1] + (left != right)))
        row = current
    return row


def quoted_texts(prompt: str) -> list[str]:
    """Extract the texts between matching quotation marks of any language, in order and stripped.

    A straight mark opens only where no letter or digit stands before it: 5'10", it's and the dogs' open nothing.

    Example:
        >>> quoted_texts("a sign that says “Open”, it's under 'Bob's Bar'")
        ['Open', "Bob's Bar"]
    """
    texts: list[str] = []
    position, unclosed = 0, set[str]()
    while position < len(prompt):
        mark, start = prompt[position], position + 1
        position += 1
        behind_word = start > 1 and _WORD.match(prompt, start - 2)
        if mark not in _CLOSING or mark in unclosed or (behind_word and mark not in _DIRECTED):
            continue
        if _SINGLE.match(mark):
            end = _closing_single(prompt, start)
        else:
            match = re.compile(f"[{_CLOSING[mark]}]").search(prompt, start)
            end = match and match.start()
        if end is None:
            unclosed.add(mark)
        elif end >= start:
            texts.append(prompt[start:end].strip())
            position = end + 1
    return [text for text in texts if text]


def _closing_single(prompt: str, start: int) -> int | None:
    """Find the mark that closes the single one before `start`: None without any, -1 where that is an apostrophe."""
    elided = _ELIDED.match(prompt, start - 1)
    if not prompt[start : start + 1].strip() or (elided and elided[0][-1] in "'’"):
        return -1
    position = start
    while match := _SINGLE.search(prompt, position):
        end, position = match.start(), match.end()
        before, inside = prompt[end - 1], _WORD.match(prompt, position)
        if before.isspace() or before in "([{":
            word = _ELIDED.match(prompt, end)
            if word and not elided:
                position = word.end()
            elif prompt[position : position + 1].strip():
                return -1  # another one opens: single marks do not nest
        elif not inside and match[0] in _CLOSING[prompt[start - 1]]:
            is_plural = elided and elided[0][-1].isalpha() and before == "s"  # the '90s kids' room
            return -1 if is_plural else end
    return None


def normal_text(text: str) -> str:
    """Unicode NFKC, case folded, all white space removed, typographic apostrophes and quotation marks plain."""
    return "".join(unicodedata.normalize("NFKC", text.translate(_ALIKE)).casefold().split())


def text_score(target: str | Sequence[str], recognised: str, *, rule: str = "window") -> float | None:
    """Similarity of recognised text s and wanted text t, in [0, 1].

    - "window": (|t| − d) / max(|t|, |s|) on `normal_text`, d the least distance of t to a substring of s. Any
      text beyond the wanted length lowers the score, and characters that are not in t never raise it: a
      perfect sign with as much other text again scores ½. Several wanted texts are joined in the order that
      fits best (up to `MAX_ORDERED`), because an engine's reading order is not the prompt's.
    - "plain": 1 − min(lev, |t|) / |t|, as "verl_omni" but without its substring rule.
    - "flow_grpo": lower case without blanks; 1 if t is a substring of s, else "plain". Flooding the image
      with text satisfies it.
    - "verl_omni": the same without any white space.

    Several wanted texts are joined in the last three rules. A target without characters gives None; "plain"
    and "verl_omni" then give 1 if no text was recognised, else 0, as verl-omni's code does.

    Levenshtein 1966; the two named rules are those of the released code of flow_grpo (arXiv 2505.05470) and verl-omni.
    """
    texts = [target] if isinstance(target, str) else list(target)
    if rule == "window":
        targets, text = [normal_text(part) for part in texts], normal_text(recognised)
        length = sum(map(len, targets))
        if not length:
            return None
        orders = itertools.permutations(targets) if len(targets) <= MAX_ORDERED else [tuple(targets)]
        distance = min(window_distance("".join(order), text) for order in orders)
        return (length - distance) / max(length, len(text))
    return _published_score("".join(texts), recognised, rule)


def _published_score(target: str, text: str, rule: str) -> float | None:
    if rule == "flow_grpo":
        target, text = (part.replace(" ", "").lower() for part in (target, text))
    else:
        target, text = ("".join(part.split()).lower() for part in (target, text))
    if not target:
        return None if rule == "flow_grpo" else float(not text)
    if rule != "plain" and target in text:
        return 1.0
    return 1 - min(levenshtein(target, text), len(target)) / len(target)
