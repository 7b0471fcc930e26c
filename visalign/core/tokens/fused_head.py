# SPDX-License-Identifier: Apache-2.0
"""Log-prob and entropy of chosen tokens: from logits, and from hidden states without the logits.

V vocabulary entries, H hidden size. With N = B·T tokens the logits [N, V] are the largest tensor of a text
policy's update; `fused_log_prob_entropy` makes and forgets them tile by tile, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from visalign.core.checks import check_axes
from visalign.core.precision import float32

from .fused_tiles import TILES, Rows, Transform, head_gradients, softmax_statistics


@dataclass(frozen=True)
class LogProbEntropy:
    """Statistics of the policy's distribution over the vocabulary at each token; the shape of the targets."""

    log_prob: Tensor  # log p of the target, in nats, differentiable
    entropy: Tensor  # H = −Σ_v p_v log p_v, in nats, differentiable
    sum_p2: Tensor | None = None  # Σ_v p_v², no gradient; optimal token baselines need it


def squared_mass(log_p: Tensor) -> Tensor:
    """Compute Σ_v p_v² [*N] of log-probs [*N, V], without gradient."""
    return (2 * log_p.detach()).exp().sum(-1)


def log_prob_entropy(
    logits: Tensor, target: Tensor, *, temperature: float = 1.0, soft_cap: float | None = None
) -> LogProbEntropy:
    """Compute log-prob of the target and entropy from logits [*N, V]; −∞ excludes an entry.

    z = c·tanh(logits/c)/τ; log p = z_y − log Σ_v e^z_v; H = −Σ_v p_v log p_v. Several tensors of the size of
    the logits are made; `fused_log_prob_entropy` avoids them. `target` [*N] holds ids, `temperature` τ is
    that of sampling, `soft_cap` c Gemma 2's logit soft-capping (arXiv 2408.00118, section 2).
    """
    _check_target(target, None, logits.shape[:-1], logits.shape[-1])
    z = float32(logits)
    if soft_cap is not None:
        z = (z / soft_cap).tanh() * soft_cap
    log_p = (z / temperature).log_softmax(-1)
    finite = log_p.clamp(min=torch.finfo(log_p.dtype).min)
    return LogProbEntropy(
        log_prob=log_p.gather(-1, target.long()[..., None])[..., 0],
        entropy=-(log_p.exp() * finite).sum(-1),
        sum_p2=squared_mass(log_p),
    )


def fused_log_prob_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    head_bias: Tensor | None = None,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    sum_p2: bool = False,
    tile: tuple[int, int] | None = None,
) -> LogProbEntropy:
    """Compute `log_prob_entropy` of the logits W h + b, with nothing of their size in memory.

    z = c·tanh((W h + b)/c)/τ; log p = z_y − log Σ_v e^z_v; H = −Σ_v p_v log p_v. The backward pass recomputes each
    tile of logits. It leaves out rows whose upstream gradient is exactly 0 (clipped, without advantage, not selected)
    and products for inputs that need no gradient. Products are summed in float32: the logits of a bfloat16 head are
    never rounded. The host waits for a CUDA device to check the ids. Deviations: autocast is off inside; operands keep
    their dtype. With a bfloat16 head on CUDA the gradient of the logits is rounded to bfloat16, as a factor of its two
    products.

    `hidden` is [*N, H], `head_weight` W [V, H], `head_bias` b [V] (−∞ excludes an entry), `target` [*N] the ids that
    the states predict. Where `weight` [*N] is 0 the results are 0 and cost nothing, whatever target and state are
    (also NaN), and the gradient is exactly zero. `soft_cap` is c, `sum_p2` asks for Σ_v p_v² too. `tile` is (rows,
    vocabulary entries), by default `fused_tiles.TILES` of the device: work memory is 2 float32 tiles (3 with a
    soft-cap) and up to 2 strips [tile[1], H] for bfloat16.

    Milakov and Gimelshein, arXiv 1805.02867 (log Σ e^z in one sweep); Wijmans et al., Cut Cross-Entropy, arXiv
    2411.09009, section 4 (no logits in memory, recomputed for the gradient).
    """
    _check_head(hidden, head_weight, head_bias)
    _check_target(target, weight, hidden.shape[:-1], head_weight.shape[0])
    tile = tile or TILES.get(hidden.device.type, TILES["cuda"])
    transform = Transform(temperature=temperature, soft_cap=soft_cap, tile=tile)
    results = _FusedHead.apply(
        hidden.reshape(-1, head_weight.shape[1]),
        head_weight,
        head_bias,
        target.reshape(-1).long(),
        None if weight is None else weight.reshape(-1).nonzero()[:, 0],
        transform,
        sum_p2,
    )
    return LogProbEntropy(*(value.view(target.shape) for value in results))


