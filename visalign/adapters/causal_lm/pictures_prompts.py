# SPDX-License-Identifier: Apache-2.0
"""Prompts with pictures: the template marks each by one image token, which becomes as many as it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedModel, ProcessorMixin

from visalign.errors import UserError
from visalign.text import Prompt
from visalign.vision.pictures import Picture

from .chat import PromptEncoder, image_parts
from .loading import VISION_LANGUAGE
from .pictures import PictureProcessor
from .prompts import EncodedPrompts, Encoder, TextPrompts


class PicturePrompts:
    """Prompts of a model that sees; `image_token` is the id that stands for pictures."""

    def __init__(self, prompts: PromptEncoder, processor: ProcessorMixin, image_token: int) -> None:
        images = getattr(processor, "image_processor", None)
        if not hasattr(images, "merge_size"):
            raise UserError(
                f"The {type(processor).__name__} has no image processor that cuts pictures into merged "
                "patches, so the policy cannot see. Load the model's own with AutoProcessor.from_pretrained."
            )
        self._prompts, self._image_token = prompts, image_token
        self._pictures = PictureProcessor(images)

    def encode(self, prompts: Sequence[Prompt], images: Sequence[Sequence[Any]] | None) -> EncodedPrompts:
        """Tokens and pictures.

        A picture stands in its part of a conversation, {"type": "image", "image": picture}; or the part is
        {"type": "image"} and takes the next one of the prompt's list. Plain text marks pictures by the
        model's own image token. Prompts without pictures may stand among the others.

        Args:
            prompts: P texts or conversations.
            images: P lists of pictures, empty where a prompt has none; None is none at all.

        Raises:
            UserError: naming the prompt: a picture too many or too few, or one that cannot be read.
        """
        if images is not None and (isinstance(images, str) or len(images) != len(prompts)):
            raise UserError(
                f"images has {len(images)} entries for {len(prompts)} prompts; give one list of pictures per "
                "prompt, [] where it has none."
            )
        lists: Iterable[Sequence[Any]] = [()] * len(prompts) if images is None else images
        prompts = [_without_empty_keys(prompt) for prompt in prompts]
        shown = [_assign(*pair, place) for place, pair in enumerate(zip(prompts, lists, strict=True))]
        ids = self._prompts.encode(prompts)
        for place, (tokens, given) in enumerate(zip(ids, shown, strict=True)):
            self._check_marks(tokens, given, place)
        if not any(shown):
            return EncodedPrompts(ids)
        pictures = [self._read(given, f"prompt {place}") for place, given in enumerate(shown)]
        expanded = [self._expand(*pair) for pair in zip(ids, pictures, strict=True)]
        return EncodedPrompts(expanded, pictures, shown)

    def pictures(
        self, images: Sequence[Sequence[Any]], ids: Sequence[Sequence[int]], samples: Sequence[int]
    ) -> list[list[Picture]]:
        """See `Encoder`."""
        found = [self._read(given, f"sample {n}") for n, given in zip(samples, images, strict=True)]
        for sample, pictures, tokens in zip(samples, found, ids, strict=True):
            wanted, marks = sum(p.tokens for p in pictures), list(tokens).count(self._image_token)
            if wanted != marks:
                raise UserError(
                    f"The prompt of sample {sample} holds {marks} image tokens, and its {len(pictures)} "
                    f"pictures take {wanted}. Score a rollout with the processor that it was made with, and "
                    "leave its images as they were."
                )
        return found

    def _expand(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Put as many image tokens as a picture takes in the place of its one."""
        left = iter(pictures)
        counts = [next(left).tokens if token == self._image_token else 1 for token in ids]
        return [token for token, count in zip(ids, counts, strict=True) for _ in range(count)]

    def _check_marks(self, ids: Sequence[int], given: Sequence[Any], place: int) -> None:
        marks = list(ids).count(self._image_token)
        if marks != len(given):
            token = self._prompts.tokenizer.convert_ids_to_tokens(self._image_token)
            raise UserError(
                f"Prompt {place} marks {marks} pictures by {token}, and {len(given)} are given. In a "
                f'conversation each is a part {{"type": "image"}}, for which the chat template must write '
                f"{token}; no text may hold that token."
            )
        if any(one == two == self._image_token for one, two in pairwise(ids)):
            raise UserError(
                f"Prompt {place} shows two pictures with nothing between them, so that the model could not "
                "tell where the second begins. Its own chat template writes marks around each."
            )

    def _read(self, given: Sequence[Any], where: str) -> list[Picture]:
        return [self._pictures(image, f"image {number} of {where}") for number, image in enumerate(given)]


def encoder_of(model: PreTrainedModel, prompts: PromptEncoder, processor: ProcessorMixin | None) -> Encoder:
    """What turns the prompts of a model into tokens, and into pictures where it has its processor."""
    if processor is not None:
        return PicturePrompts(prompts, processor, model.config.image_token_id)
    name, mend = type(model).__name__, "Leave images out."
    if model.config.model_type in VISION_LANGUAGE:
        mend = "Build it with the model's processor in place of the tokenizer, or leave images out."
    return TextPrompts(prompts, name, mend)


def _without_empty_keys(prompt: Prompt) -> Prompt:
    """Datasets give every part all keys, None where it has none; templates take the key for a picture."""
    if isinstance(prompt, str):
        return prompt
    cleaned = []
    for message in prompt:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            parts = [
                {key: value for key, value in part.items() if value is not None}
                if isinstance(part, Mapping)
                else part
                for part in content
            ]
            cleaned.append({**message, "content": parts})
        else:
            cleaned.append(message)
    return cleaned


def _assign(prompt: Prompt, given: Sequence[Any], place: int) -> list[Any]:
    """The pictures of a prompt in the order of its parts."""
    if not isinstance(given, list | tuple):
        raise UserError(
            f"images[{place}] is a {type(given).__name__}; give a list of pictures per prompt, [image]."
        )
    if isinstance(prompt, str):
        return list(given)
    parts = image_parts(prompt)
    open_parts = sum("image" not in part for part in parts)
    if open_parts != len(given):
        held = len(parts) - open_parts
        raise UserError(
            f"Prompt {place} has {open_parts} image parts without a picture"
            f"{f' (and {held} with one)' if held else ''}, and images[{place}] holds {len(given)}. Give one "
            'part {"type": "image"} per picture, and the pictures in their order.'
        )
    left = iter(given)
    return [part["image"] if "image" in part else next(left) for part in parts]
