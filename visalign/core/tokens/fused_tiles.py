# SPDX-License-Identifier: Apache-2.0
"""Tiles over [N, V]: logits of a linear head, their softmax statistics, and their gradient.

The engine of `fused_head.py`. The vocabulary is the outer loop, so that one float32 tile of the gradient of W is
summed over all rows and cast once. Nothing of size N·V or, for a bfloat16 head, float32 of size V·H ever exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._triton import has_triton

TILES: dict[str, tuple[int, int]] = {"cpu": (1024, 768), "cuda": (4096, 8192)}
"""Device -> rows and vocabulary entries of a tile: a few MB that stay in a CPU's cache, 128 MiB on a GPU."""

KERNEL_ROWS = 8192  # Rows of a tile of gradients that a kernel writes, bfloat16: 128 MiB with 8192 vocabulary entries

EXCLUDED = -1e30  # Stands for a bias of −∞: p is 0, and 0·log p is 0 instead of NaN


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Map from W h to the logits, and rows and vocabulary entries of a tile."""

    temperature: float = 1.0
    soft_cap: float | None = None
    tile: tuple[int, int]


@dataclass(frozen=True)
class Rows:
    """Rows to work on: all hidden states [N, H], the rows [N'] among them (None for all), targets [N']."""

    hidden: Tensor
    index: Tensor | None
    target: Tensor

    def states(self, part: slice) -> Tensor:
        """Fetch the hidden states [n, H] of one tile."""
        return self.hidden[part] if self.index is None else self.hidden[self.index[part]]


@dataclass(frozen=True)
class Statistics:
    """Softmax statistics of each row, [N'] float32 or better."""

    log_prob: Tensor
    entropy: Tensor
    sum_p2: Tensor
    top: Tensor  # m, the largest logit
    total: Tensor  # s = Σ_v e^(z_v − m) in [1, V]; log Z = m + log s, kept apart: at large m their sum rounds off


@dataclass(frozen=True)
class Gradients:
    """Gradients of hidden [N', H] (float32 or better), W [V, H] (its dtype) and b [V]; None if not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def sum_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 when an operand is."""
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def multiplies_bfloat16(hidden: Tensor, weight: Tensor) -> bool:
    """Check that the device multiplies bfloat16 into float32 itself; float16 is always cast: gradients underflow."""
    both = hidden.dtype == weight.dtype == torch.bfloat16
    return both and hidden.device.type in ("cuda", "xpu")


def _kernels(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> ModuleType | None:
    """Return `fused_kernels` where the device runs them: bfloat16 on Hopper or later, by Triton, without a bias."""
    fits = bias is None and hidden.shape[1] % 8 == 0 and weight.is_contiguous()
    if not fits or not multiplies_bfloat16(hidden, weight) or not hidden.is_cuda:
        return None
    if torch.cuda.get_device_capability(hidden.device) < (9, 0) or not has_triton():
        return None
    from . import fused_kernels

    return fused_kernels


def softmax_statistics(
    rows: Rows, weight: Tensor, bias: Tensor | None, transform: Transform, *, sum_p2: bool
) -> Statistics:
    """Compute log-prob of the target, entropy and (if asked for) Σ p² of each row, in one sweep of the tiles.

    With the running maximum m: s = Σ e^(z−m), t = Σ e^(z−m) (z−m), q = Σ e^(2(z−m)); then log p = z_y − m −
    log s, H = log s − t/s, Σ p² = q/s². Milakov and Gimelshein, arXiv 1805.02867, algorithm 3 (s); t and q
    are carried along in the same way.
    """
    work = _Work(rows, weight, bias, transform)
    if work.kernels is not None:
        states = rows.states(slice(None)).contiguous()
        sums = work.kernels.softmax_sums(states, weight, rows.target, transform.temperature, transform.soft_cap)
        return _statistics(*sums)
    count, dtype = rows.target.shape[0], work.dtype
    empty = weight.new_zeros(count, dtype=dtype)
    top, total, moment, square, chosen = (empty.clone() for _ in range(5))
    top.fill_(torch.finfo(dtype).min / 2)
    for columns in _cut(weight.shape[0], transform.tile[1]):
        matrix, offset = work.head(columns)
        for part in _cut(count, transform.tile[0]):
            z = work.logits(part, matrix, offset)
            local, inside = _find(rows.target[part], columns)
            chosen[part] = torch.where(inside, z.gather(1, local[:, None])[:, 0], chosen[part])
            highest = torch.maximum(top[part], z.amax(1))
            shift = top[part] - highest
            decay = shift.exp()
            top[part] = highest
            z.sub_(highest[:, None])
            e = torch.exp(z, out=work.buffer("exponentials", z.shape))
            moment[part] = decay * (moment[part] + shift * total[part]) + z.mul_(e).sum(1)
            total[part] = decay * total[part] + e.sum(1)
            if sum_p2:
                square[part] = decay.square() * square[part] + torch.linalg.vector_norm(e, dim=1).square()
    return _statistics(top, total, moment, square, chosen)


def _statistics(top: Tensor, total: Tensor, moment: Tensor, square: Tensor, chosen: Tensor) -> Statistics:
    log_s = total.log()
    return Statistics(
        log_prob=chosen - top - log_s,
        entropy=log_s - moment / total,
        sum_p2=square / total.square(),
        top=top,
        total=total,
    )


def head_gradients(
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    transform: Transform,
    *,
    top: Tensor,
    total: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """Compute the gradients of Σ_n (g_n log p_n + h_n H_n) that `needs` (hidden, weight, bias) asks for.

    ∂/∂z_v = g (1[v = y] − p_v) − h p_v (log p_v + H), times 1/τ and, under a soft-cap, 1 − tanh². Each tile
    of logits is recomputed once. `top` m, `total` s and `entropy` H are those of the forward pass,
    `grad_log_prob` g and `grad_entropy` h (None for 0) the upstream gradients, [N'] each.
    """
    work = _Work(rows, weight, bias, transform)
    count, width = rows.target.shape[0], weight.shape[1]
    pull, level, push = _upstream(total, entropy, grad_log_prob, grad_entropy, transform.temperature)
    grad_hidden = weight.new_zeros((count, width), dtype=work.dtype) if needs[0] else None
    grad_weight = weight.new_empty(weight.shape) if needs[1] else None
    grad_bias = weight.new_zeros(weight.shape[0], dtype=work.dtype) if needs[2] else None
    if count == 0:
        return Gradients(grad_hidden, grad_weight if grad_weight is None else grad_weight.zero_(), grad_bias)
    tile_rows = transform.tile[0] if work.kernels is None else KERNEL_ROWS
    # one product over all rows is rounded once, as a bfloat16 product is; several are summed in float32 first
    rounds_once = work.native and count <= tile_rows
    for columns in _cut(weight.shape[0], transform.tile[1]):
        matrix, offset = work.head(columns)
        grad_matrix = None
        if grad_weight is not None:
            grad_matrix = grad_weight[columns] if rounds_once else work.sums(grad_weight[columns])
        for part in _cut(count, tile_rows):
            part_push = None if push is None else push[part]
            grad_z = work.logit_gradient(part, columns, matrix, offset, top[part], level[part], part_push, pull[part])
            if grad_bias is not None:
                grad_bias[columns] += grad_z.sum(0)
            grad_z = work.operand(grad_z)
            if grad_hidden is not None:
                _add_product(grad_hidden[part], grad_z, matrix, beta=1)
            if grad_matrix is not None:
                states = work.operand(rows.states(part))
                _add_product(grad_matrix, grad_z.t(), states, beta=0 if part.start == 0 else 1)
        if grad_weight is not None and grad_matrix is not None and not rounds_once and grad_weight.dtype != work.dtype:
            grad_weight[columns] = grad_matrix
    return Gradients(grad_hidden, grad_weight, grad_bias)


def _upstream(
    total: Tensor, entropy: Tensor, grad_log_prob: Tensor, grad_entropy: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (pull, level, push) per row: p (g + h (log p + H)) = e^(z−m) (level + push (z − m)), times −1/τ.

    One exponential and no division per entry of the tile.
    """
    pull = grad_log_prob * (-1 / temperature)
    if grad_entropy is None:
        return pull, pull / total, None
    push = grad_entropy * (-1 / temperature) / total
    return pull, pull / total + push * (entropy - total.log()), push


class _Work:
    """Tiles of the head, and the buffers that are reused for each."""

    def __init__(self, rows: Rows, weight: Tensor, bias: Tensor | None, transform: Transform) -> None:
        self.rows, self.weight, self.bias, self.transform = rows, weight, bias, transform
        self.dtype = sum_dtype(rows.hidden, weight)
        self.native = multiplies_bfloat16(rows.hidden, weight)
        self.kernels = _kernels(rows.hidden, weight, bias)
        self.buffers: dict[str, Tensor] = {}

    def operand(self, value: Tensor) -> Tensor:
        """Cast a factor of a product: bfloat16 if the device sums that in float32, else the sums' dtype."""
        return value.to(torch.bfloat16 if self.native else self.dtype)

    def head(self, columns: slice) -> tuple[Tensor, Tensor | None]:
        bias = None if self.bias is None else self.bias[columns].to(self.dtype)
        return self.operand(self.weight[columns]), bias

    def sums(self, target: Tensor) -> Tensor:
        """Return the tensor that sums for `target`: itself, or a buffer when its dtype is too short."""
        return target if target.dtype == self.dtype else self.buffer("sums", target.shape)

    def buffer(self, name: str, shape: torch.Size | tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = self.weight.new_empty(size, dtype=dtype or self.dtype)
        return self.buffers[name][:size].view(shape)

    def logits(self, part: slice, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Compute c·tanh((W h + b)/c)/τ of one tile, [n, v]."""
        z = self._product(self.operand(self.rows.states(part)), matrix.t())
        if bias is not None:
            z.add_(bias).clamp_(min=EXCLUDED)
        cap = self.transform.soft_cap
        if cap is not None:
            z.mul_(1 / cap).tanh_().mul_(cap)
        return z if self.transform.temperature == 1 else z.mul_(1 / self.transform.temperature)

    def logit_gradient(
        self,
        part: slice,
        columns: slice,
        matrix: Tensor,
        bias: Tensor | None,
        top: Tensor,
        level: Tensor,
        push: Tensor | None,
        pull: Tensor,
    ) -> Tensor:
        """Compute the gradient of one tile of logits before their soft-cap and bias, [n, v]."""
        cap, tau, target = self.transform.soft_cap, self.transform.temperature, self.rows.target[part]
        if self.kernels is not None:
            out = self.buffer("gradient", (len(target), len(matrix)), matrix.dtype)
            by_row = (target - columns.start, top, level, torch.zeros_like(level) if push is None else push, pull)
            return self.kernels.logit_gradient(self.rows.states(part).contiguous(), matrix, out, by_row, tau, cap)
        z = self.logits(part, matrix, bias)
        slope = None
        if cap is not None:  # 1 − (τ z/c)², the derivative of the soft-cap
            slope = torch.mul(z, tau / cap, out=self.buffer("slope", z.shape)).square_().neg_().add_(1)
        grad_z = self.exponentials(z, top, level, push)
        local, inside = _find(target, columns)
        grad_z.scatter_add_(1, local[:, None], torch.where(inside, -pull, 0.0)[:, None])
        return grad_z if slope is None else grad_z.mul_(slope)

    def exponentials(self, z: Tensor, top: Tensor, level: Tensor, push: Tensor | None) -> Tensor:
        """Compute e^(z − m) (level + push (z − m)) of one tile, in place of z; push None is 0."""
        z.sub_(top[:, None])
        if push is None:
            return z.exp_().mul_(level[:, None])
        e = torch.exp(z, out=self.buffer("exponentials", z.shape))
        return torch.addcmul(level[:, None], z, push[:, None], out=z).mul_(e)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        if left.dtype != self.dtype:
            return torch.mm(left, right, out_dtype=self.dtype)
        return torch.mm(left, right, out=self.buffer("logits", (left.shape[0], right.shape[1])))


def _add_product(sums: Tensor, left: Tensor, right: Tensor, *, beta: int) -> None:
    """Compute sums = beta·sums + left right, in the dtype of sums."""
    if left.dtype == sums.dtype:
        sums.addmm_(left, right, beta=beta)
    elif beta and not left.is_cuda:
        sums.add_(torch.mm(left, right, out_dtype=sums.dtype))
    elif beta:
        torch.ops.aten.addmm.dtype_out(sums, left, right, sums.dtype, out=sums)  # `torch.addmm` has no out for it
    else:
        sums.copy_(torch.mm(left, right, out_dtype=sums.dtype))


def _find(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return the column of each target in the tile, and whether the tile has it."""
    local, width = target - columns.start, columns.stop - columns.start
    return local.clamp(0, width - 1), (local >= 0) & (local < width)


def _cut(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))
