# SPDX-License-Identifier: Apache-2.0
"""Several processes as one: who holds which samples, what all of them know, gradients that add up.

Samples, their random numbers and the order of an iteration's samples are those of one process; a process
holds some of them. What is said of a sample goes to all, so that statistics, thresholds and denominators are
settled everywhere alike; the update is then that of one process up to the order of its sums.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from visalign.errors import UserError

LOST = re.compile("closed by peer|reset by peer|broken pipe|remote process exited|socket.*timeout", re.I)
"""What gloo, NCCL and their store say in a collective that another process has left."""


class ProcessLost(UserError):
    """Another process of the run has ended, and this one cannot go on without it."""


@contextmanager
def report_lost_process() -> Iterator[None]:
    """Inside, a collective that another process has left raises `ProcessLost`."""
    try:
        yield
    except RuntimeError as error:
        said = type(error) is RuntimeError and LOST.search(str(error))  # a judge's own error is another type
        if not distributed.is_initialized() or not (isinstance(error, distributed.DistError) or said):
            raise
        raise ProcessLost(
            "Another process of this run has ended, and this one ends too: what went wrong is said there, or "
            "by the system (a process that was killed for its memory says nothing). The checkpoints stand: "
            "mend it, then start all processes again with --resume, as many as you like."
        ) from error


def get_accelerator(given: Accelerator | None, trained: Any) -> Accelerator:
    """The accelerator, or one on the device of what is trained, a policy or a parameter."""
    if given is not None:
        return given
    return Accelerator(cpu=torch.device(trained.device).type == "cpu", mixed_precision="no")


def check_engine(kinds: Iterable[str]) -> None:
    """Refuse an engine of accelerate that would divide the model beside the trainer's own FSDP2.

    Args:
        kinds: of `accelerate.DistributedType`, that are asked for.
    """
    for kind in kinds:
        if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            raise UserError(
                f"accelerate is set to {kind} (its configuration file, or ACCELERATE_USE_{kind}), and the "
                "trainer divides a model by itself. Start with torchrun or `accelerate launch --multi_gpu`, "
                "and set run.sharding=true for FSDP2."
            )


def check_accelerator(accelerator: Accelerator) -> None:
    """Refuse settings from the environment that would change the gradient without a word."""
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
            "environment variable ACCELERATE_MIXED_PRECISION): it would scale or round beside the model's "
            'own precision. Give Accelerator(mixed_precision="no"), and the model its dtype or autocast.'
        )


def one_process(what: str) -> None:
    """Refuse several processes for what they cannot share.

    Args:
        what: begins the message: what is done "in one process".

    Raises:
        UserError: several were started, as WORLD_SIZE says.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:
        raise UserError(
            f"{what} in one process, and {started} were started. Start the command without accelerate launch "
            "or torchrun."
        )


def share_gradients(module: nn.Module, accelerator: Accelerator, *, may_skip: bool = False) -> nn.Module:
    """The module through which a training looks at its policy with gradient, shared by all processes.

    Each process starts from the first one's weights. A backward outside `no_sync_unless_last` leaves the mean
    over processes of the gradients since the last one; each update has exactly one on every process.
    The policy's own modules stay as they are. In one process it is the module itself.

    Args:
        module: all that is trained is in it.
        accelerator: of the processes.
        may_skip: whether a forward may leave out trained parameters; they are then looked for each time.
    """
    if accelerator.num_processes == 1:
        return module
    device = accelerator.device
    found = DistributedDataParallel(
        module, device_ids=None if device.type == "cpu" else [device], find_unused_parameters=may_skip
    )
    # buffers are equal everywhere, and the processes differ in their forwards
    found.broadcast_buffers = False  # the argument has another name from one PyTorch to the next
    return found


def no_sync_unless_last(
    module: nn.Module, accelerator: Accelerator, *, last: bool = False
) -> AbstractContextManager[Any]:
    """Around forward and backward of a micro-batch: gradients stay here, unless it is the update's `last`."""
    return nullcontext() if last else accelerator.no_sync(module)


