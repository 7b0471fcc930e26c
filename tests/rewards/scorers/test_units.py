# SPDX-License-Identifier: Apache-2.0
"""The table of units: conversions by hand, round trips, refusals, agreement with the judges themselves."""

from __future__ import annotations

import pytest
import torch

from visalign.rewards.scorers.units import convert


@pytest.mark.parametrize(
    ("value", "source", "target", "expected"),
    [
        (0.21, "cosine", "logit", 20.58),
        (20.58, "logit", "logit / 26", 20.58 / 26),
        (20.58, "logit", "(logit − 18) / 8", 0.3225),
        (0.5, "logit / 26", "(logit − 18) / 8", -0.625),
        (0.16717362830052426, "image_reward raw", "image_reward", 0.0),
        (1.0, "image_reward", "image_reward raw", 1.2005131249059315),
        (5.5, "rating", "rating / 10", 0.55),
    ],
)
def test_by_hand(value, source, target, expected):
    assert convert(value, source, target, logit_scale=98.0) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    tensor = convert(torch.tensor([value], dtype=torch.float64), source, target, logit_scale=98.0)
    assert tensor.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("cosine", "softmax", "'softmax' is not affine: a softmax over a group depends on the other images"),
        ("sigmoid(hp)", "hp", r"'sigmoid\(hp\)' is not affine: .*use IctHp\(mode='upstream'\)"),
        ("torchmetrics", "cosine", "loses all negative cosines"),
        ("cosine", "rating", "measure different things, so no affine"),
        ("cosin", "cosine", "There is no scale 'cosin'; allowed are cosine, cosine × 100"),
        ("cosine", "logit", r"'logit' needs logit_scale.*given: None"),
    ],
)
def test_refusals(source, target, message):
    with pytest.raises(ValueError, match=message):
        convert(0.2, source, target)
