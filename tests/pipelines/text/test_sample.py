# SPDX-License-Identifier: Apache-2.0
"""Sampling to a dataset: what is written, that it can be made again, selected anew, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.text_jobs import QUESTIONS, text_inputs
from visalign.config import load_config
from visalign.data.sets.prompt_files import load_demonstrations
from visalign.errors import UserError
from visalign.pipelines.text import sample as text_sample
from visalign.pipelines.text.process import TextProcessConfig, read_steps
from visalign.pipelines.text.sample import TextSampleConfig, plan, run
from visalign.pipelines.text.supervised import TextSFTConfig
from visalign.training.loop.checkpoint import CheckpointError
from visalign.training.loop.judging import RewardFailure

BASE = (
    "rollout={temperatures: [0.7, 1.5], top_p: [1.0], seeds: [0, 3], samples: 4, max_new_tokens: 6}",
    "rollout.prompts_per_call=3",
    "rollout.max_failure_rate=0.9",
    "selection={rule: rejection, threshold: 0.3, per_prompt: 3, truncated: true}",
    "run.device=cpu",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return text_inputs(tmp_path_factory.mktemp("inputs"))


def _config(inputs: Path, *overrides: str) -> TextSampleConfig:
    files = (
        f"model.path={inputs}/model",
        f"data.train={inputs}/prompts.jsonl",
        f"rewards.terms={{early: {{name: '{inputs}/early.py:Early'}}}}",
    )
    return load_config(TextSampleConfig, None, [*files, *BASE, *overrides])


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    output = tmp_path_factory.mktemp("runs") / "finished"
    return output, run(_config(inputs), output)


def _lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "dataset.jsonl").read_text().splitlines()]


def _all(inputs: Path, finished: tuple[Path, Any], tmp_path: Path) -> list[dict[str, Any]]:
    """Every judged completion of the finished run."""
    return _selected(inputs, finished, tmp_path, "selection.rule=all")[0]


def _selected(inputs: Path, finished: tuple[Path, Any], tmp_path: Path, *overrides: str) -> tuple[Any, Any]:
    """The dataset of the finished run's completions, selected anew, and the summary."""
    import shutil

    copy = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
    shutil.copytree(finished[0], copy)
    summary = run(_config(inputs, *overrides), copy, resume=True)
    return _lines(copy), summary


def test_a_dataset_holds_accepted_completions_with_their_origin(finished, inputs):
    output, summary = finished
    lines = _lines(output)
    assert 12 < len(lines) == summary["records"] <= 3 * 8
    assert list(lines[0]) == [
        *("prompt", "completion", "reward", "temperature", "top_p", "seed", "sample", "group"),
        *("answer", "tag"),
    ]
    for line in lines:
        text = line["completion"]
        assert line["reward"] == pytest.approx(sum("a" <= c <= "m" for c in text) / max(1, len(text)))
        assert line["reward"] >= 0.3 and "z" not in text
        record = QUESTIONS[line["group"]]
        assert (line["prompt"], line["answer"], line["tag"]) == tuple(record[k] for k in ("prompt", "answer", "tag"))
        assert line["temperature"] in (0.7, 1.5) and line["top_p"] == 1.0
        assert line["seed"] in (0, 3) and line["sample"] in range(4)
    assert max(Counter(line["group"] for line in lines).values()) == 3
    assert summary["prompts_covered"] == len({line["group"] for line in lines})
    assert summary["reward_mean"] == pytest.approx(sum(line["reward"] for line in lines) / len(lines))
    assert load_demonstrations(output / "dataset.jsonl") == lines  # what text_sft reads
    assert load_config(TextSampleConfig, output / "config.yaml") == _config(inputs)


def test_the_summary_says_what_each_point_is_worth(finished, inputs, tmp_path):
    _, summary = finished
    lines = _all(inputs, finished, tmp_path)
    assert summary["completions"] == 2 * 2 * 4 * 8 == len(lines) + summary["failed"] and summary["failed"] > 0
    assert summary["failure_reasons"] == {"early: a z in it": summary["failed"]}
    keys = [(row["temperature"], row["top_p"], row["seed"]) for row in summary["points"]]
    assert keys == [(0.7, 1.0, 0), (0.7, 1.0, 3), (1.5, 1.0, 0), (1.5, 1.0, 3)]
    assert [(row["temperature"], row["top_p"]) for row in summary["distributions"]] == [(0.7, 1.0), (1.5, 1.0)]
    for row in summary["distributions"]:
        own = [line for line in lines if line["temperature"] == row["temperature"]]
        good = [line for line in own if line["reward"] >= 0.3]
        assert (row["completions"], row["judged"], row["accepted"]) == (64, len(own), len(good))
        assert row["acceptance_rate"] == pytest.approx(len(good) / len(own))
        assert row["prompts_accepted"] == pytest.approx(len({line["group"] for line in good}) / 8)
    assert sum(row["accepted"] for row in summary["points"]) == summary["accepted"]
    assert sum(row["selected"] for row in summary["points"]) == summary["records"]


