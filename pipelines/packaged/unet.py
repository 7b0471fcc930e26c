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

from .captions import new_tokenizer, token_ids
from .generator import CATEGORY_WEIGHTS, how_good, train_denoiser
from .stage import Plan, SceneFeed, fast_autocast, machine, muon_and_adam, size_of, tidy

NAME = "shapes-sd15"
POOL = 12_000
"""Scenes that are rendered and encoded once, all of them flat."""

WEIGHT_LIMIT = 5.0
"""Of the squared error of ε, weighted with 1/ᾱ_t (the error of v; Salimans and Ho 2022, arXiv 2202.00512)."""


def new_scheduler() -> DDIMScheduler:
    """Stable Diffusion's schedule, with steps from the last time on."""
    return DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        timestep_spacing="trailing",
    )


def new_unet() -> UNet2DConditionModel:
    """The untrained network: convolutions on 8×8, attention on 4×4, 1.4 M parameters."""
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=8,
        out_channels=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(32, 80),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=16,
    )


class UNetGenerator(nn.Module):
    """UNet and text encoder, trained together."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.unet: Any = new_unet().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.text = CLIPTextModel.from_pretrained(base / "text_encoder_2", num_hidden_layers=2)
        self.tokenizer = new_tokenizer()
        self.alpha_bar = new_scheduler().alphas_cumprod

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
        matrices = [
            parameter
            for name, parameter in self.unet.named_parameters()
            if parameter.ndim == 2 and "transformer_blocks" in name
        ]
        return muon_and_adam(self, matrices, lr=2e-3, slow=self.text.parameters())

    def pipeline(self, autoencoder: AutoencoderKL) -> StableDiffusionPipeline:
        """The model as diffusers' pipeline."""
        clean: Any = UNet2DConditionModel.from_config(self.unet.config)
        clean.load_state_dict({name: value.contiguous() for name, value in self.unet.state_dict().items()})
        absent: Any = None  # the annotations know no absent part
        scheduler: Any = new_scheduler()
        return StableDiffusionPipeline(
            unet=clean.eval(),
            vae=autoencoder,
            text_encoder=self.text,
            tokenizer=new_tokenizer(),  # the one in use has kept the padding of its last call
            scheduler=scheduler,
            safety_checker=absent,
            feature_extractor=absent,
            requires_safety_checker=False,
        )


def base_autoencoder(base: Path) -> AutoencoderKL:
    """The autoencoder of `shapes-sd3` without its shift, which Stable Diffusion 1.5 does not know."""
    autoencoder = AutoencoderKL.from_pretrained(base / "vae").eval()
    autoencoder.register_to_config(shift_factor=None)
    return autoencoder


def train_unet(base: Path, work: Path, plan: Plan, resume: bool) -> UNetGenerator:
    """Train UNet and text encoder on the autoencoder of `base` and return them with averaged weights."""
    seed = plan.seed + 6
    torch.manual_seed(seed)
    return train_denoiser(
        UNetGenerator(base),
        base_autoencoder(base),
        SceneFeed(seed, style_weights=(1.0, 0.0, 0.0, 0.0), category_weights=CATEGORY_WEIGHTS),
        work / "sd15.pt",
        pool=POOL,
        batch=plan.unet_batch,
        steps=plan.unet_steps,
        seed=seed,
        resume=resume,
        decay=0.998,
    )


def save_unet(model: UNetGenerator, autoencoder: AutoencoderKL, folder: Path) -> None:
    """Write the model as a `StableDiffusionPipeline` without a safety checker, float16 safetensors."""
    model.pipeline(autoencoder).to(torch.float16).save_pretrained(folder)
    tidy(folder)


def unet_card(folder: Path, seconds: float, plan: Plan) -> str:
    """The card of `shapes-sd15`."""
    pipe = StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    return f"""# {NAME}

A small text-to-image model of the shapes world that predicts ε, in diffusers' format:
`StableDiffusionPipeline.from_pretrained("assets/{NAME}")` loads and runs it as it is, 64×64 images.
UNet of the Stable Diffusion 1.5 type (8×8 and 4×4, attention on 4×4, 1.4 M parameters), the autoencoder of
`shapes-sd3`, a CLIP text encoder of 2 layers, a DDIM scheduler, no safety checker, float16,
{size_of(folder):.1f} MB.

## Training

- {plan.unet_steps} steps of {plan.unet_batch} from a pool of {POOL:,} encoded scenes, all of the flat style;
  the text encoder starts from the first layers of `shapes-sd3`'s second one.
- {seconds / 60:.0f} minutes in all on {machine()}.
- Made by `visalign build-assets --only sd15`.

## Data

Scenes rendered from the training prompts of `shapes-sd3`; no held-out combination occurs among them.

{how_good(pipe, "DDIM")}"""
