# SPDX-License-Identifier: Apache-2.0
"""Layout of published judges on Qwen2-VL: names of weights in older checkpoints, sizes of pictures.

HPSv3 (arXiv 2508.03789) and judges of its time were saved with transformers 4, where the vision tower was
`visual.*` and the language model `model.*`; transformers 5 nests both in `model`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from visalign.vision.patches import smart_resize as _smart_resize

V = TypeVar("V")

MIN_PIXELS = 56 * 56
"""Qwen2-VL's default."""
MAX_PIXELS = 16384 * 28 * 28
"""Qwen2-VL's default."""


def smart_resize(
    height: int, width: int, *, factor: int = 28, min_pixels: int = MIN_PIXELS, max_pixels: int = MAX_PIXELS
) -> tuple[int, int]:
    """Height and width of a picture as qwen-vl-utils and the published HPSv3 resize it: `factor` is 28 for
    Qwen2-VL and Qwen2.5-VL, 32 for Qwen3-VL; HPSv3 sets both bounds to 200704.
    """
    return _smart_resize(height, width, factor, min_pixels, max_pixels, whole_tokens=True)


def current_key(key: str) -> str:
    """The name in transformers 5 of a weight that transformers 4 saved; others, heads included, stay.

    >>> current_key("visual.merger.ln_q.weight")
    'model.visual.merger.ln_q.weight'
    """
    if key.startswith(("model.visual.", "model.language_model.")):
        return key
    if key.startswith("visual."):
        return f"model.{key}"
    return f"model.language_model.{key.removeprefix('model.')}" if key.startswith("model.") else key


def current_keys(state: Mapping[str, V]) -> dict[str, V]:
    """A state dict under the names of transformers 5; one that has them already is left as it is. Two weights
    that get the same name are refused, since one would be lost.
    """
    renamed: dict[str, V] = {}
    for key, value in state.items():
        new = current_key(key)
        if new in renamed:
            raise ValueError(
                f"The checkpoint holds {new!r} under its old name and its new one; it is a mixture of two."
            )
        renamed[new] = value
    return renamed


def is_old_layout(keys: Iterable[str]) -> bool:
    """Whether some weights have the names of transformers 4."""
    return any(current_key(key) != key for key in keys)
