# SPDX-License-Identifier: Apache-2.0
"""Stage 2 of the embedded generator: an SD3 transformer with its text encoders, by flow matching.

Rectified flow (Esser et al. 2024, arXiv 2403.03206, section 2): x_σ = (1 − σ) x₀ + σ ε, target v = ε − x₀,
σ logit-normal.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DiffusionPipeline, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from visalign.adapters.sd3.joint_attention import use_weighted_attention
from visalign.data.shapes.prompts import CATEGORIES, heldout_prompts
from visalign.data.shapes.verifier import verify

from .autoencoder import encode_scenes
from .stage import Plan, SceneFeed, fast_autocast, muon_and_adam, packaged, tidy, train

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

SEEDS = (0, 1)  # of the measured images

MAX_TOKENS = 12
"""Begin, at most eight words, end, and room for two unknown pieces."""


def new_transformer() -> SD3Transformer2DModel:
    """Create the untrained transformer: 16 image tokens, width 160, 7 layers, 6.3 M parameters."""
    config = SD3Transformer2DModel.load_config(packaged("shapes-sd3") / "transformer")
    model: Any = SD3Transformer2DModel.from_config(config)
    use_weighted_attention(model)
    return model


def new_tokenizer() -> CLIPTokenizer:
    """Load the tokenizer: a byte-level BPE in CLIP's layout, one token for each word of the shapes world."""
    return CLIPTokenizer.from_pretrained(packaged("shapes-sd3") / "tokenizer")


