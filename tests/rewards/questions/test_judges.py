# SPDX-License-Identifier: Apache-2.0
"""The small judges (verifier, JPEG size, sharpness), the request that all share, and `check_reward`."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.judges.brightness import Brightness
from visalign.interfaces import Scores
from visalign.rewards import RewardError, check_reward, failure_reasons, load_reward, make_scores
from visalign.rewards.statistics import JpegSize, laplacian_variance
from visalign.rewards.verifiers.shapes_verifier import ShapesVerifier

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 40, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", ["shapes_verifier", "jpeg_size", "sharpness"])
def test_every_entry_of_the_catalogue_keeps_the_contract(name):
    assert len(check_reward(name)) == 11


def test_verifier_with_parsed_prompt_and_with_metadata(monkeypatch):
    from visalign.data.shapes import verifier

    records = []

    def verify(images, metadata):
        records.extend(metadata)
        return [
            verifier.Verdict(correct=i % 2 == 0, score=0.25 * (i + 1), checks={}, reason=f"reason {i}")
            for i in range(len(images))
        ]

    monkeypatch.setattr(verifier, "verify", verify)
    record = {"include": [{"class": "square", "count": 1}]}
    images, prompts = torch.rand(3, 3, 64, 64), ["a red circle", "anything", "an ode to joy"]
    scores = ShapesVerifier().score(images, prompts, [None, record, {"tag": "no include"}])
    assert scores.value[:2].tolist() == [1, 0] and scores.valid.tolist() == [True, True, False]
    assert scores.parts["partial"][:2].tolist() == [0.25, 0.5] and scores.text == ["reason 0", "reason 1", ""]
    assert "no metadata with 'include', and the prompt is not of the shapes world" in str(failure_reasons(scores)[2])
    assert records[0]["include"][0]["class"] == "circle" and records[1] is record
    partial = ShapesVerifier("partial").score(images[:2], prompts[:2], [None, record])
    assert partial.value.tolist() == [0.25, 0.5] and partial.unit == "share of checks"


def test_verifier_judges_a_rendered_scene():
    from visalign.data.shapes.prompts import parse_prompt
    from visalign.data.shapes.render import render
    from visalign.data.shapes.scenes import sample_scene

    image = render(sample_scene(parse_prompt("a red circle"), np.random.default_rng(0), style="flat"))
    scores = ShapesVerifier().score([image, image], ["a red circle", "a blue square"])
    assert scores.value.tolist() == [1, 0] and scores.parts["partial"][1] < 1


def test_verifier_other_size_is_invalid():
    scores = ShapesVerifier().score([torch.rand(3, 64, 48)], ["a red circle"])
    assert scores.reason == ["the shapes verifier reads 64×64 images, this one has 48×64"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"include": [{"count": 1}]}, "KeyError: 'class'"),
        ({"include": "circle"}, "include is 'circle'; needed is GenEval's layout"),
        ({"include": [{"class": "circle"}], "exclude": [{"class": "circle"}]}, "KeyError: 'count'"),
    ],
)
def test_a_record_that_cannot_be_read_costs_its_own_sample_only(record, reason):
    good = {"include": [{"class": "square", "count": 1}]}
    scores = ShapesVerifier().score(torch.zeros(2, 3, 64, 64), ["x", "x"], [record, good])
    assert scores.valid.tolist() == [False, True]
    assert re.search(reason, str(failure_reasons(scores)[0]))


def test_verifier_mode_refused():
    with pytest.raises(ValueError, match="mode is 'strict'; allowed are correct, partial, mixed"):
        load_reward("shapes_verifier", mode="strict")


def test_jpeg_size_is_the_file_size():
    buffer = io.BytesIO()
    NOISE.save(buffer, format="JPEG", quality=95)
    scores = JpegSize().score([NOISE], ["p"])
    assert scores.value.item() == pytest.approx(len(buffer.getvalue()) / 1000) and scores.unit == "kB"
    assert JpegSize(quality=20).score([NOISE], ["p"]).value < scores.value


def test_an_image_that_jpeg_cannot_hold_is_invalid_alone():
    scores = JpegSize().score([torch.zeros(3, 1, 70_000), torch.zeros(3, 8, 8)], ["p"] * 2)
    assert scores.valid.tolist() == [False, True] and scores.value[1] > 0
    assert "jpeg_size cannot measure an image of 70000×1 pixels: " in str(failure_reasons(scores)[0])


def test_sharpness_by_hand():
    image = torch.zeros(3, 3, 4)
    image[:, 1, 1] = 1  # its Laplacian is −4·255 there and 255 at its neighbour: variance (2.5·255)²
    assert laplacian_variance(image).item() == pytest.approx((2.5 * 255) ** 2)
    assert laplacian_variance(torch.full((3, 5, 5), 0.7)).item() == pytest.approx(0, abs=1e-9)


def broken(**changes):
    return type("Broken", (Brightness,), changes)()


def batchwise(make):
    """A reward whose scores `make` computes from the float tensor of a batch that is all readable."""
    return broken(score=lambda self, images, prompts, metadata=None: make(images))


def valid(value: torch.Tensor, **options) -> Scores:
    return Scores(value=value, valid=torch.ones(len(value), dtype=torch.bool), **{"unit": "brightness", **options})


def mean(images) -> torch.Tensor:
    return torch.as_tensor(images).float().flatten(1).mean(1)


class Restless(Brightness):
    def score(self, images, prompts, metadata=None):
        scores = super().score(images, prompts, metadata)
        return make_scores(scores.value * 0 + min(1.0, self.seen / 100), scores.reason or [], self.unit)


def vandal(self, images, prompts, metadata=None):
    scores = Brightness.score(self, images, prompts, metadata)
    prompts[0] = "changed"
    return scores


def careless(self, images, prompts, metadata=None):
    return Brightness.score(self, images, [*prompts, *["p"] * (len(images) - len(prompts))], metadata)


def nan_failure(images):
    value = mean(images)
    return Scores(value=value, valid=value < 0.5, unit="brightness")


class Zeroing(Brightness):
    def score(self, images, prompts, metadata=None):
        scores = super().score(images, prompts, metadata)
        return scores if scores.valid.all() else valid(scores.value * 0)


PLAIN = batchwise(lambda x: valid(mean(x)))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (broken(range=(1.0, 0.0)), r"range is \(1.0, 0.0\): make it a pair"),
        (object(), "it has no unit: set it on the class"),
        (broken(score=lambda self, images: None), "raised TypeError"),
        (batchwise(lambda x: [0.0]), "returned a list: return visalign.interfaces.Scores"),
        (batchwise(lambda x: valid(mean(x).double())), "value has dtype torch.float64: make it"),
        (batchwise(lambda x: valid(mean(x), unit="kB")), "Scores.unit is 'kB', the reward declares 'bri"),
        (batchwise(lambda x: valid(mean(x).requires_grad_())), "carries a gradient graph"),
        (batchwise(lambda x: valid(mean(x) * torch.nan)), "a valid score is NaN or infinite"),
        (batchwise(nan_failure), "an invalid sample has a number as its value"),
        (
            batchwise(lambda x: make_scores(mean(x), ["no idea"] * len(x), "brightness")),
            r"judged none of the images \(no idea\): give check_reward images=",
        ),
        (broken(range=(0.0, 0.01)), "outside the declared range"),
        (Restless(), "same images got other scores the second time"),
        (batchwise(lambda x: valid(torch.linspace(0, 1, len(x)))), "do not follow the images when their"),
        (broken(score=vandal), "changed the images, prompts or metadata"),
        (PLAIN, "a list of PIL images raised"),
        (PLAIN, r"array \[B, H, W, 3\] gets other scores|other scores"),
        (PLAIN, "one unreadable image stopped the batch"),
        (broken(score=careless), "accepts fewer prompts than images: raise a ValueError"),
        (Zeroing(), "an unreadable image must be invalid and leave the other scores as they are"),
    ],
)
def test_check_reward_names_what_is_broken(reward, message):
    with pytest.raises(RewardError, match=f"(?s)breaks its contract in .*{message}"):
        check_reward(reward)
