# SPDX-License-Identifier: Apache-2.0
"""Log-prob, entropy and Σ p² of chosen tokens from hidden states, on one GPU: two ways.

`triton_head`: products by cuBLAS, one Triton pass per tile of logits. `fused_head`: the product and what
follows it in one kernel (with `TMA` the faster one), the gradients' products by cuBLAS.

`triton_head`, forward: each tile of logits [N, v] is one product with float32 results, and one kernel reads
it once: running maximum m, s = Σ e^(z−m), t = Σ e^(z−m) (z−m), q = Σ e^(2(z−m)), and the target's logit.
Backward: the product again, one kernel that reads float32 logits and writes the bfloat16 gradient of them,
    and two products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _statistics(
    z_ptr,
    target_ptr,
    top_ptr,
    total_ptr,
    moment_ptr,
    square_ptr,
    chosen_ptr,
    start,
    width,
    stride,
    scale,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    SQUARES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    columns = tl.arange(0, BLOCK)
    if FIRST:
        top = -1e30
        total = 0.0
        moment = 0.0
        square = 0.0
    else:
        top = tl.load(top_ptr + row)
        total = tl.load(total_ptr + row)
        moment = tl.load(moment_ptr + row)
        square = tl.load(square_ptr + row) if SQUARES else 0.0
    for first in range(0, width, BLOCK):
        inside = first + columns < width
        z = tl.load(z_ptr + first + columns, mask=inside, other=-1e30) * scale
        highest = tl.maximum(top, tl.max(z, 0))
        shift = top - highest
        decay = tl.exp(shift)
        d = z - highest
        e = tl.exp(d)
        moment = decay * (moment + shift * total) + tl.sum(tl.where(inside, d * e, 0.0), 0)
        total = decay * total + tl.sum(e, 0)
        if SQUARES:
            square = decay * decay * square + tl.sum(e * e, 0)
        top = highest
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, total)
    tl.store(moment_ptr + row, moment)
    if SQUARES:
        tl.store(square_ptr + row, square)
    place = tl.load(target_ptr + row) - start
    if (place >= 0) & (place < width):
        tl.store(chosen_ptr + row, tl.load(z_ptr + place) * scale)


@triton.jit
def _gradient(
    z_ptr,
    out_ptr,
    target_ptr,
    top_ptr,
    level_ptr,
    push_ptr,
    pull_ptr,
    start,
    width,
    z_stride,
    out_stride,
    scale,
    BLOCK: tl.constexpr,
    PUSH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    top = tl.load(top_ptr + row)
    level = tl.load(level_ptr + row)
    pull = tl.load(pull_ptr + row)
    place = tl.load(target_ptr + row) - start
    d = tl.load(z_ptr + row * z_stride + columns, mask=inside, other=0.0) * scale - top
    e = tl.exp(d)
    if PUSH:
        g = e * (level + tl.load(push_ptr + row) * d)
    else:
        g = e * level
    g = tl.where(columns == place, g - pull, g)
    tl.store(out_ptr + row * out_stride + columns, g.to(out_ptr.dtype.element_ty), mask=inside)


FALLBACKS: dict[str, str] = {}
"""Products with float32 results that torch refused to write where they are wanted, and its message."""


def _product(left, right, out):
    """out = left right, float32 of 16-bit factors."""
    if left.dtype == torch.float32:
        return torch.mm(left, right, out=out)
    if "mm" not in FALLBACKS:
        try:
            return torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=out)
        except (RuntimeError, NotImplementedError) as error:
            FALLBACKS["mm"] = str(error)
    return out.copy_(torch.mm(left, right, out_dtype=torch.float32))


def _add_product(sums, left, right, first):
    """sums += left right, in one product where torch offers it."""
    if left.dtype == torch.float32:
        return sums.addmm_(left, right, beta=0 if first else 1)
    if first:
        return _product(left, right, sums)
    if "addmm" not in FALLBACKS:
        try:
            return torch.ops.aten.addmm.dtype_out(sums, left, right, torch.float32, out=sums)
        except (RuntimeError, NotImplementedError) as error:
            FALLBACKS["addmm"] = str(error)
    return sums.add_(torch.mm(left, right, out_dtype=torch.float32))


class TritonHead(torch.autograd.Function):
    """(log p, H, Σ p²) of rows [N, H] in bfloat16 and a head [V, H]; `tile` vocabulary entries at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, target, temperature, tile, rows, squares):
        n, v = hidden.shape[0], weight.shape[0]
        make = lambda: torch.empty(n, device=hidden.device, dtype=torch.float32)  # noqa: E731
        top, total, moment, square, chosen = (make() for _ in range(5))
        logits = torch.empty(min(rows, n), tile, device=hidden.device, dtype=torch.float32)
        for start in range(0, v, tile):
            matrix = weight[start : start + tile]
            width = matrix.shape[0]
            for r in range(0, n, rows):
                part = hidden[r : r + rows]
                z = logits.view(-1)[: len(part) * width].view(len(part), width)
                _product(part, matrix.t(), z)
                _statistics[(len(part),)](
                    z,
                    target[r:],
                    top[r:],
                    total[r:],
                    moment[r:],
                    square[r:],
                    chosen[r:],
                    start,
                    width,
                    width,
                    1 / temperature,
                    BLOCK=4096 if width >= 4096 else 256,
                    FIRST=start == 0,
                    SQUARES=squares,
                    num_warps=8,
                )
        log_s = total.log()
        entropy = log_s - moment / total
        ctx.save_for_backward(hidden, weight, target, top, total, entropy)
        ctx.options = temperature, tile, rows
        sum_p2 = square / total.square() if squares else None
        if squares:
            ctx.mark_non_differentiable(sum_p2)
        ctx.set_materialize_grads(False)
        return chosen - top - log_s, entropy, sum_p2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy, _):
        hidden, weight, target, top, total, entropy = ctx.saved_tensors
        temperature, tile, rows = ctx.options
        (n, width_h), v, device = hidden.shape, weight.shape[0], hidden.device
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        pull = torch.zeros_like(top) if grad_log_prob is None else grad_log_prob.float() * (-1 / temperature)
        level, push = pull / total, None
        if grad_entropy is not None:
            push = grad_entropy.float() * (-1 / temperature) / total
            level = level + push * (entropy - total.log())
        grad_hidden = torch.empty(n, width_h, device=device, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        logits = torch.empty(min(rows, n), tile, device=device, dtype=torch.float32)
        short = torch.empty(min(rows, n), tile, device=device, dtype=hidden.dtype)
        one = rows >= n
        sums = None if one or not needs_weight else torch.empty(tile, width_h, device=device, dtype=torch.float32)
        for start in range(0, v, tile):
            matrix = weight[start : start + tile]
            width = matrix.shape[0]
            for r in range(0, n, rows):
                part = hidden[r : r + rows]
                count = len(part)
                z = logits.view(-1)[: count * width].view(count, width)
                g = short.view(-1)[: count * width].view(count, width)
                _product(part, matrix.t(), z)
                block = 2048 if width >= 2048 else 256
                _gradient[(count, triton.cdiv(width, block))](
                    z,
                    g,
                    target[r:],
                    top[r:],
                    level[r:],
                    (level if push is None else push)[r:],
                    pull[r:],
                    start,
                    width,
                    width,
                    width,
                    1 / temperature,
                    BLOCK=block,
                    PUSH=push is not None,
                    num_warps=4,
                )
                if needs_hidden:
                    _add_product(grad_hidden[r : r + rows], g, matrix, start == 0)
                if needs_weight and one:
                    torch.mm(g.t(), part, out=grad_weight[start : start + tile])
                elif needs_weight:
                    _add_product(sums[:width], g.t(), part, r == 0)
            if needs_weight and not one:
                grad_weight[start : start + tile] = sums[:width]
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def triton_head(hidden, weight, target, *, temperature=1.0, tile=8192, rows=1 << 30, squares=False):
    """(log_prob [N], entropy [N], sum_p2 [N] or None)."""
    return TritonHead.apply(hidden, weight, target, temperature, tile, rows, squares)


@triton.jit
def _tile_of_logits(
    hidden_ptr,
    weight_ptr,
    n,
    v,
    pid_m,
    pid_n,
    H: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
):
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if TMA:
        left = tl.make_tensor_descriptor(hidden_ptr, shape=[n, H], strides=[H, 1], block_shape=[BM, BK])
        right = tl.make_tensor_descriptor(weight_ptr, shape=[v, H], strides=[H, 1], block_shape=[BN, BK])
        for k in range(0, H, BK):
            acc = tl.dot(left.load([pid_m * BM, k]), right.load([pid_n * BN, k]).T, acc)
    else:
        rows = pid_m * BM + tl.arange(0, BM)
        columns = pid_n * BN + tl.arange(0, BN)
        ks = tl.arange(0, BK)
        left = hidden_ptr + tl.minimum(rows, n - 1)[:, None].to(tl.int64) * H + ks[None, :]
        right = weight_ptr + tl.minimum(columns, v - 1)[None, :].to(tl.int64) * H + ks[:, None]
        for _ in range(0, H, BK):
            acc = tl.dot(tl.load(left), tl.load(right), acc)
            left += BK
            right += BK
    return acc


@triton.jit
def _place_of(BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, n, v):
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(n, BM)
    tiles_n = tl.cdiv(v, BN)
    per_group = GROUP * tiles_n
    group = pid // per_group
    first = group * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    return first + (pid % per_group) % size, (pid % per_group) // size


@triton.jit
def _fused_statistics(
    hidden_ptr,
    weight_ptr,
    target_ptr,
    top_ptr,
    total_ptr,
    moment_ptr,
    square_ptr,
    chosen_ptr,
    n,
    v,
    scale,
    H: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
):
    pid_m, pid_n = _place_of(BM, BN, GROUP, n, v)
    z = _tile_of_logits(hidden_ptr, weight_ptr, n, v, pid_m, pid_n, H, BM, BN, BK, TMA) * scale
    rows = pid_m * BM + tl.arange(0, BM)
    columns = pid_n * BN + tl.arange(0, BN)
    z = tl.where((columns < v)[None, :], z, -1e30)
    place = tl.load(target_ptr + rows, mask=rows < n, other=-1) - pid_n * BN
    here = (place >= 0) & (place < BN)
    chosen = tl.sum(tl.where(tl.arange(0, BN)[None, :] == place[:, None], z, 0.0), 1)
    tl.store(chosen_ptr + rows, chosen, mask=here & (rows < n))
    top = tl.max(z, 1)
    d = z - top[:, None]
    e = tl.exp(d)
    at = pid_n.to(tl.int64) * n + rows
    tl.store(top_ptr + at, top, mask=rows < n)
    tl.store(total_ptr + at, tl.sum(e, 1), mask=rows < n)
    tl.store(square_ptr + at, tl.sum(e * e, 1), mask=rows < n)
    tl.store(moment_ptr + at, tl.sum(tl.where((columns < v)[None, :], e * d, 0.0), 1), mask=rows < n)


@triton.jit
def _fused_gradient(
    hidden_ptr,
    weight_ptr,
    out_ptr,
    target_ptr,
    top_ptr,
    level_ptr,
    push_ptr,
    pull_ptr,
    start,
    n,
    v,
    scale,
    H: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
):
    pid_m, pid_n = _place_of(BM, BN, GROUP, n, v)
    z = _tile_of_logits(hidden_ptr, weight_ptr, n, v, pid_m, pid_n, H, BM, BN, BK, TMA) * scale
    rows = pid_m * BM + tl.arange(0, BM)
    columns = pid_n * BN + tl.arange(0, BN)
    live = rows < n
    d = z - tl.load(top_ptr + rows, mask=live, other=0.0)[:, None]
    g = tl.exp(d) * (
        tl.load(level_ptr + rows, mask=live, other=0.0)[:, None]
        + tl.load(push_ptr + rows, mask=live, other=0.0)[:, None] * d
    )
    place = tl.load(target_ptr + rows, mask=live, other=-1) - start
    g = tl.where(columns[None, :] == place[:, None], g - tl.load(pull_ptr + rows, mask=live, other=0.0)[:, None], g)
    at = rows.to(tl.int64)[:, None] * v + columns[None, :]
    tl.store(out_ptr + at, g.to(out_ptr.dtype.element_ty), mask=live[:, None] & (columns < v)[None, :])


def _allocate(size, alignment, stream):
    return torch.empty(size, device="cuda", dtype=torch.int8)


class FusedHead(torch.autograd.Function):
    """As `TritonHead`, with products and what follows them in one kernel: no float32 logits in memory."""

    @staticmethod
    def forward(ctx, hidden, weight, target, temperature, tile, squares, blocks):
        n, v, width_h = hidden.shape[0], weight.shape[0], hidden.shape[1]
        if blocks["TMA"]:
            triton.set_allocator(_allocate)
        strips = triton.cdiv(v, blocks["BN"])
        top, total, moment, square = torch.empty(4, strips, n, device=hidden.device, dtype=torch.float32)
        chosen = torch.empty(n, device=hidden.device, dtype=torch.float32)
        _fused_statistics[(triton.cdiv(n, blocks["BM"]) * strips,)](
            hidden,
            weight,
            target,
            top,
            total,
            moment,
            square,
            chosen,
            n,
            v,
            1 / temperature,
            H=width_h,
            **blocks,
        )
        best = top.amax(0)
        shift = top - best
        decay = shift.exp()
        moment = (decay * (moment + shift * total)).sum(0)
        sum_p2 = (decay.square() * square).sum(0)
        total = (decay * total).sum(0)
        log_s = total.log()
        entropy = log_s - moment / total
        sum_p2 = sum_p2 / total.square()
        ctx.save_for_backward(hidden, weight, target, best, total, entropy)
        ctx.options = temperature, tile, blocks
        ctx.mark_non_differentiable(sum_p2)
        ctx.set_materialize_grads(False)
        return chosen - best - log_s, entropy, sum_p2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy, _):
        hidden, weight, target, top, total, entropy = ctx.saved_tensors
        temperature, tile, blocks = ctx.options
        (n, width_h), v, device = hidden.shape, weight.shape[0], hidden.device
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if blocks["TMA"]:
            triton.set_allocator(_allocate)  # for this thread: the backward has one of its own
        pull = torch.zeros_like(top) if grad_log_prob is None else grad_log_prob.float() * (-1 / temperature)
        push = torch.zeros_like(top) if grad_entropy is None else grad_entropy.float() * (-1 / temperature) / total
        level = pull / total + push * (entropy - total.log())
        grad_hidden = torch.empty(n, width_h, device=device, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        short = torch.empty(n * tile, device=device, dtype=hidden.dtype)
        for start in range(0, v, tile):
            matrix = weight[start : start + tile]
            width = matrix.shape[0]
            g = short[: n * width].view(n, width)
            _fused_gradient[(triton.cdiv(n, blocks["BM"]) * triton.cdiv(width, blocks["BN"]),)](
                hidden,
                matrix,
                g,
                target,
                top,
                level,
                push,
                pull,
                start,
                n,
                width,
                1 / temperature,
                H=width_h,
                **blocks,
            )
            if needs_hidden:
                _add_product(grad_hidden, g, matrix, start == 0)
            if needs_weight:
                torch.mm(g.t(), hidden, out=grad_weight[start : start + tile])
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


BLOCKS = dict(BM=128, BN=256, BK=64, GROUP=16, TMA=False, num_warps=8, num_stages=3)


def fused_head(hidden, weight, target, *, temperature=1.0, tile=8192, squares=True, blocks=BLOCKS):
    """(log_prob [N], entropy [N], sum_p2 [N]); H is a multiple of BK."""
    return FusedHead.apply(hidden, weight, target, temperature, tile, squares, blocks)
