# SPDX-License-Identifier: Apache-2.0
"""Encoded prompts as a pipeline's own call takes them: made by its `encode_prompt`, each unique one once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor

from visalign.errors import UserError
from visalign.interfaces import Condition
from visalign.vision.pixels import read_pixels

T = TypeVar("T", bound=Condition)
Encoded = Mapping[str, Any]
"""One prompt: argument of the pipeline's call -> tensor of one sample, or a list of one tensor; `image` is
the `Source`, one for all samples of a call."""


@dataclass(eq=False)
class Source:
    """Images that one edit starts from, and their latents."""

    images: tuple[Image.Image, ...]
    latents: dict[int, Any] = field(default_factory=dict)  # Place -> as the pipeline encodes it
    null: dict[str, Any] = field(default_factory=dict)  # Arguments of the unconditional half
    used: int = 0  # Number of images that the present call has used: it goes through them in order

    @property
    def image(self) -> Any:
        """The images as the pipeline's call takes them."""
        first, *rest = self.images
        return [first, *rest] if rest else first

    def encoded(self, encode: Callable[[], Any]) -> Any:
        """Return the pipeline's encoding, computed once; it uses the posterior mean, so nothing is sampled."""
        index, self.used = self.used, self.used + 1
        if index not in self.latents:
            self.latents[index] = encode()
        return self.latents[index]


@dataclass(frozen=True)
class PipelineCondition:
    """B prompts; the unique ones are stored once."""

    unique: tuple[Encoded, ...]
    index: Tensor  # [B] int64 on the CPU, places among the unique

    def __len__(self) -> int:
        return len(self.index)

    def select(self, index: Tensor) -> PipelineCondition:
        """Return the condition of the samples `index` [N]; repeats allowed."""
        return replace(self, index=self.index[index.cpu()])

    def rows(self) -> list[Encoded]:
        """Return the encoded prompt of each sample."""
        return [self.unique[i] for i in self.index.tolist()]


def check_condition(kind: type[T], x: Tensor, sigma: Tensor, condition: Any) -> T:
    """Return the condition; raises if it is of another kind, or not of the samples x [B, ...], sigma [B]."""
    if not isinstance(condition, kind):
        raise TypeError(f"velocity got a {type(condition).__name__}; give what encode() or select() returned.")
    if sigma.shape != (len(x),) or len(condition) != len(x):
        raise ValueError(
            f"velocity got {len(x)} latents, sigma {tuple(sigma.shape)} and {len(condition)} conditions; they must "
            "agree."
        )
    return condition


def named(returned: Sequence[tuple[Any, ...]], names: Sequence[str]) -> Encoded:
    """Map results of `encode_prompt`, the second of the negative prompt, to argument names; "-" is left out."""
    return {
        prefix + name: value
        for prefix, outputs in zip(("", "negative_"), returned, strict=False)
        for name, value in zip(names, outputs, strict=True)
        if name != "-" and value is not None
    }


def join(rows: Sequence[Encoded], axes: Mapping[str, int]) -> dict[str, Any]:
    """Join arguments of n samples, padded where they have masks; `axes`: argument -> axis of the samples, else 0."""
    shared = {"image": rows[0]["image"]} if "image" in rows[0] else {}
    names = [name for name in rows[0] if name not in shared]
    return shared | {name: _joined(name, [row[name] for row in rows], axes.get(name, 0)) for name in names}


def lengths(row: Encoded, axes: Mapping[str, int], *, padded: bool = True) -> tuple[int, ...]:
    """Return what samples of one call must share: images to edit, lengths of tensors that may not be `padded`."""
    if padded and any("mask" in name for name in row):
        return (id(row.get("image")),)
    tensors = [(v, axes.get(n, 0)) for n, v in row.items() if isinstance(v, Tensor) and "cu_seqlens" not in n]
    return (id(row.get("image")), *(value.shape[axis + 1] for value, axis in tensors if value.ndim > axis + 1))


def _joined(name: str, values: list[Any], axis: int) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if "cu_seqlens" in name:  # where each sample's tokens begin and end in the packed row
        sizes = torch.cat([value.diff() for value in values])
        return torch.cat([values[0][:1], values[0][:1] + sizes.cumsum(0).to(values[0].dtype)])
    longest = max(value.shape[axis + 1] if value.ndim > axis + 1 else 0 for value in values)
    return torch.cat([_padded(value, axis + 1, longest) for value in values], axis)


def _padded(value: Tensor, axis: int, length: int) -> Tensor:
    if value.ndim <= axis or value.shape[axis] == length:
        return value
    shape = list(value.shape)
    shape[axis] = length - shape[axis]
    return torch.cat([value, value.new_zeros(shape)], axis)


def image_of(source: Any) -> Image.Image:
    """Read an image (a file, a PIL image, or [3, H, W] in [0, 1]) as pipelines take it: upright, over white."""
    if isinstance(source, Tensor | Image.Image):
        pixels = read_pixels(source, "A source")
    else:
        try:
            with Image.open(source) as opened:
                pixels = read_pixels(opened, "it")
        except (OSError, AttributeError, ValueError) as error:
            raise UserError(f"The source {source!r} is no image that can be read ({error}).") from error
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def source_key(source: Any) -> Any:
    """Return a key that distinguishes sources in memory without reading their pixels."""
    if isinstance(source, list | tuple) and all(isinstance(item, str) for item in source):
        return tuple(source)
    return source if isinstance(source, str) else id(source)


def positive(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the arguments of the unconditional half."""
    return {name: value for name, value in arguments.items() if not name.startswith("negative_")}
