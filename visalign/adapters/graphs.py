# SPDX-License-Identifier: Apache-2.0
"""Passes of a small network that are captured as CUDA graphs and replayed.

Launching such a network's kernels from Python takes longer than running them (docs/evidence/gpu.md, section 8).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any
from weakref import ref

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from visalign.errors import UserError

OWN_FORWARD = "own_forward"
"""Attribute of a network with its own `forward`, where another stands before it."""
EAGER_PASSES = 2  # Of a kind before its capture: kernels are chosen, and a kind that stays rare costs nothing
KINDS, LEARNING_KINDS = 16, 4  # Graphs that are kept; those with a gradient hold activations


class CapturedPasses:
    """Replay the passes of a network on a GPU; those for which there is no memory run eagerly.

    A graph reads the weights where they lay at its capture. So a pass of other sizes, with swapped weights or with
    other adapters is of another kind, which has a graph of its own.
    """

    def __init__(self, network: nn.Module, device_type: str = "cuda") -> None:
        self._network, self._device_type = network, device_type
        self._has_memory = True
        self._counts: OrderedDict[Any, int] = OrderedDict()
        self._graphs: dict[bool, OrderedDict[Any, SamplingPass]] = {False: OrderedDict(), True: OrderedDict()}
        self._adapters: Any = None  # Names of the adapters for which `_weights` and `_layers` were looked up
        attribute = OWN_FORWARD if hasattr(network, OWN_FORWARD) else "forward"
        eager: Callable[..., Any] = getattr(network, attribute)

        @wraps(eager)
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = tree_flatten((args, kwargs))
            graph = self._graph(eager, leaves, tree) if self._takes(leaves) else None
            return eager(*args, **kwargs) if graph is None else graph(leaves)

        setattr(network, attribute, forward)
        network.__dict__["captured_passes"] = self

    def _takes(self, leaves: list[Any]) -> bool:
        from torch.distributed.fsdp import FSDPModule

        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return (
            self._has_memory
            and all(tensor.device.type == self._device_type for tensor in tensors)
            and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
            and not (self._network.training or isinstance(self._network, FSDPModule))
            # a counter of operations and torch.func see those of an eager pass
            and torch._C._len_torch_dispatch_stack() == 0
            and not torch._C._are_functorch_transforms_active()
        )

    def _graph(self, eager: Callable[..., Any], leaves: list[Any], tree: TreeSpec) -> SamplingPass | None:
        """Return the graph of this kind of pass, captured if it came often enough; None: run it eagerly."""
        if (names := tuple(getattr(self._network, "peft_config", ()))) != self._adapters:
            self._adapters, self._weights = names, list(self._network.parameters())
            self._layers = [part for part in self._network.modules() if isinstance(part, LoraLayer)]
        trained = [weight for weight in self._weights if weight.requires_grad] if torch.is_grad_enabled() else []
        graphs = self._graphs[bool(trained)]
        try:
            graph = graphs.get(kind := self._kind(leaves, tree, len(trained)))
        except TypeError:  # an argument that has no hash
            return None
        if graph is None:
            count = self._counts[kind] = self._counts.pop(kind, 0) + 1
            if len(self._counts) > 4 * KINDS:
                self._counts.popitem(last=False)
            if count <= EAGER_PASSES:
                return None
            try:
                capture = SamplingPass if not trained else partial(LearningPass, self._network, trained)
                graph = capture(eager, leaves, tree)
            except torch.OutOfMemoryError:
                self._has_memory = False
                warnings.warn("CUDA graphs are off: there is no memory for a captured pass.", stacklevel=3)
                return None
            graphs[kind] = graph
            if len(graphs) > (LEARNING_KINDS if trained else KINDS):
                graphs.popitem(last=False)
        graphs.move_to_end(kind)
        return None if graph.is_busy() else graph

    def _kind(self, leaves: list[Any], tree: TreeSpec, trained: int) -> Any:
        """Gather what a graph holds fixed: sizes, constants, addresses of weights, active adapters, autocast."""
        inputs = tuple(
            (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        )
        weights = tuple((weight.data_ptr(), weight.requires_grad if trained else None) for weight in self._weights)
        layers = tuple(
            (layer.disable_adapters, *layer.active_adapters, *layer.scaling.values()) for layer in self._layers
        )
        autocast = torch.is_autocast_enabled(self._device_type), torch.get_autocast_dtype(self._device_type)
        kind = str(tree), inputs, weights, layers, autocast, trained
        hash(kind)
        return kind


class SamplingPass:
    """A captured pass without gradient."""

    def __init__(self, eager: Callable[..., Any], leaves: list[Any], tree: TreeSpec) -> None:
        self._inputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        args, kwargs = tree_unflatten(self._inputs, tree)
        self._capture(lambda: eager(*args, **kwargs))

    def _capture(self, compute: Callable[[], Any]) -> None:
        self._graph, self._output = record(compute, self._device)

    def is_busy(self) -> bool:
        """Return True while a backward is to come that needs what the last replay left."""
        return False

    def __call__(self, leaves: list[Any]) -> Any:
        self._replay(leaves)
        return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, self._output)

    def _replay(self, leaves: list[Any]) -> None:
        for static, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(static, Tensor):
                static.copy_(leaf)
        self._graph.replay()


class LearningPass(SamplingPass):
    """A captured pass and its backward, with memory of their own: activations lie there from one to the other."""

    _values: list[Any]
    _tree: TreeSpec

    def __init__(
        self,
        network: nn.Module,
        trained: list[nn.Parameter],
        eager: Callable[..., Any],
        leaves: list[Any],
        tree: TreeSpec,
    ) -> None:
        self._network, self._trained, self._last = network, trained, ref(_Replay())
        super().__init__(eager, leaves, tree)

    def _capture(self, compute: Callable[[], Any]) -> None:
        aliases = {weight: nn.Parameter(weight.detach()) for weight in self._trained}

        def forward() -> list[Tensor]:
            with replaced(self._network, aliases):
                self._values, self._tree = tree_flatten(compute())
            return self._values

        def backward() -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(self._values, [*aliases.values()], self._slopes, allow_unused=True)

        self._graph, values = record(forward, self._device)
        self._output = [value.detach() for value in values]
        self._slopes = [torch.empty_like(value) for value in values]
        self._backward, gradients = record(backward, self._device, self._graph.pool())
        pairs = zip(self._trained, gradients, strict=True)
        self._used = [(weight, gradient) for weight, gradient in pairs if gradient is not None]

    def is_busy(self) -> bool:
        last = self._last()
        return last is not None and not last.is_done

    def __call__(self, leaves: list[Any]) -> Any:
        return tree_unflatten(list(_Captured.apply(self, leaves, *(weight for weight, _ in self._used))), self._tree)

    def replay(self, leaves: list[Any]) -> tuple[_Replay, tuple[Tensor, ...]]:
        """Replay the pass; return what its backward is known by, and its outputs."""
        self._replay(leaves)
        self._last = ref(replay := _Replay())
        return replay, tuple(value.clone() for value in self._output)

    def gradients(self, replay: _Replay, slopes: tuple[Tensor, ...]) -> Any:
        """Replay the backward of the last pass; return the gradients of the weights."""
        if self._last() is not replay:
            raise RuntimeError("A captured pass ran again before this second backward. Set model.compile=false.")
        for static, slope in zip(self._slopes, slopes, strict=True):
            static.copy_(slope)
        self._backward.replay()
        replay.is_done = True
        return torch._foreach_mul([gradient for _, gradient in self._used], 1.0)  # copies


class _Replay:
    is_done = False


class _Captured(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: LearningPass, leaves: list[Any], *used: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = graph
        ctx.replay, outputs = graph.replay(leaves)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        return None, None, *ctx.graph.gradients(ctx.replay, slopes)


@contextmanager
def replaced(network: nn.Module, aliases: Mapping[Any, nn.Parameter]) -> Iterator[None]:
    """Put aliases in the place of a network's weights inside the block.

    The node that adds up a weight's own gradients may belong to another stream, which may not take part in a capture.
    """
    replacements = [
        (part, name, weight)
        for part in network.modules()
        for name, weight in part.named_parameters(recurse=False)
        if weight in aliases
    ]
    try:
        for part, name, weight in replacements:
            part.register_parameter(name, aliases[weight])
        yield
    finally:
        for part, name, weight in replacements:
            part.register_parameter(name, weight)


def record(compute: Callable[[], Any], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture what a function computes, in the memory of an earlier capture; return its result, not yet computed."""
    graph = torch.cuda.CUDAGraph()
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # casts of weights belong into the graph
    try:
        with torch.cuda.stream(stream):
            # other threads may use the GPU meanwhile
            graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="thread_local")
            try:
                result = compute()
            finally:
                graph.capture_end()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch's generator and allocator may not recover from it
        reason = str(error.__context__ or error).partition("\n")[0]
        raise UserError(
            f"The network cannot be captured as a CUDA graph: {reason} Set model.compile=false."
        ) from error
    finally:
        torch.set_autocast_cache_enabled(is_cached)
    current.wait_stream(stream)
    return graph, result
