# SPDX-License-Identifier: Apache-2.0
"""The engine of judges that are vision-language models: one prefill for a request, nothing read twice.

A request is a template with images and a prompt. Images go through the vision tower once, whatever
number of prompts and calls they meet; requests with the same images and a common beginning share it; only
the asked-for rows of the language head are multiplied; batches are filled by tokens, padded on the right.

Positions: "mrope" are the three axes of Qwen2-VL (arXiv 2409.12191, section 2.1); "1d" counts tokens as in a
text, which is how some published heads were trained. Scores differ between the two, so it is part of the
identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.dotted_path import check_options
from visalign.rewards.base.contract import RewardError
from visalign.rewards.weights.checkpoint_files import dtype_of
from visalign.rewards.weights.fingerprints import WeightPrint

from .generation import JudgeAnswers, generate_answers
from .loading import load_seeing_model
from .network import SeeingNetwork, image_encoder
from .requests import Query, RowEncoder, SeenImage, TokenRow
from .template import JudgeSettings, Template, check_positions

__all__ = ["AnswerLogits", "HiddenStates", "JudgeAnswers", "Query", "TokenRow", "VisionLanguageEngine"]


@dataclass(frozen=True)
class AnswerLogits:
    """What a model would say next, for B requests."""

    logits: Tensor
    """[B, K] float32 of the asked-for tokens; NaN where there is a reason."""
    log_total: Tensor | None
    """[B] float32 logsumexp over the whole vocabulary; None where it was not asked for."""
    reasons: list[str | None]
    """Why a request could not be judged; None for the others."""


@dataclass(frozen=True)
class HiddenStates:
    """Last hidden states of B requests."""

    states: Tensor
    """[B, H] float32; NaN where there is a reason."""
    reasons: list[str | None]
    """Why a request could not be judged; None for the others."""


class VisionLanguageEngine:
    """A vision-language model that is asked about images.

    Families: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, and InternVL as transformers has it.

    Args:
        model: transformers model with language head, on its device.
        processor: of the model.
        name: folder name or hub id, for the identity.
        positions: "mrope" or "1d"; the settings' own, else "mrope", when None. InternVL has "1d" alone.
        settings: templates and more of the model's folder.
        max_tokens_per_batch: tokens of one forward pass, with padding.
        max_tokens: of one request; what the model's config says when None.
        feature_bytes: of images' features that are kept between calls.
        weights: fingerprint of the weight files, for the identity; that of the weights in memory when "".
        **pixels: min_pixels and max_pixels of a resized image, and `window` of `PatchCutter`; as the
            settings' "pixels" have them, else the processor, where they are not given.

    Raises:
        RewardError: a family that is not known, or options that are not allowed.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        name: str = "model",
        positions: str | None = None,
        settings: JudgeSettings | None = None,
        max_tokens_per_batch: int = 8192,
        max_tokens: int | None = None,
        feature_bytes: int = 1 << 28,
        weights: str = "",
        **pixels: int,
    ) -> None:
        if max_tokens_per_batch < 1 or feature_bytes < 0:
            raise RewardError(
                f"max_tokens_per_batch is {max_tokens_per_batch} and feature_bytes {feature_bytes}; allowed "
                "are whole numbers from 1, and from 0."
            )
        self.model, self.processor, self.name, self.revision = model, processor, name, ""
        self.settle(weights)
        self.settings = settings or JudgeSettings()
        images = image_encoder(model, processor, **{**self.settings.rest.get("pixels", {}), **pixels})
        wanted = positions or self.settings.positions or "mrope"
        self.positions = check_positions(wanted) if images.merge else "1d"
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

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        positions: str | None = None,
        adapter: str | Path | None = None,
        attention: str = "sdpa",
        device_map: Any = None,
        quantization: str | None = None,
        **options: Any,
    ) -> VisionLanguageEngine:
        """Load a model with its processor and its `judge.json`.

        Args:
            folder_or_id: a folder as `save_pretrained` writes it, a packaged name, or a hub id.
            device: where it runs; "meta": shapes alone, no weight is read or fetched.
            dtype: of the weights.
            positions: of the class.
            adapter: a LoRA as peft saves it, which is merged into the weights.
            attention: an implementation of transformers: "sdpa", "flash_attention_2", "eager", ...
            device_map: of transformers, instead of `device`: "auto" spreads a model over all GPUs.
            quantization: "int8" or "int4" of the language part, by bitsandbytes.
            **options: of the class.

        Raises:
            FileNotFoundError: the folder or a part of it is missing.
            RewardError: it is no such model.
        """
        loaded = load_seeing_model(
            folder_or_id,
            device=device,
            dtype=dtype,
            adapter=adapter,
            attention=attention,
            device_map=device_map,
            quantization=quantization,
        )
        options = {"name": loaded.name, "settings": loaded.settings, "weights": loaded.weights, **options}
        engine = cls(loaded.model, loaded.processor, positions=positions, **options)
        engine.revision = loaded.revision
        return engine

    def template(self, kind: str, default: Template) -> Template:
        """The folder's template of a kind ("yes_no", "rating", "pair", "hpsv3", ...), or the given one."""
        return self.settings.templates.get(kind, default)

    def token_ids(self, words: Sequence[str], *, skip_missing: bool = False) -> list[int]:
        """Ids of words that are one token each; see `RowEncoder.word_ids`."""
        return self.rows.word_ids(words, skip_missing=skip_missing)

    def identity_fields(self, template: Template, **options: Any) -> dict[str, Any]:
        """Arguments of `Identity` but `judge`."""
        return {
            "model": self.name,
            "weights": self.weights,
            "revision": self.revision,
            "template": template.text,
            "preprocessing": self.network.images.settings(),
            "dtype": str(self.network.trunk.get_input_embeddings().weight.dtype).removeprefix("torch."),
            "options": {"positions": self.positions, **_quantised(self.model), **options},
        }

    def encode(
        self, template: Template, queries: Sequence[Query], *, at: str | None = None
    ) -> tuple[list[TokenRow | None], list[str | None]]:
        """(rows or None, reasons or None) of B requests; nothing is run. `at` is the special token whose
        place is read; None reads the last position.
        """
        rows: list[TokenRow | None] = []
        reasons: list[str | None] = []
        measured: dict[int, SeenImage] = {}  # the queries keep their tensors alive, so that ids stay apart
        for query in queries:
            try:
                row, reason = self.rows(template, query, at, measured), None
            except ValueError as error:
                row, reason = None, str(error)
            rows.append(row)
            reasons.append(reason)
        return rows, reasons

    def states(self, rows: Sequence[TokenRow]) -> Tensor:
        """Hidden states [N, H] float32 of rows, with gradient where it is enabled; see `SeeingNetwork`."""
        return self.network.states(rows)

    def head_logits(self, states: Tensor, ids: Sequence[int]) -> Tensor:
        """Logits [N, K] of some tokens, differentiable; see `SeeingNetwork.head_logits`."""
        return self.network.head_logits(states, ids)

    def log_total(self, states: Tensor) -> Tensor:
        """logsumexp [N] over the whole vocabulary, differentiable; see `SeeingNetwork.log_total`."""
        return self.network.log_total(states)

    @torch.no_grad()
    def hidden(self, template: Template, queries: Sequence[Query], *, at: str | None = None) -> HiddenStates:
        """Hidden states of requests at one special token, of which each holds exactly one, or at the last
        position.
        """
        rows, reasons = self.encode(template, queries, at=at)
        size = self.model.config.get_text_config().hidden_size
        return HiddenStates(_full(rows, size, self.states), reasons)

    @torch.no_grad()
    def answer_logits(
        self, template: Template, queries: Sequence[Query], ids: Sequence[int], *, left_over: bool = False
    ) -> AnswerLogits:
        """Logits of K tokens where the answer begins; with `left_over` also the logsumexp over the whole
        vocabulary.
        """
        rows, reasons = self.encode(template, queries)

        def both(real: Sequence[TokenRow]) -> Tensor:
            states = self.states(real)
            logits = self.head_logits(states, ids)
            return torch.cat((logits, self.log_total(states)[:, None]), 1) if left_over else logits

        found = _full(rows, len(ids) + left_over, both)
        return AnswerLogits(found[:, : len(ids)], found[:, -1] if left_over else None, reasons)

    def generate(
        self,
        template: Template,
        queries: Sequence[Query],
        *,
        answers: int = 1,
        seed: int = 0,
        temperature: float = 1.0,
        max_new_tokens: int = 256,
    ) -> JudgeAnswers:
        """K `answers` to each request; an answer depends on its request, its number and the seed alone.
        Temperature 0 takes the likeliest token always.
        """
        rows, reasons = self.encode(template, queries)
        return generate_answers(
            self.network,
            self.processor.tokenizer,
            rows,
            reasons,
            answers=answers,
            seed=seed,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
        )

    def clear_features(self) -> None:
        """Forget images' features, after the tower's weights changed."""
        self.network.cache.clear()

    def refresh(self) -> None:
        """Read weights and tokens anew, after they were changed."""
        self.clear_features()
        self.rows.refresh()
        self.settle()

    def settle(self, weights: str = "") -> None:
        """Take what is in memory for the weights of files with this fingerprint; "" where there are none."""
        self._print = WeightPrint(self.model, weights or None)

    @property
    def weights(self) -> str:
        """Fingerprint of the weight files; of what is in memory where there are none, or it was changed."""
        return str(self._print)


