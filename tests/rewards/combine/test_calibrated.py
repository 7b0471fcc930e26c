# SPDX-License-Identifier: Apache-2.0
"""Scores as places among a reference: by hand, reversed, with deviations, in a sum; what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import norm

from tests.support.judges.brightness import Brightness, grey
from visalign.errors import UserError
from visalign.interfaces import Scores
from visalign.rewards import FunctionReward, RewardError, WeightedSum, check_reward, load_judge, load_reward
from visalign.rewards.combine.calibrated import Calibrated

REFERENCE = [0.2, 0.4, 0.4, 0.8]


def places(reward: Any, levels: list[float], **options: Any) -> list[float]:
    return Calibrated(reward, REFERENCE, **options).score(grey(levels), ["p"] * len(levels)).value.tolist()


def test_quantiles_by_hand():
    levels = [0.1, 0.25, 0.5, 0.9]
    assert places(Brightness(), levels, scale="quantile") == [0, 0.25, 0.75, 1]
    assert places(Brightness(), levels) == [0, 0.25, 0.75, 1], "without deviations both scales agree"
    turned = places(Brightness(higher_is_better=False), levels, scale="quantile")
    assert turned == [1, 0.75, 0.25, 0]
    tie = Calibrated(Brightness(), [0.0, 1.0, 1.0]).score(torch.ones(1, 3, 8, 8), ["p"]).value
    assert tie.tolist() == pytest.approx([2 / 3])


def test_probability_better_than_the_reference_by_hand():
    own = [0.1, 0.2, 0.1, 0.3]
    value = places(Brightness(std=0.2), [0.5], std=own)[0]
    expected = [norm.cdf((0.5 - r) / math.hypot(0.2, s)) for r, s in zip(REFERENCE, own, strict=True)]
    assert value == pytest.approx(sum(expected) / 4, abs=1e-3)  # 0.5 is rounded to 8 bits


def test_units_agree_and_may_be_added():
    images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    terms = {name: (Calibrated.on(load_reward(name), images, ["p"] * 8), 1.0) for name in ("sharpness", "jpeg_size")}
    total = WeightedSum(terms).score(images, ["p"] * 8)
    assert total.unit == "probability better than the reference" and total.valid.all()
    assert 0 <= float(total.value.min()) and float(total.value.max()) <= 2
    raw = terms["sharpness"][0].score(images, ["p"] * 8)
    order = raw.parts["raw"].argsort()
    assert (raw.value[order].diff() > 0).all() and float(raw.value.mean()) == pytest.approx(0.5)


def test_it_is_a_reward_like_any_other(tmp_path: Path):
    calibrated = Calibrated(load_reward("sharpness"), [10.0, 200.0, 9000.0], scale="quantile")
    check_reward(calibrated)
    calibrated.save(tmp_path / "r.json")
    terms, schedule = {"light": (Brightness(), 1.0)}, {"light": lambda iteration: 1.0 if iteration else 0.5}
    rising = Calibrated(WeightedSum(terms, schedules=schedule), REFERENCE)
    values = [rising.capabilities.at_iteration(n).score(grey([0.5]), ["p"]).value for n in (0, 1)]  # type: ignore[misc]
    assert torch.cat(values).tolist() == [0.25, 0.75], "as its reward, it changes with the iterations"
    again = load_judge("calibrated", reward="sharpness", reference=str(tmp_path / "r.json"), scale="quantile")
    assert isinstance(again, Calibrated) and again.name == "sharpness_quantile"
    assert again.identity is not None and calibrated.identity is not None
    assert again.identity.digest == calibrated.identity.digest
    assert Calibrated("jpeg_size", [1.0, 2.0], quality=50).reward.quality == 50  # type: ignore[attr-defined]


def test_failures_stay_failures():
    calibrated = Calibrated(Brightness(), REFERENCE)
    scores = calibrated.score(["none.png"], ["p"])
    assert not scores.valid[0] and scores.value.isnan().all() and "no such image" in str(scores.reason)
    endless: Any = Brightness()
    endless.score = lambda *_: Scores(value=torch.tensor([torch.inf]), valid=torch.tensor([True]), unit="level")
    assert not Calibrated(endless, REFERENCE).score(grey([0.5]), ["p"]).valid[0], "infinity was the best place"
    unsure = Calibrated(Brightness(std=math.nan), REFERENCE).score(grey([0.5]), ["p"])
    assert not unsure.valid[0] and "gave no standard deviation" in str((unsure.reason or [""])[0])


@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        ([0.5], {}, "1 reference scores"),
        ([0.5, math.nan], {}, "NaN, infinite or negative dev"),
        ([0.5, 0.6], {"std": [0.1]}, "2 reference scores and 1 deviations"),
        ([0.5, 0.6], {"scale": "z"}, "scale is 'z'; allowed are quantile, better"),
    ],
)
def test_refused(reference: Any, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Calibrated(Brightness(), reference, **options)
    with pytest.raises(RewardError, match=r"shape \(8,\) .* is not a batch of images"):
        Calibrated(Brightness(), REFERENCE).score([torch.zeros(8)], ["p"])


def test_an_unreadable_reference_is_named(tmp_path: Path):
    (tmp_path / "bad.json").write_text("[1, 2]")
    (tmp_path / "gaps.json").write_text('{"value": [1, 2], "std": [1, null]}')
    problems = {"bad.json": "holds a list, needed is an object", "none.json": "cannot be read"}
    for file, problem in (*problems.items(), ("gaps.json'", "needs lists of numbers, value and std")):
        with pytest.raises((UserError, RewardError), match=f"{file} {problem}"):
            Calibrated(Brightness(), tmp_path / file.strip("'"))


def points(*values: float) -> FunctionReward:
    """A judge of quality with these scores."""
    return FunctionReward(lambda images, prompts: list(values), name="points", range=(1, 5))


def test_corrected_by_hand_and_failures_are_no_scores() -> None:
    reward = FunctionReward(lambda images, prompts: [1.0, 0.5, 1, 0.2], name="r")
    corrected = load_reward("corrected", reward=reward, quality=points(4.5, 3, math.nan, 1))
    scores = corrected.score(torch.zeros(4, 3, 4, 4), ["a"] * 4)
    assert scores.value[[0, 1, 3]].tolist() == pytest.approx([1.7, 0.2, -0.2])
    assert scores.valid.tolist() == [True, True, False, True] and scores.parts["quality"][0] == 4.5


def test_corrected_takes_names_and_refuses_what_it_cannot_correct() -> None:
    corrected = load_reward("corrected", reward="shapes_verifier", quality=points(4), options={"mode": "mixed"})
    assert corrected.score(torch.zeros(1, 3, 64, 64), ["a red circle"]).parts.keys() == {"reward", "quality"}
    lower = FunctionReward(lambda images, prompts: [0.0], name="faults", higher_is_better=False)
    for reward, quality, part in (
        (lower, points(4), "reward is faults"),
        ("jpeg_size", "sharpness", "quality is sha"),
    ):
        with pytest.raises(RewardError, match=f"corrected: {part}.*; give a score .*, for quality points from 1 to 5"):
            load_reward("corrected", reward=reward, quality=quality)
    with pytest.raises(RewardError, match="reward is vendi_gain; give a score of single images"):
        load_reward("corrected", reward="vendi_gain", quality=points(4))
