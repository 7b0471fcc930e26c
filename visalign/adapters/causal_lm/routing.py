# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: which ones tokens went to, and sending them there again (routing replay)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from visalign.errors import UserError


class ExpertRouting:
    """Records the experts that the sparse layers of a model choose, or chooses those of a record again; the
    weights of the chosen ones are the present router's, with gradient (GSPO, arXiv 2507.18071, section 5.3).

    A sparse layer is a module with a child `experts`, inside of which a top-k over as many numbers as it has
    experts chooses: whatever arithmetic stands around it, softmax or sigmoid, groups, biases, stays the
    model's own.

    Raises:
        UserError: the model has no such layer.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [m for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module)]
        if not layers:
            raise UserError(
                f"rollout.routing_replay sends tokens to the experts that they went to, and "
                f"{type(model).__name__} has no layers with a module `experts`. Leave it out."
            )
        self._given: list[Tensor] | None = None
        self._seen: dict[int, Tensor] | None = None
        self._gradient_only = False
        for number, layer in enumerate(layers):
            entered: list[_TopK] = []
            enter = partial(self._enter, number, _count(cast("nn.Module", layer.experts)), entered)
            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(partial(self._leave, number, entered), always_call=True)
        self._layers = len(layers)

    @contextmanager
    def recorded(self, rows: int) -> Iterator[list[Tensor]]:
        """Record routes: inside the block, a forward pass of [rows, S] tokens fills the list with [rows, S,
        L, k] int16."""
        routes_by_layer, recorded = dict[int, Tensor](), list[Tensor]()
        self._seen = routes_by_layer
        try:
            yield recorded
            if len(routes_by_layer) < self._layers:
                raise UserError(
                    f"{self._layers - len(routes_by_layer)} of {self._layers} layers with experts choose by "
                    "something else than a top-k over all of them. Leave rollout.routing_replay out."
                )
            by_layer = [
                routes_by_layer[layer].view(rows, -1, routes_by_layer[layer].shape[-1])
                for layer in range(self._layers)
            ]
            recorded.append(torch.stack(by_layer, 2).short())
        finally:
            self._seen = None

    @contextmanager
    def replayed(self, routes: Tensor | None, *, recomputed: bool) -> Iterator[None]:
        """Replay routes: inside the block, tokens [b, S] go where `routes` [b, S, L, k] point, and at −1
        where the router sends them.

        Args:
            routes: None: all go where the router sends them.
            recomputed: layers are made again in the backward, which comes after the block: until the next
                one, passes with gradient go on by these routes.
        """
        self._given = None if routes is None else [r.flatten(0, 1).long() for r in routes.unbind(2)]
        self._gradient_only = False
        try:
            yield
        finally:
            self._gradient_only = recomputed
            if not recomputed:
                self._given = None

    def _enter(self, number: int, experts: int, entered: list[_TopK], *_: Any) -> None:
        routes = self._given
        if self._gradient_only and not torch.is_grad_enabled():
            routes = None
        if routes is not None or self._seen is not None:
            entered.append(_TopK(experts, None if routes is None else routes[number]))
            entered[-1].__enter__()

    def _leave(self, number: int, entered: list[_TopK], *_: Any) -> None:
        if entered:
            mode = entered.pop()
            mode.__exit__(None, None, None)
            if self._seen is not None and mode.seen is not None:
                self._seen[number] = mode.seen


class _TopK(TorchFunctionMode):
    """Remembers, or puts others in the place of, what a top-k over the experts chooses."""

    def __init__(self, experts: int, routes: Tensor | None) -> None:
        super().__init__()
        self.experts, self.given, self.seen = experts, routes, cast("Tensor | None", None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self.experts:
            return result
        chosen = result.indices
        # with all experts in one group, the two best of the group are looked for first (DeepSeek-V3, GLM-4.5)
        if self.given is not None and self.given.shape[-1] == chosen.shape[-1]:
            routes = self.given.to(chosen.device).view_as(chosen)
            chosen = torch.where(routes >= 0, routes, chosen)
            result = torch.return_types.topk((scores.gather(-1, chosen), chosen))
        self.seen = chosen.detach().flatten(0, -2)
        return result


def _count(experts: nn.Module) -> int:
    """Return the number of experts of a module: submodules, or slices of its weights."""
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    return next(experts.parameters()).shape[0]
