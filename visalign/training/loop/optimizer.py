# SPDX-License-Identifier: Apache-2.0
"""AdamW on float32 master weights: settings, learning rate schedule, clipping, checkpointed state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from visalign.errors import UserError
from visalign.memory import AutoCount
from visalign.settings import Count, Natural, NonNegative, Positive, Share, settings
from visalign.swapping import distribute_like

from .adamw_8bit import AdamW8bit, join_state, split_state
from .checkpoint import Checkpoint, CheckpointError
from .sharding import gathered

Named = Sequence[tuple[str, nn.Parameter]]

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # State of AdamW for each parameter

Beta = Annotated[float, Field(ge=0, lt=1)]


@settings("optimizer")
class AdamWSettings:
    """AdamW, learning rate schedule, clipping and averaging of every training."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw, or adamw_8bit: moments in eight bits (torchao), 2 bytes of memory per trained number instead of 8."""
    lr: Positive = 3e-4
    """Learning rate after the warm-up; `find` compares five in short runs first."""
    warmup_updates: Natural = 0
    """Updates over which the learning rate rises linearly."""
    decay_updates: Count | None = None
    """Update at which the learning rate has fallen to `lr_end` of itself, where it stays; null: constant."""
    decay: Literal["linear", "cosine"] = "linear"
    """Shape of the fall: linear or cosine."""
    lr_end: Share = 0.1
    """Share of the learning rate that is left after `decay_updates`."""
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW β₁ and β₂, each in [0, 1)."""
    eps: Positive = 1e-15
    """AdamW ε. Gradients of adapters in published runs are 5e-9 rms: the usual 1e-8 would leave a third of
    a step. AdamW computes in float32 here, which has room for 1e-15."""
    weight_decay: NonNegative = 1e-4
    """AdamW decoupled weight decay."""
    fused: bool = False
    """Run AdamW's step as one kernel of torch (CPU, CUDA) for all weights; equal up to rounding. Only adamw."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """L2 norm that the gradient is clipped to; .inf does not clip."""
    updates_per_iteration: Count = 1
    """Optimizer updates per iteration."""
    ema_decay: Beta = 0.0
    """Decay of the averaged weights, which are evaluated and saved as the result; 0 switches averaging off."""
    ema_every: Count = 1
    """Updates between two averages; each of the first `ema_every` updates is averaged too."""
    ema_warmup: bool = True
    """The average after n updates uses min(decay, (1 + n)/(10 + n)), as Flow-GRPO's code does."""

    def __post_init__(self) -> None:
        if self.fused and self.name != "adamw":
            raise UserError(f"optimizer.fused is true, and {self.name} has no fused step. Leave one of the two out.")

    def lr_at(self, update: int) -> float:
        """Compute the learning rate of optimizer update 0, 1, 2, ..."""
        rise = min(1.0, (update + 1) / (self.warmup_updates + 1))
        progress = 0.0 if self.decay_updates is None else min(1.0, update / self.decay_updates)
        if self.decay == "cosine":
            progress = (1.0 - math.cos(math.pi * progress)) / 2.0
        return self.lr * rise * (1.0 - (1.0 - self.lr_end) * progress)


@settings("optimizer")
class OptimizerSettings(AdamWSettings):
    """Optimizer of a policy; the defaults are Flow-GRPO's published ones."""

    updates_per_iteration: Count = 2
    """Optimizer updates per iteration; each sees its own part of the samples."""
    micro_batch: AutoCount = 64
    """(image, step) pairs or completions that go through the network together; bounds memory only. auto, of images:
    measured, see rollout.batch_size."""
    ema_decay: Beta = 0.9
    """Decay of the averaged weights, which are evaluated and saved as the result; 0 switches averaging off."""
    ema_every: Count = 8
    """Updates between two averages; each of the first `ema_every` updates is averaged too."""


