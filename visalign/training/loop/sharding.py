# SPDX-License-Identifier: Apache-2.0
"""Weights, gradients and AdamW's moments divided among processes: FSDP2, torch's `fully_shard`.

An update gathers one block of the network at a time. Where nothing is learnt (rollout, evaluation) each
process holds the whole network, without gradients: forwards then wait for nobody, so that processes may make
any number of them.
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
from torch.distributed.tensor import DTensor, distribute_tensor

from visalign.errors import UserError


def check_several(processes: int) -> None:
    """Refuse to divide a model among one process.

    Raises:
        UserError: one was started.
    """
    if processes == 1:
        raise UserError(
            "sharding divides a model among processes, and one was started. Start several with torchrun or "
            "accelerate launch, or leave sharding out."
        )


def shard(network: nn.Module, accelerator: Accelerator, kept: Collection[nn.Parameter] = ()) -> None:
    """Divide a network's parameters among all processes, in place, block by block.

    Blocks are the modules of the classes that diffusers (`_repeated_blocks`) or transformers
    (`_no_split_modules`) name. The first process's weights and buffers are everybody's. The parameters are
    new objects afterwards: look them up again.

    Args:
        network: on the accelerator's device; forwards with gradient go through it.
        accelerator: of the processes.
        kept: frozen parameters that stay whole in each process, so that it may use them as often as it likes.

    Raises:
        UserError: one process, quantised weights, a single number that is trained, or an older torch.
    """
    check_several(accelerator.num_processes)
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise UserError(
            f"sharding needs FSDP2 with reset_iter_state, as PyTorch 2.14 has it, and this is "
            f"{torch.__version__}. Update torch, or leave sharding out."
        )
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
    with torch.no_grad():
        for value in (*network.parameters(), *network.buffers()):
            distributed.broadcast(value.data, src=0)
    keys = ("_repeated_blocks", "_no_split_modules")
    names = {name for part in network.modules() for key in keys for name in getattr(part, key, None) or ()}
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    blocks = [module for module in network.modules() if type(module).__name__ in names]
    whole = {*kept, *(parameter for parameter in network.parameters() if parameter.ndim == 0)}
    for module in (*blocks, network):
        if not whole.issuperset(module.parameters()):
            fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    root: Any = network
    root._get_fsdp_state()._lazy_init()  # else a block that is called before the network becomes the root


class ModuleOfFunction(nn.Module):
    """A function of a network as a module's forward: once divided, its weights are gathered around it.

    Args:
        network: with all the weights that the function uses; each of them in every call.
        ask: anything -> name -> tensor, with gradient.
    """

    def __init__(self, network: nn.Module, ask: Callable[..., Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.network, self._ask = network, ask

    def forward(self, *given: Any) -> dict[str, Tensor]:
        """What the function says, as copies: FSDP2 warns of views."""
        said = self._ask(*given)
        live = [name for name, value in said.items() if value.requires_grad]
        copies = dict(zip(live, _Together.apply(*(said[name] for name in live)), strict=True)) if live else {}
        return {name: copies[name] if name in copies else value.clone() for name, value in said.items()}


class _Together(torch.autograd.Function):
    """Copies whose backward goes through all of them, whichever a process's loss depends on, so that all
    processes gather the blocks in one order."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


@contextmanager
def unsharded(network: nn.Module) -> Iterator[None]:
    """Inside, each process has the whole network and its forwards wait for nobody; no gradient.

    All processes enter and leave. A network that is not sharded is as it was.
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
        if parts:  # the next backward would gather what this process's forwards used, others' not
            parts[0].reset_iter_state()


@contextmanager
def unsharded_state(network: nn.Module) -> Iterator[None]:
    """Inside, the network's parameters are whole tensors, so that one process may save them; no forward.

    All processes enter; it holds the whole model once in each. A network that is not sharded is as it was,
    and one that is becomes so again.
    """
    places = [
        (module, name, parameter)
        for module in network.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(parameter, DTensor)
    ]
    once: dict[int, nn.Parameter] = {}  # tied weights stay one tensor
    for module, name, parameter in places:
        if id(parameter) not in once:
            once[id(parameter)] = nn.Parameter(gathered(parameter.detach()), parameter.requires_grad)
        module.register_parameter(name, once[id(parameter)])
    try:
        yield
    finally:
        for module, name, parameter in places:
            module.register_parameter(name, parameter)


def gathered(value: Tensor) -> Tensor:
    """The whole of a tensor that may be divided among processes; all of them call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_shard(value: Tensor) -> Tensor:
    """What this process holds of a tensor that may be divided."""
    return value.to_local() if isinstance(value, DTensor) else value


