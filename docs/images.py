# SPDX-License-Identifier: Apache-2.0
"""Images of every page for the site, of runs: python docs/images.py [--runs PLACE] [NAME ...]

Needs Chromium on the path. A page that is already in PLACE is captured as it is; the others are created
there, the report by `visalign quickstart`. Images that are there are replaced.
"""

from __future__ import annotations

import argparse
import base64
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.browser import Browser, find_browser
from tests.support.servers.rewards import serving
from visalign.evaluation.heldout.result import load_heldout
from visalign.evaluation.pages.samples import shot as encode_shot
from visalign.pipelines.cli.app import app
from visalign.pipelines.collect.server import vote_server
from visalign.pipelines.collect.store import Plan, VoteStore
from visalign.pipelines.collect.tasks import Form, read_tasks
from visalign.pipelines.shared.parts import evenly_spaced

FOLDER = Path(__file__).parent / "images"
WIDTH, HEIGHT, SHOWN = 1180, 860, 1000
"""Width of the window and of the image, in pixels."""
LOADED = "Promise.all([...document.images].map(i => { i.loading = 'eager'; return i.decode() })).then(() => 0)"
"""Images below the fold load when they are scrolled to, and nobody scrolls here."""
PROMPT = "a red circle left of a blue square"
JUDGES = ("-r", "clip_score", "-r", "hpsv3", "-r", "saturation")
PAIRS = ("-r", "reward_dance_pairs")
DRAWN = ("sample", PROMPT, "two green triangles", "a yellow square above a red triangle")
PAGES = {
    "before_after": ("report/report.html", ("quickstart", "-o", "report")),
    "report": ("report/report.html#images", ("quickstart", "-o", "report")),
    "text": ("text/report.html", ("train", "text_grpo", "-o", "text")),
    "evaluate": (
        "evaluate/evaluation.html#calibration",
        ("evaluate", "shapes:pairs", "--limit", "200", *JUDGES, "-o", "evaluate"),
    ),
    "score": ("scores.html", ("score", "drawn/images.jsonl", *JUDGES, "--page", "scores.html")),
    "compare": (
        "compare.html#verdicts",
        ("compare", "one/0000_0.png", "one/0000_1.png", "-p", PROMPT, *JUDGES, *PAIRS, "-o", "compare.html"),
    ),
    "rank": (
        "rank.html",
        ("rank", "one", "-p", PROMPT, *PAIRS, "--budget", "0.8", "-o", "rank.html"),
    ),
    "agree": (
        "agree/agreement.html#overall",
        ("agree", "shapes:pairs", "--limit", "150", *JUDGES, "-r", "sharpness", "-o", "agree"),
    ),
    "collect": ("collect.png", ()),
    "votes": (
        "votes.html",
        ("collect", "votes.sqlite", "--report", "votes.html"),
    ),
    "probe": ("probe/probe.html", ("probe-reward", "clip_score", "--count", "48", "-o", "probe")),
}
"""Name -> (its page, from which section on it is shown, and the command that writes it)."""


def visalign(*words: str) -> None:
    """Run a command in this process, which the page then names."""
    sys.argv = ["visalign", *words]
    app(list(words), standalone_mode=False)


def capture(browser: Browser, page: Path, section: str, to: Path) -> None:
    """Capture a page from one of its sections on, as a small WebP."""
    browser.open(page.resolve(strict=True), width=WIDTH, height=HEIGHT, dark=False)
    browser.value(LOADED)
    script = f"document.getElementById('{section}').getBoundingClientRect().top" if section else "0"
    top = int(browser.value(script))
    with tempfile.TemporaryDirectory() as folder:
        browser.image(Path(folder) / "page.png")
        with Image.open(Path(folder) / "page.png") as image:
            part = image.convert("RGB").crop((0, top, image.width, min(top + HEIGHT, image.height)))
    save(part, to)


