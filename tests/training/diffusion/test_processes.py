# SPDX-License-Identifier: Apache-2.0
"""Two processes make the update of one: counts, advantages and denominators are those of all samples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from visalign.training import read_metrics

ROOT = Path(__file__).resolve().parents[3]
ROWS = (
    *("flow_grpo", "flow_gspo", "diffusion_nft", "crd", "draft"),
    *("flow_grpo+balance", "diffusion_nft+balance", "flow_grpo+reset", "flow_grpo+credit"),
)
CODE = """
import sys, torch
from pathlib import Path
from accelerate import Accelerator
from tests.support.training.pictures import Brightness, Loud, toy_trainer
from visalign.rewards import WeightedSum
from visalign.training import end_processes
torch.set_num_threads(1)
for row in sys.argv[2:]:
    algorithm, _, option = row.partition("+")
    folder = Path(sys.argv[1]) / row
    wide = {"surrogate_options": {"eps_low": 0.1, "eps_high": 0.1}} if "flow" in algorithm else {}
    wide |= {"last": 2} if algorithm == "draft" else {}
    terms = {"light": (Brightness(), 1.0), "red": (Loud(), 0.5), "blue": (Loud(2), 1.0)}
    several = WeightedSum(terms, allow_mixed_units=True)
    changes = {"kl": 0.01, **wide}
    objective, reward = {
        "": ({}, None),
        "balance": ({"balance_every": 1}, several),
        "credit": ({"credit": "turning_points"}, None),
        "reset": ({"reset_reference_every": 1}, None),
    }[option]
    accelerator = Accelerator(cpu=True)
    trainer = toy_trainer(
        folder,
        objective={"algorithm": algorithm, "changes": changes, **objective},
        reward=reward,
        run={"iterations": 2},
        accelerator=accelerator,
    )
    trainer.train()
    if accelerator.is_main_process:
        torch.save([p.detach() for _, p in trainer.weights.named], folder / "weights.pt")
end_processes()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder with `one` and `two`, in each a run of every row: launching costs more than training."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.py").write_text(CODE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name, processes in (("one", 1), ("two", 2)):
        for row in ROWS:
            (folder / name / row).mkdir(parents=True)
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [sys.executable, *start, str(folder / "train.py"), str(folder / name), *ROWS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_two_processes_make_the_update_of_one(row, runs):
    one, two = (torch.load(runs / name / row / "weights.pt") for name in ("one", "two"))
    assert any(bool(weight.any()) for weight in one)
    for mine, other in zip(one, two, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    rows = [read_metrics(runs / name / row / "metrics.jsonl") for name in ("one", "two")]
    for mine, other in zip(*rows, strict=True):
        both = ("loss", "grad_norm", "samples", "reward_mean")
        judged = ("frac_reward_zero_std", "trained_share")
        velocities = (*judged, "loss/kl", "match_error", "anchor_distance")
        own = {"flow": (*judged, "kl", "ratio_std"), "draf": ("loss/kl", "reward_gradient")}.get(
            row[:4], velocities
        )
        for key in (*both, *own):
            assert mine[key] == pytest.approx(other[key], rel=1e-3), key
        for key in mine:
            if key.startswith("reward_weight/"):
                assert mine[key] == pytest.approx(other[key], rel=1e-3) != 1 / 3, key
