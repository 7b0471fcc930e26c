# SPDX-License-Identifier: Apache-2.0
"""What `PipelinePolicy` adds to the passes of the network: processor time of a velocity of 3 latents, less
that of the network's calls in it, on a tiny pipeline of each family.

    python tests/benchmarks/images/pipeline_call.py [FAMILY ...]

It is the Python of the pipeline's call, which does not grow with the model; the aim is at most 3 ms. Medians
over the rounds are printed. Edits go through two calls here, one for each source.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.models.pipelines import TINY, tiny_pipeline, tiny_prompts
from visalign.adapters import LoraSettings, PipelinePolicy
from visalign.adapters.pipeline.families import FAMILIES

ROUNDS = 40


def main(names: list[str]) -> None:
    """Print a line for each family."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in names:
        pipe, options = tiny_pipeline(name)
        spent: list[float] = []
        for part in FAMILIES[name].networks:
            if getattr(pipe, part, None) is not None:
                network = getattr(pipe, part)
                network.forward = timed(network.forward, spent)
        policy = PipelinePolicy(pipe, lora=LoraSettings(rank=2), **options)
        x, sigma = torch.randn(3, *policy.latent_shape), torch.full((3,), 0.5)
        condition = policy.encode(tiny_prompts(name, ["a red circle", "two blue squares!", "a red circle"]))
        inside, total = [], []
        velocity = timed(policy.velocity, total)
        for _ in range(ROUNDS):
            spent.clear()
            with torch.no_grad():
                velocity(x, sigma, condition)
            inside.append(sum(spent))
        more = median(a - b for a, b in zip(total, inside, strict=True))
        print(
            f"{name:16s} network {median(inside):6.2f} ms  velocity {median(total):6.2f} ms  more {more:5.2f} ms",
            flush=True,
        )


def timed(work: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The same, which notes milliseconds of processor time."""

    def called(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        out = work(*args, **kwargs)
        spent.append(1e3 * (time.process_time() - begin))
        return out

    return called


if __name__ == "__main__":
    main(sys.argv[1:] or list(TINY))
