# SPDX-License-Identifier: Apache-2.0
"""VideoAlign: the published words, layouts and frames, failures; test_official has its values."""

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.judges.official import PIXELS
from tests.support.judges.published_vlm import RATE, films, video_align
from tests.support.models.vision_language import save_tiny_seeing_model
from visalign.rewards import RewardError, load_judge
from visalign.rewards.hpsv3.video_align import PARTS, TEMPLATE, VideoAlign, merge_lora, sample_frames


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("video_align")
    video_align(directory)
    return directory


@cache
def judge(folder: Path, model: str = "VideoReward", **options) -> VideoAlign:
    options = {"base": folder / "base", "clip_fps": RATE, "min_pixels": PIXELS["min_pixels"], **options}
    reward = load_judge("video_align", model=str(folder / model), **options)
    assert isinstance(reward, VideoAlign)
    return reward


def test_the_published_words() -> None:
    text = TEMPLATE.messages[0]["content"][1]["text"]
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "fd7862ecb43b"
    assert [text.count(f"<|{part}_reward|>") for part in PARTS] == [1, 1, 1]


def test_frames_are_even_from_the_first_to_the_last() -> None:
    assert sample_frames(10, clip_fps=5, fps=2) == [0, 3, 6, 9]
    assert sample_frames(3, clip_fps=8, fps=2) == [0, 2], "of three frames there is one pair"
    assert sample_frames(9, clip_fps=8, fps=2, frames=5) == [0, 3, 5, 8], "halves of pairs round to even"
    assert sample_frames(5, clip_fps=None, fps=2, frames=8) == [0, 1, 3, 4]
    assert len(sample_frames(10_000, clip_fps=1, fps=2)) == 768
    assert sample_frames(1, clip_fps=8, fps=2) == "a clip of 1 frame shows no motion; 2 frames are needed"
    assert 'give clip_fps, an "fps" in its record' in str(sample_frames(9, clip_fps=None, fps=2))


def test_parts_add_up_in_deviations_and_clips_are_independent(folder) -> None:
    clips, prompts = films(), ["a cat", "a red dog", "a cat", "b"]
    scores = judge(folder).score(clips, prompts)
    assert scores.valid.all() and scores.unit == "standard deviations"
    assert torch.equal(scores.value, scores.parts["VQ"] + scores.parts["MQ"] + scores.parts["TA"])
    assert scores.parts["frames"].tolist() == [4, 4, 8, 10]
    single = judge(folder).score(clips[1:2], prompts[1:2]).value
    torch.testing.assert_close(single, scores.value[1:2], rtol=1e-4, atol=1e-4)
    backwards = judge(folder).score([clips[1][::-1].copy()], prompts[1:2]).value
    assert (backwards - single).abs() > 1e-4, "the order of frames is seen"


def test_every_form_of_a_clip_and_its_frame_rate(folder, tmp_path) -> None:
    clip = films()[2]
    for at, frame in enumerate(clip):
        Image.fromarray(frame).save(tmp_path / f"{at:02}.png")
    forms = [clip, torch.tensor(clip).permute(0, 3, 1, 2) / 255, sorted(tmp_path.glob("*.png"))]
    values = judge(folder).score(forms, ["a"] * 3).value
    assert values.tolist() == pytest.approx([float(values[0])] * 3, abs=1e-6)
    scores = judge(folder, clip_fps=None).score([clip] * 2, ["a"] * 2, [{"fps": 8}, {"fps": RATE}])
    assert scores.parts["frames"].tolist() == [4, 8] and scores.value[1] == pytest.approx(float(values[0]), abs=1e-5)
    assert judge(folder, frames=6).score([clip], ["a"], [{"fps": None}]).parts["frames"].item() == 6
    assert judge(folder).score([clip], ["a"], [{"fps": None}]).valid.all(), "an empty cell is no rate"
    assert judge(folder, fps=1).identity != judge(folder).identity


