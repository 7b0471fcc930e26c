# SPDX-License-Identifier: Apache-2.0
"""optimizer.lr=find: what is run, what is chosen and written, a resume, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from visalign.config import load_config
from visalign.errors import ConfigError, UserError
from visalign.pipelines.flow_grpo import job
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig
from visalign.pipelines.jobs import load_job
from visalign.pipelines.shared.learning_rate import measure_change, run_with_found_rate, split_search
from visalign.pipelines.shared.run_folder import RunSummary
from visalign.pipelines.text.supervised import TextSFTConfig
from visalign.training.loop.trainer import Diverged

CHANGES = {3e-5: 0.0, 9e-5: 0.1, 3e-4: 0.3, 9e-4: 0.3}


def _run_of(calls: list[tuple[float, int, Path]], changes: dict[float, float]) -> Any:
    """A run whose held-out change depends on the rate; others diverge."""

    def run(config: Any, output: Path, resume: bool = False) -> RunSummary:
        calls.append((config.optimizer.lr, config.run.iterations, output))
        assert (config.run.best_by is None) == (config.run.patience is None), "patience counts evaluations of best_by"
        (output / "lora").mkdir()
        (output / "before.npz").write_text("measured once")
        if config.optimizer.lr not in changes:
            raise Diverged("not finite")
        gain = {"estimate": changes[config.optimizer.lr]}
        summary = {"stopped": "finished", "before": {}, "after": {}, "gain": gain}
        (output / "summary.json").write_text(json.dumps(summary))
        return RunSummary(summary, [])

    return run


def test_the_best_rate_is_run_and_written(tmp_path, capsys):
    early_stop = ["run.best_by=heldout/accuracy", "run.patience=2"]
    config, calls = load_config(FlowGRPOConfig, None, ["run.iterations=60", *early_stop]), list[Any]()
    run_with_found_rate(config, tmp_path / "run", run=_run_of(calls, CHANGES))
    assert [call[:2] for call in calls] == [(3e-5, 6), (9e-5, 6), (3e-4, 6), (9e-4, 6), (3e-3, 6), (3e-4, 60)]
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["optimizer"]["lr"] == 3e-4 and saved["run"]["iterations"] == 60 and saved["pipeline"] == "flow_grpo"
    printed = capsys.readouterr().out
    assert "diverged" in printed and "Chosen: optimizer.lr=0.0003" in printed
    assert not [*(tmp_path / "run" / "learning_rate").glob("*/lora")]
    assert json.loads((tmp_path / "run" / "learning_rate.json").read_text())["rates"][1]["change"] == 0.1
    run_with_found_rate(config, tmp_path / "none", run=_run_of(calls, dict.fromkeys(CHANGES, -0.1)))
    assert calls[-1][0] == 3e-4, "the configuration's own"


def test_a_resume_repeats_no_rate_that_ended(tmp_path):
    config, calls = load_config(FlowGRPOConfig), list[Any]()
    with pytest.raises(KeyboardInterrupt):

        def interrupted(config: Any, output: Path, resume: bool = False) -> RunSummary:
            if config.optimizer.lr > 1e-4:
                raise KeyboardInterrupt
            return _run_of(calls, CHANGES)(config, output, resume)

        run_with_found_rate(config, tmp_path / "run", run=interrupted)
    with pytest.raises(UserError, match=r"is not empty.*--resume"):
        run_with_found_rate(config, tmp_path / "run", run=_run_of(calls, CHANGES))
    run_with_found_rate(config, tmp_path / "run", resume=True, run=_run_of(calls, CHANGES))
    assert [call[0] for call in calls] == [3e-5, 9e-5, 3e-4, 9e-4, 3e-3, 3e-4]


def test_the_last_override_asks_for_it():
    assert split_search(["seed=1", "optimizer.lr=find"]) == (True, ["seed=1"])
    assert split_search(["optimizer.lr=find", "optimizer.lr=1e-3"]) == (False, ["optimizer.lr=1e-3"])
    with pytest.raises(ConfigError, match=r"got 'abc' \(str\).* Or let short runs find it: optimizer.lr=find"):
        load_job("shapes_flow_grpo", ["optimizer.lr=abc"])


def test_the_plan_names_the_rates_and_what_cannot_be_compared_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "estimate", lambda config: {"batch": 1})
    planned = load_job("shapes_flow_grpo", ["optimizer.lr=find", "run.iterations=20"])
    search = planned.estimate(planned.config)["learning_rate"]
    assert search["iterations_each"] == 5 and search["more_iterations"] == 25 and search["rates"].count(", ") == 4
    config = load_config(TextSFTConfig, None, ["evaluation={correctness: null, rewards: {}}"])
    with pytest.raises(UserError, match=r"compares held-out numbers, and evaluation.rewards is empty"):
        run_with_found_rate(config, tmp_path / "run", run=_run_of([], {}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="runs in one process"):
        run_with_found_rate(load_config(FlowGRPOConfig), tmp_path / "run", run=_run_of([], {}))


@pytest.mark.parametrize(
    ("overrides", "summary", "change"),
    [
        ([], {"gain": {"estimate": 0.2}, "before": {}, "after": {}}, 0.2),
        ([], {"before": {"srcc": 0.5}, "after": {"accuracy": None, "srcc": 0.75}}, 0.25),
        (["evaluation.correctness=null"], {"gain": {}, "higher_is_better": True}, 3.0),
        (["evaluation.correctness=null"], {"gain": {}, "higher_is_better": False}, -1.0),
    ],
)
def test_the_change_is_of_verdicts_of_a_measure_or_of_the_weighted_rewards(overrides, summary, change):
    terms = "rewards.terms={up: {name: sharpness}, other: {name: sharpness, weight: 2.0}}"
    config = load_config(FlowGRPOConfig, None, [terms, "rewards.allow_mixed_units=true", *overrides])
    if "higher_is_better" in summary:
        directions = {"up": {"higher_is_better": True}, "other": {"higher_is_better": summary["higher_is_better"]}}
        rewards = {"up": {"estimate": 1.0}, "other": {"estimate": 1.0}}
        summary = {"gain": {}, "before": {"rewards": directions}, "after": {}, "changes": {"rewards": rewards}}
    assert measure_change(config, {"stopped": "finished", **summary})["change"] == pytest.approx(change)
