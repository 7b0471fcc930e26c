# SPDX-License-Identifier: Apache-2.0
"""Page of a ranking: the images in order with their intervals, the comparisons, the failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import special, stats

from .base import provenance_sentence, render_page, share, short_names, signed
from .table_files import FileTable

SHOWN = 60
"""Rows of the table that show their image."""
LEAST_SCALE = 2e-9
"""Length of the tracks where all ends are one number."""


def rank_page(result: Mapping[str, Any], images: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Render a `ranking_record`; images as returned by `embedded`, None where unreadable."""
    placed = [row for row in result["images"] if row["place"] is not None]
    failed = [row for row in result["images"] if row["place"] is None]
    ends = [row[key] for row in placed for key in ("low", "score", "high") if row[key] is not None] or [0.0]
    low, high = min(ends), max(ends)
    missed = Counter(call["reason"] for call in result["asked"] or () if call["prob"] is None)
    results: list[tuple[str, Any, str]] = [("Images in order", len(placed), f"{len(failed)} could not be judged")]
    of_all = "" if result["asked"] is None else f"of {result['all_pairs']} pairs of images"
    results.append((f"Calls of {result['judge']}", result["calls"], of_all))
    if result["position_bias"] is not None:
        unit = f"{result['unit']}, for the left image"
        results.append(("Position bias", signed(result["position_bias"]), unit))
    source = result["provenance"] and provenance_sentence(result["judge"], result["provenance"])
    return render_page(
        "rank_page.html.j2",
        title="Best first",
        command="visalign rank",
        result=result,
        headlines=results,
        placed=placed,
        failed=failed,
        failed_calls=[(_number(count, "call"), reason) for reason, count in missed.items()],
        ends=(low, high),
        track=(low, max(high, low + LEAST_SCALE)),
        has_intervals=any(row["low"] is not None for row in placed),
        images=images,
        shown=SHOWN,
        names=short_names(row["image"] for row in result["images"]),
        banners=[result["warning"]] if result["warning"] else [],
        sentences=list(filter(None, [*sentences(result), source])),
    )


def file_tables(result: Mapping[str, Any]) -> list[FileTable]:
    """Build the tables of the images in order, and of every call of a pairwise reward, for files."""
    images = [
        [row["image"], row["place"], (row["score"], row["low"], row["high"]), row.get("calls"), row["reason"]]
        for row in result["images"]
    ]
    columns = ("image", "place", "score", "calls", "reason")
    tables = [FileTable(name="ranking", columns=columns, rows=images)]
    if result["asked"] is not None:
        calls = ("left", "right", "prob", "reason")
        rows = [[call[name] for name in calls] for call in result["asked"]]
        tables.append(FileTable(name="calls", columns=calls, rows=rows))
    return tables


def sentences(result: Mapping[str, Any]) -> list[str]:
    placed = [row for row in result["images"] if row["place"] is not None]
    return [_calls(result), *_bias(result), *_best(result, placed)]


def _calls(result: Mapping[str, Any]) -> str:
    count, pairs, name = result["calls"], result["all_pairs"], result["judge"]
    if result["asked"] is None:
        direction = "" if result["higher_is_better"] else ", of which lower is better"
        return f"{name} scored {_number(count, 'image')}; scores in {result['unit']}{direction}."
    of_all = f", as many as {share(count / pairs)} of the {_number(pairs, 'pair')} of images" if pairs else ""
    calls = {(call["left"], call["right"]) for call in result["asked"]}
    both = sum((right, left) in calls for left, right in calls) // 2
    orders = f"; asked in both orders: {_number(both, 'pair')}" if both else ""
    return f"{name}: {_number(count, 'call')}{of_all}{orders}."


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _bias(result: Mapping[str, Any]) -> list[str]:
    """Describe the position bias with its interval, and its effect between equals."""
    bias, std = result["position_bias"], result["position_bias_std"]
    if bias is None or not any(call["prob"] is not None for call in result["asked"] or ()):
        return []
    reach = float(stats.norm.ppf((1 + result["level"]) / 2)) * std
    link = special.ndtr if "normal" in result["unit"] else special.expit  # Thurstone or Bradley-Terry
    sentence = (
        f"Being on the left adds {signed(bias)} {result['unit']} ({signed(bias - reach)} to {signed(bias + reach)}): "
        f"of two equals the left one wins {share(float(link(bias)))}."
    )
    clear = abs(bias) > reach
    return [sentence if clear else f"{sentence} That interval holds 0: no clear position bias."]


def _best(result: Mapping[str, Any], placed: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(placed) < 2 or any(row["low"] is None for row in placed):
        return []
    sign = 1 if result["higher_is_better"] else -1
    near, far = ("low", "high") if sign > 0 else ("high", "low")
    rivals = sum(sign * row[far] >= sign * placed[0][near] for row in placed[1:])
    if not rivals:
        name = short_names(row["image"] for row in result["images"])[placed[0]["image"]]
        return [f"The interval of {name} lies apart from all others: it is the best."]
    number = "interval" if rivals == 1 else "intervals"
    return [f"The first place is open: {rivals} other {number} overlap with that of the first."]