def engine_of(
    model: Any,
    name: str,
    *,
    device: str | torch.device = "cpu",
    precision: str = "auto",
    **loading: Any,
) -> Any:
    """The vision-language engine that a judge was given, which several may share, or that of a model folder,
    hub id or packaged name; log-odds and scores are float32 whatever the precision of the weights.

    Args:
        model: engine, folder, hub id or packaged name.
        name: of the judge, for messages.
        device: where the model runs.
        precision: of its weights: "fp32", "bf16", "fp16", or "auto", which is bf16 but on the CPU.
        **loading: of `VisionLanguageEngine.from_pretrained`: attention, device_map, quantization,
            max_tokens_per_batch, min_pixels, max_pixels, window, ...
    """
    dtype = dtype_of(precision, f"{name}: ", device)
    if not isinstance(model, str | Path):
        if loading:
            raise RewardError(
                f"{name}: the model is loaded already, so {', '.join(loading)} cannot be set; give them to "
                "VisionLanguageEngine.from_pretrained."
            )
        return model
    check_loading(name, loading)
    return VisionLanguageEngine.from_pretrained(model, device=device, dtype=dtype, **loading)


def check_loading(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options of a judge that `VisionLanguageEngine.from_pretrained` does not know."""

    def loading(
        positions: Any = 0,
        adapter: Any = 0,
        attention: Any = 0,
        device_map: Any = 0,
        quantization: Any = 0,
        max_tokens_per_batch: Any = 0,
        max_tokens: Any = 0,
        feature_bytes: Any = 0,
        min_pixels: Any = 0,
        max_pixels: Any = 0,
        window: Any = 0,
    ) -> None: ...

    check_options(name, loading, options, RewardError)


def _quantised(model: Any) -> dict[str, str]:
    """How a model's weights are quantised, which moves its scores; {} where they are not."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return {}
    held = config if isinstance(config, dict) else config.to_dict()
    told = {key: value for key, value in held.items() if key.startswith(("load_in", "bits", "quant_method"))}
    return {"quantization": ", ".join(f"{key} {value}" for key, value in sorted(told.items()) if value)}


def _full(rows: Sequence[TokenRow | None], width: int, compute: Any) -> Tensor:
    """[B, width] on the CPU: what `compute` gives for the rows that are not None, NaN elsewhere."""
    full = torch.full((len(rows), width), torch.nan)
    real = [place for place, row in enumerate(rows) if row is not None]
    if real:
        full[real] = compute([row for row in rows if row is not None]).float().cpu()
    return full
