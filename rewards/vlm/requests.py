# SPDX-License-Identifier: Apache-2.0
"""Requests to a vision-language model: images measured in tokens as its family takes them in, prompts
turned into token ids.

A clip [F, 3, H, W] may stand in an image's slot: its features take the places of the tokens, so that the
model reads what it reads behind its own video token.

No user can write a special token: a prompt that spells one out is taken apart or refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from visalign.data.sets.prompt_files import listed_sources
from visalign.rewards.base.contract import Request, RewardError, prompt_problem
from visalign.rewards.base.images import load_images
from visalign.vision.images import ImageFeatures, PatchedImage, pixel_digest, tower_features
from visalign.vision.patches import PatchCutter
from visalign.vision.pixels import to_levels

from .template import Template, escape

PATCHES = 1 << 16
"""Patches in one pass through the tower."""


@dataclass(frozen=True)
class SeenImage:
    """An image that was not cut yet; two are equal if their pixels are."""

    digest: str
    grid: tuple[int, int, int] = field(compare=False)
    """(frames, rows, columns) of patches; (tiles, 1, 1) where a model takes tiles."""
    tokens: int = field(compare=False)
    """Places that it takes in the prompt."""
    pixels: Tensor = field(compare=False, repr=False)
    """uint8 [3, H, W], or [F, 3, H, W] of a clip."""


class ImageEncoder(Protocol):
    """How a family of models takes images in."""

    merge: int
    """Patches that become one token, on each side; 0 where positions know no grid."""

    def measure(self, pixels: Tensor) -> SeenImage:
        """An image's or clip's size in tokens; ValueError with the reason where the model cannot take it."""
        ...

    def features(self, trunk: Any, shown: Sequence[SeenImage]) -> list[ImageFeatures]:
        """Images through the tower, in one pass."""
        ...

    def settings(self) -> dict[str, Any]:
        """All that happens between pixels and tower, for the identity."""
        ...


class PatchEncoder:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: patches of a resized image; `changes` are fields of `PatchCutter`
    that are to differ, e.g. min_pixels and max_pixels.
    """

    def __init__(self, image_processor: Any, **changes: Any) -> None:
        self.cutter = PatchCutter.of(image_processor, **changes)
        self.merge = self.cutter.merge

    def measure(self, pixels: Tensor) -> SeenImage:
        pixels = self.cutter.seen(pixels)
        grid = self.cutter.grid(*pixels.shape[-2:], frames=len(pixels) if pixels.ndim == 4 else 1)
        return SeenImage(pixel_digest(pixels), grid, self.cutter.tokens(grid), pixels)

    def features(self, trunk: Any, shown: Sequence[SeenImage]) -> list[ImageFeatures]:
        cut = [PatchedImage(s.digest, s.grid, s.tokens, self.cutter.cut(s.pixels)) for s in shown]
        return tower_features(trunk, cut)

    def settings(self) -> dict[str, Any]:
        return self.cutter.settings()


class TileEncoder:
    """InternVL: tiles of one size, cut by the library's processor; each image by itself."""

    merge = 0

    def __init__(self, processor: Any) -> None:
        self._images, self._length = processor.image_processor, int(processor.image_seq_length)

    def measure(self, pixels: Tensor) -> SeenImage:
        if pixels.ndim != 3:
            raise RewardError("A model that cuts images into tiles takes no clip; give a Qwen2-VL.")
        tiles = self._images.get_number_of_image_patches(*pixels.shape[1:], {"crop_to_patches": True})
        return SeenImage(pixel_digest(pixels), (int(tiles), 1, 1), int(tiles) * self._length, pixels)

    def features(self, trunk: Any, shown: Sequence[SeenImage]) -> list[ImageFeatures]:
        cut = [
            self._images(
                images=[s.pixels],
                crop_to_patches=True,
                return_tensors="pt",
                input_data_format="channels_first",
            )["pixel_values"]
            for s in shown
        ]
        device = trunk.get_input_embeddings().weight.device
        found = trunk.get_image_features(torch.cat(cut).to(device), return_dict=True).pooler_output
        parts = found.split([len(tiles) for tiles in cut])
        return [ImageFeatures(part.flatten(0, 1)) for part in parts]

    def settings(self) -> dict[str, Any]:
        names = ("size", "image_mean", "image_std", "resample", "min_patches", "max_patches")
        return {name: str(getattr(self._images, name, None)) for name in names}


def by_patches(shown: Sequence[SeenImage]) -> list[list[SeenImage]]:
    """Parts of at most `PATCHES` patches, one image at least."""
    parts: list[list[SeenImage]] = []
    room = 0
    for image in shown:
        size = image.grid[0] * image.grid[1] * image.grid[2]
        if not parts or size > room:
            parts.append([])
            room = PATCHES
        parts[-1].append(image)
        room -= size
    return parts


