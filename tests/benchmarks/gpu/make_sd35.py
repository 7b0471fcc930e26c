# SPDX-License-Identifier: Apache-2.0
"""Make an SD3.5-medium pipeline folder with random weights, real sizes and shallow text encoders.

`python tests/benchmarks/gpu/make_sd35.py FOLDER`; with --tiny a small one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

SOURCE = Path("assets/shapes-sd3")
TOKENS = {"tokenizer": 77, "tokenizer_2": 77, "tokenizer_3": 256}
CLIP = {"text_encoder": (768, 12), "text_encoder_2": (1280, 20)}
"""Text encoder -> its width and its heads."""


def build(make: Callable[[], Any]) -> Any:
    """Make a network in bfloat16 on the device."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        network = make()
    torch.set_default_dtype(torch.float32)
    return network


def transformer(tiny: bool, layers: int) -> SD3Transformer2DModel:
    layers, heads, width, dual = (2, 4, 256, 1) if tiny else (layers, 24, 1536, min(layers, 13))
    return SD3Transformer2DModel(
        sample_size=128, patch_size=2, in_channels=16, out_channels=16, num_layers=layers, attention_head_dim=64,
        num_attention_heads=heads, joint_attention_dim=4096, caption_projection_dim=width, pooled_projection_dim=2048,
        pos_embed_max_size=384, dual_attention_layers=tuple(range(dual)), qk_norm="rms_norm",
    )  # fmt: skip


def autoencoder(tiny: bool) -> AutoencoderKL:
    blocks: Any = {  # diffusers annotates these as tuples of one
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (32,) * 4 if tiny else (128, 256, 512, 512),
    }
    return AutoencoderKL(
        **blocks, layers_per_block=2, latent_channels=16, sample_size=1024, scaling_factor=1.5305,
        shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def clip(width: int, heads: int) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=49408, hidden_size=width, intermediate_size=4 * width, projection_dim=width, num_hidden_layers=2,
        num_attention_heads=heads, max_position_embeddings=77,
    )  # fmt: skip
    return CLIPTextModelWithProjection(config)


def t5() -> T5EncoderModel:
    config = T5Config(
        vocab_size=32128, d_model=4096, d_ff=1024, d_kv=64, num_heads=8, num_layers=1,
        feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False,
    )  # fmt: skip
    return T5EncoderModel(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, default=24, help="blocks of the transformer")
    options = parser.parse_args()
    folder: Path = options.folder
    torch.manual_seed(0)
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"), dirs_exist_ok=True)
    for name, length in TOKENS.items():
        file = folder / name / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": length}))
    network = build(lambda: transformer(options.tiny, options.layers))
    for weight in network.parameters():  # AdaLN gates of a trained model are not zero
        if weight.ndim >= 2:
            weight.data.normal_(0, 0.02)
    network.save_pretrained(folder / "transformer")
    print("transformer", sum(weight.numel() for weight in network.parameters()) / 1e9, "B")
    del network
    build(lambda: autoencoder(options.tiny)).save_pretrained(folder / "vae")
    for name, (width, heads) in CLIP.items():
        build(lambda width=width, heads=heads: clip(width, heads)).save_pretrained(folder / name)
    build(t5).save_pretrained(folder / "text_encoder_3")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")


if __name__ == "__main__":
    main()
