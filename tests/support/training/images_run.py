# SPDX-License-Identifier: Apache-2.0
"""Trains the toy in processes of their own, forks of one that has imported: `python -m
tests.support.training.images_run` reads lines of JSON.

[FOLDER, ITERATIONS, SECONDS_PER_REWARD] starts a run, whose id it answers and whose words go to FOLDER.txt; a
run resumes when there is something to resume, and its reward is slow enough for a test to kill it in time. An
id is waited for, and answered with the exit status.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from accelerate import Accelerator

from tests.support.training.images import Brightness, toy_trainer


class SlowBrightness(Brightness):
    """Brightness after a pause."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def score(self, images, prompts, metadata=None):
        time.sleep(self.seconds)
        return super().score(images, prompts, metadata)


def train(folder: Path, iterations: int, pause: float) -> int:
    """One run; returns its exit status."""
    accelerator = Accelerator(cpu=True)
    folder.mkdir(exist_ok=True)
    trainer = toy_trainer(
        folder,
        reward=SlowBrightness(pause),
        objective={"changes": {"kl": 0.01}},
        rollout={"sde_window": 2},
        run={"iterations": iterations, "checkpoint_every": 2},
        accelerator=accelerator,
    )
    print("resumed" if trainer.resume() else "begun", flush=True)
    result = trainer.train()
    print(result.stopped, flush=True)
    accelerator.end_training()
    return 130 if result.stopped == "interrupted" else 0


def forked(folder: Path, iterations: int, pause: float) -> int:
    """`train` in a fork, whose id is returned."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        with Path(f"{folder}.txt").open("a") as words, redirect_stdout(words), redirect_stderr(words):
            try:
                code = train(folder, iterations, pause)
            finally:
                if code == 1:
                    traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
        else:
            print(forked(Path(asked[0]), *asked[1:]), flush=True)
