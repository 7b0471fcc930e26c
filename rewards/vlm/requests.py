# SPDX-License-Identifier: Apache-2.0
"""Requests to a vision-language model: images measured in tokens, prompts turned into token ids.

A clip [F, 3, H, W] may take an image's slot: its features replace the image tokens, as behind a video token.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.prompt_files import listed_sources
from visalign.rewards.base.contract import Request, RewardError, prompt_problem
from visalign.rewards.base.images import load_images
from visalign.vision.images import ImageFeatures, PatchedImage, pixel_digest, tower_features
from visalign.vision.patches import PatchCutter
from visalign.vision.pixels import rounded_levels

from .template import Template, escape

PATCHES = 1 << 16  # Patches in one pass through the tower


@dataclass(frozen=True)
class SeenImage:
    """An image before it is cut into patches; two are equal if their pixels are."""

    digest: str
    grid: tuple[int, int, int] = field(compare=False)
    """(frames, rows, columns) of patches; (tiles, 1, 1) where a model takes tiles."""
    tokens: int = field(compare=False)  # Number of image tokens in the prompt
    # uint8 [3, H, W], or [F, 3, H, W] of a clip; float in [0, 1] of an image with a gradient
    pixels: Tensor = field(compare=False, repr=False)
    ids: tuple[int, ...] = field(default=(), compare=False)
    """Tokens in the image's place, where others stand between its own."""


def _digest(pixels: Tensor) -> str:
    """Digest of the pixels; an image with a gradient gets its own, so that it shares nothing with its equals."""
    return f"live {id(pixels)}" if pixels.is_floating_point() else pixel_digest(pixels)


class PatchEncoder:
    """Patches of a resized image, for Qwen-VL; `changes` are fields of `PatchCutter`, such as max_pixels."""

    def __init__(self, image_processor: Any, **changes: Any) -> None:
        self.cutter = PatchCutter.of(image_processor, **changes)
        self.merge = self.cutter.merge

    def measure(self, pixels: Tensor) -> SeenImage:
        """Measure an image or clip in tokens; ValueError with the reason where the model cannot take it."""
        pixels = self.cutter.seen(pixels)
        grid = self.cutter.grid(*pixels.shape[-2:], frames=len(pixels) if pixels.ndim == 4 else 1)
        return SeenImage(_digest(pixels), grid, self.cutter.tokens(grid), pixels)

    def features(self, trunk: Any, images: Sequence[SeenImage]) -> list[ImageFeatures]:
        alike: dict[Any, list[SeenImage]] = {}  # images without a gradient by size: they are cut together
        for image in images:
            is_single = image.pixels.ndim == 4 or image.pixels.is_floating_point()
            alike.setdefault(image.digest if is_single else image.pixels.shape, []).append(image)
        device = trunk.get_input_embeddings().weight.device
        where = device if device.type == "cuda" else "cpu"  # no other has float64 and PIL's pixels
        patches: dict[SeenImage, Tensor] = {}
        for group in alike.values():
            pixels = [image.pixels.to(where) for image in group]
            cut = (
                self.cutter.cut(pixels[0]) if len(group) == 1 else self.cutter.cut(torch.stack(pixels), is_clip=False)
            )
            patches |= zip(group, cut.chunk(len(group)), strict=True)
        return tower_features(trunk, [PatchedImage(i.digest, i.grid, i.tokens, patches[i]) for i in images])

    def settings(self) -> dict[str, Any]:
        return self.cutter.settings()


