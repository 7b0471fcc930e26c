# SPDX-License-Identifier: Apache-2.0
"""Probes: what the changes do to images and prompts, responses by hand, verdicts around a limit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from visalign.data.shapes.prompts import combination, heldout_prompts, parse_prompt
from visalign.evaluation.pages.probe_page import in_words
from visalign.evaluation.probes import perturbations as change
from visalign.evaluation.probes.catalogue import PAIR_PROBES, PROBES, WANTED_OF_PAIRS, Sample, examples, select_probes
from visalign.evaluation.probes.paraphrases import SPELLINGS, respelled
from visalign.evaluation.probes.response import (
    circle_chance,
    is_cycle,
    level_report,
    level_verdict,
    mean_interval,
    probability_interval,
    probe_report,
    share_report,
    summary,
)


def make_image(height: int = 20, width: int = 30, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), generator=generator).float() / 255


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def test_changes_by_hand() -> None:
    image = torch.tensor([0.2, 0.4, 0.6])[:, None, None].expand(3, 4, 4).clone()
    luma = 0.299 * 0.2 + 0.587 * 0.4 + 0.114 * 0.6
    grey = change.saturated(image, 0.0)
    assert torch.allclose(grey, torch.full_like(grey, luma), atol=0.5 / 255)
    double = change.saturated(image, 2.0)[:, 0, 0]
    assert torch.allclose(double, torch.tensor([2 * c - luma for c in (0.2, 0.4, 0.6)]), atol=0.51 / 255)
    assert torch.allclose(change.brightened(image, 0.5)[:, 0, 0], torch.tensor([0.1, 0.2, 0.3]), atol=0.51 / 255)
    assert torch.equal(change.brightened(image, 9.0), torch.ones_like(image))
    assert torch.allclose(change.blank(image, "mean"), image, atol=0.51 / 255)
    assert torch.equal(change.blank(image, "white"), torch.ones_like(image))
    steep = change.contrasted(torch.tensor([0.0, 1.0]).expand(3, 2, 2).clone(), 0.5)
    assert torch.allclose(steep[0, 0], torch.tensor([0.25, 0.75]), atol=0.51 / 255)


def test_borders_and_crops_touch_what_they_say() -> None:
    image = make_image()
    framed = change.bordered(image, 0.1, "black")
    assert framed[:, :2].abs().max() == 0 and framed[:, -2:].abs().max() == 0
    assert framed[:, :, :2].abs().max() == 0 and framed[:, :, -2:].abs().max() == 0
    assert torch.equal(framed[:, 2:-2, 2:-2], image[:, 2:-2, 2:-2])
    even = torch.zeros(3, 20, 20)
    even[:, 5:15, 5:15] = 1.0
    assert torch.equal(change.cropped(even, 0.5), torch.ones_like(even))
    assert torch.equal(change.flipped(image, "horizontal")[:, :, 0], image[:, :, -1])


def on_even_ground() -> Tensor:
    """A green square of 20 pixels on an even dark ground of 64."""
    image = torch.full((3, 64, 64), 51 / 255)
    image[:, 20:40, 30:50] = torch.tensor([0.0, 204 / 255, 0.0])[:, None, None]
    return image


def test_the_ground_changes_and_what_stands_on_it_stays() -> None:
    image = on_even_ground()
    changed = change.with_ground(image, "teal")
    assert changed is not None and torch.equal(changed[:, 20:40, 30:50], image[:, 20:40, 30:50])
    assert torch.allclose(changed[:, 0, 0], torch.tensor([0.0, 0.5, 0.5]), atol=0.51 / 255)
    assert int((changed != image).any(0).sum()) == 64 * 64 - 20 * 20
    assert change.with_ground(make_image(64, 64), "teal") is None, "it has no plain ground"
    inside = on_even_ground()
    inside[:, 28:32, 38:42] = 51 / 255
    again = change.with_ground(inside, "white")
    assert again is not None and torch.equal(again[:, 28:32, 38:42], inside[:, 28:32, 38:42]), "not ground"


def test_specks_lie_on_the_ground_alone() -> None:
    image = on_even_ground()
    changed = change.with_specks(image, 10, generator())
    assert torch.equal(changed[:, 20:40, 30:50], image[:, 20:40, 30:50])
    touched = int((changed != image).any(0).sum())
    assert 40 <= touched <= 10 * 24, "ten specks, none as large as an object of the shapes world"
    assert torch.equal(change.with_specks(image, 0, generator()), image)


def test_a_canvas_holds_the_whole_image() -> None:
    image = on_even_ground()
    changed = change.on_canvas(image, 0.5, "white")
    assert torch.equal(changed[:, :16], torch.ones(3, 16, 64)) and changed.shape == image.shape
    assert torch.allclose(changed[:, 16:48, 16:48].mean((1, 2)), image.mean((1, 2)), atol=0.01)
    assert torch.equal(change.on_canvas(image, 1.0, "white"), image)


def test_destroyed_images_keep_what_they_should() -> None:
    image = make_image()
    scattered = change.shuffled(image, generator())
    assert not torch.equal(scattered, image)
    pixels, scattered_pixels = image.flatten(1).T.tolist(), scattered.flatten(1).T.tolist()
    assert sorted(pixels) == sorted(scattered_pixels), "whole pixels move; their colours stay"
    assert torch.equal(scattered, change.shuffled(image, generator()))
    noise = change.pure_noise(torch.zeros(3, 100, 100), generator())
    assert abs(float(noise.mean()) - 0.5) < 0.01 and abs(float(noise.std()) - 12**-0.5) < 0.01


@pytest.mark.parametrize("probe", PAIR_PROBES, ids=lambda probe: probe.name)
def test_every_change_is_an_image_of_a_file_and_leaves_its_input(probe: Any) -> None:
    sample = Sample(make_image(32, 40), "a red circle left of a square")
    before = sample.image.clone()
    assert probe.wanted in WANTED_OF_PAIRS and probe.levels
    if probe.change is None:
        assert examples(probe, sample, generator()) == []
        return
    for level in probe.levels:
        changed = probe.change(sample, level, generator())
        if changed is None:
            continue
        assert changed.image.shape == sample.image.shape and changed.image.dtype == torch.float32
        levels = changed.image * 255
        assert torch.allclose(levels, levels.round(), atol=1e-3)
        assert levels.min() >= 0 and levels.max() <= 255.01
        assert changed.image is sample.image or not torch.equal(changed.image, sample.image)
        assert probe.name == "spelling" or changed.prompt == sample.prompt
    assert torch.equal(sample.image, before)


def test_spellings_of_the_shapes_world_mean_the_same() -> None:
    tried: dict[str, int] = dict.fromkeys(SPELLINGS, 0)
    for record in heldout_prompts():
        for name in SPELLINGS:
            words = respelled(record["prompt"], name)
            if words is not None:
                tried[name] += 1
                assert words != record["prompt"]
                assert combination(parse_prompt(words)) == combination(record), (words, record["prompt"])
    assert tried.pop("lower case") == 0, "they are lower case"
    assert all(count >= 10 for count in tried.values()), tried


def test_the_interval_is_students() -> None:
    # Values 1, 2, 3: mean 2, standard error 1/√3, t(0.975, 2) = 4.302653.
    mean, low, high = mean_interval(np.array([1.0, 2.0, 3.0]))
    assert mean == 2 and low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert mean_interval(np.array([])) == (None, None, None)
    assert mean_interval(np.array([1.0])) == (1.0, None, None)


def test_equal_answers_are_no_certainty() -> None:
    # Three images miss with probability 0.025 what 1 − 0.025^(1/3) = 0.70760 of all images do.
    assert mean_interval(np.zeros(3)) == pytest.approx((0.0, -0.70760, 0.70760), abs=1e-5)
    assert mean_interval(np.array([-2.0, -2.0 + 1e-7]))[1] == pytest.approx(-2.0 - 0.84189, abs=1e-5)
    assert mean_interval(np.full(64, -2.0)) == pytest.approx((-2.0, -2.05601, -1.94399), abs=1e-5)
    assert verdict("no gain", *[0.0] * 10) == "unclear" and verdict("no gain", *[0.0] * 36) == "holds"


def test_a_win_rate_stays_a_probability() -> None:
    assert probability_interval(np.array([1.0, 1.0, np.nan])) == pytest.approx(
        {"win": 1.0, "win_low": 1 - (1 - 0.025**0.5), "win_high": 1.0}
    )
    assert probability_interval(np.array([np.nan])) == {"win": None, "win_low": None, "win_high": None}


def test_circles_by_all_their_cases() -> None:
    for ties in (0.0, 0.2, 1.0):
        weight = {-1: (1 - ties) / 2, 0: ties, 1: (1 - ties) / 2}
        cases = [(a, b, c) for a in weight for b in weight for c in weight]
        hits = is_cycle(*np.array(cases, dtype=float).T)
        # a over b, b over c and c over a cannot come from an order unless one of them is turned.
        contradict = {case for case in cases if sorted(case) in ([1, 1, 1], [-1, -1, -1], [0, 1, 1], [-1, -1, 0])}
        assert {case for case, hit in zip(cases, hits, strict=True) if hit} == contradict
        chance = sum(weight[a] * weight[b] * weight[c] for a, b, c in contradict)
        assert circle_chance(ties) == pytest.approx(chance)
    assert circle_chance(0.0) == 0.25


def test_shares_and_their_verdicts() -> None:
    # Wilson, 0 of 36: z² / (n + z²) with z = 1.959964.
    clean = share_report("x", [False] * 36, [None] * 36 + ["late"], chance=0.25, left_out=1)
    assert (clean["share"], clean["share_low"], clean["judged"], clean["failed"]) == (0.0, 0.0, 36, 1)
    assert clean["share_high"] == pytest.approx(3.841459 / (36 + 3.841459), abs=1e-6)
    assert clean["reasons"] == {"late": 1} and clean["left_out"] == 1
    assert level_verdict("acyclic", clean) == "holds"
    assert level_verdict("acyclic", share_report("x", [False] * 9, [], chance=0.25)) == "unclear"
    assert level_verdict("acyclic", share_report("x", [True, False] * 18, [], chance=0.25)) == "fails"
    assert level_verdict("consistent", share_report("x", [True] * 36, [], chance=0.5)) == "holds"
    assert level_verdict("consistent", share_report("x", [True] * 9, [], chance=0.5)) == "unclear"
    assert level_verdict("consistent", share_report("x", [True] * 7 + [False] * 5, [], chance=0.5)) == "fails"
    empty = share_report("x", [], ["late"], chance=None)
    assert level_verdict("acyclic", empty) == "not judged" and in_words(empty, "acyclic") == ("–",)
    assert in_words(clean, "acyclic")[1] == "by chance 25.0\u00a0%"


def test_a_level_counts_what_failed() -> None:
    response = np.array([0.5, -0.5, np.nan, 0.05])
    report = level_report("x", 1.0, response, [None, None, "broken", None], left_out=2)
    assert (report["judged"], report["failed"], report["left_out"]) == (3, 1, 2)
    assert report["reasons"] == {"broken": 1}
    assert report["mean"] == pytest.approx(0.05 / 3) and report["size"] == pytest.approx(1.05 / 3)
    assert report["largest"] == 0.5 and report["rose"] == pytest.approx(1 / 3)


def verdict(wanted: str, *values: float) -> str:
    return level_verdict(wanted, level_report("x", None, np.array(values), [None] * len(values)))


def test_verdicts_on_both_sides_of_each_limit() -> None:
    assert verdict("no gain", 0.0, 0.01, -0.01) == "holds"
    assert verdict("no gain", -3.0, -2.0, -2.5) == "holds"
    assert verdict("no gain", 0.5, 0.51, 0.49) == "fails"
    assert verdict("no gain", -1.0, 1.0, 0.5) == "unclear"
    assert verdict("steady", -0.5, 0.51, 0.49) == "fails"
    assert verdict("steady", 0.01, -0.01, 0.0) == "holds"
    assert verdict("loss", -1.0, -1.01, -0.99) == "holds"
    assert verdict("loss", 0.0, 0.01, -0.01) == "fails"
    assert verdict("same", *[0.0] * 50) == "holds"
    assert verdict("same", *[0.0] * 50, 0.03) == "fails"
    assert verdict("same", 0.0, 0.0, math.nan) == verdict("same", math.nan) == "fails", "no answer differs"
    assert verdict("shown", 1.0, 2.0, 3.0) == "shown"
    assert verdict("no gain", 0.0, 0.0) == "not judged", "two images decide nothing"
    assert verdict("no gain") == "not judged"


def report_of(wanted: str, *table: list[float]) -> dict[str, Any]:
    probe = next(probe for probe in PROBES if probe.wanted == wanted)
    arrays = [np.array(values) for values in table]
    return probe_report(probe, [(a, level_report(str(k), float(k), a, [None] * len(a))) for k, a in enumerate(arrays)])


def test_stronger_must_not_be_paid_more_than_weaker() -> None:
    falling = report_of("falling", [-0.1, -0.11, -0.09], [-0.5, -0.52, -0.49])
    assert falling["verdict"] == "holds"
    rising = report_of("falling", [-0.9, -0.91, -0.89], [-0.5, -0.52, -0.49])
    assert [level["verdict"] for level in rising["levels"]] == ["holds", "fails"]
    assert rising["verdict"] == "fails"


def test_a_probe_is_as_bad_as_its_worst_level() -> None:
    mixed = report_of("no gain", [0.0, 0.0, 0.0], [0.5, 0.51, 0.49], [np.nan] * 3)
    assert mixed["verdict"] == "fails" and mixed["levels"][2]["verdict"] == "not judged"
    assert mixed["failed"] == 3 and mixed["judged"] == 6
    silent = report_of("no gain", [np.nan] * 3)
    assert silent["verdict"] == "not judged"
    assert summary([mixed, silent, mixed]) == {"fails": 2, "not judged": 1}


def test_probes_are_selected_by_name() -> None:
    assert select_probes(None) == PROBES
    assert [probe.name for probe in select_probes(["jpeg", "blank", "jpeg"])] == ["jpeg", "blank"]
    assert {probe.name for probe in PROBES} < {probe.name for probe in PAIR_PROBES}


def test_the_answer_in_words_names_what_the_verdict_goes_by() -> None:
    level = level_report("x", None, np.array([-0.5, 0.5, 0.3]), [None] * 3)
    mean = "+0.10 (−1.21 to +1.41)"
    assert in_words(level, "steady") == (mean, "mean size 0.433")
    assert in_words(level, "same") == (mean, "largest 0.500")
    won = {**level, "win": 0.7, "win_low": 0.6, "win_high": 0.8, "win_before": 0.5, "turned": 0.25}
    assert [part.replace("\u00a0", " ") for part in in_words(won, "no gain")] == [
        mean,
        "wins 70.0 % (60.0 % to 80.0 %)",
        "unchanged 50.0 %",
        "another winner in 25.0 %",
    ]
