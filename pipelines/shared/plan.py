# SPDX-License-Identifier: Apache-2.0
"""Memory by part and hours by device of a run, for the plans of all jobs."""

from __future__ import annotations

import inspect
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from visalign.training.loop.adamw_8bit import moment_bytes
from visalign.training.loop.optimizer import AdamWSettings

T = TypeVar("T")

GB = 1e9
PEAK_SHARES = {
    "eager": 0.20,
    "compiled blocks, steps replayed": 0.45,
    "compiled blocks, a window of steps replayed": 0.40,
    "compiled blocks, regression": 0.36,
}
"""Kind of an iteration -> share of the peak that it reached on one H200 (SD3.5-medium, 512², batch 16), as
docs/evidence/gpu.md has it."""


class Device(NamedTuple):
    """Figures of a vendor's data sheet."""

    peak: float  # Operations a second in dense bfloat16 with float32 sums
    memory: float  # GB
    bandwidth: float  # Bytes a second of its memory


DEVICES = {
    "RTX 4090": Device(165e12, 24, 1008e9),
    "L40S": Device(362e12, 48, 864e9),  # the sheet's 733 is with sparsity, as 1,979 and 4,500 below
    "A100 80 GB": Device(312e12, 80, 2039e9),
    "H100 SXM": Device(989e12, 80, 3350e9),
    "H200 SXM": Device(989e12, 141, 4800e9),
    "B200": Device(2250e12, 180, 8000e9),
    "MI300X": Device(1307e12, 192, 5300e9),
}


def tokens_by_device(rows: int, read: float) -> dict[str, float | str]:
    """Bound the tokens a second of `rows` completions that grow together; a step reads `read` bytes."""
    tokens: dict[str, float | str] = {n: rows * device.bandwidth / read for n, device in DEVICES.items()}
    return tokens | {"basis": "each step reads weights, keys and values once at the data sheet's bandwidth"}


def weight_bytes(part: nn.Module, without: Collection[int] = ()) -> int:
    """Sum the bytes of parameters and buffers, each once, but for those whose `id` is in `without`."""
    values = {id(v): v for v in [*part.parameters(), *part.buffers()] if id(v) not in without}
    return sum(map(_stored_bytes, values.values()))


