# SPDX-License-Identifier: Apache-2.0
"""Engine of vision-language judges: one prefill per request, without repeated work.

An image goes through the vision tower once for all prompts and calls; requests with the same images share their common
prefix; only the needed rows of the language head are multiplied. Positions: "mrope" are the three axes of Qwen2-VL
(arXiv 2409.12191, section 2.1); "1d" counts tokens as in text, which is how some published heads were trained. Scores
differ, so positions are part of the identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.interfaces import RewardCapabilities
from visalign.rewards.base.contract import RewardError, check_counts
from visalign.rewards.base.identity import Identity
from visalign.rewards.weights.checkpoint_files import dtype_of
from visalign.rewards.weights.fingerprints import WeightPrint

from .generation import JudgeAnswers, generate_answers
from .loading import PLACING, load_seeing_model
from .network import SeeingNetwork, image_encoder
from .requests import Query, RowEncoder, SeenImage, TokenRow
from .template import POSITIONS, JudgeSettings, Template

__all__ = ["AnswerLogits", "HiddenStates", "JudgeAnswers", "Query", "TokenRow", "VisionLanguageEngine"]

LOADING = (
    *("positions", "adapter", *PLACING, "max_tokens_per_batch", "max_tokens", "feature_bytes"),
    *("min_pixels", "max_pixels", "window"),
)
"""Options of a judge that `VisionLanguageEngine.from_pretrained` takes."""


@dataclass(frozen=True)
class AnswerLogits:
    """Logits of the next token for B requests."""

    logits: Tensor  # [B, K] float32 of the requested tokens; NaN where there is a reason
    log_total: Tensor | None  # [B] float32 logsumexp over the whole vocabulary; None if not requested
    reasons: list[str | None]  # Why a request could not be judged; None for the others

    @property
    def mass(self) -> Tensor:
        """[B] float64 probability of the K tokens together, if `log_total` was requested."""
        assert self.log_total is not None
        # float32 rounding would depend on the batch
        return (self.logits.double().logsumexp(-1) - self.log_total.double()).exp().clamp(max=1.0)


@dataclass(frozen=True)
class HiddenStates:
    states: Tensor  # [B, H] float32; NaN where there is a reason
    reasons: list[str | None]  # Why a request could not be judged; None for the others


class VisionLanguageEngine:
    """Vision-language model that answers questions: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, transformers' InternVL or SmolVLM.

    Args:
        name: folder name or hub id, for the identity.
        positions: "mrope" or "1d"; that of the settings, else "mrope", when None. InternVL and SmolVLM have only "1d".
        settings: templates and further settings of the model's folder.
        max_tokens_per_batch: tokens of one forward pass, with padding; "auto" measures how many fit a GPU, and is
            8192 elsewhere.
        max_tokens: limit of one request; that of the model's config when None.
        feature_bytes: cache size for image features.
        weights: fingerprint of the weight files, for the identity; that of the weights in memory when "".
        **pixels: min_pixels and max_pixels of a resized image, and `window` of `PatchCutter`; defaults are "pixels" of
            the settings, then the processor's.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        name: str = "model",
        positions: str | None = None,
        settings: JudgeSettings | None = None,
        max_tokens_per_batch: int | Literal["auto"] = 8192,
        max_tokens: int | None = None,
        feature_bytes: int = 1 << 28,
        weights: str = "",
        **pixels: int,
    ) -> None:
        number = None if max_tokens_per_batch == "auto" else max_tokens_per_batch
        check_counts(name, max_tokens_per_batch=number)
        self.model, self.processor, self.name, self.revision = model, processor, name, ""
        self.set_fingerprint(weights)
        self.settings = settings or JudgeSettings()
        images = image_encoder(model, processor, **{**self.settings.rest.get("pixels", {}), **pixels})
        positions = positions or self.settings.positions or "mrope"
        if positions not in POSITIONS:
            raise RewardError(f"positions is {positions!r}; allowed are {' and '.join(map(repr, POSITIONS))}.")
        self.positions = positions if images.merge else "1d"
        tokenizer = processor.tokenizer
        self.network = SeeingNetwork(
            model,
            images,
            positions=self.positions,
            pad=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
            max_tokens=max_tokens_per_batch,
            feature_bytes=feature_bytes,
        )
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.rows = RowEncoder(processor, model.config.image_token_id, images, max_tokens or limit)
        self.token_ids = self.rows.word_ids

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        positions: str | None = None,
        adapter: str | Path | None = None,
        **options: Any,
    ) -> VisionLanguageEngine:
        """Load a model with its processor and its `judge.json`; `**options` are those of the class and of `PLACING`.

        A device "meta" reads no weight, only shapes. `adapter` is a LoRA as peft saves it, merged into the weights;
        `quantization` is "int8" or "int4" for the language part, by bitsandbytes.
        """
        placing = {name: options.pop(name) for name in PLACING if name in options}
        loaded, revision = load_seeing_model(folder_or_id, device=device, dtype=dtype, adapter=adapter, **placing)
        engine = cls(**{**loaded, **options}, positions=positions)
        engine.revision = revision
        return engine

    def template(self, kind: str, default: Template) -> Template:
        """Return the folder's template of a kind ("yes_no", "rating", "pair", ...), else the default."""
        return self.settings.templates.get(kind, default)

    def identity_fields(self, template: Template, **options: Any) -> dict[str, Any]:
        return {
            "model": self.name,
            "weights": self.weights,
            "revision": self.revision,
            "template": template.text,
            "preprocessing": self.network.images.settings(),
            "dtype": str(self.network.trunk.get_input_embeddings().weight.dtype).removeprefix("torch."),
            "options": {"positions": self.positions, **_quantization(self.model), **options},
        }

    def encode(
        self, template: Template, queries: Sequence[Query], *, at: str | None = None
    ) -> tuple[list[TokenRow | None], list[str | None]]:
        """Encode B requests as (rows or None, reasons or None), up to the special token `at` or the last token."""
        rows: list[TokenRow | None] = []
        reasons: list[str | None] = []
        measured: dict[int, SeenImage] = {}  # keyed by id(): the queries keep their tensors alive
        for query in queries:
            try:
                row, reason = self.rows(template, query, at, measured), None
            except ValueError as error:
                row, reason = None, str(error)
            rows.append(row)
            reasons.append(reason)
        return rows, reasons

    def states(self, rows: Sequence[TokenRow]) -> Tensor:
        return self.network.states(rows)

    @torch.no_grad()
    def hidden(self, template: Template, queries: Sequence[Query], *, at: str | None = None) -> HiddenStates:
        """Hidden states of requests at their one special token `at`, or at the last position."""
        rows, reasons = self.encode(template, queries, at=at)
        size = self.model.config.get_text_config().hidden_size
        return HiddenStates(_fill_rows(rows, size, self.states), reasons)

    def answer_logits(
        self,
        template: Template,
        queries: Sequence[Query],
        ids: Sequence[int],
        *,
        left_over: bool = False,
        gradient: bool = False,
    ) -> AnswerLogits:
        """Compute the logits of K tokens at the start of the answer, with `gradient` in the images that require one.

        `left_over` adds `log_total`, which has none.
        """

        def compute(rows: Sequence[TokenRow]) -> Tensor:
            states = self.states(rows)
            logits = self.network.head_logits(states, ids)
            return torch.cat((logits, self.network.log_total(states.detach())[:, None]), 1) if left_over else logits

        with torch.set_grad_enabled(gradient):
            rows, reasons = self.encode(template, queries)
            values = _fill_rows(rows, len(ids) + left_over, compute)
        return AnswerLogits(values[:, : len(ids)], values[:, -1] if left_over else None, reasons)

    def generate(self, template: Template, queries: Sequence[Query], **sampling: Any) -> JudgeAnswers:
        """Generate answers to each request, with the options of `generate_answers`."""
        rows, reasons = self.encode(template, queries)
        return generate_answers(self.network, self.processor.tokenizer, rows, reasons, **sampling)

    @torch.no_grad()
    def likeliest(
        self, template: Template, queries: Sequence[Query], count: int
    ) -> tuple[list[list[tuple[str, float]]], list[str | None]]:
        """Return the likeliest first tokens of each answer with their log-probs, and reasons where there are none."""
        rows, reasons = self.encode(template, queries)
        valid_rows = [row for row in rows if row is not None]
        if not valid_rows:
            return [[] for _ in rows], reasons
        log_prob, ids = self.network.likeliest(self.states(valid_rows), count)
        tokens = iter(zip(log_prob.tolist(), ids.tolist(), strict=True))
        decode = self.processor.tokenizer.decode
        spelled = [zip(*next(tokens), strict=True) if row is not None else () for row in rows]
        return [[(decode([token_id]), value) for value, token_id in row] for row in spelled], reasons

    def clear_features(self) -> None:
        """Drop cached image features, after the tower's weights changed."""
        self.network.cache.clear()

    def refresh(self) -> None:
        """Read weights and special tokens again, after they changed."""
        self.clear_features()
        self.rows.refresh()
        self.set_fingerprint()

    def set_fingerprint(self, weights: str = "") -> None:
        """Declare that the weights in memory are those of files with this fingerprint ("" for no files)."""
        self._print = WeightPrint(self.model, weights or None)

    @property
    def weights(self) -> str:
        """Fingerprint of the weight files; of the weights in memory if they changed or have no files."""
        return str(self._print)


