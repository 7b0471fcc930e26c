# SPDX-License-Identifier: Apache-2.0
"""Stage 2 of the embedded generator: an SD3 transformer with its text encoders, by flow matching.

Rectified flow (Esser et al. 2024, arXiv 2403.03206, section 2): x_σ = (1 − σ) x₀ + σ ε, target v = ε − x₀,
σ logit-normal.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from visalign.adapters.sd3.joint_attention import append_null_token, use_weighted_attention
from visalign.data.shapes.prompts import CATEGORIES, all_prompts, heldout_prompts, train_prompts
from visalign.data.shapes.verifier import verify

from .autoencoder import encode_scenes
from .captions import TextSide, new_tokenizer
from .stage import Plan, SceneFeed, fast_autocast, machine, muon_and_adam, size_of, tidy, train

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

SEEDS = (0, 1)
"""Of the images that the card is measured on."""

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


class Denoiser(Protocol):
    """A network with its text side, as `train_denoiser` trains it."""

    def token_ids(self, prompts: Sequence[str]) -> Tensor:
        """Ids [B, L] int64."""
        ...

    def times(self, count: int, draw: torch.Generator) -> Tensor:
        """Times of training [count], in the network's own unit."""
        ...

    def loss(self, x0: Tensor, noise: Tensor, time: Tensor, ids: Tensor) -> Tensor:
        """The loss [] of one batch."""
        ...

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Of all parameters."""
        ...

    def pipeline(self, autoencoder: AutoencoderKL) -> Any:
        """The model as diffusers' pipeline."""
        ...


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

    def token_ids(self, prompts: Sequence[str]) -> Tensor:
        """Ids [B, MAX_TOKENS] int64."""
        return self.text.token_ids(prompts)

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
        blocks = [
            parameter
            for name, parameter in self.transformer.transformer_blocks.named_parameters()
            if parameter.ndim == 2 and ".norm1" not in name
        ]
        return muon_and_adam(self, blocks, lr=1e-3)

    def pipeline(self, autoencoder: AutoencoderKL) -> StableDiffusion3Pipeline:
        """The generator as diffusers' pipeline."""
        return new_pipeline(self, autoencoder)


def latent_pool(autoencoder: AutoencoderKL, file: Path, feed: SceneFeed, size: int) -> Tensor:
    """Scaled latents [size, 8, 8, 8] float16 of a feed's first scenes; kept on disk for a resumed build."""
    if file.exists():
        return torch.load(file, weights_only=True)
    config = autoencoder.config
    shift = config.shift_factor or 0.0
    pool = ((encode_scenes(autoencoder, feed, size) - shift) * config.scaling_factor).half()
    torch.save(pool, file)
    return pool


def train_denoiser(
    model: Any,
    autoencoder: AutoencoderKL,
    feed: SceneFeed,
    file: Path,
    *,
    pool: int,
    batch: int,
    steps: int,
    seed: int,
    resume: bool,
    decay: float = 0.9995,
) -> Any:
    """Train a `Denoiser` on the latents of a feed's first scenes and return it with averaged weights."""
    latents = latent_pool(autoencoder, file.with_name(f"latents-{file.stem}-{pool}.pt"), feed, pool)
    denoiser: Denoiser = model
    ids = denoiser.token_ids([feed.scene(number).record["prompt"] for number in range(len(latents))])
    empty = denoiser.token_ids([""])

    def loss_of(step: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(latents), (batch,), generator=draw)
        x0, noise = latents[rows].float(), torch.randn(batch, 8, 8, 8, generator=draw)
        time = denoiser.times(batch, draw)
        dropped = torch.rand(batch, 1, generator=draw) < DROP_CAPTION
        return denoiser.loss(x0, noise, time, torch.where(dropped, empty, ids[rows]))

    return train(
        model,
        denoiser.optimizers(),
        loss_of,
        file,
        steps=steps,
        resume=resume,
        decay=decay,
        check=lambda held: pipeline_accuracy(held.pipeline(autoencoder), 1.0, seeds=SEEDS[:1], every=4),
    )