def test_clips_that_cannot_be_judged_have_a_reason(folder) -> None:
    clip = films()[0]
    broken = [*(Image.fromarray(frame) for frame in clip[:4]), folder / "none.png"]
    long = np.zeros((4, 1, 300, 3), dtype=np.uint8)
    clips = [clip, clip[:1], broken, clip, clip, long]
    records = [None, None, None, {"fps": "fast"}, None, None]
    scores = judge(folder).score(clips, ["a", "a", "a", "a", " ", "a"], records)
    assert scores.valid.tolist() == [True] + [False] * 5 and torch.isnan(scores.parts["VQ"][1:]).all()
    for reason, expected in zip(
        (scores.reason or [])[1:],
        ("clip of 1 frame", "frame 4: no such image", '"fps" of its record is', "the prompt is empty", "200 times"),
        strict=True,
    ):
        assert expected in str(reason)
    unknown = judge(folder, clip_fps=None).score([clip], ["a"])
    assert not unknown.valid.any() and "frames a second are not known" in str(unknown.reason)
    typed = judge(folder).score([clip], ["a <|VQ_reward|> <|MQ_reward|> {x}"])
    assert typed.valid.all(), typed.reason
    with pytest.raises(ValueError, match="1 clips and 2 prompts; give one each"):
        judge(folder).score([clip], ["a", "b"])
    with pytest.raises(ValueError, match="clip_fps is 0; allowed are numbers above 0"):
        judge(folder, clip_fps=0)
    with pytest.raises(ValueError, match="give fps or frames, not both"):
        judge(folder, fps=1, frames=4)


def test_parts_of_the_published_folder_are_read_alike(folder) -> None:
    expected = judge(folder).score(films()[:1], ["a cat"]).value
    for model in ("VideoReward/checkpoint-20", "VideoReward/checkpoint-20/model.pth"):
        assert torch.equal(judge(folder, model).score(films()[:1], ["a cat"]).value, expected)


def test_halves_of_a_lora_are_refused() -> None:
    w, a, b = torch.zeros(3, 2), torch.ones(1, 2), torch.ones(3, 1)
    names = [f"base_model.model.q.{part}.weight" for part in ("base_layer", "lora_A.default", "lora_B.default")]
    merged = merge_lora(dict(zip(names, (w, a, b), strict=True)), 2.0, torch.float32)
    assert list(merged) == ["q.weight"] and torch.equal(merged["q.weight"], torch.full((3, 2), 2.0))
    with pytest.raises(RewardError, match=r"q\.lora_B\.weight does not fit"):
        merge_lora({names[0]: w, names[2]: b}, 2.0, torch.float32)
    with pytest.raises(RewardError, match=r"q\.lora_A\.weight lacks its other half"):
        merge_lora({names[0]: w, names[1]: a}, 2.0, torch.float32)


def test_other_checkpoints_are_refused_by_name(folder, tmp_path) -> None:
    shutil.copytree(folder / "VideoReward", tmp_path / "VideoReward")
    file = tmp_path / "VideoReward" / "model_config.json"
    config = json.loads(file.read_text())

    def refused(kind: type[Exception], match: str) -> None:
        with pytest.raises(kind, match=match):
            judge(tmp_path, base=folder / "base").score(films()[:1], ["a"])

    config["data_config"]["prompt_template_type"] = "simple"
    file.write_text(json.dumps(config))
    refused(RewardError, "says prompt_template_type = 'simple'; allowed is 'detailed_special'")
    file.write_text("{}")
    refused(RewardError, r"is no config of VideoAlign \(KeyError: 'data_config'\)")
    file.unlink()
    refused(FileNotFoundError, r"holds model_config\.json; give the folder as it was published")
    other = save_tiny_seeing_model(tmp_path / "other", "qwen2_5_vl")
    with pytest.raises(RewardError, match="The weights of the file do not fit the model"):
        judge(folder, base=other).score(films()[:1], ["a"])
