# SPDX-License-Identifier: Apache-2.0
"""The LoRA ensemble as a judge: M HPSv3-type members in one pass, what they say and how far they are apart.

Members are made by training with different seeds, which change the generated data, its order, and the new
weights; then their folders are joined:

    visalign train-reward shapes_hpsv3 seed=0 --output members/0
    visalign train-reward shapes_hpsv3 seed=1 --output members/1
    python -c "from visalign.rewards import LoraEnsembleReward as E
    E.from_members(['members/0/judge', 'members/1/judge']).save('ensemble')"

With own files as data the seed changes the order and the new weights alone; split the files for more.

Pairs do not tell a reward's level: a constant added to all scores changes no comparison. They hardly tell
its scale: leads c times as large with a deviation to match say the same of every pair. So each member has a
level and a scale of its own, and the distance between these is no uncertainty. `align` takes it out, on
images that the members know; do so before `save` if "epistemic", "min" or "lower_bound" are to be used.

Sources: Zhai et al., UP-RLHF, arXiv 2401.00243 (LoRA ensembles of reward models); Coste et al., arXiv
2310.02743 (mean, worst case, lower bound); Lakshminarayanan et al., arXiv 1612.01474 (total variance of
members that give mean and variance).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.core.rewards.uncertainty import combine_members
from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.vlm.loading import base_of
from visalign.rewards.vlm.requests import requests
from visalign.rewards.vlm.template import JudgeSettings
from visalign.rewards.weights.checkpoint_files import dtype_of
from visalign.rewards.weights.fingerprints import WeightPrint

from .ensemble_folders import (
    build_ensemble,
    find_folder,
    read_ensemble,
    read_member,
    stack_members,
    write_ensemble,
)
from .ensemble_model import LoraEnsembleModel
from .model import REWARD_TOKEN

VALUES = ("mean", "min", "lower_bound")


class LoraEnsembleReward:
    """Mean reward of M members in Bradley-Terry logits, with a standard deviation that knows its parts.

    σ² = s² + mean of σ_m²: s the deviation between the members' means (epistemic: what the members have not
    learnt alike), σ_m the deviation that each member states (aleatoric: what voters disagree about). The
    parts are `member_0`, `member_1`, ..., "mean", "min" (the most careful member), "epistemic", "aleatoric",
    and "members", how many judged the row.

    A member that gives no finite numbers for a row is left out there, and the row's text says so. Use the
    uncertainty by `value`, or by `UncertaintyUsed` around this judge (Ctrl-U, PURM).
    """

    name = "lora_ensemble"
    unit = "logit"
    range = (-math.inf, math.inf)
    higher_is_better = True

    def __init__(
        self,
        model: str | Path | LoraEnsembleModel = "shapes-hpsv3-ensemble",
        *,
        value: str = "mean",
        beta: float = 1.0,
        min_members: int = 2,
        base: str | Path | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        **options: Any,
    ) -> None:
        """Note the model, which is loaded at the first score.

        Args:
            model: packaged name, folder that `save` wrote, hub id, or the module.
            value: what is scored: "mean"; "min" over the members; "lower_bound", mean − β·s.
            beta: β ≥ 0 of the lower bound.
            min_members: a row that fewer members judged is invalid; from 1, and from 2 for "lower_bound".
                What a single member says has no known deviation.
            base: the base model, in place of the one that judge.json names.
            device: where it runs.
            precision: of the base, "fp32", "bf16", "fp16", or "auto", which is bf16 but on the CPU; adapters
                and heads are float32 always.
            **options: of `engine_of`: attention, device_map, max_tokens_per_batch (all members counted), ...

        Raises:
            ValueError: an option that is not allowed. What loading raises comes with the first score.
        """
        if value not in VALUES:
            raise ValueError(f"{self.name}: value is {value!r}; allowed are {', '.join(VALUES)}.")
        if not 0 <= beta < math.inf:
            raise ValueError(f"{self.name}: beta is {beta}; allowed are finite numbers from 0.")
        least = 2 if value == "lower_bound" else 1
        if min_members < least:
            raise ValueError(
                f"{self.name}: min_members is {min_members}; allowed with value={value!r} is {least} or more."
            )
        self.value, self.beta, self.min_members = value, beta, min_members
        self._given, self._base = model, base
        self._options = {**options, "device": device, "dtype": dtype_of(precision, f"{self.name}: ", device)}

    @classmethod
    def from_members(
        cls, folders: Sequence[str | Path], *, base: str | Path | None = None, **options: Any
    ) -> LoraEnsembleReward:
        """Join trained judges that share their base.

        Args:
            folders: of the members, two or more: adapters, head and judge.json, as `visalign train-reward`
                writes them for `model.kind=hpsv3 model.train=lora`. Ranks may differ.
            base: the base model, in place of the one that the members name.
            **options: see the class.

        Raises:
            FileNotFoundError: a part is missing.
            RewardError: members that differ in base, adapted layers, template, head or pixels.
        """
        judge = cls("", base=base, **options)
        members = [read_member(folder, base) for folder in folders]
        settings, tensors = stack_members(members)
        judge._load(settings, tensors, members[0].base, " + ".join(member.name for member in members))
        return judge

    @classmethod
    def from_pretrained(cls, place: str | Path, **options: Any) -> LoraEnsembleReward:
        """Load an ensemble's folder, packaged name or hub id at once."""
        judge = cls(place, **options)
        _ = judge.model
        return judge

    @cached_property
    def model(self) -> LoraEnsembleModel:
        """The module, loaded when it is first needed."""
        if isinstance(self._given, LoraEnsembleModel):
            self._keep(self._given)
            return self._given
        folder = find_folder(self._given)
        settings, tensors = read_ensemble(folder)
        return self._load(settings, tensors, self._base or base_of(folder, settings), folder.name)

    @torch.no_grad()
    def align(self, images: Any, prompts: Sequence[str]) -> None:
        """Give all members one level and one scale on these images: a constant and a factor for each.

        The scale is that of the member whose scores are spread the most, since a deviation can be added but
        not taken away (`ensemble_model.stretched`); the level is the members' mean. A member's order of
        images stays as it is, and so, but for an approximation, do its probabilities of pairs.

        Args:
            images: images like those that the members learnt from; a hundred or more.
            prompts: theirs.

        Raises:
            RewardError: fewer than two images were judged by all members, or one gives all the same score.
        """
        scores, model = self.score(images, prompts), self.model
        said = torch.stack([scores.parts[f"member_{m}"] for m in range(model.members)]).double()
        known = said[:, scores.valid & said.isfinite().all(0)]
        spread = known.std(1) if known.shape[1] > 1 else torch.zeros(len(known))
        if not bool((spread > 0).all()):
            raise RewardError(
                f"{self.name}: {known.shape[1]} pictures were judged by all members, with spreads of "
                f"{', '.join(f'{one:.3g}' for one in spread.tolist())}; give a hundred or more to align."
            )
        factor = spread.max() / spread
        level = known.mean(1) * factor
        bias = model.heads.biases[-1]
        model.stretch.mul_(factor.to(model.stretch))
        bias[:, 0] += ((level.mean() - level).to(bias)) / model.stretch
        self._keep(model)

    def save(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write the members into one folder (members.safetensors, judge.json) that names its base; float16
        where that loses nothing, else float32, unless `dtype` says otherwise.
        """
        model = self.model
        if self._base is None:
            raise ValueError(
                f"{self.name}: it was made from a module whose base has no name; pass base=, or join member "
                "folders by from_members."
            )
        write_ensemble(Path(folder), model, self._base, dtype)

    @property
    def identity(self) -> Identity:
        """What the scores depend on; the weights are those of the base and of all members."""
        model = self.model
        options = {"clamp": model.clamp, "members": model.members, "value": self.value, "beta": self.beta}
        fields = model.engine.identity_fields(model.template, min_members=self.min_members, **options)
        return Identity(judge=self.name, **{**fields, "weights": str(self._print)})

    @torch.no_grad()
    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """The members' judgement per (image, prompt); metadata is not looked at."""
        model = self.model
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        asked, queries = requests(request, model.template, reasons)
        encoded, told = model.engine.encode(model.template, queries, at=REWARD_TOKEN)
        places, rows = [], []
        for place, row, reason in zip(asked, encoded, told, strict=True):
            reasons[place] = reason
            if row is not None:
                places.append(place)
                rows.append(row)
        mean = torch.full((2, model.members, len(request)), torch.nan)
        if rows:
            found, log_std = model(rows)
            mean[:, :, places] = torch.stack([found, log_std.exp()]).cpu()
        return self._combined(mean[0].double(), mean[1].double(), reasons)

    def _combined(self, mean: Tensor, std: Tensor, reasons: list[str | None]) -> Scores:
        """One judgement [B] of the members' means and deviations [M, B]."""
        answered = mean.isfinite() & std.isfinite()
        number = answered.sum(0)
        notes = [""] * len(reasons)
        for row in (number < len(mean)).nonzero().flatten().tolist():
            if reasons[row] is None:
                out = [
                    f"member_{m} gave mean {float(mean[m, row])} and deviation {float(std[m, row])}"
                    for m in (~answered[:, row]).nonzero().flatten().tolist()
                ]
                notes[row] = f"Left out: {', '.join(out)}."
                if number[row] < self.min_members:
                    reasons[row] = f"{int(number[row])} of {len(mean)} members judged it: {', '.join(out)}"
        mean = torch.where(answered, mean, torch.nan)
        how: Any = self.value
        value, spread = combine_members(mean, how=how, strength=self.beta)
        average, least = (combine_members(mean, how=rule)[0] for rule in ("mean", "min"))
        epistemic = torch.where(number > 1, spread, torch.nan)
        variance = torch.where(answered, std.square(), 0.0).sum(0) / number.clamp(min=1)
        parts = {f"member_{m}": part for m, part in enumerate(mean)}
        parts |= {"mean": average, "min": least, "epistemic": epistemic, "aleatoric": variance.sqrt()}
        parts["members"] = number
        return make_scores(
            value.float(),
            reasons,
            self.unit,
            std=torch.hypot(epistemic, variance.sqrt()).float(),
            parts={name: part.float() for name, part in parts.items()},
            text=notes if any(notes) else None,
        )

    def _load(
        self, settings: JudgeSettings, tensors: Mapping[str, Tensor], base: str | Path, name: str
    ) -> LoraEnsembleModel:
        """Build the module and note its base."""
        model = build_ensemble(settings, tensors, base, **{"name": name, **self._options})
        self._base = base
        self._keep(model)
        return model

    def _keep(self, model: LoraEnsembleModel) -> None:
        """Take the module with the weights that it has."""
        if self.min_members > model.members:
            raise RewardError(
                f"{self.name}: min_members is {self.min_members}, and the ensemble has {model.members}."
            )
        digest = hashlib.sha256(str(model.scaling).encode())
        for key, value in sorted(model.tensors().items()):
            digest.update(key.encode() + value.detach().float().cpu().contiguous().numpy().tobytes())
        self.__dict__["model"] = model
        self._print = WeightPrint(model, f"{model.engine.weights}+{digest.hexdigest()[:32]}")