def token_ids(tokenizer: CLIPTokenizer, prompts: Sequence[str]) -> Tensor:
    """Encode prompts to ids [B, MAX_TOKENS] int64."""
    return tokenizer(
        list(prompts), padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids


class TextSide(nn.Module):
    """Two trainable CLIP text encoders of 2 and 3 layers, width 64, as SD3's pipeline uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = new_tokenizer()
        folders = (packaged("shapes-sd3") / name for name in ("text_encoder", "text_encoder_2"))
        self.first, self.second = (
            CLIPTextModelWithProjection(CLIPTextConfig.from_pretrained(folder)) for folder in folders
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Compute context [B, MAX_TOKENS, 128] and pooled [B, 128]."""
        outputs = [encoder(ids, output_hidden_states=True) for encoder in (self.first, self.second)]
        context = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        return context, torch.cat([output.text_embeds for output in outputs], dim=-1)


class Generator(nn.Module):
    """Transformer and text side, trained together."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = new_transformer()
        self.text = TextSide()

    def compile_transformer(self) -> None:
        """Compile the transformer where a compiler is: a sixth faster; the plain module does the same."""
        if shutil.which("c++"):
            self.transformer.compile(dynamic=False)

    def velocity(self, x: Tensor, sigma: Tensor, ids: Tensor) -> Tensor:
        """v [B, 8, 8, 8] float32 at noise levels sigma [B] for token ids [B, L]."""
        context, pooled = self.text(ids)
        # one token stands for the 256 null tokens of the T5 encoder that the pipeline lacks
        weight = F.pad(torch.zeros(context.shape[1]), (0, 1), value=math.log(256)).to(context.device)
        context = F.pad(context, (0, 128 - context.shape[2], 0, 1))
        output = self.transformer(
            x,
            encoder_hidden_states=context,
            pooled_projections=pooled,
            timestep=sigma * 1000.0,
            joint_attention_kwargs={"context_log_multiplicity": weight},
        )
        return output.sample.float()

    def token_ids(self, prompts: Sequence[str]) -> Tensor:
        """Ids [B, MAX_TOKENS] int64."""
        return token_ids(self.text.tokenizer, prompts)

    def times(self, count: int, draw: torch.Generator) -> Tensor:
        """σ [count], logit-normal."""
        return torch.sigmoid(torch.randn(count, generator=draw) + 0.3)

    def loss(self, x0: Tensor, noise: Tensor, time: Tensor, ids: Tensor) -> Tensor:
        """Flow matching: the mean squared error of v."""
        at = time[:, None, None, None]
        with fast_autocast():
            v = self.velocity((1 - at) * x0 + at * noise, time, ids)
        return F.mse_loss(v, noise - x0)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the blocks' matrices, AdamW for the rest."""
        parameters = self.transformer.transformer_blocks.named_parameters()
        blocks = [p for name, p in parameters if p.ndim == 2 and ".norm1" not in name]
        return muon_and_adam(self, blocks, lr=1e-3)

    def pipeline(self, autoencoder: AutoencoderKL) -> StableDiffusion3Pipeline:
        """Return the generator as diffusers' pipeline.

        diffusers loads a folder without T5 only with `text_encoder_3=None` in each call, so the packaged one
        has a T5 whose every token is the null token that diffusers puts in its place (final norm 0).
        """
        clean: Any = SD3Transformer2DModel.from_config(self.transformer.config)  # without a compiled forward
        clean.load_state_dict(self.transformer.state_dict())
        encoders = {"text_encoder": self.text.first, "text_encoder_2": self.text.second}
        return StableDiffusion3Pipeline.from_pretrained(
            packaged("shapes-sd3"), transformer=clean.eval(), vae=autoencoder, **encoders
        )


def train_denoiser(
    model: Any,
    autoencoder: AutoencoderKL,
    feed: SceneFeed,
    name: str,
    *,
    pool: int,
    batch: int,
    steps: int,
    seed: int,
    decay: float = 0.9995,
) -> Any:
    """Train a `Generator` or `UNetGenerator` on a feed's latents; return it with averaged weights."""
    scale, shift = autoencoder.config.scaling_factor, autoencoder.config.shift_factor or 0.0
    latents = ((encode_scenes(autoencoder, feed, pool) - shift) * scale).half()
    ids = model.token_ids([feed.scene(number).record["prompt"] for number in range(len(latents))])
    empty = model.token_ids([""])

    def loss_of(step: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(latents), (batch,), generator=draw)
        x0, noise = latents[rows].float(), torch.randn(batch, 8, 8, 8, generator=draw)
        time = model.times(batch, draw)
        dropped = torch.rand(batch, 1, generator=draw) < DROP_CAPTION
        return model.loss(x0, noise, time, torch.where(dropped, empty, ids[rows]))

    return train(
        model,
        model.optimizers(),
        loss_of,
        name,
        steps=steps,
        decay=decay,
        check=lambda module: pipeline_accuracy(module.pipeline(autoencoder), 1.0, seeds=SEEDS[:1], every=4),
    )


def train_generator(autoencoder: AutoencoderKL, plan: Plan) -> Generator:
    """Train transformer and text encoders and return them with averaged weights."""
    seed = plan.seed + 1
    torch.manual_seed(seed)
    generator, feed = Generator(), SceneFeed(seed, category_weights=CATEGORY_WEIGHTS)
    generator.compile_transformer()
    return train_denoiser(
        generator,
        autoencoder,
        feed,
        "generator",
        pool=POOL,
        batch=plan.generator_batch,
        steps=plan.generator_steps,
        seed=seed,
    )


def save_pipeline(pipeline: Any, folder: Path) -> None:
    """Write a pipeline as float16 safetensors."""
    pipeline.to(torch.float16).save_pretrained(folder)
    tidy(folder)


def pipeline_accuracy(pipe: Any, guidance: float, *, seeds: Sequence[int] = SEEDS, every: int = 1) -> dict[str, float]:
    """Share of correct images of every n-th held-out prompt, the pipeline called as a user calls it."""
    pipe.set_progress_bar_config(disable=True)
    records = heldout_prompts()[::every]
    correct, tags = [], []
    for seed in seeds:
        for start in range(0, len(records), 52):
            part = records[start : start + 52]
            noise = [torch.Generator().manual_seed(10_000 * seed + start + i) for i in range(len(part))]
            with fast_autocast():
                images = pipe(
                    [record["prompt"] for record in part],
                    num_inference_steps=10,
                    guidance_scale=guidance,
                    generator=noise,
                    height=64,
                    width=64,
                    output_type="pt",
                ).images
            correct += [verdict.correct for verdict in verify(images.float(), part)]
            tags += [record["tag"] for record in part]
    hits, names = np.array(correct), np.array(tags)
    return {"all": float(hits.mean())} | {tag: float(hits[names == tag].mean()) for tag in CATEGORIES}


def pipeline_measures(folder: Path) -> dict[str, float]:
    """Measure a saved pipeline on the held-out prompts at guidance 1 and 2."""
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    return {
        f"{name}, guidance {scale:g}": share
        for scale in (1.0, 2.0)
        for name, share in pipeline_accuracy(pipe, scale).items()
    }
