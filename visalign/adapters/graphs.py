# SPDX-License-Identifier: Apache-2.0
"""Passes of a small network that are captured as CUDA graphs and replayed.

Launching such a network's kernels from Python takes longer than running them (docs/evidence/gpu.md, 2026-11-28).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import ref

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from visalign.errors import UserError

EAGER_PASSES = 2  # Of a kind before its capture: kernels are chosen, and a kind that stays rare costs nothing
GRAPHS = 16  # Graphs of passes without gradient, at most
LEARNING_GRAPHS = 8  # Graphs of passes with gradient, each with its activations
_OWN_FORWARD = "own_forward"


def replaceable_forward(network: nn.Module) -> Callable[..., Any]:
    """Return a network's `forward`, for what stands before it, so that `CapturedPasses` may still replace it."""
    forward: Callable[..., Any] = network.forward
    if _OWN_FORWARD in vars(network):  # something else stands before it
        return forward
    setattr(network, _OWN_FORWARD, forward)

    @wraps(forward)
    def current(*args: Any, **kwargs: Any) -> Any:
        return getattr(network, _OWN_FORWARD)(*args, **kwargs)

    return current


class CapturedPasses:
    """Replay the passes of a network on a GPU; those for which there is no memory run eagerly.

    A graph reads the weights where they lay at its capture. So a pass of other sizes, with swapped weights or with
    other adapters has a graph of its own. A copy of the network (`copy.deepcopy`) would run this one's weights.
    Graphs stay: the first one has the workspace of cuBLAS that the others read too.
    """

    def __init__(self, network: nn.Module, device_type: str = "cuda") -> None:
        self._network, self._device_type = network, device_type
        self._has_memory, self._stream, self._pool = True, None, None
        self._counts: OrderedDict[Any, int] = OrderedDict()
        self._graphs: dict[bool, dict[Any, Any]] = {False: {}, True: {}}
        self._adapters: Any = None  # Names of the adapters for which `_weights` and `_layers` were looked up
        attribute = _OWN_FORWARD if _OWN_FORWARD in vars(network) else "forward"
        eager: Callable[..., Any] = getattr(network, attribute)

        @wraps(eager)
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = tree_flatten((args, kwargs))
            graph = self._graph(eager, leaves, tree) if self._can_capture(leaves) else None
            return eager(*args, **kwargs) if graph is None else graph(leaves)

        setattr(network, attribute, forward)
        network.__dict__["captured_passes"] = self

    def _can_capture(self, leaves: list[Any]) -> bool:
        from torch.distributed.fsdp import FSDPModule

        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return (
            all(tensor.device.type == self._device_type for tensor in tensors)
            and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
            and not (self._network.training or isinstance(self._network, FSDPModule))
            # a counter of operations and torch.func see those of an eager pass
            and torch._C._len_torch_dispatch_stack() == 0
            and not (torch._C._are_functorch_transforms_active() or torch.is_inference_mode_enabled())
        )

    def _graph(self, eager: Callable[..., Any], leaves: list[Any], tree: TreeSpec) -> Any:
        """Return the graph of such a pass, captured if such passes came often enough; None: run it eagerly."""
        if (names := tuple(getattr(self._network, "peft_config", ()))) != self._adapters:
            self._adapters, self._weights = names, list(self._network.parameters())
            self._layers = [part for part in self._network.modules() if isinstance(part, LoraLayer)]
        is_reference = len(self._layers) > 0 and all(layer.disable_adapters for layer in self._layers)
        is_learning = torch.is_grad_enabled() and not is_reference
        trained = [weight for weight in self._weights if weight.requires_grad] if is_learning else []
        graphs, key = self._graphs[bool(trained)], self._key(leaves, tree)
        try:
            graph = graphs.get(key)
        except TypeError:  # an argument that has no hash
            return None
        if graph is None:
            count = self._counts[key] = self._counts.pop(key, 0) + 1
            if len(self._counts) > 4 * GRAPHS:
                self._counts.popitem(last=False)
            is_full = len(graphs) >= (LEARNING_GRAPHS if trained else GRAPHS)
            if count <= EAGER_PASSES or is_full or not self._has_memory or (trained and not self._has_room()):
                return None
            try:
                graph = graphs[key] = self._capture(eager, leaves, tree, trained)
            except torch.OutOfMemoryError:
                self._has_memory = False
                warnings.warn("There is no memory for more CUDA graphs: other passes run eagerly.", stacklevel=3)
                return None
        return None if trained and graph.awaits_backward() else graph

    def _has_room(self) -> bool:
        """Return True if passes so far left half of the memory free, as a graph keeps its activations."""
        if self._device_type != "cuda":
            return True
        device = self._weights[0].device
        return torch.cuda.max_memory_allocated(device) < torch.cuda.mem_get_info(device)[1] / 2

    def _key(self, leaves: list[Any], tree: TreeSpec) -> Any:
        """Gather what a graph holds fixed: sizes, constants, addresses of weights, active adapters, autocast."""
        inputs = tuple(
            (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        )
        is_learning = torch.is_grad_enabled()
        weights = tuple((weight.data_ptr(), is_learning and weight.requires_grad) for weight in self._weights)
        layers = tuple(
            (layer.disable_adapters, *layer.active_adapters, *layer.merged_adapters, *layer.scaling.values())
            for layer in self._layers
        )
        autocast = torch.is_autocast_enabled(self._device_type), torch.get_autocast_dtype(self._device_type)
        return str(tree), inputs, weights, layers, autocast

    def _capture(self, eager: Callable[..., Any], leaves: list[Any], tree: TreeSpec, trained: list[Any]) -> Any:
        if self._stream is None and self._device_type == "cuda":
            self._stream = torch.cuda.Stream(self._weights[0].device)
        inputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(inputs, tree)
        if trained:
            return LearningPass(self._network, trained, inputs, lambda: eager(*args, **kwargs), self._stream)
        graph, output = record(lambda: eager(*args, **kwargs), self._stream, self._pool)
        self._pool = graph.pool()  # such passes share their memory, since a replay's outputs are copied
        return SamplingPass(graph, inputs, output)


class SamplingPass:
    """A captured pass without gradient."""

    def __init__(self, graph: Any, inputs: list[Any], output: Any) -> None:
        self._graph, self._inputs, self._output = graph, inputs, output

    def __call__(self, leaves: list[Any]) -> Any:
        replay(self._graph, self._inputs, leaves)
        return tree_map_only(Tensor, Tensor.clone, self._output)


class LearningPass:
    """A captured pass and its backward, with memory of their own: activations lie there from one to the other."""

    def __init__(
        self,
        network: nn.Module,
        trained: list[nn.Parameter],
        inputs: list[Any],
        compute: Callable[[], Any],
        stream: Any,
    ) -> None:
        aliases = {weight: nn.Parameter(weight.detach()) for weight in trained}
        self._values: list[Any] = []
        self._tree: Any = None

        def forward() -> list[Tensor]:
            with aliased_weights(network, aliases):
                self._values, self._tree = tree_flatten(compute())
            return self._values

        def backward() -> tuple[Tensor | None, ...]:
            with torch.autocast(trained[0].device.type, enabled=False):  # as an eager backward runs
                return torch.autograd.grad(self._values, [*aliases.values()], self._grad_outputs, allow_unused=True)

        self._inputs, self._last = inputs, ref(_Token())
        self._forward, values = record(forward, stream)
        self._output = [value.detach() for value in values]
        self._grad_outputs = [torch.empty_like(value) for value in values]
        self._backward, gradients = record(backward, stream, self._forward.pool())
        pairs = [pair for pair in zip(trained, gradients, strict=True) if pair[1] is not None]
        self._used, self._gradients = [weight for weight, _ in pairs], [gradient for _, gradient in pairs]

    def awaits_backward(self) -> bool:
        """Return True while a backward is to come that needs the activations of the last replay."""
        last = self._last()
        return last is not None and not last.is_used

    def __call__(self, leaves: list[Any]) -> Any:
        return tree_unflatten(list(_Function.apply(self, leaves, *self._used)), self._tree)

    def outputs(self, leaves: list[Any]) -> tuple[_Token, tuple[Tensor, ...]]:
        """Replay the pass; return a token for its backward, and the outputs."""
        replay(self._forward, self._inputs, leaves)
        self._last = ref(token := _Token())
        return token, tuple(value.clone() for value in self._output)

    def gradients(self, token: _Token, grad_outputs: tuple[Tensor, ...]) -> Any:
        """Replay the backward of the last pass, once; return the gradients of the weights."""
        if token.is_used or self._last() is not token:
            raise RuntimeError("A captured pass has one backward, before it runs again. Set model.compile=false.")
        token.is_used = True
        replay(self._backward, self._grad_outputs, grad_outputs)
        return torch._foreach_mul(self._gradients, 1.0)  # copies


class _Token:
    is_used = False


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: LearningPass, leaves: list[Any], *used: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = graph
        ctx.token, outputs = graph.outputs(leaves)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return None, None, *ctx.graph.gradients(ctx.token, grad_outputs)


@contextmanager
def aliased_weights(network: nn.Module, aliases: Mapping[Any, nn.Parameter]) -> Iterator[None]:
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


def replay(graph: Any, inputs: list[Any], values: Any) -> None:
    """Compute a graph's output anew from other values of its inputs."""
    for static, value in zip(inputs, values, strict=True):
        if isinstance(static, Tensor):
            static.copy_(value)
    graph.replay()


def record(compute: Callable[[], Any], stream: Any, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture what a function computes, in the memory of an earlier capture; return its result, not yet computed."""
    graph, is_cached = torch.cuda.CUDAGraph(), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # casts of weights belong into the graph
    try:
        # other threads may use the GPU meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = compute()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch's generator and allocator may not recover from it
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        reason = str(cause).partition("\n")[0].rstrip(".")
        raise UserError(
            f"The network cannot be captured as a CUDA graph: {reason}. Set model.compile=false."
        ) from error
    finally:
        torch.set_autocast_cache_enabled(is_cached)
    return graph, result
