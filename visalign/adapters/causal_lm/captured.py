# SPDX-License-Identifier: Apache-2.0
"""Decode on a GPU by replaying one captured step: a static cache, and nothing read on the host for some tokens.

Launching the kernels of a step from Python takes far longer than running them: 3,150 tokens a second against 32,400 of
a captured step at Qwen3-0.6B's size (docs/evidence/gpu.md, section 7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import DynamicLayer, StaticCache

from visalign.text import Sampling, chosen_log_prob, log_distribution
from visalign.text.distribution import invert_cumulative

from .network import CausalNetwork, PromptCache

CHECK_EVERY = 16  # Tokens between two looks at which completions have ended
_BY_KEY_HEAD = "visalign_by_key_head"


def can_capture(network: CausalNetwork, cache: PromptCache, sampling: Sampling) -> bool:
    """Return True on a GPU for text, full attention, and sampling from the whole vocabulary."""
    layers = getattr(cache.keys, "layers", ())
    config = network.model.config.get_text_config()
    return (
        network.model.device.type == "cuda"
        and network.head is not None
        and network.takes_positions
        and cache.offset is None
        and not sampling.truncates
        and len(layers) > 0
        and all(type(layer) is DynamicLayer for layer in layers)
        and getattr(config, "attn_logit_softcapping", None) is None
    )


class CapturedDecoder:
    """Completions that grow by one token each at a time, on the device: `ids` [n, T] and `numbers` [3, n, T]."""

    def __init__(
        self,
        network: CausalNetwork,
        prompt: PromptCache,
        mask: Tensor,
        uniform: Tensor,
        limit: Sequence[int],
        sampling: Sampling,
    ) -> None:
        """Take the prompts' cache, their mask [n, S + T] (0 for the T tokens to come) and T numbers for each row."""
        (count, longest), device = uniform.shape, mask.device
        self._network, self._sampling, self._uniform = network, sampling, uniform
        self._cache: Any = StaticCache(network.model.config.get_text_config(), max_cache_len=mask.shape[1])
        for static, filled in zip(self._cache.layers, prompt.keys.layers, strict=True):
            static.update(filled.keys, filled.values)
        self._columns = torch.arange(mask.shape[1], device=device)
        self._column = torch.tensor([mask.shape[1] - longest], device=device)
        self._readable = mask.bool() | (self._columns >= self._column)
        self._position = mask.sum(1)
        # completions that have ended go on to be computed, but not past the context's end
        self._last_position = self._position + torch.tensor(limit, device=device) - 1
        self._step = torch.zeros(1, dtype=torch.long, device=device)
        self._token = torch.zeros(count, dtype=torch.long, device=device)
        self.ids = torch.zeros(count, longest, dtype=torch.long, device=device)
        self.numbers = torch.zeros(3, count, longest, device=device)  # log_prob, full_log_prob, entropy

    def draw(self, logits: Tensor) -> None:
        """Draw the next token of each row from logits [n, V]."""
        log_p = log_distribution(logits, self._sampling.scale)
        uniform = self._uniform.index_select(1, self._step)[:, 0]
        if self._sampling.greedy:
            token = log_p.argmax(-1)
        else:  # past the end where logits are NaN, which is looked for later
            token = invert_cumulative(log_p.double().exp().cumsum(-1), uniform).clamp(max=log_p.shape[1] - 1)
        chosen = chosen_log_prob(log_p, token)
        numbers = torch.stack((chosen.log_prob, chosen.log_prob, chosen.entropy)).float()
        self.numbers.index_copy_(2, self._step, numbers[..., None])
        self.ids.index_copy_(1, self._step, token[:, None])
        self._token.copy_(token)
        self._step.add_(1)

    def advance(self) -> None:
        """Read the newest tokens and draw the next ones; everything that changes is changed in place."""
        mask = (self._readable & (self._columns <= self._column))[:, None, None]
        features = self._network.next_features(self._token[:, None], mask, self._position[:, None], self._cache)
        self._column.add_(1)
        self._position.copy_(torch.minimum(self._position + 1, self._last_position))
        self.draw(self._network.logits(features))

    def steps(self) -> Iterator[Callable[[], Any]]:
        """Yield what advances by a token, endlessly: the second time it is captured, where there is a GPU."""
        if self.ids.device.type != "cuda":
            while True:
                yield self.advance
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()

        def warm_up() -> None:  # kernels that are chosen or allocate at first do so outside the graph
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self.advance()
            current.wait_stream(stream)

        yield warm_up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.advance()
        while True:
            yield graph.replay


@contextmanager
def attention_by_key_head(model: PreTrainedModel) -> Iterator[None]:
    """Compute attention without copies of keys and values for the query heads that share them, inside the block."""
    before: Any = model.config._attn_implementation
    AttentionInterface.register(_BY_KEY_HEAD, _attend_by_key_head)
    model.set_attn_implementation(_BY_KEY_HEAD)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend_by_key_head(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *, scaling: float, **unused: Any
) -> tuple[Tensor, None]:
    """Attend from one token [n, heads, 1, d] to keys and values [n, key heads, S, d]; the mask is True to be read."""
    count, heads, _, width = query.shape
    grouped = query.view(count, key.shape[1], heads // key.shape[1], width)
    scores = (grouped @ key.transpose(2, 3)).float() * scaling
    weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value).view(count, 1, heads, -1), None
