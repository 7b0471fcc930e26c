# SPDX-License-Identifier: Apache-2.0
"""Where a Flow-GRPO training step spends its time: the share outside the transformer must stay below 15 %.

python tests/benchmarks/images/training_step.py                                  shapes_grpo_guard as it is
python tests/benchmarks/images/training_step.py rollout.prompts_per_iteration=8  smaller iterations

Transformer work is what the algorithm cannot do without, and nothing else:
* the time between entering and leaving the transformer's forward, adapters included: without gradient in the
  rollout, with gradient in the update;
* in the backward pass, the time from the gradient's arrival at the transformer's output to the pass's end.
All the rest of an iteration's wall-clock time is outside: text encoders, noise, the steps' arithmetic,
decoding, reward, advantages, the loss and its own backward, optimizer, averages, metrics. Evaluation and
checkpoints are no part of a step and are left out. Shares are taken within each iteration and the median over
the iterations is printed, so that a busy machine moves the seconds more than the shares.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from visalign.config import load_config
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, _build
from visalign.training import FlowGRPO, Trainer

WORK = ("transformer: forward in the rollout", "transformer: forward and backward in the update")
"""The rows that are transformer work."""

STEP_ALONE = ("evaluation.every=0", "evaluation.rewards={}", "evaluation.correctness=null")
"""Overrides that leave out what is no part of a step."""


class Stopwatch:
    """Seconds per name, put into a trainer from outside."""

    def __init__(self, trainer: Trainer[FlowGRPO]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._begin = 0.0
        transformer = trainer.algorithm.policy.module
        transformer.register_forward_pre_hook(self._enter)
        transformer.register_forward_hook(self._leave)
        self._watch_backward(trainer.accelerator)
        for owner, method in (
            (trainer.weights.optimizer, "step"),
            (trainer.weights, "clear"),
            (trainer.ema, "update"),
            (nn.utils, "clip_grad_norm_"),
        ):
            self._watch(owner, method, "optimizer")

    @staticmethod
    def now() -> float:
        """Seconds, when all that was asked of the device is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _enter(self, *_: Any) -> None:
        self._begin = self.now()

    def _leave(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        image: Tensor = output[0]
        self.seconds[WORK[int(image.requires_grad)]] += self.now() - self._begin
        if image.requires_grad:
            image.register_hook(self._enter)

    def _watch_backward(self, accelerator: Any) -> None:
        plain = accelerator.backward

        def backward(loss: Tensor, **options: Any) -> None:
            plain(loss, **options)
            self.seconds[WORK[1]] += self.now() - self._begin

        accelerator.backward = backward

    def _watch(self, owner: Any, method: str, name: str) -> None:
        plain = getattr(owner, method)

        @wraps(plain)
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = self.now()
            result = plain(*arguments, **options)
            self.seconds[name] += self.now() - begin
            return result

        setattr(owner, method, timed)


def phases(record: Mapping[str, Any], watched: Mapping[str, float]) -> dict[str, float]:
    """Seconds per row of the table; they add up to those of the iteration."""
    forward, both = (watched.get(name, 0.0) for name in WORK)
    optimizer = watched.get("optimizer", 0.0)
    return {
        WORK[0]: forward,
        WORK[1]: both,
        "decode": record["seconds/decode"],
        "reward": record["seconds/reward"],
        "optimizer, clipping, averages": optimizer,
        "rest of the rollout: prompts, noise, steps": record["seconds/rollout"] - forward,
        "rest of the update: pairs, loss, statistics": record["seconds/update"] - both - optimizer,
        "rest: sampler, advantages, metrics": record["seconds/other"],
    }


def measure(config: FlowGRPOConfig, iterations: int) -> list[dict[str, float]]:
    """The rows of each iteration, after one that warms up."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _build(config, Path(folder)).trainer
        watch = Stopwatch(trainer)
        rows = []
        trainer.clock.take()
        for _ in range(iterations + 1):
            watch.seconds.clear()
            record = trainer.iterate()
            rows.append(phases(record, watch.seconds))
    return rows[1:]


def outside(row: Mapping[str, float]) -> float:
    """Share of an iteration that is no transformer work."""
    return 1.0 - sum(row[name] for name in WORK) / sum(row.values())


def table(rows: Sequence[Mapping[str, float]]) -> str:
    """Medians over the iterations."""
    lines = [f"{'':<50}{'seconds':>9}{'share':>9}"]
    for name in rows[0]:
        share = median(row[name] / sum(row.values()) for row in rows)
        lines.append(f"{name:<50}{median(row[name] for row in rows):9.3f}{share:9.1%}")
    lines.append(f"{'iteration':<50}{median(sum(row.values()) for row in rows):9.3f}{1:9.1%}")
    lines.append(f"{'outside the transformer':<50}{'':9}{median(map(outside, rows)):9.1%}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, compare with the limit.

    Returns:
        0 when the median share outside the transformer is below the limit, else 1.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("overrides", nargs="*", help="settings as key.sub=value")
    parser.add_argument("--config", default="shapes_grpo_guard", help="name or file of a configuration")
    parser.add_argument("--iterations", type=int, default=5, help="iterations measured (default 5)")
    parser.add_argument("--limit", type=float, default=0.15, help="share that is too much (default 0.15)")
    options = parser.parse_args(arguments)
    if options.iterations < 1:
        parser.error(f"--iterations is {options.iterations}; it must be at least 1.")
    config = load_config(FlowGRPOConfig, options.config, [*STEP_ALONE, *options.overrides])
    rows = measure(config, options.iterations)
    images = config.rollout.prompts_per_iteration * config.rollout.group_size
    print(f"{options.config}: {len(rows)} iterations of {images} images, {torch.get_num_threads()} threads")
    print(table(rows))
    share = median(map(outside, rows))
    print(f"{share:.1%} outside the transformer, allowed is less than {options.limit:.0%}")
    return int(share >= options.limit)


if __name__ == "__main__":
    sys.exit(main())