def engine_of(model: Any, name: str, *, device: Any = "cpu", precision: str = "auto", **loading: Any) -> Any:
    """Return a judge's engine: the given one (judges may share it), or one loaded from a folder or hub id.

    Log-odds and scores are float32 whatever the `precision` of the weights: "fp32", "bf16", "fp16", or "auto", which
    is bf16, but fp32 on the CPU. `loading` are options of `LOADING`.
    """
    dtype = dtype_of(precision, f"{name}: ", device)
    if not isinstance(model, str | Path):
        if loading:
            raise RewardError(
                f"{name}: the model is loaded already, so {', '.join(loading)} cannot be set; leave it out."
            )
        return model
    check_loading(name, loading)
    return VisionLanguageEngine.from_pretrained(model, device=device, dtype=dtype, **loading)


class EngineJudge:
    """Judge of a vision-language model: its engine, its question, and the identity of its scores.

    The question is `template`, else the folder's of the same name as `default`, else that.
    """

    name: str
    capabilities = RewardCapabilities(takes_gpu_images=True)
    options: Mapping[str, Any]  # What the scores depend on besides model and question

    def __init__(self, model: Any, default: Template, template: Template | None = None, **loading: Any) -> None:
        self.engine = engine_of(model, self.name, **loading)
        self.template: Template = template or self.engine.template(default.name, default)

    @property
    def identity(self) -> Identity:
        return Identity(judge=self.name, **self.engine.identity_fields(self.template, **self.options))


def check_loading(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options of a judge that `VisionLanguageEngine.from_pretrained` does not know."""
    if unknown := [option for option in options if option not in LOADING]:
        raise RewardError(
            f"{name} has no option {', '.join(unknown)}. Beside its own, it takes those of any vision-language judge: "
            f"{', '.join(LOADING)}."
        )


def _quantization(model: Any) -> dict[str, str]:
    """Quantization of a model's weights, which changes its scores; {} for none."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return {}
    settings = config if isinstance(config, dict) else config.to_dict()
    keys = [key for key in sorted(settings) if key.startswith(("load_in", "bits", "quant_method"))]
    return {"quantization": ", ".join(f"{key} {settings[key]}" for key in keys if settings[key])}


def _fill_rows(rows: Sequence[TokenRow | None], width: int, compute: Any) -> Tensor:
    """Compute [B, width] on the CPU for the rows that are not None; NaN elsewhere."""
    values = torch.full((len(rows), width), torch.nan)
    valid_rows = [index for index, row in enumerate(rows) if row is not None]
    if valid_rows:
        values[valid_rows] = compute([row for row in rows if row is not None]).float().cpu()
    return values
