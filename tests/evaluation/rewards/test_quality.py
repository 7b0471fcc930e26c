# SPDX-License-Identifier: Apache-2.0
"""Quality sets whose images share prompts or references: what is drawn together, and what is left within."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from visalign.data.sets.records import QualityRecord, QualitySet
from visalign.errors import UserError
from visalign.evaluation.rewards.comparison import add_holm, compare_on_quality, leaderboard
from visalign.evaluation.rewards.fusion import fuse_quality
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.rewards.quality import evaluate_quality, from_values

FAST = IntervalSettings(resamples=200)


def quality(mos: Any, prompts: Any = None, references: Any = None) -> QualitySet:
    return QualitySet(
        name="q",
        records=tuple(
            QualityRecord(
                image=f"{k}.png",
                mos=float(value),
                prompt="" if prompts is None else str(prompts[k]),
                reference=None if references is None else str(references[k]),
            )
            for k, value in enumerate(mos)
        ),
    )


@pytest.mark.parametrize(
    ("prompts", "references", "groups"),
    [
        (None, None, (0, 1, 2, 3)),
        ("aabb", None, (0, 0, 1, 1)),
        (None, "abab", (0, 1, 0, 1)),
        ("aaaa", None, (0, 1, 2, 3)),  # a prompt that all share splits nothing
        ("aaaa", "xxyy", (0, 0, 1, 1)),
        ("abbc", "xxyz", (0, 0, 0, 1)),  # b joins x and y
        ("aabb", "xyxy", (0, 0, 1, 1)),  # each with each: one of the two
        ("abcabc", "xxxyyy", (0, 0, 0, 1, 1, 1)),  # each with each: the fewer
    ],
)
def test_what_is_drawn_together(prompts: str | None, references: str | None, groups: tuple[int, ...]) -> None:
    assert quality(range(len(groups)), prompts, references).groups == groups


def clustered(seed: int, prompts: int = 40, per_prompt: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Score and opinion agree about the prompts, and differ within them."""
    rng = np.random.default_rng(seed)
    easy, inside = np.repeat(rng.normal(size=prompts), per_prompt), rng.normal(size=prompts * per_prompt)
    return easy + 0.4 * inside, easy - 0.4 * inside, np.repeat(np.arange(prompts), per_prompt)


def test_within_prompts_a_judge_can_be_the_opposite_of_itself() -> None:
    x, mos, prompt = clustered(0)
    records = quality(mos, prompt)
    evaluation = evaluate_quality(records, from_values("j", "x", x), FAST)
    assert evaluation["counts"]["clusters"] == 40
    overall, within = evaluation["correlations"]["srcc"], evaluation["correlations"]["srcc_within"]
    assert overall["estimate"] == pytest.approx(stats.spearmanr(x, mos)[0]) and overall["low"] > 0.2
    assert within["estimate"] == pytest.approx(-1.0)
    assert "srcc_within" not in evaluate_quality(quality(mos), from_values("j", "x", x), FAST)["correlations"]


def test_a_fusion_and_a_leaderboard_keep_the_images_of_a_prompt_together() -> None:
    x, mos, prompt = clustered(3, 40, 4)
    other = mos + np.random.default_rng(4).normal(size=160)
    judges = [from_values("a", "x", x), from_values("b", "x", other)]
    wide, narrow = quality(mos, prompt), quality(mos)
    fused, record = fuse_quality(wide, judges)
    assert np.isfinite(fused.value).all() and set(record["weights"]) == {"a", "b"}
    fused_narrow, _ = fuse_quality(narrow, judges)
    assert not np.allclose(fused.value, fused_narrow.value), "other folds"
    spans = []
    for records in (wide, narrow):
        comparison = compare_on_quality(records, judges[0], judges[1], FAST)
        add_holm([comparison], level=0.95)
        board = leaderboard(records, judges, [comparison], FAST)
        assert board is not None
        spans.append(sum(row["high"] - row["low"] for row in board["rows"]))
    assert spans[0] > 1.15 * spans[1]


def test_judges_that_share_nothing_or_say_one_value_are_no_crash() -> None:
    """After all images were judged, an impossible comparison is left out, with the reason."""
    x, mos, prompt = clustered(3, 40, 4)
    records, half = quality(mos, prompt), np.arange(160) < 80
    first = from_values("a", "x", np.where(half, x, np.nan))
    second = from_values("b", "x", np.where(half, np.nan, x))
    with pytest.raises(ValueError, match="at least 2 samples with both values"):
        compare_on_quality(records, first, second, FAST)
    flat = from_values("flat", "x", np.ones(160))
    assert leaderboard(records, [first, flat], [], FAST) is None
    silent = from_values("silent", "x", np.full(160, np.nan))
    with pytest.raises(UserError, match=r"there are 2 rewards \(silent without a score\)"):
        fuse_quality(records, [first, silent])


def test_a_perfect_fit_says_nothing_of_its_error() -> None:
    x = np.arange(12.0)
    report = evaluate_quality(quality(x), from_values("a", "x", x), IntervalSettings(resamples=100))
    for name in ("srcc", "plcc_logistic5"):
        interval = report["correlations"][name]
        assert interval["estimate"] == pytest.approx(1) and interval["low"] is None and interval["high"] is None