def save(image: Image.Image, to: Path) -> None:
    """Write a small WebP."""
    to.parent.mkdir(exist_ok=True)
    resized = image.convert("RGB").resize((SHOWN, SHOWN * image.height // image.width))
    resized.save(to, quality=70, method=6)


def before_after(browser: Browser, run: Path, to: Path) -> None:
    """Capture the same held-out prompts before and after a run: evenly spaced ones, with the first seed."""
    results = [load_heldout(run / f"{side}.npz") for side in ("before", "after")]
    first = [row for row in results[0].image_index.tolist() if results[0].seeds[row] == results[0].seeds[0]]
    rows = evenly_spaced(first, 8)
    parts = ["<body style='font: 15px sans-serif; margin: 12px'><table style='text-align: center'><tr><td></td>"]
    parts += [f"<td style='width: 130px; vertical-align: bottom'>{results[0].title(row)}</td>" for row in rows]
    for side, result in zip(("before", "after"), results, strict=True):
        parts.append(f"<tr><th style='padding-right: 10px'>{side}</th>")
        for shot in (encode_shot(row, result) for row in rows):
            parts.append(f"<td><img src='{shot['source']}' width=130 height=130><br>{shot['verdict']}</td>")
    page = Path("before_after.html")
    page.write_text(f"<meta charset=utf-8>{''.join(parts)}</table>", encoding="utf-8")
    browser.open(page, width=WIDTH, height=420, dark=False)
    browser.image(Path("before_after.png"))
    with Image.open("before_after.png") as image:
        height = int(browser.value("document.querySelector('table').getBoundingClientRect().bottom")) + 8
        save(image.crop((0, 0, image.width, min(height, image.height))), to)


def voting(browser: Browser) -> None:
    """Build the page of `visalign collect` with a half-finished vote and the votes of three voters."""
    store = VoteStore.create(
        Path("votes.sqlite"),
        read_tasks(["shapes:pairs"], single=False),
        Form(checklist=("Is every object there?", "Are the colours right?"), boxes=True, text=True),
        Plan(votes=0, seed=3),
    )
    draws = random.Random(0)
    for name, care in (("Ada", 3.0), ("Bob", 1.5), ("Eve", 0.0)):
        store.join(name)
        for _ in range(120):
            pair = store.next(name)
            assert pair is not None
            gap = float(pair.task.extra["utility_left"]) - float(pair.task.extra["utility_right"])
            left = draws.random() < 1 / (1 + math.exp(-care * gap * (-1 if pair.swapped else 1)))
            answer = {"choice": "left" if left else "right"}
            store.vote(name, pair.assignment, answer, client=str(pair.assignment), seconds=draws.expovariate(0.3))
    with serving(vote_server(store)) as url:
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=WIDTH,
            height=HEIGHT,
            deviceScaleFactor=1,
            mobile=False,
        )
        browser.visit(url)
        browser.value("document.querySelector('#name').value = 'Zoe'")
        browser.value("document.querySelector('#join form').requestSubmit()")
        while not browser.value("document.images.length && [...document.images].every((i) => i.naturalWidth)"):
            time.sleep(0.1)
        browser.press("ArrowLeft", 37)
        browser.value("document.querySelectorAll('.add')[1].click()")
        screenshot = browser.call("Page.captureScreenshot", captureBeyondViewport=False)
    store.close()
    Path("collect.png").write_bytes(base64.b64decode(screenshot["data"]))


def main() -> None:
    """Make the requested images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *PAGES], help="all where none is named")
    parser.add_argument("--runs", type=Path, default=None, help="where the runs are and stay")
    options = parser.parse_args()
    runs = options.runs or Path(tempfile.mkdtemp())
    runs.mkdir(exist_ok=True)
    os.chdir(runs)
    path = find_browser()
    if path is None:
        raise SystemExit("There is no Chromium on the path; on Debian: apt-get install chromium.")
    browser = Browser(path)
    for name in options.names or PAGES:
        (page, _, section), command = PAGES[name][0].partition("#"), PAGES[name][1]
        if name in ("score", "compare", "rank") and not Path("drawn").is_dir():
            visalign(*DRAWN, "--seeds", "0-7", "-o", "drawn")
            visalign("sample", PROMPT, "--seeds", "0-7", "-o", "one")
        if name in ("collect", "votes") and not Path("votes.sqlite").is_file():
            voting(browser)
        if name == "collect":
            save(Image.open(page), FOLDER / "collect.webp")
            continue
        if not Path(page).is_file():
            visalign(*command)
        if name == "before_after":
            before_after(browser, Path(page).parent, FOLDER / f"{name}.webp")
        else:
            capture(browser, Path(page), section, FOLDER / f"{name}.webp")
        print(f"{FOLDER.name}/{name}.webp: {(FOLDER / f'{name}.webp').stat().st_size / 1000:.0f} kB")
    browser.close()


if __name__ == "__main__":
    main()