def write_shards(folder: Path, divided: Mapping[str, Tensor]) -> None:
    """Write tensors that are divided among the processes, each its part; all processes call it.

    Args:
        folder: in one that the first process has made before any calls.
        divided: "stem/name" -> tensor; each process writes a file for each stem, one after the other, as it
            stands in memory a second time meanwhile.

    Raises:
        OSError: a process could not write its part; raised in all of them.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    stems = sorted({name.partition("/")[0] for name in divided})
    files = {name: stems.index(name.partition("/")[0]) + 1 for name in divided}
    writer = HuggingFaceStorageWriter(path=str(folder), fqn_to_index_mapping=files, save_distributed=True)
    try:
        save(dict(divided), storage_writer=writer)
    except CheckpointException as failure:  # torch's is no Exception
        rank, (error, _) = next(iter(failure.failures.items()))
        raise OSError(getattr(error, "errno", None), f"process {rank}: {error}") from failure


def incomplete(folder: Path, divided: Mapping[str, Tensor]) -> list[str]:
    """Names of those tensors given to `write_shards` of which parts are not in the folder: other processes
    wrote them elsewhere, in folders of the same name."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    if not divided:
        return []
    metadata: Any = HuggingFaceStorageReader(path=str(folder)).read_metadata()
    there = {
        name: sum(part.sizes.numel() for part in entry.chunks)
        for name, entry in metadata.state_dict_metadata.items()
    }
    return [name for name, value in divided.items() if there.get(name, 0) != value.numel()]


def read_shards(folder: Path, divided: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `write_shards` wrote, in any number of processes.

    Args:
        folder: given there.
        divided: parameters by name; what belongs to one, is named "stem/parameter" or
            "stem/parameter.moment" and has its shape, is divided as it is. The rest is whole, on the CPU.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    reader = HuggingFaceStorageReader(path=str(folder))
    found: dict[str, Any] = {}
    metadata: Any = reader.read_metadata()  # of tensors alone
    for key, there in metadata.state_dict_metadata.items():
        name, dtype = key.partition("/")[2], there.properties.dtype
        other = divided.get(name, divided.get(name.rpartition(".")[0]))
        if other is None or other.shape != there.size:
            found[key] = torch.empty(there.size, dtype=dtype)
        else:
            found[key] = torch.zeros_like(other, dtype=dtype)
    with warnings.catch_warnings():  # each process reads by itself, which torch takes for an accident
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(found, storage_reader=reader, no_dist=True)
    return found


def distribute_like(value: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, equal on all processes, or one that is divided already, on the other's device and
    divided as it is."""
    value = value.to(other.device)
    if not isinstance(other, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, other.device_mesh, other.placements, src_data_rank=None)


def is_divided(network: nn.Module) -> bool:
    """Whether each forward of a network gathers weights from all processes."""
    return isinstance(network, FSDPModule)


def pad_batches(parts: Iterable[Tensor], network: nn.Module, accelerator: Accelerator) -> list[Tensor]:
    """Micro-batches, and after them empty ones where the network is divided and another process has more."""
    own = list(parts)
    if not is_divided(network):
        return own
    return own + [own[-1][:0]] * (max_over_processes(len(own), accelerator) - len(own))


def max_over_processes(count: int, accelerator: Accelerator) -> int:
    """The largest count of all processes."""
    counts: Any = accelerator.gather(torch.tensor([count], device=accelerator.device))
    return int(counts.max())
