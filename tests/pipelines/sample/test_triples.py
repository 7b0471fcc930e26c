# SPDX-License-Identifier: Apache-2.0
"""`visalign sample --refine`: triples for ICT and HP from pairs or from prompts, and what has none."""

import json
from base64 import b64decode

import pytest
from typer.testing import CliRunner

from tests.support.models.sd3 import build_tiny_sd3
from tests.support.servers.chat import chat, serving, words
from visalign.config import load_config
from visalign.pipelines.cli.app import app
from visalign.pipelines.train_reward.config import TrainRewardConfig
from visalign.pipelines.train_reward.inputs import prepare_reward


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_sd3(tmp_path_factory.mktemp("models") / "sd3")


PNG = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
ANSWERS = {"a cat": '"A fluffy cat,\n at dawn"', "a dog": "a  Dog", "a car": "I'm sorry, I can't help."}


def refine(body):
    prompt = words(body).splitlines()[1]
    return chat(ANSWERS.get(prompt, f"<think>hm</think>{prompt} in detail"))


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    def call(*arguments):
        with serving(refine) as stub:
            monkeypatch.setenv("VISALIGN_JUDGE_URL", stub.url)
            options = ["--refine", "tiny", "-m", folder, "--steps", 1, "-o", tmp_path / "out"]
            return CliRunner().invoke(app, ["sample", *map(str, [*arguments, *options])])

    return call


def triples(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "triples.jsonl").read_text().splitlines()]


def test_pairs_get_an_image_of_a_richer_prompt_and_train_ict(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts, labels = ["a cat", "a cat", "a dog", "a car", "a sun"], ["left", "right", "left", "right", "tie"]
    rows = []
    for number, (prompt, label) in enumerate(zip(prompts, labels, strict=True)):
        row = {"prompt": prompt, "image_left": f"{number}l.png", "image_right": f"{number}r.png", "label": label}
        rows.append(row)
        for name in (row["image_left"], row["image_right"]):
            (tmp_path / name).write_bytes(PNG)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match=r"2 prompts have no triple. 'a dog': it answered with the same prompt"):
        result = run("p.jsonl")
    assert result.exit_code == 0 and "2 triples" in result.output, result.output
    first, second = triples(tmp_path)
    assert first["prompt_refined"] == second["prompt_refined"] == "A fluffy cat, at dawn"
    assert first["image_refined"] == second["image_refined"] and (tmp_path / "out" / first["image_refined"]).is_file()
    own = [f"data.train={tmp_path / 'out' / 'triples.jsonl'}", "data.heldout=null"]
    inputs = prepare_reward(load_config(TrainRewardConfig, "shapes_ict", own))
    assert [row.images[0][-6:] for row in inputs.train.rows] == ["0r.png", "1l.png"]
    assert inputs.train[0].refined == "A fluffy cat, at dawn" and len(inputs.train[0].images) == 3


def test_of_prompts_the_reward_chooses_the_worse_and_the_better_image(run, tmp_path):
    result = run("a cat", "a sun", "--seeds", "0-2", "-r", "sharpness")
    assert result.exit_code == 0, result.output
    scores = [json.loads(line) for line in (tmp_path / "out" / "easy" / "images.jsonl").read_text().splitlines()]
    for triple in triples(tmp_path):
        ranked = sorted((row["sharpness"], row["image"]) for row in scores if row["prompt"] == triple["prompt"])
        ends = [triple[side].rpartition("/")[2] for side in ("image_right", "image_left")]
        assert ends == [ranked[0][1], ranked[-1][1]]
    assert {t["prompt_refined"] for t in triples(tmp_path)} == {"A fluffy cat, at dawn", "a sun in detail"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a cat"], "give two seeds and a reward"),
        (["a dog", "-r", "sharpness"], "made none of 1 prompts richer. 'a dog': it answered with the same"),
        (["a car", "-r", "sharpness"], "'a car': the judge refused"),
        (["shapes:quality"], "holds single rated images"),
    ],
)
def test_what_cannot_become_triples_is_refused_and_nothing_is_written(run, tmp_path, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert not (tmp_path / "out").exists()
