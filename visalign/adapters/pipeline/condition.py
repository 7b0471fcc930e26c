# SPDX-License-Identifier: Apache-2.0
"""Encoded prompts as a pipeline's own call takes them: made by its `encode_prompt`, each unique one once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from visalign.errors import UserError
from visalign.vision.pixels import read_pixels

Encoded = Mapping[str, Any]
"""One prompt: argument of the pipeline's call -> tensor of one sample, or a list of one tensor; `image` is
the `Source`, one for all samples of a call."""


@dataclass(eq=False)
class Source:
    """The images that one edit starts from, and what the autoencoder makes of them."""

    images: tuple[Image.Image, ...]
    latents: dict[int, Any] = field(default_factory=dict)
    """Place -> as the pipeline encodes it."""
    asked: int = 0
    """How many of them the present call has asked for: it goes through them in order."""

    @property
    def image(self) -> Any:
        """Source as the pipeline's call takes it."""
        first, *rest = self.images
        return [first, *rest] if rest else first

    def encoded(self, ask: Callable[[], Any]) -> Any:
        """Return the pipeline's encoding, computed once; it uses the posterior mean, so nothing is
        sampled."""
        index, self.asked = self.asked, self.asked + 1
        if index not in self.latents:
            self.latents[index] = ask()
        return self.latents[index]


@dataclass(frozen=True)
class PipelineCondition:
    """B prompts; the unique ones are stored once."""

    unique: tuple[Encoded, ...]
    index: Tensor
    """[B] int64 on the CPU, places among the unique."""

    def __len__(self) -> int:
        return len(self.index)

    def select(self, index: Tensor) -> PipelineCondition:
        """The condition of the samples `index` [N]; repeats allowed."""
        return replace(self, index=self.index[index.cpu()])

    def rows(self) -> list[Encoded]:
        """Per sample."""
        return [self.unique[i] for i in self.index.tolist()]


def rows_of(x: Tensor, sigma: Tensor, condition: Any) -> list[Encoded]:
    """Per sample what it is conditioned on.

    Args:
        x: [B, ...].
        sigma: [B].
        condition: of the B samples.

    Raises:
        TypeError, ValueError: it is no condition, or the three do not agree.
    """
    if not isinstance(condition, PipelineCondition):
        raise TypeError(
            f"velocity got a {type(condition).__name__}; give what encode() or select() returned."
        )
    if sigma.shape != (len(x),) or len(condition) != len(x):
        raise ValueError(
            f"velocity got {len(x)} latents, sigma {tuple(sigma.shape)} and {len(condition)} conditions; "
            "the three must agree. Use sigma.expand(B) and condition.select(index)."
        )
    return condition.rows()


def named(returned: Sequence[tuple[Any, ...]], names: Sequence[str]) -> Encoded:
    """Map the results of one or two calls of `encode_prompt` to argument names.

    Args:
        returned: of the prompt, and of the negative one where the pipeline encodes it apart.
        names: of the outputs, "-" for what is left out.
    """
    arguments = {}
    for prefix, outputs in zip(("", "negative_"), returned, strict=False):
        for name, value in zip(names, outputs, strict=True):
            if name != "-" and value is not None:
                arguments[prefix + name] = value
    return arguments


def join(rows: Sequence[Encoded], axes: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of the call for n samples; embeddings that have masks are padded to the longest.

    Args:
        rows: one per sample, with the same names.
        axes: argument -> axis of the samples, where it is not the first.
    """
    shared = {"image": rows[0]["image"]} if "image" in rows[0] else {}
    names = [name for name in rows[0] if name not in shared]
    return shared | {name: _joined(name, [row[name] for row in rows], axes.get(name, 0)) for name in names}


def lengths(row: Encoded, axes: Mapping[str, int], *, padded: bool = True) -> tuple[int, ...]:
    """Return what the samples of one call must share: images to edit, and lengths of tensors without a mask.

    Args:
        row: one sample.
        axes: see `join`.
        padded: whether those with a mask may be padded to one length.
    """
    if padded and any("mask" in name for name in row):
        return (id(row.get("image")),)
    tensors = [(v, axes.get(n, 0)) for n, v in row.items() if isinstance(v, Tensor) and "cu_seqlens" not in n]
    sizes = (value.shape[axis + 1] for value, axis in tensors if value.ndim > axis + 1)
    return (id(row.get("image")), *sizes)


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
    """An image as pipelines take it: upright, over white, as a reward sees it.

    Args:
        source: a file, a PIL image, or [3, H, W] in [0, 1].

    Raises:
        UserError: it cannot be read.
    """
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
    """Key that distinguishes sources in memory without reading their pixels.

    Args:
        source: of a record.
    """
    if isinstance(source, list | tuple) and all(isinstance(item, str) for item in source):
        return tuple(source)
    return source if isinstance(source, str) else id(source)


def positive(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the arguments of the unconditional half."""
    return {name: value for name, value in arguments.items() if not name.startswith("negative_")}
