# SPDX-License-Identifier: Apache-2.0
"""LoRA ensemble as a reward: M HPSv3-type members in one pass, their mean and their disagreement.

Members come from trainings with different seeds, which change the generated data, its order, and the new
weights; then their folders are joined:

    visalign train-reward shapes_hpsv3 seed=0 --output members/0
    visalign train-reward shapes_hpsv3 seed=1 --output members/1
    python -c "from visalign.rewards import LoraEnsembleReward as E
    E.from_members(['members/0/judge', 'members/1/judge']).save('ensemble')"

With data from files the seed changes only the order and the new weights; split the files for more.

Pairs do not determine a reward's level: a constant added to all scores changes no comparison. They hardly
determine its scale: leads c times as large, with a deviation to match, predict the same for every pair. So
each member has its own level and scale, and the distance between these is no uncertainty. `align` removes it,
on images like those of the training; call it before `save` if "epistemic" or "min" are used.

Sources: Zhai et al., UP-RLHF, arXiv 2401.00243 (LoRA ensembles of reward models); Coste et al., arXiv
2310.02743 (mean, worst case, lower bound); Lakshminarayanan et al., arXiv 1612.01474 (total variance of
members that give mean and variance).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.core.rewards.uncertainty import combine_members
from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, check_counts, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.combine.ensemble import combine_scores
from visalign.rewards.vlm.loading import base_of
from visalign.rewards.vlm.requests import requests
from visalign.rewards.vlm.template import JudgeSettings
from visalign.rewards.weights.checkpoint_files import dtype_of
from visalign.rewards.weights.fingerprints import WeightPrint

from .ensemble_folders import build_ensemble, read_ensemble, read_member, stack_members, write_ensemble
from .ensemble_model import LoraEnsembleModel
from .loading import find_weights
from .model import REWARD_TOKEN


class LoraEnsembleReward:
    """Mean reward of M members in Bradley-Terry logits, with a standard deviation and its two parts.

    σ² = s² + mean of σ_m²: s the deviation between the members' means (epistemic: what the members learnt
    differently), σ_m the deviation that each member states (aleatoric: what voters disagree about). The parts
    are `member_0`, `member_1`, ..., "mean", "min" (the most careful member), "epistemic", "aleatoric", and
    "members", the number of members that judged the row.

    A member without finite numbers for a row is left out there, and the row's text says so. `UncertaintyUsed`
    around this reward uses the uncertainty (bound, Ctrl-U, PURM). The model is loaded at the first score.

    Args:
        model: packaged name, folder that `save` wrote, hub id, or the module.
        min_members: a row that fewer members judged is invalid. A single member's score has no known deviation.
        base: the base model, replacing the one that judge.json names.
        **options: of `engine_of`, as are device and precision; max_tokens_per_batch counts all members, and
            adapters and heads are always float32.
    """

    name = "lora_ensemble"
    unit = "logit"
    range = (-math.inf, math.inf)
    higher_is_better = True

    def __init__(
        self,
        model: str | Path | LoraEnsembleModel = "shapes-hpsv3-ensemble",
        *,
        min_members: int = 2,
        base: str | Path | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        **options: Any,
    ) -> None:
        check_counts(self.name, min_members=min_members)
        self.min_members = min_members
        self._source, self._base = model, base
        self._options = {**options, "device": device, "dtype": dtype_of(precision, f"{self.name}: ", device)}

    @classmethod
    def from_members(cls, folders: Sequence[str | Path], **options: Any) -> LoraEnsembleReward:
        """Join two or more trained judges that share their base, with the options of the class.

        A member's folder is as `visalign train-reward` writes it for `model.kind=hpsv3 model.train=lora`;
        ranks may differ.
        """
        judge = cls("", **options)
        members = [read_member(folder) for folder in folders]
        settings, tensors = stack_members(members)
        judge._load(settings, tensors, members[0].base, " + ".join(member.name for member in members))
        return judge

    @cached_property
    def model(self) -> LoraEnsembleModel:
        """Module, loaded when it is first needed."""
        if isinstance(self._source, LoraEnsembleModel):
            self._set_model(self._source)
            return self._source
        folder = find_weights(self._source)
        settings, tensors = read_ensemble(folder)
        return self._load(settings, tensors, self._base or base_of(folder, settings), folder.name)

    @torch.no_grad()
    def align(self, images: Any, prompts: Sequence[str]) -> None:
        """Give all members one level and one scale on these images, a hundred or more like those of their training.

        The scale is that of the member with the largest spread, since a deviation can be added but not taken away
        (`ensemble_model.stretch_scale`); the level is the members' mean. A member's order of images does not change,
        nor, up to an approximation, do its probabilities of pairs.
        """
        scores, model = self.score(images, prompts), self.model
        by_member = torch.stack([scores.parts[f"member_{m}"] for m in range(model.members)]).double()
        judged_scores = by_member[:, scores.valid & by_member.isfinite().all(0)]
        spread = judged_scores.std(1) if judged_scores.shape[1] > 1 else torch.zeros(len(judged_scores))
        if not bool((spread > 0).all()):
            raise RewardError(
                f"{self.name}: {judged_scores.shape[1]} images were judged by all members; give 100 or more."
            )
        factor = spread.max() / spread
        level = judged_scores.mean(1) * factor
        bias = model.heads.biases[-1]
        model.stretch.mul_(factor.to(model.stretch))
        bias[:, 0] += ((level.mean() - level).to(bias)) / model.stretch
        self._set_model(model)

    def save(self, folder: str | Path) -> None:
        """Write the members into one folder (members.safetensors, judge.json) that names its base.

        Weights are float16 where that loses nothing, else float32.
        """
        model = self.model
        if self._base is None:
            raise ValueError(f"{self.name}: it was made from a module whose base has no name; pass base=.")
        write_ensemble(Path(folder), model, self._base)

    @property
    def identity(self) -> Identity:
        """Identity of the scores; the weights are those of the base and of all members."""
        model = self.model
        options = {"clamp": model.clamp, "members": model.members}
        fields = model.engine.identity_fields(model.template, min_members=self.min_members, **options)
        return Identity(judge=self.name, **{**fields, "weights": str(self._print)})

    @torch.no_grad()
    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        model = self.model
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, model.template, reasons)
        encoded, encoding_reasons = model.engine.encode(model.template, queries, at=REWARD_TOKEN)
        for row, reason in zip(rows, encoding_reasons, strict=True):
            reasons[row] = reason
        valid = [(row, tokens) for row, tokens in zip(rows, encoded, strict=True) if tokens is not None]
        mean, std = (torch.full((model.members, len(request)), torch.nan) for _ in range(2))
        if valid:
            index = [row for row, _ in valid]
            member_mean, log_std = model([tokens for _, tokens in valid])
            mean[:, index], std[:, index] = member_mean.cpu(), log_std.exp().cpu()
        is_finite = mean.isfinite() & std.isfinite()
        failures = [
            [
                f"member_{m} gave mean {float(mean[m, row])} and deviation {float(std[m, row])}"
                for m in (~is_finite[:, row]).nonzero().flatten().tolist()
            ]
            for row in range(len(request))
        ]
        # rows that were not asked have a reason, and no member is to blame
        notes = [f"Left out: {'; '.join(f)}." if f and not r else "" for f, r in zip(failures, reasons, strict=True)]
        mean = torch.where(is_finite, mean, torch.nan).double()
        labels = [f"member_{m}" for m in range(model.members)]
        scores = combine_scores(
            labels, mean, std.double().square(), reasons, failures, unit=self.unit, min_members=self.min_members
        )
        smallest = torch.where(scores.valid, combine_members(mean, how="min")[0].float(), torch.nan)
        parts = {**scores.parts, "mean": scores.value, "min": smallest}
        return replace(scores, parts=parts, text=notes if any(notes) else None)

    def _load(self, settings: JudgeSettings, tensors: Mapping[str, Tensor], base: Any, name: str) -> LoraEnsembleModel:
        model = build_ensemble(settings, tensors, base, **{"name": name, **self._options})
        self._base = base
        self._set_model(model)
        return model

    def _set_model(self, model: LoraEnsembleModel) -> None:
        if self.min_members > model.members:
            raise RewardError(f"{self.name}: min_members is {self.min_members}, and the ensemble has {model.members}.")
        digest = hashlib.sha256(str(model.scaling).encode())
        for key, value in sorted(model.tensors().items()):
            digest.update(key.encode() + value.detach().float().cpu().contiguous().numpy().tobytes())
        self.__dict__["model"] = model
        self._print = WeightPrint(model, f"{model.engine.weights}+{digest.hexdigest()[:32]}")
