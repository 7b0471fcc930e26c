# SPDX-License-Identifier: Apache-2.0
"""Training a judge on labels: AdamW over batches that are functions of their number, with exact resume.

The loss of an update is Σ w ℓ / Σ w over its whole batch: micro-batches and processes change memory and time,
not the update. Exceptions are what looks across a batch, such as ICT's negatives, which see their own
micro-batch, and draws (dropout, Monte Carlo): those of update n come from (seed, n, process) alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.errors import UserError
from visalign.training.loop.algorithm import Algorithm, Collected, Context
from visalign.training.loop.processes import sum_gradients
from visalign.training.loop.sharding import ModuleOfFunction, max_over_processes, shard, unsharded
from visalign.training.loop.trainer import LEAST_LOSS_SCALE

from .batch import Outputs, RewardBatch, RewardData, TrainableJudge
from .settings import RewardObjectiveSettings
from .tasks import TASKS


class RewardModeling(Algorithm):
    """Trains a judge on labelled pairs, triples or images; an `Algorithm` for `Trainer`.

    Args:
        judge: on its device.
        data: the batches; process i of n takes share i of each.
        objective: what is optimized.
        accelerator: processes and trackers.
        seed: of dropout and of sampled losses.
        penalty: what each update adds to the loss of its labels, with gradient; None, or one that gives None,
            adds nothing.
        compute_dtype: of the judge's products, where not all are in float32; float16 gets its loss scaled.
        sharding: divide the judge, its gradients and AdamW's moments among the processes (FSDP2). The judge
            is a module then, or has all its weights in `module`, and uses each of them equally often for
            any batch.
        kept: with sharding, frozen parameters that stay whole in each process: those that the judge uses
            more seldom, since it remembers what they said.

    Raises:
        UserError: a judge that cannot be divided, or its weights have a penalty.
    """

    def __init__(
        self,
        judge: TrainableJudge,
        data: RewardData,
        *,
        objective: RewardObjectiveSettings,
        accelerator: Accelerator,
        seed: int = 0,
        penalty: Callable[[], Tensor | None] = lambda: None,
        compute_dtype: torch.dtype = torch.float32,
        sharding: bool = False,
        kept: Collection[nn.Parameter] = (),
    ) -> None:
        self.judge, self.data, self.seed = judge, data, seed
        self.objective, self.accelerator = objective, accelerator
        self._compute_dtype, self._penalty = compute_dtype, penalty
        self.sharding = sharding
        self.ask: Callable[[Any], Outputs] = judge
        if sharding and penalty() is not None:
            raise UserError("sharding goes without a penalty of the weights. Leave one of the two out.")
        if sharding:
            self.ask = ModuleOfFunction(self._network(), judge)
            shard(self.ask, accelerator, kept)

    def _network(self) -> nn.Module:
        """The module with all weights of the judge.

        Raises:
            UserError: it has none.
        """
        network: Any = getattr(self.judge, "module", self.judge)
        held = {id(p) for p in network.parameters()} if isinstance(network, nn.Module) else set()
        for name, parameter in self.parameters():
            if id(parameter) not in held:
                raise UserError(
                    f"sharding cannot divide {name}, which {type(self.judge).__name__} holds beside a torch "
                    "module. Give a judge that is a module or has all its weights in `module`, or leave "
                    "sharding out."
                )
        return network

    def unsharded(self) -> AbstractContextManager[Any]:
        """Inside, each process has all of the judge."""
        return unsharded(self.ask) if isinstance(self.ask, ModuleOfFunction) else nullcontext()

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """What of the judge is trained."""
        return self.judge.trainable_parameters()

    def compute_dtype(self) -> torch.dtype:
        """Of the judge's network."""
        return self._compute_dtype

    def collect(self, run: Context) -> Collected:
        """The numbers of the iteration's batches; they are read when their update comes."""
        first, count = run.counters.updates, run.optimizer.updates_per_iteration
        return Collected(experience=list(range(first, first + count)))

    def backward(self, experience: list[int], step: int, run: Context) -> dict[str, float]:
        """The gradient of Σ w ℓ / Σ w over batch `step`, summed over the processes."""
        sums = self._accumulate(step, run.counters.loss_scale)
        parameters = [parameter for _, parameter in self.parameters()]
        if not self.sharding:
            sum_gradients(parameters, self.accelerator)
        loss, weight, examples = self.accelerator.reduce(sums, "sum").tolist()  # type: ignore[union-attr]
        if not weight > 0:
            raise UserError(
                f"Batch {step} has {int(examples)} examples and none with a label to learn from: "
                "all are ties or unknown. Leave such examples out, or take larger batches."
            )
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        return {"loss": loss / weight, "samples": examples, "scale": run.counters.loss_scale}

    def record(self, experience: list[int], sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Mean loss of the batches; dropout is off again."""
        self.judge.train(False)
        loss = float(np.mean([each["loss"] for each in sums]))
        lost = not any(math.isfinite(each["grad_norm"]) for each in sums)
        if lost and sums[-1]["scale"] <= LEAST_LOSS_SCALE:  # a larger one falls, and the next may be finite
            raise UserError(
                f"None of the {len(sums)} updates {experience[0]} to {experience[-1]} had a finite gradient; "
                f"their mean loss is {loss:.3g}. Start again with a lower optimizer.lr or, if model.autocast "
                "or model.dtype is float16, in bfloat16 or float32."
            )
        return {"loss": loss}

    def _accumulate(self, number: int, scale: float) -> Tensor:
        """Add this process's gradient of Σ w ℓ; returns [Σ w ℓ, Σ w, examples] in float64."""
        accelerator = self.accelerator
        part = (accelerator.process_index, accelerator.num_processes)
        sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
        task = TASKS[self.objective.task]
        self.judge.train(True)
        with _drawn_from(self.seed, number, part[0]) as generator:
            for batch, counts in self._batches(number, part):
                total, weight = task.loss(self.ask(batch.inputs), batch, self.objective, generator)
                if (penalty := self._penalty()) is not None:
                    total = total + penalty * weight  # Σ w (ℓ + penalty) / Σ w over the micro-batches
                # what is divided gets the mean over the processes
                (total * (counts * scale * (part[1] if self.sharding else 1))).backward()
                found = torch.stack([total.detach().double(), weight.detach().double()])
                sums[:2] += counts * found.to(sums.device)
                sums[2] += counts * batch.size
        return sums

    def _batches(self, number: int, part: tuple[int, int]) -> Iterator[tuple[RewardBatch, int]]:
        """(micro-batch, 1) of this process's share; of a judge that is divided, after them (one of them, 0)
        where another process has more, and waits for weights."""
        own, last = iter(self.data.batch(number, part)), None
        while True:
            batch = next(own, None)
            live = int(batch is not None)
            if not (max_over_processes(live, self.accelerator) if self.sharding else live):
                return
            last = batch or last or next(iter(self.data.batch(number)))
            yield last, live


@contextmanager
def _drawn_from(seed: int, number: int, process: int) -> Iterator[torch.Generator]:
    """Within the block dropout draws from (seed, number, process); yields a generator of the same origin."""
    value = int(np.random.SeedSequence([seed, number, process]).generate_state(1, np.uint64)[0]) >> 1
    with torch.random.fork_rng():
        torch.manual_seed(value)
        yield torch.Generator().manual_seed(value + 1)
