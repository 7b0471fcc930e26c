# SPDX-License-Identifier: Apache-2.0
"""Judges of images on clips: means of even frames by hand, in any form, in sums; what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.judges.brightness import Brightness, grey
from visalign.rewards import Frames, RewardError, WeightedSum, check_reward, load_reward
from visalign.rewards.cache.reward import CachedReward
from visalign.rewards.cache.store import ScoreCache

LEVELS = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]


def test_the_mean_of_evenly_spaced_frames_by_hand():
    clips = [grey(LEVELS), grey([0.5]), grey(LEVELS[:3])]
    for frames, expected in {
        1: [0.6, 0.5, 0.2],
        2: [0.5, 0.5, 0.2],  # frames 1 and 4 of six; 0 and 2 of three
        3: [0.6, 0.5, 0.2],  # 1, 3, 5
        9: [0.5, 0.5, 0.2],
    }.items():
        scores = Frames(Brightness(), frames).score(clips, ["p"] * 3)
        assert scores.value.tolist() == pytest.approx(expected, abs=2e-3), frames
        assert scores.parts["frames"].tolist() == [min(frames, 6), 1, min(frames, 3)]
    ends = Frames(Brightness(), 2).score(clips, ["p"] * 3).parts
    assert ends["lowest"].tolist() == pytest.approx([0.2, 0.5, 0.0], abs=2e-3)
    assert ends["highest"].tolist() == pytest.approx([0.8, 0.5, 0.4], abs=2e-3)


def test_every_form_of_a_clip_scores_alike(tmp_path: Path):
    pixels = torch.randint(0, 256, (5, 9, 12, 3), generator=torch.Generator().manual_seed(0)).byte()
    pil = [Image.fromarray(frame.numpy()) for frame in pixels]
    for at, frame in enumerate(pil):
        frame.save(tmp_path / f"{at}.png")
    paths = [tmp_path / f"{at}.png" for at in range(5)]
    floats = pixels.permute(0, 3, 1, 2).float() / 255
    clips = [pixels, pixels.numpy(), pil, tuple(paths), floats, floats.numpy()]
    judge = load_reward("frames", reward="sharpness", frames=3)
    value = judge.score(clips, ["p"] * len(clips)).value
    single = load_reward("sharpness").score(floats[[0, 2, 4]], ["p"] * 3).value.mean()
    assert value.tolist() == pytest.approx([float(single)] * len(clips), rel=1e-6)
    assert torch.equal(judge.score(floats[None], ["p"]).value, value[:1])
    assert judge.unit == load_reward("sharpness").unit and judge.name == "sharpness_frames"


def test_an_image_is_a_clip_of_one_frame_and_the_contract_holds():
    check_reward(Frames("sharpness"))
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    own = load_reward("sharpness").score(images, ["p"] * 3).value
    assert torch.equal(Frames("sharpness").score(images, ["p"] * 3).value, own)
    terms, schedule = {"light": (Brightness(), 1.0)}, {"light": lambda iteration: 1.0 if iteration else 0.5}
    rising = Frames(WeightedSum(terms, schedules=schedule))
    values = [rising.capabilities.at_iteration(n).score(images, ["p"] * 3).value for n in (0, 1)]  # type: ignore[misc]
    torch.testing.assert_close(values[1], 2 * values[0])


def test_an_animation_is_a_clip_and_is_left_as_it_was(tmp_path: Path):
    shades = [Image.new("RGB", (6, 4), (round(255 * level),) * 3) for level in LEVELS]
    shades[0].save(tmp_path / "a.gif", save_all=True, append_images=shades[1:])
    judge = Frames(Brightness(), 2)
    expected = judge.score([shades], ["p"]).value
    with Image.open(tmp_path / "a.gif") as opened:
        opened.seek(3)
        scores = judge.score([tmp_path / "a.gif", opened], ["p"] * 2)
        assert opened.tell() == 3
    assert scores.value.tolist() == pytest.approx([float(expected)] * 2, abs=1e-6)
    cached = CachedReward(Frames("sharpness", 2), ScoreCache(tmp_path / "cache"))
    for last in (0, 255):  # the same first frame, another clip
        shades[-2].putpixel((2, 2), (last, 0, 0))
        shades[0].save(tmp_path / "b.gif", save_all=True, append_images=shades[1:])
        with Image.open(tmp_path / "b.gif") as opened:
            scored = cached.score([opened], ["p"]).value
        assert torch.equal(scored, cached.score([tmp_path / "b.gif"], ["p"]).value)


def test_frames_that_cannot_be_judged_cost_their_clip_alone(tmp_path: Path):
    clips = [grey([0.1, 0.3]), [tmp_path / "none.png", Image.new("RGB", (4, 4))], grey([0.5])]
    scores = Frames(Brightness(), 2).score(clips, ["p"] * 3)
    assert scores.valid.tolist() == [True, False, True] and scores.reason is not None
    assert scores.reason[1] is not None and scores.reason[1].startswith("frame 0: no such image file")
    assert scores.parts["lowest"].isnan().tolist() == [False, True, False]
    small, large = Image.new("RGB", (4, 6)), Image.new("RGB", (5, 6))
    odd = Frames(Brightness()).score([[], torch.zeros(0, 3, 8, 8), [small, large], [small]], ["p"] * 4)
    assert odd.valid.tolist() == [False, False, False, True] and odd.reason is not None
    assert odd.reason[:2] == ["a clip of 0 frames; give at least one image"] * 2
    assert "frames of the sizes 6×4, 6×5; the frames of a clip" in str(odd.reason[2])
    flaky = load_reward(f"{__file__}:dark_fails", unit="1")
    partly = Frames(flaky, 2).score([grey([0.9, 0.1]), grey([0.9])], ["p"] * 2)
    assert partly.valid.tolist() == [False, True] and partly.reason is not None
    assert partly.reason[0] is not None and partly.reason[0].startswith("frame 2 of the 2 judged: dark_fails")


def dark_fails(images: torch.Tensor) -> list[float | None]:
    return [None if float(image.mean()) < 0.5 else 1.0 for image in images]


def test_clips_in_sums_and_caches(tmp_path: Path):
    clips = grey(LEVELS)[None].repeat(2, 1, 1, 1, 1)
    terms = {"three": (Frames(Brightness(), 3), 1.0), "two": (Frames(Brightness(), 2), 2.0)}
    total = WeightedSum(terms).score(clips, ["p"] * 2)
    assert total.value.tolist() == pytest.approx([1.6, 1.6], abs=5e-3) and "two.frames" in total.parts
    with pytest.raises(ValueError, match=r"clips and of images: bare takes no clip\. Let the reward 'frames'"):
        WeightedSum({**terms, "bare": (Brightness(), 1.0)})
    cached = CachedReward(Frames("sharpness", 2), ScoreCache(tmp_path / "cache"))
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    values = []
    for level in (40, 200):  # the same names, other pixels
        for at, path in enumerate(paths):
            Image.effect_noise((8, 8), level * (at + 1)).save(path)
        values.append(float(cached.score([paths], ["p"]).value))
    assert cached.capabilities.takes_clips and values[0] != values[1]


@pytest.mark.parametrize(
    ("clips", "error", "message"),
    [
        ([torch.zeros(2, 3, 8, 8)] * 2, ValueError, "2 clips and 1 prompts; give one each"),
        (Image.new("RGB", (4, 4)), TypeError, "images is a Image; give a list of clips"),
        (torch.zeros(3, 8, 8), ValueError, r"shape \(3, 8, 8\); give \[B, F, 3, H, W\]"),
        ([np.zeros((2, 8, 8, 3))], ValueError, "the 3 channels where they belong"),
    ],
)
def test_refused_clips(clips, error, message):
    with pytest.raises(error, match=message):
        Frames(Brightness()).score(clips, ["p"])


@pytest.mark.parametrize("clips", [[[Image.new("RGB", (4, 4))]], [grey([0.5])], grey([0.5])[None]])
def test_a_judge_of_images_says_what_judges_clips(clips):
    with pytest.raises((TypeError, ValueError), match=r"Clips of frames are for load_judge\('frames', reward="):
        load_reward("sharpness").score(clips, ["p"])


def test_refused_settings():
    with pytest.raises(ValueError, match="frames is 0; allowed are whole numbers from 1"):
        Frames(Brightness(), 0)
    with pytest.raises(RewardError, match="compares the images of a group"):
        Frames("vendi_gain")
