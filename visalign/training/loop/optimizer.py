# SPDX-License-Identifier: Apache-2.0
"""How the weights move: AdamW on float32 masters, its learning rate, clipping, its part of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from visalign.errors import UserError, suggestion

from .checkpoint import Checkpoint, CheckpointError
from .sharding import distribute_like, gathered

Named = Sequence[tuple[str, nn.Parameter]]

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for each parameter."""

DECAYS = ("linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """AdamW, warm-up, decay, clipping, averages: what every training shares."""

    lr: float = 3e-4
    """Learning rate after the warm-up."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises linearly."""
    decay_updates: int | None = None
    """The learning rate falls to `lr_end` of itself until this update, and stays; null: constant."""
    decay: str = "linear"
    """Form of the fall: linear or cosine."""
    lr_end: float = 0.1
    """Share of the learning rate that is left after `decay_updates`."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW β₁ and β₂."""
    eps: float = 1e-15
    """AdamW ε. Adapters of published runs have gradients of 5e-9 rms, of which the usual 1e-8 would leave a
    third of a step; AdamW computes in float32 here, which 1e-15 suits."""
    weight_decay: float = 1e-4
    """AdamW decoupled weight decay."""
    fused: bool = False
    """AdamW's step as one kernel of torch (CPU, CUDA) for all weights; equal up to rounding."""
    max_grad_norm: float = 1.0
    """The gradient's L2 norm is clipped to this; .inf does not clip."""
    updates_per_iteration: int = 1
    """Optimizer updates per iteration."""
    ema_decay: float = 0.0
    """Decay of the averaged weights, which are evaluated and saved as the result; 0 switches averaging
    off."""
    ema_every: int = 1
    """Updates between two averages."""
    ema_warmup: bool = True
    """The average after n updates uses min(decay, (1 + n)/(10 + n)), as Flow-GRPO's code does."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            above_zero(f"optimizer.{name}", getattr(self, name))
        if not self.max_grad_norm > 0:  # infinity switches clipping off
            raise UserError(f"optimizer.max_grad_norm is {self.max_grad_norm}; it must be above 0.")
        for name in ("updates_per_iteration", "ema_every"):
            at_least(f"optimizer.{name}", getattr(self, name), 1)
        for name in ("warmup_updates", "weight_decay"):
            at_least(f"optimizer.{name}", getattr(self, name), 0)
        choice("optimizer.decay", self.decay, DECAYS)
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise UserError(
                f"optimizer.betas is {self.betas}; give two numbers in [0, 1), e.g. [0.9, 0.999]."
            )
        if self.decay_updates is not None:
            at_least("optimizer.decay_updates", self.decay_updates, 1)
        if not 0 <= self.lr_end <= 1:
            raise UserError(f"optimizer.lr_end is {self.lr_end}; it is a share of the rate, from 0 to 1.")
        if not 0 <= self.ema_decay < 1:
            raise UserError(f"optimizer.ema_decay is {self.ema_decay}; it must be in [0, 1).")

    def lr_at(self, update: int) -> float:
        """Learning rate of optimizer update 0, 1, 2, ..."""
        rise = min(1.0, (update + 1) / (self.warmup_updates + 1))
        gone = 0.0 if self.decay_updates is None else min(1.0, update / self.decay_updates)
        if self.decay == "cosine":
            gone = (1.0 - math.cos(math.pi * gone)) / 2.0
        return self.lr * rise * (1.0 - (1.0 - self.lr_end) * gone)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(AdamWSettings):
    """How the weights of a policy move; the defaults are Flow-GRPO's published ones."""

    updates_per_iteration: int = 2
    """Optimizer updates per iteration; each sees its own part of the samples."""
    micro_batch: int = 64
    """(image, step) pairs or completions that go through the network together; memory only, no effect on the
    update."""
    ema_decay: float = 0.9
    """Decay of the averaged weights, which are evaluated and saved as the result; 0 switches averaging
    off."""
    ema_every: int = 8
    """Updates between two averages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("optimizer.micro_batch", self.micro_batch, 1)


def choice(name: str, given: str, allowed: Sequence[str]) -> None:
    """Refuse what is not among the choices of a setting."""
    if given not in allowed:
        raise UserError(f"{name} is {given!r}. {suggestion(given, allowed)}Allowed: {', '.join(allowed)}.")


def at_least(name: str, given: float, least: float) -> None:
    """Refuse a setting below the least, one that is not finite, or a whole number of more than 63 bits."""
    if not (math.isfinite(given) and given >= least):
        raise UserError(f"{name} is {given}; it must be a finite number of at least {least}.")
    if isinstance(given, int) and given >= 2**63:
        raise UserError(f"{name} is {given}; it must be a whole number below 2^63.")


def above_zero(name: str, given: float) -> None:
    """Refuse a setting that is not above 0 and finite."""
    if not (math.isfinite(given) and given > 0):
        raise UserError(f"{name} is {given}; it must be above 0 and finite.")


class TrainedWeights:
    """The trained parameters, float32 masters of those below float32, and AdamW on the masters.

    At a learning rate of 3e-4 a bfloat16 weight, which has 8 bits, takes in few of AdamW's steps; so AdamW
    moves a float32 master of each weight that is stored in fewer bits, and the weight is the master rounded.

    Args:
        named: names and parameters, in a fixed order.
        settings: AdamW's.
        rates: beginning of a name -> factor of the learning rate.
    """

    def __init__(
        self, named: Named, settings: AdamWSettings, *, rates: Mapping[str, float] | None = None
    ) -> None:
        self.named = list(named)
        self.masters = [(name, _master(parameter)) for name, parameter in self.named]
        self._low = [
            (parameter, master)
            for (_, parameter), (_, master) in zip(self.named, self.masters, strict=True)
            if parameter is not master
        ]
        groups: dict[float, list[nn.Parameter]] = {}
        for name, master in self.masters:
            rate = next((factor for start, factor in (rates or {}).items() if name.startswith(start)), 1.0)
            groups.setdefault(rate, []).append(master)
        odd = {master.device.type for _, master in self.masters} - {"cpu", "cuda"}
        if settings.fused and odd:
            raise UserError(
                f"optimizer.fused is true, and trained weights are on {', '.join(sorted(odd))}: it is for "
                "the CPU and for CUDA. Set optimizer.fused=false."
            )
        self.optimizer = torch.optim.AdamW(
            [{"params": members, "rate": rate} for rate, members in groups.items()],
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=settings.fused or None,
        )

    def begin(self, lr: float) -> None:
        """Set the learning rate of a step and clear the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("rate", 1.0)
        self.clear()

    def clear(self) -> None:
        """Drop all gradients."""
        for (_, parameter), (_, master) in zip(self.named, self.masters, strict=True):
            parameter.grad = master.grad = None

    def gather_gradients(self, scale: float) -> None:
        """Hand the gradients to the masters, in float32, divided by the loss scale."""
        for parameter, master in self._low:
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.to(master.dtype), None
        if scale != 1.0:
            for _, master in self.masters:
                if master.grad is not None:
                    master.grad.div_(scale)

    def clip(self, max_norm: float) -> float:
        """Clip the gradient's L2 norm; returns it as it was."""
        return float(gathered(nn.utils.clip_grad_norm_([master for _, master in self.masters], max_norm)))

    def step(self) -> None:
        """One AdamW step; the weights follow their masters."""
        self.optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Set the weights below float32 to their masters, rounded."""
        for parameter, master in self._low:
            parameter.copy_(master)

    @torch.no_grad()
    def resolution(self) -> float:
        """Median of √v̂ / ε over the numbers that had a gradient; near 1 and below, ε swallows the steps.
        About 100,000 numbers are looked at, evenly spaced."""
        total = sum(master.numel() for _, master in self.masters)
        stride, found = max(1, total // 100_000), []
        for group in self.optimizer.param_groups:
            for master in group["params"]:
                if state := self.optimizer.state.get(master):
                    # v̂ = v / (1 − β₂ᵗ)
                    unbiased = 1 - group["betas"][1] ** float(state["step"])
                    squares = gathered(state["exp_avg_sq"]).flatten()[::stride]
                    found.append((squares.double() / unbiased).cpu())
        seen = torch.cat(found) if found else torch.zeros(0)
        seen = seen[seen > 0]
        return float(seen.sqrt().median() / self.optimizer.defaults["eps"]) if len(seen) else math.nan

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds: file stem -> name -> tensor; a moment is named "parameter.moment"."""
        moments = {
            f"{name}.{key}": self.optimizer.state[master][key]
            for name, master in self.masters
            if master in self.optimizer.state
            for key in MOMENTS
        }
        return {"trainable": {name: m.detach() for name, m in self.masters}, "optimizer": moments}

    @torch.no_grad()
    def restore(self, loaded: Checkpoint) -> None:
        """Put a checkpoint's weights and moments back in place.

        Raises:
            CheckpointError: the checkpoint has other parameters than the model.
        """
        weights, moments = loaded.tensors["trainable"], loaded.tensors["optimizer"]
        there = {name: tuple(value.shape) for name, value in weights.items()}
        here = {name: tuple(master.shape) for name, master in self.masters}
        if there != here:
            odd = sorted(there.items() ^ here.items())[:4]
            raise CheckpointError(
                f"the checkpoint of step {loaded.step} has other trained parameters than the model, for "
                f"example {odd}: the model folder has changed. Resume with the model that the run began with."
            )
        for name, master in self.masters:
            master.copy_(distribute_like(weights[name], master))
            if f"{name}.step" in moments:
                own = {key: moments[f"{name}.{key}"] for key in MOMENTS}
                self.optimizer.state[master] = {
                    key: value if key == "step" else distribute_like(value, master)
                    for key, value in own.items()
                }
                if self.optimizer.defaults["fused"]:  # its kernel counts on the weight's device
                    self.optimizer.state[master]["step"] = own["step"].to(master.device)
        self.round()


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return nn.Parameter(parameter.detach().float())
