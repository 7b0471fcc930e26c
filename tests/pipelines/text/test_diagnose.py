# SPDX-License-Identifier: Apache-2.0
"""What training did to a text policy: on two tiny models whose answers are known, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.training.text_jobs import QUESTIONS, text_inputs
from visalign.config import load_config
from visalign.pipelines.cli.app import app
from visalign.pipelines.shared.run_folder import write_beginning
from visalign.pipelines.text.supervised import TextSFTConfig
from visalign.pipelines.text.supervised import run as sft

JUDGE = '''
import torch
from visalign.interfaces import Scores


class Starts:
    """Whether a completion starts as the answer does."""

    name, unit, range, higher_is_better = "starts", "1 = correct", (0.0, 1.0), True

    def score(self, completions, prompts, metadata=None):
        right = [t[:1] == m["answer"] for t, m in zip(completions, metadata)]
        valid = torch.ones(len(right), dtype=bool)
        return Scores(value=torch.tensor(right).float(), valid=valid, unit=self.unit)
'''


OPPOSITE = """
def scaled(completions, answer, **_):
    return [7.0 * t.startswith(a) - 3 for t, a in zip(completions, answer)]


def opposite(completions, answer, **_):
    return [-0.5 * t.startswith(a) for t, a in zip(completions, answer)]


