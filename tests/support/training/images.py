# SPDX-License-Identifier: Apache-2.0
"""A flow-matching policy small enough to train in a test, and a reward it can learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.training.metric_families import without_times
from visalign.interfaces import DiffusionPolicy, ForwardCount, Scores
from visalign.training import (
    DiffusionObjectiveSettings,
    FewStepDistillation,
    FlowGRPO,
    OptimizerSettings,
    RewardGradient,
    RolloutSettings,
    RunSettings,
    Trainer,
    VelocityRegression,
    read_metrics,
)
from visalign.training.loop import checkpoint
from visalign.training.loop.processes import Shares

RECORDS = [{"prompt": word, "tag": tag} for word, tag in [("bright", "up"), ("dark", "down"), ("light", "up")]]
WORDS = {"bright": 0, "dark": 1, "light": 2, "": 0}


class ToyCondition:
    """Prompt numbers."""

    def __init__(self, index: Tensor) -> None:
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def select(self, index: Tensor) -> ToyCondition:
        return ToyCondition(self.index[index])


class ToyNet(nn.Module):
    """v(x, σ, prompt) on [4, 4, 4] latents: a fixed part and a trained part that starts at zero."""

    _repeated_blocks = ("Linear",)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.base = nn.Conv2d(4, 4, 3, padding=1, bias=False, dtype=dtype)
        self.base.weight.data = 0.1 * torch.randn(4, 4, 3, 3, generator=draw).to(dtype)
        self.base.requires_grad_(False)
        self.register_buffer("unused", torch.zeros(1))  # DDP broadcasts buffers
        self.shift = nn.Parameter(torch.zeros(3, 4, dtype=dtype))
        self.mix = nn.Linear(4, 4, bias=False, dtype=dtype)
        nn.init.zeros_(self.mix.weight)

    def forward(self, x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        own = self.mix(x.movedim(1, -1)).movedim(-1, 1) * sigma.reshape(-1, 1, 1, 1)
        return x + self.base(x) + own + self.shift[prompt][:, :, None, None]


class ToyPolicy:
    """The policy contract on `ToyNet`; with `guided`, an unconditional pass without gradient comes first."""

    latent_shape = (4, 4, 4)
    prediction = "velocity"

    def __init__(self, dtype: torch.dtype = torch.float32, guided: bool = False) -> None:
        self.storage_dtype = dtype
        self.net = ToyNet(dtype)
        self.guided = guided
        self.count = ForwardCount()
        self.encoded: list[list[str]] = []

    @property
    def module(self) -> nn.Module:
        return self.net

    @property
    def device(self) -> torch.device:
        return self.net.shift.device

    @property
    def forward_count(self) -> ForwardCount:
        return self.count

    def encode(self, prompts: Sequence[str]) -> ToyCondition:
        self.encoded.append(list(prompts))
        return ToyCondition(torch.tensor([WORDS[p] for p in prompts]))

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.storage_dtype

    def times(self, sigmas: Tensor) -> Tensor:
        return 1000 * sigmas

    def velocity(self, x: Tensor, sigma: Tensor, condition: ToyCondition, time: Tensor | None = None) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        if torch.is_grad_enabled():
            self.count.forward_backward += len(x)
        else:
            self.count.forward += len(x)
        unguided = None
        if self.guided:
            self.count.forward += len(x)
            with torch.no_grad():
                unguided = self.net(x, sigma.to(x.dtype), torch.zeros_like(condition.index))
        v = self.net(x, sigma.to(x.dtype), condition.index)
        if unguided is not None:
            v = unguided + 1.5 * (v - unguided)
        return v.to(dtype)

    def decode(self, latents: Tensor) -> Tensor:
        return torch.sigmoid(latents[:, :3].float()).repeat_interleave(2, 2).repeat_interleave(2, 3)

    def sigmas(self, steps: int, *, timestep_schedule: str = "diffusers") -> Tensor:
        return torch.linspace(1, 0, steps + 1)

    @contextmanager
    def reference(self) -> Iterator[None]:
        saved = [p.detach().clone() for _, p in self.trainable_parameters()]
        with torch.no_grad():
            for _, p in self.trainable_parameters():
                p.zero_()
        try:
            yield
        finally:
            with torch.no_grad():
                for (_, p), own in zip(self.trainable_parameters(), saved, strict=True):
                    p.copy_(own)

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.net.named_parameters() if p.requires_grad]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)


def policy_weights(policy: ToyPolicy) -> Tensor:
    """All trained numbers, in a row."""
    return torch.cat([p.detach().flatten() for _, p in policy.trainable_parameters()])


def gradients_of(policy: Any) -> Tensor:
    """The existing gradients, in a row."""
    return torch.cat([p.grad.flatten() for _, p in policy.trainable_parameters() if p.grad is not None])


class Brightness:
    """Mean brightness where the prompt asks for light, its negative where it asks for dark."""

    name, unit, range, higher_is_better = "brightness", "level", (-1.0, 1.0), True

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Any = None) -> Scores:
        level = images.mean((1, 2, 3))
        sign = torch.tensor([-1.0 if p == "dark" else 1.0 for p in prompts])
        value = level * sign
        return Scores(
            value=value, valid=torch.ones(len(value), dtype=torch.bool), unit="level", parts={"level": level}
        )

    def score_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        sign = torch.tensor([-1.0 if p == "dark" else 1.0 for p in prompts])
        return images.mean((1, 2, 3)) * sign


class Loud(Brightness):
    """Ten thousand times one colour's share of light: it dominates a sum."""

    def __init__(self, colour: int = 0) -> None:
        self.colour = colour

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Any = None) -> Scores:
        value = 1e4 * images[:, self.colour].mean((1, 2))
        return Scores(value=value, valid=torch.ones(len(value), dtype=torch.bool), unit="level")


