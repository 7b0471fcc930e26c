# SPDX-License-Identifier: Apache-2.0
"""Batches that are `auto`: the rule on a fake memory, what is measured, what a run remembers, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.models.sd3 import tiny_sd3_pipeline
from tests.support.training.images import toy_trainer
from visalign.config import load_config
from visalign.errors import ConfigError, UserError
from visalign.interfaces import RewardCapabilities
from visalign.memory import BatchSize, largest_batch
from visalign.pipelines.flow_grpo import batches
from visalign.pipelines.flow_grpo.inputs import prepare
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, plan, run
from visalign.pipelines.flow_grpo.parts import build_policy
from visalign.pipelines.shared.plan import parts_of
from visalign.pipelines.text.config import TextGRPOConfig
from visalign.rewards import load_reward

AUTO = ("rollout.batch_size=auto", "optimizer.micro_batch=auto", "model.decode_batch=auto")


@pytest.mark.parametrize(
    ("offset", "per_sample", "limit", "size"),
    [
        (100, 50, 4096, 8),  # 100 + 8 · 50 ≤ 850 < 100 + 16 · 50
        (100, 50, 12, 12),  # no more than there are
        (100, 50, 1, 1),
        (100, 850, 8, 1),  # one takes more than 85 %, and fits
        (100, 950, 8, 0),
        (100, 0, 64, 64),
        (0, math.inf, 8, 0),  # memory ran out
    ],
)
def test_the_batch_doubles_to_85_percent_of_the_free_memory(offset: float, per_sample: float, limit: int, size: int):
    assert largest_batch(lambda count: offset + per_sample * count, free=1000, limit=limit) == size


def test_a_batch_that_takes_more_than_was_foretold_is_halved():
    tried: list[int] = []

    def peak(count: int) -> float:
        tried.append(count)
        return 100 + 10 * count + (math.inf if count > 32 else 1000 if count > 16 else 0)

    assert largest_batch(peak, free=1000, limit=4096) == 16
    assert tried == [1, 2, 64, 32, 16]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_sd3_pipeline().save_pretrained(folder)
    return folder


def _config(model: Path, *overrides: str) -> FlowGRPOConfig:
    prompts = model / "prompts.txt"
    prompts.write_text("a red circle\ntwo circles and a square\n")
    base = (
        *(f"model.path={model}", "model.lora.rank=4", f"data.train={prompts}", f"data.heldout={prompts}"),
        "rewards.terms={clip_score: {options: {batch_size: auto, model: shapes-clip}}}",
        "rollout={prompts_per_iteration: 2, group_size: 4, steps: 3}",
        "optimizer={updates_per_iteration: 2}",
        "evaluation={rewards: {}, correctness: null, prompts_on_the_way: 1}",
        "run={iterations: 1, checkpoint_every: 1, device: cpu}",
    )
    return load_config(FlowGRPOConfig, None, [*base, *AUTO, *overrides])


def test_each_batch_is_measured_by_its_own_pass_and_processes_take_the_smallest(model, monkeypatch):
    """Memory for 6 samples without gradient, 3 pairs, 2 images, and 5 images of the judge, at 16² pixels."""
    measured: list[tuple[int, bool, float]] = []

    def fit(work: Any, limit: int, *, reserved: float, share: float) -> int:
        before = policy.forward_count.forward, policy.forward_count.forward_backward
        work(2)
        kinds = policy.forward_count.forward - before[0], policy.forward_count.forward_backward - before[1]
        measured.append((limit, reserved > 0, share))
        return {(2, 0): 6, (0, 2): 3, (0, 0): 2}[kinds]

    monkeypatch.setattr(batches, "fit_batch", fit)
    monkeypatch.setattr("visalign.memory.fit_batch", lambda work, limit, **_: len(work(5)))
    monkeypatch.setattr(batches, "gather_object", lambda numbers: [*numbers, dict.fromkeys(numbers[0], 4)])
    config = _config(model, "rollout.overlap=2")
    inputs = prepare(config, 1, "cpu")
    policy: Any = build_policy(config.with_batches().model, torch.device("cpu"), 0)
    weights = [(weight, weight.clone()) for _, weight in policy.trainable_parameters()]
    state, card = torch.get_rng_state(), SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    numbers = batches.find_batches(config, policy, inputs, card, {})  # type: ignore[arg-type]
    expected = {"rollout.batch_size": 4, "optimizer.micro_batch": 3, "model.decode_batch": 2}
    assert numbers == {**expected, "judge 1, of clip_score": 4}
    assert policy.decode_batch == 2 and inputs.rewards["clip_score"].towers.batch_size == 4  # type: ignore[attr-defined]
    # 8 samples; 2 stochastic steps in 2 updates
    assert measured == [(8, True, 0.5)] * 3
    assert torch.equal(state, torch.get_rng_state())
    assert all(weight.grad is None and torch.equal(weight, before) for weight, before in weights)
    stored = dict.fromkeys(numbers, 7)
    assert batches.find_batches(config, policy, inputs, card, stored) == stored  # type: ignore[arg-type]
    assert len(measured) == 3
    monkeypatch.setattr(batches, "fit_batch", lambda *_, **__: 0)
    with pytest.raises(UserError, match=r"rollout.batch_size is auto, and not even one image .*model.offload=true"):
        batches.find_batches(config, policy, inputs, card, {})  # type: ignore[arg-type]


def test_judges_are_loaded_before_they_are_measured():
    """A judge that loads at its first score has its batch at once; a learning one scores nothing before a run."""
    judge: Any = load_reward("hpsv3", max_tokens_per_batch="auto", run_device="cpu")
    assert [batch.is_auto for batch in parts_of(judge, BatchSize, set())] == [True]
    learning = SimpleNamespace(capabilities=RewardCapabilities(discriminators={"it": judge}), score=None)
    scored: list[int] = []
    other = SimpleNamespace(capabilities=RewardCapabilities(), score=lambda images, *_: scored.append(len(images)))
    inputs: Any = SimpleNamespace(rewards={"learning": learning, "other": other}, reward=learning, features=None)
    batches._load_judges(SimpleNamespace(learns_unrewarded=False), inputs, torch.rand(2, 3, 8, 8), {"prompt": "a"})  # type: ignore[arg-type]
    assert scored == [2]


def test_a_resumed_run_has_the_batches_that_it_began_with(model, tmp_path, capsys):
    numbers = {"rollout.batch_size": 64, "optimizer.micro_batch": 64, "model.decode_batch": None}
    summary = run(_config(model), tmp_path)
    assert json.loads((tmp_path / "batches.json").read_text()) == {**numbers, "judge 1, of clip_score": 64}
    assert (summary["config"]["rollout"]["batch_size"], summary["config"]["optimizer"]["micro_batch"]) == (64, 64)
    assert load_config(FlowGRPOConfig, tmp_path / "config.yaml") == _config(model)
    (tmp_path / "batches.json").write_text(json.dumps({"rollout.batch_size": 3, "optimizer.micro_batch": 5}))
    summary = run(_config(model, "run.iterations=2"), tmp_path, resume=True)
    assert (summary["config"]["rollout"]["batch_size"], summary["config"]["optimizer"]["micro_batch"]) == (3, 5)
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "auto: rollout.batch_size=64, optimizer.micro_batch=64" in printed
    assert printed.count("These are the defaults") == 1  # not of the numbers that were stored


def test_a_plan_has_the_defaults(model):
    assert plan(_config(model), measure=False)["batch"]["micro_batches_per_update"] == 1


def test_what_cannot_be_measured_is_refused(model, tmp_path):
    with pytest.raises(UserError, match=r"batch_size is auto.*draft holds more\."):
        _config(model, "objective.algorithm=draft")
    with pytest.raises(UserError, match=r"rollout.batch_size is auto, which is measured without run.sharding"):
        _config(model, "run.sharding=true")
    with pytest.raises(ConfigError, match=r"optimizer.micro_batch.*'auto' \(str\), expected"):
        load_config(TextGRPOConfig, None, ["optimizer.micro_batch=auto"])
    with pytest.raises(UserError, match=r"rollout.batch_size is auto, which `visalign train` measures"):
        toy_trainer(tmp_path, rollout={"batch_size": "auto"})
    with pytest.raises(UserError, match=r"optimizer.micro_batch is auto, which `visalign train` measures"):
        toy_trainer(tmp_path, optimizer={"micro_batch": "auto"})
