# SPDX-License-Identifier: Apache-2.0
"""Rewards on a GPU: float32 scores are the CPU's, bfloat16 ones differ by a small share of their spread."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from visalign.data.shapes.prompts import train_prompts
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import sample_scene
from visalign.rewards import load_reward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PER_PROMPT = 8


def images_and_prompts() -> tuple[torch.Tensor, list[str]]:
    """Images [N, 3, 64, 64] and prompts: some images of a prompt show it, others another one."""
    records = train_prompts()[:12]
    rng = np.random.default_rng(0)
    scenes = [records[(i + j % 3) % len(records)] for i in range(len(records)) for j in range(PER_PROMPT)]
    levels = torch.from_numpy(render_many([sample_scene(record, rng) for record in scenes]))
    prompts = [record["prompt"] for record in records for _ in range(PER_PROMPT)]
    return levels.permute(0, 3, 1, 2).float() / 255, prompts


@pytest.mark.parametrize(
    ("name", "low_precision"),
    [
        ("clip_score", "bf16"),
        ("hp", "bf16"),
        ("ict", "bf16"),
        ("hpsv3", None),
        ("vqa_score", None),
        ("jpeg_size", None),
    ],
)
def test_scores_are_those_of_the_cpu(name: str, low_precision: str | None):
    images, prompts = images_and_prompts()
    expected = load_reward(name, run_device="cpu").score(images, prompts).value
    default = load_reward(name)
    value = default.score(images.to("cuda"), prompts).value.cpu()
    deviation = (expected.view(-1, PER_PROMPT) - expected.view(-1, PER_PROMPT).mean(1, keepdim=True)).std()
    share = float((value - expected).std() / deviation)
    print(f"{name}: {share:.4f} of the deviation within a prompt")
    assert share <= 0.02
    if low_precision is not None:
        exact = load_reward(name, precision="fp32").score(images.to("cuda"), prompts).value.cpu()
        torch.testing.assert_close(exact, expected, rtol=1e-3, atol=1e-3)


def test_the_verifier_detects_on_the_gpu_what_it_detects_on_the_cpu():
    images, prompts = images_and_prompts()
    noisy = (images + 0.05 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    verifier = load_reward("shapes_verifier", mode="partial")
    for batch in (images, noisy):
        expected = verifier.score(batch, prompts)
        on_device = verifier.score(batch.to("cuda"), prompts)
        assert float((on_device.value != expected.value).double().mean()) <= 0.02  # convolutions round apart


@pytest.mark.parametrize("name", ["clip_score", "reward_dance"])
def test_an_image_on_the_gpu_and_one_on_the_cpu_get_one_score(name: str):
    images, prompts = images_and_prompts()
    reward = load_reward(name, precision="fp32")
    torch.testing.assert_close(
        reward.score(images.to("cuda"), prompts).value, reward.score(images, prompts).value, rtol=0, atol=1e-6
    )
