# SPDX-License-Identifier: Apache-2.0
"""Starting a run in several processes: the files that do it, and what is refused before a model is read."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate import DistributedType
from accelerate.commands.config.config_args import load_config_from_file

from visalign.errors import UserError
from visalign.pipelines.jobs import load_job, until_images
from visalign.pipelines.shared import parts
from visalign.pipelines.shared.sections import RunConfig
from visalign.training.loop.processes import check_accelerator, one_process

LAUNCH = Path(__file__).resolve().parents[3] / "docs" / "launch"


def _said(folder: Path, script: str, *arguments: str) -> list[str]:
    """The arguments that a script gives torchrun, where `srun` runs what follows it."""
    stand_ins = {"torchrun": 'printf "%s\\n" "$@"', "srun": 'shift; "$@"', "scontrol": "printf 'one\\ntwo\\n'"}
    for name, body in stand_ins.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    cluster = {"SLURM_JOB_NODELIST": "one,two", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    environment = {**os.environ, **cluster, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", str(LAUNCH / script), *arguments]
    process = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    return process.stdout.splitlines()


def test_the_scripts_start_what_they_are_given(tmp_path: Path) -> None:
    arguments = ["text_grpo", "seed=1", "--output", "a run"]
    assert _said(tmp_path, "torchrun.sh", "2", *arguments) == shlex.split(
        "--standalone --nproc_per_node 2 -m visalign train text_grpo seed=1 --output 'a run'"
    )
    begun = shlex.split(
        "--nnodes 2 --nproc_per_node 1 --rdzv_id 7 --rdzv_backend c10d --rdzv_endpoint one:20007 "
        "-m visalign train text_grpo seed=1 --output 'a run'"
    )
    assert _said(tmp_path, "slurm.sh", "text_grpo", "a run", "seed=1") == begun
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "config.yaml").write_text("")
    assert _said(tmp_path, "slurm.sh", "text_grpo", "a run", "seed=1") == [*begun, "--resume"]


def test_the_files_for_accelerate_and_skypilot_are_read() -> None:
    loaded: Any = load_config_from_file(str(LAUNCH / "accelerate.yaml"))
    assert loaded.num_processes == 2 and loaded.mixed_precision == "no"
    cloud = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    load_job(cloud["envs"]["CONFIG"], [])
    assert (LAUNCH.parents[1] / cloud["workdir"] / "pyproject.toml").is_file()
    assert cloud["setup"] == "pip install -e '.[images]'"
    subprocess.run(["bash", "-n"], input=cloud["run"], text=True, check=True)
    assert '-m visalign train "$CONFIG" --output "$FOLDER"' in cloud["run"]


def test_images_of_a_plan_count_the_rounds_of_dynamic_sampling() -> None:
    job = until_images(load_job("shapes_flow_grpo", ["dynamic.enabled=true", "dynamic.max_rounds=3"]), 2 * 3 * 288)
    assert job.config.run.iterations == 2


def test_what_processes_cannot_share_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_process("HEIE's heads train")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="HEIE's heads train in one process, and 2 were started"):
        one_process("HEIE's heads train")
    for name in ("text_sample", "shapes_ugda"):
        job = load_job(name, [])
        with pytest.raises(UserError, match="in one process, and 2 were started"):
            job.run(job.config, tmp_path / name)
        assert not (tmp_path / name).exists()


def test_an_engine_of_accelerates_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"set to FSDP .*ACCELERATE_USE_FSDP.*run\.sharding=true"):
        parts.build_accelerator(SimpleNamespace(run=RunConfig(device="cpu")), tmp_path)
    own: Any = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    with pytest.raises(UserError, match="set to DEEPSPEED"):
        check_accelerator(own)


def test_processes_that_differ_are_named() -> None:
    first = {"rollout.group_size": 4, "torch": "2.15.0", "--output": "runs/a"}
    parts.check_alike([first, dict(first)])
    other, older = {**first, "rollout.group_size": 6}, {**first, "torch": "2.14.1"}
    with pytest.raises(
        UserError,
        match=r"The 3 processes of this run differ: rollout\.group_size: 4 in process 0, 6 in process 1; "
        r"torch: '2\.15\.0' in process 0, '2\.14\.1' in process 2\. Start all with one command",
    ):
        parts.check_alike([first, other, older])


def test_a_port_in_use_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise torch.distributed.DistNetworkError(
            "The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE."
        )

    monkeypatch.setattr("accelerate.Accelerator", fails)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UserError, match=r"cannot meet at 127\.0\.0\.1:29500.*EADDRINUSE.*--master_port"):
        parts.build_accelerator(SimpleNamespace(run=RunConfig(device="cpu")), tmp_path)
