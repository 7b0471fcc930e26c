# SPDX-License-Identifier: Apache-2.0
"""`visalign agree`: correlations by hand, within prompts against over all, where rewards disagree, bad sets."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

from tests.support.judges.brightness import Brightness
from visalign.data.sets.sources import shapes_pairs, write_rows
from visalign.errors import UserError
from visalign.evaluation.pages.agree_page import agree_page, sentences
from visalign.evaluation.rewards.agreement import (
    _within_ranks,
    agreement,
    largest_disagreements,
    percentiles,
    same_order,
)
from visalign.pipelines.cli.app import app
from visalign.pipelines.compare.agree_rewards import agree_rewards, read_set, write_agreement
from visalign.pipelines.score.image_rows import ImageRow
from visalign.rewards.catalogue import load_reward

NAN = math.nan


def test_ranks_within_groups_by_hand() -> None:
    groups = np.array([0, 1, 0, 1, 1, 2])
    ranks = _within_ranks(np.array([5.0, 1.0, 3.0, 1.0, 9.0, 7.0]), groups)
    assert ranks.tolist() == pytest.approx([0.25, -0.5 / 3, -0.25, -0.5 / 3, 1 / 3, 0.0])


def test_same_order_leaves_ties_out() -> None:
    x, y = np.array([1.0, 2.0, 3.0, 5.0]), np.array([1.0, 3.0, 2.0, 0.0])
    assert same_order(x, y, np.array([0, 0, 0, 1])) == (2 / 3, 3)
    assert same_order(np.array([1.0, 1.0]), np.array([1.0, 2.0]), np.array([0, 0])) == (None, 0)


def test_agreement_over_all_is_spearman_and_within_can_be_its_opposite() -> None:
    rng = np.random.default_rng(0)
    prompts = [f"p{k}" for k in range(40) for _ in range(5)]
    easy = np.repeat(np.arange(40.0), 5)  # both like the same prompts
    inside = rng.normal(size=200)
    x, y = easy + 0.2 * inside, easy - 0.2 * inside + 0.02 * rng.normal(size=200)
    spearman: Any = stats.spearmanr(x, y)[0]
    tau: Any = stats.kendalltau(x, y)[0]
    [pair] = agreement(["x", "y"], [x, y], prompts)
    assert pair["overall"]["estimate"] == pytest.approx(spearman)
    assert pair["overall"]["low"] > 0.9 and pair["within"]["high"] < -0.8 and pair["same_choice"] < 0.05
    [perfect] = agreement(["x", "y"], [x, -x], prompts)  # which says nothing of its error
    assert perfect["within"]["estimate"] == pytest.approx(-1.0) and perfect["within"]["high"] is None
    assert pair["pairs"] == 40 * 10 and pair["images"] == 200
    assert pair["kendall_b"] == pytest.approx(tau)
    (sentence,) = sentences({"pairs": [pair], "rewards": []})
    assert sentence == "x and y pull in opposite directions within prompts: a mixture pays for their compromise."


def test_what_is_not_judged_or_not_defined_is_left_out_and_said() -> None:
    prompts = ["a", "a", "b", "b"]
    [pair] = agreement(["x", "y"], [[1, 2, NAN, 4], [1, 2, 3, 5]], prompts)
    assert pair["images"] == 3 and pair["pairs"] == 1
    [flat] = agreement(["x", "y"], [[1, 1, 1, 1], [1, 2, 3, 5]], prompts)
    assert flat["overall"]["estimate"] is None and flat["note"] == "the first gives all 4 images the same score"
    [few] = agreement(["x", "y"], [[1, NAN, NAN, 4], [1, 2, 3, 5]], prompts)
    assert few["note"] == "2 images were scored by both; 3 are needed"
    [single] = agreement(["x", "y"], [[1, 2, 3, 4], [1, 2, 3, 5]], list("abcd"))
    assert single["within"]["estimate"] is None and "no prompt has two images" in single["note"]


def test_where_two_part() -> None:
    assert percentiles([3.0, 1.0, NAN, 1.0]).tolist()[:2] == [1.0, 0.25]
    x, y = [0.0, 1.0, 2.0, 3.0, NAN], [3.0, 1.0, 2.0, 0.0, 5.0]
    rows = largest_disagreements(x, y, most=2)
    assert rows == [(3, 1.0, 0.0), (0, 0.0, 1.0)], "both directions take turns"
    assert largest_disagreements([1.0, 2.0], [1.0, 2.0]) == []


def test_a_set_is_scored_and_directions_are_turned(tmp_path: Path) -> None:
    rows = read_set("shapes:pairs", limit=20)
    assert len(rows) == 20 and rows[0].prompt == rows[1].prompt and rows[0].metadata
    rewards = {"up": Brightness(), "down": Brightness(higher_is_better=False), "colour": load_reward("saturation")}
    result = agree_rewards(rows, rewards, source="shapes:pairs")
    names = [f"{pair['first']} {pair['second']}" for pair in result["pairs"]]
    assert names == ["up down", "up colour", "down colour"]
    assert result["pairs"][0]["overall"]["estimate"] == pytest.approx(-1.0)
    assert result["pairs"][1]["within"]["estimate"] == pytest.approx(-result["pairs"][2]["within"]["estimate"])
    page = write_agreement(tmp_path, result).read_text()
    assert page.count("<img") == sum(len(pair["disagreements"]) for pair in result["pairs"]) > 0
    assert json.loads((tmp_path / "agreement.json").read_text())["set"]["images"] == 20
    [overall, _] = re.findall(r'<figure class="heat">(.*?)</figure>', page)
    kinds = re.findall(r'class="cell (\w+)".*?fill-opacity="([\d.]+)"', overall)
    assert [kind for kind, _ in kinds[:3]] == ["itself", "parts", kinds[2][0]] and len(kinds) == 9
    assert kinds[1][1] == "0.56" and kinds[3] == kinds[1], "−1 is the strongest colour, both ways"
    third = f"{result['pairs'][1]['overall']['estimate']:.2f}".replace("-", "−")
    assert re.findall(r'class="number".*?>(.*?)<', overall)[:2] == ["−1.00", third]
    two = result | {"rewards": result["rewards"][:2], "pairs": result["pairs"][:1]}
    absent = {disagreement["image"]: None for disagreement in result["pairs"][0]["disagreements"]}
    assert "<figure" not in agree_page(two, absent), "one number needs no map"


def test_bad_sets_are_refused_by_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no set 'gone'. Give a table with the columns image, prompt"):
        read_set("gone")
    rows = [ImageRow(image=str(tmp_path / f"{k}.png"), prompt="x") for k in range(4)]
    two = {"a": Brightness(), "b": Brightness()}
    with pytest.raises(UserError, match=r"a could judge none of the 4 images: no such image file"):
        agree_rewards(rows, two)
    with pytest.raises(UserError, match=r"at least 2 rewards .* and 3 images; got 2 rewards and 2 images"):
        agree_rewards(rows[:2], two)


def test_scores_of_several_rewards_as_score_writes_them(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for level in range(6):
        Image.new("RGB", (8, 8), (9, 40 * level, 9 + 7 * (level % 3))).save(tmp_path / f"{level}.png")
    names = [word for name in ("saturation", "jpeg_size") for word in ("-r", name)]
    option = ["--option", "jpeg_size.prefer=smaller"]  # a lower value is better
    assert CliRunner().invoke(app, ["score", ".", *names, *option, "-o", "long.csv"]).exit_code == 0
    scored = CliRunner().invoke(app, ["agree", ".", *names, *option, "-p", "x", "--json"])
    columns = ["-s" if word == "-r" else word for word in names]
    read = CliRunner().invoke(app, ["agree", "long.csv", *columns, "--json"])
    assert read.exit_code == 0, read.output
    expected, pair = (json.loads(result.stdout)["pairs"][0] for result in (scored, read))
    assert pair["images"] == 6 and pair["overall"] == expected["overall"]
    (tmp_path / "bare.csv").write_text((tmp_path / "long.csv").read_text().replace("False", ""))
    read = CliRunner().invoke(app, ["agree", "bare.csv", *columns, "--lower-is-better", "jpeg_size", "--json"])
    assert json.loads(read.stdout)["pairs"][0]["overall"] == expected["overall"]
    with pytest.warns(UserWarning, match="6 of 12 rows name an image again, which counts once"):
        again = CliRunner().invoke(app, ["agree", "long.csv", *names, "--json"])
    assert json.loads(again.stdout)["set"]["images"] == 6
    wrong = CliRunner().invoke(app, ["agree", "long.csv", "-s", "saturatoin"])
    assert wrong.exit_code == 2 and "Did you mean 'saturation'" in " ".join(wrong.output.split())


def test_the_command_reads_tables_of_pairs_folders_and_resumes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "pairs.jsonl", list(shapes_pairs(6).pairs))
    base = ["agree", "pairs.jsonl", "-r", "saturation", "-r", "brightness", "-o", "out"]
    result = CliRunner().invoke(app, base)
    assert result.exit_code == 0, result.output
    assert "12 images" in result.output and (tmp_path / "out/agreement.html").is_file()
    assert len((tmp_path / "out/scores.jsonl").read_text().splitlines()) == 1 + 24
    again = CliRunner().invoke(app, base)
    assert again.exit_code == 2
    assert CliRunner().invoke(app, [*base, "--resume"]).exit_code == 0
    for level in range(4):
        Image.new("RGB", (8, 8), (60 * level, 9, 9)).save(tmp_path / f"{level}.png")
    folder = CliRunner().invoke(app, ["agree", ".", "-p", "x", "-r", "saturation", "-r", "brightness", "--json"])
    assert folder.exit_code == 0, folder.output
    assert json.loads(folder.stdout)["set"] == {"source": ".", "images": 4, "prompts": 1, "seed": 0, "level": 0.95}
    wrong = CliRunner().invoke(app, ["agree", ".", "-r", "saturation", "-r", "ocr"])
    assert wrong.exit_code == 2 and "has no prompt" in " ".join(wrong.output.split())


@pytest.mark.parametrize("images", [{"image_left": "a.png", "image_right": "b.png", "label": 1}, {"image": "a.png"}])
def test_rewards_get_metadata_and_source_of_a_row(images: dict[str, Any], tmp_path: Path) -> None:
    row = {"prompt": "x", **images, "metadata": {"text": "OPEN"}, "source": "cup.png"}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    assert read_set(str(tmp_path / "t.jsonl"))[0].metadata == {"text": "OPEN", "source": "cup.png"}
    texts = {"prompt": "x", "chosen": "yes", "rejected": "no", "m_left": 1, "m_right": 0}
    (tmp_path / "t.jsonl").write_text(json.dumps(texts) + "\n")
    scores = {r.image: r.metadata["scores"] for r in read_set(str(tmp_path / "t.jsonl"), scores=["m"]) if r.metadata}
    assert scores == {"text://yes": {"m": 1}, "text://no": {"m": 0}}


def test_a_table_of_scores_may_have_failures_and_has_one_scoring(tmp_path: Path) -> None:
    rows = [("0.png", "sharpness", ""), *((f"{n}.png", "sharpness", n) for n in (1, 2, 3))]
    rows += [(f"{n}.png", "saturation", n * n) for n in range(4)]
    lines = ["image,reward,value", *(",".join(map(str, row)) for row in rows)]
    (table := tmp_path / "long.csv").write_text("\n".join(lines) + "\n")
    read = CliRunner().invoke(app, ["agree", str(table), "-s", "sharpness", "-s", "saturation", "--json"])
    assert read.exit_code == 0, read.output
    assert json.loads(read.stdout)["pairs"][0]["images"] == 3
    table.write_text("\n".join([*lines, "1.png,sharpness,9"]) + "\n")
    twice = CliRunner().invoke(app, ["agree", str(table), "-s", "sharpness", "-s", "saturation"])
    assert twice.exit_code == 2 and "scores 1.png twice by sharpness" in " ".join(twice.output.split())
