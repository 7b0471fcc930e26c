# SPDX-License-Identifier: Apache-2.0
"""The golden runner on the frozen numbers of this repository, and on files and folders that must not pass."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISALIGN_GOLDEN_WEIGHTS", raising=False)


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("visalign_golden_runner", TESTS / "golden_runner.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(runner: ModuleType, folder: Path) -> tuple[int, list[str]]:
    """Exit status and printed lines."""
    lines: list[str] = []
    return runner.run_folder(folder, runner.load_families(TESTS / "golden_families"), lines.append), lines


def write(folder: Path, family: str, cases: list[dict[str, Any]], name: str = "file") -> None:
    document = {"format": "visalign-golden-1", "family": family, "cases": cases}
    (folder / f"{name}.json").write_text(json.dumps(document))


def case(family: str, name: str) -> dict[str, Any]:
    cases = json.loads((TESTS / "golden" / f"{family}.json").read_text())["cases"]
    return next(entry for entry in cases if entry["name"] == name)


def centred(**changes: Any) -> dict[str, Any]:
    """A small case that agrees."""
    return {
        "name": "trl_grpo_none_s7",
        "params": {"scale": "none", "ddof": 1, "eps": 1e-4},
        "inputs": {"rewards": [1.0, 3.0, "NaN"], "group": ["x", "x", "x"]},
        "outputs": {"advantages": [-1.0, 1.0, 0.0]},
    } | changes


def test_all_frozen_numbers_agree(runner: ModuleType) -> None:
    status, lines = run(runner, TESTS / "golden")
    assert status == 0, "\n".join(line for line in lines if not line.startswith("ok"))
    passed = [line.split()[1] for line in lines if line.startswith("ok")]
    families = {name.split("/")[0] for name in passed}
    expected = {path.stem for path in (TESTS / "golden").glob("*.json")}
    assert families == expected and len(passed) > 180
    for variant in (
        "trl_gdpo_s0",
        "clip_higher_s2",
        "aggregate_s1",
        "grpo_guard_mixed_s0",
        "ppo_clip_fully_masked_row",
    ):
        assert any(name.endswith(f"/{variant}") for name in passed), variant


@pytest.mark.parametrize(
    ("family", "name", "keys"),
    [
        ("A_advantages", "trl_gdpo_s1", ("outputs", "advantages", 0)),
        ("B_surrogates", "ppo_clip_s0", ("outputs", "token_mean", "grad_log_prob", 0, 0)),
        ("B_surrogates", "ppo_clip_fully_masked_row", ("outputs_trl", "dr_grpo", "loss")),
        ("E_diffusion_losses", "grpo_guard_mixed_s2", ("outputs_paper", "loss")),
        ("E_diffusion_losses", "flow_grpo_with_kl_s0", ("outputs_peer", "policy_loss")),
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
    entry = case(family, name)
    parent: Any = entry
    for key in keys[:-1]:
        parent = parent[key]
    parent[keys[-1]] += 1e-4 * (1 + abs(parent[keys[-1]]))
    write(tmp_path, family, [entry])
    status, lines = run(runner, tmp_path)
    failures = [line for line in lines if line.startswith("FAIL")]
    assert status == 1 and len(failures) == 1 and f"{family}/{name} " in failures[0] and "expected" in failures[0]
    assert lines[-1].endswith(f"{family}/{name}")


def test_command_line_from_another_folder(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    off = centred(name="trl_grpo_none_s8", outputs={"advantages": [-1.0, 1.1, 0.0]})
    write(tmp_path, "A_advantages", [centred(), centred(name="bad_s0"), off])
    monkeypatch.chdir(tmp_path)
    assert runner.main(["."]) == 1
    printed = capsys.readouterr().out
    assert "FAIL A_advantages/trl_grpo_none_s8" in printed
    assert "1 ok, 1 FAIL, 1 unknown" in printed and "unknown variant A_advantages/bad: 1 cases" in printed


def test_the_paper_wins_over_the_peer(runner: ModuleType, tmp_path: Path) -> None:
    paper = centred()
    paper["outputs_paper"] = paper.pop("outputs")
    paper["outputs_peer"] = {"advantages": [5.0, 5.0, 5.0]}
    write(tmp_path, "A_advantages", [paper])
    assert run(runner, tmp_path)[0] == 0


def test_unknown_families_and_variants_are_counted(runner: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "Z_new", [{"name": "one"}, {"name": "two"}], "z")
    write(tmp_path, "A_advantages", [centred(name="new_thing_s0"), centred(params={"scale": "rank"})])
    status, lines = run(runner, tmp_path)
    assert status == 0
    assert "unknown family Z_new: 2 cases" in lines
    assert "unknown variant A_advantages/new_thing: 1 cases" in lines
    assert "unknown variant A_advantages/trl_grpo_none: 1 cases" in lines


def test_arrays_come_from_the_npz_of_the_same_stem(runner: ModuleType, tmp_path: Path) -> None:
    case = centred(inputs={"arrays": ["rewards"], "group": [0, 0]}, outputs={"arrays": ["advantages"]})
    write(tmp_path, "A_advantages", [case])
    status, lines = run(runner, tmp_path)
    assert status == 2 and "the array trl_grpo_none_s7/rewards is not in the .npz file" in lines[0]
    arrays: dict[str, Any] = {
        "trl_grpo_none_s7/rewards": np.array([1.0, 3.0]),
        "trl_grpo_none_s7/advantages": np.array([-1.0, 1.0]),
    }
    np.savez(tmp_path / "file.npz", **arrays)
    assert run(runner, tmp_path)[0] == 0
    (tmp_path / "file.npz").write_bytes((tmp_path / "file.npz").read_bytes()[:50])
    status, lines = run(runner, tmp_path)
    assert status == 2 and "UNREADABLE file.json: file.npz cannot be read" in lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "visalign-golden-1", "cas', "UNREADABLE file.json: "),
        ('{"format": "visalign-golden-1", "x": NaN}', "bare NaN is no strict JSON"),
        ('{"format": "visalign-golden-1", "family": "A"}', "needs 'family' .* and 'cases'"),
        ('{"format": "visalign-golden-1", "family": "A", "cases": [{}]}', "an object with a 'name'"),
        ('{"format": "visalign-golden-1", "family": "A", "cases": [{"name": "a", "params": 1}]}', "'params' must be"),
        ('{"format": "other"}', "its format is not visalign-golden-1"),
    ],
)
def test_files_that_cannot_be_used(runner: ModuleType, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "file.json").write_text(text)
    status, lines = run(runner, tmp_path)
    assert status == 2
    assert re.search(message, "\n".join(lines))


def test_one_unreadable_file_does_not_hide_the_others(runner: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "A_advantages", [centred()])
    (tmp_path / "cut.json").write_text("{")
    status, lines = run(runner, tmp_path)
    assert status == 2 and any(line.startswith("ok   A_advantages/trl_grpo_none_s7") for line in lines)


def test_an_empty_or_missing_folder(runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = run(runner, tmp_path)
    assert status == 2 and "no readable file of format visalign-golden-1" in lines[-1]
    assert runner.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no folder" in capsys.readouterr().out


def test_a_case_that_raises_or_answers_nothing_fails(runner: ModuleType, tmp_path: Path) -> None:
    short = centred(inputs={"rewards": [1.0, 3.0], "group": ["x"]})
    write(tmp_path, "A_advantages", [short, centred(name="trl_grpo_none_s9", outputs={"other": 1.0})])
    status, lines = run(runner, tmp_path)
    assert status == 1
    assert "FAIL A_advantages/trl_grpo_none_s7" in lines[0] and "one label per sample" in lines[0]
    assert "FAIL A_advantages/trl_grpo_none_s9" in lines[1] and "none of our outputs" in lines[1]


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance", "ok"),
    [
        (1.0 + 0.9e-6, 1.0, (1e-6, 0.0, "element"), True),
        (1.0 + 1.1e-6, 1.0, (1e-6, 0.0, "element"), False),
        ([0.0, 100.0], [1e-5, 100.0], (1e-6, 0.0, "element"), False),
        ([0.0, 100.0], [1e-5, 100.0], (1e-6, 0.0, "largest"), True),
        ([float("nan"), float("inf")], [float("nan"), float("inf")], (0.0, 0.0, "element"), True),
        ([0.0], [float("nan")], (1.0, 1.0, "element"), False),
        ([float("inf")], [float("-inf")], (1.0, 1.0, "element"), False),
        ([[1.0], [2.0]], [1.0, 2.0], (1.0, 1.0, "element"), False),
        ([1.0, [2.0, 3.0]], [1.0, [2.0, 3.0]], (0.0, 0.0, "element"), True),
        ([1.0, [2.0, 4.0]], [1.0, [2.0, 3.0]], (0.0, 0.0, "element"), False),
        (["a", 1.0], ["a", 1.0], (0.0, 0.0, "element"), True),
        ("a", "b", (1.0, 1.0, "element"), False),
        (1.0, None, (1.0, 1.0, "element"), False),
        ([], [], (0.0, 0.0, "element"), True),
    ],
)
def test_difference(runner: ModuleType, ours: Any, theirs: Any, tolerance: Any, ok: bool) -> None:
    result = runner.difference(ours, theirs, tolerance)
    assert result.ok is ok and (ok or result.reason)


def test_names_mean_nothing(runner: ModuleType, tmp_path: Path) -> None:
    cases = json.loads((TESTS / "golden/G_reward_losses.json").read_text())["cases"][:24]
    cases = [{**entry, "name": f"x{number}"} for number, entry in enumerate(cases)]
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
