# SPDX-License-Identifier: Apache-2.0
"""The commands of README, `docs/start` and `docs/judges` run, page by page, on as little as they take."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.house.test_docs import BLOCKS, README, SITE
from tests.house.test_quick_starts import BUDGETS, LENGTHS, STARTS, runnable
from visalign.config import read_config
from visalign.data.shapes.prompts import heldout_prompts
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import sample_scene
from visalign.pipelines.cli.app import app
from visalign.pipelines.collect import server
from visalign.pipelines.shared import learning_rate

LEFT = {
    "FOLDER": "a model of the reader's",
    "MODEL": "a model of the reader's",
    "model: A": "judges of the reader's",
    "texts.": "votes of a judge of the reader's",
    "runs/NAME": "a run of the reader's",
    "runs/FIRST": "runs of the reader's",
    "uv venv": "an environment of 7 GB, with the lowest versions",
    "lowest/bin/python": "the same",
    "--engine ray": "starts a cluster: tests/pipelines/score/test_on_ray.py",
    "serve-reward": "serves until it is ended: tests/rewards/serve",
    "video_align": "published weights",
    "-r geneval": "published weights",
    "visalign quickstart": "takes minutes: shapes_flow_grpo, which fine_tune.md runs, on a preset",
    "rollout.staleness=1": "tests/pipelines/flow_grpo/test_matrix.py",
    "pip install": "installs",
    "-m pytest": "all of this",
    "tests/benchmarks": "takes hours",
    "--license": "uploads to the hub",
    "torchrun": "several processes: tests/training/loop/test_processes.py",
    "accelerate launch": "several processes: tests/training/loop/test_processes.py",
    "export VERL": "names a plugin to verl: tests/integrations",
    "python -c": "asks what verl is given: tests/integrations",
}
"""No command is run that holds it -> why."""
SMALLER = {"--limit": "12", "--count": "4", "--seeds": "0,1"}
"""Option -> what it is given here."""
FOLDERS = (SITE, SITE / "start", SITE / "judges")


def shell_commands(page: Path) -> list[list[str]]:
    """All that the bash blocks of a page call, as words."""
    code = "\n".join(b.code for b in BLOCKS if (b.page, b.language) == (page, "bash"))
    parts = (part for line in code.replace("\\\n", " ").splitlines() for part in line.split("&&"))
    return [words for part in parts if (words := shlex.split(part, comments=True))]


COMMANDS = {
    page: shell_commands(page)
    for page in dict.fromkeys(b.page for b in BLOCKS if b.page == README or b.page.parent in FOLDERS)
}
ELSEWHERE = [words for block in STARTS for words in runnable(block) if "--output" not in words]
"""Commands that test_quick_starts.py runs, and whose results no later command of a page reads."""
OF_IMAGES = ("data.size=40", "data.heldout_size=4")
"""Budget of a language model that is asked about images, in place of tasks."""


def is_left(words: list[str]) -> bool:
    """Return whether `LEFT` gives a reason not to run a command."""
    return any(part in " ".join(words) for part in LEFT)


def to_run() -> dict[Path, list[list[str]]]:
    """Return the commands of each page; those that an earlier page holds too run there."""
    earlier, by_page = list(ELSEWHERE), {}
    for page, commands in COMMANDS.items():
        by_page[page] = [words[1:] for words in commands if words[1:] not in earlier and not is_left(words)]
        earlier += by_page[page]
    return {page: own for page, own in by_page.items() if own}


def test_what_is_left_stands_on_a_page_and_the_rest_are_our_commands() -> None:
    commands = [words for page in COMMANDS.values() for words in page]
    assert [part for part in LEFT if not any(part in " ".join(words) for words in commands)] == []
    assert [words for words in commands if words[0] != "visalign" and not is_left(words)] == []


def cut(words: list[str]) -> list[str]:
    """Return the command with a smaller budget."""
    command = list(words)
    for option, value in SMALLER.items():
        if option in command:
            command[command.index(option) + 1] = value
    if command[0] == "sample" and "--seeds" not in command:
        command += ["--seeds", "0"]
    if command[0] not in ("train", "train-reward"):
        return command
    config = read_config(command[1])
    budget = BUDGETS[str(config["pipeline"])]
    if "data.question=" in " ".join(words) or "question" in config.get("data", {}):
        budget = tuple(key for key in budget if not key.startswith(("data.tasks", "data.size", "data.held")))
        budget += OF_IMAGES[: 1 if config["pipeline"] == "text_sample" else 2]
    elif "data.heldout=null" in words:
        budget = tuple(key for key in budget if not key.startswith("data.held"))
    own = {word.partition("=")[0] for word in words} - LENGTHS
    return [*command, *(key for key in budget if key.partition("=")[0] not in own)]


def lay_out(commands: list[list[str]]) -> None:
    """Create the inputs that a reader has: images of the shapes world, and tables of them."""
    rng = np.random.default_rng(0)
    records = heldout_prompts()
    write_lines("few.jsonl", records[::60])
    for folder in ("images", "clips/one"):
        Path(folder).mkdir(parents=True)
    names = [f"{stem}.png" for stem in ("image", "a", "b", "c", *(f"images/{k}" for k in range(4)))]
    names += [f"clips/one/{k}.png" for k in range(4)]
    for name, record in zip(names, records, strict=False):
        Image.fromarray(render(sample_scene(record, rng))).save(name)
    table = "".join(f"{name},a red circle\n" for name in names[:4])
    Path("table.csv").write_text(f"image,prompt\n{table}", encoding="utf-8")
    rated = [{"image": name, "prompt": "a red circle", "mos": k % 2} for k, name in enumerate(names)]
    write_lines("rated.jsonl", rated)
    if not any("--export" in words and "pairs.jsonl" in words for words in commands):  # which makes the file
        texts = {"chosen": "4", "rejected": "5"}
        write_lines("pairs.jsonl", [{"prompt": f"{k} + {4 - k} =", **texts} for k in range(4)])
    sides = [f"m{judge}_{side}" for judge in range(3) for side in ("left", "right")]
    scores = [f"p {row},{row % 2},{','.join(f'{x:.3f}' for x in rng.random(6))}\n" for row in range(40)]
    Path("ten_metrics.csv").write_text(f"prompt,label,{','.join(sides)}\n{''.join(scores)}", encoding="utf-8")


def write_lines(name: str, records: Sequence[Mapping[str, object]]) -> None:
    Path(name).write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", list(to_run()), ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learning_rate, "FACTORS", (1.0, 3.0))
    monkeypatch.setattr(server, "serve_votes", lambda store, **options: None)  # it waits for people
    lay_out(to_run()[page])
    names: dict[str, object] = {"__name__": "page"}
    for block in BLOCKS:  # that write what the commands read
        if block.page == page and block.language == "python" and ".write_text(" in block.code:
            exec(compile(block.code, str(page), "exec"), names)
    for number, words in enumerate(to_run()[page]):
        command = cut(words)
        if command[0] in ("train", "train-reward") and not {"--output", "-o", "--dry-run"} & set(command):
            command += ["--output", f"run{number}"]  # dated folders of one second have one name
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, f"{shlex.join(command)}: {result.output[-2000:]} {result.exception!r}"