def train_generator(autoencoder: AutoencoderKL, work: Path, plan: Plan, resume: bool) -> Generator:
    """Train transformer and text encoders and return them with averaged weights."""
    seed = plan.seed + 1
    torch.manual_seed(seed)
    generator, feed = Generator(), SceneFeed(seed, category_weights=CATEGORY_WEIGHTS)
    if shutil.which("c++"):  # a sixth faster; without a compiler the plain module does the same
        generator.transformer.compile(dynamic=False)
    return train_denoiser(
        generator,
        autoencoder,
        feed,
        work / "generator.pt",
        pool=POOL,
        batch=plan.generator_batch,
        steps=plan.generator_steps,
        seed=seed,
        resume=resume,
    )


def null_t5(vocabulary: int) -> T5EncoderModel:
    """A T5 encoder that puts out zeros for every token: its final norm is 0."""
    config = T5Config(vocab_size=vocabulary, d_model=128, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    encoder = T5EncoderModel(config).eval()
    nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return encoder


def new_pipeline(generator: Generator, autoencoder: AutoencoderKL) -> StableDiffusion3Pipeline:
    """The generator as diffusers' pipeline.

    T5 is absent. diffusers loads such a folder only when told `text_encoder_3=None` at each call, so there is
    `null_t5`, whose every token is the null token that diffusers puts in T5's place.
    """
    clean: Any = SD3Transformer2DModel.from_config(generator.transformer.config)
    clean.load_state_dict(generator.transformer.state_dict())
    tokenizer = new_tokenizer()  # the one in use has kept the padding of its last call
    return StableDiffusion3Pipeline(
        transformer=clean.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=autoencoder,
        text_encoder=generator.text.first,
        tokenizer=tokenizer,
        text_encoder_2=generator.text.second,
        tokenizer_2=tokenizer,
        text_encoder_3=null_t5(len(tokenizer)),
        tokenizer_3=tokenizer,
    )


def save_pipeline(generator: Generator, autoencoder: AutoencoderKL, folder: Path) -> None:
    """Write the generator as a `StableDiffusion3Pipeline`, float16 safetensors."""
    new_pipeline(generator, autoencoder).to(torch.float16).save_pretrained(folder)
    tidy(folder)


def pipeline_accuracy(
    pipe: Any, guidance: float, *, seeds: Sequence[int] = SEEDS, every: int = 1
) -> dict[str, float]:
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


def how_good(pipe: Any, steps: str) -> str:
    """The section of a generator's card that says how often its images are correct."""
    plain, guided = (pipeline_accuracy(pipe, scale) for scale in (1.0, 2.0))
    rows = "\n".join(f"| {name} | {plain[name]:.3f} | {guided[name]:.3f} |" for name in ("all", *CATEGORIES))
    worst = sorted(CATEGORIES, key=lambda name: plain[name])
    return f"""## How good it is

Held-out prompts × {len(SEEDS)} seeds, 10 {steps} steps, share of images that the verifier finds correct in
every check:

| category | guidance 1.0 | guidance 2.0 |
|---|---|---|
{rows}

It is meant to be improvable; it fails most often at {worst[0]} and {worst[1]}.
"""


def generator_card(folder: Path, seconds: float, plan: Plan) -> str:
    """The card of `shapes-sd3`."""
    splits = (all_prompts(), train_prompts(), heldout_prompts())
    counts = {name: [sum(r["tag"] == name for r in split) for split in splits] for name in CATEGORIES}
    prompts = "\n".join(f"| {name} | {a} | {b} | {c} |" for name, (a, b, c) in counts.items())
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32)
    return f"""# shapes-sd3

A small text-to-image model of the shapes world in diffusers' format:
`StableDiffusion3Pipeline.from_pretrained("assets/shapes-sd3")` loads and runs it as it is, 64×64 images.
SD3 transformer (7 layers, width 160, 16 image tokens, 6.3 M parameters), autoencoder (8×8 latents of 8
channels, 0.95 M), two CLIP text encoders (0.34 M), a null T5, float16, {size_of(folder):.1f} MB.

## Training

- Autoencoder: {plan.autoencoder_steps} steps of {plan.autoencoder_batch} rendered scenes.
- Transformer and text encoders: flow matching, {plan.generator_steps} steps of {plan.generator_batch} from a
  pool of {POOL:,} encoded scenes; scheduler shift {SHIFT}.
- {seconds / 60:.0f} minutes in all on {machine()}.
- Made by `visalign build-assets`.

## Data

Scenes rendered from the training prompts; no held-out combination (shapes, colors, sizes, count, relation)
occurs among them.

| category | prompts | training | held out (evaluated) |
|---|---|---|---|
{prompts}

{how_good(pipe, "Euler")}"""
