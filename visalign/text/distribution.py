# SPDX-License-Identifier: Apache-2.0
"""Distribution that tokens are sampled from (temperature, top-k, top-p), log-probs under it, draws from it.

Sampling and recomputation use one formula. z = logits / τ; K is the set of tokens that may be drawn; then
p_v = e^z_v / Σ_{u∈K} e^z_u for v in K and 0 outside. A ratio is π(y)/π_old(y) of *this* distribution, since
the rollout drew from it. K is stored with the rollout (`TokenSets`) and used for every later policy: with one
support a drawn token never gets probability 0, and rounding moves no token in or out of the nucleus.

Each sample draws from a random stream of its own, so that neither its batch nor its neighbours change it.

Sources: top-p, arXiv 1904.09751, section 3.1; the remembered sets, DeepSeek-V3.2, arXiv 2512.02556, section
    3.1 ("keep sampling mask"). The order (temperature, top-k, then top-p of what top-k left) is that of the
    transformers library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.core.tokens.fused_head import LogProbEntropy


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature, top-k and top-p that a token is drawn with."""

    temperature: float = 1.0
    """τ. 0 takes the most probable token (greedy), for evaluation and ReMax's baseline. Log-probs are then
    those of τ = 1 over the whole vocabulary, and no ratio can be formed with them."""
    top_k: int = 0  # Draw only from the k most probable tokens and ties with the k-th; 0: off
    top_p: float = 1.0  # Draw only from the fewest most probable tokens that hold at least this share; 1: off

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """True if top-k or top-p excludes tokens."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def scale(self) -> float:
        """τ of the log-probs; 1 for greedy decoding."""
        return self.temperature or 1.0


def log_distribution(logits: Tensor, temperature: float = 1.0, kept: Tensor | None = None) -> Tensor:
    """Compute log p_v = z_v − log Σ_{u∈K} e^z_u of every token [*N, V], z = logits/τ, and −∞ outside K.

    `kept` is True in K; None is the full vocabulary. The result is float32 or better.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return (z if kept is None else z.masked_fill(~kept, -math.inf)).log_softmax(-1)


def kept_tokens(log_p: Tensor, sampling: Sampling) -> Tensor | None:
    """Compute K, the tokens that may be drawn, bool [*N, V], from log-probs at τ; None when nothing is cut off."""
    if not sampling.truncates:
        return None
    kept = log_p > -math.inf
    if 0 < sampling.top_k < log_p.shape[-1]:
        kept = kept & (log_p >= log_p.topk(sampling.top_k, -1).values[..., -1:])
    if sampling.top_p < 1:
        p = log_p.masked_fill(~kept, -math.inf).softmax(-1)
        p, order = torch.sort(p, dim=-1, descending=True, stable=True)
        before = p.cumsum(-1) - p
        inside = before < sampling.top_p
        inside[..., 0] = True
        kept = kept & torch.zeros_like(kept).scatter(-1, order, inside)
    return kept


def draw_tokens(log_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw the first token of each row whose cumulative probability is above u [N], float64 in [0, 1).

    A sample depends on its own u and log-probs [N, V] alone; −∞ excludes a token.
    """
    cumulative = log_p.double().exp().cumsum(-1)  # float32 sums over a vocabulary drift
    total = cumulative[:, -1:]
    check_usable(torch.isfinite(total[:, 0]) & (total[:, 0] > 0))
    return invert_cumulative(cumulative, uniform)


def check_usable(usable: Tensor) -> None:
    """Raise if the logits of a row, bool [N], have no distribution."""
    if not bool(usable.all()):
        raise ValueError(
            f"The model's logits of row {int((~usable).nonzero()[0])} are NaN or all −∞. Check the weights (too high "
            "a learning rate leaves NaN), or use bfloat16 instead of float16."
        )


def invert_cumulative(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """Return the first id [N] whose cumulative probability [N, V] is above u [N] of the whole."""
    total = cumulative[:, -1:]
    # u·total can round up to total, past the last token
    below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniform[:, None].to(total) * total, below_total)
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


def chosen_log_prob(log_p: Tensor, target: Tensor) -> LogProbEntropy:
    """Compute the log-prob [*N] of target ids [*N], −∞ outside K, and the entropy of their distribution."""
    finite = log_p.clamp(min=torch.finfo(log_p.dtype).min)  # 0 · −∞ is NaN
    return LogProbEntropy(
        log_prob=log_p.gather(-1, target[..., None])[..., 0], entropy=-(log_p.exp() * finite).sum(-1)
    )


def draw_seeds(seeds: int | Sequence[int], count: int) -> list[int]:
    """Draw `count` sample seeds in [0, 2⁶²) from a call's seed, the first n for any count; sample seeds stay."""
    if not isinstance(seeds, int):
        return list(seeds)
    return torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seeds)).tolist()


def sample_uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """Draw numbers [B, T] in [0, 1), float64 on the CPU, row b by seeds[b]; the first n do not depend on T."""
    uniform = torch.empty(len(seeds), length, dtype=torch.float64)
    for row, seed in zip(uniform, seeds, strict=True):
        row.uniform_(generator=torch.Generator().manual_seed(seed))
    return uniform
