# SPDX-License-Identifier: Apache-2.0
"""What a run sees of a policy that exploits its reward: the statistics, the trends, the two rules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import kendalltau

from tests.support.training.images import Brightness, outcome, toy_trainer
from visalign.config import load_config
from visalign.errors import ConfigError
from visalign.pipelines.text.config import TextGRPOConfig
from visalign.rewards.combine.weighted_sum import WeightedSum
from visalign.training.loop.judging import rank_agreement, score_metrics
from visalign.training.loop.metrics import read_metrics
from visalign.training.loop.monitor import Monitor, MonitorLimits, MonitorSettings, monitor_messages
from visalign.training.loop.progress import TrainingProgress

NAN = math.nan


def test_agreement_is_kendalls_tau_within_groups():
    """Group 1: of three pairs two agree, (2 − 1)/3. Group 2: one tie in t, 2/√(3 · 2). Group 3 says nothing,
    as all of s are equal; group 4 has one sample left."""
    group = torch.tensor([1, 1, 1, 2, 2, 2, 3, 3, 4, 4])
    s = torch.tensor([1.0, 2, 3, 1, 2, 3, 5, 5, 1, NAN]).double()
    t = torch.tensor([1.0, 3, 2, 0, 0, 1, 1, 2, 1, 2]).double()
    assert rank_agreement(s, t, group) == pytest.approx((1 / 3 + 2 / math.sqrt(6)) / 2)
    assert math.isnan(rank_agreement(s[6:], t[6:], group[6:]))
    s, t = torch.randint(0, 6, (2, 40), generator=torch.Generator().manual_seed(0)).double()
    expected: Any = kendalltau(s.numpy(), t.numpy())
    assert rank_agreement(s, t, torch.zeros(40, dtype=torch.int64)) == pytest.approx(expected.statistic)


def test_recorded_rewards_are_turned_so_that_higher_is_better():
    class Fewer(Brightness):
        higher_is_better = False

    reward = WeightedSum({"a": (Brightness(), 1.0), "b": (Fewer(), 0.0)})
    a, group = torch.tensor([1.0, 2, 3, 4]).double(), torch.tensor([0, 0, 1, 1])
    metrics = score_metrics(reward, a, torch.tensor([True] * 3 + [False]), group, {"a": a, "b": 2 * a})
    assert metrics["agreement/b"] == -1 and metrics["recorded/b"] == -5 and metrics["reward_part/b"] == 5
    assert metrics["recorded_std/b"] == 1
    assert metrics["reward_mean"] == 2 and metrics["reward_group_std"] == pytest.approx(0.25)


def _followed(rows: list[dict[str, float]], **settings: Any) -> tuple[dict[str, float], list[str], dict]:
    """Trends of the last row, the notes, and what the counters keep."""
    progress, own, notes = TrainingProgress(9, enabled=False), {}, []
    progress.note = notes.append  # type: ignore[method-assign]
    monitor, trends = Monitor(MonitorSettings(**{"window": 2, **settings}), progress), {}
    for number, row in enumerate(rows, start=1):
        trends = monitor.follow({"iteration": number, **row}, own)
        own = json.loads(json.dumps(own))  # as a checkpoint keeps it
    monitor.stops(own)
    return trends, notes, own


def test_trends_are_the_latest_iterations_against_the_first():
    rows = [
        {"agreement/a": 0.5, "recorded/a": 10.0, "recorded_std/a": 4.0, "reward_group_std": 2.0},
        {"agreement/a": 0.7, "recorded/a": 12.0, "recorded_std/a": 6.0, "reward_group_std": 4.0},
        {"agreement/a": NAN, "recorded/a": 99.0, "recorded_std/a": 1.0, "reward_group_std": 9.0},
        {"agreement/a": 0.2, "recorded/a": 6.0, "recorded_std/a": 1.0, "reward_group_std": 0.5},
        {"agreement/a": 0.4, "recorded/a": 4.0, "recorded_std/a": 1.0, "reward_group_std": 1.0},
    ]
    rows = [
        {**row, "reward_part/b.std": std, "diversity": std / 8, "grad_norm": std / 4}
        for row, std in zip(rows, (1.0, 3.0, 5.0, 5.0, 7.0), strict=True)
    ]
    off = MonitorLimits()
    assert _followed(rows[:3], warn=off)[0] == {}, "the first iterations, and one more"
    trends, notes, _ = _followed(rows, warn=off)
    assert trends == pytest.approx(
        {
            "agreement_change/a": (0.2 + 0.4) / 2 - (0.5 + 0.7) / 2,
            "recorded_change/a": (5.0 - 11.0) / 5.0,
            "group_std_ratio": 0.75 / 3.0,
            "judge_std_ratio/b": 6.0 / 2.0,
            "diversity_ratio": 3.0,
            "gradient_ratio": 3.0,
        }
    )
    assert notes == []
    _, _, own = _followed(rows[:4], warn=off)
    wider, state = (Monitor(MonitorSettings(window=5, warn=off), TrainingProgress(9, enabled=False)), own["monitor"])
    assert wider.follow({"iteration": 5, **rows[4]}, own) == pytest.approx(trends), "its beginning stays that"
    assert len(state["first"]["reward_group_std"]) == 2
    stale = _followed([*rows, {**rows[-1], "agreement/a": NAN}], warn=off)[0]
    assert "agreement_change/a" not in stale and "group_std_ratio" in stale


def test_what_crosses_a_limit_is_said_once_with_both_numbers():
    rows = [{"agreement/a": tau} for tau in (0.6, 0.6, 0.1, 0.1, 0.0)]
    _, notes, own = _followed(rows)
    assert notes == ["Warning: agreement_change/a is -0.5, below monitor.warn.agreement_change (-0.3)."]
    assert monitor_messages(own) == [notes[0].replace("Warning", "Iteration 4")]
    limits = MonitorLimits(judge_std_ratio=1.5, feature_drift=0.2)
    rows = [{"reward_part/std": 1.0}] * 2 + [{"reward_part/std": 2.0}] * 2 + [{"heldout/feature_drift": 0.3}]
    _, notes, own = _followed(rows, warn=MonitorLimits(), stop=limits)
    assert notes == [
        "The monitor stops the run: judge_std_ratio/reward is 2, above monitor.stop.judge_std_ratio (1.5). "
        "Continue with --resume and another monitor.stop.",
        "The monitor stops the run: feature_drift is 0.3, above monitor.stop.feature_drift (0.2). Continue "
        "with --resume and another monitor.stop.",
    ]
    assert monitor_messages(own)[0].startswith("Stopped: judge_std_ratio/reward is 2, above")


def test_a_gradient_that_grows_is_warned_of_by_default():
    rows = [{"grad_norm": norm} for norm in (0.4, 0.6, 1.9, 2.0, 2.2, 9.0)]
    assert _followed(rows[:4])[1] == []
    assert _followed(rows)[1] == ["Warning: gradient_ratio is 4.2, above monitor.warn.gradient_ratio (4)."]
    _, notes, _ = _followed(rows, stop=MonitorLimits(gradient_ratio=10.0))
    assert notes[-1].startswith(
        "The monitor stops the run: gradient_ratio is 11.2, above monitor.stop.gradient_ratio (10)"
    )


def test_a_reward_that_agrees_with_none_is_said_before_anything_has_changed():
    rows = [{"agreement/a": tau} for tau in (0.3, 0.0, 0.5, -0.4)]  # means of two: 0.15, 0.25, 0.05
    limit = MonitorLimits(agreement=0.2)
    for length, expected in ((1, None), (2, 0.15), (3, 0.15), (4, 0.15)):
        _, notes, own = _followed(rows[:length], warn=limit)
        assert len(notes) == (expected is not None), "said once"
        if expected is not None:
            assert notes == [f"Warning: agreement/a is {expected}, below monitor.warn.agreement (0.2)."]
    assert own["monitor"]["now"]["agreement/a"] == pytest.approx(0.05)


def test_a_fall_on_held_out_prompts_is_said_of_each_reward():
    rows = [{"heldout/change/a": 0.3, "heldout/change/accuracy": -2.9}, {"heldout/change/accuracy": -3.1}, {}]
    trends, notes, own = _followed(rows)
    assert notes == ["Warning: heldout_change/accuracy is -3.1, below monitor.warn.heldout_change (-3)."]
    assert own["monitor"]["now"] == {"heldout_change/a": 0.3, "heldout_change/accuracy": -3.1}
    assert not any(trends)


def test_limits_that_cannot_be_crossed_are_refused():
    for limit, remedy in (
        ("agreement=0.2", "Hold a reward out"),
        ("agreement_change=-0.2", "Hold a reward out"),
        ("feature_drift=1", "It is of images"),
        ("heldout_change=-2", r"Set evaluation\.every above 0\. Hold a reward out"),
    ):
        with pytest.raises(ConfigError, match=f"monitor.stop.*this run does not measure it. {remedy}"):
            load_config(TextGRPOConfig, overrides=[f"monitor.stop.{limit}"])


def _hacked(folder: Path, stop: MonitorLimits, iterations: int = 5) -> Any:
    """Brightness is trained on; the mean of its held-out negative can only fall."""

    class Dark(Brightness):
        higher_is_better = False

    reward = WeightedSum({"brightness": (Brightness(), 1.0), "dark": (Dark(), 0.0)})
    settings = MonitorSettings(window=1, warn=MonitorLimits(), stop=stop)
    return toy_trainer(folder, reward=reward, run={"iterations": iterations, "monitor": settings})


def test_a_run_that_crosses_a_limit_ends_in_order_and_resumes_under_another(tmp_path):
    strict = MonitorLimits(recorded_change=-2.0)
    trainer = _hacked(tmp_path / "cut", strict)
    result = trainer.train()
    stopped = result.counters.iteration
    rows = read_metrics(tmp_path / "cut" / "metrics.jsonl")
    assert result.stopped == "monitor" and 1 < stopped < 5 and len(rows) == stopped
    assert rows[-1]["recorded_change/dark"] < -2 <= rows[-2].get("recorded_change/dark", 0.0)
    again = _hacked(tmp_path / "cut", strict)
    assert again.resume() and again.train().stopped == "monitor"
    assert again.counters.iteration == stopped, "under the same limit nothing is trained"
    looser = _hacked(tmp_path / "cut", MonitorLimits())
    assert looser.resume() and looser.train().stopped == "finished"
    _hacked(tmp_path / "whole", MonitorLimits()).train()
    assert outcome(tmp_path / "cut")[1:] == outcome(tmp_path / "whole")[1:]
