# SPDX-License-Identifier: Apache-2.0
"""The record and page of a ranking: what was asked, position bias in words, answers against the order."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.judges.brightness import Brightness, BrightnessPairs
from visalign.evaluation.pages.base import short_names
from visalign.evaluation.pages.rank_page import sentences
from visalign.pipelines.compare.compare import ranking_page, ranking_record
from visalign.rewards.pairs.ranking import rank


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    """Four even images from dark to bright and a broken one."""
    files = [tmp_path / f"{level}.png" for level in range(5)]
    for level, file in enumerate(files[:-1]):
        Image.new("RGB", (8, 8), (51 * (level + 1),) * 3).save(file)
    files[-1].write_bytes(b"no image")
    return [str(file) for file in files]


def record(names: list[str], judge: Any, **options: Any) -> dict[str, Any]:
    return ranking_record(rank(names, "x", judge, **options), names, "x", judge.name, judge)


def test_every_call_is_recorded_as_it_was_made(names: list[str]) -> None:
    judge = BrightnessPairs(scale=4.0, bias=1.0, fails=lambda left, right: (left, right) == (0.8, 0.2))
    result = record(names, judge, budget=2)
    level = {name: round(0.2 * (place + 1), 4) for place, name in enumerate(names)}
    assert [(level[c["left"]], level[c["right"]]) for c in result["asked"]] == judge.asked
    assert result["calls"] == len(judge.asked) >= 8 and result["all_pairs"] == 6
    for c in result["asked"]:
        odds = 4 * (level[c["left"]] - level[c["right"]]) + 1
        assert c["prob"] is None or c["prob"] == pytest.approx(1 / (1 + math.exp(-odds)), abs=1e-5)
    [failed] = [c for c in result["asked"] if c["prob"] is None]
    assert failed["reason"] == "no answer" and level[failed["left"]] == 0.8
    assert [row["image"] for row in result["images"]] == [*names[3::-1], names[4]]
    counted = {row["image"]: row["calls"] for row in result["images"]}
    assert counted == {n: sum(n in (c["left"], c["right"]) for c in result["asked"]) for n in names}
    assert counted[names[4]] == 0 and sum(counted.values()) == 2 * result["calls"]
    json.dumps(result, allow_nan=False)


def test_the_position_bias_is_said_with_its_interval(names: list[str]) -> None:
    result = record(names, BrightnessPairs(scale=4.0, bias=1.0), budget=2)
    said, calls = " ".join(sentences(result)), result["calls"]
    asked = {(c["left"], c["right"]) for c in result["asked"]}
    both = sum((right, left) in asked for left, right in asked) // 2
    assert f"{calls} calls, as many as {100 * calls / 6:.1f}\xa0% of the 6 pairs of images; " in said
    assert both > 1 and f"; asked in both orders: {both} pairs." in said
    assert re.search(r"on the left adds \+(1\.0|0\.9)\d log-odds \(\+0\.\d+ to \+1\.\d+\)", said)
    assert re.search(r"of two equals the left one wins 7[23]\.\d\xa0%\.", said) and "no clear" not in said
    none = " ".join(sentences(record(names, BrightnessPairs(scale=4.0, bias=0.0), budget=2)))
    assert "That interval holds 0: no clear position bias." in none


def test_whether_the_first_place_is_open(names: list[str]) -> None:
    wide, narrow = (record(names, Brightness(std=std)) for std in (0.3, 0.01))
    assert sentences(wide)[-1] == "The first place is open: 3 other intervals overlap with that of the first."
    assert sentences(narrow)[-1] == "The interval of 3.png lies apart from all others: it is the best."
    lower = record(names, Brightness(std=0.01, higher_is_better=False))
    assert lower["images"][0]["image"] == names[0] and "lies apart" in sentences(lower)[-1]
    assert "lower is better" in sentences(lower)[0] and lower["asked"] is None


def test_the_page_shows_images_and_reasons(names: list[str]) -> None:
    page = ranking_page(record(names, BrightnessPairs(scale=4.0, bias=1.0), budget=2))
    assert page.count('src="data:image/png') == 4 and "4 out" not in page
    assert "4.png cannot be decoded" in page
    assert str(Path(names[0]).parent) + "/0.png" not in page.split("Failures")[0]
    blind = record(names[:2], BrightnessPairs(fails=lambda left, right: True))
    empty = ranking_page(blind)
    assert "No image could be scored." in empty and "no answer" in empty
    assert '<p class="banner" role="alert">far off' in ranking_page(blind | {"warning": "far off"})


def test_names_lose_only_what_all_share() -> None:
    assert short_names(["a/b/1.png", "a/c/1.png"]) == {"a/b/1.png": "b/1.png", "a/c/1.png": "c/1.png"}
    assert short_names(["only.png"]) == {"only.png": "only.png"} and short_names([]) == {}
