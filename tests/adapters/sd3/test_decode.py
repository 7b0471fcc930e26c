# SPDX-License-Identifier: Apache-2.0
"""Decoding of the SD3 adapter: its precision, its memory format, and that no verdict depends on them."""

from __future__ import annotations

import torch

from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters.sd3.policy import SD3Policy

LATENTS = (5, 8, 8, 8)


def test_decoding_follows_bfloat16_autocast_and_no_other() -> None:
    policy = SD3Policy(tiny_sd3_pipeline(), decode_batch=2)
    latents = torch.randn(LATENTS, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = policy.decode(latents)
        policy.autocast = torch.bfloat16
        low = policy.decode(latents)
        policy.autocast = torch.float16
        assert torch.equal(policy.decode(latents), exact)
    assert low.dtype == torch.float32 and low.is_contiguous() and exact.is_contiguous()
    assert 0 < (low - exact).abs().mean() < 1 / 255
