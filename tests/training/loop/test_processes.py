# SPDX-License-Identifier: Apache-2.0
"""Several processes are one: the updates of every trainer, what is logged, and what remains of a lost one."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forks import Fork, in_fork
from tests.support.training.images import outcome, toy_trainer
from tests.support.training.metric_families import without_times
from tests.support.training.processes import JOBS, PAUSE, run, run_all, two_networks
from tests.support.training.rewards import ToyPairs
from tests.support.training.text import toy_text_trainer
from visalign.errors import UserError
from visalign.rewards.base.contract import RewardError
from visalign.training import RewardModeling, RewardObjectiveSettings, read_metrics
from visalign.training.loop import checkpoint, processes
from visalign.training.loop.processes import ProcessLost, Shares, process_slice, report_lost_process
from visalign.training.loop.sharding import shard

IN_FOUR = ("dapo+dynamic", "flow_grpo+dynamic", "judge", "process_reward+sharded")
"""Few of them in four processes, of which some have nothing to do."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `1`, `2` and `4` with the trainings: starting processes costs more than they do."""
    folder = tmp_path_factory.mktemp("processes")
    in_fork(run_all, (folder / "2", 2, list(JOBS)), (folder / "4", 4, IN_FOUR))
    run(folder / "1", list(JOBS))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [*((name, 2) for name in JOBS), *((name, 4) for name in IN_FOUR)])
