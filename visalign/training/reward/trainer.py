# SPDX-License-Identifier: Apache-2.0
"""Train a reward model on labels, in batches that are functions of their number, with exact resume.

The loss of an update is Σ w ℓ / Σ w over its whole batch: micro-batches and processes change memory and time,
not the update. Exceptions are losses across a batch, such as ICT's negatives, which see their own
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
    """Trains a reward model on labelled pairs, triples or images; an `Algorithm` for `Trainer`.

    Process i of n takes share i of each batch. `penalty` is a term that each update adds to the loss of its labels,
    with gradient; it may return None. `compute_dtype` is of the model's products, where not all are in float32. With
    `sharding` the model, its gradients and AdamW's moments are divided among the processes (FSDP2). The model is then
    a module, or has all its weights in `module`, and uses each of them equally often for any batch; frozen parameters
    that are `undivided` stay whole in each process, since the model caches their outputs.
    """

    updates: int | None = None
    """Updates of the whole run, so that the last iteration may have fewer than the others; None: no end."""

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
        undivided: Collection[nn.Parameter] = (),
    ) -> None:
        self.judge, self.data, self.seed, self.sharding = judge, data, seed, sharding
        self.objective, self.accelerator = objective, accelerator
        self._compute_dtype, self._penalty = compute_dtype, penalty
        self.forward: Callable[[Any], Outputs] = judge
        if sharding:
            self.forward = ModuleOfFunction(self._network(), judge)
            shard(self.forward, accelerator, undivided)

    def _network(self) -> nn.Module:
        network: Any = getattr(self.judge, "module", self.judge)
        ids = {id(p) for p in network.parameters()} if isinstance(network, nn.Module) else set()
        for name, parameter in self.parameters():
            if id(parameter) not in ids:
                raise UserError(
                    f"sharding cannot divide {name}, which {type(self.judge).__name__} holds outside a torch module. "
                    "Give a model that is a module or has all its weights in `module`, or leave sharding out."
                )
        return network

    def unsharded(self) -> AbstractContextManager[Any]:
        return unsharded(self.forward) if isinstance(self.forward, ModuleOfFunction) else nullcontext()

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        return self.judge.trainable_parameters()

    def compute_dtype(self) -> torch.dtype:
        return self._compute_dtype

    def collect(self, run: Context) -> Collected:
        """Return the numbers of the iteration's batches, which are read in their update."""
        first, count = run.counters.updates, run.optimizer.updates_per_iteration
        end = first + count if self.updates is None else min(first + count, self.updates)
        return Collected(experience=list(range(first, end)))

    def backward(self, experience: list[int], step: int, run: Context) -> dict[str, float]:
        """Add the gradient of Σ w ℓ / Σ w over batch `step`, summed over the processes."""
        sums = self._accumulate(step, run.counters.loss_scale)
        parameters = [parameter for _, parameter in self.parameters()]
        if not self.sharding:  # FSDP2 has summed them already
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
        """Average the loss of the batches; switch dropout off."""
        self.judge.train(False)
        loss = float(np.mean([update["loss"] for update in sums]))
        is_lost = not any(math.isfinite(update["grad_norm"]) for update in sums)
        if is_lost and sums[-1]["scale"] <= LEAST_LOSS_SCALE:  # a larger scale falls, and may become finite
            raise UserError(
                f"None of the {len(sums)} updates {experience[0]} to {experience[-1]} had a finite gradient; "
                f"their mean loss is {loss:.3g}. Start again with a lower optimizer.lr or, if model.autocast "
                "or model.dtype is float16, in bfloat16 or float32."
            )
        return {"loss": loss}

    def _accumulate(self, number: int, scale: float) -> Tensor:
        """Add this process's gradient of Σ w ℓ; return [Σ w ℓ, Σ w, examples] in float64."""
        accelerator = self.accelerator
        part = (accelerator.process_index, accelerator.num_processes)
        sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
        task = TASKS[self.objective.task]
        self.judge.train(True)
        with _seeded(self.seed, number, part[0]) as generator:
            for batch, counts in self._batches(number, part):
                total, weight = task.loss(self.forward(batch.inputs), batch, self.objective, generator)
                if (penalty := self._penalty()) is not None:
                    total = total + penalty * weight  # Σ w (ℓ + penalty) / Σ w over the micro-batches
                # FSDP2 averages gradients over the processes
                (total * (counts * scale * (part[1] if self.sharding else 1))).backward()
                sums[:2] += counts * torch.stack([total.detach().double(), weight.detach().double()]).to(sums.device)
                sums[2] += counts * batch.size
        return sums

    def _batches(self, number: int, part: tuple[int, int]) -> Iterator[tuple[RewardBatch, int]]:
        """Yield (micro-batch, 1); with sharding then (the last, 0) while another process has more, for its weights."""
        batches, last = iter(self.data.batch(number, part)), None
        while True:
            batch = next(batches, None)
            live = int(batch is not None)
            if not (max_over_processes(live, self.accelerator) if self.sharding else live):
                return
            last = batch or last or next(iter(self.data.batch(number)))
            yield last, live


@contextmanager
def _seeded(seed: int, number: int, process: int) -> Iterator[torch.Generator]:
    """Seed dropout by (seed, number, process) inside the block; yield a generator with a seed of its own."""
    value = int(np.random.SeedSequence([seed, number, process]).generate_state(1, np.uint64)[0]) >> 1
    with torch.random.fork_rng():
        torch.manual_seed(value)
        yield torch.Generator().manual_seed(value + 1)
