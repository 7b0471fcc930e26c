# SPDX-License-Identifier: Apache-2.0
"""Batches that are `auto` on a GPU: the predicted memory holds, and a resumed run has the same numbers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from visalign.adapters import LoraSettings, load_policy
from visalign.adapters.speed import speed_up
from visalign.config import load_config
from visalign.data.assets import resolve_model
from visalign.memory import SHARE, _peak_bytes, fit_batch
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, run
from visalign.pipelines.flow_grpo.plan import network_passes
from visalign.rewards import load_reward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MB = 2**20


def left_free(megabytes: int) -> float:
    """Return the bytes to reserve so that so much is left."""
    torch.cuda.empty_cache()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + cached - megabytes * MB


def test_the_rule_holds_for_a_known_memory():
    def work(count: int) -> Tensor:
        return torch.empty(count * MB, dtype=torch.uint8, device="cuda")

    # 64 MB are below 85 MB; other processes may move what is free by a few
    assert fit_batch(work, 4096, reserved=left_free(100)) == 64
    assert fit_batch(work, 40, reserved=left_free(100)) == 40
    assert fit_batch(work, 4096, reserved=left_free(-50)) == 0


def test_memory_that_runs_out_is_no_error():
    def work(count: int) -> Tensor:
        return torch.empty(2**40 * (count > 8) + MB, dtype=torch.uint8, device="cuda")

    assert fit_batch(work, 64) == 8


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("number", [0, 1])
def test_passes_of_a_network_take_what_was_foretold_and_compile_nothing(number: int):
    options: dict[str, Any] = {"lora": LoraSettings(rank=4, alpha=8), "dtype": torch.bfloat16, "device": "cuda"}
    policy: Any = load_policy(resolve_model("shapes-sd3"), **options)
    speed_up(policy.module, compiled=True)
    with torch.no_grad():
        condition = policy.encode(["a red circle"])

    def work(count: int) -> Tensor:
        return network_passes(policy, condition.select(torch.zeros(count, dtype=torch.int64)))[number]()

    before = sum(torch._dynamo.utils.counters["stats"].values())
    size = fit_batch(work, 2**16, reserved=left_free(400))
    assert sum(torch._dynamo.utils.counters["stats"].values()) == before
    peaks = [_peak_bytes(work, torch.device("cuda"), count) / MB for count in (1, 2, size or 0, 2 * (size or 0))]
    print(f"pass {number}: {size} in 400 MB; 1, 2, {size} and twice that take {peaks} MB")
    assert size and 8 <= size < 2**16
    assert peaks[2] <= SHARE * 410 and peaks[3] > SHARE * 300


def test_a_judge_measures_its_batch():
    reward: Any = load_reward("clip_score", batch_size="auto")
    reward.towers.batch.number = reward.towers.batch.measure(reserved=left_free(300))
    print(f"clip_score: {reward.towers.batch_size} in 300 MB")
    assert reward.towers.batch_size >= 1
    reward = load_reward("vqa_score", max_tokens_per_batch="auto")
    assert reward.engine.network.max_tokens % 512 == 0
    print(f"vqa_score: {reward.engine.network.max_tokens} tokens")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_resumed_run_has_the_same_numbers(tmp_path: Path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\ntwo squares\n")
    overrides = [
        *("rollout.batch_size=auto", "optimizer.micro_batch=auto", "model.decode_batch=auto"),
        *(f"data.heldout={prompts}", "evaluation={rewards: {clip_score: {options: {batch_size: auto}}}, every: 0}"),
        *("evaluation.correctness=null", "run.checkpoint_every=1"),
    ]
    output, runs = tmp_path / "run", []
    for iterations in (1, 2):
        config = load_config(FlowGRPOConfig, "shapes_flow_grpo", [*overrides, f"run.iterations={iterations}"])
        runs.append(partial(run, config, output, resume=iterations > 1)())
        runs[-1]["batches"] = json.loads((output / "batches.json").read_text())
    first, second = runs
    print(first["batches"])
    assert first["batches"] == second["batches"]
    # all 288 images of an iteration fit any card, perhaps not their 1440 steps with a gradient
    numbers = first["batches"]
    assert (numbers["rollout.batch_size"], numbers["model.decode_batch"]) == (288, 288)
    assert 64 <= numbers["optimizer.micro_batch"] <= 1440
    for summary in runs:
        assert summary["config"]["rollout"]["batch_size"] == 288
        assert summary["config"]["optimizer"]["micro_batch"] == numbers["optimizer.micro_batch"]
    assert second["iterations"] == 2 and second["updates_skipped"] == 0
