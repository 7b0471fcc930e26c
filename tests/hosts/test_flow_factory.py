# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Inside Flow-Factory: its own loader makes the judge, and its own call gets the judge's numbers."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from flow_factory.hparams import RewardArguments
from flow_factory.rewards.loader import load_reward_model
from PIL import Image

from visalign.integrations.judges import image_scores
from visalign.rewards.base.contract import RewardError
from visalign.rewards.catalogue import load_reward

PATH = "visalign.integrations.flow_factory.JudgeReward"


def loaded(**options: object) -> object:
    """What Flow-Factory makes of a rewards entry."""
    entry = {"name": "own", "reward_model": PATH, "device": "cpu", **options}
    return load_reward_model(RewardArguments.from_dict(entry), Accelerator(cpu=True))


def test_its_loader_and_its_call() -> None:
    images = [Image.new("RGB", (32, 32), (40 * i, 0, 90)) for i in range(3)]
    model = loaded(judge="jpeg_size", quality=80)
    output = model(prompt=["a"] * 3, image=images)  # type: ignore[operator]
    expected = image_scores(load_reward("jpeg_size", quality=80), images, ["a"] * 3)
    assert output.rewards.tolist() == torch.tensor(expected).tolist()


def failing(images: list, prompts: list, metadata: list) -> list[None]:
    """A judge that fails."""
    return [None] * len(images)


def test_a_failure_stops_with_its_reason() -> None:
    model = loaded(judge=f"{__file__}:failing")
    with pytest.raises(RewardError, match=r"could not judge 1 of 1 samples.*returned None: not for"):
        model(prompt=["a"], image=[Image.new("RGB", (8, 8))])  # type: ignore[operator]
    with pytest.raises(ValueError, match="needs judge: NAME"):
        loaded()
