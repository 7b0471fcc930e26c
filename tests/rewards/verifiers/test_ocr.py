# SPDX-License-Identifier: Apache-2.0
"""The OCR reward: distances by hand, what flooding costs, wanted texts, engines, a real engine."""

from __future__ import annotations

import builtins
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from visalign.rewards import RewardError, check_reward
from visalign.rewards.verifiers.ocr import (
    OcrReward,
    levenshtein,
    load_rapidocr,
    normal_text,
    quoted_texts,
    text_score,
    wanted_texts,
    window_distance,
)

BLANK = torch.ones(1, 3, 8, 8)


def test_levenshtein_by_hand() -> None:
    assert levenshtein("kitten", "sitting") == 3 and levenshtein("", "abc") == 3
    assert levenshtein("flaw", "lawn") == 2 and levenshtein("same", "same") == 0


def test_the_window_is_the_best_stretch() -> None:
    for target, text in (("ab", "ba"), ("open", "xxoxpenyy"), ("a", ""), ("abc", "xyz"), ("ab", "aabb")):
        ends = range(len(text) + 1)
        best = min(levenshtein(target, text[i:j]) for i in ends for j in ends if i <= j)
        assert window_distance(target, text) == best


def test_window_scores_by_hand() -> None:
    assert text_score("OPEN", "open") == 1 and text_score("OPEN", "o p\ten") == 1
    assert text_score("open", "oven") == 0.75 and text_score("open", "") == 0
    assert text_score("open", "openopen") == 0.5  # as much again
    assert text_score("It's “so” fine", 'It’s "so" fine') == 1
    assert text_score("Ｃａｆé", "café") == 1  # compatibility forms are the same letters
    assert text_score(" \t", "x") is None


@pytest.mark.parametrize("flood", ["buy now", "sale", "open open open", "stop open go"])
def test_flooding_costs_here_and_not_in_the_published_rules(flood: str) -> None:
    exact = text_score("sale", "sale")
    for rule in ("flow_grpo", "verl_omni"):
        assert text_score("sale", f"sale {flood}", rule=rule) == exact == 1
    score = text_score("sale", f"sale {flood}")
    assert score is not None and score == pytest.approx(4 / (4 + len(normal_text(flood))))


@settings(max_examples=60, deadline=None)
@given(st.text("abc", min_size=1, max_size=6), st.text("abc", max_size=6), st.text("xyz", min_size=1, max_size=6))
def test_text_that_nobody_wanted_never_pays(target: str, recognised: str, extra: str) -> None:
    plain, flooded = text_score(target, recognised), text_score(target, recognised + extra)
    assert plain is not None and flooded is not None and 0 <= flooded <= 1
    assert flooded < plain if plain and len(recognised) >= len(target) else flooded <= plain


def test_several_texts_fit_in_any_order() -> None:
    assert text_score(["red", "blue"], "blue red") == 1
    assert text_score(["red", "blue"], "blue") == pytest.approx(4 / 7)
    five = ["a", "b", "c", "d", "e"]
    assert text_score(five, "abcde") == 1 and text_score(five, "edcba") != 1


def test_named_rules_differ_in_blanks_and_empty_targets() -> None:
    assert text_score("tab\there", "tabhere", rule="flow_grpo") == 0.875
    assert text_score("tab\there", "tabhere", rule="verl_omni") == 1
    assert text_score("", "x", rule="flow_grpo") is None
    assert text_score("", "x", rule="verl_omni") == 0 and text_score("", "", rule="verl_omni") == 1
    assert text_score("sale", "a sale", rule="plain") == 0.75


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ('a sign that says "Open 24h" and "Bar"', ["Open 24h", "Bar"]),
        ("a shop called “Olé” with «prix» and „Brot“", ["Olé", "prix", "Brot"]),
        ("it's the dogs' sign: 'Bob's Bar'", ["Bob's Bar"]),
        ("a poster ‘Don’t panic’ on the wall", ["Don’t panic"]),
        ("招牌上写着「营业」", ["营业"]),
        ("nothing here, it's the dog's", []),
        ('an empty ""', []),
        ("class of '99, rock 'n' roll, open 'til late: '24 Hours'", ["24 Hours"]),
        ('the \'90s kids\' room, a 24" monitor, a 6\'2" man with "Hi"', ["Hi"]),
        ("‘Rock ’n’ Roll’, ‹Oui›, ›Ja‹ et « Non »", ["Rock ’n’ Roll", "Oui", "Ja", "Non"]),
        ('写着"欢迎"的牌子, ‘환영’이라고, ”Öppet” ‚zu‘', ["欢迎", "환영", "Öppet", "zu"]),
        ("an unclosed \"OPEN and a 'Rex'", ["Rex"]),
        ("‘«" * 10_000, []),
    ],
)
def test_quoted_parts(prompt: str, texts: list[str]) -> None:
    assert quoted_texts(prompt) == texts


