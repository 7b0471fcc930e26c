# SPDX-License-Identifier: Apache-2.0
"""What the pages of rewards in use share: one base template, numbers in words, pictures inside the file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch.nn.functional as F
from markupsafe import Markup
from torch import Tensor

from .pictures import PIXELATED_SIDE, data_uri
from .report import environment

LARGEST_SIDE = 768
"""Pictures are shrunk to this many pixels on their longer side before they go into a page."""


def render_page(template: str, *, title: str, command: str, **values: Any) -> str:
    """A page that extends `page.html.j2`: one file, no network, no script, light or dark, any width.

    Args:
        template: Name of a template of this folder.
        title: Of the page.
        command: What wrote it, for the last line.
        **values: For the template.

    Returns:
        HTML.
    """
    found = environment()
    found.filters |= {"plain": plain, "signed": signed, "share": share, "span": span}
    found.globals |= {"rail": rail}
    return found.get_template(template).render(title=title, command=command, **values)


def embedded(image: Tensor, *, side: int = LARGEST_SIDE) -> dict[str, Any]:
    """A picture as a page shows it.

    Args:
        image: [3, H, W] float in [0, 1].
        side: Longest side in pixels.

    Returns:
        `source`, a data: URI; `width` and `height` of the picture itself; `pixelated`, whether it is small
        enough to be enlarged as squares.
    """
    height, width = image.shape[1:]
    shown = image.detach().float().cpu()
    if max(height, width) > side:
        factor = side / max(height, width)
        size = (max(1, round(height * factor)), max(1, round(width * factor)))
        shown = F.interpolate(shown[None], size=size, mode="bilinear", antialias=True, align_corners=False)[0]
    levels = shown.mul(255).round().clamp(0, 255).byte().permute(1, 2, 0).contiguous().numpy()
    return {
        "source": data_uri(np.asarray(levels)),
        "width": width,
        "height": height,
        "pixelated": max(height, width) <= PIXELATED_SIDE,
    }


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Names of files as a page shows them: without the folder that all of them share.

    >>> short_names(["runs/a/1.png", "runs/b/1.png"])
    {'runs/a/1.png': 'a/1.png', 'runs/b/1.png': 'b/1.png'}
    >>> short_names(["runs/a.png"]), short_names(["/a.png", "b.png"])
    ({'runs/a.png': 'a.png'}, {'/a.png': '/a.png', 'b.png': 'b.png'})
    """
    unique = list(dict.fromkeys(names))
    parts = [name.split("/") for name in unique]
    shared = 0
    while parts and all(len(own) > shared + 1 and own[shared] == parts[0][shared] for own in parts):
        shared += 1
    return {name: "/".join(own[shared:]) for name, own in zip(unique, parts, strict=True)}


def plain(value: float | None, digits: int = 3) -> str:
    """So many significant digits without an exponent for ordinary sizes; a dash where there is no number.

    >>> plain(0.5), plain(0.0123), plain(1234.56), plain(None), plain(-2.0)
    ('0.500', '0.0123', '1235', '–', '−2.00')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}g}".replace("-", "−")
    first = math.floor(math.log10(abs(value))) if value else -1
    return f"{value:.{min(max(0, digits - 1 - first), 5)}f}".replace("-", "−")


def signed(value: float | None, decimals: int = 2) -> str:
    """A change with its sign.

    >>> signed(0.25), signed(-1.0), signed(0.0), signed(None)
    ('+0.25', '−1.00', '0.00', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:+.{decimals}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def share(value: float | None) -> str:
    """A share in percent.

    >>> share(0.123), share(None)
    ('12.3\\xa0%', '–')
    """
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f}\u00a0%"


def span(number: Mapping[str, Any] | None) -> str:
    """The ends of an interval with their signs.

    >>> span({"low": -0.5, "high": 0.25}), span({"low": None, "high": None})
    ('−0.50 to +0.25', 'no interval')
    """
    if number is None or number["low"] is None:
        return "no interval"
    return f"{signed(number['low'])} to {signed(number['high'])}"


def rail(number: Mapping[str, Any] | None, limit: float, key: str = "mean", side: str = "after") -> Markup:
    """An interval on a track from −limit to limit, placed in percent of its width; what is beyond is cut.

    Args:
        number: Has `key`, `low` and `high`; None draws nothing.
        limit: Half of the track's length.
        key: Of the estimate.
        side: Colour: "after" or "before".
    """
    if number is None or number[key] is None:
        return Markup("")

    def place(value: float) -> float:
        return min(max(50 * (1 + value / limit), 0.0), 100.0)

    dot = Markup('<span class="dot {0}" style="left:{1:.2f}%"></span>').format(side, place(number[key]))
    if number["low"] is None:
        return dot
    start, end = place(number["low"]), place(number["high"])
    drawn = '<span class="ci {0}" style="left:{1:.2f}%;width:{2:.2f}%"></span>'
    return Markup(drawn).format(side, start, end - start) + dot
