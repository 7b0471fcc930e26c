# SPDX-License-Identifier: Apache-2.0
"""Coverage on few sets; tests/benchmarks/evaluation/interval_coverage.py has all that is printed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from visalign.data.sets.records import QualityRecord, QualitySet
from visalign.evaluation.rewards.comparison import compare_on_quality
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.rewards.quality import evaluate_quality, from_values


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


def test_a_perfect_fit_says_nothing_of_its_error() -> None:
    x = np.arange(12.0)
    report = evaluate_quality(records(x, None), from_values("a", "x", x), IntervalSettings(resamples=100))
    for name in ("srcc", "plcc_logistic5"):
        found = report["correlations"][name]
        assert found["estimate"] == pytest.approx(1) and found["low"] is None and found["high"] is None
