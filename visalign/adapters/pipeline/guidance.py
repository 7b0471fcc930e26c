# SPDX-License-Identifier: Apache-2.0
"""The network inside a pipeline's call: counted, and its unconditional half kept out of the gradient."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from visalign.adapters.graphs import replaceable_forward
from visalign.adapters.speed import gradient_mode
from visalign.interfaces import ForwardCount

from .families import Family


@contextmanager
def silent(pipe: Any = None, level: int = logging.ERROR) -> Iterator[None]:
    """Silence diffusers below `level` inside the block, or a `pipe` entirely; exceptions pass.

    Of a pipe only its own logger is switched, as a level for all of diffusers empties every logger's cache.
    """
    if pipe is None or hasattr(pipe, "blocks"):  # blocks of a modular one speak for themselves
        logger = logging.getLogger("diffusers")
        before = logger.level
        logger.setLevel(level)
        try:
            yield
        finally:
            logger.setLevel(before)
        return
    logger = logging.getLogger(type(pipe).__module__)
    with patch.object(logger, "disabled", True):
        yield


class Halves:
    """Wraps the `forward` of a pipeline's networks while a velocity is computed, and counts passes in latents.

    The unconditional half has no gradient. Two calls are told apart by order; one batch of both is split, also without
    gradient, so that a replay takes the rollout's path.
    """

    def __init__(self, networks: Mapping[str, Any], family: Family, count: ForwardCount) -> None:
        self._family, self._count = family, count
        self._samples: int | None = None
        self.apart = True  # Split the halves; False leaves the pipeline's own batch (then both carry gradient)
        for network in networks.values():
            network.forward = self._before(network, replaceable_forward(network))

    @contextmanager
    def velocity_of(self, samples: int, guided: bool) -> Iterator[None]:
        """Call the networks for one velocity of `samples` inside the block; `guided`: it has two halves."""
        self._samples, self._guided, self._calls = samples, guided, 0
        try:
            yield
        finally:
            self._samples = None

    def _before(self, network: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)  # blocks of modular pipelines look for the arguments that it takes
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._samples is None:
                return forward(*args, **kwargs)
            args, kwargs = _cast(args, network.dtype), _cast(kwargs, network.dtype)
            number, self._calls = self._calls, self._calls + 1
            joined = self._guided and self._family.guidance == "concatenated"
            if joined and self.apart:
                halves = [self._half(network, forward, args, kwargs, half) for half in (0, 1)]
                return tuple(
                    torch.cat(parts) if isinstance(parts[0], Tensor) else [item for part in parts for item in part]
                    for parts in zip(*halves, strict=True)
                )
            is_null = self._guided and not joined and number == 1
            return self._counted(network, forward, args, kwargs, 2 if joined else 1, is_null)

        return called

    def _half(self, network: Any, forward: Callable[..., Any], args: Any, kwargs: Any, half: int) -> Any:
        args, kwargs = self._part(args, half), {n: self._part(v, half, n) for n, v in kwargs.items()}
        return self._counted(network, forward, args, kwargs, 1, half == self._family.unconditional)

    def _counted(
        self, network: Any, forward: Callable[..., Any], args: Any, kwargs: Any, halves: int, is_null: bool
    ) -> Any:
        """Run the network, without gradient for the unconditional half, and count its latents."""
        assert self._samples is not None
        learning = torch.is_grad_enabled() and not is_null
        with gradient_mode(network, learning):
            out = forward(*args, **kwargs)
        if learning:
            self._count.forward_backward += halves * self._samples
            return out
        self._count.forward += halves * self._samples
        return tree_map_only(Tensor, Tensor.detach, out)

    def _part(self, value: Any, half: int, name: str = "") -> Any:
        count = self._samples
        assert count is not None
        axis = self._family.batch_axis.get(name, 0)
        if isinstance(value, Tensor):
            has_both = value.ndim > axis and value.shape[axis] == 2 * count
            return value.narrow(axis, half * count, count) if has_both else value
        if isinstance(value, dict):
            return {key: self._part(item, half, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            if len(value) == 2 * count and isinstance(value, list):
                return value[half * count : (half + 1) * count]
            return type(value)(self._part(item, half) for item in value)
        return value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast latents and embeddings to the network's dtype, where encoders have another; times stay."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.ndim > 1 else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return type(value)(_cast(item, dtype) for item in value) if isinstance(value, list | tuple) else value
