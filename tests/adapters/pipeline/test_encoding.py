# SPDX-License-Identifier: Apache-2.0
"""Latents of images: for every family, the inverse of what its pipeline does before its autoencoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.pipelines import tiny_policy
from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters import LoraSettings, SD3Policy
from visalign.adapters.pipeline.encoding import ImageEncoder, fitted
from visalign.adapters.pipeline.families import FAMILIES
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This QwenImage21Turbo.* was distilled for"),
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated"),
    pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated"),
]
LORA = LoraSettings(rank=2, alpha=4)


def _policy(name: str, **changes: Any) -> PipelinePolicy:
    frames = {} if FAMILIES[name].frames is None else {"num_frames": 1}
    return tiny_policy(name, **{**frames, **changes})


def _given(policy: Any, latents: Tensor) -> Tensor:
    """What the autoencoder's decoder is given."""
    own, inputs = policy.pipe.vae.decode, []
    policy.pipe.vae.decode = lambda z, *a, **k: (inputs.append(z), own(z, *a, **k))[1]
    try:
        policy.decode(latents)
    finally:
        del policy.pipe.vae.decode
    return torch.cat(inputs)


def _posterior(vae: Any, images: Tensor, frames: bool) -> Tensor:
    x = 2 * images - 1
    if vae.config.get("in_channels") == 4:
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    with torch.no_grad():
        encoded = vae.encode(x[:, :, None] if frames else x)
    return encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent


@pytest.mark.parametrize("name", FAMILIES)
def test_the_decoder_is_given_what_the_encoder_made(name: str):
    policy = _policy(name)
    size = policy._encoder.size
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(1))
    latents = policy.encode_images(list(images))
    assert latents.shape == (2, *policy.latent_shape) and latents.dtype == policy.storage_dtype
    decoder_input = _given(policy, latents)
    own = _posterior(policy.pipe.vae, images, decoder_input.ndim == 5)
    assert own.std() > 0.01
    torch.testing.assert_close(decoder_input, own, atol=2e-6, rtol=1e-6)
    assert vars(policy.pipe.vae).get("decode") is None


@pytest.mark.parametrize("name", ["sd15", "wan"])
def test_in_16_bits_the_latents_are_those_of_float32(name: str):
    """Of the rounded weights: what the autoencoder makes is computed in float32 and rounded once."""

    def halve(pipe: Any) -> None:
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.to(torch.bfloat16)

    policy = _policy(name, change=halve)
    other = _policy(name, change=lambda pipe: pipe.vae.to(torch.bfloat16).float())
    image = torch.rand(3, *policy._encoder.size, generator=torch.Generator().manual_seed(0))
    latents, expected = policy.encode_images([image]), other.encode_images([image])
    assert latents.dtype == torch.bfloat16 and policy.pipe.vae.dtype == torch.bfloat16
    torch.testing.assert_close(latents, expected.bfloat16(), atol=1e-6, rtol=2**-7)


def test_images_of_any_size_are_scaled_and_cut_in_the_middle():
    wide = torch.zeros(3, 20, 60)
    wide[:, :, 20:40] = 1.0
    assert torch.equal(fitted(wide, (20, 20)), torch.ones(3, 20, 20))
    assert fitted(wide, (7, 9)).shape == (3, 7, 9) and fitted(wide, (64, 32)).shape == (3, 64, 32)
    assert fitted(torch.rand(3, 33, 64), (64, 64)).max() <= 1


def test_videos_and_what_has_no_inverse_are_refused():
    clips = _policy("wan", num_frames=5)
    with pytest.raises(UserError, match=r"WanPipeline: .* is given \[1, 16, 2, .*no single image"):
        clips.encode_images([torch.zeros(3, 16, 16)])
    policy: Any = SD3Policy(tiny_sd3_pipeline(), lora=LORA)
    own = policy.decode
    policy.decode = lambda latents: own(latents.square())
    with pytest.raises(UserError, match=r"StableDiffusion3Pipeline: .*more than to scale, shift and reorder"):
        ImageEncoder(policy)
    del policy.pipe.vae.encoder
    policy.pipe.vae = torch.nn.Identity()
    with pytest.raises(UserError, match=r"no autoencoder with an encoder"):
        ImageEncoder(policy)
