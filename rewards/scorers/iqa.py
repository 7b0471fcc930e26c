# SPDX-License-Identifier: Apache-2.0
"""Metrics of pyiqa by name: MUSIQ, NIMA, CLIP-IQA and others of the image alone, SSIM or LPIPS to a source.

It needs the extra `iqa` (github.com/chaofengc/IQA-PyTorch, whose licence is not commercial; read it). Weights
are fetched by pyiqa itself when a metric is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from visalign.errors import did_you_mean, nearest
from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.vlm.requests import source_images


class Iqa:
    """One metric of pyiqa, in its own unit; where it says that lower is better, `higher_is_better` is False.

    A metric with a reference compares with the record's "source". An image that the metric refuses, or gives
    no finite number, has no score.
    """

    name = "iqa"
    unit = "the metric's own"
    range = (-math.inf, math.inf)
    higher_is_better = True

    def __init__(self, metric: str = "musiq", *, device: str | torch.device = "cpu", **options: Any) -> None:
        """Find the metric; its network is made at the first score.

        Args:
            metric: a name of `pyiqa.list_models()`.
            device: where it runs.
            **options: of pyiqa's `create_metric`, such as pretrained_model_path for weights of one's own.
        """
        try:
            # an extra, so it may be missing
            from pyiqa.default_model_configs import DEFAULT_CONFIGS as configs  # type: ignore[import-not-found]
        except ImportError as error:
            raise RewardError(
                f"{self.name}: pyiqa cannot be imported ({error}). Install it: python -m pip install "
                '"visalign[iqa]".'
            ) from error
        known = {key: told for key, told in configs.items() if not key.startswith(("fid", "inception"))}
        if metric not in known:
            hint = did_you_mean(nearest(metric, known, limit=3))
            raise RewardError(
                f"{self.name}: pyiqa has no metric {metric!r} of single images. {hint}".rstrip()
            )
        self.metric, self._device, self._options = metric, torch.device(device), options
        self.unit = f"{metric} of pyiqa"
        self.higher_is_better = not known[metric].get("lower_better", False)
        self.has_reference = known[metric].get("metric_mode") == "FR"

    @cached_property
    def model(self) -> Any:
        """pyiqa's metric."""
        make = import_module("pyiqa").create_metric
        try:
            with _llama_kept(self.metric):
                return make(self.metric, device=self._device, **self._options).eval()
        except (OSError, TypeError) as error:
            raise RewardError(
                f"{self.name}: pyiqa cannot make {self.metric!r} ({type(error).__name__}: {error}). It "
                "fetches its weights itself; where there is no network, put them where pyiqa keeps them, or "
                "name a file by pretrained_model_path. Other options are those of its architecture."
            ) from error

    @property
    def identity(self) -> Identity:
        """What the scores depend on."""
        try:
            library = f"pyiqa {version('pyiqa')}"
        except PackageNotFoundError:
            library = "pyiqa"
        return Identity(judge=self.name, model=f"{library}: {self.metric}", options=dict(self._options))

    @torch.no_grad()
    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score per image, each by itself at its own size; prompts are not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        sources = source_images(request.metadata, reasons) if self.has_reference else {}
        value, model = torch.full((len(request),), torch.nan), self.model
        for row, image in request.images.readable():
            if reasons[row] is not None:
                continue
            shown = [one[None].to(self._device) for one in (image, *([sources[row]] if sources else []))]
            try:
                said = model(*shown)
            except (RuntimeError, ValueError, AssertionError, IndexError) as error:
                reasons[row] = f"pyiqa's {self.metric} refuses the image: {str(error).splitlines()[0]:.120}"
                continue
            found = float((said[0] if isinstance(said, tuple) else said).reshape(-1)[0])
            value[row] = found
            reasons[row] = None if math.isfinite(found) else f"pyiqa's {self.metric} gives {found}"
        return make_scores(value, reasons, self.unit)


@contextmanager
def _llama_kept(metric: str) -> Iterator[None]:
    """Give transformers its Llama back, whose classes pyiqa exchanges in the whole process for its Q-Align.

    Args:
        metric: that is made inside; Q-Align and its kin run on what pyiqa puts there.
    """
    names = ("configuration_llama", "modeling_llama")
    modules = [import_module(f"transformers.models.llama.{name}") for name in names]
    before = [dict(vars(module)) for module in modules]
    models = [before[1][name] for name in ("LlamaModel", "LlamaForCausalLM")]
    forwards = [model.forward for model in models]
    try:
        yield
    finally:
        if not metric.startswith(("qalign", "compare2score")):
            for module, known in zip(modules, before, strict=True):
                vars(module).update(known)
            for model, forward in zip(models, forwards, strict=True):
                model.forward = forward
