# SPDX-License-Identifier: Apache-2.0
"""The second embedded generator: a UNet of the Stable Diffusion 1.5 type that predicts ε.

DDPM (Ho et al. 2020, arXiv 2006.11239, eq. 4): x_t = √ᾱ_t x₀ + √(1 − ᾱ_t) ε, on the scaled-linear schedule of
Stable Diffusion. The autoencoder and the first layers of a text encoder are those of `shapes-sd3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel

from .generator import CATEGORY_WEIGHTS, new_tokenizer, token_ids, train_denoiser
from .stage import Plan, SceneFeed, fast_autocast, muon_and_adam, packaged

NAME = "shapes-sd15"
POOL = 12_000
"""Scenes that are rendered and encoded once, all of them flat."""

WEIGHT_LIMIT = 5.0
"""Of the squared error of ε, weighted with 1/ᾱ_t (the error of v; Salimans and Ho 2022, arXiv 2202.00512)."""


def new_unet() -> UNet2DConditionModel:
    """Create the untrained network: convolutions on 8×8, attention on 4×4, 1.4 M parameters."""
    network: Any = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(packaged(NAME) / "unet"))
    return network


class UNetGenerator(nn.Module):
    """UNet and text encoder, trained together."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.unet: Any = new_unet().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.text = CLIPTextModel.from_pretrained(base / "text_encoder_2", num_hidden_layers=2)
        self.tokenizer = new_tokenizer()
        self.alpha_bar = DDIMScheduler.from_pretrained(packaged(NAME) / "scheduler").alphas_cumprod

    def token_ids(self, prompts: Sequence[str]) -> Tensor:
        """Ids [B, MAX_TOKENS] int64."""
        return token_ids(self.tokenizer, prompts)

    def times(self, count: int, draw: torch.Generator) -> Tensor:
        """t [count] int64, uniform."""
        return torch.randint(len(self.alpha_bar), (count,), generator=draw)

    def loss(self, x0: Tensor, noise: Tensor, time: Tensor, ids: Tensor) -> Tensor:
        """The mean squared error of ε, weighted with min(1/ᾱ_t, WEIGHT_LIMIT)."""
        alpha_bar = self.alpha_bar[time, None, None, None]
        x = alpha_bar.sqrt() * x0 + (1 - alpha_bar).sqrt() * noise
        with fast_autocast():
            epsilon = self.unet(x, time, self.text(ids).last_hidden_state).sample.float()
        return ((1 / alpha_bar).clamp(max=WEIGHT_LIMIT) * (epsilon - noise).square()).mean()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the transformer blocks' matrices, AdamW for the rest, slow for the text encoder."""
        parameters = self.unet.named_parameters()
        matrices = [p for name, p in parameters if p.ndim == 2 and "transformer_blocks" in name]
        return muon_and_adam(self, matrices, lr=2e-3, slow=self.text.parameters())

    def pipeline(self, autoencoder: AutoencoderKL) -> StableDiffusionPipeline:
        """The model as diffusers' pipeline."""
        clean: Any = UNet2DConditionModel.from_config(self.unet.config)
        clean.load_state_dict({name: value.contiguous() for name, value in self.unet.state_dict().items()})
        return StableDiffusionPipeline.from_pretrained(
            packaged(NAME), unet=clean.eval(), vae=autoencoder, text_encoder=self.text
        )


def base_autoencoder(base: Path) -> AutoencoderKL:
    """The autoencoder of `shapes-sd3` without its shift, which Stable Diffusion 1.5 does not know."""
    autoencoder = AutoencoderKL.from_pretrained(base / "vae").eval()
    autoencoder.register_to_config(shift_factor=None)
    return autoencoder


def train_unet(base: Path, plan: Plan) -> UNetGenerator:
    """Train UNet and text encoder on the autoencoder of `base` and return them with averaged weights."""
    seed = plan.seed + 6
    torch.manual_seed(seed)
    return train_denoiser(
        UNetGenerator(base),
        base_autoencoder(base),
        SceneFeed(seed, style_weights=(1.0, 0.0, 0.0, 0.0), category_weights=CATEGORY_WEIGHTS),
        "sd15",
        pool=POOL,
        batch=plan.unet_batch,
        steps=plan.unet_steps,
        seed=seed,
        decay=0.998,
    )
