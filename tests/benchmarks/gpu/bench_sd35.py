# SPDX-License-Identifier: Apache-2.0
"""SD3.5-medium in size with random weights: LoRA forms, ratio at the first update, whole iterations."""

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from measure import (
    CUDA,
    DEVICE,
    PEAK,
    SCRATCH,
    alone,
    attempt,
    emit,
    end_after,
    free,
    kernels,
    peak,
    sync,
    timed,
)
from torch.utils.flop_counter import FlopCounterMode

p = argparse.ArgumentParser()
p.add_argument("--tiny", action="store_true")
p.add_argument("--seconds", type=int, default=400)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--steps", nargs="*", default=["limits", "compiled", "ratio", "trainer", "trainer_fast", "emulate"])
a = p.parse_args()
end_after(a.seconds)
from lora_forms import CastLora, CastLoraInPlace, Linear, compile_blocks, one_graph, use_form

import visalign.pipelines.flow_grpo.job as job
from visalign.adapters import LoraSettings, load_policy
from visalign.config import load_config
from visalign.flow.rollout import replay, rollout
from visalign.seeds import sample_seed

HERE = Path(__file__).parent
FOLDER = SCRATCH / "sd35"
SIZE = 64 if a.tiny else 512
BATCH = 2 if a.tiny else a.batch
COUNT = 5 if CUDA else 1
if not (FOLDER / "model_index.json").exists():
    made = subprocess.run(
        [sys.executable, str(HERE / "make_sd35.py"), str(FOLDER), *(["--tiny"] if a.tiny else [])],
        capture_output=True,
        text=True,
    )
    print(made.stdout[-300:], made.stderr[-600:] if made.returncode else "", flush=True)
emit(bench="ready")


def load(form, dtype=torch.bfloat16):
    policy = load_policy(
        str(FOLDER),
        dtype=dtype,
        device=DEVICE,
        lora=LoraSettings(rank=32, alpha=64),
        image_size=SIZE,
    )
    g = torch.Generator().manual_seed(1)
    for name, w in policy.trainable_parameters():  # a LoRA that has learnt something
        if "lora_B" in name:
            w.data.copy_(torch.randn(w.shape, generator=g) * 0.005)
    use_form(policy.module, form)
    return policy


def inputs(policy, batch=BATCH):
    c = policy.encode(["a red circle"]).select(torch.zeros(batch, dtype=torch.long))
    return (
        torch.randn(batch, *policy.latent_shape, device=DEVICE),
        torch.full((batch,), 0.5, device=DEVICE),
        c,
    )


def forward(policy, x, s, c):
    with torch.no_grad():
        policy.velocity(x, s, c)


def both(policy, x, s, c):
    policy.velocity(x, s, c).square().mean().backward()
    for _, w in policy.trainable_parameters():
        w.grad = None


FLOPS = [1.0]


# three kinds of block × (no gradient, gradient, adapters off) are more graphs than the default of 8
torch._dynamo.config.recompile_limit = 64


def limits(name, policy, seconds=None, batch=BATCH):
    with attempt(name):
        args = policy, *inputs(policy, batch)
        with alone():
            f = timed(lambda: forward(*args), warm=1, count=COUNT)
            with peak() as mf:
                forward(*args)
            with peak() as m:
                both(*args)
            b = timed(lambda: both(*args), warm=1, count=COUNT)
        flops = FLOPS[0] * batch * 1e3 / PEAK
        emit(
            bench="sd35 limits",
            name=name,
            batch=batch,
            forward_ms=round(f, 1),
            forward_share=round(flops / f, 3),
            both_ms=round(b, 1),
            both_share2=round(2 * flops / b, 3),
            both_share3=round(3 * flops / b, 3),
            forward_gib=mf["gib"],
            gib=m["gib"],
            compile_s=seconds,
        )


def profile(name, policy):
    with attempt(f"profile {name}"):
        args = policy, *inputs(policy)
        with alone():
            emit(bench="sd35 kernels", name=name, what="forward", kernels=kernels(lambda: forward(*args)))
            emit(
                bench="sd35 kernels",
                name=name,
                what="forward+backward",
                kernels=kernels(lambda: both(*args), 20),
            )


def compiled(policy, **options):
    """The blocks, and the seconds of their first forward and forward+backward."""
    blocks = compile_blocks(policy.module, **options)
    args = policy, *inputs(policy)
    sync()
    t = time.perf_counter()
    forward(*args)
    sync()
    first = time.perf_counter() - t
    t = time.perf_counter()
    both(*args)
    sync()
    return blocks, [round(first, 1), round(time.perf_counter() - t, 1)]


