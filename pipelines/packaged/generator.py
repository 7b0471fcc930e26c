# SPDX-License-Identifier: Apache-2.0
"""Stage 2 of the embedded generator: an SD3 transformer with its text encoders, by flow matching.

Rectified flow (Esser et al. 2024, arXiv 2403.03206, section 2): x_σ = (1 − σ) x₀ + σ ε, target v = ε − x₀,
σ logit-normal.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from visalign.adapters.sd3.joint_attention import append_null_token, use_weighted_attention
from visalign.data.shapes.prompts import heldout_prompts
from visalign.data.shapes.verifier import verify
from visalign.flow.schedules import time_grid

from .autoencoder import encode_scenes
from .captions import TextSide, new_tokenizer
from .stage import Plan, SceneFeed, muon_and_adam, tidy, train

POOL = 50_000
"""Scenes that are rendered and encoded once; every epoch draws its own noise and times."""

CATEGORY_WEIGHTS = {
    "single_object": 0.07,
    "two_objects": 0.26,
    "counting": 0.17,
    "colors": 0.10,
    "position": 0.22,
    "color_attribution": 0.18,
}
"""Share of each category: more pairs with sizes than the other stages see, the hardest for the generator."""

DROP_CAPTION = 0.1
"""Share of empty captions, for guidance."""

SHIFT = 2.0
"""The scheduler's shift: 8×8 latents need less than SD3's 3."""


def new_transformer() -> SD3Transformer2DModel:
    """The untrained transformer: 16 image tokens of 2×2 latents, width 160, 7 layers, 6.3 M parameters."""
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=8,
        out_channels=8,
        num_layers=7,
        attention_head_dim=32,
        num_attention_heads=5,
        joint_attention_dim=128,
        caption_projection_dim=160,
        pooled_projection_dim=128,
        pos_embed_max_size=4,
        qk_norm="rms_norm",
    )
    use_weighted_attention(model)
    return model


class Generator(nn.Module):
    """Transformer and text side, trained together."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = new_transformer()
        self.text = TextSide(new_tokenizer())

    def velocity(self, x: Tensor, sigma: Tensor, ids: Tensor) -> Tensor:
        """v [B, 8, 8, 8] float32 at noise levels sigma [B] for token ids [B, L]."""
        context, pooled = self.text(ids)
        context, weight = append_null_token(context, 128)
        output = self.transformer(
            x,
            encoder_hidden_states=context,
            pooled_projections=pooled,
            timestep=sigma * 1000.0,
            joint_attention_kwargs={"context_log_multiplicity": weight},
        )
        return output.sample.float()

    @torch.no_grad()
    def sample(self, prompts: list[str], seed: int, *, steps: int = 10, shift: float = SHIFT) -> Tensor:
        """Scaled latents [B, 8, 8, 8] by Euler steps without guidance."""
        x = torch.randn(len(prompts), 8, 8, 8, generator=torch.Generator().manual_seed(seed))
        ids, grid = self.text.token_ids(prompts), time_grid(steps, shift=shift)
        for sigma, following in itertools.pairwise(grid):
            with torch.autocast("cpu", torch.bfloat16):
                v = self.velocity(x, sigma.expand(len(prompts)), ids)
            x = x + (following - sigma) * v
        return x


def decode(autoencoder: AutoencoderKL, latents: Tensor) -> Tensor:
    """Pictures [B, 3, 64, 64] in [0, 1] of scaled latents."""
    config = autoencoder.config
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        pictures = autoencoder.decode(latents / config.scaling_factor + config.shift_factor).sample
    return (pictures.float().clamp(-1, 1) + 1) / 2


def heldout_accuracy(generator: Generator, autoencoder: AutoencoderKL, seed: int = 0) -> dict[str, float]:
    """Share of correct pictures over the held-out prompts, one seed, in all and per category."""
    records = heldout_prompts()
    pictures = decode(autoencoder, generator.sample([record["prompt"] for record in records], seed))
    correct = np.array([verdict.correct for verdict in verify(pictures, records)])
    tags = np.array([record["tag"] for record in records])
    return {"all": float(correct.mean())} | {
        str(tag): float(correct[tags == tag].mean()) for tag in np.unique(tags)
    }


