# SPDX-License-Identifier: Apache-2.0
"""Trains the toy in a process of its own: `python -m tests.support.training.pictures_run FOLDER ITERATIONS
SECONDS_PER_REWARD`.

It resumes when there is something to resume; the reward is slow enough for the test to kill the process in
time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from tests.support.training.pictures import Brightness, toy_trainer


class SlowBrightness(Brightness):
    """Brightness after a pause."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def score(self, images, prompts, metadata=None):
        time.sleep(self.seconds)
        return super().score(images, prompts, metadata)


def main() -> int:
    folder, iterations, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
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
    trainer.resume()
    result = trainer.train()
    print(result.stopped, flush=True)
    accelerator.end_training()
    return 130 if result.stopped == "interrupted" else 0


if __name__ == "__main__":
    sys.exit(main())
