# SPDX-License-Identifier: Apache-2.0
"""The table of units: conversions by hand, round trips, refusals, agreement with the judges themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from visalign.rewards import CATALOGUE, load_judge, load_reward
from visalign.rewards.scorers.units import DEVIATION_KINDS, DEVIATIONS, JUDGE_UNITS, SCALES, convert


@pytest.mark.parametrize(
    ("value", "source", "target", "expected"),
    [
        (0.28, "cosine", "cosine × 100", 28.0),
        (0.21, "cosine", "logit", 20.58),
        (20.58, "logit", "logit / 26", 20.58 / 26),
        (20.58, "logit", "(logit − 18) / 8", 0.3225),
        (0.3225, "(logit − 18) / 8", "cosine", 0.21),
        (0.5, "logit / 26", "(logit − 18) / 8", -0.625),
        (0.16717362830052426, "image_reward raw", "image_reward", 0.0),
        (1.0, "image_reward", "image_reward raw", 1.2005131249059315),
        (5.5, "rating", "rating / 10", 0.55),
        (3.0, "softmax", "softmax", 3.0),
    ],
)
def test_by_hand(value, source, target, expected):
    assert convert(value, source, target, logit_scale=98.0) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    tensor = convert(torch.tensor([value], dtype=torch.float64), source, target, logit_scale=98.0)
    assert tensor.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_round_trips():
    affine = [name for name, scale in SCALES.items() if not scale.refusal]
    for source in affine:
        for target in affine:
            if SCALES[source].family == SCALES[target].family:
                there = convert(1.7, source, target, logit_scale=93.0)
                assert convert(there, target, source, logit_scale=93.0) == pytest.approx(1.7)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (
            "cosine",
            "softmax",
            "'softmax' is not affine: a softmax over a group depends on the other images",
        ),
        ("sigmoid(hp)", "hp", r"'sigmoid\(hp\)' is not affine: .*use IctHp\(mode='upstream'\)"),
        ("torchmetrics", "cosine", "loses all negative cosines"),
        ("cosine", "rating", "measure different things.*'cosine' can be converted to cosine, cosine × 100"),
        ("cosin", "cosine", "There is no scale 'cosin'; allowed are cosine, cosine × 100"),
        ("cosine", "logit", r"'logit' needs logit_scale.*given: None"),
    ],
)
def test_refusals(source, target, message):
    with pytest.raises(ValueError, match=message):
        convert(0.2, source, target)


def test_logit_scale_must_be_positive():
    with pytest.raises(ValueError, match="given: -4"):
        convert(0.2, "cosine", "logit", logit_scale=-4.0)


def test_the_table_says_what_the_judges_say():
    for name, row in JUDGE_UNITS.items():
        assert name in CATALOGUE and row.scale in SCALES
        judge = load_reward(name)
        assert (judge.unit, judge.range) == (row.unit, row.range), name


def test_every_judge_stands_in_the_table_of_deviations():
    assert set(DEVIATIONS) == set(CATALOGUE) | {"ensemble"}
    assert {row.kind for row in DEVIATIONS.values()} == set(DEVIATION_KINDS)
    assert all(row.formula for row in DEVIATIONS.values() if row.kind != "none")


SINGLE = (
    *("clip_score", "ict", "hp", "ict_hp", "hpsv3", "visual_quality_r1", "reward_dance", "pick_score"),
    *("hps_v2", "reward_dance_pairs", "vision_reward", "jpeg_size", "sharpness", "brightness"),
)


@pytest.mark.parametrize("name", SINGLE)
def test_judges_give_a_deviation_where_the_table_says_so(name):
    options = {"model": "shapes-clip"} if name in ("pick_score", "hps_v2") else {}
    judge: Any = load_judge(name, **options)
    images = torch.linspace(0.1, 0.9, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
    prompts = ["a red circle"] * 2
    scores = (
        judge.compare(images, images.flip(0), prompts)
        if name.endswith("pairs")
        else judge.score(images, prompts)
    )
    assert (scores.std is None) == (DEVIATIONS[name].kind == "none")
