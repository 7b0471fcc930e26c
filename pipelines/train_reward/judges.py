# SPDX-License-Identifier: Apache-2.0
"""Judges that are trained: their weights loaded, partly frozen, given adapters, computed with, saved."""

from __future__ import annotations

import os
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.atomic import umask_permissions
from visalign.core import nuclear_diversity
from visalign.errors import UserError, suggestion
from visalign.model_files import read_object
from visalign.precision import autocast_dtype
from visalign.rewards.base.contract import RewardError
from visalign.rewards.hpsv3.ensemble_folders import adapters_of
from visalign.rewards.hpsv3.loading import find_weights
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.loading import ADAPTER, name_base
from visalign.rewards.vlm.template import JudgeSettings, Template
from visalign.training.reward.batch import Outputs, RewardBatch

from .config import AnswerModel, TrainRewardConfig
from .examples import Example, Examples

LANGUAGE = r"(.*\.)?(language|text)_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""Default layers of adapters: the language part, so that the tower's features are computed once."""
_TOKENS = 1 << 16  # Tokens of one pass while training; data.micro_batch is what limits memory


class TrainedJudge(ABC):
    """A judge with its reading of examples and its folder; a `TrainableJudge`."""

    def __init__(self, config: TrainRewardConfig, module: Any, device: torch.device) -> None:
        self.settings: Any = config.model
        self.module, self.device = module, device
        self.autocast_dtype = autocast_dtype(self.settings.autocast, device)
        weights_dtype = getattr(torch, getattr(self.settings, "dtype", "float32"))
        self.compute_dtype: torch.dtype = self.autocast_dtype or weights_dtype
        self.save_dtype: torch.dtype = getattr(torch, self.settings.save_dtype)

    def trainable_parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        return trainable(self.module)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    @abstractmethod
    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        """Encode examples with their labels, which with `heldout` are the truth."""

    @abstractmethod
    def __call__(self, inputs: Any) -> Outputs:
        """Compute the judge's outputs for the rows of a batch."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write what the judge's reward reads."""

    def divide(self) -> Sequence[nn.Parameter]:
        """Prepare for sharing among processes; returns the weights that they do not use equally often."""
        return ()

    def remember(self, examples: Examples) -> Examples:
        """Return examples that are cached where the judge's model is frozen and reads each image once."""
        return examples

    def card_notes(self) -> list[str]:
        """Return lines about the present weights for the card."""
        return []

    def penalty(self) -> Tensor | None:
        """Compute a penalty that is added to the loss, with gradient; None for none."""
        return None

    def precision(self) -> Any:
        dtype = self.autocast_dtype
        return torch.autocast(self.device.type, dtype or torch.float32, enabled=dtype is not None)