@pytest.mark.parametrize(
    ("prompt", "record", "reason"),
    [
        ("a sign", None, "no wanted text: give metadata"),
        ('a sign ""', None, "no wanted text: give metadata"),
        ("a sign", {"text": " "}, 'the wanted text is empty: metadata "text"'),
        ("a sign", {"text": 7}, 'metadata "text" is 7; needed is a string'),
        ("a sign", {"text": ["a", None]}, "needed is a string or a list of strings"),
    ],
)
def test_no_wanted_text_is_a_failure_with_its_reason(prompt: str, record: Any, reason: str) -> None:
    scores = OcrReward(lambda image: "x").score(BLANK, [prompt], [record])
    assert not scores.valid[0] and bool(scores.value.isnan()[0])
    assert scores.reason is not None and reason in str(scores.reason[0])


def test_wanted_texts_of_a_record_come_first() -> None:
    assert wanted_texts('a "b"', {"text": "c"}) == ["c"] and wanted_texts('a "b"', {"tag": 1}) == ["b"]
    assert wanted_texts("a", {"text": ["c", "d"]}) == ["c", "d"]


def test_scores_parts_and_one_reading_per_image() -> None:
    read = []

    def engine(image: np.ndarray) -> str:
        assert image.dtype == np.uint8 and image.shape == (8, 8, 3)
        read.append(image)
        return "Hello World" if image.mean() > 128 else "HELL"

    images = torch.cat([BLANK, torch.zeros(1, 3, 8, 8), BLANK])
    scores = OcrReward(engine).score(images, ['"hello"', '"hello"', '"hello world"'])
    assert scores.value.tolist() == pytest.approx([0.5, 0.8, 1]) and len(read) == 2
    assert scores.parts["extra"].tolist() == pytest.approx([0.5, 0, 0])
    assert scores.text == ["Hello World", "HELL", "Hello World"] and scores.unit == "1 = text as wanted"
    published = OcrReward(engine, rule="flow_grpo").score(images, ['"hello"'] * 3)
    assert published.value.tolist() == pytest.approx([1, 0.8, 1])


def test_the_contract() -> None:
    def engine(image: np.ndarray) -> str:
        return "".join(chr(97 + int(value) // 16) for value in image[0, :5, 0])

    assert check_reward(OcrReward(engine), prompts=['"abc"', '"jkl"', '"abcdefgh"', '"zz"'])
    assert OcrReward(engine).identity.digest != OcrReward(engine, rule="plain").identity.digest


def test_wrong_engines_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="rule is 'fuzzy'; allowed are window, plain, flow_grpo, verl_omni"):
        OcrReward(rule="fuzzy")
    with pytest.raises(ValueError, match="min_confidence is 2"):
        OcrReward(min_confidence=2)
    with pytest.raises(RewardError, match="the engine returned a list; it must return a string"):
        OcrReward(lambda image: ["a"]).score(BLANK, ['"a"'])  # type: ignore[arg-type, return-value]
    with pytest.raises(RewardError, match="Reward 'ocr' raised ZeroDivisionError"):
        OcrReward(lambda image: str(1 / 0)).score(BLANK, ['"a"'])


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.split(".")[0] in ("rapidocr", "onnxruntime"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RewardError, match=r"not installed \(onnxruntime is missing\).*install \"visalign\[ocr\]\""):
        OcrReward().score(BLANK, ['"a"'])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("rapidocr") is None, reason="the extra `ocr` is not installed")
@pytest.mark.filterwarnings("ignore")  # of the engine's own making
def test_a_real_engine_reads_a_rendered_sign() -> None:
    image = Image.new("RGB", (320, 96), "white")
    ImageDraw.Draw(image).text((16, 20), "OPEN 24 hours", "black", ImageFont.load_default(44))
    flooded = Image.new("RGB", (320, 192), "white")
    flooded.paste(image)
    ImageDraw.Draw(flooded).text((16, 120), "SALE buy now", "black", ImageFont.load_default(44))
    reward = OcrReward(load_rapidocr())
    scores = reward.score([image, flooded, Image.new("RGB", (320, 96), "white")], ['"OPEN 24 hours"'] * 3)
    assert scores.value[0] == 1 and 0.4 < float(scores.value[1]) < 0.7 and scores.value[2] == 0