def ratio(name, policy, around=None, batch=BATCH, samples=BATCH, repeat=True):
    """|log ratio| of samples and steps between a rollout and its replay under the same weights."""
    with attempt(f"ratio {name}"):
        c = policy.encode(["a red circle", "a blue square over a green triangle"]).select(torch.arange(samples) % 2)
        sigmas = policy.sigmas(10)
        seeds = [sample_seed(0, "x", i) for i in range(samples)]

        def make():
            return rollout(
                policy, c, sigmas=sigmas, sde_steps=range(9), noise_level=0.7, seeds=seeds, batch_size=batch
            )

        with around() if around else nullcontext():
            make() if CUDA and around else None
            with alone(), peak() as m:
                sync()
                t = time.perf_counter()
                trajectory = make()
                sync()
                dt = time.perf_counter() - t
        sample, step = trajectory.all_pairs()
        found = []
        with alone():
            for rows in torch.arange(len(sample)).split(batch):
                pairs = trajectory.pairs(sample[rows], step[rows])
                with torch.enable_grad():
                    stats = replay(policy, c.select(sample[rows]), pairs, trajectory.kernel)
                found.append((stats.log_prob.detach() - pairs.log_prob).cpu())
                v = float(stats.v.detach().std())
                del stats
        d = torch.cat(found).abs()
        by_step = [float(f"{d[step == k].max():.3g}") for k in range(9)]
        emit(
            bench="sd35 ratio",
            name=name,
            dtype=str(policy.compute_dtype),
            max=float(d.max()),
            mean=float(d.mean()),
            median=float(d.median()),
            by_step=by_step,
            rollout_s=round(dt, 3),
            rollout_gib=m["gib"],
            v_std=v,
        )


def trainer(name, *overrides, form=None, blocks=False, shared=None, iterations=2, profiled=False):
    with attempt(f"trainer {name}"):
        own = job.build_policy

        def build(*args):
            policy = own(*args)
            if form:
                use_form(policy.module, form)
            if blocks:
                found = compile_blocks(policy.module)
                if shared:
                    policy.__dict__["_shared"] = one_graph(policy, found if shared == "freed" else None)
                    policy.__dict__["_shared"].__enter__()
            return policy

        ov = [
            f"model.path={FOLDER}",
            f"model.image_size={SIZE}",
            "data.train=shapes:train",
            "data.heldout=shapes:heldout",
            "rollout.prompts_per_iteration=2",
            f"rollout.group_size={2 if a.tiny else 16}",
            f"rollout.batch_size={BATCH}",
            f"optimizer.micro_batch={BATCH}",
            *overrides,
        ]
        config = load_config(job.FlowGRPOConfig, str(HERE / "sd35.yaml"), ov)
        job.build_policy = build
        try:
            with tempfile.TemporaryDirectory() as folder:
                run = job._build(config, Path(folder))
                policy, rows = run.trainer.algorithm.policy, []
                for i in range(iterations):
                    before = policy.forward_count.equivalents
                    t = time.perf_counter()
                    with nullcontext() if blocks and i == 0 else alone(), peak() as m:  # it compiles
                        sync()
                        t = time.perf_counter()
                        rec = run.trainer.iterate()
                        sync()
                    rows.append(
                        (
                            time.perf_counter() - t,
                            policy.forward_count.equivalents - before,
                            m["gib"],
                            {
                                k.split("/")[1]: round(v, 3)
                                for k, v in rec.items()
                                if k.startswith("seconds/") and k != "seconds/other"
                            },
                            {k: v for k, v in rec.items() if "ratio" in k or "clip" in k},
                        )
                    )
                if profiled:
                    import cProfile
                    import pstats

                    prof = cProfile.Profile()
                    prof.enable()
                    run.trainer.iterate()
                    prof.disable()
                    pstats.Stats(prof).sort_stats("cumtime").print_stats(70)
                    pstats.Stats(prof).sort_stats("tottime").print_stats(25)
                first, best = rows[0], min(rows[1:] or rows)
                images = config.rollout.prompts_per_iteration * config.rollout.group_size
                emit(
                    bench="sd35 trainer",
                    name=name,
                    first_s=round(first[0], 2),
                    s=round(best[0], 3),
                    images_per_s=round(images / best[0], 3),
                    fe_per_image=round(best[1] / images, 2),
                    share=round(best[1] * FLOPS[0] / best[0] / PEAK, 4),
                    gib=best[2],
                    seconds=best[3],
                    ratio_first=first[4],
                )
                del run, policy
        finally:
            job.build_policy = own
    free()


policy = load(Linear)
x, s, c = inputs(policy, 1)
with FlopCounterMode(display=False) as f, torch.no_grad():
    policy.velocity(x, s, c)
