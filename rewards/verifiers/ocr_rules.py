# SPDX-License-Identifier: Apache-2.0
"""Scores of recognised text against wanted text, pure functions of strings."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence

RULES = ("window", "plain", "flow_grpo", "verl_omni")
MAX_ORDERED = 4
"""Up to so many wanted texts are matched in any order; more are matched in the order given."""

_QUOTED = re.compile(
    r'"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]|«([^»]*)»|「([^」]*)」'
    r"|(?<!\w)'([^']*(?:'\w[^']*)*)'(?!\w)|(?<!\w)‘([^’]*(?:’\w[^’]*)*)’(?!\w)"
)


def levenshtein(a: str, b: str) -> int:
    """The fewest insertions, deletions and substitutions of one character that turn a into b."""
    if len(a) < len(b):
        a, b = b, a
    previous = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        current = [i]
        for j, right in enumerate(b, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (left != right)))
        previous = current
    return previous[-1]


def window_distance(target: str, text: str) -> int:
    """The least `levenshtein` of the target to any stretch of the text, the empty one too.

    Sellers, Journal of Algorithms 1 (1980) 359.
    """
    previous = [0] * (len(text) + 1)
    for i, left in enumerate(target, 1):
        current = [i]
        for j, right in enumerate(text, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (left != right)))
        previous = current
    return min(previous)


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
    """How well a picture's text is the wanted one, in [0, 1].

    - "window": (|t| − d) / max(|t|, |s|) on `normal_text`, d the least distance of t to a stretch of s. Text
      beyond the wanted length lowers the score, wherever it stands and whatever it is, and characters that
      are not in t never raise it: a perfect sign with as much other text again has ½. For several wanted
      texts t is they joined in the order that fits best (up to `MAX_ORDERED`), because the order in which an
      engine reads a picture is not the prompt's.
    - "plain": 1 − min(lev, |t|) / |t|, as "verl_omni" but without its substring rule.
    - "flow_grpo": lower case without blanks; 1 if t is a substring of s, else "plain". Flooding the picture
      with text satisfies it.
    - "verl_omni": the same without any white space.

    Args:
        target: wanted text, or several (which the last three rules join).
        recognised: all that was read in the picture.
        rule: see above.

    Returns:
        The score; None for a target without characters ("plain" and "verl_omni" then say whether nothing was
        read, as the latter's code does).

    Raises:
        ValueError: an unknown rule.

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
