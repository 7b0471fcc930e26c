# SPDX-License-Identifier: Apache-2.0
"""Distribute samples among processes, gather their values, and share gradients.

Samples, their random numbers and their order are those of one process; each process holds some of them. The
values of a sample go to all, so that statistics, thresholds and denominators are equal everywhere; the update
is then that of one process up to the order of its sums.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from visalign.errors import UserError

T = TypeVar("T")
LOST = re.compile("closed by peer|reset by peer|broken pipe|remote process exited|socket.*timeout", re.I)
"""Errors of gloo, NCCL and their store in a collective that another process has left."""


class ProcessLost(UserError):
    """Another process of the run has ended, and this one cannot go on without it."""


@contextmanager
def report_lost_process() -> Iterator[None]:
    """Raise `ProcessLost` for a collective in the block that another process has left."""
    try:
        yield
    except RuntimeError as error:
        is_lost = type(error) is RuntimeError and LOST.search(str(error))  # not a reward's subclass
        if not distributed.is_initialized() or not (isinstance(error, distributed.DistError) or is_lost):
            raise
        raise ProcessLost(
            "Another process of this run has ended, and this one ends too. Its output, or the system's log, "
            "has the cause (a process that was killed for its memory prints nothing). The checkpoints are "
            "intact: fix the cause, then start all processes again with --resume, in any number."
        ) from error


def get_accelerator(accelerator: Accelerator | None, trained: Any) -> Accelerator:
    """Return the accelerator, or create one on the device of a policy or parameter."""
    if accelerator is not None:
        return accelerator
    return Accelerator(cpu=torch.device(trained.device).type == "cpu", mixed_precision="no")


def check_engine(kinds: Iterable[str]) -> None:
    """Refuse an engine of accelerate that would divide the model beside the trainer's own FSDP2."""
    for kind in kinds:
        if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            raise UserError(
                f"accelerate is set to {kind} (its configuration file, or ACCELERATE_USE_{kind}), and the "
                "trainer divides a model by itself. Start with torchrun or `accelerate launch --multi_gpu`, "
                "and set run.sharding=true for FSDP2."
            )


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse settings from the environment that would silently change the gradient."""
    check_engine([accelerator.distributed_type.value])
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise UserError(
            f"accelerate divides every gradient by {steps} (gradient_accumulation_steps, perhaps from the "
            "environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS). An update here is one whole "
            "batch, in micro-batches of optimizer.micro_batch: unset it."
        )
    if accelerator.mixed_precision != "no":
        raise UserError(
            f"accelerate computes in {accelerator.mixed_precision} (mixed_precision, perhaps from the "
            "environment variable ACCELERATE_MIXED_PRECISION): it would scale or round besides the model's "
            'own precision. Give Accelerator(mixed_precision="no"), and the model its dtype or autocast.'
        )


def one_process(what: str) -> None:
    """Refuse several processes, as WORLD_SIZE says; `what` begins the message, before "in one process"."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:
        raise UserError(
            f"{what} in one process, and {started} were started. Start the command without accelerate launch "
            "or torchrun."
        )


def share_gradients(module: nn.Module, accelerator: Accelerator, *, may_skip: bool = False) -> nn.Module:
    """Wrap a trained module in DDP, so that its gradients are shared by all processes.

    Each process starts from the first one's weights. A backward outside `no_sync_unless_last` leaves the mean
    over processes of the gradients since the last one; each update has exactly one on every process. The
    policy's own modules are unchanged. In one process the module itself is returned. With `may_skip` a
    forward may leave out trained parameters; DDP then searches for them each time.
    """
    if accelerator.num_processes == 1:
        return module
    device = accelerator.device
    wrapped = DistributedDataParallel(
        module, device_ids=None if device.type == "cpu" else [device], find_unused_parameters=may_skip
    )
    # buffers are equal everywhere, and the processes differ in their forwards
    wrapped.broadcast_buffers = False  # the argument's name differs between versions of PyTorch
    return wrapped


def no_sync_unless_last(
    module: nn.Module, accelerator: Accelerator, *, last: bool = False
) -> AbstractContextManager[Any]:
    """Keep gradients local in forward and backward of a micro-batch, unless it is the update's `last`."""
    return nullcontext() if last else accelerator.no_sync(module)


