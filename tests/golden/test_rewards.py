# SPDX-License-Identifier: Apache-2.0
"""The golden numbers of losses and heads: which cases are known, other names, variants, corruption."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_runner_of_rewards", TESTS / "golden_runner.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISALIGN_GOLDEN_WEIGHTS", raising=False)


def run(runner: ModuleType, folder: Path) -> tuple[int, list[str]]:
    lines: list[str] = []
    return runner.run_folder(folder, runner.load_families(TESTS / "golden_families"), lines.append), lines


def document(family: str) -> dict[str, Any]:
    return json.loads((TESTS / "golden" / f"{family}.json").read_text())


def write(folder: Path, family: str, cases: list[dict[str, Any]]) -> None:
    text = json.dumps({"format": "visalign-golden-1", "family": family, "cases": cases})
    (folder / f"{family}.json").write_text(text)


def case(family: str, name: str) -> dict[str, Any]:
    return next(one for one in document(family)["cases"] if one["name"] == name)


def test_every_loss_and_every_head_with_its_weights_is_known(runner: ModuleType, tmp_path: Path) -> None:
    for name in ("G_reward_losses.json", "G_reward_heads.json", "G_reward_heads.npz"):
        shutil.copy(TESTS / "golden" / name, tmp_path)
    status, lines = run(runner, tmp_path)
    assert status == 0 and lines[-1].startswith("84 ok, 0 FAIL, 6 unknown")
    assert [line for line in lines if line.startswith("unknown")] == [
        "unknown variant G_reward_heads/laion_ava_logos-l14-linearMSE: 3 cases",
        "unknown variant G_reward_heads/laion_ava_logos-l14-reluMSE: 3 cases",
    ]


def test_names_mean_nothing(runner: ModuleType, tmp_path: Path) -> None:
    cases = [{**one, "name": f"x{place}"} for place, one in enumerate(document("G_reward_losses")["cases"][:24])]
    write(tmp_path, "G_reward_losses", cases)
    assert run(runner, tmp_path)[1][-1].startswith("24 ok, 0 FAIL, 0 unknown")


@pytest.mark.parametrize(
    ("family", "name", "changes"),
    [
        ("G_reward_losses", "hpsv3_bt_all_s0", {"params": {"loss_type": "focal", "k": 5, "tau": 1, "margin": 0}}),
        ("G_reward_losses", "trl_rm_bt_s0", {"params": {"center_coefficient": None, "smoothing": 0.1}}),
        ("G_reward_rules", "purm_bhattacharyya_s0", {"params": {"temperature": 2.0}}),
        ("G_reward_heads", "hp_head_s0", {}),  # its arrays are not there
    ],
)
def test_what_is_not_known_is_not_guessed(
    runner: ModuleType, tmp_path: Path, family: str, name: str, changes: dict[str, Any]
) -> None:
    write(tmp_path, family, [case(family, name) | changes])
    assert run(runner, tmp_path)[1][-1].startswith("0 ok, 0 FAIL, 1 unknown")


@pytest.mark.parametrize(
    ("family", "name", "keys"),
    [
        ("G_reward_losses", "hpsv3_btt_ties_s1", ("outputs", "grad_chosen", 0, 0)),
        ("G_reward_losses", "hpsv3_uncertainty_s0", ("outputs_paper", "grad_s", 1)),
        ("G_reward_losses", "hpsv3_uncertainty_s0", ("outputs_peer", "exact_loss")),
        ("G_reward_losses", "icthp_ict_s0", ("outputs_paper", "loss")),
        ("G_reward_losses", "hpsv2_rankingloss_s0", ("outputs_peer", "loss")),
        ("G_reward_rules", "vqr1_fidelity_s0", ("outputs_paper", "reward_ddof0", 2, 1)),
        ("G_reward_rules", "p_yes_top_logprobs", ("outputs_paper", "mass", 3)),
        ("G_reward_rules", "ctrl_u_s0", ("outputs", "grad_logits", 4, 1, 0, 2)),
        ("G_reward_heads", "hpsv3_pooling_s0", ("outputs", "last", 1, 0)),
    ],
)
def test_a_corrupted_number_is_named(
    runner: ModuleType, tmp_path: Path, family: str, name: str, keys: tuple[Any, ...]
) -> None:
    one = case(family, name)
    place: Any = one
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] += 1e-4 * (1 + abs(place[keys[-1]]))
    write(tmp_path, family, [one])
    status, lines = run(runner, tmp_path)
    assert status == 1 and f"FAIL {family}/{name} " in lines[0] and "expected" in lines[0]


def test_the_layered_head_comes_from_the_arrays(runner: ModuleType, tmp_path: Path) -> None:
    one = case("G_reward_heads", "hp_head_s0")
    write(tmp_path, "G_reward_heads", [one])
    with np.load(TESTS / "golden/G_reward_heads.npz") as archive:
        arrays = {key: archive[key] for key in archive.files if key.startswith("hp_head_s0/")}
    target: Any = tmp_path / "G_reward_heads.npz"
    np.savez(target, **arrays)
    assert run(runner, tmp_path)[0] == 0
    arrays["hp_head_s0/layers.4.bias"] = arrays["hp_head_s0/layers.4.bias"] + 0.01
    np.savez(target, **arrays)
    status, lines = run(runner, tmp_path)
    assert status == 1 and lines[0].startswith("FAIL G_reward_heads/hp_head_s0")