ROLLOUT = {"prompts_per_iteration": 6, "group_size": 8, "steps": 4, "batch_size": 48, "noise_level": 0.5}
CHANGES = {"kl": 0.0, "surrogate_options": {"eps_low": 0.1, "eps_high": 0.1}, "advantage_options": {"scale": "group"}}
OPTIMIZER = {"lr": 0.05, "updates_per_iteration": 2, "micro_batch": 64, "ema_decay": 0.5, "ema_every": 1}


def toy_trainer(
    folder: Path,
    *,
    policy: ToyPolicy | None = None,
    reward: Any = None,
    records: Any = RECORDS,
    rollout: dict[str, Any] | None = None,
    objective: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    accelerator: Accelerator | None = None,
    evaluate: Any = None,
    progress: Any = None,
    **arguments: Any,
) -> Trainer[Any]:
    """A trainer on the toy; each dictionary changes single settings, and the row's fields with `changes`."""
    chosen = dict(objective or {})
    row = {"algorithm": "flow_grpo"} if "algorithm" not in chosen else {}
    changes = {**(CHANGES if row else {}), **chosen.pop("changes", {})}
    settings = DiffusionObjectiveSettings(**row, **chosen, changes=changes)
    regression, ascent = settings.regression is not None, settings.ascent is not None
    quiet = regression or ascent or settings.few_step is not None
    sampling = {key: value for key, value in ROLLOUT.items() if not (quiet and key == "noise_level")}
    kind: Any = VelocityRegression if regression else RewardGradient if ascent else FlowGRPO
    kind = kind if settings.few_step is None else FewStepDistillation
    algorithm = kind(
        cast(DiffusionPolicy, policy or ToyPolicy()),
        reward or Brightness(),
        records,
        rollout=RolloutSettings(**{**sampling, **(rollout or {})}),
        objective=settings,
        accelerator=accelerator or Accelerator(cpu=True),
        **{"seed": 0, **arguments},
    )
    return Trainer(
        algorithm,
        run=RunSettings(**{"folder": folder, "iterations": 3, "config": {"seed": 0}, **(run or {})}),
        optimizer=OptimizerSettings(**{**OPTIMIZER, **(optimizer or {})}),
        evaluate=evaluate,
        progress=progress,
    )


def none_owned(shares: Shares) -> Shares:
    """The same samples, all of another process."""
    return Shares(shares.accelerator, [torch.zeros(0, dtype=torch.int64), torch.arange(len(shares.own))])


def outcome(folder: Path) -> tuple[str, dict[str, dict[str, bytes]], list[dict[str, Any]]]:
    """What equal runs share: the last checkpoint's name and tensors, and the metrics without times."""
    stored = checkpoint.folders(folder / "checkpoints")[-1]
    tensors = {
        str(path.relative_to(stored)): {
            name: value.reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, value in load_file(path).items()  # the headers of parts have an order of their own
        }
        for path in stored.rglob("*.safetensors")
    }
    return stored.name, tensors, [without_times(row) for row in read_metrics(folder / "metrics.jsonl")]


def check_resume(make: Callable[..., Trainer[Any]], folder: Path, first: int, last: int, **run: Any) -> Any:
    """(`outcome`, trainer) of a run that stopped after `first` of `last` iterations; it equals one that did not."""
    for name, parts in (("whole", (last,)), ("parts", (first, last))):
        for iterations in parts:
            trainer = make(folder / name, run={"iterations": iterations, **run})
            trainer.resume()
            trainer.train()
    uninterrupted = outcome(folder / "whole")
    assert uninterrupted == outcome(folder / "parts")
    return uninterrupted, trainer