class _FusedHead(torch.autograd.Function):
    """Map rows [N, H] to their (log p, H) or (log p, H, Σ p²), [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        index: Tensor | None,
        transform: Transform,
        sum_p2: bool,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        rows = Rows(hidden, index, target if index is None else target[index])
        with torch.autocast(hidden.device.type, enabled=False):
            stats = softmax_statistics(rows, weight, bias, transform, sum_p2=sum_p2)
        ctx.transform = transform
        ctx.save_for_backward(hidden, weight, bias, rows.target, index, stats.top, stats.total, stats.entropy)
        results = (stats.log_prob, stats.entropy, stats.sum_p2)[: 3 if sum_p2 else 2]
        if index is not None:
            results = tuple(_place(value, index, hidden.shape[0]) for value in results)
        ctx.mark_non_differentiable(*results[2:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, *_: Any) -> Any:
        hidden, weight, bias, target, index, top, total, entropy = ctx.saved_tensors
        if grad_log_prob is None and grad_entropy is None:
            return (None,) * 7
        pull, push = (grad if grad is None or index is None else grad[index] for grad in (grad_log_prob, grad_entropy))
        pull = torch.zeros_like(top) if pull is None else pull
        live = pull != 0 if push is None else (pull != 0) | (push != 0)
        live_rows = live.nonzero()[:, 0]
        if live_rows.shape[0] < live.shape[0]:
            index = live_rows if index is None else index[live_rows]
            target, top, total, entropy, pull = (x[live_rows] for x in (target, top, total, entropy, pull))
            push = None if push is None else push[live_rows]
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = head_gradients(
                Rows(hidden, index, target),
                weight,
                bias,
                ctx.transform,
                top=top,
                total=total,
                entropy=entropy,
                grad_log_prob=pull,
                grad_entropy=push,
                needs=ctx.needs_input_grad[:3],
            )
        grad_hidden, grad_bias = gradients.hidden, gradients.bias
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
            grad_hidden = grad_hidden if index is None else _place(grad_hidden, index, hidden.shape[0])
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, gradients.weight, grad_bias, None, None, None, None


def _place(values: Tensor, index: Tensor, count: int) -> Tensor:
    return values.new_zeros((count, *values.shape[1:])).index_copy_(0, index, values)


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[1:] or not weight.is_floating_point():
        raise ValueError(
            "hidden must be [..., H] and head_weight [V, H] with one H, floating point; got hidden "
            f"{tuple(hidden.shape)} and head_weight {tuple(weight.shape)} of {weight.dtype}."
        )
    check_axes(head_weight=(weight, "V H"), head_bias=(bias, "V"))


def _check_target(target: Tensor, weight: Tensor | None, shape: torch.Size, count: int) -> None:
    for name, tensor in (("target", target), ("weight", weight)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have one entry per token, {tuple(shape)}; got {tuple(tensor.shape)}.")
    outside = (target < 0) | (target >= count)
    if weight is not None:
        outside &= weight != 0
    if outside.any():
        raise ValueError(
            f"target must hold ids in [0, {count}); {int(outside.sum())} of {target.numel()} are outside: "
            f"{target[outside][:3].tolist()} first. No id means 'ignore': give such positions weight 0."
        )
