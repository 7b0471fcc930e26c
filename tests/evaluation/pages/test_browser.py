# SPDX-License-Identifier: Apache-2.0
"""Every page of rewards in use in a real browser: desktop and phone, light and dark, by keyboard alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.browser import Browser, find_browser
from tests.support.evaluation_samples import make_result, make_text_result
from tests.support.judges.brightness import Brightness, BrightnessPairs
from tests.support.judges.hackable import LovesSaturation
from visalign.data.sets.sources import shapes_pairs, write_rows
from visalign.evaluation.pages.compare_page import compare_page
from visalign.evaluation.pages.report import write_report
from visalign.evaluation.pages.sample_page import sample_page
from visalign.evaluation.pages.votes_page import progress_page
from visalign.evaluation.probes.catalogue import select_probes
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.pipelines.compare.compare import compare_images, read_two
from visalign.pipelines.evaluate.job import evaluate, evaluate_sets
from visalign.pipelines.probe.job import probe_reward, write_probe
from visalign.pipelines.probe.reference import shapes_reference_set
from visalign.pipelines.score.image_rows import ImageRow
from visalign.pipelines.score.report import score_summary, write_score_page
from visalign.pipelines.score.score import score_rows
from visalign.pipelines.watch import build_page
from visalign.rewards.catalogue import load_reward

PATH = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PATH is None, reason="no Chromium on the path; on Debian: apt-get install chromium. The pages are unchecked"
    ),
]
AXE = Path(os.environ.get("AXE", "node_modules/axe-core/axe.min.js"))
"""Script of axe-core, where it is installed: AXE=FILE, or that of the working folder."""
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
MOST_TABS = 400
FOCUSED = """(() => { const e = document.activeElement;
  return e === document.body || e === null ? null
    : e.getAttribute('href') || e.getAttribute('aria-label') || e.id; })()"""
OVERFLOW = """(() => { const wide = document.documentElement.clientWidth;
  return [...document.querySelectorAll('body *')]
    .filter(e => !e.closest('.scroll, pre, nav, .skip, thead'))
    .filter(e => e.getBoundingClientRect().right > wide + 1)
    .slice(0, 5).map(e => e.tagName + '.' + e.className); })()"""
IMAGES = """(async () => { const bad = [];
  for (const image of document.images) {
    image.loading = 'eager';
    await image.decode().catch(() => bad.push(image.alt));
    if (!image.alt || !image.naturalWidth) bad.push(image.src.slice(0, 40));
  }
  return bad; })()"""
"""Images that cannot be decoded, or have no text in their place; those that wait are made to load."""
COLOURS = """(() => { const style = getComputedStyle(document.body);
  const rgb = name => style[name].match(/[\\d.]+/g).slice(0, 3).map(Number);
  return [rgb('color'), rgb('backgroundColor')]; })()"""


def _compare(folder: Path) -> Path:
    files = [folder / "a_file_with_a_rather_long_name_without_any_spaces_in_it.png", folder / "b.png"]
    Image.new("RGB", (300, 200), (200, 30, 30)).save(files[0])
    Image.new("RGB", (64, 64), (90, 90, 90)).save(files[1])
    images = read_two(files)
    judges = {"brightness": Brightness(std=0.1), "pairs_with_a_long_name_without_spaces": BrightnessPairs(bias=0.5)}
    page = folder / "compare.html"
    result = compare_images(images, "a red square to the left of a green triangle", judges)
    page.write_text(compare_page(result, images, [file.name for file in files]))
    return page


def _probe(folder: Path) -> Path:
    reference = shapes_reference_set(6)
    names = ["saturation", "blank", "white_border", "spelling", "neighbours"]
    result = probe_reward(LovesSaturation(), reference, probes=select_probes(names))
    return write_probe(folder / "probe", result, reference)


def _evaluate(folder: Path) -> Path:
    rng = np.random.default_rng(0)

    def scores(pair: Any) -> dict[str, float]:
        sides = ("left", "right")
        columns = {f"good_{side}": pair.extra[f"utility_{side}"] for side in sides}
        for name in ("a_judge_with_a_long_name_without_spaces", "other"):
            columns |= {f"{name}_{side}": columns[f"good_{side}"] + 9 * rng.normal() for side in sides}
        return columns

    pairs = [replace(pair, extra=scores(pair)) for pair in shapes_pairs(60).pairs]
    source = write_rows(folder / "set.jsonl", pairs)
    evaluate(
        str(source),
        columns=("good", "a_judge_with_a_long_name_without_spaces", "other"),
        fuse=True,
        output=folder / "evaluate",
        settings=IntervalSettings(resamples=100),
    )
    return folder / "evaluate" / "evaluation.html"


def _levels(folder: Path) -> list[str]:
    """Files of even images and one that is broken, with long names."""
    folder.mkdir()
    names = [folder / f"a_rather_long_name_without_any_spaces_in_it_{level}.png" for level in range(9)]
    for level, name in enumerate(names[:-1]):
        Image.new("RGB", (96, 64) if level % 2 else (300, 200), (30 * level,) * 3).save(name)
    names[-1].write_bytes(b"no image")
    return [str(name) for name in names]


def _score(folder: Path) -> Path:
    rewards: dict[str, Any] = {"light_with_a_long_name_without_spaces": Brightness(std=0.1)}
    rewards |= {name: load_reward(name) for name in ("saturation", "jpeg_size")}
    rows = [ImageRow(image=name, prompt=f"prompt {k % 2}") for k, name in enumerate(_levels(folder / "score"))]
    return write_score_page(folder / "score.html", score_summary(score_rows(rows, rewards), rewards, seconds=1.0))


def _sample(folder: Path) -> Path:
    """In its folder, with a video."""
    names = [Path(name).name for name in _levels(folder / "samples")][:6]
    frames = [Image.new("RGB", (64, 64), (level,) * 3) for level in (0, 255)]
    frames[0].save(folder / "samples/clip.webp", save_all=True, append_images=frames[1:])
    texts = ["a_prompt_without_any_spaces_" * 3, "a long prompt, with words, " * 20]
    rows = [{"image": name, "prompt": texts[k // 3], "seed": k % 3, "saturation": 0.5} for k, name in enumerate(names)]
    rows[1]["clip"] = "clip.webp"
    facts = [("Model", "a/folder/with/a/long/name_without_spaces" * 3), ("Steps", 10)]
    page = folder / "samples" / "index.html"
    page.write_text(sample_page(rows, size=(64, 64), rewards={"saturation": "share"}, facts=facts))
    return page


def _report(folder: Path, make: Callable[..., Any] = make_result, **options: Any) -> Path:
    metrics = [
        {"iteration": k, "reward_mean": 0.1 * k, "kl": 0.01 * k, "heldout/accuracy": 0.2 + 0.02 * k}
        for k in range(1, 31)
    ]
    return write_report(
        folder / "run",
        before=make(0.25, **options),
        after=make(0.75, **options),
        metrics=metrics,
        config={"model": "shapes-sd3", "a_section": {"a_setting_with_a_long_name": ["value"] * 12}},
        versions={"torch": "2.9.1"},
        costs={"seconds": 1234.5, "phases": {"rollout": 700.0, "update": 400.0}},
        title="Flow-GRPO on a_model_with_a_long_name_without_any_spaces",
        load_code="pipe = StableDiffusion3Pipeline.from_pretrained('a/folder/with/a/long/name')\n" * 2,
        resume_command="visalign train a_configuration_with_a_long_name --output somewhere --resume",
        trained_prompts=0,
    )


def _sets(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    names = ("a_set_with_a_long_name_without_any_spaces", "b")
    for name in names:
        rows = [{"image": f"{k}.png", "mos": k % 7, "good": k % 7 + rng.normal(), "other": k % 3} for k in range(30)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = IntervalSettings(resamples=100)
    sources = [str(folder / f"{name}.jsonl") for name in names]
    evaluate_sets(sources, columns=("good", "other"), output=folder / "sets", settings=settings)
    return folder / "sets" / "leaderboard.html"


def _watch(folder: Path) -> Path:
    runs = [folder / "watch" / name for name in ("a_run_with_a_long_name_without_any_spaces_in_it", "b", "none")]
    for run in runs[:2]:
        (run / "samples").mkdir(parents=True)
        Image.new("RGB", (512, 64)).save(run / "samples" / "000000.png")
        (run / "config.yaml").write_text("run: {iterations: 9}\n")
        rows = [{"iteration": k, "reward_mean": k / 9, "kl": 0.1 * k, "seconds": 9.0} for k in range(1, 4)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (runs[1] / "ended.txt").write_text("failed\nOut of memory (a message with a/rather/long/path/without/spaces).\n")
    (page := folder / "watch.html").write_text(build_page(runs, reload=60))
    return page


def _progress(folder: Path) -> Path:
    voters = [{"name": "Ada", "is_judge": False, "votes": 3, "seconds": 2.0, "last": 0.0}]
    counts = {"tasks": 9, "goal": 3, "votes": 3, "target": 27, "voters": voters}
    page = folder / "progress.html"
    page.write_text(progress_page(counts, vote_url="http://here/?invite=x", file="v.sqlite"))
    return page


PAGES: dict[str, Callable[[Path], Path]] = {
    "sets": _sets,
    "watch": _watch,
    "progress": _progress,
    "compare": _compare,
    "probe": _probe,
    "evaluate": _evaluate,
    "score": _score,
    "sample": _sample,
    "report": _report,
    "text_report": lambda folder: _report(folder / "text", make_text_result, long=True),
}
"""Name -> what writes the page into a folder, with long names and words where the widths could break."""


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name -> page, written when it is first asked for."""
    folder = tmp_path_factory.mktemp("pages")
    return cache(lambda name: PAGES[name](folder))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert PATH is not None
    session = Browser(PATH)
    yield session
    session.close()


