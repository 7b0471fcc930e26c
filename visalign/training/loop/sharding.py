# SPDX-License-Identifier: Apache-2.0
"""Weights, gradients and AdamW's moments divided among processes: FSDP2, torch's `fully_shard`.

An update gathers one block of the network at a time. In rollout and evaluation each process holds the whole
network, without gradients: forwards then wait for nobody, so that processes may make any number of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from visalign.errors import UserError


def check_several(processes: int) -> None:
    """Refuse to divide a model among one process."""
    if processes == 1:
        raise UserError(
            "sharding divides a model among processes, and one was started. Start several with torchrun or "
            "accelerate launch, or leave sharding out."
        )


def shard(network: nn.Module, accelerator: Accelerator, undivided: Collection[nn.Parameter] = ()) -> None:
    """Divide a network's parameters among all processes, in place, block by block.

    Blocks are the modules of the classes that diffusers (`_repeated_blocks`) or transformers
    (`_no_split_modules`) name. All processes get the first one's weights and buffers. The parameters are new
    objects afterwards: look them up again. `undivided` are frozen ones that stay whole in each process.
    """
    check_several(accelerator.num_processes)
    for name, weight in network.named_parameters():
        if not weight.is_floating_point() or type(weight.data) is not Tensor:
            raise UserError(
                f"sharding cannot divide {name}, which is {weight.dtype} ({type(weight).__name__}): it takes "
                "weights in float32, bfloat16 or float16. Leave model.quantization out, or sharding."
            )
        if weight.ndim == 0 and weight.requires_grad:
            raise UserError(
                f"sharding cannot divide {name}, which is a single number. Freeze it, or leave sharding out."
            )
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise UserError(
            f"sharding needs FSDP2 with reset_iter_state, as PyTorch 2.14 has it, and this is "
            f"{torch.__version__}. Update torch, or leave sharding out."
        )
    with torch.no_grad():
        for value in (*network.parameters(), *network.buffers()):
            distributed.broadcast(value.data, src=0)  # fully_shard takes each process's own weights
    keys = ("_repeated_blocks", "_no_split_modules")
    names = {name for part in network.modules() for key in keys for name in getattr(part, key, None) or ()}
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    blocks = [module for module in network.modules() if type(module).__name__ in names]
    ignored = {*undivided, *(parameter for parameter in network.parameters() if parameter.ndim == 0)}
    for module in (*blocks, network):
        if not ignored.issuperset(module.parameters()):
            fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
    root: Any = network
    root._get_fsdp_state()._lazy_init()  # otherwise a block called before the network becomes the root


class ModuleOfFunction(nn.Module):
    """A function of a network, anything -> name -> tensor, as a module around which FSDP2 gathers the weights.

    `network` has all the weights that the function uses, each of them in every call.
    """

    def __init__(self, network: nn.Module, function: Callable[..., Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.network, self._function = network, function

    def forward(self, *arguments: Any) -> dict[str, Tensor]:
        """Return copies of the function's outputs: FSDP2 warns of views."""
        outputs = self._function(*arguments)
        copies = {name: value.clone() for name, value in outputs.items() if not value.requires_grad}
        live = [name for name in outputs if name not in copies]
        if live:
            copies |= zip(live, _JointBackward.apply(*(outputs[name] for name in live)), strict=True)
        return copies


