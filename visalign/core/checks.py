# SPDX-License-Identifier: Apache-2.0
"""Checks of shapes, numbers and names that the functions of the core share, with one wording."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from visalign.errors import suggestion


def check_same(note: str = "", /, **tensors: Tensor | None) -> None:
    """Refuse tensors of different shapes; None is skipped. `note` continues the message, e.g. ", [B, T]"."""
    shapes = {name: tuple(value.shape) for name, value in tensors.items() if value is not None}
    if len(set(shapes.values())) > 1:
        between = " and " if len(shapes) == 2 else ", "
        listed = between.join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{listed} must have one shape{note}.")


def check_axes(**tensors: tuple[Tensor | None, str]) -> None:
    """Refuse tensors whose axes do not fit together: name -> (tensor, its axes), one letter or number one size.

    >>> import torch
    >>> check_axes(reward=(torch.zeros(2), "B"), weight=(torch.zeros(3, 4), "B T"))
    Traceback (most recent call last):
    ValueError: reward must be [B] and weight [B, T]; got (2,) and (3, 4).
    """
    shapes = {name: (tuple(value.shape), axes) for name, (value, axes) in tensors.items() if value is not None}
    sizes: dict[str, int] = {}
    for shape, axes in shapes.values():
        letters = axes.split()
        if len(letters) != len(shape) or any(
            size != (int(letter) if letter.isdigit() else sizes.setdefault(letter, size))
            for letter, size in zip(letters, shape, strict=True)
        ):
            between = " and " if len(shapes) == 2 else ", "
            needed = between.join(f"{name} [{axes.replace(' ', ', ')}]" for name, (_, axes) in shapes.items())
            got = ("shape " if len(shapes) == 1 else "") + between.join(str(s) for s, _ in shapes.values())
            raise ValueError(f"{needed.replace(' [', ' must be [', 1)}; got {got}.")


def check_advantage(advantage: Tensor, decisions: Tensor) -> None:
    """Refuse an advantage that is neither [B] nor shaped like the decisions, [B, T] or [B]."""
    if advantage.shape not in (decisions.shape, decisions.shape[:1]):
        shapes = f"{tuple(decisions.shape)}; got {tuple(advantage.shape)}"
        raise ValueError(f"advantage must be [B] or of the shape of the decisions, {shapes}.")


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse a value that is not among the allowed names."""
    names = tuple(allowed)
    if value not in names:
        near = suggestion(str(value), names)
        raise ValueError(f"{name} must be one of {', '.join(names)}; got {value!r}. {near}".rstrip())


def check_rules(values: Any, rules: Iterable[tuple[Callable[[Any], bool], str]]) -> None:
    """Refuse a dataclass by the first (condition that is refused, message with its fields) that it meets."""
    for refused, message in rules:
        if refused(values):
            raise ValueError(message.format(**vars(values)))


def check_integer_pairs(pairs: Tensor) -> None:
    """Refuse tensors that are not integers [N, 2]."""
    check_axes(pairs=(pairs, "N 2"))
    if pairs.is_floating_point() or pairs.dtype == torch.bool:
        raise ValueError(f"pairs must be integers [N, 2]; got {pairs.dtype}.")


def check_embeddings(embedding: Tensor) -> Tensor:
    """Return embeddings [..., n, d] in float64 without gradient; refuse other shapes and infinite values."""
    if embedding.ndim < 2 or not embedding.shape[-2] or not embedding.shape[-1]:
        raise ValueError(f"embeddings must be [..., n, d] with n, d ≥ 1; got {tuple(embedding.shape)}.")
    if not torch.isfinite(embedding).all():
        raise ValueError("embeddings must be finite; leave out samples without one.")
    return embedding.detach().double()