def latent_pool(autoencoder: AutoencoderKL, work: Path, feed: SceneFeed, size: int) -> Tensor:
    """Scaled latents [size, 8, 8, 8] float16 of a feed's first scenes; kept on disk for a resumed build."""
    file = work / f"latents-{size}.pt"
    if file.exists():
        return torch.load(file, weights_only=True)
    config = autoencoder.config
    pool = ((encode_scenes(autoencoder, feed, size) - config.shift_factor) * config.scaling_factor).half()
    torch.save(pool, file)
    return pool


def train_generator(autoencoder: AutoencoderKL, work: Path, plan: Plan, resume: bool) -> Generator:
    """Train transformer and text encoders and return them with averaged weights."""
    seed, batch = plan.seed + 1, plan.generator_batch
    torch.manual_seed(seed)
    generator, feed = Generator(), SceneFeed(seed, category_weights=CATEGORY_WEIGHTS)
    pool = latent_pool(autoencoder, work, feed, POOL)
    prompts = [feed.scene(number).record["prompt"] for number in range(len(pool))]
    ids = generator.text.token_ids(prompts)
    empty = generator.text.token_ids([""])
    if shutil.which("c++"):  # a sixth faster; without a compiler the plain module does the same
        generator.transformer.compile(dynamic=False)

    def loss_of(step: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(pool), (batch,), generator=draw)
        x0, noise = pool[rows].float(), torch.randn(batch, 8, 8, 8, generator=draw)
        sigma = torch.sigmoid(torch.randn(batch, generator=draw) + 0.3)
        dropped = torch.rand(batch, 1, generator=draw) < DROP_CAPTION
        at = sigma[:, None, None, None]
        with torch.autocast("cpu", torch.bfloat16):
            v = generator.velocity((1 - at) * x0 + at * noise, sigma, torch.where(dropped, empty, ids[rows]))
        return F.mse_loss(v, noise - x0)

    blocks = [
        parameter
        for name, parameter in generator.transformer.transformer_blocks.named_parameters()
        if parameter.ndim == 2 and ".norm1" not in name
    ]
    return train(
        generator,
        muon_and_adam(generator, blocks, lr=1e-3),
        loss_of,
        work / "generator.pt",
        steps=plan.generator_steps,
        resume=resume,
        decay=0.9995,
        check=lambda held: heldout_accuracy(held, autoencoder),
    )


def null_t5(vocabulary: int) -> T5EncoderModel:
    """A T5 encoder that puts out zeros for every token: its final norm is 0."""
    config = T5Config(vocab_size=vocabulary, d_model=128, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    encoder = T5EncoderModel(config).eval()
    nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return encoder


def save_pipeline(generator: Generator, autoencoder: AutoencoderKL, folder: Path) -> None:
    """Write the generator as a `StableDiffusion3Pipeline`, float16 safetensors.

    T5 is absent. diffusers loads such a folder only when told `text_encoder_3=None` at each call, so the
    folder holds `null_t5`, whose every token is the null token that diffusers puts in T5's place.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    clean = SD3Transformer2DModel.from_config(generator.transformer.config)
    clean.load_state_dict(generator.transformer.state_dict())
    tokenizer = new_tokenizer()  # the one in use has kept the padding of its last call
    pipeline = StableDiffusion3Pipeline(
        transformer=clean,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=autoencoder,
        text_encoder=generator.text.first,
        tokenizer=tokenizer,
        text_encoder_2=generator.text.second,
        tokenizer_2=tokenizer,
        text_encoder_3=null_t5(len(tokenizer)),
        tokenizer_3=tokenizer,
    )
    pipeline.to(torch.float16).save_pretrained(folder)
    tidy(folder)
