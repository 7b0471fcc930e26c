# SPDX-License-Identifier: Apache-2.0
"""`visalign bench`: numbers of `evaluate`, resumed and divided drawing, folders, win rates, suites, refusals."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.support.evaluation_samples import make_result
from tests.support.models.pipelines import tiny_folder
from tests.support.models.sd3 import build_tiny_sd3
from visalign.errors import UserError
from visalign.evaluation.heldout.images import evaluate
from visalign.evaluation.heldout.result import load_heldout
from visalign.evaluation.pages.bench_page import file_tables
from visalign.interfaces import Metadata, RewardCapabilities
from visalign.pipelines.bench import sides
from visalign.pipelines.bench.job import run_bench
from visalign.pipelines.bench.result import bench_record
from visalign.pipelines.bench.sides import Side
from visalign.pipelines.bench.suites import load_suite
from visalign.pipelines.cli.app import app
from visalign.pipelines.sample.job import SampleSettings, load_sampler
from visalign.pipelines.score.image_rows import ImageRow
from visalign.rewards import load_reward

SUITE = ("--suite", "world", "--limit", 4, "--steps", 2, "--batch-size", 2, "-r", "sharpness")


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def numbers(folder: Path) -> dict[str, Any]:
    return {**json.loads((folder / "bench.json").read_text()), "seconds": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = build_tiny_sd3(tmp_path_factory.mktemp("models") / "sd3")
    return f"{folder},name=one", f"{folder},guidance=3,name=guided"


@pytest.fixture(scope="module")
def drawn(models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bench") / "drawn"
    result = run(*models, *SUITE, "-o", output)
    assert result.exit_code == 0, result.output
    return output


def test_the_numbers_are_those_of_evaluate(drawn: Path, models: tuple[str, str]) -> None:
    policy = load_sampler(SampleSettings(model=models[0].split(",")[0], steps=2))
    rewards = {name: load_reward(name) for name in ("shapes_verifier", "sharpness")}
    _, records = load_suite("world", 4)
    sigmas = policy.sigmas(2, timestep_schedule="diffusers")
    result = evaluate(policy, rewards, records, seeds=[0], sigmas=sigmas, batch_size=2)
    one = numbers(drawn)["models"][0]["numbers"]
    assert one["accuracy"]["estimate"] == result.accuracy
    assert [one["accuracy"][end] for end in ("low", "high")] == [result.interval().low, result.interval().high]
    assert one["sharpness"]["estimate"] == pytest.approx(result.mean("sharpness"), rel=1e-4)
    assert len(list((drawn / "images" / "guided").glob("*.png"))) == 4
    page = (drawn / "bench.html").read_text()
    assert "part of visalign" in page and "no clear difference between one and guided" in page
    rows = list(csv.reader((drawn / "tables" / "win_rates.csv").read_text().splitlines()))
    assert rows[1][:4] == ["one", "guided", "accuracy", "all"]


def test_a_stopped_bench_draws_what_is_missing(
    drawn: Path, models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, loads = numbers(drawn), list[Any]()
    monkeypatch.setattr(sides, "load_sampler", lambda settings: loads.append(settings) or load_sampler(settings))
    (drawn / "parts" / "1" / "000002.npz").unlink()
    assert run(*models, *SUITE, "-o", drawn, "--resume").exit_code == 0
    assert numbers(drawn) == before and len(loads) == 1
    stored = load_heldout(part := drawn / "parts" / "0" / "000000.npz")
    replace(stored, scores={name: np.full_like(values, np.nan) for name, values in stored.scores.items()}).save(part)
    assert run(*models, *SUITE, "-o", drawn, "--resume").exit_code == 0
    assert numbers(drawn) == before and len(loads) == 2  # failed scores are tried again
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, loaded in (("1", 3), ("0", 3)):  # the second process draws the second part, the first waits for it
        monkeypatch.setenv("RANK", rank)
        if rank == "1":
            (drawn / "parts" / "1" / "000002.npz").unlink()
        assert run(*models, *SUITE, "-o", drawn, "--resume").exit_code == 0
        assert len(loads) == loaded
    assert numbers(drawn) == before
    refused = run(*models, *SUITE, "-r", "contrast", "-o", drawn, "--resume")
    assert refused.exit_code == 2 and "rewards.contrast" in refused.output
    refused = run(*models[::-1], *SUITE, "-o", drawn, "--resume")  # its parts are numbered
    assert refused.exit_code == 2 and "order" in refused.output and numbers(drawn) == before

    def with_other_tags(*arguments: Any, **options: Any) -> Any:
        suite, records = load_suite(*arguments, **options)
        return suite, [{**record, "tag": "other"} for record in records]

    monkeypatch.setattr("visalign.pipelines.bench.suites.load_suite", with_other_tags)
    refused = run(*models, *SUITE, "-o", drawn, "--resume")
    assert refused.exit_code == 2 and "records" in refused.output


def test_folders_with_the_same_prompts_compare_without_drawing(drawn: Path, tmp_path: Path) -> None:
    folders = [drawn / "images" / name for name in ("one", "guided")]
    arguments = ("--images", *folders, "-r", "sharpness", "--suite", "world", "-o", tmp_path / "out")
    assert run(*arguments).exit_code == 0
    result, before = numbers(tmp_path / "out"), numbers(drawn)
    assert [pair["win_rate"] for pair in result["pairs"]] == [pair["win_rate"] for pair in before["pairs"]]
    lines = (folders[1] / "images.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"image": str(folders[1] / json.loads(line)["image"])} for line in lines]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    refused = run("--images", folders[0], tmp_path / "few.jsonl", "-r", "sharpness", "-o", tmp_path / "no")
    assert refused.exit_code == 2 and "with 1 and 0 images" in " ".join(refused.output.split())
    assert not (tmp_path / "no").exists()


def test_an_unreadable_image_is_a_missing_score(tmp_path: Path) -> None:
    for name, grey in (("a", 0), ("b", 200)):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("RGB", (8, 8), (grey, grey, 10 * number)).save(tmp_path / name / f"{number}.png")
            (tmp_path / name / f"{number}.txt").write_text(f"a circle {number}")
    (tmp_path / "b" / "1.png").write_bytes(b"no image")
    tags = ("tag 0", "tag 1", None)
    rows = [{"image": f"{n}.png", "prompt": f"a circle {n}", "metadata": {"tag": tags[n]}} for n in range(3)]
    (tmp_path / "a" / "images.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = run("--images", tmp_path / "a", tmp_path / "b", "-r", "brightness", "-o", tmp_path / "out")
    text = " ".join(result.output.split())
    assert result.exit_code == 1 and "brightness is missing for 1 of 3 samples" in text
    (pair,) = numbers(tmp_path / "out")["pairs"]
    assert (pair["wins"], pair["ties"], pair["losses"], pair["win_rate"]["estimate"]) == (2, 0, 0, 1.0)
    assert [*pair["by_category"]] == ["tag 0", "tag 1", "untagged"]  # the first side's, though the second has none
    arguments = ("--images", tmp_path / "a", tmp_path / "b", "-r", "brightness", "-o", tmp_path / "out", "--resume")
    Image.new("RGB", (8, 8)).save(tmp_path / "b" / "1.png")  # repaired
    assert run(*arguments).exit_code == 0
    (pair,) = numbers(tmp_path / "out")["pairs"]
    assert (pair["wins"], pair["losses"]) == (2, 1)
    Image.new("RGB", (9, 9)).save(tmp_path / "b" / "1.png")  # exchanged
    assert "b/1.png" in run(*arguments).output


def test_win_rates_by_hand() -> None:
    names, tags = tuple("aabbcd"), tuple("xxxxyy")
    common: dict[str, Any] = {"tags": tags, "seeds": np.array([0, 1, 0, 1, 0, 0]), "units": {"cost": "s"}}
    common |= {"images": np.zeros((0, 1, 1, 3), np.uint8), "image_index": np.zeros(0, np.int64)}
    common |= {"higher_is_better": {"cost": False}, "judged": np.zeros(6, bool), "correct": np.zeros(6, bool)}
    values = {"first": [1, 2, 3, 4, 5, 6], "second": [0, 1, 3, 5, 4, np.nan]}
    results = {
        name: replace(make_result(0.5), prompts=names, scores={"cost": np.array(column, np.float32)}, **common)
        for name, column in values.items()
    }
    rows = [ImageRow(image=f"{number}.png", prompt=prompt) for number, prompt in enumerate(names)]
    both = [Side(label=name, facts={}, rows=rows, score=lambda parts: iter(())) for name in results]
    record = bench_record(results, both)
    (pair,) = record["pairs"]
    assert (pair["wins"], pair["ties"], pair["losses"]) == (3, 1, 1)  # lower is better
    assert pair["win_rate"]["estimate"] == pytest.approx(0.7)
    assert pair["by_category"]["x"]["estimate"] == pytest.approx(2.5 / 4)
    assert pair["change"]["estimate"] == pytest.approx(-0.4)
    assert pair["p_value"] == 0.75  # D = 2, −1, 1: |Σ ±D| ≥ 2 for 6 of 8 signs
    assert record["models"][1]["numbers"]["cost"]["failed"] == 1
    assert record["differences"][0]["samples"][0]["row"] in (0, 1, 3, 4)
    numbers = record["models"][0]["numbers"]["cost"]
    numbers["by_category"]["all"] = numbers["by_category"].pop("x")  # a category may have any name
    scores, _ = file_tables(record)
    assert [row[2:] for row in scores.rows[:2]] == [["all", (3.5, *scores.rows[0][3][1:]), 0], ["y", ANY, None]]


DPG = "item_id,text,proposition_id,dependency,question_natural_language\n"


@pytest.mark.parametrize(
    ("suite", "name", "text", "expected"),
    [
        (
            "dpg",
            "dpg.csv",
            DPG
            + '7,a cat on a mat,1,0,Is there a cat?\n7,a cat on a mat,2,"1, 1",Is it on a mat?\n8,a dog,1,0,A dog?\n',
            {"prompt": "a cat on a mat", "tag": "untagged"},
        ),
        ("drawbench", "d.csv", "Prompts,Category\nA red car.,Colors\n", {"prompt": "A red car.", "tag": "Colors"}),
        (
            "geneval2",
            "g.jsonl",
            '{"prompt": "two cats", "atom_count": 3, "vqa_list": [["How many?", "two"]], "skills": ["count"]}\n',
            {"prompt": "two cats", "tag": "3 atoms", "vqa_list": [["How many?", "two"]]},
        ),
    ],
)
def test_suites_read_the_published_files(tmp_path: Path, suite: str, name: str, text: str, expected: Metadata) -> None:
    (tmp_path / name).write_text(text)
    _, records = load_suite(f"{suite}:{tmp_path / name}")
    assert expected.items() <= records[0].items()  # type: ignore[attr-defined]
    if suite == "dpg":
        assert len(records) == 2
        assert records[0]["vqa_list"][1] == ["Is it on a mat?", "Yes"] and records[0]["vqa_parents"] == [[], [0, 0]]


def test_suites_have_categories(tmp_path: Path) -> None:
    (own := tmp_path / "own.csv").write_text("prompt,task\na cat,animals\na thing,\n")
    assert [record["tag"] for record in load_suite(str(own))[1]] == ["animals", "untagged"]
    suite, records = load_suite("partiprompts", 12)
    assert "Apache-2.0" in suite.licence and len(records) == 12 and len({r["tag"] for r in records}) > 3
    assert len(load_suite("world")[1]) == 208


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shapes-sd3", "--suite", "geneval2"], "CC BY-NC 4.0). Get them from https://github.com/facebookresearch"),
        (["shapes-sd3", "--suite", "genevall"], "Did you mean 'geneval2'? Give one of dpg, drawbench"),
        (["shapes-sd3", "--suite", "partiprompts"], "name a reward, such as -r hpsv3"),
        (["shapes-sd3", "shapes-sd15", "--lora", "runs/a"], "Write MODEL,lora=PATH"),
        (["--images", "nowhere", "-r", "sharpness"], "There is no image, folder or table 'nowhere'."),
        (["shapes-sd3,steps=2", "shapes-sd3,steps=2"], "Two have one name"),
        (["shapes-sd3,stepz=2", "--limit", "1"], "stepz"),
        (["shapes-sd3,seeds=3"], "'shapes-sd3,seeds=3': seeds is no option of one MODEL"),
        (["shapes-sd3,best_of=4"], "best_of is no option of one MODEL"),
        (["shapes-sd3", "--suite", "partiprompts:p.tsv"], "The prompts of suite partiprompts are packaged"),
        (["--images", "a", "b", "--steps", "3", "-r", "sharpness"], "--images draws nothing"),
        (["no-such-model", "--limit", "1"], "no-such-model"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(*arguments, "-o", tmp_path / "out")
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert not (tmp_path / "out" / "bench.json").exists()


def test_a_model_that_edits_draws_each_source(tmp_path: Path) -> None:
    model = f"{tiny_folder('flux_kontext', tmp_path / 'model')},image_size=16,call={{_auto_resize: false}},name=edits"
    for name in ("dark", "light"):
        Image.new("RGB", (16, 16), {"dark": "black", "light": "white"}[name]).save(tmp_path / f"{name}.png")
    records = [{"prompt": "make it blue", "source": str(tmp_path / f"{name}.png")} for name in ("dark", "light")]
    (suite := tmp_path / "edits.jsonl").write_text("\n".join(map(json.dumps, records)))
    result = run(model, "--suite", suite, "-r", "jpeg_size", "--steps", 1, "-o", tmp_path / "out")
    assert result.exit_code == 0 and len([*(tmp_path / "out/images/edits").glob("*.png")]) == 2, result.output
    result = run(model, "--suite", "world", "-o", tmp_path / "refused")
    assert "has no images, and the model edits one" in " ".join(result.output.split())


def test_a_run_is_the_model_that_it_trained(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("pipeline: flow_grpo\nmodel: {path: shapes-sd3}\n")
    with pytest.raises(UserError, match="is a run without a result"):
        sides.model_side(str(tmp_path), [], [0], tmp_path, {})
    (tmp_path / "lora").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no pytorch_lora_weights"):  # before others have drawn
        sides.model_side(str(tmp_path), [], [0], tmp_path, {})
    (tmp_path / "lora" / "pytorch_lora_weights.safetensors").touch()
    side = sides.model_side(f"{tmp_path},steps=4", [{"prompt": "a"}], [0, 1], tmp_path, {}, batch_size=2)
    (tmp_path / "lora" / "pytorch_lora_weights.safetensors").write_bytes(b"trained on")
    config = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(f"{config}rollout: {{steps: 4, timestep_schedule: plain}}\n")
    student = sides.model_side(str(tmp_path), [{"prompt": "a"}], [0], tmp_path, {}, steps=None).facts
    assert (student["steps"], student["timestep_schedule"], student["options"]) == (4, "plain", {"guidance": None})
    drawn = f"shapes-sd3,name=,negative_prompt={'blurry, ' * 40},lora={tmp_path}:0.5"  # no folder's name is so long
    later = sides.model_side(drawn, [{"prompt": "a"}], [0], tmp_path, {})
    assert len(Path(later.rows[0].image).parent.name) < 100
    assert later.label.startswith("shapes-sd3, name")
    assert len({side.facts["files"], later.facts["files"]}) == 2
    (tmp_path / "config.yaml").write_text("pipeline: flow_grpo\nmodel: {path: a.safetensors, config: shapes-sd3}\n")
    with pytest.raises(UserError, match=r"model\.config is for a model of one file, and a\.safetensors"):  # passed on
        sides.model_side(str(tmp_path), [{"prompt": "a"}], [0], tmp_path, {})
    assert (side.facts["model"], side.facts["lora"], side.facts["steps"]) == ("shapes-sd3", [str(tmp_path)], 4)
    assert [Path(row.image).name for row in side.rows] == ["0000_0.png", "0000_1.png"]


def test_a_run_of_an_own_adapter_says_whether_it_edits(tmp_path: Path) -> None:
    own = "from tests.support.training.images import ToyPolicy\n\n\nclass Own(ToyPolicy):\n    "
    (tmp_path / "own.py").write_text(f"{own}takes_source = True\n    from_pretrained = save = print\n")
    (tmp_path / "config.yaml").write_text(
        f"pipeline: flow_grpo\nmodel: {{path: mine, adapter: '{tmp_path}/own.py:Own'}}\n"
    )
    (tmp_path / "lora").mkdir()
    assert sides.suite_edits([str(tmp_path)]) == "optional"
    assert sides.suite_edits(["shapes-sd3,steps=4"]) == "none"


def test_questions_without_a_model_or_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    file, images, question = tmp_path / "d.csv", tmp_path / "images.csv", "7,a cat,1,0,Is there a cat?\n"
    for text, message in (
        (question, "Add --option soft_tifa.model=FOLDER"),
        (f"{question}7,a cat,1,0,Is it black?\n", "item 7 has two questions 1. Number them differently"),
    ):
        file.write_text(DPG + text)
        result = run("shapes-sd3", "--suite", f"dpg:{file}", "-o", tmp_path / "out")
        assert message in " ".join(result.output.split())
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    images.write_text("image,prompt\na.png,a cat\n")
    two = [{"prompt": "a cat", "tag": tag} for tag in ("x", "y")]
    with pytest.raises(UserError, match="Two items of the suite have one prompt"):
        sides.folder_sides([str(images)], two, {})


def test_sides_of_other_seeds_say_how_their_images_are_paired(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    tables = [tmp_path / f"{name}.jsonl" for name in ("one", "two", "other")]
    for table, seeds in zip(tables, ((0, 1), (1, 0), (2, 3)), strict=True):
        rows = [{"image": "a.png", "prompt": "a cat", "seed": seed, "metadata": {"seed": seed}} for seed in seeds]
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match="seeds differ, so a prompt's images are paired in the order of seeds"):
        one, two, _ = sides.folder_sides(list(map(str, tables)), None, {"rewards": {}, "correctness": None})
    assert [row.metadata for row in one.rows] == [row.metadata for row in two.rows]  # these two have the same seeds


def test_tables_pair_by_text_seeds_and_by_the_images_that_a_prompt_edits(tmp_path: Path) -> None:
    """A CSV has seeds as text; an image inside Parquet that is none costs its score."""
    for number in range(4):
        Image.new("RGB", (8, 8), (60 * number,) * 3).save(tmp_path / f"{number}.png")
    tables = [tmp_path / "rising.csv", tmp_path / "falling.csv"]
    for table, step in zip(tables, (1, -1), strict=True):
        rows = [
            f'{n}.png,make it blue,{n % 2},"{{""source"": ""{n // 2}.png"", ""tag"": {n // 2}}}"' for n in range(4)
        ]
        table.write_text("image,prompt,seed,metadata\n" + "\n".join(rows[::step]))
    assert run("--images", *tables, "-r", "brightness", "-o", tmp_path / "out").exit_code == 0
    result = numbers(tmp_path / "out")
    assert (result["prompts"], result["pairs"][0]["ties"], [*result["pairs"][0]["by_category"]]) == (2, 4, ["0", "1"])
    compares: Any = load_reward("brightness")
    scoring: dict[str, Any] = {"rewards": {}, "correctness": None}
    compares.capabilities = RewardCapabilities(needs_batch=True)
    with pytest.raises(UserError, match="4 are more than one batch of 3"):
        run_bench(sides.folder_sides([*map(str, tables)], None, scoring), None, {"b": compares}, tmp_path, part_size=3)
    cells = [(tmp_path / "1.png").read_bytes(), b"no image"]
    pyarrow.parquet.write_table(pyarrow.table({"image": cells, "prompt": ["a", "b"]}), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("image,prompt\n0.png,a\n0.png,b")
    result = run("--images", tmp_path / "a.parquet", tmp_path / "b.csv", "-r", "brightness", "-o", tmp_path / "cells")
    assert result.exit_code == 1 and "missing for 1 of 2 samples of" in " ".join(result.output.split())
