# SPDX-License-Identifier: Apache-2.0
"""A causal language model taken apart into trunk and head, so that log-probs need no tensor of logits.

The split is checked once against the model's own logits; a head that is more than a linear layer with a
scale and a soft-cap is used as it is, through the logits of the whole model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from visalign.core import fused_log_prob_entropy
from visalign.core.tokens.fused_head import LogProbEntropy
from visalign.errors import UserError
from visalign.vision.images import PatchedImage

from .images import QwenSight

STRIP = 16384  # rows of a 16-bit head that are lifted to float32 at a time


@dataclass(frozen=True)
class LinearHead:
    """logits = c·tanh(s (W h + b)/c), without c: s (W h + b); in float32 whatever the dtype of W."""

    layer: nn.Linear
    scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [*N, V] float32 of hidden states [*N, H], differentiable."""
        weight, bias = self.layer.weight, self.layer.bias
        with torch.autocast(hidden.device.type, enabled=False):
            if weight.dtype == torch.bfloat16 and weight.is_cuda and not torch.is_grad_enabled():
                flat = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype)
                product = torch.mm(flat, weight.t(), out_dtype=torch.float32)
                product = product.view(*hidden.shape[:-1], -1)
            elif weight.dtype == torch.float32:
                product = linear(hidden.float(), weight)
            else:
                product = torch.cat([linear(hidden.float(), part.float()) for part in weight.split(STRIP)], -1)
            if bias is not None:
                product = product + bias.float()
            product = product * self.scale if self.scale != 1 else product
            return product if self.soft_cap is None else (product / self.soft_cap).tanh() * self.soft_cap

    def log_prob_entropy(
        self, hidden: Tensor, target: Tensor, temperature: float, *, sum_p2: bool = False
    ) -> LogProbEntropy:
        """Log-prob and entropy over the full vocabulary without the logits; [N] of hidden states [N, H]."""
        # s·Wh/τ = Wh/(τ/s); under a cap the scale has to stand inside, on the hidden state
        inside = self.soft_cap is not None and self.scale != 1
        bias = self.layer.bias
        if inside:
            hidden, bias = hidden * self.scale, None if bias is None else bias * self.scale
        else:
            temperature /= self.scale
        options: dict[str, Any] = {"head_bias": bias, "temperature": temperature, "soft_cap": self.soft_cap}
        return fused_log_prob_entropy(hidden, self.layer.weight, target, sum_p2=sum_p2, **options)


@dataclass
class PromptCache:
    """Keys and values of the tokens so far, which samples share and leave."""

    keys: Any  # Cache of transformers
    offset: Tensor | None = None  # See `QwenSight.see`; None where positions count tokens

    def reorder(self, index: Tensor) -> None:
        """Keep the rows `index` [n], in place; repeats allowed."""
        self.keys.reorder_cache(index)
        self.offset = None if self.offset is None else self.offset[index]


