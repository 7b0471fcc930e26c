# SPDX-License-Identifier: Apache-2.0
"""`visalign evaluate`: numbers, resumed scoring, failures, the page, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

from tests.support.models.clip import save_tiny_clip
from visalign.data.sets.records import PreferenceSet
from visalign.data.sets.sources import shapes_pairs, shapes_quality, write_rows
from visalign.data.sets.trained_images import write_trained_images
from visalign.errors import UserError
from visalign.evaluation.rewards.comparison import leaderboard_of_sets
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.rewards.preferences import evaluate_preferences
from visalign.interfaces import Preferences, Scores
from visalign.pipelines.cli.app import app
from visalign.pipelines.evaluate.job import evaluate, evaluate_sets
from visalign.pipelines.evaluate.scores import column_scores, score_pairs, score_quality
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.identity import Identity

FAST = IntervalSettings(resamples=100)


class Brightness:
    """The mean level of an image; counts how often it was asked, and can be stopped."""

    name, unit, range, higher_is_better = "brightness", "level", (0.0, 255.0), True

    def __init__(self, *, stop_after: int | None = None, version: int = 1) -> None:
        self.asked, self.stop_after = 0, stop_after
        self.identity = Identity(judge=self.name, model="mean", options={"version": version})

    def score(self, images: Any, prompts: Sequence[str], metadata: Any = None) -> Scores:
        if self.stop_after is not None and self.asked >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += len(prompts)
        self.metadata = metadata
        values = torch.tensor([float(np.asarray(image).mean()) for image in images])
        valid = torch.tensor(["cross" not in prompt for prompt in prompts])
        reason = [None if ok else "no crosses, please" for ok in valid]
        return Scores(value=torch.where(valid, values, torch.nan), valid=valid, unit=self.unit, reason=reason)


def test_judges_of_edits_are_told_the_source():
    [pair] = shapes_pairs(1).pairs
    both = {"metadata": json.dumps({"source": ["cup.png", "table.png"]})}
    columns = [
        {"source": "cup.png"},
        both,
        {"source": "coco", "record": {"tag": "colors"}},
        {"metadata": {"tag": "a"}},
        {},
    ]
    pairs = [replace(pair, extra=extra) for extra in columns]
    judge = Brightness()
    score_pairs(PreferenceSet(name="edits", pairs=tuple(pairs)), judge, batch_size=16)
    sources = [{"source": "cup.png"}, {"source": ["cup.png", "table.png"]}, {"tag": "colors"}, {"tag": "a"}, None]
    assert judge.metadata == [source for source in sources for _ in range(2)]


class Sided:
    """Prefers the brighter image, and the left side by log-odds of 2."""

    name = "sided"

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Any = None) -> Preferences:
        gap = [float(np.asarray(a).mean() - np.asarray(b).mean()) for a, b in zip(left, right, strict=True)]
        odds = torch.tensor(gap) / 20 + 2
        return Preferences(prob=odds.sigmoid(), valid=torch.ones(len(prompts), dtype=torch.bool), log_odds=odds)


def table(folder: Path, count: int = 120, **columns: Any) -> Path:
    """A set of the shapes world with columns of scores."""
    rng = np.random.default_rng(0)
    pairs = []
    for pair in shapes_pairs(count).pairs:
        noise = rng.normal(0, 0.3, 2)
        scores = {f"good_{side}": pair.extra[f"utility_{side}"] + noise[n] for n, side in enumerate(("left", "right"))}
        scores["coin_prob"] = float(rng.random())
        pairs.append(replace(pair, extra={**scores, **{key: make(pair) for key, make in columns.items()}}))
    return write_rows(folder / "set.jsonl", pairs)


def test_a_judge_tells_pairs_that_it_was_trained_on(tmp_path: Path) -> None:
    model, copy = save_tiny_clip(tmp_path / "model"), tmp_path / "copy.png"
    for number, name in enumerate("abcdef"):
        levels = np.random.default_rng(number).integers(0, 256, (9, 8, 3), dtype=np.uint8)
        Image.fromarray(levels).save(tmp_path / f"{name}.png")
    copy.write_bytes((tmp_path / "b.png").read_bytes())
    sides = (("a.png", "copy.png", "left"), ("c.png", "d.png", "right"), ("e.png", "f.png", "left"))
    rows = [{"prompt": "a", "image_left": a, "image_right": b, "label": label} for a, b, label in sides]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments: dict[str, Any] = {"rewards": ["clip_score"], "options": [f"model={model}"], "settings": FAST}

    def trained_on() -> list[str]:
        result = evaluate(str(tmp_path / "set.jsonl"), **arguments)
        return [item["message"] for item in result["set"]["findings"] if item["kind"] == "trained on"]

    assert trained_on() == []
    write_trained_images(model, [str(tmp_path / "b.png")], base="clip")
    write_trained_images(model, [], base=model)  # learning goes on from that model
    (message,) = trained_on()
    assert message.startswith("clip_score: 1 of 3 rows show an image that it was trained on")


def test_precomputed_scores_are_measured_and_compared(tmp_path: Path) -> None:
    source = table(tmp_path)
    result = evaluate(source=str(source), columns=("good", "coin"), settings=FAST)
    good, coin = result["judges"]
    pairs = shapes_pairs(120).pairs
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    margin = np.array([row["good_left"] - row["good_right"] for row in rows])
    label = np.array([pair.label for pair in pairs])
    right = np.mean(np.sign(margin) == np.sign(label - 0.5))
    assert good["agreement"]["half_credit"]["micro"]["estimate"] == pytest.approx(right)
    assert right > 0.75 and coin["agreement"]["half_credit"]["micro"]["estimate"] < 0.65
    (comparison,) = result["comparisons"]
    assert comparison["difference"]["low"] > 0 and comparison["mcnemar"]["p_value"] < 0.01
    assert {row["name"] for row in good["slices"]["category"]} == {pair.category for pair in pairs}
    assert sum(row["pairs"] for row in good["slices"]["category"]) == 120
    assert good["calibration"]["scaled"]["nll"] < coin["calibration"]["nll"]["estimate"]
    json.dumps(result, allow_nan=False)


def test_a_row_without_a_score_is_no_zero(tmp_path: Path) -> None:
    source = table(tmp_path, gap_left=lambda pair: 1.0, gap_right=lambda pair: "" if "red" in pair.prompt else 0.0)
    (judge,) = evaluate(source=str(source), columns=("gap",), settings=FAST)["judges"]
    missing = sum("red" in pair.prompt for pair in shapes_pairs(120).pairs)
    assert missing and judge["counts"]["failed"] == missing
    assert judge["counts"]["failures"] == {"no number in the column": missing}
    assert any("have no score" in note for note in judge["notes"])


@pytest.mark.parametrize("kind", ["pairs", "quality"])
def test_too_many_missing_scores_are_refused(tmp_path: Path, kind: str) -> None:
    """Five of six texts are no scores: the sixth pair says nothing about the set."""
    sides = {"image_left": "l.png", "image_right": "r.png", "label": "left", "mine_right": 1}
    for number in range(6):
        score = {"mine": "x" if number > 1 else number, "mine_left": "x" if number else 2}
        own = sides if kind == "pairs" else {"image": f"{number}.png", "mos": number}
        row = {"prompt": f"{number}", **score, **own}
        with (tmp_path / "set.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    options: dict[str, Any] = {"source": str(tmp_path / "set.jsonl"), "columns": ["mine"], "settings": FAST}
    with pytest.raises(UserError, match=r"mine: [45] of 6 scores are missing, above max_failure_rate 0\.5.*no number"):
        evaluate(**options)
    assert evaluate(**options, max_failure_rate=1.0)["judges"]


def test_a_pairwise_judges_columns_are_as_if_it_were_asked(tmp_path: Path) -> None:
    pairs = shapes_pairs(60)
    scores = score_pairs(pairs, Sided())
    rows = [
        {"j_prob": 1 / (1 + np.exp(-(2 * m - s))), "j_prob_swapped": 1 / (1 + np.exp(s))}
        for m, s in zip(scores.margin, scores.swapped if scores.swapped is not None else [], strict=True)
    ]
    dataset = PreferenceSet(name="x", pairs=tuple(replace(p, extra=e) for p, e in zip(pairs.pairs, rows, strict=True)))
    np.testing.assert_allclose(column_scores(dataset, "j").margin, scores.margin, atol=1e-6)
    turned = replace(dataset, pairs=tuple(pair.swapped() for pair in dataset.pairs))
    np.testing.assert_allclose(column_scores(turned, "j").margin, -scores.margin, atol=1e-6)
    with pytest.raises(UserError, match="needed are the columns mine and b_right, or b_prob"):
        column_scores(dataset, "b", names={"b_left": "mine"})
    with pytest.raises(UserError, match="j_prob is the probability that the left image is better"):
        column_scores(dataset, "j", higher_is_better=False)


def test_a_stopped_scoring_goes_on_where_it_was(tmp_path: Path) -> None:
    pairs, log = shapes_pairs(40), tmp_path / "scores.jsonl"
    expected = score_pairs(pairs, Brightness())
    stopped = Brightness(stop_after=24)
    with pytest.raises(KeyboardInterrupt):
        score_pairs(pairs, stopped, log=log, batch_size=8)
    assert stopped.asked == 24
    logged = sum(json.loads(line).get("value") is not None for line in log.read_text().splitlines())
    with log.open("ab") as file:
        file.write('{"key": "m", "reason": "zerstö'.encode()[:-1])  # what a killed process leaves
    resumed = Brightness()
    scores = score_pairs(pairs, resumed, log=log, batch_size=8)
    np.testing.assert_array_equal(scores.margin, expected.margin)
    failed = {pair.prompt for pair in pairs.pairs if "cross" in pair.prompt}
    assert failed and scores.failures() == {"no crosses, please": sum(p.prompt in failed for p in pairs.pairs)}
    assert resumed.asked == 2 * len(pairs) - logged
    again = Brightness()
    score_pairs(pairs, again, log=log)
    assert again.asked == 2 * sum(p.prompt in failed for p in pairs.pairs)  # only what failed is asked again


def test_a_pairwise_judge_is_asked_in_both_orders() -> None:
    pairs = shapes_pairs(60)
    scores = score_pairs(pairs, Sided())
    report = evaluate_preferences(pairs, scores, FAST)
    bright = score_pairs(pairs, Brightness())
    valid = bright.judged
    np.testing.assert_allclose(scores.margin[valid], bright.margin[valid] / 20, atol=1e-5)
    assert report["swap"]["position_bias"] == pytest.approx(2.0, abs=1e-5)
    assert report["swap"]["same_winner"] < 1 and report["swap"]["left_share"] > 0.6


def test_a_judge_that_always_fails_stops_the_run() -> None:
    class Broken(Brightness):
        def score(self, images: Any, prompts: Sequence[str], metadata: Any = None) -> Scores:
            nothing = torch.full((len(prompts),), torch.nan)
            return Scores(value=nothing, valid=torch.zeros(len(prompts), dtype=torch.bool), unit="level")

    with pytest.raises(RewardError, match="over max_failure_rate"):
        score_pairs(shapes_pairs(60), Broken())
    with pytest.raises(ValueError, match=r"scored none of 6 pairs"):
        evaluate_preferences(shapes_pairs(6), score_pairs(shapes_pairs(6), Broken()))


def test_a_quality_set(tmp_path: Path) -> None:
    records = shapes_quality(80)
    rng = np.random.default_rng(0)
    rows = [replace(r, extra={"q": r.mos + rng.normal(0, 0.3), "off": -r.mos}) for r in records.records]
    source = write_rows(tmp_path / "q.jsonl", rows)
    options: dict[str, Any] = {"source": str(source), "columns": ("q", "off"), "settings": FAST}
    result = evaluate(**options, lower_is_better=("off",), output=tmp_path / "out")
    q, off = result["judges"]
    assert off["correlations"]["srcc"]["estimate"] == pytest.approx(1.0)
    assert 0.8 < q["correlations"]["srcc"]["low"] < q["correlations"]["srcc"]["estimate"]
    assert q["correlations"]["plcc_logistic5"]["estimate"] >= q["correlations"]["plcc"]["estimate"] - 1e-9
    assert result["comparisons"][0]["difference"]["high"] < 0
    scores = [{"image": r.image, "reward": "noise", "value": -r.mos, "higher_is_better": False} for r in rows]
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    joining: dict[str, Any] = options | {"columns": ("noise",), "join": [tmp_path / "scores.json"]}
    (joined,) = evaluate(**joining)["judges"]
    assert joined["correlations"]["srcc"]["estimate"] == pytest.approx(1.0)
    wrong_way = evaluate(**options)["judges"][1]
    assert any("--lower-is-better" in note for note in wrong_way["notes"])
    with pytest.raises(RewardError, match=r"gives no score of one"):
        score_quality(records, Sided())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": ()}, "Nothing to evaluate"),
        ({"columns": ("good", "coin"), "fuse": True}, r"20 prompts .* and 6 prompts"),
        ({"columns": ("none",)}, "has no scores 'none'.*Found besides the set's own: coin_prob, good_left"),
        ({"lower_is_better": ("other",)}, "--lower-is-better names other"),
    ],
)
def test_what_cannot_be_evaluated_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    arguments = {"source": str(table(tmp_path, 6)), "columns": ("good",), "settings": FAST} | changes
    with pytest.raises(UserError, match=message):
        evaluate(**arguments)


def test_the_command_writes_a_page_and_refuses_to_overwrite(tmp_path: Path) -> None:
    source = str(table(tmp_path, 60, **{"<b>_left": lambda p: 1.0, "<b>_right": lambda p: 0.5}))
    out = tmp_path / "out"
    arguments = ["evaluate", source, "-s", "good", "-s", "<b>", "--resamples", "100", "-o", str(out)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "half_credit (headline)" in ran.output and "Calibration" in ran.output
    result = json.loads((out / "evaluation.json").read_text())
    assert result["format"] == "visalign evaluation 1" and len(result["judges"]) == 2
    text = (out / "evaluation.html").read_text()
    assert text.count("<script") == 1 and text.count("<svg") == 4 and "<b>" not in text
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(re.findall(r'id="([^"]+)"', text))
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2 and "nothing is overwritten" in again.output
    assert CliRunner().invoke(app, [*arguments, "--resume"]).exit_code == 0


def test_one_judge_without_a_report_costs_no_other(tmp_path: Path) -> None:
    records = shapes_quality(40).records
    rows = [record.to_row() | {"good": record.mos, "flat": 1.0} for record in records]
    file = tmp_path / "q.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    settings = IntervalSettings(resamples=100)
    result = evaluate(source=str(file), columns=("good", "flat"), settings=settings)
    assert [entry["judge"]["name"] for entry in result["judges"]] == ["good"]
    assert result["failed"][0]["judge"] == "flat" and "flat" in result["set"]["findings"][-1]["message"]
    with pytest.raises(UserError, match="flat"):
        evaluate(source=str(file), columns=("flat",), settings=settings)


def ten_metrics(folder: Path, count: int = 300) -> Path:
    """Three things count, and each of six metrics sees one of them, in a unit of its own."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        merits = rng.normal(0, 1, (2, 3))
        wins = rng.random() < 1 / (1 + np.exp(-1.6 * (merits[0].sum() - merits[1].sum())))
        row = {"prompt": f"p{number // 3}", "image_left": f"l{number}", "image_right": f"r{number}"}
        row["label"] = "left" if wins else "right"
        for k in range(6):
            values = (merits[:, k % 3] + 0.9 * rng.normal(0, 1, 2)) * 10.0 ** (k - 2)
            row |= {f"m{k}_left": values[0], f"m{k}_right": values[1]}
        rows.append(json.dumps(row))
    (folder / "ten.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder / "ten.jsonl"


SIX = tuple(f"m{k}" for k in range(6))


def test_every_two_judges_are_compared_under_holm_and_stand_on_a_leaderboard(tmp_path: Path) -> None:
    source = str(ten_metrics(tmp_path))
    result = evaluate(source=source, columns=SIX, output=tmp_path / "out", settings=FAST)
    assert len(result["comparisons"]) == 15  # five of six were compared with the first alone
    for entry in result["comparisons"]:
        assert entry["p_holm"] >= entry["mcnemar"]["p_value"] and entry["mcnemar"]["pairs"] == entry["pairs"]
        ahead = entry["mcnemar"]["first_only"] - entry["mcnemar"]["second_only"]
        assert entry["difference"]["estimate"] == pytest.approx(ahead / 300)
    files = {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    assert {"leaderboard.csv", "comparison.tex", "agreement.csv", "calibration.tex"} <= files
    with (tmp_path / "out" / "tables" / "comparison.csv").open() as file:
        row = next(csv.DictReader(file))
    assert float(row["Points of accuracy"]) == pytest.approx(100 * result["comparisons"][0]["difference"]["estimate"])
    board = result["leaderboard"]
    estimates = [row["estimate"] for row in board["rows"]]
    assert board["on"] == 300 and estimates == sorted(estimates, reverse=True)
    intervals = {judge["judge"]["name"]: judge["agreement"]["half_credit"]["micro"] for judge in result["judges"]}
    for row in board["rows"]:
        assert row["high"] - row["low"] > intervals[row["judge"]]["high"] - intervals[row["judge"]]["low"]
        assert row["estimate"] == pytest.approx(intervals[row["judge"]]["estimate"])


def test_stacked_judges_beat_each_of_them_on_prompts_that_set_no_weight(tmp_path: Path) -> None:
    result = evaluate(source=str(ten_metrics(tmp_path)), columns=SIX, fuse=True, settings=FAST)
    first, *rest = result["leaderboard"]["rows"]
    assert first["judge"] == "fused" and first["best_place"] == 1 and first["worst_place"] <= 2
    assert first["low"] > max(row["estimate"] for row in rest)
    assert set(result["fusion"]["weights"]) == set(SIX) and min(result["fusion"]["weights"].values()) > 0


def test_judges_take_options_by_their_label():
    """`model=FOLDER` makes a judge of own weights; here another JPEG quality makes another judge."""
    two: dict[str, Any] = {"source": "shapes:pairs", "limit": 12, "settings": FAST}
    two["rewards"] = ("jpeg_size", "sharpness")
    evaluated = [evaluate(**two, options=options)["judges"] for options in ((), ("jpeg_size.quality=20",))]
    (usual, one), (other, same) = ([judge["judge"]["identity"] for judge in judges] for judges in evaluated)
    assert usual != other and one == same
    with pytest.raises(UserError, match=r"--option is 'quality=20', which names none of the rewards"):
        evaluate(**two, options=("quality=20",))
    with pytest.raises(UserError, match="--option is of a --reward, and there is none"):
        evaluate(source="shapes:pairs", columns=("x",), options=("quality=20",))


def test_several_sets_make_one_leaderboard(tmp_path: Path) -> None:
    sources, output = [], tmp_path / "out"
    for name, count in (("old", 60), ("new", 120)):
        (tmp_path / name).mkdir()
        sources.append(str(ten_metrics(tmp_path / name, count)))
    command = ["evaluate", *sources, "-s", "m0", "-s", "m1", "-s", "m2", "--resamples", "200", "-o", str(output)]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0 and "Mean of the sets" in ran.output, ran.output
    (board,) = json.loads((output / "leaderboard.json").read_text())["leaderboards"]
    best, *_, last = board["rows"]
    assert [*best["sets"]] == board["sets"] == ["old-ten", "new-ten"] and best["estimate"] > last["estimate"]
    numbers, z = [*best["sets"].values()], [stats.norm.ppf(q) for q in (0.975, 1 - 0.05 / 6)]
    assert best["estimate"] == pytest.approx(np.mean([n["estimate"] for n in numbers]))
    stds = [(n["high"] - n["low"]) / 2 / z[0] for n in numbers]
    assert best["high"] - best["estimate"] == pytest.approx(z[1] * math.hypot(*stds) / 2)
    page = (output / "leaderboard.html").read_text()
    assert page.count('<span class="dot') == 3 and 'href="old-ten/evaluation.html"' in page
    assert all((output / name / "evaluation.html").is_file() for name in board["sets"])
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2 and "is not empty" in again.output
    twice = CliRunner().invoke(
        app, ["evaluate", sources[0], f"{tmp_path}/./{Path(sources[0]).relative_to(tmp_path)}", "-s", "m0"]
    )
    assert twice.exit_code == 2 and "A set is named twice" in twice.output


def test_sets_of_two_kinds_have_a_leaderboard_each_and_a_reward_without_a_report_none(tmp_path: Path) -> None:
    pairs = table(tmp_path, 20, a_left=lambda pair: 1.0, a_right=lambda pair: 0.0)
    rows = tmp_path / "opinions.csv"
    rows.write_text("image,mos,a,b\n" + "".join(f"{k}.png,{k},{k % 3},1\n" for k in range(9)))
    _, boards = evaluate_sets([str(pairs), str(rows)], columns=["a"], settings=IntervalSettings(resamples=100))
    assert [board["kind"] for board in boards] == ["preferences", "quality"]
    assert boards[1]["rows"][0]["high"] == 1.0  # the ends of a correlation's interval are correlations
    empty: dict[str, Any] = {"set": {"kind": "quality"}, "comparisons": [], "judges": []}
    reports = [{"judge": {"name": "a"}, "correlations": {"srcc": boards[1]["rows"][0]}}]
    results = {"x": empty | {"judges": reports}, "y": empty}
    assert leaderboard_of_sets(results, level=0.95)["unranked"] == ["a"]
