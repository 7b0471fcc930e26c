# SPDX-License-Identifier: Apache-2.0
"""Curves: ticks, labels, gaps, smoothing, and an SVG whose points lie where they should."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from visalign.evaluation.pages.curves import CURVES, HEIGHT, RIGHT, WIDTH, Curve, known_curves, panels, running_mean
from visalign.evaluation.pages.plots import BOTTOM, LEFT, TOP, label, ticks

REWARD = Curve(keys=("reward_mean",), title="Reward", unit="points", meaning="mean")


def draw(values: list, curve: Curve = REWARD, key: str = "reward_mean") -> str:
    return str(panels([{"iteration": n, key: v} for n, v in enumerate(values, 1)], [curve])[0][0].svg)


def points(svg: str, name: str = "line") -> list[list[tuple[float, float]]]:
    """The strokes of a path."""
    path = re.search(rf'<path class="{name}" d="([^"]*)"', svg)
    assert path is not None
    strokes: list[list[tuple[float, float]]] = []
    for pen, x, y in re.findall(r"([ML])(-?[\d.]+) (-?[\d.]+)", path.group(1)):
        if pen == "M":
            strokes.append([])
        strokes[-1].append((float(x), float(y)))
    return strokes


@pytest.mark.parametrize(("low", "high", "expected"), [(0, 1, [0, 0.5, 1]), (-3, 17, [0, 5, 10, 15]), (2, 2, [2])])
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "step", "expected"),
    [(0.0, 0.1, "0"), (-0.25, 0.05, "−0.25"), (4e-6, 2e-6, "4e−6"), (2.5e7, 5e6, "2.5e7")],
)
def test_labels(value: float, step: float, expected: str) -> None:
    assert label(value, step) == expected


def test_points_lie_where_the_numbers_say() -> None:
    """Four iterations at equal distances; the largest value highest, equal steps equally far apart."""
    (stroke,) = points(draw([1.0, 2.0, 3.0, 2.0]))
    x, y = zip(*stroke, strict=True)
    assert x[0] == LEFT and x[-1] == WIDTH - RIGHT
    assert np.diff(x) == pytest.approx(np.diff(x)[0], abs=0.11)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.11)
    assert y[1] == y[3] and TOP < min(y) and max(y) < HEIGHT - BOTTOM


def test_from_zero_starts_at_zero() -> None:
    svg = draw([0.2, 0.4], Curve(keys=("k",), title="t", unit="u", meaning="m", from_zero=True), "k")
    (stroke,) = points(svg)
    bottom = HEIGHT - BOTTOM
    assert (bottom - stroke[1][1]) == pytest.approx(2 * (bottom - stroke[0][1]), abs=0.11)


def test_every_svg_is_well_formed_and_speaks() -> None:
    rows = [{"iteration": n, **{key: 0.1 * n for curve in CURVES for key in curve.keys}} for n in range(1, 40)]
    for panel in panels(rows)[0]:
        root = ElementTree.fromstring(str(panel.svg))
        assert root.get("role") == "img"
        assert (root.get("aria-label") or "").startswith(panel.curve.title)
        texts = [node.text for node in root.iter("text")]
        assert "iteration" in texts and "10" in texts


def test_sparse_values_are_joined_and_start_counts() -> None:
    """Evaluations of every tenth iteration are one stroke, beginning at the value before training."""
    rows = [{"iteration": n} | ({"heldout/accuracy": 0.5 + n / 100} if n % 10 == 0 else {}) for n in range(1, 31)]
    panel = panels(rows, [CURVES[1]], start={"heldout/accuracy": 0.4})[0][0]
    (stroke,) = points(str(panel.svg))
    assert len(stroke) == 4 and stroke[0][0] == LEFT
    assert str(panel.svg).count('<circle class="dot"') == 4
    assert "iterations 0 to 30: from 40 to 80.0 %" in str(panel.svg)


def test_gaps_break_the_line_and_are_counted() -> None:
    rows = [{"iteration": n, "reward_mean": v} for n, v in enumerate([1.0, 2.0, None, math.inf, 3.0, 4.0], 1)]
    panel = panels(rows, [REWARD])[0][0]
    assert [len(stroke) for stroke in points(str(panel.svg))] == [2, 2]
    assert panel.note == "2 of 6 values were not finite and are left out"
    assert "nan" not in str(panel.svg) and "inf" not in str(panel.svg)


def test_curves_that_stay_at_zero_are_a_sentence() -> None:
    kl = Curve(keys=("kl",), title="KL", unit="nats", meaning="m", from_zero=True)
    rows = [{"iteration": n, "reward_mean": 0.1 * n, "kl": 0.0} for n in range(1, 4)]
    drawn, flat = panels(rows, [REWARD, kl])
    assert [panel.curve.title for panel in drawn] == [REWARD.title]
    assert flat == "Zero in every iteration, and not drawn: KL."
    assert panels([*rows, {"iteration": 4, "kl": 1e-12}], [REWARD, kl])[1] == panels([], [kl])[1] == ""


def test_nothing_recorded() -> None:
    assert panels([], [REWARD]) == panels([{"iteration": 1}], [REWARD]) == ((), "")
    unmeasured = panels([{"iteration": 1, "reward_mean": None}], [REWARD])
    assert unmeasured == ((), "Never measured, and not drawn: Reward.")


def test_a_held_out_reward_is_drawn_with_its_interval() -> None:
    rows = [{"iteration": n, "heldout/mine": n / 9, "heldout/mine.low": 0.0, "heldout/mine.high": 1.0} for n in (1, 2)]
    ((panel,), _) = panels(rows, known_curves(rows))
    assert panel.curve.title == "Held-out mine" and panel.svg.count("<path") > 1


@pytest.mark.parametrize("values", [[5.0], [-2.0, -2.0], [1e12, 3e12]])
@pytest.mark.parametrize("from_zero", [False, True])
def test_odd_ranges_stay_inside(values: list[float], from_zero: bool) -> None:
    curve = Curve(keys=("k",), title="t", unit="u", meaning="m", from_zero=from_zero)
    svg = draw(values, curve, "k")
    for x, y in (point for stroke in points(svg) for point in stroke):
        assert LEFT <= x <= WIDTH - RIGHT and TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1


def test_running_mean_by_hand() -> None:
    values = np.array([1.0, 2.0, np.nan, 6.0, 1.0])
    np.testing.assert_allclose(running_mean(values, 3), [1.5, 1.5, np.nan, 3.5, 3.5])
    assert running_mean(values, 1) is values


def test_what_a_run_names_itself_gets_panels_of_its_own() -> None:
    row = {"agreement/shapes_verifier": 0.5, "recorded/shapes_verifier": 0.7, "reward_part/hps.std": 0.1}
    rows = [{"iteration": 1, **row, "reward_part/hps": 3.0}, {"iteration": 2, "reward_part/std": 0.2}]
    titles = [panel.curve.title for panel in panels(rows, known_curves(rows))[0]]
    assert titles == [
        "Agreement with shapes verifier",
        "shapes verifier, held out",
        "Judge's own std: hps",
        "Judge's own std",
    ]


def test_the_accuracy_has_its_interval_and_a_tag_called_low_is_none():
    row = {"heldout/accuracy": 0.5, "heldout/accuracy_low": 0.25, "heldout/accuracy_high": 0.75}
    row |= {"heldout/accuracy.low": 0.1, "heldout/accuracy.high": 0.9}
    rows = [{"iteration": k, **row} for k in (1, 2)]
    (panel,), _ = panels(rows, [curve for curve in known_curves(rows) if curve.keys[0].startswith("heldout/acc")])
    assert str(panel.svg).count('class="raw"') == 2 and panel.curve.title == "Held-out accuracy"
    (bare,), _ = panels([{"iteration": 1, "heldout/accuracy": 0.5}], CURVES[1:2])
    assert 'class="raw"' not in str(bare.svg)
