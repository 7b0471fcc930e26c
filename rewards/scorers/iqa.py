# SPDX-License-Identifier: Apache-2.0
"""Metrics of pyiqa by name: MUSIQ, NIMA, CLIP-IQA and others; with a source image SSIM, LPIPS and others.

They need the extra `iqa` (github.com/chaofengc/IQA-PyTorch; its licence is non-commercial). pyiqa fetches the
weights when a metric is created.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

from visalign.errors import did_you_mean, nearest
from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.vlm.requests import source_images


class Iqa:
    """Metric of pyiqa, one of `pyiqa.list_models()`, in its own unit; `higher_is_better` is pyiqa's.

    A full-reference metric compares with the record's "source". An image that the metric refuses, or for which it
    returns no finite number, is invalid. `options` are those of pyiqa's `create_metric`, such as pretrained_model_path
    for your own weights.
    """

    name = "iqa"
    unit = "the metric's own"
    range = (-math.inf, math.inf)
    higher_is_better = True
    capabilities = RewardCapabilities(needs_prompt=False)

    def __init__(self, metric: str = "musiq", *, device: str | torch.device = "cpu", **options: Any) -> None:
        try:
            # an extra, so it may be missing
            from pyiqa.default_model_configs import DEFAULT_CONFIGS as configs  # type: ignore[import-not-found]
        except ImportError as error:
            raise RewardError(
                f'{self.name}: pyiqa is missing ({error}). Run: python -m pip install "visalign[iqa]".'
            ) from error
        metrics = {key: value for key, value in configs.items() if not key.startswith(("fid", "inception"))}
        if metric not in metrics:
            hint = did_you_mean(nearest(metric, metrics, limit=3))
            raise RewardError(f"{self.name}: pyiqa has no metric {metric!r} of single images. {hint}".rstrip())
        self.metric, self._device, self._options = metric, torch.device(device), options
        self.unit = f"{metric} of pyiqa"
        self.higher_is_better = not metrics[metric].get("lower_better", False)
        self.has_reference = metrics[metric].get("metric_mode") == "FR"

    @cached_property
    def model(self) -> Any:
        make = import_module("pyiqa").create_metric
        try:
            with _restore_llama(self.metric):
                return make(self.metric, device=self._device, **self._options).eval()
        except (OSError, TypeError) as error:
            raise RewardError(
                f"pyiqa cannot make {self.metric!r} ({type(error).__name__}: {error}). Give pretrained_model_path."
            ) from error

    @property
    def identity(self) -> Identity:
        model = f"pyiqa {version('pyiqa')}: {self.metric}"
        return Identity(judge=self.name, model=model, options=dict(self._options))

    @torch.no_grad()
    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score each image by itself at its own size; prompts are ignored."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        sources = source_images(request.metadata, reasons) if self.has_reference else {}
        value, model = torch.full((len(request),), torch.nan), self.model
        for row, image in request.images.readable():
            if reasons[row] is not None:
                continue
            inputs = [image, sources[row]] if sources else [image]
            try:
                output = model(*(pixels[None].to(self._device) for pixels in inputs))
            except (RuntimeError, ValueError, AssertionError, IndexError) as error:
                reasons[row] = f"pyiqa's {self.metric} refuses the image: {str(error).splitlines()[0]:.120}"
                continue
            score = float((output[0] if isinstance(output, tuple) else output).reshape(-1)[0])
            value[row] = score
            reasons[row] = None if math.isfinite(score) else f"pyiqa's {self.metric} gives {score}"
        return make_scores(value, reasons, self.unit)


@contextmanager
def _restore_llama(metric: str) -> Iterator[None]:
    """Restore transformers' Llama, which pyiqa patches in the whole process for its Q-Align variants."""
    names = ("configuration_llama", "modeling_llama")
    modules = [import_module(f"transformers.models.llama.{name}") for name in names]
    before = [dict(vars(module)) for module in modules]
    models = [before[1][name] for name in ("LlamaModel", "LlamaForCausalLM")]
    forwards = [model.forward for model in models]
    try:
        yield
    finally:
        if not metric.startswith(("qalign", "compare2score")):
            for module, attributes in zip(modules, before, strict=True):
                vars(module).update(attributes)
            for model, forward in zip(models, forwards, strict=True):
                model.forward = forward