FLOPS[0] = float(f.get_total_flops())
emit(
    bench="sd35 size",
    tflop_forward=FLOPS[0] / 1e12,
    tokens=list(c.embeds.shape),
    lora_layers=len(policy._lora_layers),
)
if "limits" in a.steps:
    limits("a packaged: float32 LoRA, eager", policy)
    ratio("packaged eager / eager", policy)
    use_form(policy.module, CastLora)
    limits("b cast LoRA, eager", policy)
    use_form(policy.module, CastLoraInPlace)
    limits("b cast LoRA in place, eager", policy)
    use_form(policy.module, CastLora)
    ratio("cast eager / eager", policy)
    for layer in policy._lora_layers:
        layer.enable_adapters(False)
    args = policy, *inputs(policy)
    with attempt("no adapters"), alone():
        emit(
            bench="sd35 limits",
            name="no LoRA, eager",
            batch=BATCH,
            forward_ms=round(timed(lambda: forward(*args), count=COUNT), 1),
        )
    del args
    for layer in policy._lora_layers:
        layer.enable_adapters(True)
    for _, w in policy.trainable_parameters():
        w.requires_grad_(True)
    profile("b cast, eager", policy)
del policy, x, s, c
free()
if "compiled" in a.steps:
    policy = load(CastLora)
    with attempt("compile"):
        blocks, seconds = compiled(policy)
        limits("b cast LoRA, compiled", policy, seconds)
        profile("b cast, compiled", policy)
        if "ratio" in a.steps:
            ratio("cast compiled: no-grad graph / grad graph", policy)
            ratio("cast compiled: one graph", policy, lambda: one_graph(policy))
            ratio("cast compiled: one graph, freed by block", policy, lambda: one_graph(policy, blocks))
    policy = blocks = None
    free()
nft = (
    "model.guidance=1.0",
    "objective.algorithm=diffusion_nft",
    'objective.changes_for={"diffusion_nft": {"levels": 1}}',
    "objective.ratio_bound=null",
)
plain = ("model.guidance=1.0", 'objective.changes_for={"flow_grpo": {"kl": 0.0}}')
window = (*plain, "rollout.sde_window=3")
fast = dict(form=CastLora, blocks=True)
if "trainer_fast" in a.steps:
    trainer("flow_grpo, no guidance; cast, compiled", *plain, **fast)
    trainer("one window; cast, compiled", *window, **fast)
    trainer("diffusion_nft; cast, compiled", *nft, **fast)
    trainer("flow_grpo, no guidance; cast, compiled, one graph freed by block", *plain, **fast, shared="freed")
if "trainer" in a.steps:
    trainer("diffusion_nft; packaged", *nft)
    trainer("one window; packaged", *window)
    trainer("flow_grpo, no guidance; packaged", *plain)
if "emulate" in a.steps:
    torch._inductor.config.emulate_precision_casts = True
    torch._dynamo.reset()
    policy = load(CastLora)
    with attempt("emulate"):
        blocks, seconds = compiled(policy)
        limits("b cast LoRA, compiled, casts emulated", policy, seconds)
        ratio("cast compiled, casts emulated: no-grad graph / grad graph", policy)
        torch.compiler.set_stance("force_eager")
        use_form(policy.module, CastLora)
    torch.compiler.set_stance("default")
    torch._inductor.config.emulate_precision_casts = False
    torch._dynamo.reset()
    policy = blocks = None
    free()
if "profile" in a.steps:
    trainer("diffusion_nft; cast, eager", *nft, form=CastLora, profiled=True)
if "dynamic" in a.steps:
    policy = load(CastLora)
    with attempt("dynamic"):
        blocks, seconds = compiled(policy, dynamic=True)
        limits("b cast LoRA, compiled, dynamic", policy, seconds)
        t = time.perf_counter()
        forward(policy, *inputs(policy, 5))
        both(policy, *inputs(policy, 5))
        sync()
        emit(bench="sd35 another batch size", dynamic=True, seconds=round(time.perf_counter() - t, 2))
    policy = blocks = None
    free()
if "inplace" in a.steps:
    policy = load(CastLoraInPlace)
    with attempt("inplace"):
        blocks, seconds = compiled(policy)
        limits("b cast LoRA in place, compiled", policy, seconds)
    policy = blocks = None
    free()
if "bf16" in a.steps:
    policy = load(Linear)
    with attempt("bf16"):
        for _, w in policy.trainable_parameters():
            w.data = w.data.bfloat16()
        blocks, seconds = compiled(policy)
        limits("c bf16 LoRA, compiled", policy, seconds)
    policy = blocks = None
    free()
if "float32" in a.steps:
    n = 2 if a.tiny else 4
    policy = load(CastLora, dtype=torch.float32)
    ratio("float32 eager / eager", policy, batch=n, samples=n)
    with attempt("float32"):
        compile_blocks(policy.module)
        ratio("float32 compiled: no-grad graph / grad graph", policy, batch=n, samples=n)
    policy = None
    free()
