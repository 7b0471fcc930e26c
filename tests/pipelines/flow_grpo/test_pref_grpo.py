# SPDX-License-Identifier: Apache-2.0
"""The Pref-GRPO job: win rates inside groups as reward, from scores and from pairwise judges; wrong input."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.support.judges.brightness import grey
from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.config import load_config
from visalign.errors import UserError
from visalign.pipelines.flow_grpo.config import ComparisonConfig
from visalign.pipelines.flow_grpo.inputs import build_win_rates, prepare
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, PrefGRPOConfig, run
from visalign.pipelines.jobs import load_job
from visalign.pipelines.shared.sections import RewardsConfig, RewardTerm
from visalign.rewards import load_judge, load_reward
from visalign.rewards.base.contract import RewardError
from visalign.training.loop.metrics import read_metrics

HERE = "tests.support.judges.brightness:BrightnessPairs"
BASE = (
    "model.lora.rank=4",
    "rollout={prompts_per_iteration: 2, group_size: 4, steps: 3, batch_size: 8}",
    "objective.changes={surrogate_options: {eps_low: 0.01, eps_high: 0.01}, kl: 0}",
    "optimizer={lr: 1e-3, updates_per_iteration: 1, micro_batch: 8, ema_every: 1}",
    "evaluation={seeds: [0], rewards: {shapes_verifier: {}}}",
    "run={iterations: 2, checkpoint_every: 1, device: cpu}",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_sd3_pipeline().save_pretrained(folder / "model")
    records = [
        {"prompt": "a circle", "tag": "a", "include": [{"class": "circle", "count": 1}]},
        {"prompt": "two circles", "tag": "b", "include": [{"class": "circle", "count": 2}]},
    ]
    (folder / "p.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return [f"model.path={folder}/model", *(f"data.{k}={folder}/p.jsonl" for k in ("train", "heldout"))]


def config(files: list[str], *overrides: str) -> PrefGRPOConfig:
    return load_config(PrefGRPOConfig, None, [*BASE, *files, *overrides])


def judged(**options: Any) -> dict[str, RewardTerm]:
    return {"judge": RewardTerm(name=HERE, options=options)}


def win_rates(comparison: ComparisonConfig, **options: Any) -> list[float]:
    rewards = RewardsConfig(terms=judged(**options))
    judge = load_judge(HERE, **options)
    reward = build_win_rates(comparison, rewards, {"judge": judge})["judge"]
    return reward.score(grey([0.1, 0.5, 0.9]), ["p"] * 3).value.tolist()


def test_win_rates_by_hand():
    """0.1, 0.5, 0.9 under a judge that is sure: 0, 1/2, 1; both orders cancel the liking for the left."""
    assert win_rates(ComparisonConfig(), scale=200.0) == pytest.approx([0.0, 0.5, 1.0], abs=1e-6)
    one_way = torch.tensor(win_rates(ComparisonConfig(both_orders=False), scale=1.0, bias=3.0))
    both = torch.tensor(win_rates(ComparisonConfig(), scale=1.0, bias=3.0))
    near, far = torch.sigmoid(torch.tensor(0.4)), torch.sigmoid(torch.tensor(0.8))
    expected = torch.stack([2 - near - far, torch.tensor(1.0), near + far]) / 2
    torch.testing.assert_close(both, expected, atol=1e-6, rtol=0)
    assert (one_way - expected).abs().max() > 0.1
    assert win_rates(ComparisonConfig(hard=True), scale=1.0, bias=3.0) == [0.0, 0.5, 1.0]


def test_failed_comparisons_are_no_ties():
    values = win_rates(ComparisonConfig(), scale=200.0, fails=lambda left, right: min(left, right) < 0.2)
    assert values[0] != values[0]  # each of its comparisons failed
    assert values[1:] == pytest.approx([0.0, 1.0], abs=1e-6)


def test_a_run_on_a_pairwise_judge(files, tmp_path):
    terms = f"rewards.terms={{judge: {{name: '{HERE}'}}, jpeg_size: {{weight: 0.0}}}}"
    summary = run(config(files, terms), tmp_path / "run")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 2 and summary["before"]["rewards"].keys() >= {"shapes_verifier"}
    for record in records:
        assert record["reward_mean"] == pytest.approx(0.5, abs=1e-5), "win rates of a group average one half"
        assert record["reward_group_std"] > 0 and record["valid_share"] == 1
    assert (tmp_path / "run" / "config.yaml").read_text().startswith("pipeline: pref_grpo\n")
    again = load_job(str(tmp_path / "run" / "config.yaml"))
    assert isinstance(again.config, PrefGRPOConfig) and again.config.comparison.both_orders


def test_scores_beside_win_rates(files):
    own = ["rewards.terms={sharpness: {}, verifier: {name: shapes_verifier}}", "rewards.allow_mixed_units=true"]
    inputs = prepare(config(files, *own, "comparison.scores=[verifier]"), 1)
    images = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    scores = inputs.reward.score(images, ["a circle"] * 4, [{"include": [{"class": "circle", "count": 1}]}] * 4)
    assert sorted(scores.parts["sharpness"].tolist()) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert set(scores.parts["verifier"].tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["comparison={budget: 0.5, hard: true}"], "comparison.budget and comparison.hard are both set"),
        (["rewards.terms={sharpness: {}}", "comparison.scores=[sharp]"], "'sharp', which is no term. Did you"),
        (
            [f"rewards.terms={{judge: {{name: '{HERE}'}}, sharpness: {{}}}}", "comparison.scores=[judge]"],
            "a judge that only compares; take it out",
        ),
        ([f"evaluation.rewards={{judge: {{name: '{HERE}'}}, shapes_verifier: {{}}}}"], "judge only compares images"),
    ],
)
def test_refused(files, overrides, message):
    with pytest.raises(UserError, match=message):
        prepare(config(files, "rewards.terms={sharpness: {}}", *overrides), 1)


def test_flow_grpo_refuses_a_judge_that_only_compares(files):
    settings = load_config(FlowGRPOConfig, None, [*BASE, *files, f"rewards.terms={{judge: {{name: '{HERE}'}}}}"])
    with pytest.raises(UserError, match="Take pipeline: pref_grpo, or"):
        prepare(settings, 1)
    with pytest.raises(RewardError, match="compares two images and gives no score of one"):
        load_reward(HERE)
