# SPDX-License-Identifier: Apache-2.0
"""The log-prob head: naive, compiled, Liger's, the package's and prototypes. Milliseconds, memory, error."""

import argparse
import os

p = argparse.ArgumentParser()
p.add_argument("--tiny", action="store_true")
p.add_argument("--seconds", type=int, default=110)
p.add_argument("--rows", nargs="*", default=None)
a = p.parse_args()
if a.tiny:
    os.environ["TRITON_INTERPRET"] = "1"
import torch
from head_kernel import BLOCKS, FALLBACKS, FusedHead, TritonHead, fused_head, triton_head
from measure import CUDA, DEVICE, alone, attempt, emit, end_after, free, peak, timed

from visalign.core.tokens.fused_head import fused_log_prob_entropy, log_prob_entropy

end_after(a.seconds)
DTYPE = torch.bfloat16 if CUDA else torch.float32


def problem(n, h, v):
    g = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(n, h, generator=g, device=DEVICE).to(DTYPE).requires_grad_()
    head = torch.empty(v, h, device=DEVICE, dtype=DTYPE).normal_(0, 2 * h**-0.5, generator=g).requires_grad_()
    return (
        hidden,
        head,
        torch.randint(v, (n,), generator=g, device=DEVICE),
        torch.randn(n, generator=g, device=DEVICE),
    )


def naive(h, w, t):
    r = log_prob_entropy(torch.nn.functional.linear(h, w), t)
    return r.log_prob, r.entropy


def plain(h, w, t):
    log_p = (h @ w.T).float().log_softmax(-1)
    with torch.no_grad():
        entropy = (log_p.exp() * log_p).sum(-1).neg()
    return log_p.gather(1, t[:, None])[:, 0], entropy


def bare(h, w, t):
    return (h @ w.T).float().log_softmax(-1).gather(1, t[:, None])[:, 0], None


def packaged(tile=None):
    def run(h, w, t):
        r = fused_log_prob_entropy(h, w, t, tile=tile)
        return r.log_prob, r.entropy

    return run


def _stat(z, top, total, moment):
    highest = torch.maximum(top, z.amax(1))
    shift = top - highest
    d = z - highest[:, None]
    e = d.exp()
    decay = shift.exp()
    return highest, decay * total + e.sum(1), decay * (moment + shift * total) + (e * d).sum(1)


def _grad(z, top, level, push, pull, place):
    d = z - top[:, None]
    g = d.exp() * (level[:, None] + push[:, None] * d)
    return torch.where(torch.arange(z.shape[1], device=z.device)[None] == place[:, None], g - pull[:, None], g).to(
        DTYPE
    )


def compiled_head(tile):
    """The elementwise parts of a tile under torch.compile, products by cuBLAS."""
    stat, grad = torch.compile(_stat), torch.compile(_grad)
    mm = (lambda x, y: torch.mm(x, y, out_dtype=torch.float32)) if CUDA else torch.mm

    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h, w, t):
            n = len(h)
            top, total, moment, chosen = (
                h.new_full((n,), -1e30, dtype=torch.float32),
                *h.new_zeros(3, n, dtype=torch.float32),
            )
            for start in range(0, len(w), tile):
                z = mm(h, w[start : start + tile].t())
                top, total, moment = stat(z, top, total, moment)
                place = t - start
                inside = (place >= 0) & (place < z.shape[1])
                chosen = torch.where(inside, z.gather(1, place.clamp(0, z.shape[1] - 1)[:, None])[:, 0], chosen)
            log_s = total.log()
            entropy = log_s - moment / total
            ctx.save_for_backward(h, w, t, top, total, entropy)
            ctx.set_materialize_grads(False)
            return chosen - top - log_s, entropy

        @staticmethod
        def backward(ctx, gl, ge):
            h, w, t, top, total, entropy = ctx.saved_tensors
            pull = -gl
            push = torch.zeros_like(top) if ge is None else -ge / total
            level = pull / total + push * (entropy - total.log())
            dh, dw = h.new_zeros(h.shape, dtype=torch.float32), torch.empty_like(w)
            for start in range(0, len(w), tile):
                m = w[start : start + tile]
                g = grad(mm(h, m.t()), top, level, push, pull, t - start)
                dh += mm(g, m)
                torch.mm(g.t(), h, out=dw[start : start + tile])
            return dh.to(h.dtype), dw, None

    return Head.apply


