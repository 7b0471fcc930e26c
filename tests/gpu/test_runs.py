# SPDX-License-Identifier: Apache-2.0
"""Runs on a GPU: resume, quickstart, memory planned and exhausted, parts in CPU memory, a text reward in bfloat16."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training.metric_families import without_times
from visalign.pipelines.flow_grpo import job as images
from visalign.pipelines.jobs import load_job
from visalign.training.loop.metrics import read_metrics
from visalign.training.loop.runtime import OutOfMemory

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*eterministic"),
]
GPU_SCRIPTS = Path(__file__).parent.parent / "benchmarks/gpu"
SMALL = (
    "rollout.prompts_per_iteration=4",
    "rollout.group_size=4",
    "evaluation={seeds: [0], every: 0, correctness: null, rewards: {}}",
    "run.checkpoint_every=1",
)


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Free what a test held: the next one measures or limits memory."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path):
    """With torch's deterministic kernels: some backwards of attention add in any order."""

    heldout = tmp_path / "heldout.txt"
    heldout.write_text("a red circle\ntwo squares\n")

    def train(name: str, iterations: int, resume: bool = False) -> None:
        changes = [*SMALL, f"data.heldout={heldout}", f"run.iterations={iterations}"]
        planned = load_job("shapes_flow_grpo", changes)
        planned.run(planned.config, tmp_path / name, resume=resume)

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train("whole", 2)
        train("parts", 1)
        train("parts", 2, resume=True)
    finally:
        torch.use_deterministic_algorithms(False)
    rows = [read_metrics(tmp_path / name / "metrics.jsonl")[-1] for name in ("whole", "parts")]
    assert without_times(rows[0]) == without_times(rows[1])
    uncut, parts = (
        load_file(tmp_path / name / "lora/pytorch_lora_weights.safetensors") for name in ("whole", "parts")
    )
    for name, weight in uncut.items():
        torch.testing.assert_close(parts[name], weight, rtol=0, atol=0)


def test_adapters_of_a_small_model_learn(tmp_path: Path):
    planned = load_job("shapes_nft", ["evaluation.every=0", "run.max_seconds=95"])
    summary = planned.run(planned.config, tmp_path / "run")
    assert summary["after"]["accuracy"] >= 0.8 > 0.65 > summary["before"]["accuracy"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("prompts_per_iteration: 8, group_size: 512, batch_size: 4096", "while sampling .*rollout.batch_size is 4096"),
        ("prompts_per_iteration: 8, group_size: 32, batch_size: 32", "in an update .*optimizer.micro_batch is 1280"),
    ],
)
def test_memory_that_runs_out_is_named_by_its_setting(changes: str, message: str, tmp_path: Path):
    sizes = [
        f"rollout={{{changes}, sde_steps: [0, 1, 2, 3, 4]}}",
        "optimizer.micro_batch=1280",
        "model.decode_batch=4",
    ]
    run = images._build(load_job("shapes_flow_grpo", [*SMALL[2:], *sizes]).config, tmp_path)
    policy: Any = run.trainer.algorithm.policy
    x = torch.randn(1, *policy.latent_shape, device=DEVICE)
    policy.velocity(
        x, torch.ones(1, device=DEVICE), policy.encode(["a"])
    ).sum().backward()  # kernels take their memory
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        with pytest.raises(OutOfMemory, match=f"Out of memory {message}"):
            run.trainer.train()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_planned_memory_is_what_an_iteration_holds(tmp_path: Path):
    """Six of SD3.5-medium's blocks, eager; compiled ones hold a fifth less."""
    model = tmp_path / "model"
    subprocess.run([sys.executable, GPU_SCRIPTS / "make_sd35.py", model, "--layers", "6"], check=True)
    changes = [f"model.path={model}", "model.guidance=1.0", "model.compile=false", "model.decode_batch=1"]
    size = ["rollout.group_size=8", "objective.changes.kl=0"]
    planned = load_job(str(GPU_SCRIPTS / "sd35.yaml"), [*changes, *size])
    expected = planned.estimate(planned.config)["memory_in_GB"]
    run = images._build(planned.config, tmp_path / "run")
    torch.cuda.reset_peak_memory_stats()
    run.trainer.iterate()
    peak = torch.cuda.max_memory_allocated() / 1e9
    print(f"planned {expected['in_all']:.2f} GB, held {peak:.2f} GB")
    assert peak == pytest.approx(expected["in_all"], rel=0.1)


def test_a_model_whose_parts_wait_in_cpu_memory_trains(tmp_path: Path):
    run = images._build(load_job("shapes_flow_grpo", [*SMALL, "model.offload=true"]).config, tmp_path)
    record = run.trainer.iterate()
    assert math.isfinite(record["loss"]) and run.trainer.counters.updates > run.trainer.counters.skipped
    pipe: Any = run.trainer.algorithm.policy.pipe
    assert (pipe.vae.device.type, pipe.transformer.device.type) == ("cpu", DEVICE)


def test_a_reward_of_texts_trains_in_bfloat16(tmp_path: Path):
    small = ["data.size=64", "run.iterations=1", "model.dtype=bfloat16"]
    planned = load_job("text_reward", small)
    summary = planned.run(planned.config, tmp_path / "run")
    assert summary["updates"] > 0 and math.isfinite(summary["after"]["nll"])
