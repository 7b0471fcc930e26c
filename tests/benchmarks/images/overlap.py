# SPDX-License-Identifier: Apache-2.0
"""What is saved by judging beside the rollout, and beside the update, where the judge works elsewhere.

    python tests/benchmarks/images/overlap.py

Flow-GRPO on the packaged model. The judge sleeps a fixed time for each image, as one does that waits for a
server; `--judge` is that time as a share of what making an image takes. The ways take turns in one process;
seconds of an iteration, the first of each left out. Refuted if four stretches leave more than half of the
judge's time to be waited for, or samples made ahead more than a tenth.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import visalign as va
from visalign.interfaces import Scores
from visalign.training import DiffusionObjectiveSettings, RunSettings

WAYS: dict[str, dict[str, Any]] = {"judged after": {}, "overlap=4": {"overlap": 4}, "staleness=1": {"staleness": 1}}
CHANGES = {"importance_sampling": {"level": "token", "mode": "truncate", "high": 2.0}}


class Elsewhere:
    """The share of red, after a time."""

    name, unit, range, higher_is_better = "elsewhere", "share", (0.0, 1.0), True

    def __init__(self) -> None:
        self.seconds = 0.0

    def score(self, images: Any, prompts: Sequence[str], metadata: Any = None) -> Scores:
        """Sleep, then answer."""
        time.sleep(self.seconds * len(prompts))
        red = images[:, 0].mean((1, 2))
        return Scores(value=red, valid=torch.ones(len(red), dtype=torch.bool), unit=self.unit)


def trainer(folder: Path, way: dict[str, Any], reward: Elsewhere) -> va.Trainer[Any]:
    """A fresh run; samples made ahead need the correction, and all have it so that they do the same work."""
    policy = va.load_policy(va.resolve_model("shapes-sd3"), lora=va.LoraSettings(rank=8))
    rollout = va.RolloutSettings(prompts_per_iteration=8, group_size=8, steps=6, batch_size=16, train_steps=[0], **way)
    # one trained step: an update of about the rollout's time
    records = [{"prompt": f"a {colour} circle"} for colour in ("red", "blue", "green", "yellow")]
    algorithm = va.FlowGRPO(
        policy, reward, records, rollout=rollout, objective=DiffusionObjectiveSettings(changes=CHANGES)
    )
    return va.Trainer(algorithm, run=RunSettings(folder=folder, iterations=10**6, checkpoint_every=10**6))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--judge", type=float, default=1.0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    reward = Elsewhere()
    with tempfile.TemporaryDirectory() as name:
        runs = {way: trainer(Path(name) / way, settings, reward) for way, settings in WAYS.items()}
        first, *_ = [run.iterate() for run in runs.values()]
        making = first["seconds/rollout"] + first["seconds/decode"]
        reward.seconds = options.judge * making / 64
        runs["staleness=1"].iterate()  # whose samples were judged while it did not sleep
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(options.iterations):
            for way, run in runs.items():
                begin = time.perf_counter()
                waited = run.iterate()["seconds/reward"]
                times[way].append((time.perf_counter() - begin, waited))
    judging = 64 * reward.seconds
    print(f"making {making:.2f} s, judging {judging:.2f} s")
    for way, rows in times.items():
        seconds, waiting = (median(column) for column in zip(*rows, strict=True))
        print(f"{way}: {seconds:.2f} s an iteration, waited for {waiting / judging:.0%} of the judge's time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
