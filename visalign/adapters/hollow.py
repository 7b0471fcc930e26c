# SPDX-License-Identifier: Apache-2.0
"""Pipelines without weights: only shapes, from which passes and memory are counted instead of run.

Networks hold their parameters on the meta device; a call comes back with random numbers of the right shape, so that
tokenisation, packing, masks and guidance are the policy's own.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from diffusers import ConfigMixin, DiffusionPipeline, TorchAoConfig
from diffusers.modular_pipelines import ComponentSpec
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from visalign.adapters.pipeline.quantization import FourBits, by_shapes_alone

META = torch.device("meta")
LAYOUT = {"img_mask"}  # arguments of networks whose values give positions in a sequence, and so its length
SIZES = {"grid_thw", "cu_seqlens"}
"""Arguments of layers whose values are read: which of a tower's patches belong together."""
SMALL = 50e6  # bytes below which text encoders are loaded


@dataclass
class Trace:
    """Operations and bytes of the networks of a hollow pipeline."""

    flops: dict[str, int] = field(default_factory=dict)
    """Part of the pipeline -> FLOPs of its matrix products since `clear`, forward only (a multiply-add is two)."""
    held: int = 0  # Bytes that the backward of a network's last call with gradient would find stored, without weights
    largest_block: int = 0  # Bytes that one block recomputes at a time under gradient checkpointing; 0 without

    def clear(self) -> None:
        """Reset the counts."""
        self.flops.clear()
        self.held = self.largest_block = 0


@contextmanager
def hollow_pipelines() -> Iterator[Trace]:
    """Let diffusers' pipelines load without weights inside the block; outside of it they cannot be called.

    Tokenizers, schedulers and text encoders below 50 MB are loaded as they are.
    """
    trace, original, own_load = Trace(), DiffusionPipeline.__dict__["from_pretrained"], ComponentSpec.load
    diffusers: Any = importlib.import_module("diffusers")

    def from_pretrained(cls: Any, folder: str, *, dtype: Any, quantization_config: Any = None, **options: Any) -> Any:
        rounded = {} if quantization_config is None else quantization_config.quant_mapping
        index: Any = cls.load_config(folder)
        dtypes: Mapping[str, torch.dtype] = dtype if isinstance(dtype, Mapping) else {"default": dtype}
        parts = {
            name: _hollow(folder, name, entry, dtypes.get(name, dtypes["default"]), rounded.get(name), trace)
            for name, entry in index.items()
            if isinstance(entry, list) and entry[0] and name not in options
        }
        parts = {name: part for name, part in parts.items() if part is not None}
        return original.__func__(getattr(diffusers, index["_class_name"]), folder, dtype=dtype, **parts, **options)

    def load(self: Any, *, dtype: torch.dtype, quantization_config: Any = None, **options: Any) -> Any:
        entry = [self.type_hint.__module__.partition(".")[0], self.type_hint.__name__]
        part: Any = _hollow(self.pretrained_model_name_or_path, self.name, entry, dtype, quantization_config, trace)
        if part is None:
            return own_load(self, dtype=dtype, **options)
        part._diffusers_load_id = self.load_id  # by which diffusers knows it
        return part

    with (
        patch.object(DiffusionPipeline, "from_pretrained", classmethod(from_pretrained)),
        patch.object(ComponentSpec, "load", load),
        patch.object(functional, "scaled_dot_product_attention", _attention_of()),
        by_shapes_alone(),
    ):
        yield trace


@contextmanager
def traced_network(network: Any) -> Iterator[Trace]:
    """Trace calls of a network on the meta device inside the block, under the CPU's autocast; complete behind it."""
    trace, autocast = Trace(), torch.autocast
    weights = _storages(network)

    def cpu_autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return autocast(device_type.replace("meta", "cpu"), *args, **kwargs)

    with ExitStack() as stack:
        for inner in list(network.modules())[1:]:
            stack.callback(inner.register_forward_pre_hook(_beside_meta, with_kwargs=True).remove)
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", _attention_of()))
        stack.enter_context(patch.object(torch, "autocast", cpu_autocast))
        stack.enter_context(patch.object(network, "forward", _under_autocast(network, network.forward)))
        counter = stack.enter_context(FlopCounterMode(display=False))
        stored_bytes = stack.enter_context(stored(weights))
        stack.enter_context(_checkpoints(network, weights, trace))
        yield trace
    trace.flops["network"], trace.held = counter.get_total_flops(), sum(stored_bytes.values())