def test_the_same_seed_gives_the_same_dataset_however_it_is_cut(finished, inputs, tmp_path):
    again = tmp_path / "again"
    run(_config(inputs, "rollout.prompts_per_call=8"), again)
    assert (again / "dataset.jsonl").read_bytes() == (finished[0] / "dataset.jsonl").read_bytes()
    other = tmp_path / "other"
    run(_config(inputs, "seed=1"), other)
    assert (other / "dataset.jsonl").read_bytes() != (finished[0] / "dataset.jsonl").read_bytes()


def test_a_stopped_run_samples_only_what_is_missing(finished, inputs, tmp_path, monkeypatch):
    calls: list[int] = []
    sample = text_sample.sample_point

    def dies(*arguments: Any, **options: Any) -> Any:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(1)
        return sample(*arguments, **options)

    monkeypatch.setattr(text_sample, "sample_point", dies)
    with pytest.raises(KeyboardInterrupt):
        run(_config(inputs), tmp_path / "cut")
    assert not (tmp_path / "cut" / "dataset.jsonl").exists()
    calls.clear()
    run(_config(inputs), tmp_path / "cut", resume=True)
    assert len(calls) == 1
    assert (tmp_path / "cut" / "dataset.jsonl").read_bytes() == (finished[0] / "dataset.jsonl").read_bytes()


def test_nothing_accepted_is_an_error_that_writes_no_dataset(inputs, tmp_path):
    output = tmp_path / "out"
    grid = "rollout={samples: 1, max_new_tokens: 6, max_failure_rate: 0.9}"
    with pytest.raises(UserError, match=r"None of 8 completions was selected: .* the best reward is .*threshold"):
        run(_config(inputs, grid, "selection.threshold=1.0"), output)
    assert not (output / "dataset.jsonl").exists() and not (output / "summary.json").exists()
    summary = run(_config(inputs, grid, "selection.threshold=0.0"), output, resume=True)
    assert summary["records"] > 0


def test_too_many_failed_judgements_stop_the_run(inputs, tmp_path):
    with pytest.raises(RewardFailure, match=r"could not score .*at most 1% may fail.*a z in it"):
        run(_config(inputs, "rollout.max_failure_rate=0.01"), tmp_path / "out")
    assert not (tmp_path / "out" / "dataset.jsonl").exists()
    assert not list((tmp_path / "out").glob("points/*"))


def _write(folder: Path, *records: Any) -> str:
    file = folder / "p.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records))
    return f"data.train={file}"


def test_what_cannot_be_used_is_refused_before_anything_is_written(inputs, tmp_path):
    output = tmp_path / "out"
    refused = {
        "selection.threshold=1.5": "selection.threshold is 1.5, and the rewards reach 1 at most",
        "rewards.terms.early.uncertainty=advantage": "uncertainty is advantage, and nothing is trained here",
        f"model.path={tmp_path}/none": "none",
        _write(tmp_path, {"prompt": "a", "reward": 1}): "record 0 has the field 'reward', which the dataset",
    }
    for override, message in refused.items():
        with pytest.raises((UserError, FileNotFoundError), match=message):
            run(_config(inputs, override), output)
        assert not output.exists()


@pytest.mark.parametrize(
    ("file", "old", "key"),
    [("prompts.jsonl", '"a a?"', r"data\.train"), ("early.py", "\n", r"rewards\.terms\.early\.name")],
)
def test_resume_notices_other_prompts_and_rewards(finished, inputs, file, old, key):
    path = inputs / file
    text = path.read_text()
    try:
        path.write_text(text.replace(old, '"a b?"' if file == "prompts.jsonl" else "\n\n", 1))
        with pytest.raises(CheckpointError, match=rf"{key}: '\w+' there, '\w+' now"):
            run(_config(inputs), finished[0], resume=True)
    finally:
        path.write_text(text)


