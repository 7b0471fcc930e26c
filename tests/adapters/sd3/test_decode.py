# SPDX-License-Identifier: Apache-2.0
"""Decoding of the SD3 adapter: its precision, its memory format, and that no verdict depends on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters.sd3.policy import SD3Policy
from visalign.data.assets import resolve_model
from visalign.data.shapes import prompts, render, scenes, verifier

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


@pytest.mark.slow
def test_images_decoded_in_bfloat16_are_judged_as_those_in_float32() -> None:
    policy = SD3Policy.from_pretrained(resolve_model("shapes-sd3"))
    rng, records = np.random.default_rng(3), prompts.heldout_prompts()[::3]
    chosen = [
        scenes.sample_scene(record, rng, style=scenes.STYLES[i % 4]) for i, record in enumerate(records)
    ]
    images = torch.from_numpy(render.render_many(chosen)).permute(0, 3, 1, 2).float() / 127.5 - 1
    vae = policy.pipe.vae
    with torch.no_grad():
        latents = vae.encode(images).latent_dist.mean
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        exact = policy.decode(latents)
        policy.autocast = torch.bfloat16
        low = policy.decode(latents)
    assert (low - exact).abs().mean() < 1 / 255
    said, expected = verifier.verify(low, records), verifier.verify(exact, records)
    differ = sum(a.checks != b.checks for a, b in zip(said, expected, strict=True))
    assert len(records) >= 60 and differ <= 1
