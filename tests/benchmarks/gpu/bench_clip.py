# SPDX-License-Identifier: Apache-2.0
"""A CLIP ViT-H/14 judge with random weights: images a second, by what stands around the tower."""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import open_clip
import torch
from measure import CUDA, DEVICE, SCRATCH, alone, attempt, emit, end_after, free, sync, timed
from PIL import Image

from visalign.rewards.catalogue import load_reward
from visalign.rewards.clip.encoder import ClipEncoder, ClipParts
from visalign.rewards.weights.resize import normalised
from visalign.vision.resize import resize_like_pil

p = argparse.ArgumentParser()
p.add_argument("--tiny", action="store_true")
p.add_argument("--n", type=int, default=1024)
p.add_argument("--seconds", type=int, default=110)
p.add_argument("--brief", action="store_true")
a = p.parse_args()
end_after(a.seconds)
if a.tiny:
    a.n = 8
NAME = "ViT-B-32" if a.tiny else "ViT-H-14"
SIDE = 512
cfg = open_clip.get_model_config(NAME)
PRE = dict(
    size=224,
    mean=[0.48145466, 0.4578275, 0.40821073],
    std=[0.26862954, 0.26130258, 0.27577711],
    interpolation="bicubic",
    resize_mode="shortest",
    mode="RGB",
    fill_color=0,
)


def build(dtype):
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0) if CUDA else None
    with torch.device(DEVICE):
        model = open_clip.CLIP(**cfg)
    return model.eval().requires_grad_(False).to(dtype)


def parts(model):
    tokenizer = open_clip.get_tokenizer(NAME)
    return ClipParts(encoder=ClipEncoder(model).eval(), preprocess=PRE, tokenizer=tokenizer, end=49407, folder=None)


@torch.no_grad()
def on_device(images):
    """Pixels as the tower takes them from [B, 3, H, W] in [0, 1] there, by PIL's rule."""
    return normalised(resize_like_pil(images.mul(255).round(), (224, 224)) / 255, PRE)


