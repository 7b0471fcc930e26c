# SPDX-License-Identifier: Apache-2.0
"""The quick start of every trainer's page runs, word for word but for a budget of one small iteration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.house.test_docs import BLOCKS, PAGES, SITE, Block, commands_of
from visalign.config import read_config
from visalign.data.shapes.prompts import heldout_prompts
from visalign.pipelines.cli.app import app

IMAGES = (
    "run.iterations=1",
    "rollout.prompts_per_iteration=1",
    "rollout.group_size=4",
    "rollout.batch_size=8",
    "optimizer.micro_batch=8",
    "optimizer.updates_per_iteration=1",
    "data.heldout=few.jsonl",
    "evaluation.seeds=[0]",
    "evaluation.steps=2",
)
TEXT = ("run.iterations=1", "data.tasks=[add]", "data.heldout_per_task=2", "evaluation.seeds=[0]")
COMPLETIONS = ("data.size=8", "rollout.prompts_per_iteration=2", "rollout.group_size=2", "rollout.max_new_tokens=8")
BUDGETS = {
    "flow_grpo": IMAGES,
    "pref_grpo": IMAGES,
    "shapes_few_step": ("run.iterations=3", *IMAGES[1:]),  # the critic and the surrogate learn alone first
    "sft_images": (*(key for key in IMAGES if "group_size" not in key), "data.images_size=4"),
    "text_grpo": (*TEXT, *COMPLETIONS),
    "text_ppo": (*TEXT, *COMPLETIONS),
    "text_dpo": (*TEXT, "data.batch=4"),
    "text_sft": (*TEXT, "data.batch=4"),
    "text_reward": ("data.size=24", "data.batch=4", "run.iterations=1", "optimizer.updates_per_iteration=1"),
    "text_process": ("run.iterations=1",),
    "text_sample": ("data.tasks=[add]", "data.size=4", "rollout.samples=2"),
    "train_reward": ("run.iterations=1", "data.size=16", "data.heldout_size=8", "optimizer.updates_per_iteration=2"),
    "ugda": (
        "rounds=1",
        "labels={prompts: 2, images: 2, first: 2}",
        "ensemble.members=2",
        "ensemble.changes={run.iterations: 1, optimizer.updates_per_iteration: 1, data.batch: 2}",
        "policy.changes={run.iterations: 1, rollout.prompts_per_iteration: 1, rollout.group_size: 3, "
        "optimizer.updates_per_iteration: 1, data.heldout: few.jsonl, evaluation.seeds: [0], evaluation.steps: 2}",
    ),
}
"""Configuration or pipeline -> settings of a small run."""
LENGTHS = {"run.iterations", "data.size", "rollout.samples"}
"""Settings of a page that the budget replaces; its other settings are kept."""
OF_THE_READER = (
    "FOLDER",
    "MODEL",
    "NAME",
    "pairs.jsonl",
    "triples.jsonl",
    "heie.yaml",
    "checklist.yaml",
    "teacher.jsonl",
    "HPDv3-PlusPlus",
)
"""Placeholders of the reader's own files; such commands are only parsed, in `test_docs`."""

SAME = {
    "--output runs/two": "the command before it, in two processes: tests/pipelines/train_reward/test_processes.py",
    "--output runs/flow": "docs/start/fine_tune.md, by tests/house/test_page_commands.py",
    "labels.source=training": "tests/pipelines/ugda/test_rounds.py",
    "objective.algorithm=awm": "tests/pipelines/flow_grpo/test_matrix.py",
    "rollout.scout=": "tests/pipelines/flow_grpo/test_matrix.py",
    "objective.algorithm=cispo": "tests/training/policy/test_algorithms.py",
    "objective.changes={last: 2, kl: 0.01}": "tests/pipelines/flow_grpo/test_matrix.py",
    "loss.row=": "tests/training/text/test_dpo.py",
}
"""What a command is known by -> where the same is run."""

STARTS = [
    block
    for block in BLOCKS
    if block.language == "bash"
    and block.page.parent == SITE / "trainers"
    and block.line <= PAGES[block.page].partition("## What we measured")[0].count("\n")
]


def runnable(block: Block) -> list[list[str]]:
    """Return the training commands of a block that need no file of the reader."""
    commands = [words for words in commands_of(block.code) if words[0] in ("train", "train-reward")]
    return [w for w in commands if not any(own in part for own in OF_THE_READER for part in w)]


RUN = {
    block: [words for words in runnable(block) if not any(part in " ".join(words) for part in SAME)]
    for block in STARTS
}


def test_every_trainer_page_begins_with_a_start_that_runs() -> None:
    parts = ["Quick start", "What you get", "Metrics to watch", "Settings"]
    pages = [page for page in PAGES if page.parent == SITE / "trainers"]
    tables = {"index.md", "metrics.md", "monitor.md", "configs.md"}
    for page in pages:
        heads = [line.removeprefix("## ") for line in PAGES[page].splitlines() if line.startswith("## ")]
        if page.name not in tables:
            assert heads[0] == parts[0], page.name
            assert [head for head in heads if head in parts] == parts, page.name
            assert "What we measured" not in heads[:-1], page.name
    started = {block.page.name for block in STARTS if runnable(block)}
    assert started == {page.name for page in pages} - tables
    commands = [" ".join(words) for block in STARTS for words in runnable(block)]
    assert not [part for part in SAME if not any(part in command for command in commands)]


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in STARTS if RUN[block]], ids=str)
def test_the_quick_start_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = "".join(f"{json.dumps(record)}\n" for record in heldout_prompts()[::60])
    Path("few.jsonl").write_text(few, encoding="utf-8")
    for number, words in enumerate(RUN[block]):
        own = {word.partition("=")[0] for word in words} - LENGTHS
        budgets = BUDGETS.get(words[1]) or BUDGETS[str(read_config(words[1])["pipeline"])]
        budget = [key for key in budgets if key.partition("=")[0] not in own]
        output = Path(words[words.index("--output") + 1]) if "--output" in words else Path(f"run{number}")
        arguments = [*words, *budget, *(() if "--output" in words else ("--output", str(output)))]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{words}: {result.output[-2000:]} {result.exception!r}"
        if "--dry-run" not in words:
            assert json.loads((output / "summary.json").read_text(encoding="utf-8"))