def synced_last(batches: Sequence[T], module: nn.Module, accelerator: Accelerator) -> Iterator[T]:
    """Yield an update's micro-batches, whose gradients stay local in the loop's body until the last one."""
    for number, batch in enumerate(batches):
        with no_sync_unless_last(module, accelerator, last=number == len(batches) - 1):
            yield batch


def sum_gradients(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> None:
    """Sum the gradients of parameters over the processes in one message; a missing one is 0."""
    if accelerator.num_processes == 1:
        return
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    total: Any = accelerator.reduce(torch.cat([g.flatten().float() for g in gradients]), "sum")
    for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@dataclass(frozen=True)
class Shares:
    """Assignment of B samples to processes."""

    accelerator: Accelerator
    indices: Sequence[Tensor]  # [b] int64 indices among the B for each process, ascending

    @classmethod
    def even(cls, count: int, accelerator: Accelerator) -> Shares:
        """Assign consecutive slices of B = `count` samples, whose sizes differ by one at most."""
        world = accelerator.num_processes
        slices = [process_slice(count, rank, world) for rank in range(world)]
        return cls(accelerator, [torch.arange(part.start, part.stop) for part in slices])

    @classmethod
    def of_groups(cls, count: int, size: int, accelerator: Accelerator) -> Shares:
        """Assign a part of each group of `size` samples to each process, so that all have equally many with signal.

        `even` where a group cannot be divided evenly.
        """
        world = accelerator.num_processes
        if size % world:
            return cls.even(count, accelerator)
        return cls.of_owners(torch.arange(count) % size // (size // world), accelerator)

    @classmethod
    def of_owners(cls, owner: Tensor, accelerator: Accelerator) -> Shares:
        """Assign samples to the processes `owner` [B]."""
        return cls(accelerator, [(owner == r).nonzero()[:, 0] for r in range(accelerator.num_processes)])

    @property
    def own(self) -> Tensor:
        """[b] indices of this process's samples."""
        return self.indices[self.accelerator.process_index]

    @property
    def owner(self) -> Tensor:
        """[B] process of each sample."""
        sizes = torch.tensor([len(index) for index in self.indices])
        rank = torch.arange(len(sizes)).repeat_interleave(sizes)
        return torch.zeros_like(rank).index_put((torch.cat(list(self.indices)),), rank)

    @property
    def local(self) -> Tensor:
        """[B] index of each sample among this process's own; -1 where another process holds it."""
        index = torch.full((sum(map(len, self.indices)),), -1)
        index[self.own] = torch.arange(len(self.own))
        return index

    def gather_all(self, value: Tensor) -> Tensor:
        """Gather [b, ...] of this process's samples to [B, ...] of all, on the CPU; all processes call it."""
        if len(self.indices) == 1:
            return value.cpu()
        longest = max(map(len, self.indices))
        padded = value.new_zeros(longest, *value.shape[1:])
        padded[: len(value)] = value
        blocks: Any = self.accelerator.gather(padded.to(self.accelerator.device))
        gathered = torch.empty(sum(map(len, self.indices)), *value.shape[1:], dtype=value.dtype)
        for index, block in zip(self.indices, blocks.cpu().split(longest), strict=True):
            gathered[index] = block[: len(index)]
        return gathered

    def table(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather columns, name -> [b], to name -> [B] float64; NaN where another process lacks a column."""
        names = list(columns)
        if len(self.indices) > 1:
            names = list(dict.fromkeys(name for other in gather_object([names]) for name in other))
        missing = torch.full((len(self.own),), math.nan, dtype=torch.float64)
        local = torch.stack([columns.get(name, missing).double().cpu() for name in names], 1)
        return dict(zip(names, self.gather_all(local).T, strict=True))


def process_slice(count: int, rank: int, world: int) -> slice:
    """Return the slice of `count` samples of process `rank` of `world`; sizes differ by one at most."""
    if world > count:
        raise UserError(
            f"{world} processes were started for {count} samples, and each needs one at least. Start "
            f"{count} or fewer, or raise prompts_per_iteration or group_size."
        )
    return slice(rank * count // world, (rank + 1) * count // world)
