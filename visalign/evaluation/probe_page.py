# SPDX-License-Identifier: Apache-2.0
"""The page of a probed reward: what failed first, then every probe with its responses and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from .pages import plain, render_page, signed
from .probe_response import ORDER
from .probes import WANTED
from .reward_plots import Frame

VERDICTS = {
    "fails": ("bad", "moves the score"),
    "unclear": ("flat", "unclear"),
    "not judged": ("flat", "too few judged"),
    "holds": ("good", "holds"),
    "shown": ("flat", "for information"),
}
"""Verdict -> (colour, words)."""


def probe_page(
    result: Mapping[str, Any],
    original: Mapping[str, Any],
    pictures: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    """The whole page.

    Args:
        result: From `visalign.pipelines.probe_reward.probe_reward`.
        original: The example picture as `embedded` gives it, with its `prompt`.
        pictures: Probe's name -> changed pictures as `embedded` gives them, with `label`.

    Returns:
        HTML.
    """
    probes = sorted(result["probes"], key=lambda probe: ORDER.index(probe["verdict"]))
    means = [abs(level["mean"]) for probe in probes for level in probe["levels"] if level["mean"] is not None]
    judge, reference = result["judge"], result["reference"]
    return render_page(
        "probe_page.html.j2",
        title=f"What moves {judge['name']}",
        command="visalign probe-reward",
        judge=judge,
        reference=reference,
        limits=result["limits"],
        level=result["level"],
        counts=result["summary"],
        probes=[{**probe, "plot": response_plot(probe)} for probe in probes],
        original=original,
        pictures=pictures,
        verdicts=VERDICTS,
        wanted=WANTED,
        limit=min(max([1.0, *means]), 4.0),
        seconds=result["seconds"],
        headline=headline(result),
        best=best_paid(result),
    )


def headline(result: Mapping[str, Any]) -> str:
    """One sentence: how many probes move the reward that should not."""
    tried = [probe for probe in result["probes"] if probe["verdict"] != "shown"]
    failed = [probe["title"] for probe in tried if probe["verdict"] == "fails"]
    if not failed:
        return f"None of {len(tried)} probes moves it beyond its limit."
    return f"{len(failed)} of {len(tried)} probes move it: {', '.join(title.lower() for title in failed)}."


def best_paid(result: Mapping[str, Any]) -> str | None:
    """What an optimiser would be paid most for, or None where no change is paid beyond the limit."""
    found = [
        (level["mean"], probe["title"], level["label"])
        for probe in result["probes"]
        if probe["wanted"] in ("no gain", "falling", "loss")
        for level in probe["levels"]
        if level["mean"] is not None and level["verdict"] == "fails"
    ]
    if not found or max(found)[0] <= result["limits"]["gain"]:
        return None
    mean, title, label = max(found)
    return f"The best paid change is {title.lower()}, {label}: {signed(mean)} spreads on average."


def response_plot(probe: Mapping[str, Any]) -> Markup | None:
    """Mean response with its interval against the strength of the change; None for kinds without an order.

    Args:
        probe: One of the result's probes.
    """
    points = [
        (float(level["x"]), level["mean"], level["low"], level["high"])
        for level in probe["levels"]
        if level["x"] is not None and level["mean"] is not None
    ]
    if len(points) < 2:
        return None
    if probe["neutral"] is not None:
        points.append((float(probe["neutral"]), 0.0, 0.0, 0.0))
    points.sort()
    lows = [mean if low is None else low for _, mean, low, _ in points]
    highs = [mean if high is None else high for _, mean, _, high in points]
    bottom, top = min([*lows, -0.2]), max([*highs, 0.2])
    pad = (top - bottom) / 20
    frame = Frame(
        x=(points[0][0], points[-1][0]),
        y=(bottom - pad, top + pad),
        x_name=probe["x_name"],
        y_name="response, spreads",
    )
    xs = [x for x, *_ in points]
    outline = [frame.place(x, y) for x, y in zip(xs, lows, strict=True)]
    outline += [frame.place(x, y) for x, y in zip(xs[::-1], highs[::-1], strict=True)]
    band = " ".join(f"{a:.1f},{b:.1f}" for a, b in outline)
    line = [frame.place(x, mean) for x, mean, *_ in points]
    zero = [frame.place(frame.x[0], 0.0), frame.place(frame.x[1], 0.0)]
    said = f"{probe['title']}: mean response from {plain(min(m for _, m, *_ in points))} to "
    said += f"{plain(max(m for _, m, *_ in points))} spreads over {len(points)} strengths."
    parts = [
        *frame.draw(),
        f'<polygon class="band" points="{band}"/>',
        _path("zero", zero),
        _path("line", line),
    ]
    parts += [f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in line]
    inner = "".join(parts)
    return Markup(f'<svg viewBox="0 0 360 300" role="img" aria-label="{escape(said)}">{inner}</svg>')


def _path(name: str, points: Sequence[tuple[float, float]]) -> str:
    steps = " ".join(f"{'L' if k else 'M'}{x:.1f} {y:.1f}" for k, (x, y) in enumerate(points))
    return f'<path class="{name}" d="{steps}"/>'
