# SPDX-License-Identifier: Apache-2.0
"""A random SD3 pipeline of a few thousand weights in the shapes of the embedded model, built in a second."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Config, T5EncoderModel

WORDS = (
    "a an and two three four red green blue yellow white purple circle square triangle star circles squares "
    "triangles stars left right above below of the small large"
).split()
TOKENS = 16
CONTEXT = 24


def tiny_tokenizer() -> CLIPTokenizer:
    """CLIP's own kind of tokenizer on the words of the shapes world: byte pairs, 16 tokens at most.

    The pairs are written down rather than learned: the trainer breaks ties differently in each run.
    """
    vocabulary = ["<|startoftext|>", "<|endoftext|>"]
    vocabulary += [letter + end for end in ("", "</w>") for letter in ascii_lowercase]
    merges: Any = []
    for word in WORDS:
        *letters, last = word
        pieces = [*letters, last + "</w>"]
        for n in range(1, len(pieces)):
            pair = ("".join(pieces[:n]), pieces[n])
            if pair not in merges:
                merges.append(pair)
                vocabulary.append("".join(pair))
    return CLIPTokenizer(
        vocab={piece: i for i, piece in enumerate(dict.fromkeys(vocabulary))}, merges=merges, model_max_length=TOKENS
    )


def tiny_text_encoder(width: int, vocabulary: int) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=TOKENS, projection_dim=width, bos_token_id=0,
        eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return CLIPTextModelWithProjection(config).eval()


def tiny_t5(vocabulary: int, *, null: bool = False) -> T5EncoderModel:
    """A T5 encoder; with `null` its final norm is 0, and every token comes out as diffusers' null token."""
    config = T5Config(vocab_size=vocabulary, d_model=CONTEXT, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    encoder = T5EncoderModel(config).eval()
    if null:
        torch.nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return encoder


def tiny_sd3_pipeline(
    *, sd35: bool = False, t5: bool | Literal["null"] = False, shift: float = 3.0, seed: int = 0
) -> StableDiffusion3Pipeline:
    """A random pipeline: 64×64 images, latents [8, 8, 8], two transformer layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = tiny_tokenizer()
        transformer = SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=8, out_channels=8, num_layers=2, attention_head_dim=8,
            num_attention_heads=2, joint_attention_dim=CONTEXT, caption_projection_dim=16,
            pooled_projection_dim=16, pos_embed_max_size=8, dual_attention_layers=(0,) if sd35 else (),
            qk_norm="rms_norm" if sd35 else None,
        )  # fmt: skip
        four_blocks: Any = {  # diffusers annotates these as tuples of one
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "block_out_channels": (4, 4, 4, 4),
        }
        vae = AutoencoderKL(
            **four_blocks, latent_channels=8, layers_per_block=1, norm_num_groups=2, sample_size=64,
            scaling_factor=0.8, shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False,
        )  # fmt: skip
        with torch.no_grad():  # a fresh transformer hardly listens to its prompt; make it
            for name, weight in transformer.named_parameters():
                if name.startswith(("context_embedder", "transformer_blocks", "norm_out", "proj_out")):
                    weight.add_(0.15 * torch.randn_like(weight))
        return StableDiffusion3Pipeline(
            transformer=transformer.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
            vae=vae.eval(),
            text_encoder=tiny_text_encoder(8, len(tokenizer)),
            tokenizer=tokenizer,
            text_encoder_2=tiny_text_encoder(8, len(tokenizer)),
            tokenizer_2=tokenizer,
            text_encoder_3=tiny_t5(len(tokenizer), null=t5 == "null") if t5 else None,  # type: ignore[arg-type]  # may be None
            tokenizer_3=tokenizer if t5 else None,  # type: ignore[arg-type]
        )


def build_tiny_sd3(folder: Path, **options: Any) -> Path:
    """Write `tiny_sd3_pipeline(**options)` to `folder` as `save_pretrained` does, and return the folder."""
    tiny_sd3_pipeline(**options).save_pretrained(folder)
    return folder


def load_pipeline(folder: Path, *, t5: bool = False) -> StableDiffusion3Pipeline:
    """The pipeline as a user loads it; diffusers wants to be told that there is no T5."""
    absent = {} if t5 else {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe
