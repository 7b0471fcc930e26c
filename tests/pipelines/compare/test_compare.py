# SPDX-License-Identifier: Apache-2.0
"""`visalign compare` and `visalign rank`: which, by how much, how sure, both orders, what is refused, the pages."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from tests.support.judges.brightness import Brightness, BrightnessPairs, grey
from visalign.evaluation.pages.compare_page import compare_page, in_words, margin
from visalign.evaluation.pages.rank_page import sentences
from visalign.interfaces import Scores
from visalign.pipelines.cli.app import app
from visalign.pipelines.compare.compare import compare_images, ranking_page, ranking_record
from visalign.rewards.pairs.ranking import rank

TWO = list(grey([0.25, 0.75]))


def one(judge: Any, images: list[Tensor] = TWO) -> Mapping[str, Any]:
    [entry] = compare_images(images, "x", {"judge": judge})["judges"]
    return entry


def test_a_score_without_uncertainty_says_which_but_not_how_sure() -> None:
    entry = one(Brightness())
    assert entry["winner"] == "B" and entry["difference"] == pytest.approx(-0.5)
    assert entry["prob"] is None and entry["difference_std"] is None
    assert entry["notes"] == ["it gives no uncertainty; invisible changes move its scores by up to 0.00392"]
    assert in_words(entry) == "B is better" and margin(entry) == "−0.500 (brightness)"


def test_a_standard_deviation_says_how_sure() -> None:
    entry = one(Brightness(std=0.5))
    # Φ(−0.5 / √(0.5² + 0.5²)) = Φ(−1/√2)
    assert entry["prob"] == pytest.approx(0.5 * (1 + math.erf(-0.5)), abs=1e-6)
    assert in_words(entry) == "B is better, 76 % sure"
    assert margin(entry) == "−0.500 (brightness), −0.7 standard deviations"


def test_log_odds_say_how_sure_by_themselves_and_direction_counts() -> None:
    entry = one(Brightness(unit="Bradley-Terry logits", higher_is_better=False))
    assert entry["winner"] == "A" and entry["prob"] == pytest.approx(1 / (1 + math.exp(-0.5)), abs=1e-6)
    assert "lower is better" in entry["notes"]


@pytest.mark.parametrize(
    ("gap", "winner", "sure", "words"),
    [
        (0.00005, "tie", None, "a tie"),
        (0.008, "B", False, "B rather than A, unsure"),
        (0.02, "B", True, "B is better"),
    ],
)
def test_a_difference_counts_against_what_nobody_sees(gap: float, winner: str, sure: Any, words: str) -> None:
    """A grey level moves this judge by 0.0039: "A is better" was said at a difference of 0.00005."""
    entry = one(Brightness(), list(grey([0.5, 0.5 + gap])))
    assert (entry["winner"], entry["sure"], in_words(entry)) == (winner, sure, words)


@pytest.mark.parametrize(("odds", "winner", "sure"), [(0.1, "tie", None), (-0.6, "B", False), (2.0, "A", True)])
def test_a_probability_is_sure_unsure_or_a_tie(odds: float, winner: str, sure: bool | None) -> None:
    entry = one(BrightnessPairs(scale=odds), list(grey([1.0, 0.0])))
    assert (entry["winner"], entry["sure"]) == (winner, sure)
    comparison = compare_images(list(grey([1.0, 0.0])), "x", {"a": BrightnessPairs(scale=-0.6)})
    assert comparison["summary"] == "B rather than A, but the judge is unsure." and comparison["unsure"] == ["a"]
    assert "sure from 75%" in comparison["rule"]


def test_both_orders_take_the_position_bias_out() -> None:
    judge = BrightnessPairs(scale=4.0, bias=1.0)
    entry = one(judge)
    assert judge.asked == [(0.25, 0.75), (0.75, 0.25)] and judge.rounds == 1
    # ℓ_AB = −2 + 1, ℓ_BA = 2 + 1
    assert entry["difference"] == pytest.approx(-2.0, abs=1e-5)
    assert entry["position_bias"] == pytest.approx(1.0, abs=1e-5)
    assert entry["winner"] == "B" and entry["same_winner"] and in_words(entry) == "B is better, 88 % sure"
    assert [order["log_odds"] for order in entry["orders"]] == pytest.approx([-1.0, 3.0], abs=1e-5)
    assert one(BrightnessPairs(hard=True))["difference"] == pytest.approx(-12.0), "a certain judge is finite"


def test_a_winner_that_depends_on_the_side_is_undecided() -> None:
    entry = one(BrightnessPairs(scale=2.0, bias=3.0))
    assert entry["winner"] == "undecided" and entry["same_winner"] is False
    assert entry["notes"] == ["its winner depends on which image is on the left"]
    assert in_words(entry) == "undecided, 27 % for A"


def test_one_failed_order_leaves_the_other() -> None:
    entry = one(BrightnessPairs(scale=4.0, fails=lambda left, right: left > right))
    assert entry["winner"] == "B" and entry["position_bias"] is None
    assert "B on the left: no answer" in entry["notes"] and entry["orders"][1]["log_odds"] is None
    assert one(BrightnessPairs(fails=lambda left, right: True))["winner"] == "failed"


class Explains(Brightness):
    """Writes why, in parts and in words that are not to be trusted."""

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
        scores = super().score(images, prompts, metadata)
        parts = {"light_part": scores.value.clone()}
        texts = ["<script>bad</script>", *["fine"] * (len(scores) - 1)]
        return Scores(value=scores.value, valid=scores.valid, unit="x", parts=parts, text=texts)


def test_votes_are_counted_and_the_page_shows_why() -> None:
    judges: dict[str, Any] = {"light": Explains(), "dark": Brightness(higher_is_better=False)}
    judges |= {"pairs": BrightnessPairs(bias=0.5), "silent": BrightnessPairs(fails=lambda left, right: True)}
    result = compare_images(TWO, "<b>bold</b>", judges)
    assert result["votes"] == {"B": ["light", "pairs"], "A": ["dark"], "failed": ["silent"]}
    assert result["summary"] == "B is better for 2 of 3 judges, A for 1."
    json.dumps(result, allow_nan=False)
    page = compare_page(result, TWO, ["first.png", "second.png"])
    assert page.count('src="data:image/png') == 2 and "Image A: first.png" in page
    assert all(text in page for text in ("light part", "&lt;script&gt;bad")) and "<b>bold" not in page
    assert page.count("<script") == 1
    assert "Being on the left adds +0.50" in page and "could not judge" in page


def test_summaries() -> None:
    up, down = Brightness(), Brightness(higher_is_better=False)
    split = compare_images(TWO, "x", {"a": up, "b": down})
    assert split["summary"] == "The judges are split: 1 for A, 1 for B."
    assert compare_images(TWO, "x", {"a": up})["summary"] == "B is better."
    same = list(grey([0.5, 0.5]))
    assert compare_images(same, "x", {"a": up})["summary"].startswith("No winner: 1 of 1 judges see a tie")
    silent = BrightnessPairs(fails=lambda left, right: True)
    assert compare_images(TWO, "x", {"a": silent})["summary"] == "No judge could judge the two images."


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a.png is grey, b.png is red; c.png is broken."""
    Image.new("RGB", (12, 8), (90, 90, 90)).save(tmp_path / "a.png")
    Image.new("RGB", (8, 8), (220, 30, 30)).save(tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def visalign(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_command_compares_and_writes(images: Path) -> None:
    base = ("compare", "a.png", "b.png", "-p", "a red square", "-r", "saturation", "-r", "jpeg_size")
    outcome = visalign(*base, "--option", "jpeg_size.quality=50", "-o", "page.html")
    assert outcome.exit_code == 0, outcome.output
    assert "saturation" in outcome.output and "B is better" in " ".join(outcome.output.split())
    page = (images / "page.html").read_text()
    assert "Image A: a.png" in page and "12×8" in page
    again = visalign(*base, "-o", "page.html")
    assert again.exit_code == 2 and "'page.html' exists, and nothing is overwritten." in again.output
    cached = [visalign(*base, "--cache", "kept", "--json") for _ in range(2)]
    assert cached[0].stdout == cached[1].stdout and Path("kept/judgements.sqlite").is_file()
    comparison = json.loads(visalign(*base, "--json").stdout)
    assert comparison == json.loads(cached[1].stdout)
    assert comparison["images"] == {"A": "a.png", "B": "b.png"} and len(comparison["judges"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["c.png", "-r", "saturation"], "Image B cannot be read"),
        (["gone.png", "-r", "saturation"], "Image B cannot be read: no such image file: gone.png."),
        (["b.png", "-r", "saturatoin"], "There is no reward 'saturatoin'. Did you mean 'saturation'?"),
    ],
)
def test_the_command_refuses(images: Path, arguments: list[str], message: str) -> None:
    outcome = visalign("compare", "-p", "x", "a.png", *arguments)
    assert outcome.exit_code == 2 and message in " ".join(outcome.output.split())


def test_rank_puts_the_best_first_and_keeps_what_failed(images: Path) -> None:
    outcome = visalign("rank", ".", "-p", "x", "-r", "saturation", "--json")
    assert outcome.exit_code == 1
    result = json.loads(outcome.stdout)
    assert [row["image"] for row in result["images"]] == ["b.png", "a.png", "c.png"]
    assert [row["place"] for row in result["images"]] == [1, 2, None] and result["calls"] == 2
    assert "c.png" in result["images"][2]["reason"] and result["images"][2]["score"] is None
    table = visalign("rank", "a.png", "b.png", "-p", "x", "-r", "saturation", "-o", "r.json")
    assert table.exit_code == 0 and "saturation scored 2 images" in table.output
    assert json.loads(Path("r.json").read_text())["unit"] == result["unit"]
    wrong = visalign("rank", "a.png", "b.png", "-p", "x", "-r", "saturation", "--budget", "3")
    assert wrong.exit_code == 2 and "budget is 3.0; allowed are shares" in wrong.output


def test_an_option_of_one_value_given_twice_is_refused(images: Path) -> None:
    """`rank -r a -r b` ranked by b without a word about a."""
    twice = visalign("rank", "a.png", "b.png", "-p", "x", "-r", "jpeg_size", "-r", "saturation")
    message = " ".join(twice.output.replace("│", " ").split())
    assert twice.exit_code == 2 and "'-r' was given 2 times; it takes one value" in message
    prompts = visalign("score", "a.png", "-p", "x", "--prompt", "y", "-r", "saturation")
    assert prompts.exit_code == 2 and "was given 2 times" in prompts.output
    both = visalign("compare", "a.png", "b.png", "-p", "x", "-r", "saturation", "-r", "jpeg_size", "--json")
    assert both.exit_code == 0 and len(json.loads(both.stdout)["judges"]) == 2


def test_tables_of_compare_rank_and_score_are_csv_and_latex(images: Path) -> None:
    base = ("-p", "x", "-r", "saturation", "--tables")
    assert visalign("compare", "a.png", "b.png", *base, "two").exit_code == 0
    assert visalign("rank", ".", *base, "places").exit_code == 1
    assert visalign("score", "a.png", "c.png", *base, "scores").exit_code == 1
    read = {path.stem: list(csv.DictReader(path.read_text().splitlines())) for path in images.rglob("*.csv")}
    assert sorted(read) == ["comparison", "ranking", "scores", "values"]
    assert sorted(path.stem for path in images.rglob("*.tex")) == sorted(read)
    [judge] = read["comparison"]
    assert (judge["winner"], judge["sure"], judge["prob_A"]) == ("B", "yes", "")
    assert float(judge["difference"]) == float(judge["A"]) - float(judge["B"]) < 0
    assert [(row["image"], row["place"]) for row in read["ranking"]] == [("b.png", "1"), ("a.png", "2"), ("c.png", "")]
    assert read["ranking"][0]["score"] == judge["B"] and "c.png" in read["ranking"][2]["reason"]
    assert [row["saturation"] for row in read["scores"]] == [judge["A"], ""]
    pairs = visalign("rank", "a.png", "b.png", "-p", "x", "-r", "reward_dance_pairs", "--tables", "pairs")
    assert pairs.exit_code == 0, pairs.output
    [call, *_] = csv.DictReader(Path("pairs/calls.csv").read_text().splitlines())
    assert {call["left"], call["right"]} == {"a.png", "b.png"} and 0 < float(call["prob"]) < 1
    again = visalign("compare", "a.png", "b.png", *base, "two")
    assert again.exit_code == 2 and "'two' exists, and nothing is overwritten." in again.output


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
    level = {name: round(0.2 * (number + 1), 4) for number, name in enumerate(names)}
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
    text, calls = " ".join(sentences(result)), result["calls"]
    orders = {(c["left"], c["right"]) for c in result["asked"]}
    both = sum((right, left) in orders for left, right in orders) // 2
    assert f"{calls} calls, as many as {100 * calls / 6:.1f}\xa0% of the 6 pairs of images; " in text
    assert both > 1 and f"; asked in both orders: {both} pairs." in text
    assert re.search(r"on the left adds \+(1\.0|0\.9)\d log-odds \(\+0\.\d+ to \+1\.\d+\)", text)
    assert re.search(r"of two equals the left one wins 7[23]\.\d\xa0%\.", text) and "no clear" not in text
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
