# SPDX-License-Identifier: Apache-2.0
"""Stage 1 of the embedded generator: an `AutoencoderKL`, 64×64 images to 8×8 latents of 8 channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from .stage import Plan, SceneFeed, fast_autocast, packaged, rendered, train

KL_WEIGHT = 2e-5
"""Per latent element, against the errors per pixel; 1e-3 was tried and washed the colors out."""

SQUARE_WEIGHT = 5.0
"""Weight of the squared error: the absolute error alone leaves objects grey, being few pixels."""

EDGE_WEIGHT = 0.5
"""Weight of the error in the images' finite differences: sharp edges."""


def new_autoencoder() -> AutoencoderKL:
    """Create the untrained autoencoder: factor 8 in each direction, 0.95 M parameters."""
    model: Any = AutoencoderKL.from_config(AutoencoderKL.load_config(packaged("shapes-sd3") / "vae"))
    model.register_to_config(shift_factor=None, scaling_factor=0.18215)
    return model


def _differences(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 1:] - x[..., :-1], x[..., 1:, :] - x[..., :-1, :]


def reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error + SQUARE_WEIGHT × squared error + EDGE_WEIGHT × error of finite differences."""
    horizontal, vertical = (F.l1_loss(a, b) for a, b in zip(_differences(output), _differences(target), strict=True))
    pixels = F.l1_loss(output, target) + SQUARE_WEIGHT * F.mse_loss(output, target)
    return pixels + EDGE_WEIGHT * (horizontal + vertical)


def train_autoencoder(plan: Plan) -> AutoencoderKL:
    """Train the autoencoder, set its scale and shift from 4,096 images, and return it in float32."""
    seed, batch = plan.seed, plan.autoencoder_batch
    torch.manual_seed(seed)
    model = new_autoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-4)
    feed = SceneFeed(seed, style_weights=(0.25, 0.25, 0.25, 0.25))
    noise = torch.Generator()

    def loss_of(step: int) -> Tensor:
        images = rendered(feed.scenes(step * batch, batch))
        noise.manual_seed(seed * 1_000_003 + step)
        with fast_autocast():
            posterior = model.encode(images).latent_dist
            latents = posterior.sample(generator=noise)
            output = model.decode(latents).sample
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
        return reconstruction_loss(output.float(), images) + KL_WEIGHT * kl

    train(model, [optimizer], loss_of, "autoencoder", steps=plan.autoencoder_steps, cooldown=0.6)
    latents = encode_scenes(model, feed, 4096)
    model.register_to_config(
        shift_factor=round(latents.mean().item(), 4), scaling_factor=round(1.0 / latents.std().item(), 4)
    )
    return model


@torch.no_grad()
def encode_scenes(model: AutoencoderKL, feed: SceneFeed, count: int) -> Tensor:
    """Posterior means [count, 8, 8, 8] float32, not yet scaled, of a feed's first scenes."""
    parts = []
    for start in range(0, count, 256):
        images = rendered(feed.scenes(start, min(256, count - start)))
        with fast_autocast():
            parts.append(model.encode(images).latent_dist.mean.float())
    return torch.cat(parts)
