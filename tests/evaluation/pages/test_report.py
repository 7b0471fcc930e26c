# SPDX-License-Identifier: Apache-2.0
"""The report: its numbers are the inputs', nothing gets in unescaped or is fetched, bad runs look bad."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.evaluation_samples import TAGS, blind_result, make_result, make_text_result
from visalign.evaluation import HeldoutResult, compare, write_report, write_summary
from visalign.evaluation.pages.base import data_uri, number
from visalign.evaluation.pages.samples import failures, galleries, take_in_turn
from visalign.evaluation.pages.wording import unchanged_note

VOID = {"meta", "img", "br", "hr", "link", "input", "line", "circle", "path"}
HOSTILE = '<script>alert("x")</script> & "red" circle\'s'
METRICS = [{"iteration": n, "reward_mean": 0.5 + n / 100, "grad_norm": 1.0} for n in range(1, 6)]
COSTS = {
    "seconds": 318.4,
    "phases": {"rollout": 96.0, "update": 148.0},
    "forward_equivalents_per_image": 25.31,
    "peak_memory_bytes": {"host": 2.4e9},
    "images": 23040,
}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects texts, attributes and ids."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def report(folder: Path, before: HeldoutResult, after: HeldoutResult, **changes: Any) -> Page:
    options: dict[str, Any] = {
        "metrics": METRICS,
        "config": {"model": "shapes-sd3", "optimizer": {"lr": 2e-4, "betas": [0.9, 0.99]}, "kl": None},
        "versions": {"torch": "2.9.1"},
        "costs": COSTS,
        "title": "Quickstart",
        "load_code": "load me",
        "resume_command": "go on",
        "trained_prompts": 0,
    }
    return Page(write_report(folder, before=before, after=after, **(options | changes)))


def test_numbers_equal_the_inputs(tmp_path: Path) -> None:
    before, after = make_result(0.25), make_result(0.75)
    page, comparison = report(tmp_path / "run", before, after), compare(before, after)
    assert "25.0 % → 75.0 %" in page.text and "+50.0 points" in page.text
    low, high = comparison.overall.change.low, comparison.overall.change.high
    assert f"95 % interval +{100 * low:.1f} to +{100 * high:.1f}" in page.text
    assert "6 of 24 images were correct before training, 18 of 24 after it" in page.text
    numbers = ("5 min 18 s", "25.31", "2.40 GB", "23 040", "0.0002", "2.9.1")
    for words in (*numbers, "optimizer.lr", "load me", "bench MODEL run"):
        assert words in page.text and str(tmp_path) not in page.source, words
    assert "12 prompts the model was not trained on, each drawn twice" in page.text
    assert "The whole interval lies above zero" in page.text
    for tag in TAGS:
        first, second = before.by_category[tag], after.by_category[tag]
        interval = after.interval(tag)
        row = page.text[page.text.index(tag.replace("_", " ")) :][:200]
        assert f"{100 * first:.0f} %" in row and f"{100 * second:.0f} %" in row
        assert f"{100 * interval.low:.0f}–{100 * interval.high:.0f} · {after.counts[tag][0]}/8" in row
        assert f"{100 * (second - first):+.1f}".replace("-", "−") in row
    assert f"{before.mean('clip_score'):.3f}" in page.text and f"{after.mean('clip_score'):.3f}" in page.text
    assert "improved 12" in page.text and "got worse 0" in page.text


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        (None, "12 prompts, each drawn"),
        (5, "12 prompts, 5 of which the model was also trained on, each drawn"),
        (12, "12 prompts, all of which the model was also trained on, each drawn"),
    ],
)
def test_the_page_says_whether_the_prompts_were_trained_on(tmp_path: Path, trained: int | None, words: str) -> None:
    page = report(tmp_path, make_result(0.25), make_result(0.5), trained_prompts=trained)
    assert words in page.text and "never trained on" not in page.text
    blind = report(tmp_path, blind_result(), blind_result(), trained_prompts=trained)
    assert words.removesuffix(", each drawn") + ", from the same noise" in blind.text


def test_what_voids_the_verdict_stands_above_it_and_what_is_missing_says_how_to_get_it(tmp_path: Path) -> None:
    same = make_result(0.5)
    warned = unchanged_note(same, same)
    page = report(tmp_path / "same", same, same, trained_prompts=12, warnings=[warned, "the KL rose"], metrics=METRICS)
    assert page.source.count('class="banner"') == 2 and page.text.count("The result equals its start") == 1
    assert "Every held-out prompt was trained on" in page.text and "the KL rose" in page.text
    heldout = any(key.startswith("heldout/") for row in METRICS for key in row)
    assert ("No held-out curve: set evaluation.every" in page.text) is not heldout
    sound = report(tmp_path / "sound", make_result(0.25), make_result(0.5), metrics=[{"iteration": 1, "loss": 1.0}])
    assert 'class="banner"' not in sound.source and "No held-out curve: set evaluation.every" in sound.text


def test_nothing_is_fetched_and_nothing_runs(tmp_path: Path) -> None:
    page = report(tmp_path, make_result(0.25), make_result(0.75))
    assert len(page.all("script")) == 1 and page.all("iframe") == [], "its own, by the hash of the policy"
    assert page.all("link") == [{"rel": "icon", "href": "data:,"}], "not even an icon is asked for"
    assert not re.search(r"""(src|href|srcset|data|action)\s*=\s*["']?\s*(https?:)?//""", page.source, re.I)
    assert not re.search(r"url\(|@import|https?://", page.source)
    ids = {attributes.get("id") for _, attributes in page.tags}
    for link in page.all("a"):
        href = link["href"] or ""
        assert href.startswith("#") and href[1:] in ids
    for image in page.all("img"):
        assert (image["src"] or "").startswith("data:image/png;base64,")
        assert len(image["alt"] or "") > 20
    policy = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    script = page.source.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert policy == [own] and "fetch" not in script and "http" not in script
    assert page.source.startswith("<!doctype html>")