class TileEncoder:
    """Tiles of one size, cut by the library's processor, for InternVL; its positions have no grid."""

    merge = 0
    names = ("size", "image_mean", "image_std", "resample", "min_patches", "max_patches")  # What the identity holds

    def __init__(self, processor: Any) -> None:
        self._images, self._length = processor.image_processor, int(processor.image_seq_length)

    def measure(self, pixels: Tensor) -> SeenImage:
        if pixels.ndim != 3:
            raise RewardError("A model that cuts images into tiles takes no clip; give a Qwen2-VL.")
        tiles = self._images.get_number_of_image_patches(*pixels.shape[1:], {"crop_to_patches": True})
        return SeenImage(_digest(pixels), (int(tiles), 1, 1), int(tiles) * self._length, pixels.cpu())

    def _cut(self, pixels: Tensor, **options: Any) -> Tensor:
        options |= {"return_tensors": "pt", "input_data_format": "channels_first"}
        if not pixels.is_floating_point():
            return self._images(images=[pixels], **options)["pixel_values"]
        exact = self._cut(rounded_levels(pixels.detach()), **options)
        smooth = self._images(images=[pixels.float() * 255], **options)["pixel_values"]  # neither rounds nor clips
        return smooth + (exact - smooth).detach()

    def features(self, trunk: Any, images: Sequence[SeenImage]) -> list[ImageFeatures]:
        tiles = [self._cut(image.pixels, crop_to_patches=True) for image in images]
        device = trunk.get_input_embeddings().weight.device
        embeds = trunk.get_image_features(torch.cat(tiles).to(device), return_dict=True).pooler_output
        return [ImageFeatures(part.flatten(0, 1)) for part in embeds.split(list(map(len, tiles)))]

    def settings(self) -> dict[str, Any]:
        return {name: str(getattr(self._images, name, None)) for name in self.names}


