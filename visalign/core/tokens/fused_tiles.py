# SPDX-License-Identifier: Apache-2.0
"""Tile by tile over [N, V]: logits of a linear head, their softmax statistics, and their gradient.

The engine of `fused_head.py`. The vocabulary is the outer loop, so that one float32 tile of the gradient of
W is summed over all rows and cast once. Nothing of size N·V or, for a bfloat16 head, float32 of size V·H
ever exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILES: dict[str, tuple[int, int]] = {"cpu": (1024, 768), "cuda": (4096, 8192)}
"""Device -> rows and vocabulary entries of a tile: a few MB that stay in a CPU's cache, 128 MiB on a GPU."""

EXCLUDED = -1e30
"""What a bias of −∞ counts as: p is 0, and 0·log p is 0 instead of NaN."""


@dataclass(frozen=True, kw_only=True)
class Transform:
    """What stands between W h and the logits, and how the work is cut."""

    temperature: float = 1.0
    """τ > 0."""
    soft_cap: float | None = None
    """c > 0 of c·tanh(z/c); None is none."""
    tile: tuple[int, int]
    """Rows and vocabulary entries per tile."""


@dataclass(frozen=True)
class Rows:
    """The rows that are worked on; hidden states are fetched tile by tile."""

    hidden: Tensor
    """[N, H] of all rows."""
    index: Tensor | None
    """[N'] rows of `hidden`; None is all of them."""
    target: Tensor
    """[N'] ids in [0, V)."""

    def states(self, part: slice) -> Tensor:
        """Hidden states [n, H] of one tile."""
        return self.hidden[part] if self.index is None else self.hidden[self.index[part]]


@dataclass(frozen=True)
class Statistics:
    """Of each row's softmax; [N'] float32 or better."""

    log_prob: Tensor
    entropy: Tensor
    sum_p2: Tensor
    top: Tensor
    """m, the largest logit."""
    total: Tensor
    """s = Σ_v e^(z_v − m) in [1, V]; log Z = m + log s, kept apart: at large m their sum rounds off."""


@dataclass(frozen=True)
class Gradients:
    """Of the head's inputs; None where none was asked for."""

    hidden: Tensor | None
    """[N', H], of the worked-on rows, float32 or better."""
    weight: Tensor | None
    """[V, H], in the dtype of W."""
    bias: Tensor | None
    """[V], float32 or better."""


def sum_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Float32, or float64 when an operand is."""
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def multiplies_bfloat16(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the device multiplies bfloat16 into float32 itself; elsewhere tiles are lifted first.

    Float16 is always lifted: a softmax gradient underflows in it.
    """
    both = hidden.dtype == weight.dtype == torch.bfloat16
    return both and hidden.device.type in ("cuda", "xpu")


def softmax_statistics(
    rows: Rows, weight: Tensor, bias: Tensor | None, transform: Transform, *, sum_p2: bool
) -> Statistics:
    """Log-prob of the target, entropy and (if asked for) Σ p² of each row, in one sweep of the tiles.

    With the running maximum m: s = Σ e^(z−m), t = Σ e^(z−m) (z−m), q = Σ e^(2(z−m)); then
    log p = z_y − m − log s, H = log s − t/s, Σ p² = q/s².

    Milakov and Gimelshein, arXiv 1805.02867, algorithm 3 (s); t and q are carried along in the same way.
    """
    work = _Work(rows, weight, bias, transform)
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
    """Gradients of Σ_n (g_n log p_n + h_n H_n), recomputing each tile of logits once.

    ∂/∂z_v = g (1[v = y] − p_v) − h p_v (log p_v + H), times 1/τ and, under a soft-cap, 1 − tanh².

    Args:
        rows: the rows with a gradient, N' of them.
        weight: W [V, H].
        bias: b [V] or None.
        transform: as in the forward pass.
        top: [N'] m.
        total: [N'] s.
        entropy: [N'] H.
        grad_log_prob: [N'] g.
        grad_entropy: [N'] h, or None for zeros.
        needs: whether the gradient of (hidden, weight, bias) is wanted; only those are returned.
    """
    work = _Work(rows, weight, bias, transform)
    count, width = rows.target.shape[0], weight.shape[1]
    pull, level, push = _upstream(total, entropy, grad_log_prob, grad_entropy, transform.temperature)
    grad_hidden = weight.new_zeros((count, width), dtype=work.dtype) if needs[0] else None
    grad_weight = weight.new_empty(weight.shape) if needs[1] else None
    grad_bias = weight.new_zeros(weight.shape[0], dtype=work.dtype) if needs[2] else None
    if count == 0:
        return Gradients(grad_hidden, grad_weight if grad_weight is None else grad_weight.zero_(), grad_bias)
    for columns in _cut(weight.shape[0], transform.tile[1]):
        matrix, offset = work.head(columns)
        grad_matrix = None if grad_weight is None else work.sums(grad_weight[columns])
        for part in _cut(count, transform.tile[0]):
            z = work.logits(part, matrix, offset)
            slope = work.soft_cap_slope(z)
            grad_z = work.exponentials(z, top[part], level[part], None if push is None else push[part])
            local, inside = _find(rows.target[part], columns)
            grad_z.scatter_add_(1, local[:, None], torch.where(inside, -pull[part], 0.0)[:, None])
            if slope is not None:
                grad_z.mul_(slope)
            if grad_bias is not None:
                grad_bias[columns] += grad_z.sum(0)
            grad_z = work.operand(grad_z)
            if grad_hidden is not None:
                _add_product(grad_hidden[part], grad_z, matrix, beta=1)
            if grad_matrix is not None:
                states = work.operand(rows.states(part))
                _add_product(grad_matrix, grad_z.t(), states, beta=0 if part.start == 0 else 1)
        if grad_weight is not None and grad_matrix is not None and grad_weight.dtype != work.dtype:
            grad_weight[columns] = grad_matrix
    return Gradients(grad_hidden, grad_weight, grad_bias)


