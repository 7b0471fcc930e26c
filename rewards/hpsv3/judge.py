# SPDX-License-Identifier: Apache-2.0
"""HPSv3: human preference for an image and its prompt, as a mean and a standard deviation.

Source: Ma et al., "HPSv3: Towards Wide-Spectrum Human Preference Score", arXiv 2508.03789. `loading` lists
the files and folders that are read; published weights are asked in the words of their training.

Differences from the released inference: the standard deviation is returned, not its logarithm; the head runs
at the reward token alone; a reward token in a prompt is escaped; the mode of positions is explicit; files are
read as by all judges (upright, over white, 16 bits scaled). By the released code the published weights were
trained with plain positions ("1d"), their default here; under three-axis positions they give other scores.

The standard deviation of the published weights carries little: their training averages −ln σ(z) over draws,
which falls as the deviation shrinks, and so collapses it (`visalign.core.preference.uncertainty` has the
likelihood of the paper, which does not). One published output has 0.012 beside a mean of 5.8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.rewards.base.contract import RewardError, check_counts, make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity
from visalign.rewards.vlm.engine import check_loading
from visalign.rewards.vlm.requests import askable_rows, requests
from visalign.rewards.vlm.template import Template
from visalign.rewards.weights.checkpoint_files import dtype_of
from visalign.rewards.weights.fingerprints import WeightPrint, evaluation_mode

from .head import ConditionedHead
from .loading import load_hpsv3
from .model import HPSv3Batch, HPSv3Model, mark_not_finite

PUBLISHED = "MizzenAI/HPSv3"
"""Hub id of the published weights; config and processor come from `loading.BASE`."""


class HPSv3:
    """Mean reward in Bradley-Terry logits, unbounded, with its standard deviation in the same unit.

    The model is loaded at the first score.

    Args:
        model: packaged name, folder in our layout or the published one, the published file, hub id
            (`PUBLISHED`), or the module.
        base: config and processor for the published layout; see `loading.load_hpsv3`.
        template: replaces the folder's.
        ramp: of HPSv3++, whose head takes the generator's progress in RL: iterations of a run over which it goes from
            0.3 to 1 where the reward is trained on; it is 0 elsewhere.
    """

    name = "hpsv3"
    unit = "logit"
    range = (-math.inf, math.inf)
    higher_is_better = True

    def __init__(
        self,
        model: str | Path | HPSv3Model = "shapes-hpsv3",
        *,
        base: str | Path | None = None,
        template: Template | None = None,
        ramp: int | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        **options: Any,
    ) -> None:
        check_loading(self.name, options)
        check_counts(self.name, ramp=ramp)
        self.iteration, self._ramp = 0.0, ramp
        at = None if ramp is None else self.at
        self.capabilities = RewardCapabilities(at_iteration=at, takes_gpu_images=True)
        self._source = model
        self._options = {"base": base, "template": template, "device": device, **options}
        self._options["dtype"] = dtype_of(precision, "hpsv3: ", device)

    @cached_property
    def model(self) -> HPSv3Model:
        """Module, loaded when it is first needed."""
        if isinstance(self._source, HPSv3Model):  # may be in training
            self._print = WeightPrint(self._source, None)
            return self._source
        model = load_hpsv3(self._source, **self._options)
        if self._ramp and not isinstance(model.head, ConditionedHead):
            raise RewardError(
                f"{self.name}: ramp is of HPSv3++, and the head of {str(self._source)!r} takes no iteration. Leave it "
                "out, or train one: visalign train-reward model.condition=256."
            )
        self._print = WeightPrint(model, model.engine.weights)
        return model

    def at(self, iteration: int) -> HPSv3:
        """Return the reward for a policy after `iteration` iterations of its run; it shares the model."""
        _ = self.model  # loaded once for all
        changed = copy(self)
        changed.iteration = 0.3 + 0.7 * min(1.0, iteration / (self._ramp or 1))
        return changed

    @property
    def identity(self) -> Identity:
        """Identity of the scores; positions are among the options."""
        condition = {"iteration": self.iteration} if isinstance(self.model.head, ConditionedHead) else {}
        fields = self.model.engine.identity_fields(self.model.template, clamp=self.model.clamp, **condition)
        return Identity(judge=self.name, **{**fields, "weights": str(self._print)})

    def _encode(self, images: Sequence[Tensor], prompts: Sequence[str]) -> HPSv3Batch:
        return replace(self.model.encode(images, prompts), iteration=self.iteration)

    @torch.no_grad()
    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images for their prompts by mean and standard deviation; metadata is ignored."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.model.template, reasons)
        batch = self._encode([query.images[0] for query in queries], [query.prompt for query in queries])
        for row, reason in zip(rows, batch.reasons, strict=True):
            reasons[row] = reason
        rows = [rows[index] for index in batch.index]
        mean, log_std = torch.zeros(0), torch.zeros(0)
        if rows:
            with evaluation_mode(self.model):
                mean, log_std = self.model(batch)
        value, std = (scatter(column, rows, len(request)) for column in (mean, log_std.exp()))
        mark_not_finite(rows, value, std, reasons)
        return make_scores(value, reasons, self.unit, std=std, parts={"mean": value, "std": std})

    def score_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Compute the means [B] float32 of images [B, 3, H, W] in [0, 1], differentiable in the pixels."""
        rows = askable_rows(self.model.template, prompts)
        batch = self._encode([images[row] for row in rows], [prompts[row] for row in rows])
        value = torch.full((len(prompts),), torch.nan)
        if len(batch):
            with evaluation_mode(self.model):
                value[[rows[index] for index in batch.index]] = self.model(batch)[0].cpu()
        return value
