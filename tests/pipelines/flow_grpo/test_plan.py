# SPDX-License-Identifier: Apache-2.0
"""`visalign plan` against real runs: operations, bytes and forward-equivalents of tiny pipelines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.support.models.pipelines import tiny_folder
from tests.support.models.sd3 import tiny_sd3_pipeline
from tests.support.operations import counted_operations
from visalign.adapters import LoraSettings, load_policy
from visalign.adapters.hollow import hollow_pipelines, stored
from visalign.config import load_config
from visalign.data.assets import resolve_model
from visalign.errors import UserError
from visalign.flow.rollout import rollout
from visalign.pipelines.cli.app import app
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, estimate, run
from visalign.pipelines.flow_grpo.parts import build_policy
from visalign.pipelines.shared.plan import GB, judge_bytes, on_each_device, trained_memory, weight_bytes
from visalign.training.loop.metrics import read_metrics
from visalign.training.loop.optimizer import OptimizerSettings, TrainedWeights

BASE = (
    "rewards.terms={jpeg_size: {}}",
    "rollout={prompts_per_iteration: 2, group_size: 2, steps: 3, batch_size: 4}",
    "optimizer={lr: 1e-3, updates_per_iteration: 2, micro_batch: 3, ema_every: 1}",
    "evaluation={seeds: [0], every: 0, correctness: null, rewards: {}}",
    "run={iterations: 2, device: cpu}",
)
PAIRS = "tests.support.judges.brightness:BrightnessPairs"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_sd3_pipeline().save_pretrained(folder / "sd3")
    for name in ("sd15", "flux", "pixart"):
        tiny_folder(name, folder / name)
    (folder / "prompts.txt").write_text("a red circle\ntwo circles\n")
    return folder


def configured(folders: Path, model: str, *changes: str) -> FlowGRPOConfig:
    files = [f"data.{name}={folders}/prompts.txt" for name in ("train", "heldout")]
    overrides = [*BASE, f"model.path={folders}/{model}", "model.lora.rank=4", *files, *changes]
    return load_config(FlowGRPOConfig, None, overrides)


def asked(policy: Any, count: int) -> Any:
    condition = policy.encode(["a red circle"] * count)
    x = torch.zeros(count, *policy.latent_shape, dtype=policy.storage_dtype)
    return x, torch.full((count,), 0.5), condition


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMS norms under autocast
@pytest.mark.parametrize(
    ("name", "options", "low", "high"),
    [
        ("sd3", {"guidance": 2.0}, 0.75, 1.01),
        ("sd15", {"guidance": 2.0}, 0.95, 1.06),
        ("flux", {"autocast": torch.bfloat16, "gradient_checkpointing": True}, 0.99, 1.01),
    ],
)
def test_operations_and_stored_bytes_are_those_of_a_real_velocity(folders, name, options, low, high):
    settings = {"lora": LoraSettings(rank=4), **options}
    at = resolve_model(name) if name.startswith("shapes") else folders / name
    with hollow_pipelines() as trace:
        hollow: Any = load_policy(at, **settings)
        pairs = asked(hollow, 3)
        hollow.velocity(*pairs)  # which encodes the null prompt
        trace.clear()
        hollow.velocity(*pairs)
        sizes = {k: weight_bytes(p) for k, p in hollow.pipe.components.items() if hasattr(p, "parameters")}
    policy: Any = load_policy(at, **settings)
    pairs = asked(policy, 3)
    policy.velocity(*pairs)
    weights = {weight.untyped_storage()._cdata for weight in policy.module.parameters()}
    with stored(weights) as saved, counted_operations() as counter:
        v = policy.velocity(*pairs)
    assert v.requires_grad
    assert list(trace.flops.values()) == [counter.get_total_flops()]
    assert low <= trace.held / sum(saved.values()) <= high
    assert bool(trace.largest_block) == ("gradient_checkpointing" in options)
    real = {k: weight_bytes(p) for k, p in policy.pipe.components.items() if hasattr(p, "parameters")}
    assert sizes == real


@pytest.mark.parametrize(
    "changes",
    [
        ("objective.algorithm=ram", "model.guidance=2.0", "rollout.guidance=1.0"),
        ("objective={algorithm: draft, epochs: 2, changes: {last: 2}}", "rewards.terms={clip_score: {}}"),
        (f"rewards.terms={{j: {{name: '{PAIRS}', references: {{count: 3, keep: 1, every: 1}}}}}}",),
        ("objective={algorithm: dmd2, changes: {critic_updates: 2}}",),
    ],
)
def test_planned_forward_equivalents_are_counted_ones(folders, tmp_path, changes):
    config = configured(folders, "sd3", *changes)
    plan = estimate(config)
    planned, summary = plan["forward_equivalents"], run(config, tmp_path / "run")
    assert summary["updates"] == plan["batch"]["updates"]
    assert summary["images"] * summary["forward_equivalents_per_image"] == pytest.approx(planned["of_the_run"], 1e-12)
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        counted = row["forward_equivalents_per_image"] * 4
        assert counted == pytest.approx(planned["per_iteration"], rel=1e-12)


def test_updates_of_a_student_that_waits_are_not_planned(folders):
    def updates(warmup: int) -> int:
        changes = f"objective={{algorithm: dmd2, changes: {{warmup: {warmup}}}}}"
        return estimate(configured(folders, "sd3", changes))["batch"]["updates"]

    assert updates(0) - updates(1) == 2


@pytest.mark.parametrize("model", ["sd3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sd15", "flux"))])
def test_stored_references_are_counted(folders, model):
    """Two prompts with one image each of three drawn, uint8."""
    config = configured(folders, model, f"rewards.terms={{j: {{name: '{PAIRS}', references: {{count: 3, keep: 1}}}}}}")
    planned, policy = estimate(config), build_policy(config.model, torch.device("cpu"), 0)
    image = policy.decode(torch.zeros(1, *policy.latent_shape, dtype=policy.storage_dtype))
    size = planned["memory_in_GB"]["reference_images_in_CPU_memory_and_a_checkpoint"]
    assert size * GB == pytest.approx(2 * image.numel())


def test_memory_by_part_is_what_a_run_holds(folders):
    config = configured(folders, "sd3", "rollout.sde_steps=[0, 2]")
    memory = estimate(config)["memory_in_GB"]
    policy: Any = build_policy(config.model, torch.device("cpu"), 0)
    parameters = policy.trainable_parameters()
    weights = TrainedWeights(parameters, OptimizerSettings())
    for _, weight in parameters:
        weight.grad = torch.ones_like(weight)
    weights.step()
    moments = [s[k] for s in weights.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    trained = sum(weight.numel() for _, weight in parameters)
    assert memory["adamw_moments"] * GB == pytest.approx(sum(m.numel() * 4 for m in moments))
    assert memory["trained_weights"] == memory["gradients"] == pytest.approx(trained * 4 / GB)
    total = weight_bytes(policy.transformer)
    assert memory["transformer, float32"] * GB == pytest.approx(total - 4 * trained)
    condition = policy.encode(["a red circle"] * 4)
    samples = rollout(policy, condition, sigmas=policy.sigmas(3), sde_steps=[0, 2], seeds=[1, 2, 3, 4])
    records = sum(t.numel() * t.element_size() for t in (samples.latents, samples.x, samples.x_next, samples.mean))
    assert memory["rollout_records"] * GB == pytest.approx(records)
    experts = [f"objective={{algorithm: opd, experts: {{'*': {folders}}}}}", "rollout.sde_steps=[0, 2]"]
    learnt = estimate(configured(folders, "sd3", *experts))["memory_in_GB"]  # of the same states
    assert learnt["rollout_records"] == memory["rollout_records"]
    assert learnt["reference_and_old_policy"] == pytest.approx(memory["trained_weights"])
    parts = [value for name, value in memory.items() if name not in ("in_all", "not_counted")]
    assert memory["in_all"] == pytest.approx(sum(parts))
    full = estimate(configured(folders, "sd3", "model.lora=null", "model.dtype=bfloat16"))["memory_in_GB"]
    assert full["transformer, trained"] < 1e-5  # its table of positions
    assert full["reference_and_old_policy"] == pytest.approx(full["trained_weights"])


def test_settings_that_save_memory_are_planned_and_leave_the_run_as_it_is(folders, tmp_path):
    """They may change on resume; what is trained stays equal to the bit."""
    savings = ("model.gradient_checkpointing=true", "model.offload=true")
    plain, saving = configured(folders, "sd3", "run.checkpoint_every=1"), configured(folders, "sd3", *savings)
    before, after = (estimate(config)["memory_in_GB"] for config in (plain, saving))
    parts = [before[name] for name in before if name.startswith(("text_encoder", "vae"))]
    assert after["in_CPU_memory"] == pytest.approx(sum(parts)) and not any("vae" in name for name in after)
    assert after["activations_of_a_micro_batch"] < before["activations_of_a_micro_batch"]
    low = estimate(configured(folders, "sd3", "optimizer.name=adamw_8bit", "model.lora.rank=512"))["memory_in_GB"]
    assert 0 < low["adamw_moments"] < low["gradients"]
    run(plain, tmp_path / "plain")
    run(replace(plain, run=replace(plain.run, iterations=1)), tmp_path / "saving")
    run(replace(saving, run=plain.run), tmp_path / "saving", resume=True)
    # tensors, not bytes: the order of a file's metadata changes from write to write
    one, two = (load_file(tmp_path / name / "lora/pytorch_lora_weights.safetensors") for name in ("plain", "saving"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_several_sizes_are_planned_by_the_largest_and_their_mean(folders):
    sizes = {name: f"model.image_size={size}" for name, size in (("small", 16), ("wide", "[16, 32]"))}
    small, wide = (estimate(configured(folders, "flux", size)) for size in sizes.values())
    both = estimate(
        configured(folders, "flux", sizes["small"], "rollout.image_sizes=[[16, 32], 16]", "monitor.window=4")
    )
    assert both["memory_in_GB"] == wide["memory_in_GB"] != small["memory_in_GB"]
    assert both["model"]["latent"] == wide["model"]["latent"]
    flops = [planned["model"]["operations_per_forward"] for planned in (small, wide, both)]
    assert flops[2] == pytest.approx((flops[0] + flops[1]) / 2) and flops[1] > 1.1 * flops[0]
    one = estimate(configured(folders, "flux", sizes["small"], "rollout.image_sizes=[16]"))
    assert one == small


def test_merged_weights_are_counted_beyond_what_is_free_while_sampling(folders):
    """Beside them no activations of a micro-batch are held."""
    small = ("model.image_size=16", "optimizer.micro_batch=1", "model.lora.rank=1")
    small += ("model.lora.target_modules=[to_q, net.2, linear]",)
    config = configured(folders, "sd3", "objective.algorithm=awm", *small, "rollout.merge_adapters=true")
    memory = estimate(config)["memory_in_GB"]
    policy: Any = build_policy(config.model, torch.device("cpu"), 0)
    layers: list[Any] = [layer for layer in policy.transformer.modules() if isinstance(layer, LoraLayer)]
    merged = sum(4 * layer.get_base_layer().weight.numel() for layer in layers) / GB
    assert memory["merged_adapters"] == merged - memory["activations_of_a_micro_batch"] > 0
    without = configured(folders, "sd3", "objective.algorithm=awm")
    assert "merged_adapters" not in estimate(without)["memory_in_GB"]


def test_memory_of_several_processes_is_what_they_held():
    """100.9 M weights in full; tests/benchmarks/processes/sharding.py measured 2369 and 1220 MiB."""
    weights = [torch.empty(100_900_000, device="meta")]
    single = trained_memory(weights, ema=True, copies=0)
    assert on_each_device(single, ["trained_weights"], world=1, sharding=False) == single
    for sharding, measured in ((False, 2369), (True, 1220)):
        memory = on_each_device(single, ["trained_weights"], world=2, sharding=sharding)
        assert 0.9 < sum(memory.values()) * GB / (measured * 2**20) < 1.15
    spared = on_each_device(single, ["trained_weights"], world=2, sharding=True, spare=0.3)
    assert spared["network_gathered"] == pytest.approx(single["trained_weights"] - 0.3)


def test_the_plan_of_several_processes_says_what_each_holds(folders, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    memory = {}
    for name, change in (("ddp", "seed=0"), ("fsdp2", "run.sharding=true")):
        memory[name] = estimate(configured(folders, "sd3", change))["memory_in_GB"]
    frozen = "transformer, float32"
    assert memory["fsdp2"][frozen] == memory["ddp"][frozen] / 2 > 0
    assert memory["fsdp2"]["adamw_moments"] == memory["ddp"]["adamw_moments"] / 2
    assert memory["fsdp2"]["vae, float32"] == memory["ddp"]["vae, float32"]
    assert memory["ddp"]["gradients_exchanged"] == memory["ddp"]["gradients"]
    command = ["plan", "shapes_flow_grpo", "--processes", "3", "--images", "1000", "--json"]
    planned = json.loads(CliRunner().invoke(app, command).stdout)
    assert planned["batch"]["images"] == 4 * 288 and "20% of" in planned["hours"]["basis"]
    drawn = [
        estimate(configured(folders, "sd3", f"evaluation.guidance={g}"))["forward_equivalents"] for g in ("null", 4)
    ]
    assert drawn[1]["of_evaluation"] == 2 * drawn[0]["of_evaluation"]
    refused = CliRunner().invoke(app, ["plan", "text_dpo", "--images", "1000"])
    assert refused.exit_code == 2 and "the pipeline here is text_dpo" in " ".join(refused.output.split())
    refused = CliRunner().invoke(app, ["plan", "shapes_flow_grpo", "--images", f"{10**15}"])
    assert refused.exit_code == 2 and "takes 3472222222223 iterations" in refused.output
    assert planned["batch"]["processes"] == 3 and "gradients_exchanged" in planned["memory_in_GB"]


def test_compiled_iterations_have_the_measured_share_of_their_kind(folders, monkeypatch):
    monkeypatch.setattr("visalign.pipelines.flow_grpo.plan.COMPILED_FROM", 1)
    for change, share in (("seed=0", "45%"), ("rollout.sde_window=1", "40%"), ("objective.algorithm=awm", "36%")):
        assert share in estimate(configured(folders, "sd3", change))["hours"]["basis"]
    assert "20%" in estimate(configured(folders, "sd3", "model.compile=false"))["hours"]["basis"]


def test_no_weight_is_read(folders, tmp_path):
    bare = tmp_path / "bare"
    tiny_folder("flux", bare)
    for file in bare.rglob("*.safetensors"):
        file.unlink()
    (tmp_path / "prompts.txt").write_text((folders / "prompts.txt").read_text())
    bare_plan, full_plan = estimate(configured(tmp_path, "bare")), estimate(configured(folders, "flux"))
    assert bare_plan == full_plan
    result = CliRunner().invoke(app, ["plan", "shapes_nft", "--json"])
    planned = json.loads(result.output)
    assert planned["forward_equivalents"]["of_the_run"] == pytest.approx(
        planned["cost"]["forward_equivalents_per_image"] * 288 * planned["batch"]["iterations"]
    )
    assert planned["hours"]["H100 SXM"] > 0 and "(eager)" in planned["hours"]["basis"]
    assert "the network of clip_score" in planned["memory_in_GB"]["not_counted"]


def test_a_model_that_asks_for_numbers_is_named(folders, monkeypatch):
    def velocity(*args: Any) -> Any:
        raise RuntimeError("no item() here\nat all")

    monkeypatch.setattr("visalign.adapters.pipeline.policy.PipelinePolicy.velocity", velocity)
    with pytest.raises(UserError, match=r"flux asks for numbers there \(no item\(\) here\)\. .*--dry-run"):
        estimate(configured(folders, "flux"))


def test_judges_are_counted_where_they_are_loaded():
    class Judge:
        def __init__(self) -> None:
            self.parts = {"head": [torch.nn.Linear(3, 2)]}

    class Later:
        def __init__(self, device: str = "cpu") -> None:
            del device

    Judge.__module__ = "visalign.rewards.own"
    judge = Judge()
    assert judge_bytes({"a": judge, "again": judge, "b": Later()}) == (32, ["the network of b"])
