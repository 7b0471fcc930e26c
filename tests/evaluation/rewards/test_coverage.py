# SPDX-License-Identifier: Apache-2.0
"""Coverage on few sets; tests/benchmarks/evaluation/interval_coverage.py has all that is printed."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from visalign.data.sets.records import QualityRecord, QualitySet
from visalign.evaluation.rewards.comparison import compare_on_quality
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.rewards.quality import evaluate_quality, from_values
from visalign.evaluation.statistics.correlations import fit_logistic
from visalign.evaluation.statistics.intervals import jackknife_interval


def ratings(seed: int, prompts: int, each: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Opinions, two equally good judges' scores, prompts: most of what they err in is the prompt's."""
    rng = np.random.default_rng(seed)
    index = np.repeat(np.arange(prompts), each)

    def noise() -> np.ndarray:
        shared = 0.8 if each > 1 else 0.0
        common, own = rng.normal(size=prompts)[index], rng.normal(size=len(index))
        return math.sqrt(shared) * common + math.sqrt(1 - shared) * own

    good = noise()
    return np.tanh(good) + 0.2 * noise(), good + noise(), good + noise(), index


def records(mos: np.ndarray, prompts: np.ndarray | None) -> QualitySet:
    return QualitySet(
        name="q",
        records=tuple(
            QualityRecord(image=str(k), mos=float(value), prompt="" if prompts is None else f"p {prompts[k]}")
            for k, value in enumerate(mos)
        ),
    )


def test_prompts_are_drawn_whole() -> None:
    """The interval of the difference of equals holds 0 where the images of a prompt go together."""
    sets, held = 120, {"prompts": 0, "images": 0}
    for seed in range(sets):
        mos, x, other, index = ratings(seed, 30, 6)
        judges = from_values("a", "x", x), from_values("b", "x", other)
        settings = IntervalSettings(seed=seed, resamples=150)
        for kind, prompts in (("prompts", index), ("images", None)):
            number = compare_on_quality(records(mos, prompts), *judges, settings)["difference"]
            held[kind] += number["low"] <= 0 <= number["high"]
    assert held["prompts"] >= sets * (0.95 - 3 * math.sqrt(0.95 * 0.05 / sets)), held
    assert held["images"] < 0.75 * sets, "the sets would not show that images are drawn one by one"


def test_a_rank_correlation_of_few_takes_the_jackknife() -> None:
    """Of 12 prompts: tanh(artanh r ± t s / (1 − r²)), s from the values without each prompt."""
    mos, x, _, index = ratings(3, 12, 3)
    r = np.corrcoef(stats.rankdata(x), stats.rankdata(mos))[0, 1]
    parts = [(stats.rankdata(x[index != k]), stats.rankdata(mos[index != k])) for k in range(12)]
    left_out = np.array([np.corrcoef(*part)[0, 1] for part in parts])
    half = (
        stats.t.ppf(0.975, 11) * math.sqrt(11 / 12 * ((left_out - left_out.mean()) ** 2).sum()) / (1 - r**2)
    )
    report = evaluate_quality(records(mos, index), from_values("a", "x", x), IntervalSettings(resamples=100))
    assert any("fewer than 15 prompts or images" in note for note in report["notes"])
    found = report["correlations"]["srcc"]
    assert [found["low"], found["high"]] == pytest.approx(
        [math.tanh(math.atanh(r) + end) for end in (-half, half)]
    )


def test_two_clusters_give_no_jackknife() -> None:
    assert math.isnan(jackknife_interval(0.3, np.array([0.2, 0.4])).low)
    assert math.isnan(jackknife_interval(0.3, np.array([0.2, math.nan, 0.4])).low)
    assert math.isnan(jackknife_interval(1.0, np.ones(10)).high), "a perfect order says nothing of its error"


def test_a_perfect_fit_says_nothing_of_its_error() -> None:
    x = np.arange(12.0)
    report = evaluate_quality(records(x, None), from_values("a", "x", x), IntervalSettings(resamples=100))
    for name in ("srcc", "plcc_logistic5"):
        found = report["correlations"][name]
        assert found["estimate"] == pytest.approx(1) and found["low"] is None and found["high"] is None


@pytest.mark.slow
def test_a_fit_of_30_images_is_fitted_in_each_resample() -> None:
    mos, x, _, _ = ratings(10**6, 4_000, 1)
    truth = {number: fit_logistic(x, mos, number).plcc for number in (4, 5)}
    sets, held = 24, {4: 0, 5: 0}
    for seed in range(sets):
        mos, x, _, _ = ratings(seed, 30, 1)
        settings = IntervalSettings(seed=seed, resamples=120)
        found = evaluate_quality(records(mos, None), from_values("a", "x", x), settings)["correlations"]
        for number in (4, 5):
            entry = found[f"plcc_logistic{number}"]
            held[number] += entry["low"] <= truth[number] <= entry["high"]
    assert min(held.values()) >= (0.95 - 3 * math.sqrt(0.95 * 0.05 / sets)) * sets, (
        f"95 % intervals; three standard errors below: {held}"
    )


@pytest.mark.parametrize("world", ["fits-clustered30", "people-clustered", "shares-independent"])
def test_the_command_counts(
    world: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few sets of a world, and truths of smaller ones: each interval is counted, most hold the truth."""
    bench = Path(__file__).parents[2] / "benchmarks" / "evaluation" / "interval_coverage.py"
    module = runpy.run_path(str(bench))
    told = module["main"].__globals__
    monkeypatch.setitem(told, "LARGE", 1_200)
    monkeypatch.setitem(told, "TRUTHS", 2)
    words = ["x", "--worlds", world, "--sets", "12", "--first", "40", "--resamples", "100"]
    monkeypatch.setattr(sys, "argv", words)
    module["main"]()
    first, *rows = capsys.readouterr().out.strip().splitlines()
    assert first.startswith(f"{world}: {len(rows)} intervals, coverage")
    counted = [(float(row.split()[0]), int(row.split()[2])) for row in rows]
    assert {count for _, count in counted} == {12} and np.mean([share for share, _ in counted]) > 0.8, rows
