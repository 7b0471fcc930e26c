# SPDX-License-Identifier: Apache-2.0
"""Time and memory of log-prob and gradients from hidden states: `fused_log_prob_entropy` against logits in memory.

`python tests/benchmarks/gpu/head.py --n 8192 --width 2048 --vocabulary 151936`, in bfloat16 with a trained head.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

sys.path.insert(0, ".")
from visalign.core import fused_log_prob_entropy


def milliseconds(function: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Return the median time of a call, and its peak memory above the baseline in MiB."""
    cuda = torch.cuda.is_available()
    times, baseline = [], torch.cuda.memory_allocated() if cuda else 0
    for _ in range(repeats + 2):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() - baseline if cuda else 0
    return statistics.median(times[2:]), peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("n", 8192), ("width", 2048), ("vocabulary", 151936), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.randn(options.n, options.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(options.vocabulary, options.width, device=device, dtype=torch.bfloat16) * 0.02
    head.requires_grad_()
    target = torch.randint(0, options.vocabulary, (options.n,), device=device)

    def log_prob_by_logits() -> torch.Tensor:
        return (hidden @ head.T).float().log_softmax(-1).gather(1, target[:, None]).sum()

    def log_prob() -> torch.Tensor:
        return fused_log_prob_entropy(hidden, head, target).log_prob.sum()

    def both() -> torch.Tensor:
        result = fused_log_prob_entropy(hidden, head, target, sum_p2=True)
        return result.log_prob.sum() + result.entropy.sum()

    for function in (log_prob_by_logits, log_prob, both):

        def forward(function: Callable[[], torch.Tensor] = function) -> None:
            with torch.no_grad():
                function()

        def step(function: Callable[[], torch.Tensor] = function) -> None:
            hidden.grad = head.grad = None
            function().backward()

        ms, _ = milliseconds(forward, options.repeats)
        step_ms, mib = milliseconds(step, options.repeats)
        mib -= 2 * (hidden.numel() + head.numel()) / 2**20 if function is log_prob_by_logits else 0
        print(json.dumps({"name": function.__name__, "forward ms": ms, "with backward ms": step_ms, "MiB": mib}))


if __name__ == "__main__":
    main()