def test_everything_from_outside_is_escaped(tmp_path: Path) -> None:
    def hostile(share: float) -> HeldoutResult:
        plain = make_result(share)
        return replace(
            plain,
            prompts=tuple(f"{HOSTILE} {prompt}" for prompt in plain.prompts),
            tags=(HOSTILE,) * len(plain),
            reasons=(HOSTILE,) * len(plain),
            scores={HOSTILE: plain.scores["clip_score"]},
            units={HOSTILE: HOSTILE},
            higher_is_better={HOSTILE: True},
        )

    page = report(
        tmp_path,
        hostile(0.25),
        hostile(0.75),
        title=HOSTILE,
        config={HOSTILE: HOSTILE, "model": HOSTILE},
        versions={HOSTILE: HOSTILE},
        costs={HOSTILE: HOSTILE, "phases": {HOSTILE: 1.0}},
        metrics=[{"iteration": 1, "reward_mean": HOSTILE}],
        resume_command=HOSTILE,
    )
    assert len(page.all("script")) == 1 and page.source.count("<script") == 1
    assert page.text.count(HOSTILE) > 20
    assert all(set(image) == {"src", "width", "height", "loading", "alt"} for image in page.all("img"))


def test_verdicts_and_reasons_stand_beside_the_images() -> None:
    before, after = make_result(0.25), make_result(0.75)
    fixed, improved, worse = galleries(before, after, compare(before, after))
    assert len(fixed["pairs"]) == 12 and worse["pairs"] == []
    assert "12 of 24" in fixed["rule"] and "of 12:" in improved["rule"]
    for pair in improved["pairs"]:
        assert (pair["before"]["verdict"], pair["after"]["verdict"]) == ("wrong", "correct")
        assert pair["before"]["reason"].startswith("found") and pair["after"]["reason"] == ""
    groups = failures(after)
    assert sum(group["total"] for group in groups) == 6
    shots = [shot for group in groups for _, _, shot in group["shots"]]
    assert all(shot["verdict"] == "wrong" and shot["reason"] for shot in shots)
    for pair in (*fixed["pairs"], *improved["pairs"]):
        row = before.prompts.index(pair["prompt"]) + pair["seed"]
        assert pair["before"]["source"] == data_uri(before.images[row])
        assert pair["after"]["source"] == data_uri(after.images[row])


