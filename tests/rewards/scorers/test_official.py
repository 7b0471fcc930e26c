# SPDX-License-Identifier: Apache-2.0
"""Our judges against the published recipes on random checkpoints: equal within 1e-5."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.judges.official import COLUMNS, FROZEN, JUDGES, inputs_of

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", JUDGES)
def test_scores_are_the_official_ones(name, tmp_path):
    judge, official = JUDGES[name](tmp_path)
    document = json.loads(FROZEN.read_text())
    frozen = torch.tensor(document[name], dtype=torch.float64)
    assert document["sources"][name], "whose code gave the numbers"
    result = judge.score(*inputs_of(name))
    assert result.valid.all(), result.reason
    ours = result.value
    if name in COLUMNS:
        columns = {**result.parts, "value": ours} | ({} if result.std is None else {"log_std": result.std.log()})
        ours = torch.stack([columns[column] for column in COLUMNS[name]], 1)
    with torch.no_grad():
        now = official().double()
    scale = frozen.abs().clamp(min=1.0)
    assert ((now - frozen).abs() / scale).max() <= TOLERANCE, "the recipe itself gives what was frozen"
    assert ((ours.double() - frozen).abs() / scale).max() <= TOLERANCE
    assert frozen.std(0).min() > 1e-3, "the images are told apart"