def test_the_updates_of_several_processes_are_those_of_one(name: str, world: int, runs: Path) -> None:
    one, many = (torch.load(runs / str(count) / name / "gradients.pt") for count in (1, world))
    assert len(one) == len(many) > 1
    for number, (mine, other) in enumerate(zip(one, many, strict=True)):
        # the first from equal weights; later ones differ by rounding that Adam's steps spread
        assert float((mine - other).norm()) <= (2e-6 if number == 0 else 1e-4) * float(mine.norm())
    assert float(one[0].norm()) > 0
    if name.startswith("process_reward"):
        reports = [(runs / str(count) / name / "reports.txt").read_text().split() for count in (1, world)]
        assert [float(x) for x in reports[1]] == pytest.approx([float(x) for x in reports[0]], rel=1e-5)
        return
    if name == "sft+sharded":  # tied weights are saved once
        saved = [load_file(runs / str(count) / name / "saved" / "model.safetensors") for count in (1, world)]
        torch.testing.assert_close(saved[1], saved[0], rtol=1e-3, atol=1e-5)
    rows = [read_metrics(runs / str(count) / name / "metrics.jsonl") for count in (1, world)]
    assert len(rows[0]) == len(rows[1]) >= 2
    for mine, other in zip(*rows, strict=True):
        for record in (mine, other):  # a process without samples still computes on one
            record.pop("forward_equivalents_per_image", None)
        if "adam_resolution" in mine:  # a median over weights whose gradient may be rounding
            resolution = other.pop("adam_resolution")
            assert resolution == pytest.approx(mine.pop("adam_resolution"), rel=1e-2)
        assert without_times(other) == pytest.approx(without_times(mine), rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_any_number_goes_on(runs: Path, tmp_path: Path) -> None:
    """Two processes go on bit for bit as the run that was not killed, one up to rounding."""
    killed = Fork(run_all, (tmp_path / "two", 2, ["slow"]), **{PAUSE: "0.4"})
    path, begin = tmp_path / "two" / "slow" / "metrics.jsonl", time.monotonic()
    while len(read_metrics(path)) < 2:
        assert time.monotonic() - begin < 200, "the run wrote no metrics"
        time.sleep(0.02)
    os.kill(int((tmp_path / "two" / "pid.1").read_text()), signal.SIGKILL)
    code, printed = killed.wait(60)
    assert code == 1 and "Another process of this run has ended" in printed
    folder, passed = checkpoint.newest_intact(tmp_path / "two" / "slow" / "checkpoints")
    assert folder is not None and not passed and int(folder.name[-1]) in (1, 2, 3)

    shutil.copytree(tmp_path / "two", tmp_path / "one")
    in_fork(run_all, (tmp_path / "two", 2, ["slow"]))
    run(tmp_path / "one", ["slow"])
    assert outcome(tmp_path / "two" / "slow") == outcome(runs / "2" / "slow")
    expected, rest = (
        checkpoint.load(checkpoint.step_folder(folder / "slow" / "checkpoints", 4), {"seed": 0}, free=()).tensors[
            "trainable"
        ]
        for folder in (runs / "1", tmp_path / "one")
    )
    for name, weight in expected.items():
        torch.testing.assert_close(rest[name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_sharded_run_goes_on_in_any_number_of_processes(runs: Path, tmp_path: Path) -> None:
    """From one checkpoint two processes go on bit for bit as the uninterrupted run. One does so up to rounding,
    as do two from the whole checkpoint of one process."""
    name = "diffusion_nft+sharded"
    for count, source in (("one", "2"), ("two", "2"), ("whole", "1")):
        shutil.copytree(runs / source / name, tmp_path / count / name)
        shutil.rmtree(checkpoint.step_folder(tmp_path / count / name / "checkpoints", 2))
    in_fork(run_all, *((tmp_path / folder, 2, [name]) for folder in ("two", "whole")))
    run(tmp_path / "one", [name])
    assert outcome(tmp_path / "two" / name) == outcome(runs / "2" / name)
    one, undivided, expected = (
        checkpoint.load(checkpoint.step_folder(folder / name / "checkpoints", 2), {"seed": 0}).tensors
        for folder in (tmp_path / "one", tmp_path / "whole", runs / "2")
    )
    for stem in ("trainable", "ema"):
        for key, weight in expected[stem].items():
            torch.testing.assert_close(one[stem][key], weight, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(undivided[stem][key], weight, rtol=1e-3, atol=1e-5)


class _Rank:
    """All that a share asks of its accelerator."""

    def __init__(self, rank: int, world: int) -> None:
        self.process_index, self.num_processes = rank, world


@pytest.mark.parametrize(("count", "world"), [(15, 1), (15, 4), (5, 5)])
def test_stretches_are_all_samples_once_and_differ_by_one(count: int, world: int) -> None:
    shares = [Shares.even(count, _Rank(rank, world)) for rank in range(world)]  # type: ignore[arg-type]
    assert torch.equal(torch.cat([share.own for share in shares]), torch.arange(count))
    sizes = [len(share.own) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    for rank, share in enumerate(shares):
        assert ((share.owner == rank) == (share.local >= 0)).all()
        assert torch.equal(share.local[share.own], torch.arange(len(share.own)))
        again = Shares.of_owners(share.owner, share.accelerator)
        assert torch.equal(again.own, share.own)


def test_more_processes_than_samples_are_refused() -> None:
    with pytest.raises(UserError, match=r"7 processes were started for 6 samples.*Start 6 or fewer"):
        process_slice(6, 0, 7)


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    two: Any = _Rank(0, 2)
    bits = torch.nn.Linear(2, 2).requires_grad_(False)
    bits.weight.data = torch.zeros(2, 2, dtype=torch.uint8)
    with pytest.raises(UserError, match=r"cannot divide weight, which is torch\.uint8.*quantization"):
        shard(bits, two)
    beside: Any = SimpleNamespace(trainable_parameters=lambda: [("head", torch.nn.Parameter(torch.ones(1)))])
    task = RewardObjectiveSettings(task="bradley_terry")
    with pytest.raises(UserError, match=r"cannot divide head, which SimpleNamespace holds outside a torch"):
        RewardModeling(beside, ToyPairs(), objective=task, accelerator=two, sharding=True)
    for policy, algorithm, kl, message in (
        (None, "crd", 0.0, "the algorithm 'crd', which joins the samples"),
        (None, "diffusion_nft", 0.1, r"a reference .* without LoRA"),
        (two_networks(), "diffusion_nft", 0.0, r"a model of several networks, as Wan 2\.2"),
    ):
        with pytest.raises(UserError, match=f"sharding does not work with {message}"):
            toy_trainer(
                Path(), policy=policy, objective={"algorithm": algorithm, "changes": {"kl": kl}}, sharding=True
            )


def test_what_of_text_cannot_be_sharded_is_refused_by_name() -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("grpo", {}, r"a reference \(objective\.changes\.kl\) without LoRA"),
        ("ppo", {"objective": {"changes": {"kl": 0.0}}, "separate_value": True}, "a value model"),
    ]
    for row, options, message in refused:
        with pytest.raises(UserError, match=f"sharding goes without {message}"):
            toy_text_trainer(Path(), row, sharding=True, **options)


def test_other_errors_pass_where_a_lost_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "[pair.cc:561] Connection closed by peer [127.0.0.1]:2260."
    with pytest.raises(RuntimeError, match="closed by peer") as error, report_lost_process():
        raise RuntimeError(lost)
    assert type(error.value) is RuntimeError, "one process has lost nobody"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(RewardError, match="reset by peer"), report_lost_process():
        raise RewardError("server: [Errno 104] Connection reset by peer")
    with pytest.raises(RuntimeError, match="something else"), report_lost_process():
        raise RuntimeError("something else")
    with pytest.raises(ProcessLost, match="start all processes again with --resume"), report_lost_process():
        raise RuntimeError(lost)


def test_a_column_that_one_process_lacks_is_nan_there(monkeypatch: pytest.MonkeyPatch) -> None:
    two: Any = SimpleNamespace(num_processes=2, process_index=1, device=torch.device("cpu"))
    two.gather = lambda own: torch.cat([torch.tensor([[1.0, 2.0, 3.0]]), own])
    monkeypatch.setattr(processes, "gather_object", lambda own: [["a", "b", "c"], *own])
    table = Shares(two, [torch.tensor([0]), torch.tensor([1])]).table({"c": torch.tensor([9.0])})
    assert [table[name][0].item() for name in "abc"] == [1, 2, 3] and table["c"][1] == 9
    assert table["a"][1].isnan() and table["b"][1].isnan()
