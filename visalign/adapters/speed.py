# SPDX-License-Identifier: Apache-2.0
"""Faster execution of a network: compiled blocks, attention backends, channels-last convolutions."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils._triton import has_triton

from visalign.errors import UserError

from .graphs import CapturedPasses

RECOMPILE_LIMIT = 64
COMPILED_FROM = 100_000_000  # Parameters from which compiling pays by itself: it takes about a minute on a GPU
CAPTURED_BELOW = 20_000_000  # Parameters: a pass of fewer is launched more slowly than it is computed
CAPTURED = ("SD3Transformer2DModel",)  # Networks that were captured on a GPU, see tests/gpu/test_graphs.py
_COMPILED = "compiled_blocks"


def speed_up(
    module: nn.Module,
    *,
    compiled: bool | None = False,
    attention: str | None = None,
    channels_last: bool = False,
    vae: nn.Module | None = None,
) -> None:
    """Change how a network is executed, in place; its function stays the same.

    `module` is a network of diffusers with its adapters, or an `nn.ModuleDict` of several. With `compiled`
    each repeated block is compiled, so that one compilation serves all. None: on a GPU, compile a network of
    100 million parameters or more, and capture an SD3 below 20 million unless `attention` is set. `attention` is a
    backend of diffusers' dispatch (native, flash, sage, xformers, ...), `channels_last` of 2D convolution
    weights. The decoder of `vae` is compiled with the blocks on a GPU: 6.1 ms for an image of 512² in bfloat16
    on an H200, and 12.9 without.
    """
    for network in module.values() if isinstance(module, nn.ModuleDict) else [module]:
        if channels_last:
            for weight in (parameter for parameter in network.parameters() if parameter.ndim == 4):
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        if attention is not None:
            _set_attention(network, attention)
        if compiled or (compiled is None and _compiling_pays(network)):
            CompiledBlocks(network, _repeated_blocks(network))
            if isinstance(vae, AutoencoderKL) and vae.decoder.conv_in.weight.is_cuda:
                vae.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                CompiledBlocks(vae, [vae.decoder])
        elif compiled is None and attention is None and _capturing_pays(network):
            CapturedPasses(network)


class CompiledBlocks:
    """Repeated blocks of a network, compiled: one compilation serves all blocks of a kind.

    Each size compiles anew (dynamic ones took over 135 s on a GPU). If a block fails, all run eagerly, with a warning.
    """

    def __init__(self, network: nn.Module, blocks: Sequence[nn.Module]) -> None:
        if not blocks:
            kind = type(network).__name__
            raise UserError(f"model.compile is set, but {kind} declares no repeated blocks. Leave it out.")
        from torch._dynamo import config, exc  # 1.5 s

        # kinds of block × sizes × (gradient, none, adapters off) are more graphs than torch's limit of 8 a function,
        # behind which a block silently runs eagerly
        config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
        self.frees_activations = False  # Whether a block's output is cut from what made it, see `gradient_mode`
        self._eager, self._untraceable = False, exc.TorchDynamoException
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")  # in diffusers
        for block in blocks:
            block.compile(dynamic=False)
            block._compiled_call_impl = self._call(block, block._compiled_call_impl)
        network.__dict__[_COMPILED] = self

    def _call(self, block: Any, compiled: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._eager:
                return block._call_impl(*args, **kwargs)
            try:
                output = compiled(*args, **kwargs)
            except self._untraceable as error:
                self._eager = True
                reason = " ".join(str(error).split("\n\n")[0].split())
                warnings.warn(f"{type(block).__name__} runs without torch.compile: {reason}", stacklevel=2)
                return block._call_impl(*args, **kwargs)
            if not self.frees_activations:
                return output
            return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), output)

        return call


def _repeated_blocks(network: nn.Module) -> list[nn.Module]:
    names = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None) or ()
    return [part for part in network.modules() if type(part).__name__ in names]


def _parameter_count(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


def _compiling_pays(network: nn.Module) -> bool:
    """Return True on a GPU for a large network of known blocks, where torch has a compiler."""
    if not next(network.parameters()).is_cuda or _parameter_count(network) < COMPILED_FROM:
        return False
    if not (has_triton() and any(shutil.which(name) for name in ("cc", "gcc", "clang"))):
        warnings.warn("model.compile is off: torch.compile needs Triton and a C compiler (cc) here.", stacklevel=3)
        return False
    return bool(_repeated_blocks(network))


def _capturing_pays(network: nn.Module) -> bool:
    """Return True on an NVIDIA GPU for a small network of a known class, neither quantized nor recomputed."""
    weights = list(network.parameters())
    is_quantized = any(type(weight.data) is not Tensor or not weight.is_floating_point() for weight in weights)
    is_small = weights[0].is_cuda and torch.version.hip is None and _parameter_count(network) < CAPTURED_BELOW
    is_recomputed = getattr(network, "is_gradient_checkpointing", False)
    return is_small and not is_quantized and not is_recomputed and type(network).__name__ in CAPTURED


@contextmanager
def gradient_mode(network: nn.Module, learning: bool) -> Iterator[None]:
    """Run a network with or without gradient inside the block; detach the output of one without.

    Compiled blocks run the graph of training for both, since two round apart, by a log-ratio of 1.9e-4 in bfloat16
    (docs/evidence/gpu.md, section 2). Without `learning` each block frees its activations.
    """
    compiled: CompiledBlocks | None = network.__dict__.get(_COMPILED)
    if learning or compiled is None:
        with torch.set_grad_enabled(learning):
            yield
        return
    compiled.frees_activations = True
    try:
        with torch.enable_grad():
            yield
    finally:
        compiled.frees_activations = False


def _set_attention(network: nn.Module, backend: str) -> None:
    processors = [getattr(part, "processor", None) for part in network.modules()]
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        raise UserError(
            f"model.attention is {backend!r}, but no layer of this {type(network).__name__} takes a backend. Leave it "
            "out."
        )
    from diffusers.models.attention_dispatch import attention_backend

    try:
        with attention_backend():  # restores the process-wide default for other networks
            network.set_attention_backend(backend)  # type: ignore[operator]  # of diffusers' ModelMixin
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"model.attention is {backend!r}: {error}") from error