def flat(completions, **_):
    return [1.0 for _ in completions]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with `tuned`, a run learned by heart, and `idle`, untrained."""
    inputs = text_inputs(tmp_path_factory.mktemp("inputs"))
    (inputs / "starts.py").write_text(JUDGE)
    overrides = [
        f"model.path={inputs}/model",
        f"data={{train: '{inputs}/demonstrations.jsonl', heldout: '{inputs}/prompts.jsonl', batch: 8}}",
        "optimizer={lr: 1e-2, updates_per_iteration: 8, ema_decay: 0.0}",
        *("evaluation={seeds: [0], every: 0, correctness: starts}", "generation={max_new_tokens: 3}"),
        f"evaluation.rewards={{starts: {{name: '{inputs}/starts.py:Starts'}}}}",
    ]
    config = load_config(TextSFTConfig, None, [*overrides, "run={iterations: 4, device: cpu}"])
    sft(config, inputs / "tuned")
    write_beginning(inputs / "idle", config, {})
    shutil.copytree(inputs / "model", inputs / "idle" / "model")
    return inputs


def _said(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["diagnose", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else " ".join(result.output.split())


def test_a_run_that_learned_its_prompts_solves_what_its_base_does_not(runs):
    diagnosis = json.loads(_said(runs / "tuned", "--samples", 4, "--json"))
    assert (diagnosis["prompts"], diagnosis["samples"], diagnosis["correctness"]) == (8, 4, "starts")
    support = diagnosis["support"]
    assert [point["k"] for point in support["pass_at_k"]] == [1, 2, 4]
    first = support["pass_at_k"][0]
    assert first["base"]["estimate"] < 0.3 and first["tuned"]["estimate"] > 0.9
    assert support["preserved"] + support["expanded"] == 8 and support["expanded"] > 3
    assert len(support["solved_only_by"]["tuned"]) == support["expanded"]
    assert set(support["solved_only_by"]["tuned"]) <= {question["prompt"] for question in QUESTIONS}
    assert diagnosis["clip"] is None  # supervised
    assert support["crossing"] == {"k": None, "shown": False}
    best = diagnosis["best_of_n"]
    rewards = [point["reward"]["estimate"] for point in best["base"]]
    assert rewards == sorted(rewards) and rewards[0] == pytest.approx(first["base"]["estimate"])
    assert rewards[-1] == pytest.approx(support["pass_at_k"][-1]["base"]["estimate"])  # rewards of 0 and 1
    assert best["tuned"]["reward"]["estimate"] == pytest.approx(first["tuned"]["estimate"])
    assert best["tuned"]["kl"]["low"] > 1 and best["equal_n"] is None
    assert "The curves do not cross. Of 8 prompts" in " ".join(_said(runs / "tuned", "--samples", 2).split())


def test_a_second_run_is_compared_with_the_first(runs):
    diagnosis = json.loads(_said(runs / "tuned", runs / "idle", "--samples", 4, "--json"))
    assert diagnosis["base"].endswith("tuned") and diagnosis["tuned"].endswith("idle")
    assert diagnosis["support"]["expanded"] == 0 < diagnosis["support"]["shrunk"]
    assert diagnosis["best_of_n"]["equal_n"] == 1 and not diagnosis["best_of_n"]["cheaper_than_bound"]


def test_rewards_of_the_same_completions_are_compared_within_prompts(runs):
    (runs / "opposite.py").write_text(OPPOSITE)
    names = [f"{runs}/opposite.py:{name}" for name in ("scaled", "opposite", "flat")]
    options = [item for name in names for item in ("-r", name)]
    pairs = json.loads(_said(runs / "tuned", "--samples", 4, *options, "--json"))["rewards"]
    assert [pair["first"] for pair in pairs[:3]] == ["starts"] * 3 and len(pairs) == 6
    assert [pair["estimate"] for pair in pairs] == pytest.approx([0, 2, 1, 2, 1, 1], abs=1e-6)
    assert 3 < pairs[0]["prompts"] <= 8


def test_greedy_answers_change_with_the_noise_near_ties(runs):
    options = [("--samples", 2, "--json", "--margin", size, "--noise", max(size, 1e-3)) for size in (0, 50)]
    few, many = (json.loads(_said(runs / "tuned", *arguments))["greedy"]["policies"] for arguments in options)
    for own in few.values():
        assert own["near_tie"]["estimate"] == own["changed"]["estimate"] == 0
        assert own["reward_change"]["estimate"] == own["reward_change_abs"]["estimate"] == 0
    for own in many.values():
        assert own["near_tie"]["estimate"] == 1 and own["changed"]["estimate"] > 0.8
    assert many["tuned"]["reward"]["estimate"] > 0.9
    assert many["tuned"]["reward_change"]["high"] < 0


def test_what_the_clip_took_is_read_from_the_metrics(runs):
    rows = [{"clip_low": 0.0, "clip_high": 0.5}, {"clip_low": 0.25, "clip_high": 0.0}, {"iteration": 3}]
    metrics = runs / "idle" / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    clip = json.loads(_said(runs / "tuned", runs / "idle", "--samples", 4, "--json"))["clip"]
    assert [clip[name] for name in ("low", "high", "net", "iterations")] == [0.125, 0.25, 0.125, 1]
    assert clip["advantage_at_stake"]["estimate"] < 1
    output = " ".join(_said(runs / "tuned", runs / "idle", "--samples", 2).split())
    metrics.unlink()
    assert "the clip took 12.500% with A < 0, 25.000% with A > 0 (net +12.500%)" in output


def test_what_is_no_run_of_a_text_policy_is_refused(runs, tmp_path):
    assert "There is no run in" in _said(tmp_path, code=2)
    (tmp_path / "config.yaml").write_text("pipeline: flow_grpo\n")
    assert "is a run of flow_grpo, not of a text policy" in _said(tmp_path, code=2)
    (tmp_path / "config.yaml").write_text((runs / "tuned" / "config.yaml").read_text())
    assert "is not finished" in _said(tmp_path, code=2)


def test_without_a_verdict_the_reward_is_compared(runs, tmp_path):
    text = (runs / "tuned" / "config.yaml").read_text().replace("correctness: starts", "correctness: null")
    shutil.copytree(runs / "tuned" / "model", tmp_path / "model")
    (tmp_path / "config.yaml").write_text(text)
    output = _said(tmp_path, "--samples", 2)
    assert "no reward says right or wrong" in output and "Reward against KL" in output and "Support" not in output
    options = ("-r", "length", "--option", "length.max_length=3", "--option", "length.cache=1")
    diagnosis = json.loads(_said(tmp_path, "--samples", 2, "--right-at", 1, *options, "--json"))
    assert diagnosis["support"]["expanded"] > 3 and diagnosis["correctness"] == "a reward of 1 or better"
    assert [pair["second"] for pair in diagnosis["rewards"]] == ["length"]


def test_a_verdict_needs_an_interval_and_a_finite_reward(runs):
    same = json.loads(_said(runs / "tuned", runs / "tuned", "--samples", 2, "--json"))["best_of_n"]
    assert same["equal_n"] == 1 and abs(same["tuned"]["kl"]["estimate"]) < 1e-5 and same["cheaper_than_bound"] is None
    assert "as far as its bound, within the interval." in " ".join(_said(runs / "tuned", runs / "tuned").split())
    assert "--right-at is nan; give a finite reward" in _said(runs / "tuned", "--right-at", "nan", code=2)