def test_a_text_run_has_the_same_page_with_completions(tmp_path: Path) -> None:
    before, after = make_text_result(0.25), make_text_result(0.75)
    page = report(tmp_path, before, after)
    assert "6 of 24 completions were correct before training, 18 of 24 after it" in page.text
    assert "each completed twice with the same seeds" in page.text and "+50.0 points" in page.text
    assert "kept for this page" not in page.text and "noise" not in page.text and page.all("img") == []
    assert page.source.count("<script") == 1 and "<think>" not in page.source, "completions are escaped"
    improved = galleries(before, after, compare(before, after))[1]["pairs"]
    assert len(improved) == 10, "each prompt once"
    for pair in improved:
        row = before.prompts.index(pair["prompt"]) + pair["seed"]
        texts = before.completions[row], after.completions[row]
        assert (pair["before"]["text"], pair["after"]["text"]) == texts
        assert pair["before"]["text"].endswith("wrong") and pair["after"]["text"].endswith("right")
        assert pair["after"]["scores"] == [("checker", 1.0), ("length", float(after.scores["length"][row]))]
    assert "<think> 7 </think> wrong" in page.text and "<think> 7 </think> right" in page.text
    assert "prompt 3: what is 1 + 1?" in page.text


def test_long_texts_are_folded_and_whole(tmp_path: Path) -> None:
    page = report(tmp_path, make_text_result(0.25, long=True), make_text_result(0.75, long=True))
    assert page.text.count("All 1") == len(page.all("details")) - page.text.count("The whole prompt") > 20
    completion = make_text_result(0.75, long=True).completions[0]
    assert re.sub(r"\s+", " ", completion) in page.text


def test_selection_rule_by_hand() -> None:
    """Tags of prompts cycle a, b, c; prompts come once, categories in turn."""
    result = make_result(0.5, prompts=6, seeds=2)
    assert take_in_turn(range(12), result, 12) == [0, 6, 2, 8, 4, 10]
    assert take_in_turn(range(12), result, 4) == [0, 6, 2, 4]
    assert take_in_turn([11, 10, 1, 0], result, 9) == [1, 11]
    assert take_in_turn([], result, 3) == []


def test_a_fallen_reward_is_named(tmp_path: Path) -> None:
    page = report(tmp_path, make_result(0.25), make_result(0.75))
    assert "sharpness moved in the wrong direction, beyond the interval. Look at the images." in page.text
    turned = {"shapes_verifier": True, "clip_score": True, "sharpness": False}
    page = report(tmp_path, *(make_result(share, higher_is_better=turned) for share in (0.25, 0.75)))
    assert "No reward moved in the wrong direction" in page.text and "lower is better" in page.text


@pytest.mark.parametrize("name", ["token_entropy", "length"])
@pytest.mark.parametrize("higher", [True, False])
def test_entropy_and_length_are_neither_better_nor_worse(name: str, higher: bool) -> None:
    before, after = (
        replace(
            make_text_result(0.5),
            scores={name: np.linspace(5, 6, 24, dtype=np.float32) - moved},
            units={name: "u"},
            higher_is_better={name: higher},
        )
        for moved in (0, 1)
    )
    (row,) = compare(before, after).rewards
    assert row.verdict == "fell" and not row.worse and row.neutral