def _upstream(
    total: Tensor, entropy: Tensor, grad_log_prob: Tensor, grad_entropy: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(pull, level, push) per row: p (g + h (log p + H)) = e^(z−m) (level + push (z − m)), times −1/τ.

    One exponential and no division per entry of the tile.
    """
    pull = grad_log_prob * (-1 / temperature)
    if grad_entropy is None:
        return pull, pull / total, None
    push = grad_entropy * (-1 / temperature) / total
    return pull, pull / total + push * (entropy - total.log()), push


class _Work:
    """The head seen through its tiles, and the buffers that are used again for each."""

    def __init__(self, rows: Rows, weight: Tensor, bias: Tensor | None, transform: Transform) -> None:
        self.rows, self.weight, self.bias, self.transform = rows, weight, bias, transform
        self.dtype = sum_dtype(rows.hidden, weight)
        self.native = multiplies_bfloat16(rows.hidden, weight)
        self.buffers: dict[str, Tensor] = {}

    def operand(self, value: Tensor) -> Tensor:
        """The value as a factor of a product: bfloat16 where the device sums that in float32, else lifted."""
        return value.to(torch.bfloat16 if self.native else self.dtype)

    def head(self, columns: slice) -> tuple[Tensor, Tensor | None]:
        """W and b of these vocabulary entries: a factor [v, H], and [v] or None."""
        bias = None if self.bias is None else self.bias[columns].to(self.dtype)
        return self.operand(self.weight[columns]), bias

    def sums(self, target: Tensor) -> Tensor:
        """Where the sums for `target` are kept: itself, or a buffer when its dtype is too short."""
        return target if target.dtype == self.dtype else self.buffer("sums", target.shape)

    def buffer(self, name: str, shape: torch.Size | tuple[int, int]) -> Tensor:
        """A contiguous piece of memory of this shape, the same one for the same name."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = self.weight.new_empty(size, dtype=self.dtype)
        return self.buffers[name][:size].view(shape)

    def logits(self, part: slice, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """c·tanh((W h + b)/c)/τ of one tile; [n, v]."""
        z = self._product(self.operand(self.rows.states(part)), matrix.t())
        if bias is not None:
            z.add_(bias).clamp_(min=EXCLUDED)
        cap = self.transform.soft_cap
        if cap is not None:
            z.mul_(1 / cap).tanh_().mul_(cap)
        return z if self.transform.temperature == 1 else z.mul_(1 / self.transform.temperature)

    def soft_cap_slope(self, z: Tensor) -> Tensor | None:
        """1 − (τ z/c)², the derivative of the soft-cap; None without one."""
        cap = self.transform.soft_cap
        if cap is None:
            return None
        slope = torch.mul(z, self.transform.temperature / cap, out=self.buffer("slope", z.shape))
        return slope.square_().neg_().add_(1)

    def exponentials(self, z: Tensor, top: Tensor, level: Tensor, push: Tensor | None) -> Tensor:
        """e^(z − m) (level + push (z − m)) of one tile, in place of z; push None is 0."""
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
    """sums = beta·sums + left right, in the dtype of sums."""
    if left.dtype == sums.dtype:
        sums.addmm_(left, right, beta=beta)
    elif beta:
        sums.add_(torch.mm(left, right, out_dtype=sums.dtype))
    else:
        sums.copy_(torch.mm(left, right, out_dtype=sums.dtype))


def _find(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(place of each target among these columns, whether it is there at all)."""
    place, width = target - columns.start, columns.stop - columns.start
    return place.clamp(0, width - 1), (place >= 0) & (place < width)


def _cut(total: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover range(total)."""
    return (slice(start, min(start + step, total)) for start in range(0, total, step))