def _hollow(
    folder: str, name: str, entry: list[str], dtype: torch.dtype, quantization: Any, trace: Trace
) -> nn.Module | None:
    """Build a traced part on the meta device; None without weights, or for a text encoder small enough to be run."""
    sizes = [file.stat().st_size for file in (Path(folder) / name).glob("*.safetensors")]
    kind: Any = getattr(importlib.import_module(entry[0]), entry[1], None)
    loader: Any = kind
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        return None
    if name.startswith("text_encoder") and 0 < sum(sizes) < SMALL:
        return None
    is_diffusers = issubclass(kind, ConfigMixin)
    with META:
        if is_diffusers:
            part: Any = loader.from_config(loader.load_config(folder, subfolder=name))
        else:
            part = loader(loader.config_class.from_pretrained(folder, subfolder=name))
    always = is_diffusers or dtype == torch.float16  # as the two libraries have it
    names = ("_keep_in_fp32_modules_strict", *["_keep_in_fp32_modules"] * always)
    float32_modules = {module for attribute in names for module in getattr(part, attribute, None) or ()}
    for path, weight in part.named_parameters():
        weight.data = weight.data.to(torch.float32 if float32_modules & set(path.split(".")) else dtype)
    part = nn.Module.to(part, META).eval()
    _round(part, quantization)
    return _traced(part, name, trace)


