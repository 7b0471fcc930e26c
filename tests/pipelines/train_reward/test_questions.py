# SPDX-License-Identifier: Apache-2.0
"""Judges trained from a folder without templates: the saved judge asks what was asked in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from visalign.config import load_config
from visalign.errors import UserError
from visalign.pipelines.train_reward.inputs import prepare_reward
from visalign.pipelines.train_reward.job import TrainRewardConfig, build_judge
from visalign.rewards import load_judge

NAMES = {
    "yes_no": "reward_dance",
    "pair": "reward_dance_pairs",
    "rating": "visual_quality_r1",
    "checklist": "vision_reward",
}


def _config(model: Path, kind: str) -> TrainRewardConfig:
    task = "yes_no" if kind == "pair" else kind
    given = [f"model.kind={kind}", f"model.path={model}", "model.train=lora", f"objective.task={task}"]
    sets = ["data.size=4", "data.heldout_size=4"]
    if kind == "rating":
        sets += ["data.train=shapes:quality", "data.heldout=shapes:quality"]
    return load_config(TrainRewardConfig, None, [*given, *sets, "model.save_dtype=float32"])


def test_adapters_that_find_no_layer_are_refused():
    overrides = ["model.kind=yes_no", "objective.task=yes_no", "model.lora.target_modules=[nothing]"]
    config = load_config(TrainRewardConfig, None, overrides)
    with pytest.raises(UserError, match=r"model\.lora cannot be added to 'shapes-vlm': .*target_modules, or"):
        build_judge(config, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["pair", "checklist"])
def test_our_own_questions_are_asked_alike_in_training_and_by_the_saved_judge(tmp_path, kind):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "judge.json").write_text(json.dumps({"base": "shapes-vlm"}))
    config = _config(tmp_path / "model", kind)
    judge: Any = build_judge(config, torch.device("cpu"))
    judge.train(False)
    examples = prepare_reward(config).heldout
    assert examples is not None
    rows = [examples[n] for n in range(4)]
    with torch.no_grad():
        said = judge(judge.encode(rows, heldout=True).inputs)["value"]
    judge.save(tmp_path / "judge")
    read: Any = load_judge(NAMES[kind], model=str(tmp_path / "judge"), min_mass=0.0)
    prompts = [row.prompt for row in rows]
    images = [[row.images[side] for row in rows] for side in range(len(rows[0].images))]
    if kind == "pair":
        found, said = read.compare(*images, prompts).log_odds, said[:4] - said[4:]
    else:
        found = torch.cat([read.score(side, prompts).value for side in images])
    assert said.std() > 1e-3
    torch.testing.assert_close(found, said, rtol=1e-4, atol=1e-5)
