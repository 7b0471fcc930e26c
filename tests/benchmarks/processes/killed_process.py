# SPDX-License-Identifier: Apache-2.0
"""One of two processes is killed at random moments, and the run goes on.

    python tests/benchmarks/processes/killed_process.py --moments 20
    python tests/benchmarks/processes/killed_process.py --moments 20 --jobs diffusion_nft+sharded

Tiny trainings (`tests.support.training.processes`) run in two processes (gloo, CPU). At each moment kill -9
ends one of them; timed is how long the other lives on, and noted whether it says why. Two processes then
resume, which must leave the weights and metrics of an unbroken run bit for bit, and one, up to rounding.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import argument_parser
from tests.support.training.images import outcome
from tests.support.training.processes import PAUSE, forked
from visalign.training.loop import checkpoint

JOBS = ("slow", "flow_grpo")


def weights(folder: Path, job: str) -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    last = checkpoint.folders(folder / job / "checkpoints")[-1]
    return dict(checkpoint.load(last, {"seed": 0}).tensors["trainable"])


def killed(folder: Path, jobs: Sequence[str], rank: int, delay: float) -> tuple[float, str] | None:
    """(seconds that the other process lived on, its last words) of a run in which one is killed; None where
    the run was over by then."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    when = folder / "killed"
    kill = f"sleep {delay:.3f}; date +%s.%N > {when}; kill -9 $(cat {folder / f'pid.{rank}'})"
    killer = subprocess.Popen(["sh", "-c", kill], stderr=subprocess.DEVNULL)
    saved = os.dup(2)
    with (folder / "said").open("w") as log:
        os.dup2(log.fileno(), 2)
        try:
            is_whole = forked(folder, 2, jobs)
        finally:
            os.dup2(saved, 2)
    ended = time.time()
    killer.wait()
    if is_whole:
        return None
    words = (folder / "said").read_text().strip().splitlines() or ["nothing"]
    return ended - float(when.read_text()), words[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", nargs="+", default=JOBS)
    options = parser.parse_args(arguments)
    jobs = options.jobs
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    os.environ[PAUSE] = "0.1"
    equal = near = 0
    longest = 0.0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        begin = time.time()
        if not forked(root / "whole", 2, jobs):
            return 1
        span = time.time() - begin
        for moment in range(options.moments):
            folder, survivor = root / str(moment), None
            while survivor is None:
                rank, delay = draw.randrange(2), draw.uniform(0.2, span)
                survivor = killed(folder, jobs, rank, delay)
            seconds, words = survivor
            explained = "Another process of this run has ended" in words
            longest = max(longest, seconds)
            shutil.copytree(folder, root / "one", dirs_exist_ok=True)
            same = forked(folder, 2, jobs) and all(
                outcome(folder / job) == outcome(root / "whole" / job) for job in jobs
            )
            close = forked(root / "one", 1, jobs) and all(
                torch.allclose(value, weights(root / "one", job)[key], rtol=1e-3, atol=1e-4)
                for job in jobs
                for key, value in weights(root / "whole", job).items()
            )
            shutil.rmtree(root / "one")
            equal, near = equal + same, near + close
            two, one = ("equal" if same else "OTHERWISE"), ("equal" if close else "OTHERWISE")
            print(
                f"moment {moment + 1}: process {rank} killed after {delay:.2f} of {span:.2f} s, the other "
                f"ended {seconds:.2f} s later{'' if explained else f' ({words[:90]})'}; two "
                f"resumed: bit for bit {two}; one: up to rounding {one}",
                flush=True,
            )
    print(f"{options.moments} moments: {equal} equal with two, {near} near with one; {longest:.2f} s alone")
    return 0 if equal == near == options.moments else 1


if __name__ == "__main__":
    sys.exit(main())
