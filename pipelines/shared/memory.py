# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights and of what an optimizer keeps beside them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

GB = 1e9


def weight_bytes(part: nn.Module, without: Collection[int] = ()) -> int:
    """Of parameters and buffers, each once.

    Args:
        part: also on the meta device.
        without: `id` of parameters that are counted elsewhere.
    """
    held = {id(value): value for value in [*part.parameters(), *part.buffers()] if id(value) not in without}
    return sum(map(_stored_bytes, held.values()))


def _stored_bytes(value: Any) -> int:
    """Of a tensor, or of the tensors that a rounded one is made of; bitsandbytes keeps scales beside it."""
    if is_traceable_wrapper_subclass(value):
        return sum(_stored_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    state = getattr(value, "quant_state", None)
    beside = () if state is None else (state.absmax, state.code, *_second_scales(state))
    return value.numel() * value.element_size() + sum(map(_stored_bytes, beside))


def _second_scales(state: Any) -> tuple[Any, ...]:
    return (state.offset, state.state2.absmax, state.state2.code) if state.nested else ()


def dtype_name(part: nn.Module, without: Collection[int] = ()) -> str:
    """The dtype that most of a part's parameters have, such as bfloat16."""
    sizes: dict[str, int] = {}
    for value in part.parameters():
        if id(value) not in without:
            name = str(value.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + value.numel()
    return max(sizes, key=lambda name: sizes[name]) if sizes else "trained"


def trained_memory(trained: Sequence[Tensor], *, ema: bool, copies: int) -> dict[str, float]:
    """GB of weights that are trained and of what AdamW and the averages keep of them.

    Args:
        trained: the parameters.
        ema: whether they are averaged.
        copies: float32 copies that the algorithm keeps: a reference, an old policy.
    """
    numbers = sum(weight.numel() for weight in trained)
    stored = sum(weight.numel() * weight.element_size() for weight in trained)
    masters = 4 * sum(weight.numel() for weight in trained if weight.element_size() < 4)
    sizes = stored, masters, stored, 8 * numbers, 4 * numbers * ema, 4 * numbers * copies
    return {name: size / GB for name, size in zip(TRAINED, sizes, strict=True)}


TRAINED = (
    "trained_weights",
    "float32_masters",
    "gradients",
    "adamw_moments",
    "averaged_weights",
    "reference_and_old_policy",
)
"""The parts of `trained_memory`."""


def on_each_device(
    memory: Mapping[str, float], network: Collection[str], *, world: int, sharding: bool, spare: float = 0.0
) -> dict[str, float]:
    """GB that each of several processes holds, by part.

    Without sharding that is everything, and the gradients once more, as they are exchanged (DDP's buckets).
    With FSDP2 it is a share of the network and of what belongs to its training; while nothing is learnt each
    holds the network whole besides.

    Args:
        memory: of a run in one process.
        network: the parts that are weights of the trained network, frozen ones too.
        world: processes.
        sharding: FSDP2 and not DDP.
        spare: GB of `memory` that are free while nothing is learnt.
    """
    if world == 1:
        return dict(memory)
    if not sharding:
        return {**memory, "gradients_exchanged": memory["gradients"]}
    shared = {*network, *TRAINED}
    found = {name: size / world if name in shared else size for name, size in memory.items()}
    return found | {"network_gathered": max(0.0, sum(memory[name] for name in network) - spare)}


def judge_bytes(judges: Mapping[str, Any]) -> tuple[int, list[str]]:
    """(bytes of the networks that judges hold, each once; judges that fetch theirs at the first score).

    Args:
        judges: label -> judge; one that asks a server holds none.
    """
    found: dict[int, nn.Module] = {}
    later = []
    for label, judge in judges.items():
        held = list(_networks(judge, set()))
        found |= {id(network): network for network in held}
        if not held and "device" in inspect.signature(type(judge)).parameters:
            later.append(f"the network of {label}")
    return sum(weight_bytes(network) for network in found.values()), later


def _networks(value: Any, seen: set[int]) -> Iterator[nn.Module]:
    """The modules that an object of this package holds, in attributes and containers."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    elif type(value).__module__.startswith("visalign"):
        inner = getattr(value, "__dict__", {}).values()
    for each in inner:
        yield from _networks(each, seen)
