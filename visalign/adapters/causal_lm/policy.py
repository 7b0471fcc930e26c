# SPDX-License-Identifier: Apache-2.0
"""Any transformers causal language model as a `TextPolicy`, with LoRA or full fine-tuning; some see."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from visalign.adapters.lora import LoraSettings
from visalign.adapters.weights import TrainedWeights
from visalign.atomic import umask_permissions
from visalign.errors import UserError
from visalign.text import (
    Distribution,
    Prompt,
    Sampling,
    StoppingCriteria,
    StopStrings,
    TextRollout,
    TokenOutput,
    sample_uniforms,
)
from visalign.text.chat import PromptEncoder, image_parts
from visalign.text.decoding import decode

from .batches import PromptBatch, assemble_rollout
from .generation import Completion, Ending, generate_completions
from .images import ImagePrompts, QwenSight
from .loading import check_causal_lm, context_length, end_tokens, load_causal_lm, pad_id
from .lora import add_text_lora, load_text_lora, settings_of
from .network import CausalNetwork, enable_recomputation, recomputed_layers
from .prompts import EncodedPrompts
from .replay import expert_routes, pack, scored_sampling, token_output
from .routing import ExpertRouting
from .value_head import ValueHead

JUDGE_WORDS = "judge.json"  # file with the questions of a model that is a judge; it goes with the model


class CausalLMPolicy:
    """A causal language model as the algorithms see it; see `visalign.text.TextPolicy`.

    Dropout is always off, so that a token's log-prob is one number: at the first update the ratio is 1 up to
    rounding. With LoRA the model is frozen but for float32 adapters, and the reference is the model without
    them. Without, all of it is trained, and the reference is a copy of it (one more model in memory).

    A vision-language model (Qwen2-VL, Qwen2.5-VL, Qwen3-VL) reads images in its prompts when it is given
    with its processor; LoRA is then put into its language part only. The model is changed in place.

    `tokenizer` is a tokenizer (a pad token is not needed) or a processor; `prompts` by default its chat
    template for conversations, and plain tokenization for texts. `lora_path` are saved adapters to continue
    from, of the settings `lora` or, with None, of their own. A prompt longer than `max_prompt_tokens` (None:
    than what the context leaves for one token more) is an error, or with `long_prompts="mask"` gives masked
    samples with the stop reason "prompt too long". Log-probs are float32 under `autocast`. `reference=False`
    keeps no copy of the weights in full fine-tuning. `generate_batch` completions grow together,
    `score_batch` pass without gradient: memory and speed only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        lora: LoraSettings | None = None,
        lora_path: str | Path | None = None,
        prompts: PromptEncoder | None = None,
        value_head: ValueHead | None = None,
        max_prompt_tokens: int | None = None,
        long_prompts: Literal["refuse", "mask"] = "refuse",
        autocast: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
        reference: bool = True,
        generate_batch: int = 64,
        score_batch: int = 16,
    ) -> None:
        self.processor = tokenizer if isinstance(tokenizer, ProcessorMixin) else None
        text_tokenizer: Any = tokenizer if self.processor is None else getattr(tokenizer, "tokenizer", None)
        check_causal_lm(model, text_tokenizer)
        if lora_path is not None:
            lora = lora or settings_of(lora_path)
        self.model, self.tokenizer, self.lora = model.eval(), text_tokenizer, lora
        sight = None if self.processor is None else QwenSight(model)
        self.prompts = prompts or PromptEncoder(tokenizer)
        self._image_prompts: ImagePrompts | None = None
        if self.processor is not None:
            self._image_prompts = ImagePrompts(self.prompts, self.processor, model.config.image_token_id)
        self.long_prompts, self.generate_batch, self.score_batch = long_prompts, generate_batch, score_batch
        self.context_length, self.max_prompt_tokens = context_length(model), max_prompt_tokens
        adapters = None if lora is None else add_text_lora(model, lora, getattr(sight, "language", None))
        if lora is None:
            model.requires_grad_(True)
        self._checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            enable_recomputation(model)
        self._network = CausalNetwork(model, autocast=autocast, sight=sight)
        if value_head is not None and self._network.head is None:
            raise UserError(
                f"The output head of {type(model).__name__} is not linear, so no value head can share its hidden "
                "states. Use a ValueModel."
            )
        self.value_head = None if value_head is None else value_head.to(model.device)
        if lora_path is not None:
            load_text_lora(model, lora_path)
            adapters = None  # the reference is the model with them
        self._trained = TrainedWeights(model, adapters, reference=reference)
        self._routing: ExpertRouting | None = None

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> CausalLMPolicy:
        """Load a model and tokenizer or processor from a folder or the hub; `options` are of the constructor.

        `dtype` is of the frozen weights (of all in full fine-tuning); adapters are float32.
        """
        loaded: Any = load_causal_lm(folder_or_id, dtype=dtype)
        return cls(loaded[0].to(device), loaded[1], **options)

    @property
    def module(self) -> nn.Module:
        """The network that is trained, with the value head where there is one."""
        head = self.value_head
        return self.model if head is None else nn.ModuleDict({"model": self.model, "value_head": head})

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def hidden_size(self) -> int:
        """H of `hidden_states`."""
        return self.model.config.get_text_config().hidden_size

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the network's products."""
        return self._network.autocast or self.model.dtype

    def encode(self, prompts: Sequence[Prompt], images: Sequence[Sequence[Any]] | None = None) -> EncodedPrompts:
        """Encode P prompts, with the images that their conversations hold or `images`, see `generate`."""
        if self._image_prompts is not None:
            return self._image_prompts.encode(prompts, images)
        if images is not None or any(image_parts(prompt) for prompt in prompts):
            raise UserError(
                f"{type(self.model).__name__} is used as a text policy and reads no images. Leave images out, or "
                "build it with a vision-language model's processor."
            )
        return EncodedPrompts(self.prompts.encode(prompts))

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that cannot be completed before a run draws them; images are left to it."""
        if texts := [prompt for prompt in prompts if not image_parts(prompt)]:
            PromptBatch.build(self, texts, self.encode(texts), seeds=0, context=self.context_length)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        seeds: int | Sequence[int],
        num_generations: int = 1,
        sampling: Sampling | None = None,
        stopping: StoppingCriteria | None = None,
        group: Sequence[Hashable] | None = None,
        images: Sequence[Sequence[Any]] | None = None,
        after: Sequence[Sequence[int]] | None = None,
    ) -> TextRollout:
        """Complete P prompts G times each, see `TextPolicy.generate`.

        A sample's tokens follow from its prompt and its seed; neighbours and batch sizes change them through
        float rounding only. Where the context ends first, it ends there with the reason "length".

        `images` are P lists for the image parts of conversations that hold none: PIL, or [3, H, W] in [0, 1] or uint8.
        `after` are B lists of tokens that the completions begin with: context with loss mask 0, in the limit.
        """
        sampling, stopping = sampling or Sampling(), stopping or StoppingCriteria()
        options: dict[str, Any] = {"num_generations": num_generations, "group": group, "after": after}
        encoded, context = self.encode(prompts, images), self.context_length
        batch = PromptBatch.build(self, prompts, encoded, seeds=seeds, context=context, **options)
        ends = end_tokens(self.model, self.prompts, stopping)
        pad, rooms = pad_id(self.tokenizer, ends), batch.rooms(stopping.max_new_tokens)
        strings = StopStrings(stopping.strings, lambda ids: decode(self.tokenizer, ids))
        completions = dict[int, Completion]()
        for start in range(0, len(rooms), self.generate_batch):
            samples = list(rooms)[start : start + self.generate_batch]
            limit = [rooms[sample] for sample in samples]
            begun = torch.tensor([[len(batch.begun(sample))] for sample in samples])
            drawn = sample_uniforms([batch.seeds[sample] for sample in samples], int(begun.max()) + max(limit))
            generated = generate_completions(
                self._network,
                [batch.prompt_of(sample) for sample in samples],
                drawn.gather(1, begun + torch.arange(max(limit))),  # a continuation draws what comes after its begin
                sampling=sampling,
                ending=Ending(eos_ids=frozenset(ends), limit=limit, strings=strings),
                pad_id=pad,
            )
            completions |= zip(samples, generated, strict=True)
        return assemble_rollout(batch, completions, self.tokenizer, sampling, pad)

    def log_probs(
        self,
        rollout: TextRollout,
        rows: Tensor | slice | None = None,
        *,
        distribution: Distribution = "sampled",
        statistic: Callable[[Tensor], Tensor] | None = None,
    ) -> TokenOutput:
        """Compute log-prob and entropy (and V with a value head) [b, T] of the rollout's tokens, see `TextPolicy`.

        "sampled" is renormalised over the tokens that the rollout could have drawn, so that its ratio to
        `rollout.log_prob` is that of the distribution that was sampled; "full" is over the whole vocabulary,
        to be set against `rollout.full_log_prob`. Samples without weight cost nothing.

        With gradient all b rows go through the model together; without, `score_batch` at a time, sorted by
        length. `statistic` gets log-probs −∞ outside the distribution; its logits are computed in pieces,
        again for the gradient.
        """
        sampling = scored_sampling(rollout, distribution)
        chosen = torch.arange(len(rollout))[slice(None) if rows is None else rows]
        grad = torch.is_grad_enabled()
        if rollout.routes is not None:
            self.check_routes()
        with recomputed_layers(self.model, self._checkpointing and grad):
            return token_output(
                self._network,
                rollout,
                chosen,
                sampling=sampling,
                encoder=self._image_prompts,
                value=self.value_head,
                statistic=statistic,
                batch=None if grad else self.score_batch,
                routing=self._routing,
                recomputed=self._checkpointing and grad,
            )

    def check_routes(self) -> ExpertRouting:
        """Return the routing of a mixture's experts; raises `UserError` for a model without experts."""
        self._routing = self._routing or ExpertRouting(self.model)
        return self._routing

    @torch.no_grad()
    def with_routes(self, rollout: TextRollout) -> TextRollout:
        """Record the experts that a rollout's tokens go to now; `log_probs` of the result sends them there
        again, whatever the router has learnt since (routing replay, GSPO, arXiv 2507.18071, section 5.3).
        """
        routing, images = self.check_routes(), self._image_prompts
        return replace(rollout, routes=expert_routes(self._network, rollout, routing, images, self.score_batch))

    @torch.no_grad()
    def hidden_states(self, rollout: TextRollout, *, depths: Sequence[float] = (1.0,)) -> Iterator[tuple[int, Tensor]]:
        """Yield (sample, [T, L, H] float32), the states that a sample's T tokens of loss mask 1 were predicted from,
        of the samples that have such; `depths` are shares of the layers, 1 is behind the last.
        """
        live = (rollout.loss_mask != 0).any(1).nonzero()[:, 0]
        for part in live.split(self.score_batch):
            packed = pack(rollout, part, self.device, self._image_prompts)
            states = self._network.hidden_states(packed.ids, packed.mask, depths, packed.encoded_images)
            for number, sample in enumerate(part.tolist()):
                yield sample, states[number, packed.before[packed.row == number].to(self.device)]

    def reference(self) -> AbstractContextManager[None]:
        """Restore the model from before training inside the block; nestable. Call backward outside."""
        return self._trained.reference()

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that the optimizer moves: the model's, then "value_head.…"."""
        head = [] if self.value_head is None else list(self.value_head.named_parameters())
        return [*self._trained.named(), *((f"value_head.{name}", parameter) for name, parameter in head)]

    def save(self, folder: Path) -> None:
        """Write what was trained, the tokenizer or processor, and the value head where there is one: with
        LoRA the adapter as `peft.PeftModel.from_pretrained(base, folder)` reads it; without, the whole model
        for `from_pretrained` of this class or of transformers.
        """
        self.model.save_pretrained(folder)
        (self.processor or self.tokenizer).save_pretrained(folder)
        if (words := Path(self.model.name_or_path or "") / JUDGE_WORDS).is_file():
            shutil.copyfile(words, Path(folder) / JUDGE_WORDS)
        if self.value_head is not None:
            self.value_head.save(Path(folder))
        umask_permissions(Path(folder))

    def load(self, folder: Path) -> None:
        """Read into this policy what `save` of an equally built one wrote; the reference stays what it was."""
        if self.lora is not None:
            load_text_lora(self.model, folder)
        else:
            saved, _ = load_causal_lm(folder, dtype=self.model.dtype)
            self.model.load_state_dict(saved.state_dict())
        if self.value_head is not None:
            self.value_head.load(Path(folder))
