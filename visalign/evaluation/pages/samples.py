# SPDX-License-Identifier: Apache-2.0
"""Choice of the samples in a report, by a stated rule, and their encoding for the page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.evaluation.heldout.comparison import Comparison
from visalign.evaluation.heldout.result import HeldoutResult
from visalign.evaluation.heldout.text import ANY, GREEDY

from .base import data_uri, words
from .wording import kind_of


def galleries(before: HeldoutResult, after: HeldoutResult, comparison: Comparison) -> list[dict[str, Any]]:
    """Choose fixed, improved and worsened pairs, or without verdicts the best and worst of the first reward.

    At most 12 of a kind: `anchor`, `title`, `rule`, `pairs`; in the order of evaluation, one of each category
    in turn, a prompt once.
    """
    if not (before.judged.any() or after.judged.any()) and comparison.rewards:
        changed = _by_change(before, after, comparison.rewards[0].name)
    else:
        changed = [
            ("improved", "Wrong before, correct after", "the first that improved", comparison.improved),
            ("worse", "Correct before, wrong after", "the first that got worse", comparison.worsened),
        ]
    same = f"The same {kind_of(before).plural} in every report"
    first = "chosen before looking: the first prompts of each category"
    sections = []
    for anchor, title, rule, candidates in [("fixed", same, first, np.arange(len(before))), *changed]:
        rows = take_in_turn(_shown(candidates, before, after), before, 12)
        pairs = [
            {"prompt": before.title(row), "tag": before.tags[row], "seed": int(before.seeds[row])}
            | {"before": shot(row, before), "after": shot(row, after)}
            for row in rows
        ]
        counted = f"{len(rows)} of {len(candidates)}: {rule}, one category after the other, each prompt once."
        sections.append({"anchor": anchor, "title": title, "rule": counted, "pairs": pairs})
    return sections


def _by_change(
    before: HeldoutResult, after: HeldoutResult, name: str
) -> list[tuple[str, str, str, NDArray[np.int64]]]:
    """List the best and worst samples of a reward after training, and those that gained and lost most."""
    sign, title = 1 if after.higher_is_better[name] else -1, words(name)
    value, change = sign * after.scores[name], sign * (after.scores[name] - before.scores[name])

    def order(values: NDArray[np.float32]) -> NDArray[np.int64]:
        rows = np.argsort(-values, kind="stable")  # equal scores stay in the order of evaluation
        return rows[np.isfinite(values[rows])]

    gained, lost = order(change), order(-change)
    return [
        ("best", f"Best after training, by {title}", "the best", order(value)),
        ("worst", f"Worst after training, by {title}", "the worst", order(-value)),
        ("improved", f"Gained most in {title}", "those that gained most", gained[change[gained] > 0]),
        ("worse", f"Lost most in {title}", "those that lost most", lost[change[lost] < 0]),
    ]


def collapsed(text: str) -> str:
    """Collapse runs of one special token to one and their count.

    >>> collapsed("yes<|endoftext|><|endoftext|><|endoftext|>")
    'yes<|endoftext|> × 3'
    """
    runs = r"(<\|?[\w/ ]{1,30}\|?>|\[(?:PAD|UNK|SEP)\])(?:\s*\1)+"  # such as the padding behind an answer
    return re.sub(runs, lambda match: f"{match[1]} × {match[0].count(match[1])}", text)


def failures(after: HeldoutResult) -> list[dict[str, Any]]:
    """Choose per category the first six wrong samples after training, each prompt once, as (prompt, seed, shot)."""
    groups = []
    for tag in dict.fromkeys(after.tags):
        judged = after.rows(tag) & after.judged
        wrong = np.flatnonzero(judged & ~after.correct)
        rows = take_in_turn(_shown(wrong, after), after, 6)
        shots = [(after.title(row), int(after.seeds[row]), shot(row, after)) for row in rows]
        groups.append({"tag": tag, "total": len(wrong), "judged": int(judged.sum()), "shots": shots})
    return [group for group in groups if group["total"]]


def take_in_turn(candidates: Iterable[int], result: HeldoutResult, limit: int) -> list[int]:
    """Take at most `limit` candidates: one of each category in turn, in their order, no prompt twice."""
    queues: dict[str, list[int]] = {tag: [] for tag in dict.fromkeys(result.tags)}
    keys, used = result.keys, set()
    for row in candidates:
        if keys[row] not in used:
            used.add(keys[row])
            queues[result.tags[row]].append(int(row))
    rows: list[int] = []
    for depth in range(max(map(len, queues.values()), default=0)):
        rows += [queue[depth] for queue in queues.values() if depth < len(queue)]
    return sorted(rows[:limit], key=lambda row: list(queues).index(result.tags[row]))


def shot(row: int, result: HeldoutResult) -> dict[str, Any]:
    """Encode one sample with its verdict; an image (`source`, `row` in `image_index`) or a completion (`text`).

    `scores` are those of the rewards other than the one for the verdicts.
    """
    verdict = "no verdict" if not result.judged[row] else "correct" if result.correct[row] else "wrong"
    entry = {"verdict": verdict, "reason": "" if verdict == "correct" else result.reasons[row]}
    scores = {name: float(values[row]) for name, values in result.scores.items()}
    if result.completions:
        other = [item for item in scores.items() if item[0] not in (GREEDY, ANY)]
        return entry | {"source": "", "text": collapsed(result.completions[row]), "scores": other}
    other = [item for item in scores.items() if not result.is_verdict(item[0])]
    image = result.images[int(np.searchsorted(result.image_index, row))]
    return entry | {"source": data_uri(image), "text": "", "scores": other}


def _shown(candidates: NDArray[np.int64], *results: HeldoutResult) -> NDArray[np.int64]:
    """Leave the candidates that the page can show: of images, those kept in every result."""
    for result in (result for result in results if not result.completions):
        candidates = candidates[np.isin(candidates, result.image_index)]
    return candidates
