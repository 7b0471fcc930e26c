# SPDX-License-Identifier: Apache-2.0
"""Make an SD3.5-medium pipeline folder with random weights, real sizes and shallow text encoders."""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

p = argparse.ArgumentParser()
p.add_argument("out")
p.add_argument("--tiny", action="store_true")
p.add_argument("--layers", type=int, default=24, help="blocks of the transformer")
p.add_argument("--source", default="assets/shapes-sd3")
a = p.parse_args()
out = Path(a.out)
src = Path(a.source)
t0 = time.time()
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
shutil.copytree(src, out, ignore=shutil.ignore_patterns("*.safetensors", "README.md"), dirs_exist_ok=True)
for name, n in (("tokenizer", 77), ("tokenizer_2", 77), ("tokenizer_3", 256)):
    f = out / name / "tokenizer_config.json"
    c = json.loads(f.read_text())
    c["model_max_length"] = n
    f.write_text(json.dumps(c))
vocab = 49408


def build(cls, cfg):
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(dev):
        m = cls(cfg) if not isinstance(cfg, dict) else cls(**cfg)
    torch.set_default_dtype(torch.float32)
    return m


small = a.tiny
tr = dict(
    sample_size=128,
    patch_size=2,
    in_channels=16,
    num_layers=2 if small else a.layers,
    attention_head_dim=64,
    num_attention_heads=4 if small else 24,
    joint_attention_dim=4096,
    caption_projection_dim=256 if small else 1536,
    pooled_projection_dim=2048,
    out_channels=16,
    pos_embed_max_size=384,
    dual_attention_layers=tuple(range(1 if small else min(a.layers, 13))),
    qk_norm="rms_norm",
)
m = build(SD3Transformer2DModel, tr)
for _, q in m.named_parameters():  # AdaLN gates of a trained model are not zero
    if q.ndim >= 2:
        q.data.normal_(0, 0.02)
m.save_pretrained(out / "transformer")
print("transformer", sum(q.numel() for q in m.parameters()) / 1e9, "B", time.time() - t0)
del m
v = build(
    AutoencoderKL,
    dict(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 32, 32, 32) if small else (128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        sample_size=1024,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ),
)
v.save_pretrained(out / "vae")
for name, hidden, layers_, heads in (("text_encoder", 768, 2, 12), ("text_encoder_2", 1280, 2, 20)):
    cfg = CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        projection_dim=hidden,
        num_hidden_layers=layers_,
        num_attention_heads=heads,
        max_position_embeddings=77,
    )
    build(CLIPTextModelWithProjection, cfg).save_pretrained(out / name)
cfg = T5Config(
    vocab_size=32128,
    d_model=4096,
    d_ff=1024,
    d_kv=64,
    num_heads=8,
    num_layers=1,
    feed_forward_proj="gated-gelu",
    is_encoder_decoder=False,
    use_cache=False,
)
build(T5EncoderModel, cfg).save_pretrained(out / "text_encoder_3")
FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(out / "scheduler")
idx = json.loads((out / "model_index.json").read_text())
print(idx)
print("made in", time.time() - t0)
