# SPDX-License-Identifier: Apache-2.0
"""Numbers of a bench: means with intervals over prompts, win rates of every two, and the pairs that differ most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from visalign.atomic import write_atomic
from visalign.evaluation.heldout.comparison import compare
from visalign.evaluation.heldout.result import HeldoutResult
from visalign.evaluation.pages.bench_page import bench_page, file_tables
from visalign.evaluation.pages.table_files import FOLDER, write_tables
from visalign.evaluation.statistics.comparisons import holm, mcnemar
from visalign.evaluation.statistics.intervals import RatioTable, cluster_index, finite
from visalign.pipelines.score.report import load_shown_images
from visalign.pipelines.shared.run_folder import pretty

from .sides import Side

RESULT, PAGE, ACCURACY = "bench.json", "bench.html", "accuracy"
SHOWN = 6  # Pairs of images shown for every two sides


def bench_record(results: Mapping[str, HeldoutResult], sides: Sequence[Side]) -> dict[str, Any]:
    """Build the JSON of a bench: the numbers of each side, every two compared, and their largest differences.

    `p_holm` corrects the tests of all pairs and measures together.
    """
    measured = _with_accuracy(results)
    some, paths = next(iter(measured.values())), {side.label: [row.image for row in side.rows] for side in sides}
    names = [name for name in some.scores if all(name in result.scores for result in measured.values())]
    pairs, differences = [], []
    for a, b in combinations(measured, 2):
        pairs += [{"first": a, "second": b, **entry} for entry in _compare(measured[a], measured[b], names)]
        rows = _largest_differences(measured[a], measured[b], names)
        rows = [row | {"images": [paths[side][row["row"]] for side in (a, b)]} for row in rows]
        differences.append({"first": a, "second": b, "samples": rows})
    tested = [pair for pair in pairs if pair["p_value"] is not None]
    for pair, corrected in zip(tested, holm([pair["p_value"] for pair in tested]), strict=True):
        pair["p_holm"] = corrected
    return {
        "format": "visalign bench 1",
        "prompts": len(set(some.keys)),
        "samples": len(some),
        "measures": {n: {"unit": some.units[n], "higher_is_better": some.higher_is_better[n]} for n in names},
        "models": [{"label": s.label, **s.facts, "numbers": _numbers(measured[s.label], names)} for s in sides],
        "pairs": pairs,
        "differences": differences,
    }


def _with_accuracy(results: Mapping[str, HeldoutResult]) -> dict[str, HeldoutResult]:
    """Add the verdicts, if there are any, to the scores, in place of a reward that only repeats them."""
    with_verdicts, measured = [result for result in results.values() if result.judged.any()], dict(results)
    for label, result in results.items() if with_verdicts else ():
        rest = {n: s for n, s in result.scores.items() if not all(checked.is_verdict(n) for checked in with_verdicts)}
        units, directions = {ACCURACY: "share correct", **result.units}, {ACCURACY: True, **result.higher_is_better}
        scores = {ACCURACY: result.outcome(), **rest}
        measured[label] = replace(result, scores=scores, units=units, higher_is_better=directions)
    return measured


def _numbers(result: HeldoutResult, names: Sequence[str]) -> dict[str, Any]:
    """Return measure -> mean with its interval as `evaluate` has it, in all and by category."""

    def mean(name: str, tag: str | None) -> dict[str, float | None]:
        rows = None if tag is None else np.flatnonzero(result.rows(tag)).tolist()
        return (result.interval(tag) if name == ACCURACY else result.mean_interval(name, rows)).to_dict()

    numbers = {name: {"failed": result.invalid(name)} | mean(name, None) for name in names}
    return {
        n: v | {"by_category": {tag: mean(n, tag) for tag in dict.fromkeys(result.tags)}} for n, v in numbers.items()
    }


def _compare(first: HeldoutResult, second: HeldoutResult, names: Sequence[str]) -> list[dict[str, Any]]:
    """Compare two sides by every measure on the same samples, in all and by category.

    The win rate is the share of samples on which the second is better, a tie counts ½; its test flips the signs of
    whole prompts (`mcnemar`). The change, second minus first, has the paired interval of `evaluation.compare`.
    """
    changes, tags = {row.name: row.change for row in compare(first, second).rewards}, np.array(first.tags)
    entries = []
    for name in names:
        gain = np.sign(second.scores[name] - first.scores[name]) * (1 if first.higher_is_better[name] else -1)
        valid = np.flatnonzero(np.isfinite(gain))
        credit, prompts = 0.5 + gain[valid].astype(np.float64) / 2, [first.keys[row] for row in valid]
        entry = {"measure": name, "change": changes[name].to_dict(), "p_value": None, "p_holm": None}
        entry |= {label: int((credit == value).sum()) for label, value in (("wins", 1), ("ties", 0.5), ("losses", 0))}
        table = RatioTable(*cluster_index(prompts))
        for tag in (None, *dict.fromkeys(first.tags)) if prompts else ():
            of_tag = np.ones(len(valid)) if tag is None else (tags[valid] == tag).astype(np.float64)
            table.add(tag, credit * of_tag, of_tag)
        rates = table.intervals(generator=torch.Generator().manual_seed(0))
        by_category = {tag: rate.to_dict() for tag, rate in rates.items()}
        entry["p_value"] = mcnemar(credit, 1 - credit, prompts)["p_value"] if prompts else None
        entries.append(entry | {"win_rate": by_category.pop(None, None), "by_category": by_category})
    return entries


def _largest_differences(first: HeldoutResult, second: HeldoutResult, names: Sequence[str]) -> list[dict[str, Any]]:
    """Find the samples on which two sides differ most: by the mean over measures of gain / root mean square."""
    total: NDArray[np.float64] = np.zeros(len(first))
    for name in names:
        gain = np.nan_to_num(second.scores[name] - first.scores[name]).astype(np.float64)
        total += (1 if first.higher_is_better[name] else -1) * gain / (math.sqrt(float(np.mean(gain**2))) or 1.0)
    rows = [int(row) for row in np.argsort(-np.abs(total), kind="stable")[:SHOWN] if total[row]]
    return [
        {"row": row, "prompt": first.title(row), "seed": int(first.seeds[row]), "better": int(total[row] > 0)}
        | {"scores": {name: [finite(float(side.scores[name][row])) for side in (first, second)] for name in names}}
        for row in rows
    ]


def write_bench(folder: Path, result: Mapping[str, Any]) -> None:
    """Write `tables/`, `bench.html` and `bench.json`, each file atomically."""
    names = [name for pair in result["differences"] for row in pair["samples"] for name in row["images"]]
    write_tables(folder / FOLDER, file_tables(result))
    write_atomic(folder / PAGE, bench_page(result, load_shown_images(dict.fromkeys(names))))
    write_atomic(folder / RESULT, pretty(result))  # last: with it the folder is whole
