# SPDX-License-Identifier: Apache-2.0
"""Seconds of an iteration in one process and in two, of text and of images.

    python tests/benchmarks/processes/two_processes.py --cores 0,1

The same configuration by `visalign train` in one process and in two (torchrun, gloo, CPU, one thread each),
in turns on two cores, the first iteration left out. Seconds are those of metrics.jsonl without evaluation and
checkpoints; beside them the CPU seconds of the first process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import ROOT, argument_parser

JOBS = {
    "text_grpo": ("data.heldout_per_task=1",),
    "shapes_flow_grpo": ("evaluation.correctness=verifier", "evaluation.steps=2", "evaluation.grid=0"),
}
"""Configuration -> what makes its evaluation small."""
SHARED = ("evaluation.every=0", "evaluation.seeds=[0]", "run.max_seconds=null", "run.checkpoint_every=1000")
TRAIN = """
import json, sys, time
from visalign.training import Trainer
plain, seconds = Trainer.iterate, []
def iterate(self):
    begin, cpu = time.perf_counter(), time.process_time()
    record = plain(self)
    seconds.append((time.perf_counter() - begin, time.process_time() - cpu))
    if self.accelerator.is_main_process:
        with open(sys.argv[-1] + ".seconds", "w") as file:
            json.dump(seconds, file)
    return record
Trainer.iterate = iterate
from visalign.__main__ import main
main()
"""


def run(job: str, processes: int, iterations: int, folder: Path, more: Sequence[str]) -> tuple[float, float]:
    """Median (wall, CPU) seconds of the iterations but the first."""
    script, output = folder / "train.py", Path(tempfile.mkdtemp(dir=folder)) / "run"
    script.write_text(TRAIN)
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    settings = [
        *SHARED, *JOBS[job], "run.device=cpu", "run.threads=1", f"run.iterations={iterations + 1}", *more,
    ]  # fmt: skip
    command = [*start, str(script), "train", job, *settings, "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError((process.stdout + process.stderr)[-2000:])
    wall, cpu = zip(*json.loads(Path(f"{output}.seconds").read_text())[1:], strict=True)
    return median(wall), median(cpu)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("jobs", nargs="*", default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=3, help="per run, besides the first")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more settings of all runs")
    parser.add_argument("--cores", default="0,1", help="cores that all may use, as taskset -c takes them")
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    with tempfile.TemporaryDirectory() as name:
        for job in options.jobs:
            gains = []
            for number in range(options.rounds):
                seconds = {}
                for processes in (1, 2) if number % 2 == 0 else (2, 1):
                    seconds[processes] = run(job, processes, options.iterations, Path(name), options.set)
                gains.append([seconds[1][kind] / seconds[2][kind] for kind in (0, 1)])
                print(
                    f"{job} round {number + 1}: wall {seconds[1][0]:.2f} s in one, {seconds[2][0]:.2f} s in two; "
                    f"CPU of a process {seconds[1][1]:.2f} and {seconds[2][1]:.2f} s",
                    flush=True,
                )
            wall, cpu = (median(column) for column in zip(*gains, strict=True))
            print(f"{job}: {wall:.2f} times by the wall clock, {cpu:.2f} by the CPU of a process", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