class SeeingJudge(TrainedJudge):
    """A judge on a vision-language model, nothing of it trainable yet."""

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        model: Any = config.model
        self.engine = VisionLanguageEngine.from_pretrained(
            model.path, device=device, dtype=getattr(torch, model.dtype), max_tokens_per_batch=_TOKENS
        )
        super().__init__(config, self.engine.model, device)
        self._others: OtherMembers | None = None

    def train(self, mode: bool = True) -> None:
        """Dropout on or off; features of a tower that is trained are forgotten."""
        super().train(mode)
        if not mode and self._is_tower_trained():
            self.engine.clear_features()

    def divide(self) -> Sequence[nn.Parameter]:
        """Make each batch one pass; a frozen tower stays whole, as it sees new images alone."""
        self.engine.network.in_one_pass = True
        return () if self._is_tower_trained() else self.engine.network.tower

    def _is_tower_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.engine.network.tower)

    def unfreeze(self) -> None:
        """Train what `model.train` names: all, or new adapters, drawn from torch's global generator."""
        model, settings = self.engine.model, self.settings
        if settings.train == "full":
            model.requires_grad_(True)
            freeze(model, settings.frozen)
        if settings.train != "lora":
            return
        from peft import LoraConfig

        lora = settings.lora
        targets = LANGUAGE if lora.target_modules is None else list(lora.target_modules)
        alpha: Any = lora.alpha  # peft divides by the rank; fractions are fine
        try:
            model.add_adapter(LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=targets))
        except ValueError as error:
            remedy = "Name linear layers in model.lora.target_modules, or leave it out."
            raise UserError(f"model.lora cannot be added to {settings.path!r}: {error} {remedy}") from error
        if isinstance(settings, AnswerModel) and settings.lora_path is not None:
            by_name = {name.removesuffix(".default.weight"): value.data for name, value in trainable(model)}
            saved = read_adapters("model.lora_path", settings.lora_path, by_name, alpha=lora.alpha)
            for name, value in saved.items():
                by_name[name].copy_(value)
        if settings.diversity is not None:
            self._others = OtherMembers(settings.diversity.others, dict(trainable(model)))

    def penalty(self) -> Tensor | None:
        """−weight times how different the adapters are from those of the members before."""
        return None if self._others is None else -self.settings.diversity.weight * self._others.diversity()

    def odds(self, states: Tensor, yes: Sequence[int], no: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Log-odds of yes over no where an answer begins, and the log of their total probability."""
        logits, log_mass = self.answers(states, [*yes, *no])
        return logits[:, : len(yes)].logsumexp(-1) - logits[:, len(yes) :].logsumexp(-1), log_mass

    def answers(self, states: Tensor, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits of some words where an answer begins, and the log of their total probability."""
        logits = self.engine.network.head_logits(states, list(ids))
        return logits, (logits.logsumexp(-1) - self.engine.network.log_total(states)).clamp(max=0.0)

    def write(self, folder: Path, questions: Sequence[Template], more: Mapping[str, Any] | None = None) -> None:
        """Write `judge.json` with questions and more entries, beside adapters, whole model or base's name."""
        model, settings, train = self.engine.model.eval(), self.engine.settings, self.settings.train
        folder.mkdir(parents=True, exist_ok=True)
        base = base_name(self.settings.path, folder)
        cast(model, self.save_dtype)
        if train != "head":
            model.save_pretrained(folder)
        if train == "full":
            self.engine.processor.save_pretrained(folder)
        elif train == "lora":
            name_base(folder, base)
        rest = {**settings.rest, "base": base, **(more or {})}
        if train == "full":
            del rest["base"]
        templates = {**settings.templates, **{template.name: template for template in questions}}
        JudgeSettings(templates=templates, positions=self.engine.positions, rest=rest).write(folder)
        umask_permissions(folder)


class OtherMembers:
    """Nuclear diversity of the trained LoRA matrices and those of earlier members, folders of trained judges."""

    def __init__(self, folders: Sequence[str], trained: Mapping[str, Tensor]) -> None:
        matrices = {name: value for name, value in trained.items() if ".lora_" in name}
        self.trained = {name.removesuffix(".default.weight"): value for name, value in matrices.items()}
        key = "model.diversity.others"
        self.members = [read_adapters(key, folder, self.trained) for folder in folders]

    def diversity(self) -> Tensor:
        """Mean over the matrices A and B of all layers."""
        values = [
            nuclear_diversity([*(member[name] for member in self.members), value], dim=int(name.endswith("lora_B")))
            for name, value in self.trained.items()
        ]
        return torch.stack(values).mean()


def read_adapters(
    key: str, folder: str, trained: Mapping[str, Tensor], *, alpha: float | None = None
) -> dict[str, Tensor]:
    """Read a trained judge's LoRA matrices of the `trained` layers, refusing others; `key` names the setting.

    With `alpha`, that of the trained adapters, rank and scale must agree too.
    """
    from visalign.adapters.lora import check_lora_kind, other_scales

    try:
        path = find_weights(folder)
        config = read_object(path / ADAPTER)
        check_lora_kind(path, config)
        adapters = adapters_of(path)
    except (OSError, RewardError, UserError) as error:
        raise UserError(f"{key} names {folder!r}. {error} Give a judge trained with model.train lora.") from error
    for name in sorted({*trained, *adapters}):
        axis = 1 if name.endswith("lora_A") else 0
        size = slice(axis, axis + 1) if alpha is None else slice(None)
        there, here = (tuple(a[name].shape[size]) if name in a else "absent" for a in (adapters, trained))
        if there != here:
            raise UserError(f"{key} names {folder!r}, whose {name} is {there} there and {here} here.")
    if alpha is not None and (config.get("lora_alpha") != alpha or other_scales(config)):
        scale = ", ".join([f"lora_alpha {config.get('lora_alpha')}", *other_scales(config)])
        raise UserError(f"{key} names {folder!r}, whose adapters have {scale}, and model.lora.alpha is {alpha:g}.")
    return {name: adapters[name].to(value.device).float() for name, value in trained.items()}


def freeze(model: nn.Module, beginnings: Sequence[str]) -> None:
    """Freeze the parameters whose names begin so."""
    names = [name for name, _ in trainable(model)]
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in names):
            first = sorted({".".join(name.split(".")[:2]) for name in names})
            hint = f"{suggestion(beginning, first)}They begin with {', '.join(first)}."
            raise UserError(f"model.frozen has {beginning!r}, and no name of a trained parameter begins so. {hint}")
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(beginnings)):
            parameter.requires_grad_(False)


def trainable(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]


def cast(network: nn.Module, dtype: torch.dtype) -> None:
    """Convert a network in place for saving; `network.to(dtype)` would fail inside of `unsharded_state`."""
    for value in (*network.parameters(), *network.buffers()):
        if value.is_floating_point():
            value.data = value.data.to(dtype)


def base_name(path: str, folder: Path) -> str:
    """Name the base model in a folder: a packaged name or hub id as it is, others by relative path."""
    return os.path.relpath(path, folder) if Path(path).exists() else path


def refuse(reasons: Sequence[str | None], prompts: Sequence[str]) -> None:
    """Refuse examples that the model cannot read, by UserError."""
    for prompt, reason in zip(prompts, reasons, strict=True):
        if reason is not None:
            text = textwrap.shorten(prompt, 80)
            raise UserError(f"An example with the prompt {text!r} cannot be learnt: {reason}. Take it out of the set.")
