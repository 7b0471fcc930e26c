# SPDX-License-Identifier: Apache-2.0
"""Regressions by the job that Flow-GRPO has: runs, plans, refusals."""

from __future__ import annotations

import torch

from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters import SD3Policy
from visalign.adapters.lora import LoraSettings
from visalign.config import load_config
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, plan, run
from visalign.pipelines.flow_grpo.plan import planned_cost
from visalign.training.loop.metrics import read_metrics

BASE = (
    "model.lora.rank=4",
    "rewards.terms={jpeg_size: {}}",
    "rollout={prompts_per_iteration: 4, group_size: 4, steps: 4, batch_size: 16}",
    "optimizer={lr: 1e-3, updates_per_iteration: 2, micro_batch: 7, ema_every: 1}",
    "evaluation={seeds: [0], rewards: {shapes_verifier: {}}}",
    "run={iterations: 2, checkpoint_every: 1, device: cpu}",
)


def _config(*overrides: str) -> FlowGRPOConfig:
    return load_config(FlowGRPOConfig, None, [*BASE, *overrides])


def test_a_run_by_the_configuration(tmp_path):
    tiny_sd3_pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red circle\ntwo circles\n")
    prompts = tmp_path / "prompts.txt"
    config = _config(
        *(f"model.path={tmp_path}/model", f"data={{train: {prompts}, heldout: {prompts}}}"),
        "evaluation={correctness: null, rewards: {jpeg_size: {}}}",
        "rewards={terms: {vendi_gain: {}, jpeg_size: {}}, allow_mixed_units: true}",
        "objective={algorithm: ram, changes: {levels: 2, reference_guidance: 3.0}}",
        "rollout.guidance=2.0",
    )
    summary = run(config, tmp_path / "out")
    planned = plan(config, measure=False)
    # 4 steps, two passes each; 2 levels of forward, backward and the guided reference
    assert planned["cost"]["forward_equivalents_per_image"] == 4 * 2 + 2 * (3 + 2)
    assert planned["batch"]["pairs_per_iteration"] == 16 * 2
    for row in read_metrics(tmp_path / "out" / "metrics.jsonl"):
        assert row["forward_equivalents_per_image"] == 18
        assert 1 < row["reward_part/vendi_gain.set"] < 4 and "heldout/vendi_gain" not in row
    assert summary["iterations"] == 2
    assert (tmp_path / "out" / "lora" / "pytorch_lora_weights.safetensors").exists()
    assert "<title>ram on" in (tmp_path / "out" / "report.html").read_text()


def test_two_experts_become_one_policy(tmp_path):
    """By the configuration: on each tag's prompts it says what its expert says, at the planned cost."""
    tiny_sd3_pipeline().save_pretrained(tmp_path / "model")
    lora = LoraSettings(rank=4, alpha=8, seed=0)
    for seed, name in enumerate(("round", "square")):
        expert = SD3Policy(tiny_sd3_pipeline(), lora=lora)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, weight in expert.trainable_parameters():
                if "lora_B" in key:
                    weight.normal_(std=0.2, generator=draw)
        expert.save(tmp_path / name)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a red circle", "tag": "r"}\n{"prompt": "a blue square", "tag": "s"}\n')
    config = _config(
        f"model={{path: {tmp_path}/model, lora: {{rank: 4, alpha: 8}}}}",
        f"data={{train: {prompts}, heldout: {prompts}}}",
        "evaluation={correctness: null, rewards: {jpeg_size: {}}}",
        f"objective={{algorithm: opd, experts: {{r: {tmp_path}/round, '*': {tmp_path}/square}}}}",
        "rollout.sde_steps=[0, 2]",
        "optimizer={lr: 0.01, updates_per_iteration: 4, micro_batch: 7, ema_decay: 0, ema_every: 1}",
        "run.iterations=8",
    )
    run(config, tmp_path / "out")
    log = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert log[-1]["anchor_distance"] < 0.3 * log[0]["anchor_distance"]
    # 4 steps, and 2 of them with a backward and an expert's pass
    assert {row["forward_equivalents_per_image"] for row in log} == {4 + 2 * (3 + 1)} == {planned_cost(config)}
