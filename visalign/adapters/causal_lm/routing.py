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
    experts chooses. The arithmetic around it (softmax or sigmoid, groups, biases) stays the model's own.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [m for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module)]
        if not layers:
            raise UserError(
                f"rollout.routing_replay needs layers with a module `experts`, and {type(model).__name__} has none. "
                "Leave it out."
            )
        self._replayed: list[Tensor] | None = None
        self._recording: dict[int, Tensor] | None = None
        self._gradient_only = False
        for number, layer in enumerate(layers):
            entered: list[_TopK] = []
            enter = partial(self._enter, number, _count(cast("nn.Module", layer.experts)), entered)
            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(partial(self._leave, number, entered), always_call=True)
        self._layers = len(layers)

    @contextmanager
    def recorded(self, rows: int) -> Iterator[list[Tensor]]:
        """Record routes: a pass of [rows, S] tokens inside the block fills the list with [rows, S, L, k] int16."""
        routes_by_layer, recorded = dict[int, Tensor](), list[Tensor]()
        self._recording = routes_by_layer
        try:
            yield recorded
            if len(routes_by_layer) < self._layers:
                raise UserError(
                    f"{self._layers - len(routes_by_layer)} of {self._layers} layers with experts choose by "
                    "something else than a top-k over all of them. Leave rollout.routing_replay out."
                )
            by_layer = (routes_by_layer[layer] for layer in range(self._layers))
            recorded.append(torch.stack([r.view(rows, -1, r.shape[-1]) for r in by_layer], 2).short())
        finally:
            self._recording = None

    @contextmanager
    def replayed(self, routes: Tensor | None, *, recomputed: bool) -> Iterator[None]:
        """Replay routes: inside the block, tokens [b, S] go where `routes` [b, S, L, k] point, and at −1 (or
        without routes) where the router sends them. If layers are `recomputed` in the backward, which comes
        after the block, passes with gradient go on by these routes until the next block.
        """
        self._replayed = None if routes is None else [r.flatten(0, 1).long() for r in routes.unbind(2)]
        self._gradient_only = False
        try:
            yield
        finally:
            self._gradient_only = recomputed
            if not recomputed:
                self._replayed = None

    def _enter(self, number: int, experts: int, entered: list[_TopK], *_: Any) -> None:
        routes = None if self._gradient_only and not torch.is_grad_enabled() else self._replayed
        if routes is not None or self._recording is not None:
            entered.append(_TopK(experts, None if routes is None else routes[number]))
            entered[-1].__enter__()

    def _leave(self, number: int, entered: list[_TopK], *_: Any) -> None:
        if entered:
            mode = entered.pop()
            mode.__exit__(None, None, None)
            if self._recording is not None and mode.chosen is not None:
                self._recording[number] = mode.chosen


class _TopK(TorchFunctionMode):
    """Records, or replaces, the choice of a top-k over the experts."""

    def __init__(self, experts: int, routes: Tensor | None) -> None:
        super().__init__()
        self.experts, self.routes, self.chosen = experts, routes, cast("Tensor | None", None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self.experts:
            return result
        chosen = result.indices
        # with all experts in one group, the two best of the group are looked for first (DeepSeek-V3, GLM-4.5)
        if self.routes is not None and self.routes.shape[-1] == chosen.shape[-1]:
            routes = self.routes.to(chosen.device).view_as(chosen)
            chosen = torch.where(routes >= 0, routes, chosen)
            result = torch.return_types.topk((scores.gather(-1, chosen), chosen))
        self.chosen = chosen.detach().flatten(0, -2)
        return result


def _count(experts: nn.Module) -> int:
    """Return the number of experts of a module: submodules, or slices of its weights."""
    return len(experts) if isinstance(experts, nn.ModuleList) else next(experts.parameters()).shape[0]
