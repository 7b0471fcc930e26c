# SPDX-License-Identifier: Apache-2.0
"""Language model in this process that answers a judge's questions about texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from visalign.data.assets import resolve_model
from visalign.hub import go_offline_if_unreachable
from visalign.model_files import LOADING_ERRORS
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.identity import fingerprint
from visalign.rewards.catalogue import check_options
from visalign.rewards.text.classifier import longest_text
from visalign.rewards.vlm.generation import JudgeAnswers, check_drawing, end_tokens
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import JudgeSettings, Template, escape
from visalign.rewards.weights.checkpoint_files import dtype_of, precision_on, quiet_loading
from visalign.rewards.weights.fingerprints import WeightPrint

from .local import LocalModel


class LanguageEngine:
    """Causal language model with the members of `VisionLanguageEngine` that `LocalModel` uses.

    Requests are answered one after the other, the K answers to each together; for speed, serve the model.
    """

    def __init__(self, model: str | Path, *, device: str | torch.device = "cpu", precision: str = "auto") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = resolve_model(model)
        if not isinstance(source, Path):
            go_offline_if_unreachable()
        dtype = dtype_of(precision_on(device, precision), "LanguageEngine: ")
        try:
            with quiet_loading():
                loaded: Any = AutoModelForCausalLM.from_pretrained(str(source), dtype=dtype, trust_remote_code=False)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
        except LOADING_ERRORS as error:
            raise RewardError(
                f"The language model {str(model)!r} cannot be loaded: {error}. Give a folder or hub id."
            ) from error
        self.model = loaded.to(device).eval().requires_grad_(False)
        self.name = source.name if isinstance(source, Path) else source
        self.settings = JudgeSettings.read(source)
        self._print = WeightPrint(self.model, fingerprint(source) if isinstance(source, Path) else None)
        self._specials = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if str(token).strip()]
        self._longest = longest_text(self.model, self.tokenizer, None)

    def template(self, kind: str, default: Template) -> Template:
        return self.settings.templates.get(kind, default)

    def identity_fields(self, template: Template, **options: Any) -> dict[str, Any]:
        dtype = str(self.model.dtype).removeprefix("torch.")
        fields = {"model": self.name, "weights": str(self._print), "dtype": dtype, "options": options}
        return fields | {"template": template.text}

    @torch.no_grad()
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
        """Generate K `answers` to each request; they depend on the request, K and the seed only."""
        from transformers import GenerationConfig

        check_drawing(answers, temperature, max_new_tokens)
        ends = sorted(end_tokens(self.model, self.tokenizer))
        drawing: dict[str, Any] = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        drawing |= {"do_sample": temperature > 0, "num_return_sequences": answers, "max_new_tokens": max_new_tokens}
        settings = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0], **drawing)
        encoded = [self._encode(template, query, max_new_tokens) for query in queries]
        written = {ids: self._generate(ids, settings, seed) for ids, why in dict.fromkeys(encoded) if why is None}
        rows = [[] if reason is not None else written[ids] for ids, reason in encoded]
        return JudgeAnswers(
            [[self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in row] for row in rows],
            [[any(token in ends for token in tokens) for tokens in row] for row in rows],
            [reason for _, reason in encoded],
        )

    def _generate(self, ids: tuple[int, ...], settings: Any, seed: int) -> list[list[int]]:
        """Generate K answers with random numbers of their own, so that those of a run stay."""
        key = hashlib.blake2b(repr((seed, ids)).encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=[self.model.device] if self.model.device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(key, "little") % (1 << 63))
            row = torch.tensor([ids], device=self.model.device)
            answers = self.model.generate(row, attention_mask=torch.ones_like(row), generation_config=settings)
        return answers[:, len(ids) :].tolist()

    @torch.no_grad()
    def likeliest(
        self, template: Template, queries: Sequence[Query], count: int
    ) -> tuple[list[list[tuple[str, float]]], list[str | None]]:
        """Return the likeliest first tokens of each answer with their log-probs, and reasons where there are none."""
        rows: list[list[tuple[str, float]]] = []
        encoded = [self._encode(template, query, 1) for query in queries]
        for ids, reason in encoded:
            rows.append([])
            if reason is None:
                logits = self.model(torch.tensor([ids], device=self.model.device)).logits[0, -1].float()
                log_prob, tokens = (best.tolist() for best in logits.log_softmax(-1).topk(min(count, len(logits))))
                rows[-1] = [(self.tokenizer.decode([token]), p) for token, p in zip(tokens, log_prob, strict=True)]
        return rows, [reason for _, reason in encoded]

    def _encode(self, template: Template, query: Query, new: int) -> tuple[tuple[int, ...], str | None]:
        fields = {"prompt": query.prompt, **query.fields}
        if any("\ud800" <= sign <= "\udfff" for text in fields.values() for sign in text):
            return (), "the question is no text in Unicode: it holds half of a surrogate pair"
        messages = template.filled({name: escape(text, self._specials) for name, text in fields.items()})
        for message in messages:
            if not isinstance(message["content"], str):
                message["content"] = "\n".join(part["text"] for part in message["content"])
        if self.tokenizer.chat_template:
            options = {"tokenize": False, "add_generation_prompt": True, **template.chat}
            text = self.tokenizer.apply_chat_template(messages, **options)
        else:
            text = "\n".join(message["content"] for message in messages) + "\n"
        text += template.answer_prefix + query.continuation
        is_chat = bool(self.tokenizer.chat_template)
        ids = tuple(self.tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"])
        if len(ids) + new > self._longest:
            return ids, (
                f"the question has {len(ids)} tokens, and with an answer of up to {new} the model, which reads "
                f"{self._longest}, has no room for it. Lower max_new_tokens, or ask about shorter texts"
            )
        return ids, None


def load_language_model(model: str | Path, *, max_failure_rate: float = 0.5, **loading: Any) -> LocalModel:
    """Load a judge of texts in this process: a causal language model, or a vision-language model of `LocalModel`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    source = resolve_model(model)
    is_adapter = isinstance(source, Path) and (source / "adapter_config.json").is_file()
    try:
        is_language = is_adapter or type(AutoConfig.from_pretrained(str(source))) in MODEL_FOR_CAUSAL_LM_MAPPING
    except LOADING_ERRORS as error:
        raise RewardError(
            f"The model {str(model)!r} cannot be loaded: {error}. Give a folder, hub id, or base_url."
        ) from error
    engine: Any = model
    if is_language:
        check_options("text_judge", LanguageEngine, {"model": model, **loading})
        engine = LanguageEngine(model, **loading)
    return LocalModel(engine, max_failure_rate=max_failure_rate, **({} if is_language else loading))