def test_the_plan_counts_the_completions(inputs):
    planned = plan(_config(inputs))
    assert planned["sampling"] == {"prompts": 8, "grid_points": 4, "completions_per_prompt": 16, "completions": 128}
    assert planned["selection"] == {"rule": "rejection", "records_at_most": 24}
    assert plan(_config(inputs, "selection.rule=best_of_n"))["selection"]["records_at_most"] == 8
    assert plan(_config(inputs, "selection.per_prompt=null"))["selection"]["records_at_most"] == 128


def test_a_dataset_says_what_the_tool_wrote(inputs, tmp_path):
    tool = inputs / "shout.py"
    tool.write_text("def shout(text):\n    return text[-1:] * 2\n")
    calls = f"rollout.tool={{use: '{tool}:shout', close: b, max_calls: 1}}"
    summary = run(_config(inputs, calls, "rollout.max_new_tokens=8", "selection.rule=all"), tmp_path / "run")
    lines = _lines(tmp_path / "run")
    answered = [line for line in lines if "tool_answers" in line]
    assert 0 < len(answered) < len(lines)
    for line in answered:
        ((begin, end),) = line["tool_answers"]
        before = line["completion"][:begin]
        assert before.endswith("b") and line["completion"][begin:end] in (before[-2:-1] * 2, before[-2:-1])
    more = run(_config(inputs, calls, "rollout.max_new_tokens=8", "selection.rule=all"), tmp_path / "run", resume=True)
    assert _lines(tmp_path / "run") == lines and more["records"] == summary["records"]


def test_what_an_environment_wrote_into_a_prompt_is_learnt_with_it(inputs, tmp_path):
    file = inputs / "board.py"
    file.write_text("class Board:\n    def reset(self): return ' hi'\n    def step(self, text): return 'no'\n")
    use = {"use": f"{file}:Board"}
    config = _config(inputs, f"rollout.environment={json.dumps(use)}", "selection.rule=all")
    summary = run(config, tmp_path / "run")
    assert {line["prompt"] for line in _lines(tmp_path / "run")} == {f"{q['prompt']} hi" for q in QUESTIONS}
    keys = [key for key in summary.next_command[3:] if key.startswith("generation")]
    assert load_config(TextSFTConfig, None, keys).generation.environment == config.rollout.environment
    assert any("tool_answers" in line for line in _lines(tmp_path / "run"))
    steps = read_steps(load_config(TextProcessConfig, None, [f"data.train={tmp_path}/run/dataset.jsonl"]))
    assert not any("<end>" in row["completion"] for part in steps for _, row in part), "turns end as rewards read them"


def test_hinted_completions_stand_in_where_none_was_right(inputs, finished, tmp_path):
    """The points without a hint are those of a run without hints, and the prompts those of the records."""
    hinted = ("rollout.hint='aaaa {answer}'", "selection.threshold=0.5")
    output = tmp_path / "run"
    summary = run(_config(inputs, *hinted), output)
    plain = [line for line in _all(inputs, finished, tmp_path) if line["reward"] >= 0.5]
    solved, lines = {line["group"] for line in plain}, _lines(output)
    with_hints = [line for line in lines if "hinted" in line]
    assert with_hints and all(line["hinted"] is True for line in with_hints)
    assert {line["group"] for line in with_hints}.isdisjoint(solved) and len(solved) < 8
    assert {line["group"] for line in lines if "hinted" not in line} == solved
    assert all(line["prompt"] == QUESTIONS[line["group"]]["prompt"] for line in lines)
    assert [row["hinted"] for row in summary["points"]] == [False] * 4 + [True] * 4
    assert summary["completions"] == 2 * 128 and summary["distributions"][0]["completions"] == 64
    harder = run(_config(inputs, *hinted, "selection.skip_solved=true"), output, resume=True)
    assert harder["records"] <= summary["records"] and harder["accepted"] == summary["accepted"]
    easy = ("selection.threshold=0.0", "selection.skip_solved=true")
    with pytest.raises(UserError, match=r"was selected: .*skip_solved True"):
        run(_config(inputs, *easy), tmp_path / "easy")
    with pytest.raises(UserError, match="names the field 'solution', which a record lacks"):
        run(_config(inputs, "rollout.hint='{solution}'"), tmp_path / "lacking")
    assert not (tmp_path / "lacking").exists()
