# SPDX-License-Identifier: Apache-2.0
"""What `PipelinePolicy` adds to the passes of the network: processor time of a velocity of 3 latents, less
that of the same calls of the network alone, on a tiny pipeline of each family.

    python tests/benchmarks/pipeline_call.py [FAMILY ...]

It is the Python of the pipeline's call, which does not grow with the model: 3 to 11 ms was measured, where at
most 3 ms was wanted.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.support.models.pipelines import TINY, tiny_pipeline, tiny_prompts
from visalign.adapters import LoraSettings, PipelinePolicy

ROUNDS = 40


def fastest(work: Callable[[], Any]) -> float:
    """Milliseconds of processor time."""
    times = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return 1e3 * min(times)


def main(names: list[str]) -> None:
    """Print a line for each family."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in names:
        pipe, options = tiny_pipeline(name)
        policy = PipelinePolicy(pipe, lora=LoraSettings(rank=2), **options)
        policy._halves.apart = False  # both halves in one batch, as in the calls that are compared with
        x, sigma = torch.randn(3, *policy.latent_shape), torch.full((3,), 0.5)
        condition = policy.encode(tiny_prompts(name, ["a red circle", "two blue squares!", "a red circle"]))
        seen: list[tuple[Any, ...]] = []

        def note(network: Any, args: Any, kwargs: Any, seen: list[tuple[Any, ...]] = seen) -> None:
            seen.append((network, args, kwargs))

        hooks = [n.register_forward_pre_hook(note, with_kwargs=True) for n in policy.networks.values()]
        with torch.no_grad():
            policy.velocity(x, sigma, condition)
            for hook in hooks:
                hook.remove()
            bare = fastest(lambda seen=seen: [n(*args, **kwargs) for n, args, kwargs in seen])
            whole = fastest(lambda p=policy, x=x, s=sigma, c=condition: p.velocity(x, s, c))
        print(
            f"{name:14s} network {bare:6.2f} ms  velocity {whole:6.2f} ms  more {whole - bare:5.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:] or list(TINY))