def liger_ce():
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as F

    def run(h, w, t):
        out = F.apply(h, w, t, None, None, -100, 0.0, 0.0, "none")
        return -(out[0] if isinstance(out, tuple) else out), None

    return run


def liger_grpo():
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo")

    def run(h, w, t, advantage):
        s = 8
        return loss(
            h.view(s, -1, h.shape[1]),
            w,
            t.view(s, -1),
            torch.ones_like(t).view(s, -1).float(),
            advantage.view(s, -1)[:, 0],
        )[0]

    return run


def measure(name, function, size, *, entropy=False, frozen=False, warm=2 if CUDA else 0, count=5 if CUDA else 1):
    with attempt(f"head {name} {size}"):
        h, w, t, adv = problem(*size)
        if frozen:
            w.requires_grad_(False)

        def forward():
            with torch.no_grad():
                function(h, w, t) if name != "liger grpo loss" else function(h, w, t, adv)

        def both():
            h.grad = w.grad = None
            if name == "liger grpo loss":
                function(h, w, t, adv).backward()
                return
            lp, e = function(h, w, t)[:2]
            ((lp * adv).sum() + ((e * adv).sum() * 0.1 if entropy else 0)).backward()

        with alone():
            both()
            h.grad = w.grad = None
            free()
            with peak() as m:
                both()
            f = timed(forward, warm=min(warm, 1), count=count) if name != "liger grpo loss" else float("nan")
            ms = timed(both, warm=warm, count=count)
        grads = (h.numel() + (0 if frozen else w.numel())) * h.element_size() / 2**20
        emit(
            bench="head",
            name=name,
            size=size,
            entropy_gradient=entropy,
            frozen_head=frozen,
            forward_ms=round(f, 2),
            ms=round(ms, 2),
            peak_mib=m["more_mib"],
            peak_beyond_gradients_mib=round(m["more_mib"] - grads, 1),
        )
        h = w = None
    free()


def error(name, function):
    """Against float64 of the same bfloat16 numbers."""
    with attempt(f"head error {name}"):
        n, hh, v = (300, 256, 20011) if CUDA else (20, 64, 150)
        h, w, t, adv = problem(n, hh, v)
        lp, e = function(h, w, t)[:2]
        ((lp * adv).sum() + ((e * adv).sum() * 0.1 if e is not None else 0)).backward()
        h2, w2 = (x.detach().double().requires_grad_() for x in (h, w))
        r = log_prob_entropy(h2 @ w2.T, t)
        ((r.log_prob * adv).sum() + ((r.entropy * adv).sum() * 0.1 if e is not None else 0)).backward()
        rel = lambda x, y: float((x.detach().double() - y.detach()).norm() / y.detach().norm())  # noqa: E731
        emit(
            bench="head error",
            name=name,
            log_prob=float((lp.detach() - r.log_prob).abs().max()),
            entropy=None if e is None else float((e.detach() - r.entropy).abs().max()),
            hidden_gradient=rel(h.grad, h2.grad),
            weight_gradient=rel(w.grad, w2.grad),
        )


big, wide = ((8192, 2048, 151936), (8192, 4096, 128256)) if CUDA else ((16, 64, 200), (16, 128, 150))
t1, t2, t3 = (8192, 4096, 16384) if CUDA else (100, 64, 128)
small = {} if CUDA else dict(BM=16, BN=32, BK=32)
B = {**BLOCKS, **small}
if not CUDA:
    B.pop("num_warps"), B.pop("num_stages")
fused = lambda blocks, tile=t1: lambda h, w, t: fused_head(h, w, t, tile=tile, blocks=blocks)  # noqa: E731
tri = lambda tile, rows=1 << 30: lambda h, w, t: triton_head(h, w, t, tile=tile, rows=rows)  # noqa: E731


class Mixed(torch.autograd.Function):
    """Forward of `TritonHead`, backward of `FusedHead`."""

    @staticmethod
    def forward(ctx, h, w, t):
        lp, e, _ = TritonHead.forward(ctx, h, w, t, 1.0, t1, 1 << 30, False)
        ctx.options = 1.0, t1, B
        return lp, e

    @staticmethod
    def backward(ctx, gl, ge):
        return FusedHead.backward(ctx, gl, ge, None)[:3]


