# SPDX-License-Identifier: Apache-2.0
"""What the functions of the core refuse: shapes, numbers and names that do not fit, in one wording."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def check_same(note: str = "", /, **given: Tensor | None) -> None:
    """Refuse tensors of different shapes; None takes no part.

    Args:
        note: what else the message says of the shape, e.g. ", [B, T]".
        **given: the tensors by their names.
    """
    shapes = {name: tuple(value.shape) for name, value in given.items() if value is not None}
    if len(set(shapes.values())) > 1:
        between = " and " if len(shapes) == 2 else ", "
        shown = between.join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{shown} must have one shape{note}.")


def check_axes(**given: tuple[Tensor | None, str]) -> None:
    """Refuse tensors whose axes do not fit together: name -> (tensor, its axes), one letter one size.

    >>> import torch
    >>> check_axes(reward=(torch.zeros(2), "B"), weight=(torch.zeros(3, 4), "B T"))
    Traceback (most recent call last):
    ValueError: reward must be [B] and weight [B, T]; got (2,) and (3, 4).
    """
    there = {name: (tuple(value.shape), axes) for name, (value, axes) in given.items() if value is not None}
    sizes: dict[str, int] = {}
    for shape, axes in there.values():
        letters = axes.split()
        if len(letters) != len(shape) or any(
            sizes.setdefault(letter, size) != size for letter, size in zip(letters, shape, strict=True)
        ):
            between = " and " if len(there) == 2 else ", "
            wanted = between.join(f"{name} [{axes.replace(' ', ', ')}]" for name, (_, axes) in there.items())
            got = between.join(str(shape) for shape, _ in there.values())
            got = f"shape {got}" if len(there) == 1 else got
            raise ValueError(f"{wanted.replace(' [', ' must be [', 1)}; got {got}.")


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse a name that is none of those allowed."""
    known = tuple(allowed)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}.")


def check_share(**given: float) -> None:
    """Refuse numbers outside [0, 1]."""
    for name, value in given.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie in [0, 1]; got {value}.")


def check_positive(**given: float) -> None:
    """Refuse numbers that are not above 0, or not finite."""
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite; got {value}.")


def check_not_negative(**given: float) -> None:
    """Refuse numbers below 0, or not finite."""
    for name, value in given.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and ≥ 0; got {value}.")


def check_integer_pairs(pairs: Tensor) -> None:
    """Refuse what does not hold whole numbers [N, 2]."""
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not is_integer(pairs):
        raise ValueError(f"pairs must be integers [N, 2]; got {pairs.dtype} {tuple(pairs.shape)}.")


def is_integer(values: Tensor) -> bool:
    """Whether a tensor holds whole numbers: no floats, no complex ones, no truth values."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def check_embeddings(embedding: Tensor) -> Tensor:
    """Sets of embeddings [..., n, d] in float64 without gradient; refuses other shapes and what is not
    finite."""
    if embedding.ndim < 2 or not embedding.shape[-2] or not embedding.shape[-1]:
        raise ValueError(f"embeddings must be [..., n, d] with n, d ≥ 1; got {tuple(embedding.shape)}.")
    if not torch.isfinite(embedding).all():
        raise ValueError("embeddings must be finite; leave out samples without one.")
    return embedding.detach().double()
