# SPDX-License-Identifier: Apache-2.0
"""`visalign plan` of judges against the judges themselves: weights, moments, stored bytes, by process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support.models.clip import save_tiny_transformers_clip
from visalign.adapters.hollow import stored
from visalign.pipelines.cli.app import app
from visalign.pipelines.shared.memory import GB, weight_bytes
from visalign.pipelines.train_reward.examples import ExampleBatches
from visalign.pipelines.train_reward.inputs import prepare_reward
from visalign.pipelines.train_reward.job import build_judge, estimate
from visalign.training.loop.optimizer import TrainedWeights

from .test_train_reward import JUDGES, _config, models

__all__ = ["models"]


def planned(models: Path, *judge: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(estimate(_config(models, *judge, **more))["memory_in_GB"])
    return found


def stored_by(config: Any) -> tuple[Any, int]:
    """(the judge, bytes that the backward of its first micro-batch finds stored)."""
    judge: Any = build_judge(config, torch.device("cpu"))
    data = config.data
    inputs = prepare_reward(config)
    # of the others one is refused: the tiny model says neither yes nor no
    train: Any = judge.remember(inputs.heldout) if hasattr(judge, "frozen") else inputs.train
    batches = ExampleBatches(train, judge.encode, size=data.batch, micro=data.micro_batch, seed=config.seed)
    batch = next(iter(batches.batch(0)))
    judge.train(True)
    with stored({weight.untyped_storage()._cdata for weight in judge.module.parameters()}) as held:
        judge(batch.inputs)
    return judge, sum(held.values())


@pytest.mark.parametrize("judge", JUDGES, ids="-".join)
def test_a_plan_is_what_the_judge_holds(models, judge):
    config = _config(models, *judge)
    memory = planned(models, *judge)
    real, held = stored_by(config)
    named = real.trainable_parameters()
    weights = TrainedWeights(named, config.optimizer)
    for _, weight in named:
        weight.grad = torch.ones_like(weight)
    weights.step()
    moments = [s[k] for s in weights.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    assert memory["adamw_moments"] * GB == pytest.approx(sum(m.numel() * 4 for m in moments), rel=1e-12)
    own = {id(weight) for _, weight in named}
    assert memory["trained_weights"] * GB == pytest.approx(sum(4 * w.numel() for _, w in named), rel=1e-12)
    (frozen,) = (name for name in memory if name.startswith("frozen_weights, "))
    assert memory[frozen] * GB == pytest.approx(weight_bytes(real.module, own), rel=1e-12)
    assert ("teacher" in memory) == (judge[0] == "ict")
    if judge[0] == "ict":
        assert memory["teacher"] * GB == pytest.approx(weight_bytes(real.teacher), rel=1e-12)
    assert 0.74 <= memory["activations_of_a_micro_batch"] * GB / held <= 1.09
    parts = [value for name, value in memory.items() if name not in ("in_all", "not_counted")]
    assert memory["in_all"] == pytest.approx(sum(parts))


@pytest.mark.parametrize("judge", [("hp", "full", "hp"), ("ict", "", ""), ("yes_no", "lora", "yes_no")])
def test_autocast_is_planned_as_a_gpu_has_it(models, judge):
    found = {
        name: planned(models, *judge, model={"autocast": name})["activations_of_a_micro_batch"]
        for name in ("auto", "bfloat16")
    }
    plain = planned(models, *judge)["activations_of_a_micro_batch"]
    _, held = stored_by(_config(models, *judge, model={"autocast": "bfloat16"}))
    assert found["auto"] == found["bfloat16"] < 0.8 * plain
    assert 0.95 <= found["auto"] * GB / held <= 1.05


def test_features_that_are_kept_are_those_of_all_images(models):
    """Two images each of 12 pairs; a tower that is trained keeps none."""
    config = _config(models, "yes_no", run={"iterations": 4})
    judge: Any = build_judge(config, torch.device("cpu"))
    train = prepare_reward(config).train
    judge(judge.encode([train[n] for n in range(12)]).inputs)
    kept = judge.engine.network.cache.bytes
    found = planned(models, "yes_no", run={"iterations": 4})["kept_features"]
    assert found * GB == pytest.approx(kept) and kept > 0
    assert planned(models, "hpsv3", "full", "uncertainty")["kept_features"] == 0


def test_several_processes_hold_what_the_trainer_gives_them(models, monkeypatch):
    alone = planned(models, "hpsv3", "lora", "uncertainty", model={"dtype": "bfloat16"})
    monkeypatch.setenv("WORLD_SIZE", "2")
    ddp, divided = (
        planned(
            models, "hpsv3", "lora", "uncertainty", model={"dtype": "bfloat16"}, run={"sharding": sharding}
        )
        for sharding in (False, True)
    )
    frozen = "frozen_weights, bfloat16"
    tower = divided["frozen_tower"]
    assert ddp["gradients_exchanged"] == ddp["gradients"] == alone["gradients"]
    assert divided[frozen] + tower / 2 == pytest.approx(alone[frozen] / 2) and 0 < tower < alone[frozen]
    assert divided["adamw_moments"] == alone["adamw_moments"] / 2
    assert "frozen_tower" not in ddp and ddp[frozen] == alone[frozen]
    teachers = planned(models, "ict", run={"sharding": True})
    assert teachers["teacher"] > 0 == planned(models, "ict").get("frozen_tower", 0)
    command = ["plan", "shapes_hpsv3", "--processes", "4", "--json"]
    said = json.loads(CliRunner().invoke(app, command).stdout)
    assert "gradients_exchanged" in said["memory_in_GB"] and said["examples"]["per_update"] == 64


def test_no_weight_is_read(models, tmp_path, monkeypatch):
    """Folders without weight files are planned as with them; those of members are not looked for."""
    shutil.copytree(models, tmp_path / "bare")
    for file in (tmp_path / "bare").rglob("*.safetensors"):
        file.unlink()
    for judge in (("hpsv3", "full", "uncertainty"), ("hp", "head", "hp")):
        assert planned(tmp_path / "bare", *judge) == planned(models, *judge)
    more = {"diversity": {"others": ["nowhere/a", "nowhere/b"]}}
    memory = planned(tmp_path / "bare", "yes_no", "lora", "yes_no", model=more)
    assert memory["adapters_of_other_members"] == 2 * memory["trained_weights"] > 0
    whole = save_tiny_transformers_clip(tmp_path / "transformers")
    before = planned(models, "hp", "full", "hp", model={"path": str(whole)})
    (whole / "model.safetensors").unlink()
    assert planned(models, "hp", "full", "hp", model={"path": str(whole)}) == before


def test_what_cannot_be_said_is_named(models, tmp_path, monkeypatch):
    shutil.copytree(models / "vlm", tmp_path / "vlm")
    file = tmp_path / "vlm" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"bits": 4}}))
    said = planned(tmp_path, "yes_no")
    assert said == {"in_all": None, "not_said": f"the weights of {tmp_path}/vlm are quantised"}

    def states(*_: Any) -> Any:
        raise RuntimeError("no item() here\nat all")

    monkeypatch.setattr("visalign.rewards.vlm.network.SeeingNetwork.states", states)
    memory = planned(models, "yes_no")
    assert memory["adamw_moments"] > 0 and memory["in_all"] is None
    assert memory["not_said"].endswith("are known (no item() here)")