class _JointBackward(torch.autograd.Function):
    """Copies whose backward goes through all of them, so that all processes gather blocks in one order."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


@contextmanager
def unsharded(network: nn.Module) -> Iterator[None]:
    """Hold the whole network in each process inside the block, without gradient; forwards wait for nobody.

    All processes enter and leave. A network that is not sharded is unchanged.
    """
    parts = [module for module in network.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        with torch.no_grad() if parts else nullcontext():
            yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)
        if parts:  # the next backward would gather what the forwards of this process used, unlike others'
            parts[0].reset_iter_state()


@contextmanager
def unsharded_state(network: nn.Module) -> Iterator[None]:
    """Replace the network's parameters by whole tensors inside the block, so that one process may save them.

    No forward inside. All processes enter; each holds the whole model once.
    """
    divided = [
        (module, name, parameter)
        for module in network.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(parameter, DTensor)
    ]
    full: dict[int, nn.Parameter] = {}  # tied weights stay one tensor
    for module, name, parameter in divided:
        if id(parameter) not in full:
            full[id(parameter)] = nn.Parameter(gathered(parameter.detach()), parameter.requires_grad)
        module.register_parameter(name, full[id(parameter)])
    try:
        yield
    finally:
        for module, name, parameter in divided:
            module.register_parameter(name, parameter)


def gathered(value: Tensor) -> Tensor:
    """Gather a tensor that may be divided among processes; all of them call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_shard(value: Tensor) -> Tensor:
    """Return this process's shard of a tensor that may be divided."""
    return value.to_local() if isinstance(value, DTensor) else value


def write_shards(folder: Path, divided: Mapping[str, Tensor]) -> None:
    """Write each process's shards of the divided tensors "stem/name"; all processes call it.

    Each process writes one file per stem, one after the other: each is in memory twice while it is written.
    All processes raise the OSError of one that could not write its part.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    stems = sorted({name.partition("/")[0] for name in divided})
    files = {name: stems.index(name.partition("/")[0]) + 1 for name in divided}
    writer = HuggingFaceStorageWriter(path=str(folder), fqn_to_index_mapping=files, save_distributed=True)
    try:
        save(dict(divided), storage_writer=writer)
    except CheckpointException as failure:  # torch's is no subclass of Exception
        rank, (error, _) = next(iter(failure.failures.items()))
        raise OSError(getattr(error, "errno", None), f"process {rank}: {error}") from failure


def incomplete(folder: Path, divided: Mapping[str, Tensor]) -> list[str]:
    """List tensors of `write_shards` with shards missing, because other processes wrote to another disk."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    if not divided:
        return []
    metadata: Any = HuggingFaceStorageReader(path=str(folder)).read_metadata()
    sizes = {
        name: sum(part.sizes.numel() for part in entry.chunks) for name, entry in metadata.state_dict_metadata.items()
    }
    return [name for name, value in divided.items() if sizes.get(name, 0) != value.numel()]


def read_shards(folder: Path, divided: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the output of `write_shards` in any number of processes.

    A tensor "stem/parameter" or "stem/parameter.moment" of the shape of a parameter in `divided` is divided
    as it is. The rest is whole, on the CPU.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    reader = HuggingFaceStorageReader(path=str(folder))
    tensors: dict[str, Any] = {}
    metadata: Any = reader.read_metadata()  # of tensors alone
    for key, entry in metadata.state_dict_metadata.items():
        name, dtype = key.partition("/")[2], entry.properties.dtype
        other = divided.get(name, divided.get(name.rpartition(".")[0]))
        if other is None or other.shape != entry.size:
            tensors[key] = torch.empty(entry.size, dtype=dtype)
        else:
            tensors[key] = torch.zeros_like(other, dtype=dtype)
    with warnings.catch_warnings():  # each process reads by itself on purpose
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def is_divided(network: nn.Module) -> bool:
    """Return True where each forward of a network gathers weights from all processes."""
    return isinstance(network, FSDPModule)


def pad_batches(parts: Iterable[Tensor], network: nn.Module, accelerator: Accelerator) -> list[Tensor]:
    """Append empty micro-batches where the network is divided and another process has more."""
    batches = list(parts)
    if not is_divided(network):
        return batches
    return batches + [batches[-1][:0]] * (max_over_processes(len(batches), accelerator) - len(batches))


def max_over_processes(count: int, accelerator: Accelerator) -> int:
    """Return the largest count of all processes."""
    counts: Any = accelerator.gather(torch.tensor([count], device=accelerator.device))
    return int(counts.max())
