# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a process that trains a model of 100 M random weights in full: DDP and FSDP2.

    python tests/benchmarks/processes/sharding.py --processes 2

Flow-GRPO on the CPU (gloo, one thread each), float32, AdamW, averaged weights, two iterations, then a
checkpoint. The peak is the resident memory that torch's first import and the processes' meeting had not taken
yet, of the process that takes most; first without, then with the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import ROOT, argument_parser, process_memory
from tests.support.training.images import ToyPolicy, toy_trainer
from visalign.training import end_processes

WIDTH, BLOCKS = 1024, 12


class Block(nn.Module):
    """x + W₂ gelu(W₁ x), 8.4 M weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Network(nn.Module):
    """Velocity of [4, 4, 4] latents."""

    _repeated_blocks = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64 + 2, WIDTH), nn.Linear(WIDTH, 64)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        inputs = torch.cat([x.flatten(1), sigma[:, None], prompt[:, None].to(x)], 1)
        return self.leave(self.blocks(self.enter(inputs))).view(x.shape).clone()


class Policy(ToyPolicy):
    """The contract on `Network`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Network()  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


def work(kind: str) -> None:
    """One process of the training; says its peak."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    begin, ended, peak = process_memory("VmRSS"), Event(), [0]

    def look() -> None:
        while not ended.is_set():
            peak[0] = max(peak[0], process_memory("VmRSS"))
            time.sleep(0.005)

    with tempfile.TemporaryDirectory() as folder:
        policy = Policy()
        weights = sum(weight.numel() for weight in policy.net.parameters())
        trainer = toy_trainer(
            Path(folder),
            policy=policy,
            accelerator=accelerator,
            rollout={"prompts_per_iteration": 2, "group_size": 4, "steps": 3},
            optimizer={"micro_batch": 4, "lr": 1e-5},
            sharding=kind == "fsdp",
        )
        watch = Thread(target=look)
        watch.start()
        for _ in range(2):
            trainer.iterate()
        updating, start = peak[0] - begin, time.perf_counter()
        trainer.save()
        seconds = time.perf_counter() - start
        ended.set()
        watch.join()
    peaks: Any = accelerator.gather(torch.tensor([[updating, peak[0] - begin]]))
    if accelerator.is_main_process:
        training, saving = (peaks.max(0).values / 2**20).tolist()
        print(
            f"{kind}: {weights / 1e6:.1f} M weights, {training:.0f} MiB at most in a process, {saving:.0f} "
            f"with a checkpoint, which took {seconds:.1f} s"
        )
    end_processes()


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--work", choices=("ddp", "fsdp"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # else glibc keeps much of what was freed
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    for kind in ("ddp", "fsdp"):
        subprocess.run([*start, str(options.processes), __file__, "--work", kind], env=environment, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
