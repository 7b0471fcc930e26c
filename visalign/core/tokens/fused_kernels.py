# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Triton kernels of `fused_tiles.py` for bfloat16 heads on Hopper and later: logits never leave the chip.

One kernel computes a tile of logits and reduces it to softmax statistics, one turns it into the gradient of the
logits. On an H200 forward and backward take .85 of the time of `log_softmax` and `gather` (docs/evidence/gpu.md,
section 3). Tiles are read by TMA, which pads with zeros, so any N and V and every H that is a multiple of 8 will do.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = {"BM": 128, "BN": 256, "BK": 64, "GROUP": 16, "num_warps": 8, "num_stages": 3}
"""Rows, vocabulary entries and hidden units of a product; strips of rows that share entries in the cache."""


@triton.jit
def _logits(  # pragma: no cover - compiled
    hidden_ptr, weight_ptr, n, v, scale, cap, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """c·tanh(W h / c) / τ of one tile, its slope 1 − tanh², and which rows and columns it has."""
    pid, tiles_m = tl.program_id(0), tl.cdiv(n, BM)
    per_group = GROUP * tl.cdiv(v, BN)
    first = pid // per_group * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    pid_m, pid_n = first + (pid % per_group) % size, (pid % per_group) // size
    left = tl.make_tensor_descriptor(hidden_ptr, shape=[n, H], strides=[H, 1], block_shape=[BM, BK])
    right = tl.make_tensor_descriptor(weight_ptr, shape=[v, H], strides=[H, 1], block_shape=[BN, BK])
    z = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, H, BK):
        z = tl.dot(left.load([pid_m * BM, k]), right.load([pid_n * BN, k]).T, z)
    slope = 1.0
    if CAPPED:
        tanh = 1 - 2 / (tl.exp(2 / cap * z) + 1)
        z, slope = cap * tanh, 1 - tanh * tanh
    return z * scale, slope, pid_m * BM + tl.arange(0, BM), pid_n * BN + tl.arange(0, BN), pid_n


@triton.jit
def _statistics_kernel(  # pragma: no cover - compiled
    hidden_ptr, weight_ptr, target_ptr, top_ptr, total_ptr, moment_ptr, square_ptr, chosen_ptr, n, v, scale, cap,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    z, _, rows, columns, strip = _logits(hidden_ptr, weight_ptr, n, v, scale, cap, H, BM, BN, BK, GROUP, CAPPED)
    z = tl.where((columns < v)[None, :], z, -1e30)
    target = tl.load(target_ptr + rows, mask=rows < n, other=-1)
    is_target = columns[None, :] == target[:, None]
    chosen = tl.sum(tl.where(is_target, z, 0.0), 1)
    tl.store(chosen_ptr + rows, chosen, mask=(tl.sum(is_target.to(tl.int32), 1) > 0) & (rows < n))
    top = tl.max(z, 1)
    d = z - top[:, None]
    e = tl.exp(d)
    at = strip.to(tl.int64) * n + rows
    tl.store(top_ptr + at, top, mask=rows < n)
    tl.store(total_ptr + at, tl.sum(e, 1), mask=rows < n)
    tl.store(square_ptr + at, tl.sum(e * e, 1), mask=rows < n)
    tl.store(moment_ptr + at, tl.sum(tl.where((columns < v)[None, :], e * d, 0.0), 1), mask=rows < n)


@triton.jit
def _gradient_kernel(  # pragma: no cover - compiled
    hidden_ptr, weight_ptr, out_ptr, target_ptr, top_ptr, level_ptr, push_ptr, pull_ptr, n, v, scale, cap,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    z, slope, rows, columns, _ = _logits(hidden_ptr, weight_ptr, n, v, scale, cap, H, BM, BN, BK, GROUP, CAPPED)
    live = rows < n
    d = z - tl.load(top_ptr + rows, mask=live, other=0.0)[:, None]
    level, push = tl.load(level_ptr + rows, mask=live, other=0.0), tl.load(push_ptr + rows, mask=live, other=0.0)
    gradient = tl.exp(d) * (level[:, None] + push[:, None] * d)
    is_target = columns[None, :] == tl.load(target_ptr + rows, mask=live, other=-1)[:, None]
    gradient -= tl.where(is_target, tl.load(pull_ptr + rows, mask=live, other=0.0)[:, None], 0.0)
    at = rows.to(tl.int64)[:, None] * v + columns[None, :]
    tl.store(
        out_ptr + at, (gradient * slope).to(out_ptr.dtype.element_ty), mask=live[:, None] & (columns < v)[None, :]
    )


def softmax_sums(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, soft_cap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reduce logits z of hidden [n, H] and W [V, H] to m, Σ e^(z−m), Σ e^(z−m) (z−m), Σ e^(2(z−m)), z_y: [n] each."""
    n, v = hidden.shape[0], weight.shape[0]
    strips = triton.cdiv(v, BLOCKS["BN"])
    by_strip = torch.empty(4, strips, n, device=hidden.device, dtype=torch.float32)
    chosen = by_strip.new_empty(n)
    _launch(_statistics_kernel, hidden, weight, (target, *by_strip, chosen), temperature, soft_cap)
    top, total, moment, square = by_strip
    highest = top.amax(0)
    shift = top - highest
    decay = shift.exp()
    moment = (decay * (moment + shift * total)).sum(0)
    return highest, (decay * total).sum(0), moment, (decay.square() * square).sum(0), chosen


def logit_gradient(
    hidden: Tensor, weight: Tensor, out: Tensor, by_row: tuple[Tensor, ...], temperature: float, soft_cap: float | None
) -> Tensor:
    """Write e^(z−m) (level + push (z−m)) − pull [v = y], times the soft-cap's slope, into out [n, v].

    `by_row`: target, counted from the first entry of `weight`, m, level, push and pull, each [n].
    """
    _launch(_gradient_kernel, hidden, weight, (out, *by_row), temperature, soft_cap)
    return out


def _launch(
    kernel: Any,
    hidden: Tensor,
    weight: Tensor,
    tensors: tuple[Tensor, ...],
    temperature: float,
    soft_cap: float | None,
) -> None:
    triton.set_allocator(_scratch)  # of this thread; the backward runs in one of its own
    n, v = hidden.shape[0], weight.shape[0]
    grid = (triton.cdiv(n, BLOCKS["BM"]) * triton.cdiv(v, BLOCKS["BN"]),)
    cap = {"cap": soft_cap or 1.0, "CAPPED": soft_cap is not None}
    kernel[grid](hidden, weight, *tensors, n, v, 1 / temperature, H=hidden.shape[1], **cap, **BLOCKS)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, device="cuda" if torch.cuda.is_available() else "cpu", dtype=torch.int8)