def _round(part: Any, config: Any) -> None:
    """Round the linear layers in place as diffusers does; NF4 keeps two weights a byte and a float32 scale for 64."""
    float32_names = set(getattr(part, "_keep_in_fp32_modules", None) or ())
    linear = [(path, layer) for path, layer in part.named_modules() if isinstance(layer, nn.Linear)]
    if isinstance(config, TorchAoConfig):
        from torchao.quantization import quantize_  # type: ignore[import-not-found]  # optional

        part.hf_quantizer = SimpleNamespace(quantization_config=config)  # which peft reads
        for path, layer in linear:
            if not float32_names & set(path.split(".")):
                quantize_(layer, config.quant_type)
    elif isinstance(config, FourBits):
        four_bits = SimpleNamespace(load_in_4bit=True, bnb_4bit_compute_dtype=config.dtype)
        part.hf_quantizer = SimpleNamespace(quantization_config=four_bits)
        for path, layer in linear:
            if any(key + "." in path or key == path for key in float32_names):
                continue
            count = layer.weight.numel()
            packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device=META)
            layer.weight = nn.Parameter(packed, requires_grad=False)
            layer.register_buffer("absmax", torch.empty(-(-count // 64), device=META))
            layer.register_buffer("code", torch.empty(16, device=META))
            layer.__dict__["forward"] = partial(_FourBitsProduct.of, layer, config.dtype)


class _FourBitsProduct(torch.autograd.Function):
    """x W^T of a weight that is unpacked for the product and again for its backward, which is only counted."""

    @staticmethod
    def of(layer: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
        unpacked = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device=x.device)
        product: Any = _FourBitsProduct.apply(x.to(dtype), unpacked)
        return (product if layer.bias is None else product + layer.bias.to(dtype)).to(x.dtype)

    @staticmethod
    def forward(ctx: Any, x: Tensor, unpacked: Tensor) -> Tensor:
        return functional.linear(x, unpacked)


def _traced(part: Any, name: str, trace: Trace) -> nn.Module:
    """Return the part, which claims to be on the CPU and is called with tensors from there."""
    kind = type(part)
    on_cpu = {"device": property(lambda _: torch.device("cpu")), "to": lambda self, *_, **__: self}
    part.__class__ = type(kind.__name__, (kind,), {**on_cpu, "__module__": kind.__module__})
    forward_of_part, encodes = part.forward, name.startswith(("text_encoder", "image_encoder"))
    weights = _storages(part)

    @functools.wraps(forward_of_part)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if encodes:
            kwargs.pop("attention_mask", None)  # whose numbers would decide which kernel, not which shape
            if "position_ids" in kwargs:  # Qwen3-VL looks for packed texts unless an axis has its own
                kwargs["position_ids"] = kwargs["position_ids"].expand(3, -1, -1)
        layout = {key: kwargs.pop(key) for key in LAYOUT & kwargs.keys()}
        args, kwargs = tree_map(_to_meta, (args, kwargs))
        kwargs |= layout
        call, grad = _under_autocast(part, forward_of_part), torch.is_grad_enabled() and not encodes
        weights.update(_storages(part))  # adapters came after
        with (
            FlopCounterMode(display=False) as counter,
            torch.set_grad_enabled(grad),
            stored(weights) as stored_bytes,
            _checkpoints(part, weights, trace) if grad else nullcontext(),
        ):
            out = call(*args, **kwargs)
        if grad:
            trace.held = sum(stored_bytes.values())
        trace.flops[name] = trace.flops.get(name, 0) + counter.get_total_flops()
        return tree_map(_to_numbers, out)

    part.forward = forward
    for inner in list(part.modules())[1:]:
        inner.register_forward_pre_hook(_beside_meta, with_kwargs=True)
    if name == "prompt_upsampler":  # its answer as long as what it was asked, instructions included
        part.generate = lambda input_ids, **_: torch.cat([input_ids, input_ids], 1)
    if name == "vae":
        encode = part.encode

        def encoded(x: Tensor, *args: Any, **kwargs: Any) -> SimpleNamespace:
            out = encode(_to_meta(x), *args, **kwargs)
            latents = out.latent_dist.mode() if hasattr(out, "latent_dist") else out.latent
            return SimpleNamespace(latents=_to_numbers(latents))  # which pipelines that edit take

        part.encode = encoded
    return part


def _storages(part: nn.Module) -> set[int]:
    return {weight.untyped_storage()._cdata for weight in part.parameters()}


def _beside_meta(_: Any, args: Any, kwargs: Any) -> Any:
    """Move arguments to the meta device where one of them is (masks of a `LAYOUT` go with latents), but `SIZES`."""
    if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
        return args, kwargs
    sizes = {key: kwargs[key] for key in SIZES & kwargs.keys()}
    return tree_map(_to_meta, args), tree_map(_to_meta, kwargs) | sizes


def _under_autocast(part: nn.Module, original_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call; under autocast, which knows no meta device, it runs on fake tensors of a CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return original_forward(*args, **kwargs)
        mode, fakes = FakeTensorMode(), dict[int, FakeTensor]()

        def fake(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_meta):
                return value
            if id(value) not in fakes:  # one tensor at two places stays one
                fakes[id(value)] = FakeTensor(mode, value, torch.device("cpu"))
            return fakes[id(value)]

        def to_meta(value: Any) -> Any:  # `.to` of a fake tensor would be a fake one
            return torch.empty(value.shape, dtype=value.dtype, device=META) if isinstance(value, FakeTensor) else value

        weights = {name: fake(value) for name, value in [*part.named_parameters(), *part.named_buffers()]}
        args, kwargs = tree_map(fake, (args, kwargs))
        with patch.object(part, "forward", original_forward), mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of slower kernels, which run elsewhere
            return tree_map(to_meta, functional_call(part, weights, args, kwargs))

    return call


@contextmanager
def stored(weights: set[int]) -> Iterator[dict[int, int]]:
    """Yield storage -> bytes of what autograd keeps inside the block, each once, without weights."""
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in weights:
            alive.append(value)
            sizes[storage._cdata] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        yield sizes


@contextmanager
def _checkpoints(part: Any, weights: set[int], trace: Trace) -> Iterator[None]:
    """Let checkpointed layers store only their inputs inside the block; `trace.largest_block` is updated."""
    if not any(getattr(m, "gradient_checkpointing", False) for m in part.modules()):
        yield
        return

    def block(call: Callable[..., Any], *args: Any) -> Any:
        inputs = [a for a in args if isinstance(a, Tensor)]
        with stored(weights) as stored_bytes:
            out = call(*args)
        trace.largest_block = max(trace.largest_block, sum(stored_bytes.values()))
        return tree_map(lambda o: _Kept.apply(o, *inputs) if isinstance(o, Tensor) else o, out)

    with ExitStack() as stack:
        for module in part.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                stack.enter_context(patch.object(module, "_gradient_checkpointing_func", block))
        yield


class _Kept(torch.autograd.Function):
    """The identity, which keeps other tensors."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return value.view_as(value)


class _Attention(torch.autograd.Function):
    """Attention as fused kernels keep it: queries, keys, values, output, and a number per row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        times = query.shape[-3] // key.shape[-3]  # above 1 where queries share keys, which are kept once
        every = [x if times == 1 else x.repeat_interleave(times, -3) for x in (key, value)]
        scores = torch.matmul(query, every[0].transpose(-1, -2))
        out = torch.matmul(scores, every[1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


def _attention_of() -> Callable[..., Any]:
    sdpa = functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (query.is_meta or isinstance(query, FakeTensor)):
            return sdpa(query, key, value, *args, **kwargs)
        if isinstance(query, FakeTensor) and torch.is_autocast_enabled("cpu"):
            low = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(low), key.to(low), value.to(low)
        return _Attention.apply(query, key, value)  # type: ignore[return-value]

    return attention


def _to_meta(value: Any) -> Any:
    return value.to(META) if isinstance(value, Tensor) else value


def _to_numbers(value: Any) -> Any:
    if not (isinstance(value, Tensor) and (value.is_meta or isinstance(value, FakeTensor))):
        return value
    drawn = torch.rand if value.is_floating_point() else torch.zeros
    return drawn(value.shape, dtype=value.dtype)
