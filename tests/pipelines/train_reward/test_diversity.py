# SPDX-License-Identifier: Apache-2.0
"""Members of an ensemble whose adapters are kept apart: further apart than without, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.models.vision_language import save_tiny_seeing_model
from visalign.config import load_config
from visalign.errors import UserError
from visalign.pipelines.train_reward.job import TrainRewardConfig, build_judge, run
from visalign.pipelines.train_reward.judges import OtherMembers, trainable
from visalign.rewards.hpsv3.ensemble_folders import adapters_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_seeing_model(tmp_path_factory.mktemp("models") / "vlm")


def _config(model: Path, *more: str, rank: int = 2) -> TrainRewardConfig:
    overrides = [
        f"model={{kind: hpsv3, head: [8, 4], save_dtype: float32, lora: {{rank: {rank}, alpha: 4.0}}}}",
        f"model.path={model}", "data={size: 12, heldout: null, batch: 4, micro_batch: 2}",
        "optimizer={lr: 1.0e-2, updates_per_iteration: 10}", "run={iterations: 1, device: cpu}",
    ]  # fmt: skip
    return load_config(TrainRewardConfig, None, [*overrides, *more])


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained member."""
    run(_config(model), output := tmp_path_factory.mktemp("members") / "0")
    return output / "judge"


def test_a_member_that_is_kept_apart_differs_more(model, first, tmp_path):
    run(_config(model, "seed=1"), tmp_path / "plain")
    diversity = f"model.diversity={{others: ['{first}'], weight: 10.0}}"
    run(_config(model, "seed=1", diversity), tmp_path / "apart")
    values = {}
    for name in ("plain", "apart"):
        own = {f"{key}.default.weight": value for key, value in adapters_of(tmp_path / name / "judge").items()}
        values[name] = float(OtherMembers([str(first)], own).diversity())
    assert values["plain"] + 0.01 < values["apart"] <= 1


def test_the_loss_gets_it_once_however_the_batch_is_cut(model, first, tmp_path):
    diversity = f"model.diversity={{others: ['{first}'], weight: 3.0}}"
    losses = []
    for micro in (1, 4):
        config = _config(model, "seed=1", diversity, f"data.micro_batch={micro}", "optimizer.updates_per_iteration=1")
        run(config, tmp_path / str(micro))
        line = (tmp_path / str(micro) / "metrics.jsonl").read_text().splitlines()[0]
        losses.append(json.loads(line)["loss"])
        term = build_judge(config, torch.device("cpu")).penalty()
        assert term is not None
        penalty = term.item()
    plain = _config(model, "seed=1", "data.micro_batch=4", "optimizer.updates_per_iteration=1")
    run(plain, tmp_path / "plain")
    line = json.loads((tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()[0])
    assert -3 < penalty < 0
    assert losses == pytest.approx([line["loss"] + penalty] * 2, abs=5e-3)  # dropout draws by micro-batch
    assert build_judge(plain, torch.device("cpu")).penalty() is None


def test_members_that_cannot_be_kept_apart_are_refused(model, tmp_path):
    with pytest.raises(UserError, match=r"keeps adapters apart, and model.train is 'full'"):
        _config(model, "model.train=full", "model.diversity={others: [a]}")
    with pytest.raises(UserError, match=r"others names '.*vlm'\. .*adapter_config\.json cannot be read"):
        build_judge(_config(model, f"model.diversity={{others: ['{model}']}}"), torch.device("cpu"))
    run(_config(model, "model.lora.target_modules=[q_proj]"), tmp_path / "other")
    other = tmp_path / "other" / "judge"
    with pytest.raises(UserError, match=r"whose .*lora_A is .* there and .* here"):
        build_judge(_config(model, f"model.diversity={{others: ['{other}']}}"), torch.device("cpu"))


def test_a_judge_goes_on_from_the_adapters_of_another(tmp_path):
    """Before its first update it has that judge's adapters; others (rank, scale, layers, start) are refused."""

    def config(*more: str) -> TrainRewardConfig:
        kind = "model={kind: yes_no, save_dtype: float32, lora: {rank: 2, alpha: 4.0}}"
        overrides = [kind, "objective.task=yes_no", "data={size: 4, heldout: null, batch: 4, micro_batch: 4}"]
        overrides += ["optimizer.updates_per_iteration=1"]
        return load_config(TrainRewardConfig, None, [*overrides, "run={iterations: 1, device: cpu}", *more])

    run(config(), tmp_path / "0")
    folder = tmp_path / "0" / "judge"
    going_on = build_judge(config(f"model.lora_path={folder}"), torch.device("cpu"))
    own = {name.removesuffix(".default.weight"): value for name, value in trainable(going_on.module)}
    earlier = adapters_of(folder)
    assert own.keys() == earlier.keys() and all(torch.equal(own[name], earlier[name]) for name in own)
    for more, message in (
        (["model.lora.rank=3"], r"model\.lora_path names .*, whose .*lora_A is \(2, \d+\) there and \(3, \d+\) here"),
        (["model.lora.target_modules=[q_proj]"], r"whose .*lora_A is .* there and absent here"),
        (["model.lora.alpha=8"], r"whose adapters have lora_alpha 4.0, and model\.lora\.alpha is 8"),
    ):
        with pytest.raises(UserError, match=message):
            build_judge(config(f"model.lora_path={folder}", *more), torch.device("cpu"))
    settings = folder / "adapter_config.json"
    settings.write_text(settings.read_text().replace('"init_lora_weights": true', '"init_lora_weights": "pissa"'))
    with pytest.raises(UserError, match=r"model\.lora_path names .* began as 'pissa'"):
        build_judge(config(f"model.lora_path={folder}"), torch.device("cpu"))
    with pytest.raises(UserError, match=r"model\.lora_path names adapters, and model\.train is 'full'"):
        config(f"model.lora_path={folder}", "model.train=full")