def _stored_bytes(value: Any) -> int:
    """Bytes of a tensor, or of the tensors that make up a quantized one (bitsandbytes keeps scales too)."""
    if is_traceable_wrapper_subclass(value):
        return sum(_stored_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    state, scales = getattr(value, "quant_state", None), ()
    if state is not None:
        nested = (state.offset, state.state2.absmax, state.state2.code) if state.nested else ()
        scales = (state.absmax, state.code, *nested)
    return value.numel() * value.element_size() + sum(map(_stored_bytes, scales))


def dtype_name(part: nn.Module, without: Collection[int] = ()) -> str:
    """Return the dtype that most of a part's parameters have, such as bfloat16."""
    sizes = Counter[str]()
    for value in part.parameters():
        if id(value) not in without:
            sizes[str(value.dtype).removeprefix("torch.")] += value.numel()
    return sizes.most_common(1)[0][0] if sizes else "trained"


TRAINED = "trained_weights float32_masters gradients adamw_moments averaged_weights reference_and_old_policy".split()
"""The parts of `trained_memory`."""


def trained_memory(trained: Sequence[Tensor], *, ema: bool, copies: int, optimizer: str = "adamw") -> dict[str, float]:
    """Compute the GB of trained weights, optimizer, averages, and `copies` in float32 (a reference, an old policy)."""
    numbers = sum(weight.numel() for weight in trained)
    stored = sum(weight.nbytes for weight in trained)
    masters = 4 * sum(weight.numel() for weight in trained if weight.element_size() < 4)  # AdamW steps in float32
    moments = moment_bytes(trained, optimizer)
    sizes = stored, masters, stored, moments, 4 * numbers * ema, 4 * numbers * copies
    return {name: size / GB for name, size in zip(TRAINED, sizes, strict=True)}


def on_each_device(
    memory: Mapping[str, float], network: Collection[str], *, world: int, sharding: bool, spare: float = 0.0
) -> dict[str, float]:
    """Compute the GB that each of `world` processes holds, by part; arguments as of `per_device`."""
    if world == 1:
        return dict(memory)
    if not sharding:  # DDP exchanges gradients in buckets of the same size
        return {**memory, "gradients_exchanged": memory["gradients"]}
    divided = {*network, *TRAINED}
    parts = {name: size / world if name in divided else size for name, size in memory.items()}
    # FSDP2 gathers the whole network while sampling
    return parts | {"network_gathered": max(0.0, sum(memory[name] for name in network) - spare)}


def per_device(
    memory: Mapping[str, float],
    network: Collection[str],
    rewards: Mapping[str, Any],
    operations: float,
    *,
    sharding: bool,
    not_counted: str,
    spare: float = 0.0,
    details: Mapping[str, float] | None = None,
    kind: str = "eager",
) -> dict[str, Any]:
    """Compute a plan's groups of memory and of hours of all `operations` on one device of each kind.

    `memory` are GB of the parts of a run in one process without rewards, `network` those of the trained network,
    `details` parts of others; `spare` GB are free while sampling. `kind` is one of `PEAK_SHARES`.
    """
    world, peak_share = int(os.environ.get("WORLD_SIZE", "1")), PEAK_SHARES[kind]
    parts = on_each_device(memory, network, world=world, sharding=sharding, spare=spare)
    judges, later = judge_bytes(rewards)
    parts["judges"] = judges / GB
    in_all = parts["in_all"] = math.fsum(parts.values())
    hours: dict[str, float | str] = {n: operations / world / (d.peak * peak_share) / 3600 for n, d in DEVICES.items()}
    for name, device in DEVICES.items():
        if in_all > device.memory:
            hours[name] = f"{hours[name]:.3g}, but {in_all:.0f} GB do not fit {device.memory:.0f} GB"
    basis = f"{peak_share:.0%} of the data sheet's dense bfloat16 peak, as measured on one H200 with"
    hours["basis"] = f"{basis} SD3.5-medium at batch 16 ({kind}); rewards are not counted"
    memory_groups = {**parts, **(details or {}), "not_counted": ", ".join([not_counted, *later])}
    return {"memory_in_GB": memory_groups, "hours": hours}


def judge_bytes(judges: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Sum the bytes of the rewards' networks, each once, and name the rewards that load theirs later."""
    networks, later = set[nn.Module](), []
    for label, judge in judges.items():
        loaded = {*parts_of(judge, nn.Module, set())}
        networks |= loaded
        if not loaded and "device" in inspect.signature(type(judge)).parameters:
            later.append(f"the network of {label}")
    return sum(map(weight_bytes, networks)), later


def parts_of(value: Any, kind: type[T], visited: set[int]) -> Iterator[T]:
    """Yield what is of a kind in the attributes and containers of an object of this package."""
    if isinstance(value, kind):
        yield value
    elif id(value) not in visited:
        visited.add(id(value))
        is_ours = type(value).__module__.startswith("visalign")
        inner = value if isinstance(value, Mapping) else getattr(value, "__dict__", {}) if is_ours else {}
        for entry in value if isinstance(value, list | tuple) else inner.values():
            yield from parts_of(entry, kind, visited)


def training_memory(network: Any, optimizer: AdamWSettings) -> tuple[dict[str, float], list[str]]:
    """Compute the GB of a network, its gradients and its optimizer, by part; and name the parts that are weights."""
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    memory = trained_memory(trained, ema=bool(optimizer.ema_decay), copies=0, optimizer=optimizer.name)
    del memory["reference_and_old_policy"]
    if all(weight.requires_grad for weight in network.parameters()):
        return memory, ["trained_weights"]
    trained_ids = {id(weight) for weight in trained}
    name = f"frozen_weights, {dtype_name(network, trained_ids)}"
    return {name: weight_bytes(network, trained_ids) / GB, **memory}, [name, "trained_weights"]


def estimate_fit(model: Any, config: Any, *, rows: int, longest: int, texts: float, frozen: bool) -> dict[str, Any]:
    """Compute memory and hours of training a classifier, `rows` of all `texts` at once, as long as the longest."""
    activations, flops = trace_forward(model, rows, longest)
    memory, network = training_memory(model, config.optimizer)
    memory["activations_of_an_update"] = activations / GB
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "model": {"trained_parameters": trained, "longest_text": longest},
        **per_device(
            memory,
            network,
            {},
            (1 if frozen else 3) * flops * texts,  # a frozen trunk has no backward pass
            sharding=config.run.sharding,
            not_counted="kernels' workspaces, the allocator's gaps, the optimizer's temporary values",
        ),
    }


def trace_forward(network: Any, rows: int, length: int, recompute: bool = False) -> tuple[int, float]:
    """Trace the trunk on `rows` texts: (bytes stored for the backward pass, operations of one text)."""
    from visalign.adapters.causal_lm.network import enable_recomputation, recomputed_layers
    from visalign.adapters.hollow import traced_network

    if recompute:
        enable_recomputation(network)
    tokens = torch.zeros(rows, length, dtype=torch.long, device="meta")
    # transformers reads the positions' values without a mask, and a meta tensor has none
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="meta")
    with recomputed_layers(network, recompute), traced_network(network.base_model) as trace:
        network.base_model(input_ids=tokens, attention_mask=mask, use_cache=False)
    return trace.held + trace.largest_block, trace.flops["network"] / rows