class TrainedWeights:
    """Trained parameters with float32 masters, and AdamW on the masters.

    At a learning rate of 3e-4 a bfloat16 weight (8 bits) would round most of AdamW's steps away. AdamW
    therefore moves a float32 master of each weight stored in fewer bits; the weight is the rounded master.
    `rates` maps prefixes of parameter names to factors of the learning rate.
    """

    def __init__(self, named: Named, settings: AdamWSettings, *, rates: Mapping[str, float] | None = None) -> None:
        self.named = list(named)
        full = (torch.float32, torch.float64)
        self.masters = [(n, p if p.dtype in full else nn.Parameter(p.detach().float())) for n, p in self.named]
        pairs = zip(self.named, self.masters, strict=True)
        self._low = [(p, master) for (_, p), (_, master) in pairs if p is not master]
        groups: dict[float, list[nn.Parameter]] = {}
        for name, master in self.masters:
            rate = next((factor for prefix, factor in (rates or {}).items() if name.startswith(prefix)), 1.0)
            groups.setdefault(rate, []).append(master)
        rated = [{"params": members, "rate": rate} for rate, members in groups.items()]
        options = {name: getattr(settings, name) for name in ("lr", "eps", "weight_decay")}
        options["betas"] = (settings.betas[0], settings.betas[1])
        self.optimizer = (
            AdamW8bit(rated, **options)
            if settings.name == "adamw_8bit"
            else torch.optim.AdamW(rated, fused=settings.fused or None, **options)
        )

    def begin(self, lr: float) -> None:
        """Set the learning rate of the next step and clear the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("rate", 1.0)
        self.clear()

    def clear(self) -> None:
        """Drop all gradients."""
        for (_, parameter), (_, master) in zip(self.named, self.masters, strict=True):
            parameter.grad = master.grad = None

    def gather_gradients(self, scale: float) -> None:
        """Move the gradients to the masters in float32 and divide them by the loss scale."""
        for parameter, master in self._low:
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.to(master.dtype), None
        if scale != 1.0:
            for _, master in self.masters:
                if master.grad is not None:
                    master.grad.div_(scale)

    def clip(self, max_norm: float) -> float:
        """Clip the gradient to an L2 norm; return the norm before clipping."""
        return float(gathered(nn.utils.clip_grad_norm_([master for _, master in self.masters], max_norm)))

    def step(self) -> None:
        """Take one AdamW step and round the weights to their masters."""
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Copy the masters to the weights stored below float32."""
        for parameter, master in self._low:
            parameter.copy_(master)

    @torch.no_grad()
    def resolution(self) -> float:
        """Compute the median of √v̂ / ε of some 100,000 numbers (NaN: none); near 1, ε swallows the steps."""
        stride, samples = max(1, sum(master.numel() for _, master in self.masters) // 100_000), []
        for group in self.optimizer.param_groups:
            for master in group["params"]:
                if state := self.optimizer.state.get(master):
                    # v̂ = v / (1 − β₂ᵗ)
                    unbiased = 1 - group["betas"][1] ** float(state["step"])
                    if isinstance(self.optimizer, AdamW8bit):
                        second = self.optimizer.second_moment(master)
                    else:
                        second = gathered(state["exp_avg_sq"])
                    squares = second.flatten()[::stride]
                    samples.append(squares.double() / unbiased)
        squares = torch.cat(samples).cpu() if samples else torch.zeros(0)
        squares = squares[squares > 0]
        return float(squares.sqrt().median() / self.optimizer.defaults["eps"]) if len(squares) else math.nan

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the checkpointed state: file stem -> name -> tensor; a moment is "parameter.moment"."""
        moments = {
            part: value
            for name, master in self.masters
            if master in self.optimizer.state
            for key in MOMENTS
            for part, value in split_state(f"{name}.{key}", self.optimizer.state[master][key]).items()
        }
        return {"trainable": {name: m.detach() for name, m in self.masters}, "optimizer": moments}

    @torch.no_grad()
    def restore(self, loaded: Checkpoint) -> None:
        """Restore weights and moments from a checkpoint; refuse those of another model."""
        weights, moments = loaded.tensors["trainable"], loaded.tensors["optimizer"]
        saved = {name: tuple(value.shape) for name, value in weights.items()}
        current = {name: tuple(master.shape) for name, master in self.masters}
        if saved != current:
            differing = sorted(saved.items() ^ current.items())[:4]
            raise CheckpointError(
                f"the checkpoint of step {loaded.step} has other trained parameters than the model, for example "
                f"{differing}: the model folder has changed. Resume with the model that the run started with."
            )
        for name, master in self.masters:
            master.copy_(distribute_like(weights[name], master))
            if f"{name}.step" in moments:
                state = {key: join_state(f"{name}.{key}", moments, master) for key in MOMENTS}
                state |= {key: distribute_like(state[key], master) for key in MOMENTS if key != "step"}
                if self.optimizer.defaults["fused"]:  # the fused kernel counts steps on the weight's device
                    state["step"] = state["step"].to(master.device)
                self.optimizer.state[master] = state
        self.round()
