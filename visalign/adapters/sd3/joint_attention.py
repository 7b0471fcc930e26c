# SPDX-License-Identifier: Apache-2.0
"""Repeated text tokens as one weighted token: the 256 null T5 tokens of SD3 without T5, at the cost of one.

Without T5, diffusers' SD3 pipeline fills the T5 part of the context with `max_sequence_length` all-zero
tokens. The text stream of SD3 has no positional encoding, so equal tokens stay equal through every layer, and
n equal keys in a softmax are one key whose logit carries + log n:

    Σᵢ exp(q·k) v = n exp(q·k) v = exp(q·k + log n) v

The collapsed forward is therefore the same function (and has the same gradients), with 255 tokens fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def collapse_null_tokens(prompt_embeds: Tensor) -> tuple[Tensor, Tensor]:
    """Keep one token of the batch's trailing run of all-zero tokens of a context [B, L, D].

    Returns the context [B, L', D] and its tokens' log-multiplicity [L'] float32.
    """
    length = prompt_embeds.shape[1]
    occupied = prompt_embeds.detach().ne(0).any(dim=-1).any(dim=0).nonzero()
    count = int(occupied[-1]) + 1 if len(occupied) else 0
    log_multiplicity = torch.zeros(min(count + 1, length), device=prompt_embeds.device)
    if length - count > 1:
        log_multiplicity[count] = math.log(length - count)
        prompt_embeds = prompt_embeds[:, : count + 1].contiguous()
    return prompt_embeds, log_multiplicity


SHORT = 128
"""Keys up to which attention is written out on the CPU. With its backward, in bfloat16, it takes a quarter of
the fused kernel's time at 29 keys, 0.6 at 64, 0.8 at 128, 1.1 at 256; it keeps all weights in memory."""


class WeightedJointAttention:
    """Attention processor for SD3 whose context tokens may stand for several equal ones.

    Weights are `joint_attention_kwargs={"context_log_multiplicity": [L']}` of the transformer's forward. On CUDA fused
    kernels want the queries' dtype: bfloat16 rounds the weight of 256 tokens by 1.4 %.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        context_log_multiplicity: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend jointly among image tokens [B, N, D] and context tokens [B, L', D], and return both; without
        context, among the image tokens. `attention_mask` is unused; diffusers passes it to every processor.
        """
        count, bias = hidden_states.shape[1], None
        projections, norms = (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k)
        query, key, value = _heads(hidden_states, projections, norms, attn.heads)
        if encoder_hidden_states is not None:
            projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            norms = (attn.norm_added_q, attn.norm_added_k)
            context = _heads(encoder_hidden_states, projections, norms, attn.heads)
            query, key, value = (torch.cat(pair, dim=2) for pair in zip((query, key, value), context, strict=True))
            if context_log_multiplicity is not None:
                bias = _key_bias(context_log_multiplicity, count, query)
        tokens = _attend(query, key, value, bias).transpose(1, 2).flatten(2)
        linear, dropout = attn.to_out
        image = dropout(linear(tokens[:, :count]))
        if encoder_hidden_states is None:
            return image
        return image, tokens[:, count:] if attn.context_pre_only else attn.to_add_out(tokens[:, count:])


def use_weighted_attention(transformer: Any) -> None:
    """Install the processor in every attention layer of an SD3 transformer, in place."""
    names = {type(p).__name__ for p in transformer.attn_processors.values()}
    foreign = names - {"JointAttnProcessor2_0", WeightedJointAttention.__name__}
    if foreign:
        raise ValueError(
            f"The transformer uses the attention processors {sorted(foreign)}; only JointAttnProcessor2_0 is "
            "replaced. Undo them first (unfuse_qkv_projections, unload_ip_adapter)."
        )
    processor: Any = WeightedJointAttention()  # diffusers annotates a closed union
    transformer.set_attn_processor(processor)


def _heads(x: Tensor, projections: Sequence[Any], norms: Sequence[Any], heads: int) -> list[Tensor]:
    """Project [B, N, D] to query, key and value [B, heads, N, D / heads], normalised as in SD3.5 if the model is."""
    parts = [projection(x).unflatten(-1, (heads, -1)).transpose(1, 2) for projection in projections]
    return [part if norm is None else norm(part) for part, norm in zip(parts, (*norms, None), strict=True)]


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attend, softmax(q kᵀ / √d + bias) v, [B, heads, N, d]; written out on the CPU for few tokens, four times as
    fast.

    The shape alone decides, so that a replay takes its rollout's path.
    """
    if query.device.type != "cpu" or key.shape[2] > SHORT:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    with torch.autocast("cpu", enabled=False):
        q, k, v = (t if t.dtype == torch.float64 else t.float() for t in (query, key, value))
        logits = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
        weights = (logits if bias is None else logits + bias).softmax(-1)
        return (weights @ v).to(value.dtype)


def _key_bias(log_multiplicity: Tensor, image_tokens: int, query: Tensor) -> Tensor:
    """Additive attention bias [1, 1, 1, N + L'] from the context's [L']."""
    bias = F.pad(log_multiplicity, (image_tokens, 0))[None, None, None]
    # on the CPU a float32 mask is exact beside 16-bit queries, and misread beside float64 ones (torch 2.15)
    keep = query.device.type == "cpu" and query.dtype.itemsize == 2
    return bias.float() if keep else bias.to(query.dtype)