@pytest.mark.parametrize(("size", "dark"), [("desktop", False), ("phone", True)], ids=SIZES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_quiet_and_fits(
    browser: Browser, page_of: Callable[[str], Path], name: str, size: str, dark: bool
) -> None:
    width, height = SIZES[size]
    browser.open(page_of(name), width=width, height=height, dark=dark)
    assert browser.seen("Runtime.exceptionThrown") == []
    assert browser.seen("Runtime.consoleAPICalled") == []
    assert browser.seen("Log.entryAdded") == []
    urls = [event["request"]["url"][:60] for event in browser.seen("Network.requestWillBeSent")]
    assert [url for url in urls if not url.startswith(("file:", "data:", "about:"))] == []
    inner, client = browser.value("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert inner <= client <= width, browser.value(OVERFLOW)
    assert browser.value(OVERFLOW) == []
    assert browser.value(IMAGES) == []
    ink, paper = (_luminance(colour) for colour in browser.value(COLOURS))
    assert (paper < 0.1) is dark, "the page follows the colour scheme"
    assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7, "WCAG 2.2, 1.4.6"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_used_by_keyboard(browser: Browser, page_of: Callable[[str], Path], name: str) -> None:
    browser.open(page_of(name), width=1280, height=900, dark=False)
    links = set(browser.value("[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))"))
    browser.press("Tab", 9)
    assert browser.value(FOCUSED) == "#content", "first the link that skips to the content"
    box = browser.value("(r => [r.left, r.top, r.width])(document.activeElement.getBoundingClientRect())")
    assert box[0] >= 0 and box[1] >= 0 and box[2] > 20, "it can be seen while it has the focus"
    outline = browser.value("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "the focus can be seen"
    reached = {"#content"}
    for _ in range(MOST_TABS):
        browser.press("Tab", 9)
        focused = browser.value(FOCUSED)
        if focused is None:
            break
        reached.add(focused)
    assert links <= reached, f"not reached by Tab: {links - reached}"
    regions = browser.value(
        "[...document.querySelectorAll('.scroll')].filter(e => !e.closest('details:not([open])'))"
        ".map(e => e.getAttribute('aria-label'))"
    )
    assert set(regions) <= reached, "what scrolls sideways can be scrolled by keyboard"
    missing = browser.value(
        "[...document.querySelectorAll('a[href^=\"#\"]')].map(a => a.getAttribute('href').slice(1))"
        ".filter(id => !document.getElementById(id))"
    )
    assert missing == [], "links within the page lead somewhere"
    browser.open(page_of(name), width=1280, height=900, dark=False)
    browser.press("Tab", 9)
    browser.press("Enter", 13)
    browser.until("location.hash", "#content")
    assert browser.value("document.querySelectorAll('h1').length") == 1
    assert browser.value("document.documentElement.lang") == "en"


@pytest.mark.skipif(not AXE.is_file(), reason="npm install axe-core in the working folder to check the pages by it")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_serious(browser: Browser, page_of: Callable[[str], Path], name: str, dark: bool) -> None:
    browser.open(page_of(name), width=390 if dark else 1280, height=900, dark=dark)
    browser.value(f"{AXE.read_text()};0")
    violations = browser.value(
        "axe.run().then(r => r.violations.filter(v => ['serious', 'critical'].includes(v.impact))"
        ".map(v => [v.id, v.nodes[0].html.slice(0, 200)]))"
    )
    assert violations == []


def _luminance(colour: list[float]) -> float:
    """Relative luminance of sRGB levels, as WCAG defines it."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_tables_are_sorted_filtered_and_copied_and_images_enlarged(
    browser: Browser, page_of: Callable[[str], Path]
) -> None:
    browser.open(page_of("evaluate"), width=1280, height=900, dark=False)
    names = "[...document.querySelectorAll('#leaderboard tbody th')].map(e => e.textContent.trim())"
    original = browser.value(names)
    browser.value("document.querySelectorAll('#leaderboard button.sort')[1].click()")
    assert browser.value(names) == original[::-1] != original, "from the smallest share to the largest"
    browser.value("document.querySelectorAll('#leaderboard button.sort')[1].click()")
    assert browser.value(names) == original
    visible = "[...document.querySelectorAll('#agreement tbody tr')].filter(e => e.offsetHeight).length"
    before = browser.value(visible)
    browser.value(
        "(() => { const e = document.querySelector('#agreement input'); e.value = 'pickscore';"
        " e.dispatchEvent(new Event('input')); })()"
    )
    assert before > 8 and browser.value(visible) == 1
    browser.value("document.querySelector('#worst img').click()")
    assert browser.value("document.querySelector('dialog').open")
    browser.until("document.querySelector('dialog img').clientWidth > 400")
    assert browser.seen("Runtime.exceptionThrown") == []