mixed = Mixed.apply
variants = {
    "triton": (f"Triton pass per tile, all rows x {t1}", tri(t1)),
    "packaged": ("packaged", packaged()),
    "naive": ("naive (log_prob_entropy of logits)", naive),
    "plain": ("plain log_softmax, entropy as a number", plain),
    "fused": ("Triton product and pass in one, pointers", fused(B)),
    "fused_tma": ("Triton product and pass in one, TMA", fused(B | {"TMA": CUDA})),
    "triton_small": (f"Triton pass per tile, all rows x {t2}", tri(t2)),
    "triton_large": (f"Triton pass per tile, all rows x {t3}", tri(t3)),
    "triton_rows": (f"Triton pass per tile, half the rows x {t1}", tri(t1, big[0] // 2)),
    "packaged_large": (f"packaged, tile all rows x {t1}", packaged((big[0], t1))),
    "compiled": (f"compiled elementwise, all rows x {t1}", compiled_head(t1)),
    "compiled_naive": ("naive, compiled", torch.compile(naive)),
    "liger_ce": ("liger cross entropy (no entropy)", None),
    "liger_grpo": ("liger grpo loss", None),
    "bare": ("plain log_softmax, no entropy", bare),
    "fused_tma4": (
        "Triton product and pass in one, TMA, 4 stages",
        fused(B | {"TMA": CUDA} | ({"num_stages": 4} if CUDA else {})),
    ),
    "fused_group8": ("Triton product and pass in one, pointers, groups of 8", fused(B | {"GROUP": 8})),
    "fused_group32": ("Triton product and pass in one, pointers, groups of 32", fused(B | {"GROUP": 32})),
    "fused_tall": (
        "Triton product and pass in one, pointers, 256x128",
        fused(B | ({"BM": 256, "BN": 128} if CUDA else {})),
    ),
    "fused_large": (f"Triton product and pass in one, pointers, tile {t3}", fused(B, t3)),
    "mixed": ("Triton pass forward, fused backward", None),
    "fused_s4": (
        "Triton product and pass in one, pointers, 4 stages",
        fused(B | ({"num_stages": 4} if CUDA else {})),
    ),
    "fused_square": (
        "Triton product and pass in one, pointers, 128x128",
        fused(B | ({"BN": 128, "num_warps": 4, "num_stages": 4} if CUDA else {})),
    ),
}
wanted = a.rows or list(variants)
for key in wanted:
    name, function = variants[key]
    with attempt(f"head {key}"):
        if key == "liger_ce":
            function = liger_ce()
        if key == "mixed":
            function = mixed
        if key == "liger_grpo":
            function = liger_grpo()
        measure(name, function, big)
        if key in ("triton", "packaged", "fused", "fused_tma", "compiled", "naive"):
            error(name, function)
if a.rows:
    for key in ("triton", "fused"):
        measure(variants[key][0], variants[key][1], big, frozen=True)
if a.rows is None:
    measure("packaged", packaged(), big, frozen=True)
    measure(variants["naive"][0], naive, big, frozen=True)
    measure(variants["triton"][0], tri(t1), big, frozen=True)
    measure(variants["triton"][0], tri(t1), big, entropy=True)
    measure("packaged", packaged(), big, entropy=True)
    for key in ("triton", "packaged", "naive", "fused"):
        measure(variants[key][0], variants[key][1], wide)
emit(bench="head fallbacks", fallbacks=FALLBACKS)
# what the products alone take
with attempt("head products"):
    h, w, t, adv = problem(*big)
    g = torch.empty(big[0], big[2], device=DEVICE, dtype=DTYPE).normal_()
    with alone(), torch.no_grad():
        emit(bench="head products", forward_ms=round(timed(lambda: torch.mm(h, w.t(), out=g)), 2))
        g.normal_()
        emit(
            bench="head products",
            hidden_ms=round(timed(lambda: torch.mm(g, w)), 2),
            weight_ms=round(timed(lambda: torch.mm(g.t(), h)), 2),
        )