def pictures(n, seed=0):
    """Smooth pictures that differ, on the device."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    low = torch.rand(n, 3, 8, 8, device=DEVICE, generator=g)
    return torch.nn.functional.interpolate(low, (SIDE, SIDE), mode="bicubic", align_corners=False).clamp(0, 1)


flops = 336e9
model = build(torch.bfloat16)
# the tower alone
for batch in (64, 128, 256) if CUDA else (4,):
    with attempt(f"tower {batch}"), torch.no_grad():
        x = torch.rand(batch, 3, 224, 224, device=DEVICE, dtype=torch.bfloat16)
        with alone():
            ms = timed(lambda x=x: model.encode_image(x), warm=2, count=5 if CUDA else 1)
        emit(
            bench="clip tower",
            compiled=False,
            batch=batch,
            images_per_s=round(batch / ms * 1e3, 1),
            share=round(flops * batch / ms * 1e3 / 989e12, 3),
        )
# device tensors: resize by PIL's rule there, then the tower
with attempt("device path"), torch.no_grad():
    ims = pictures(a.n)
    batch = 256 if CUDA else 4
    with alone():
        ms = timed(lambda: [on_device(b) for b in ims.split(batch)], warm=1, count=3 if CUDA else 1)
        emit(bench="clip resize on device by PIL's rule", images_per_s=round(a.n / ms * 1e3, 1))
        ms = timed(
            lambda: [model.encode_image(on_device(b).to(model.visual.conv1.weight.dtype)) for b in ims.split(batch)],
            warm=1,
            count=3 if CUDA else 1,
        )
        emit(bench="clip from device tensors, bf16 eager", batch=batch, images_per_s=round(a.n / ms * 1e3, 1))
    got = on_device(ims[:4])
    pil = torch.stack(
        [
            torch.from_numpy(
                __import__("numpy").array(
                    Image.fromarray(im.mul(255).round().byte().cpu().permute(1, 2, 0).numpy()).resize(
                        (224, 224), Image.BICUBIC
                    )
                )
            ).permute(2, 0, 1)
            for im in ims[:4]
        ]
    )
    want = normalised(pil.float() / 255, PRE)
    emit(bench="clip resize against PIL", equal_share=float((got.cpu() - want).abs().lt(1e-4).float().mean()))
# files: decoded (and resized) by threads, while the device computes
with attempt("files"), torch.no_grad():
    n = min(a.n, 768)
    folder = SCRATCH / "pics"
    folder.mkdir(exist_ok=True)
    noisy = (
        (ims[:n] + 0.02 * torch.randn(n, 3, SIDE, SIDE, device=DEVICE))
        .clamp(0, 1)
        .mul(255)
        .byte()
        .cpu()
        .permute(0, 2, 3, 1)
        .numpy()
    )

    def write(i):
        Image.fromarray(noisy[i]).save(folder / f"{i}.png", compress_level=1)
        Image.fromarray(noisy[i]).save(folder / f"{i}.jpg", quality=92)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(n)))

    def decode(file):
        return torch.from_numpy(__import__("numpy").array(Image.open(file).convert("RGB")))

    def decode_resize(file):
        return torch.from_numpy(
            __import__("numpy").array(Image.open(file).convert("RGB").resize((224, 224), Image.BICUBIC))
        )

    mean, std = (torch.tensor(PRE[k], device=DEVICE).view(1, 3, 1, 1) for k in ("mean", "std"))

    def score(files, one, threads, resized):
        batch = 64
        chunks = [files[i : i + batch] for i in range(0, len(files), batch)]
        out = []
        with ThreadPoolExecutor(threads) as pool:
            waiting = [[pool.submit(one, f) for f in c] for c in chunks]
            for c in waiting:
                levels = torch.stack([f.result() for f in c])
                levels = (levels.pin_memory() if CUDA else levels).to(DEVICE, non_blocking=True).permute(0, 3, 1, 2)
                x = ((levels.float() / 255 - mean) / std) if resized else on_device(levels.float() / 255)
                out.append(model.encode_image(x.to(model.visual.conv1.weight.dtype)))
        sync()
        return out

    for kind in ("jpg", "png"):
        files = [folder / f"{i}.{kind}" for i in range(n)]
        with ThreadPoolExecutor(16) as pool, alone():
            t = time.perf_counter()
            list(pool.map(decode, files))
            emit(
                bench="decoding alone, 16 threads",
                kind=kind,
                images_per_s=round(n / (time.perf_counter() - t), 1),
            )
        for threads in (16,):
            for one, resized in ((decode, False), (decode_resize, True)):
                with alone():
                    score(files[:128], one, threads, resized)
                    t = time.perf_counter()
                    score(files, one, threads, resized)
                    dt = time.perf_counter() - t
                emit(
                    bench="clip from files",
                    kind=kind,
                    threads=threads,
                    resized_by="threads" if resized else "device",
                    images_per_s=round(n / dt, 1),
                )
# as packaged
prompts = [f"a picture number {i}" for i in range(a.n)]
for precision, m, bs, count in (("bf16", model, 256, min(a.n, 384)),):
    with attempt(f"packaged {precision}"):
        r = load_reward("clip_score", model=parts(m), batch_size=bs)
        r.towers.precision = precision
        r.score(ims[:8], prompts[:8])
        for where, given in (
            ("device tensor", ims[:count]),
            ("PIL images", [Image.fromarray(x) for x in noisy[:count]]),
        ):
            r.towers.images.clear()
            r.towers.texts.clear()
            with alone():
                t = time.perf_counter()
                s = r.score(given, prompts[:count])
                sync()
                dt = time.perf_counter() - t
            emit(
                bench="clip_score as packaged",
                precision=precision,
                batch=bs,
                given=where,
                images_per_s=round(count / dt, 1),
                valid=int(s.valid.sum()),
            )
# compiled tower
with attempt("compiled tower"), torch.no_grad():
    blocks = model.visual.transformer.resblocks
    for block in blocks:
        block.compile(dynamic=False)
    x = torch.rand(256 if CUDA else 4, 3, 224, 224, device=DEVICE, dtype=torch.bfloat16)
    t = time.perf_counter()
    model.encode_image(x)
    sync()
    first = time.perf_counter() - t
    for batch in (256,) if CUDA else (4,):
        with alone():
            ms = timed(lambda batch=batch: model.encode_image(x[:batch]), warm=2, count=5 if CUDA else 1)
        emit(
            bench="clip tower",
            compiled=True,
            compile_s=round(first, 1),
            batch=batch,
            images_per_s=round(batch / ms * 1e3, 1),
            share=round(flops * batch / ms * 1e3 / 989e12, 3),
        )
    with alone():
        ms = timed(
            lambda: [model.encode_image(on_device(b).to(torch.bfloat16)) for b in ims.split(256)],
            warm=1,
            count=3 if CUDA else 1,
        )
        emit(bench="clip from device tensors, bf16 compiled", batch=256, images_per_s=round(a.n / ms * 1e3, 1))
model = None
free()
# bf16 against float32: the packaged small model, whose scores are meaningful, and the large one
with attempt("precision"), torch.no_grad():
    if a.brief:
        raise SystemExit
    full = build(torch.float32)
    low = build(torch.bfloat16)
    n = min(a.n, 128)
    x = on_device(ims[:n])
    tokens = open_clip.get_tokenizer(NAME)(prompts[:n]).to(DEVICE)
    with alone():
        ms = timed(lambda: full.encode_image(x), warm=1, count=2 if CUDA else 1)
        emit(
            bench="clip tower float32",
            batch=n,
            images_per_s=round(n / ms * 1e3, 1),
            tf32=torch.backends.cuda.matmul.allow_tf32,
        )
        if CUDA:
            torch.backends.cuda.matmul.allow_tf32 = True
            ms = timed(lambda: full.encode_image(x), warm=1, count=2)
            emit(bench="clip tower float32", batch=n, images_per_s=round(n / ms * 1e3, 1), tf32=True)
            torch.backends.cuda.matmul.allow_tf32 = False

    def cos(m, x):
        return torch.nn.functional.cosine_similarity(m.encode_image(x).float(), m.encode_text(tokens).float(), dim=-1)

    s32, s16 = cos(full, x), cos(low, x.bfloat16())
    emit(
        bench="clip bf16 - float32",
        model="ViT-H/14 random weights",
        mean_abs=float((s16 - s32).abs().mean()),
        spread=float(s32.std()),
        share=float((s16 - s32).std() / s32.std()),
    )