class SplitEncoder(TileEncoder):
    """Square tiles and a small copy, with tokens of rows and columns between them, for SmolVLM."""

    names = ("size", "image_mean", "image_std", "resample", "max_image_size", "do_image_splitting")

    def __init__(self, processor: Any) -> None:
        self._processor, self._images = processor, processor.image_processor

    def measure(self, pixels: Tensor) -> SeenImage:
        if pixels.ndim != 3:
            raise RewardError("A model that cuts images into tiles takes no clip; give a Qwen2-VL.")
        levels = (rounded_levels(pixels.detach()) if pixels.is_floating_point() else pixels).cpu()
        split = self._images(images=[levels], return_row_col_info=True, input_data_format="channels_first")
        text = self._processor.replace_image_token(split, 0)
        ids = tuple(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"])
        tiles, count = split["rows"][0][0] * split["cols"][0][0] + 1, ids.count(self._processor.image_token_id)
        if count != (needed := tiles * self._processor.image_seq_len):
            raise RewardError(
                f"The tokenizer gives {tiles} tiles {count} image tokens; needed are {needed}. Take the original's."
            )
        return SeenImage(_digest(pixels), (tiles, 1, 1), count, pixels.cpu(), ids)

    def features(self, trunk: Any, images: Sequence[SeenImage]) -> list[ImageFeatures]:
        device = trunk.get_input_embeddings().weight.device
        tiles = [self._cut(image.pixels).to(device) for image in images]
        return [ImageFeatures(trunk.get_image_features(part, return_dict=True).pooler_output[0]) for part in tiles]


ImageEncoder = PatchEncoder | TileEncoder


def by_patches(images: Sequence[SeenImage]) -> list[list[SeenImage]]:
    """Split images into parts of at most `PATCHES` patches, one image at least."""
    parts: list[list[SeenImage]] = []
    room = 0
    for image in images:
        size = math.prod(image.grid)
        if not parts or size > room:
            parts.append([])
            room = PATCHES
        parts[-1].append(image)
        room -= size
    return parts


TEXTS = 4096  # Texts whose tokens are cached


@dataclass(frozen=True, kw_only=True)
class Query:
    """Request to a judge: images for the slots of a template, and texts for its names."""

    images: Sequence[Tensor]  # Each [3, H, W] float in [0, 1], or uint8; [F, 3, H, W] of a clip
    prompt: str  # Fills `{prompt}`
    fields: Mapping[str, str] = field(default_factory=dict)  # Fills other names
    continuation: str = ""  # Text after the template's answer_prefix, as if the assistant had written it


@dataclass(frozen=True)
class TokenRow:
    """Input of the network for one request, up to the token whose hidden state is read."""

    ids: tuple[int, ...]  # Tokens, with as many image tokens as the images take
    images: tuple[SeenImage, ...]  # Images in the order of their tokens


class RowEncoder:
    """Encoder of requests as rows of at most `longest` tokens, by the processor's chat template."""

    def __init__(self, processor: Any, image_token: int, images: ImageEncoder, longest: int | None) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.image_token, self._images, self.longest = image_token, images, longest
        # tokens that the processor, not the chat template, writes around an image
        around = (getattr(processor, f"{end}_image_token_id", None) for end in ("start", "end"))
        self._before, self._after = ([] if token is None else [int(token)] for token in around)
        self._texts: OrderedDict[Any, tuple[int, ...]] = OrderedDict()
        self._special_counts: dict[Any, int] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the tokenizer's special tokens again, after one was added."""
        added = self.tokenizer.added_tokens_decoder
        self.specials = {str(token): token_id for token_id, token in added.items() if str(token).strip()}
        self._ids = frozenset(self.specials.values()) - {self.tokenizer.unk_token_id}
        self._texts.clear()
        self._special_counts.clear()

    def __call__(
        self, template: Template, query: Query, at: str | None, measured: dict[int, SeenImage] | None = None
    ) -> TokenRow:
        """Encode a request up to the special token `at` (None: the last); ValueError says why it cannot be judged.

        `measured` caches images by the id() of their tensor.
        """
        if len(query.images) != template.images:
            raise RewardError(
                f"The template {template.name!r} has {template.images} images, and got {len(query.images)}."
            )
        text_ids = self._text_ids(template, query)
        measured = {} if measured is None else measured
        for image in query.images:
            if id(image) not in measured:
                has_gradient = torch.is_grad_enabled() and image.requires_grad
                is_exact = has_gradient or image.dtype == torch.uint8
                measured[id(image)] = self._images.measure(image if is_exact else rounded_levels(image.detach()))
        images = tuple(measured[id(image)] for image in query.images)
        remaining, ids = iter(images), []
        for token in text_ids:
            if token != self.image_token:
                ids.append(token)
                continue
            image = next(remaining)
            ids += image.ids or [*self._before, *[token] * image.tokens, *self._after]
        if self.longest is not None and len(ids) > self.longest:
            raise ValueError(f"prompt and images take {len(ids)} tokens; the model reads {self.longest}: shrink them")
        if at is None:
            return TokenRow(tuple(ids), images)
        token_id = self.specials.get(at, -1)
        if ids.count(token_id) != 1 or self.image_token in ids[ids.index(token_id) :]:
            raise RewardError(
                f"The template {template.name!r} holds {at} {ids.count(token_id)} times; needed is one, at the end."
            )
        return TokenRow(tuple(ids[: ids.index(token_id) + 1]), images)

    def word_ids(self, words: Sequence[str], *, skip_missing: bool = False) -> list[int]:
        """Return the ids of words (with blanks) of one token each, once; `skip_missing` drops the others."""
        word_ids: dict[int, None] = {}
        for word in words:
            ids = self.tokenizer(word, add_special_tokens=False)["input_ids"]
            if len(ids) == 1 and ids[0] != self.tokenizer.unk_token_id:
                word_ids[int(ids[0])] = None
            elif not skip_missing:
                raise RewardError(
                    f"The word {word!r} is {len(ids)} tokens of this model; give words that are one token each."
                )
        if not word_ids:
            raise RewardError(f"None of the words {list(words)} is one token of this model.")
        return list(word_ids)

    def _text_ids(self, template: Template, query: Query) -> tuple[int, ...]:
        key = (template.digest, query.prompt, tuple(sorted(query.fields.items())), query.continuation)
        if key in self._texts:
            self._texts.move_to_end(key)
            return self._texts[key]
        fields = {"prompt": query.prompt, **query.fields}
        if "question" in template.fields - set(fields):
            raise RewardError(f"The template {template.name!r} needs question.")
        for name, text in fields.items():
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(f"the {name} is no text in Unicode: it holds half of a surrogate pair")
        safe = {name: escape(text, self.specials) for name, text in fields.items()}
        ids = self._tokens(template, safe, query.continuation)
        bare = self._template_specials(template, fields, query.continuation)
        if sum(token in self._ids for token in ids) != bare:
            raise ValueError("the prompt spells out special tokens of the model; take them out")
        if ids.count(self.image_token) != template.images:
            raise RewardError(
                f"The chat template marks {ids.count(self.image_token)} images for {template.images}; give its own."
            )
        self._texts[key] = ids
        while len(self._texts) > TEXTS:
            self._texts.popitem(last=False)
        return ids

    def _template_specials(self, template: Template, fields: Mapping[str, str], continuation: str) -> int:
        key = (template.digest, tuple(sorted(fields)), continuation)
        if key not in self._special_counts:
            ids = self._tokens(template, dict.fromkeys(fields, ""), continuation)
            self._special_counts[key] = sum(token in self._ids for token in ids)
        return self._special_counts[key]

    def _tokens(self, template: Template, fields: Mapping[str, str], continuation: str) -> tuple[int, ...]:
        owners = (self.processor, self.tokenizer)
        owner = next((owner for owner in owners if getattr(owner, "chat_template", None)), None)
        if owner is None:
            raise RewardError("The processor has no chat template. Copy the original's chat_template.jinja there.")
        try:
            text = owner.apply_chat_template(
                template.filled(fields), tokenize=False, add_generation_prompt=True, **template.chat
            )
        except TemplateError as error:
            raise RewardError(f"The model's chat template fails ({error}). Copy the original's there.") from error
        text += template.answer_prefix + continuation
        # verbose=False: rows that are too long get a reason, so that transformers need not warn of them
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def requests(
    request: Request,
    template: Template,
    reasons: list[str | None],
    fields: Mapping[str, str] | None = None,
    *,
    source: bool = False,
) -> tuple[list[int], list[Any]]:
    """Build (rows, queries) of the images that can be judged; write the others' reasons into `reasons`.

    `fields` fill further names of the template; with `source` the image before the edit precedes the edited one.
    """
    rows, queries = [], []
    before = source_images(request.metadata, reasons) if source else {}
    for row, image in request.images.readable():
        if reasons[row] is not None:
            continue
        prompt = request.prompts[row]
        if "prompt" in template.fields and (reason := prompt_problem(prompt)):
            reasons[row] = reason
            continue
        rows.append(row)
        pair = [before[row], image] if source else [image]
        queries.append(Query(images=pair, prompt=prompt, fields=dict(fields or {})))
    return rows, queries


def pair_reasons(request: Request, pairs: Tensor, template: Template) -> list[str | None]:
    """Return why a pair [N, 2] of images cannot be asked about; prompts count only where the template has one."""
    reasons: list[str | None] = []
    for left, right in pairs.tolist():
        sides = (("left", request.images.reasons[left]), ("right", request.images.reasons[right]))
        problems = [f"the {side} image: {reason}" for side, reason in sides if reason is not None]
        if not problems and "prompt" in template.fields:
            is_same = request.prompts[left] == request.prompts[right]
            problem = prompt_problem(request.prompts[left]) if is_same else "the two images have different prompts"
            problems = [problem] if problem else []
        reasons.append("; ".join(problems) or None)
    return reasons


def askable_rows(template: Template, prompts: Sequence[str]) -> list[int]:
    """List the rows whose prompt can be asked about: any where the template needs none."""
    return [row for row, p in enumerate(prompts) if "prompt" not in template.fields or prompt_problem(p) is None]


def source_images(metadata: Sequence[Mapping[str, Any] | None], reasons: list[str | None]) -> dict[int, Tensor]:
    """Map each row to the (first) image under "source" in its record; rows without one get a reason."""
    images: dict[int, Tensor] = {}
    for row, record in enumerate(metadata):
        if not (sources := listed_sources((record or {}).get("source"))):
            reasons[row] = reasons[row] or 'its record has no "source", the image that was edited'
            continue
        try:
            batch = load_images([resolve_image(source) if isinstance(source := sources[0], str) else source])
            image, reason = batch.images[0], batch.reasons[0]
        except (OSError, TypeError, ValueError) as error:  # of the record, which costs its row alone
            image, reason = None, str(error)
        if image is None:
            reasons[row] = reasons[row] or f"the source image: {reason}"
        else:
            images[row] = image
    return images


def check_fields(template: Template, *, instruction: str = "") -> dict[str, str]:
    """Fields for a template's own names; the user's instruction fills `{instruction}`."""
    has_place = "instruction" in template.fields
    if "question" in template.fields or (instruction and not has_place):
        raise ValueError(
            f"The template {template.name!r} has the names {', '.join(sorted(template.fields))}; this judge "
            "fills no {question} (write it into the text), and an instruction needs {instruction}."
        )
    return {"instruction": f"\n{instruction}" if instruction else ""} if has_place else {}