def sum_gradients(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> None:
    """Sum the gradients of parameters over the processes, in one message; an absent one is 0."""
    if accelerator.num_processes == 1:
        return
    moved = list(parameters)
    for parameter in moved:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in moved if parameter.grad is not None]
    total: Any = accelerator.reduce(torch.cat([g.flatten().float() for g in gradients]), "sum")
    for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@dataclass(frozen=True)
class Shares:
    """Which of B samples each process holds."""

    accelerator: Accelerator
    places: Sequence[Tensor]
    """Of each process, [b] int64 places among the B, ascending."""

    @classmethod
    def even(cls, count: int, accelerator: Accelerator) -> Shares:
        """Consecutive stretches of B = `count` samples, whose sizes differ by one at most.

        Raises:
            UserError: more processes than samples.
        """
        world = accelerator.num_processes
        ends = [process_slice(count, rank, world) for rank in range(world)]
        return cls(accelerator, [torch.arange(end.start, end.stop) for end in ends])

    @classmethod
    def of_groups(
        cls, count: int, size: int, accelerator: Accelerator, *, whole_groups: bool = False
    ) -> Shares:
        """A part of each group of `size` samples, so that all processes have as many to learn from wherever
        signal is a matter of whole groups; `even` where the processes do not divide a group. `whole_groups`
        divides none."""
        world = accelerator.num_processes
        if whole_groups:
            owner = cls.even(count // size, accelerator).owner
            return cls.of_owners(owner.repeat_interleave(size), accelerator)
        if size % world:
            return cls.even(count, accelerator)
        return cls.of_owners(torch.arange(count) % size // (size // world), accelerator)

    @classmethod
    def of_owners(cls, owner: Tensor, accelerator: Accelerator) -> Shares:
        """By the process [B] of each sample."""
        return cls(accelerator, [(owner == r).nonzero()[:, 0] for r in range(accelerator.num_processes)])

    @property
    def own(self) -> Tensor:
        """[b] places of this process's samples."""
        return self.places[self.accelerator.process_index]

    @property
    def owner(self) -> Tensor:
        """[B] which process holds each sample."""
        count = sum(map(len, self.places))
        return torch.zeros(count, dtype=torch.int64).index_put(
            (torch.cat(list(self.places)),),
            torch.arange(len(self.places)).repeat_interleave(torch.tensor([len(p) for p in self.places])),
        )

    @property
    def local(self) -> Tensor:
        """[B] place of each sample among this process's own; -1 where another process holds it."""
        found = torch.full((sum(map(len, self.places)),), -1)
        found[self.own] = torch.arange(len(self.own))
        return found

    def gather_all(self, own: Tensor) -> Tensor:
        """[b, ...] of this process's samples -> [B, ...] of all, on the CPU; all processes call it."""
        if len(self.places) == 1:
            return own.cpu()
        most = max(map(len, self.places))
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        gathered: Any = self.accelerator.gather(padded.to(self.accelerator.device))
        blocks = gathered.cpu().split(most)
        found = torch.empty(sum(map(len, self.places)), *own.shape[1:], dtype=own.dtype)
        for place, block in zip(self.places, blocks, strict=True):
            found[place] = block[: len(place)]
        return found

    def table(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name -> [b] of this process's samples -> name -> [B] float64 of all, NaN where another process has
        no column of a name: a reward may say more of some samples than of others."""
        names = list(columns)
        if len(self.places) > 1:
            names = list(dict.fromkeys(name for held in gather_object([names]) for name in held))
        absent = torch.full((len(self.own),), math.nan, dtype=torch.float64)
        own = torch.stack([columns.get(name, absent).double().cpu() for name in names], 1)
        return dict(zip(names, self.gather_all(own).T, strict=True))


def process_slice(count: int, rank: int, world: int) -> slice:
    """Which of `count` samples process `rank` of `world` takes: stretches that differ by one at most.

    Raises:
        UserError: more processes than samples, or a rank outside the world.
    """
    if not 0 <= rank < world:
        raise UserError(f"rank is {rank}; with world size {world} it must be 0 to {world - 1}.")
    if world > count:
        raise UserError(
            f"{world} processes were started for {count} samples, and each needs one at least. Start "
            f"{count} or fewer, or raise prompts_per_iteration or group_size."
        )
    return slice(rank * count // world, (rank + 1) * count // world)
