# SPDX-License-Identifier: Apache-2.0
"""The fused head on a GPU: values and gradients against float64, and its work memory."""

from __future__ import annotations

import pytest
import torch

from visalign.core import fused_log_prob_entropy, log_prob_entropy
from visalign.core.tokens import fused_tiles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("n", "width", "v"), [(300, 264, 5003), (9000, 512, 3001)])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_are_those_of_float64(n: int, width: int, v: int, soft_cap: float | None, dtype):
    g = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(n, width, device="cuda", generator=g).to(dtype).requires_grad_()
    head = (torch.randn(v, width, device="cuda", generator=g) * 0.1).to(dtype).requires_grad_()
    target = torch.randint(0, v, (n,), device="cuda", generator=g)
    rows = (torch.arange(n, device="cuda") % 3 > 0).float()  # a third is left out
    up = torch.randn(2, n, device="cuda", generator=g) * rows
    result = fused_log_prob_entropy(hidden, head, target, rows, temperature=0.8, soft_cap=soft_cap, sum_p2=True)
    (result.log_prob * up[0] + result.entropy * up[1]).sum().backward()
    exact_hidden, exact_head = (x.detach().double().requires_grad_() for x in (hidden, head))
    exact = log_prob_entropy(exact_hidden @ exact_head.T, target, temperature=0.8, soft_cap=soft_cap)
    (exact.log_prob * up[0] + exact.entropy * up[1]).sum().backward()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-3
    for name in ("log_prob", "entropy", "sum_p2"):
        torch.testing.assert_close(getattr(result, name).double(), getattr(exact, name) * rows, rtol=1e-3, atol=1e-3)
    for value, exact_value in ((hidden.grad, exact_hidden.grad), (head.grad, exact_head.grad)):
        assert value is not None and exact_value is not None
        assert float((value.double() - exact_value).norm() / exact_value.norm()) < 3 * tolerance


def test_a_bfloat16_head_runs_the_kernels_of_its_card_within_a_fraction_of_the_logits():
    n, width, v = 8192, 1024, 32000
    hidden = torch.randn(n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(v, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    capable = torch.cuda.get_device_capability() >= (9, 0)
    assert (fused_tiles._kernels(hidden, head, None) is not None) == capable
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused_log_prob_entropy(hidden, head, torch.zeros(n, dtype=torch.long, device="cuda")).log_prob.sum().backward()
    gradients = 2 * (hidden.numel() + head.numel())
    work = torch.cuda.max_memory_allocated() - before - gradients
    assert work < 4 * n * v / 3 or not capable  # naive log-probs take three tensors of 4 n v bytes
