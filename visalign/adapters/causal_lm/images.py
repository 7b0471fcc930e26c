# SPDX-License-Identifier: Apache-2.0
"""Images of models of the Qwen-VL family: cut and cached, put among a prompt's tokens, and seen.

The template marks each image by one image token, which becomes as many as it takes.

Positions have three axes (time, row, column). An image moves the text behind it on by its longer side, not
by its number of tokens; each prompt therefore has an offset between the two, which goes with its cache. The
model's own bookkeeping of it (`rope_deltas`) is by place in the batch and is not used: samples leave the
batch, and share prompts. Positions are computed here: some releases of transformers move images along the
axis of time for Qwen2.5-VL (huggingface/transformers issue 45325, version 5.3).

Sources: M-RoPE, Qwen2-VL, arXiv 2409.12191, section 2.1; DeepStack, arXiv 2406.04334 (Qwen3-VL).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel, ProcessorMixin

from visalign.data.sets.image_references import resolve_image
from visalign.errors import UserError
from visalign.text import Prompt
from visalign.text.chat import PromptEncoder, image_parts
from visalign.vision.images import PatchedImage, insert_features, pixel_digest, tower_features
from visalign.vision.pixels import read_pixels
from visalign.vision.positions import rotary_positions

from .loading import VISION_LANGUAGE
from .prompts import EncodedPrompts

MEMORY = 1 << 28  # bytes of patches that are cached: images are met again at each update of a rollout


class ImageProcessor:
    """Cuts images into patches, each by itself, so that none depends on its neighbours."""

    def __init__(self, image_processor: Any) -> None:
        self._processor = image_processor
        self._cache: OrderedDict[str, PatchedImage] = OrderedDict()
        self._bytes = 0

    def __call__(self, image: Any, where: str) -> PatchedImage:
        """Read a PIL image, a tensor [3, H, W] (uint8, or float in [0, 1]) or a reference as `resolve_image` takes it,
        such as a path; `where` is its name in messages.
        """
        pixels = read_pixels(_open(image, where), where)
        digest = pixel_digest(pixels)
        if digest not in self._cache:
            self._cache[digest] = patched = self._cut(pixels, digest, where)
            self._bytes += patched.patches.nbytes
            while self._bytes > MEMORY and len(self._cache) > 1:
                self._bytes -= self._cache.popitem(last=False)[1].patches.nbytes
        self._cache.move_to_end(digest)
        return self._cache[digest]

    def _cut(self, pixels: Tensor, digest: str, where: str) -> PatchedImage:
        try:
            cut = self._processor(images=[pixels], return_tensors="pt", input_data_format="channels_first")
        except ValueError as error:
            size = f"{pixels.shape[1]} × {pixels.shape[2]} pixels"
            raise UserError(f"The image processor refuses {where} of {size}: {error}. Crop or resize it.") from error
        frames, rows, columns = (int(n) for n in cut["image_grid_thw"][0])
        return PatchedImage(
            digest=digest,
            grid=(frames, rows, columns),
            tokens=frames * rows * columns // self._processor.merge_size**2,
            patches=cut["pixel_values"].float(),
        )


def _open(image: Any, where: str) -> Any:
    """Return the image that a text names; anything else itself."""
    resolved = resolve_image(image) if isinstance(image, str) else image
    if isinstance(resolved, np.ndarray):
        return Image.fromarray(resolved)
    if not isinstance(resolved, str):
        return resolved
    try:
        with Image.open(resolved) as opened:
            return opened.copy()
    except (OSError, Image.DecompressionBombError) as error:
        raise UserError(f"{where}, '{resolved}', cannot be read: {error}. Repair it or leave it out.") from error


class ImagePrompts:
    """Encoder of the prompts of a model that reads images; `image_token` is the id that stands for images."""

    def __init__(self, prompts: PromptEncoder, processor: ProcessorMixin, image_token: int) -> None:
        self._prompts, self._image_token = prompts, image_token
        self._images = ImageProcessor(processor.image_processor)  # type: ignore[attr-defined]

    def encode(self, prompts: Sequence[Prompt], images: Sequence[Sequence[Any]] | None) -> EncodedPrompts:
        """Encode prompts and images; `images` are P lists, None is none at all.

        A part {"type": "image", "image": image} holds its image, {"type": "image"} takes the next one of the list.
        Plain text marks images by the model's own image token.
        """
        lists = [()] * len(prompts) if images is None else images
        if isinstance(images, str) or len(lists) != len(prompts):
            raise UserError(f"images has {len(lists)} lists for {len(prompts)} prompts; give one per prompt, or [].")
        image_lists = [_assign(*pair, index) for index, pair in enumerate(zip(prompts, lists, strict=True))]
        ids = self._prompts.encode(prompts)
        for index, (tokens, images_of_prompt) in enumerate(zip(ids, image_lists, strict=True)):
            self._check_marks(tokens, len(images_of_prompt), index)
        if not any(image_lists):
            return EncodedPrompts(ids)
        encoded = [self._read(row, f"prompt {index}") for index, row in enumerate(image_lists)]
        expanded = []
        for tokens, row in zip(ids, encoded, strict=True):  # as many image tokens as each image takes
            counts = iter(image.tokens for image in row)
            repeats = [next(counts) if token == self._image_token else 1 for token in tokens]
            expanded.append([token for token, n in zip(tokens, repeats, strict=True) for _ in range(n)])
        return EncodedPrompts(expanded, encoded, image_lists)

    def encoded_images(
        self, images: Sequence[Sequence[Any]], ids: Sequence[Sequence[int]], samples: Sequence[int]
    ) -> list[list[PatchedImage]]:
        """Encode the images (`EncodedPrompts.images`) of b prompts whose tokens are known; messages name `samples`."""
        patched = [self._read(row, f"sample {n}") for n, row in zip(samples, images, strict=True)]
        for sample, row, tokens in zip(samples, patched, ids, strict=True):
            expected, marks = sum(image.tokens for image in row), list(tokens).count(self._image_token)
            if expected != marks:  # features would go to other tokens
                raise UserError(
                    f"The prompt of sample {sample} has {marks} image tokens, and its images take {expected}. "
                    "Score a rollout with its own images and processor."
                )
        return patched

    def _check_marks(self, ids: Sequence[int], images: int, index: int) -> None:
        marks = list(ids).count(self._image_token)
        if marks != images:
            token = self._prompts.tokenizer.convert_ids_to_tokens(self._image_token)
            raise UserError(
                f"Prompt {index} marks {marks} images by {token}, and {images} are given. The chat template must "
                f'write {token} for each part {{"type": "image"}}, and no text may hold it.'
            )
        if any(first == second == self._image_token for first, second in pairwise(ids)):
            raise UserError(
                f"Prompt {index} shows two images with nothing between them, so that the model could not tell where "
                "the second begins. Use the model's own chat template."
            )

    def _read(self, images: Sequence[Any], where: str) -> list[PatchedImage]:
        return [self._images(image, f"image {number} of {where}") for number, image in enumerate(images)]


def _assign(prompt: Prompt, images: Sequence[Any], index: int) -> list[Any]:
    if not isinstance(images, list | tuple):
        raise UserError(f"images[{index}] is a {type(images).__name__}; give a list of images per prompt, [image].")
    if isinstance(prompt, str):
        return list(images)
    parts = image_parts(prompt)
    open_parts = sum(part.get("image") is None for part in parts)
    if open_parts != len(images):
        raise UserError(
            f"Prompt {index} has {open_parts} image parts without an image, and images[{index}] holds {len(images)}. "
            "Give one image per part, in their order."
        )
    left = iter(images)
    return [next(left) if part.get("image") is None else part["image"] for part in parts]


class QwenSight:
    """The vision part of a model, and where its images stand among the tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        kind = model.config.model_type
        if kind not in VISION_LANGUAGE:
            raise UserError(
                f"A processor was given for a {kind}. Images are read by {', '.join(VISION_LANGUAGE)}; for text only "
                "give the tokenizer."
            )
        self._trunk: Any = model.base_model
        self.language: nn.Module = self._trunk.language_model
        self._image_token: int = model.config.image_token_id
        self._merge: int = model.config.vision_config.spatial_merge_size

    def see(
        self, ids: Tensor, mask: Tensor, encoded_images: Sequence[Sequence[PatchedImage]]
    ) -> tuple[dict[str, Any], Tensor]:
        """Return what the language model takes for ids [b, S], and [b, 1] how far the position of a later token is
        from the number of tokens before it; each distinct image passes the tower once, with gradient.
        """
        patched = [image for row in encoded_images for image in row]
        image_tokens = torch.tensor([sum(image.tokens for image in row) for row in encoded_images], device=ids.device)
        marks = (ids == self._image_token) & (mask != 0)
        marks &= marks.cumsum(1) <= image_tokens[:, None]  # image tokens that a completion draws are text
        distinct = list(dict.fromkeys(patched))
        features = dict(zip(distinct, tower_features(self._trunk, distinct), strict=True))
        embeds = self._trunk.get_input_embeddings()(ids)
        inputs = insert_features(embeds, marks, [features[image] for image in patched])
        positions, offset = rotary_positions(marks.cpu(), mask.cpu(), encoded_images, self._merge)
        return {**inputs, "position_ids": positions.to(ids.device)}, offset.to(ids.device)