class CausalNetwork:
    """Forward passes of a causal model on its device; `features` are last hidden states, or logits where
    `head` is None. The trunk runs under autocast in that dtype; `sight` reads images.
    """

    def __init__(
        self, model: PreTrainedModel, *, autocast: torch.dtype | None = None, sight: QwenSight | None = None
    ) -> None:
        self.model, self.autocast, self._sight = model, autocast, sight
        self._trunk: nn.Module = model.base_model if sight is None else sight.language
        self.takes_positions = "position_ids" in inspect.signature(self._trunk.forward).parameters
        self.head: LinearHead | None = None
        self.head = self._linear_head()
        if sight is not None and self.head is None:
            raise UserError(
                f"The language part and head of this {type(model).__name__} do not give the model's own logits, so it "
                "reads no images. Give only the tokenizer, for text."
            )

    @property
    def vocabulary(self) -> int:
        """V, entries of the head; may be more than the tokenizer has."""
        embedding: Any = self.model.get_input_embeddings()
        return embedding.weight.shape[0]

    def features(
        self,
        ids: Tensor,
        mask: Tensor,
        *,
        encoded_images: Sequence[Sequence[PatchedImage]] | None = None,
        cache: PromptCache | None = None,
        caching: bool = False,
    ) -> tuple[Tensor, PromptCache]:
        """Return ([b, S, H] hidden states or [b, S, V] logits, the cache, empty without `caching`) of tokens
        [b, S] after those in the cache. The mask [b, past + S] is 0 for padding; `encoded_images` are b lists.
        """
        out, offset = self._forward(ids, mask, encoded_images, cache, use_cache=caching)
        features = out.logits.float() if self.head is None else out.last_hidden_state
        return features, PromptCache(out.get("past_key_values"), offset)

    def next_features(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return hidden states [n, H] of tokens [n, 1] at positions [n, 1] after a static cache; mask [n, 1, 1, S]."""
        with torch.autocast(ids.device.type, self.autocast, cache_enabled=False) if self.autocast else nullcontext():
            out = self._trunk(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
        return out.last_hidden_state[:, -1]

    def hidden_states(
        self, ids: Tensor, mask: Tensor, depths: Sequence[float], images: Sequence[Sequence[PatchedImage]] | None
    ) -> Tensor:
        """Return [b, S, L, H] float32 behind these shares of the layers, 1 behind the last; see `features`."""
        out, _ = self._forward(ids, mask, images, None, use_cache=False, output_hidden_states=True)
        layers = len(out.hidden_states) - 1
        return torch.stack([out.hidden_states[round(depth * layers)].float() for depth in depths], 2)

    def _forward(
        self,
        ids: Tensor,
        mask: Tensor,
        encoded_images: Sequence[Sequence[PatchedImage]] | None,
        cache: PromptCache | None,
        **options: bool,
    ) -> tuple[Any, Tensor | None]:
        """The output of the trunk, or of the whole model without a linear head, and `PromptCache.offset`."""
        inputs: dict[str, Any] = {"attention_mask": mask, **options}
        offset = None
        if cache is not None:
            inputs["past_key_values"], offset = cache.keys, cache.offset
        with torch.autocast(ids.device.type, self.autocast) if self.autocast else nullcontext():
            if self._sight is not None and encoded_images is not None and any(map(len, encoded_images)):
                embedded, offset = self._sight.see(ids, mask, encoded_images)
                inputs |= embedded
            else:
                inputs["input_ids"] = ids
                if self.takes_positions:
                    # positions count real tokens, so padding on the left moves nothing
                    count = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                    inputs["position_ids"] = count if offset is None else count + offset
            return (self.model if self.head is None else self._trunk)(**inputs), offset

    def logits(self, features: Tensor) -> Tensor:
        """Logits [*N, V] float32 of features."""
        return features if self.head is None else self.head.logits(features)

    def _linear_head(self) -> LinearHead | None:
        """The head, if logits made from it are the model's own."""
        layer = self.model.get_output_embeddings()
        if type(layer) is not nn.Linear or self._trunk is self.model:
            return None
        config = self.model.config.get_text_config()
        ids = torch.arange(min(8, self.vocabulary), device=self.model.device)[None]
        mask = torch.ones_like(ids)
        # 16-bit models round their own logits to 8 or 11 bits
        allowed = 1e-4 if layer.weight.dtype == torch.float32 and not self.autocast else 2e-2
        with torch.no_grad():
            expected, _ = self.features(ids, mask)  # logits of the whole model, as there is no head yet
            self.head = LinearHead(layer)
            hidden, _ = self.features(ids, mask)
            self.head = None
        largest = expected.abs().max().item()
        for scale in _scales(config) if math.isfinite(largest) else ():
            head = LinearHead(layer, scale, getattr(config, "final_logit_softcapping", None))
            with torch.no_grad():
                logits = head.logits(hidden)
            if logits.shape == expected.shape and (logits - expected).abs().max() <= allowed * max(largest, 1e-3):
                return head
        return None


def _scales(config: Any) -> list[float]:
    """Factors that the family of this model may put on its logits (Granite divides, Cohere multiplies)."""
    divisor, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    if isinstance(divisor, int | float) and divisor > 0:
        return [1 / divisor, float(divisor)]
    return [float(factor)] if isinstance(factor, int | float) and factor > 0 else [1.0]


def enable_recomputation(model: PreTrainedModel) -> None:
    """Prepare a model for `recomputed_layers`."""
    # the name changed within transformers 5
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextmanager
def recomputed_layers(model: PreTrainedModel, active: bool) -> Iterator[None]:
    """Gradient checkpointing inside the block by the layers' own switch alone: dropout stays off."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if active else []
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