TEXTS = 4096
"""Texts whose tokens are remembered."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """One request: images for the slots of a template, and what fills its names."""

    images: Sequence[Tensor]
    """Each [3, H, W] float in [0, 1], or uint8; [F, 3, H, W] of a clip."""
    prompt: str
    """Fills `{prompt}`."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fills other names."""
    continuation: str = ""
    """What the assistant is made to have written behind the template's answer_prefix."""


@dataclass(frozen=True)
class TokenRow:
    """What the network reads for one request, up to the token whose hidden state is asked for."""

    ids: tuple[int, ...]
    """Tokens, with as many image tokens as the images take."""
    shown: tuple[SeenImage, ...]
    """Images in the order of their tokens."""


class RowEncoder:
    """Turns requests into rows of at most `longest` tokens, by the processor's chat template, tokenizer and
    image tokens.
    """

    def __init__(self, processor: Any, image_token: int, images: ImageEncoder, longest: int | None) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.image_token, self._images, self.longest = image_token, images, longest
        self._around = _marks_around(processor)
        self._texts: OrderedDict[Any, tuple[int, ...]] = OrderedDict()
        self._plain: dict[Any, int] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the tokenizer's special tokens again, after one was added."""
        added = self.tokenizer.added_tokens_decoder
        self.specials = {str(token): token_id for token_id, token in added.items() if str(token).strip()}
        self._ids = frozenset(self.specials.values()) - {self.tokenizer.unk_token_id}
        self._texts.clear()
        self._plain.clear()

    def __call__(
        self, template: Template, query: Query, at: str | None, measured: dict[int, SeenImage] | None = None
    ) -> TokenRow:
        """One request; ValueError with the reason why it cannot be judged, RewardError where the template
        does not fit. `at` is the token at which the row ends, None the last one; `measured` holds images
        that were met before, by the id of their tensor, and is filled here.
        """
        if len(query.images) != template.images:
            raise RewardError(
                f"The template {template.name!r} has {template.images} image slots, and {len(query.images)} "
                "images were given for it."
            )
        text_ids = self._text_ids(template, query)
        measured = {} if measured is None else measured
        for image in query.images:
            if id(image) not in measured:
                measured[id(image)] = self._images.measure(to_levels(image))
        shown = tuple(measured[id(image)] for image in query.images)
        left, ids = iter(shown), []
        before, after = self._around
        for token in text_ids:
            ids += [*before, *[token] * next(left).tokens, *after] if token == self.image_token else [token]
        if self.longest is not None and len(ids) > self.longest:
            raise ValueError(
                f"prompt and images take {len(ids)} tokens; the model reads at most {self.longest}: "
                "shorten the prompt or shrink the images"
            )
        end = len(ids) - 1 if at is None else self._place(ids, at, template)
        return TokenRow(tuple(ids[: end + 1]), shown)

    def word_ids(self, words: Sequence[str], *, skip_missing: bool = False) -> list[int]:
        """The ids of words (blanks included) that are one token each, without repeats; `skip_missing` leaves
        out what is several tokens instead of raising.
        """
        found: dict[int, None] = {}
        for word in words:
            ids = self.tokenizer(word, add_special_tokens=False)["input_ids"]
            if len(ids) == 1 and ids[0] != self.tokenizer.unk_token_id:
                found[int(ids[0])] = None
            elif not skip_missing:
                raise RewardError(
                    f"The word {word!r} is {len(ids)} tokens of this model "
                    f"({self.tokenizer.convert_ids_to_tokens(ids)}), and an answer is read at one; give "
                    "words that are one token each."
                )
        if not found:
            raise RewardError(f"None of the words {list(words)} is one token of this model.")
        return list(found)

    def _text_ids(self, template: Template, query: Query) -> tuple[int, ...]:
        """Tokens with one image token per image; remembered."""
        key = (template.digest, query.prompt, tuple(sorted(query.fields.items())), query.continuation)
        if key in self._texts:
            self._texts.move_to_end(key)
            return self._texts[key]
        fields = {"prompt": query.prompt, **query.fields}
        missing = template.fields & {"prompt", "question"} - set(fields)
        if missing:
            raise RewardError(f"The template {template.name!r} needs {', '.join(sorted(missing))}.")
        for name, text in fields.items():
            if any("\ud800" <= sign <= "\udfff" for sign in text):
                raise ValueError(f"the {name} is no text in Unicode: it holds half of a surrogate pair")
        safe = {name: escape(text, self.specials) for name, text in fields.items()}
        ids = self._tokens(template, safe, query.continuation)
        if _count(ids, self._ids) != self._own_specials(template, fields, query.continuation):
            raise ValueError("the prompt spells out special tokens of the model; take them out")
        if ids.count(self.image_token) != template.images:
            raise RewardError(
                f"The chat template of the model marks {ids.count(self.image_token)} images for the "
                f"{template.images} of template {template.name!r}; give the processor's own chat template."
            )
        self._texts[key] = ids
        while len(self._texts) > TEXTS:
            self._texts.popitem(last=False)
        return ids

    def _own_specials(self, template: Template, fields: Mapping[str, str], continuation: str) -> int:
        """Special tokens of the template itself; remembered."""
        key = (template.digest, tuple(sorted(fields)), continuation)
        if key not in self._plain:
            if len(self._plain) >= TEXTS:
                self._plain.clear()
            ids = self._tokens(template, dict.fromkeys(fields, ""), continuation)
            self._plain[key] = _count(ids, self._ids)
        return self._plain[key]

    def _tokens(self, template: Template, fields: Mapping[str, str], continuation: str) -> tuple[int, ...]:
        if not (
            getattr(self.processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        ):
            raise RewardError(
                "The model's processor has no chat template, so nobody knows how it is asked. Put the "
                "chat_template.jinja of the model it came from into its folder."
            )
        holder = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        text = holder.apply_chat_template(
            template.filled(fields), tokenize=False, add_generation_prompt=True, **template.chat
        )
        whole = text + template.answer_prefix + continuation
        # Rows that are too long get a reason of their own, so that transformers need not warn of them.
        return tuple(self.tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"])

    def _place(self, ids: Sequence[int], token: str, template: Template) -> int:
        """Where the one token stands that is read."""
        if token not in self.specials:
            raise RewardError(f"The tokenizer has no token {token!r}, at which this judge reads.")
        places = [place for place, one in enumerate(ids) if one == self.specials[token]]
        if len(places) != 1:
            raise RewardError(
                f"The template {template.name!r} holds {token} {len(places)} times; a judge reads at exactly "
                "one."
            )
        if self.image_token in ids[places[0] :]:
            raise RewardError(
                f"The template {template.name!r} shows an image behind {token}, where it is not seen any "
                "more. Write the images first."
            )
        return places[0]


def _marks_around(processor: Any) -> tuple[list[int], list[int]]:
    """Tokens that the processor, not the chat template, writes around an image."""
    names = ("start_image_token_id", "end_image_token_id")
    ids = [getattr(processor, name, None) for name in names]
    before, after = ([] if one is None else [int(one)] for one in ids)
    return before, after


def _count(ids: Sequence[int], special: frozenset[int]) -> int:
    return sum(one in special for one in ids)


def requests(
    request: Request,
    template: Template,
    reasons: list[str | None],
    fields: Mapping[str, str] | None = None,
    *,
    source: bool = False,
) -> tuple[list[int], list[Any]]:
    """(rows, queries) of the images that can be judged; the others get a reason in place, also a prompt
    without a visible character where the template asks for it. `fields` are further names that the
    template fills; with `source` the image that was edited comes before its edit.
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
        shown = [before[row], image] if source else [image]
        queries.append(Query(images=shown, prompt=prompt, fields=dict(fields or {})))
    return rows, queries


def source_images(
    metadata: Sequence[Mapping[str, Any] | None], reasons: list[str | None]
) -> dict[int, Tensor]:
    """row -> the image under "source" in its record, that was edited, of several the first; a row without
    one gets its reason."""
    told = ((row, listed_sources((record or {}).get("source"))) for row, record in enumerate(metadata))
    given = {row: images[0] for row, images in told if images}
    read = load_images(list(given.values()))
    found = {}
    for row in range(len(metadata)):
        if row not in given:
            reasons[row] = reasons[row] or 'its record has no "source", the image that was edited'
    for row, image, reason in zip(given, read.images, read.reasons, strict=True):
        if image is None:
            reasons[row] = reasons[row] or f"the source image: {reason}"
        else:
            found[row] = image
    return found


def check_fields(template: Template, *, instruction: str = "") -> dict[str, str]:
    """The fields that a template's own names need; an instruction of the user fills `{instruction}`."""
    if "question" in template.fields:
        raise ValueError(
            f"The template {template.name!r} has {{question}}, which this judge does not fill; write the "
            "question itself into its text. Judges with several questions, such as vision_reward, fill it."
        )
    if instruction and "instruction" not in template.fields:
        raise ValueError(
            f"The template {template.name!r} has no place for an instruction; write {{instruction}} into its "
            "text."
        )
    if "instruction" not in template.fields:
        return {}
    return {"instruction": f"\n{instruction}" if instruction else ""}
