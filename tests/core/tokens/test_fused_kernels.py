# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of the fused head, by Triton's interpreter on the CPU: statistics and gradients by definition."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch


def check() -> None:
    from visalign.core.tokens import fused_kernels

    fused_kernels.BLOCKS.update(BM=16, BN=32, BK=16, GROUP=2)  # several strips, none of which fits N, V and H
    torch.manual_seed(0)
    n, width, v, tau, start = 37, 40, 103, 0.7, 20
    hidden, weight, target = torch.randn(n, width), torch.randn(v, width) * 0.3, torch.randint(0, v, (n,))
    level, push, pull = torch.randn(3, n)
    for cap in (None, 3.0):
        z = hidden @ weight.T
        z = z if cap is None else cap * (z / cap).tanh()
        slope = 1.0 if cap is None else 1 - (z / cap).square()
        z = z / tau
        top = z.amax(1)
        d = z - top[:, None]
        e = d.exp()
        expected = (top, e.sum(1), (e * d).sum(1), e.square().sum(1), z.gather(1, target[:, None])[:, 0])
        actual = fused_kernels.softmax_sums(hidden, weight, target, tau, cap)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        gradient = e * (level[:, None] + push[:, None] * d)
        gradient[torch.arange(n), target] -= pull
        part, out = weight[start:].contiguous(), torch.empty(n, v - start)
        fused_kernels.logit_gradient(hidden, part, out, (target - start, top, level, push, pull), tau, cap)
        torch.testing.assert_close(out, (gradient * slope)[:, start:], rtol=1e-5, atol=1e-5)


def test_statistics_and_gradient_are_those_of_the_logits():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]


if __name__ == "__main__":
    check()