def test_all_invalid(tmp_path: Path) -> None:
    before, after = blind_result(0.25), blind_result(0.75)
    page = report(tmp_path, before, after, metrics=[])
    assert "says correct or wrong, so there is no accuracy" in page.text
    assert "Not measured on both sides: shapes verifier, sharpness." in page.text
    assert "without a score: 24 before, 24 after; left out" in page.text
    assert "nan" not in page.source.lower().replace("data:image", "").split("<main")[1].split("<img")[0]
    assert "? no verdict" in page.text and "cannot see" in page.text
    assert "Accuracy by category" not in page.text and "judged wrong after training" not in page.text


@pytest.mark.parametrize(
    ("higher", "meaning"), [(True, "the model became worse"), (False, "would very likely show a gain")]
)
def test_without_verdicts_the_headline_is_the_trained_reward(tmp_path: Path, higher: bool, meaning: str) -> None:
    turned = {"shapes_verifier": True, "clip_score": True, "sharpness": higher}
    scores = [dict(make_result(share).scores) for share in (0.25, 0.75)]
    before, after = (replace(blind_result(), scores=entry, higher_is_better=turned) for entry in scores)
    page = report(tmp_path, before, after, main_rewards=["sharpness", "clip_score"])
    assert "sharpness (levels²), held-out mean" in page.text and "\u221220.0" in page.text
    assert "The whole interval lies below zero: " in page.text and meaning in page.text


def test_a_run_with_a_reward_of_ones_own_shows_it_under_the_best_and_worst_images(tmp_path: Path) -> None:
    before, after = blind_result(0.25), blind_result(0.75)
    before = replace(before, reasons=("",) * len(before), scores={"glow": before.scores["clip_score"]})
    rose = after.scores["clip_score"] + np.where(np.arange(len(after)) == 5, 9, 0).astype(np.float32)
    after = replace(after, reasons=("",) * len(after), scores={"glow": rose})
    before, after = (replace(r, units={"glow": "lumen"}, higher_is_better={"glow": True}) for r in (before, after))
    page = report(tmp_path, before, after, metrics=[])
    assert "✓" not in page.text and "✗" not in page.text and "no verdict" not in page.text
    assert "Only 12 prompts: one lucky prompt" in page.text
    best = next(g for g in galleries(before, after, compare(before, after)) if g["anchor"] == "best")
    top = int(np.argmax(rose))
    assert {(p["prompt"], p["seed"]) for p in best["pairs"]} >= {(after.prompts[top], int(after.seeds[top]))}
    assert best["pairs"][0]["after"]["scores"][0][0] == "glow"
    assert f"glow {number(float(rose[top]))}" in page.text
    anchors = [g["anchor"] for g in galleries(before, after, compare(before, after))]
    assert anchors == ["fixed", "best", "worst", "improved", "worse"]


def test_unpaired_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be paired: 24 samples of 12 prompts before, 10 of 5"):
        report(tmp_path, make_result(0.2), make_result(0.5, prompts=5))
    assert list(tmp_path.iterdir()) == []


def test_summary_holds_what_was_measured(tmp_path: Path) -> None:
    before, after = make_result(0.25), make_result(0.75)
    config = {"path": Path("runs"), "lr": np.float64(1e-4), "bad": math.nan, "steps": (1, 2), "flag": True}
    facts: dict[str, Any] = {"costs": COSTS, "config": config, "versions": {"torch": "2"}}
    path = write_summary(tmp_path / "summary.json", before=before, after=after, **facts)
    summary = json.loads(path.read_text(encoding="utf-8"))
    assert summary["before"] == before.to_dict() and summary["after"] == after.to_dict()
    assert summary["after"]["accuracy"] == 0.75 and set(summary["after"]["by_category"]) == set(TAGS)
    assert summary["gain"] == compare(before, after).overall.change.to_dict()
    assert summary["changes"]["rewards"]["sharpness"]["verdict"] == "fell"
    assert summary["seconds"] == 318.4 and summary["peak_memory_bytes"] == {"host": 2.4e9}
    assert summary["config"] == {"path": "runs", "lr": 1e-4, "bad": None, "steps": [1, 2], "flag": True}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
