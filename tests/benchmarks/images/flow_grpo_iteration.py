# SPDX-License-Identifier: Apache-2.0
"""Seconds and forward-equivalents of a Flow-GRPO iteration, this checkout against another one.

    git worktree add ../before COMMIT
    python tests/benchmarks/images/flow_grpo_iteration.py ../before
    python tests/benchmarks/images/flow_grpo_iteration.py ../before --config shapes_grpo_guard

Both sides train the same configuration and overrides by their own `visalign train`, in turns; the first
iteration of a process is left out. Printed are medians, the ratio of each round, and forward-equivalents per
image; seconds are CPU seconds without evaluation and checkpoints (`--wall`: wall clock).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import ROOT, argument_parser, read_rows

HELDOUT = {"prompt": "a red circle", "tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]}
OVERRIDES = (
    "evaluation.every=0", "evaluation.rewards={}", "evaluation.correctness=null", "evaluation.seeds=[0]",
    "run.max_seconds=null", "run.checkpoint_every=1000", "run.device=cpu",
)  # fmt: skip
TRAIN = """
import sys, time
if sys.argv.pop(1) == "cpu":
    time.perf_counter = time.process_time  # what the phases are timed with
from visalign.__main__ import main
main()
"""


def run(checkout: Path, options: argparse.Namespace, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds and forward-equivalents per image of the iterations but the first."""
    heldout = folder / "heldout.jsonl"
    heldout.write_text(json.dumps(HELDOUT))
    output = Path(tempfile.mkdtemp(dir=folder)) / "run"
    command = [sys.executable, "-c", TRAIN, "wall" if options.wall else "cpu", "train", options.config]
    command += [*OVERRIDES, f"data.heldout={heldout}", f"run.threads={options.threads}"]
    command += [f"run.iterations={options.iterations + 1}", *options.overrides, "--output", str(output)]
    process = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": str(options.threads)},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise RuntimeError(f"{checkout}: {(process.stdout + process.stderr)[-2000:]}")
    rows = read_rows(output / "metrics.jsonl")[1:]
    left_out = ("seconds/evaluation", "seconds/checkpoint")
    seconds = [row["seconds"] - sum(row.get(key) or 0.0 for key in left_out) for row in rows]
    return seconds, [row["forward_equivalents_per_image"] for row in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("other", type=Path, help="another checkout of this project")
    parser.add_argument("overrides", nargs="*", help="key=value, for both sides")
    parser.add_argument("--config", default="shapes_flow_grpo")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=2, help="per process, besides the first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true", help="wall clock instead of CPU seconds")
    options = parser.parse_args(arguments)
    other = options.other.resolve()
    if not (other / "visalign").is_dir():
        parser.error(f"{other} is no checkout of visalign: it has no folder visalign/.")
    seconds: dict[Path, list[float]] = {ROOT: [], other: []}
    passes: dict[Path, list[float]] = {ROOT: [], other: []}
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            medians = {}
            for side in (ROOT, other) if number % 2 == 0 else (other, ROOT):
                own, equivalents = run(side, options, Path(name))
                medians[side] = median(own)
                seconds[side] += own
                passes[side] += equivalents
            ratios.append(medians[ROOT] / medians[other])
            print(f"round {number + 1}: {medians[ROOT]:.2f} against {medians[other]:.2f}", flush=True)
    kind = "wall-clock" if options.wall else "CPU"
    for label, side in (("this", ROOT), ("other", other)):
        print(
            f"{label}: median {median(seconds[side]):.2f} {kind} seconds an iteration, "
            f"{median(passes[side]):.2f} forward-equivalents an image ({len(seconds[side])} iterations)"
        )
    by_round = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"ratio this / other: median {median(ratios):.3f} (rounds: {by_round})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
