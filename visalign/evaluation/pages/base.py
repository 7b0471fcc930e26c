# SPDX-License-Identifier: Apache-2.0
"""What all pages share: one base template, numbers in words, images inside the file."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from visalign.escaping import escape_control
from visalign.versions import visalign_version

LARGEST_SIDE = 768
"""Images are shrunk to this many pixels on their longer side before they go into a page."""
PIXELATED_SIDE = 128
"""Images up to this side are stored losslessly and enlarged as squares; larger ones are photographs."""
MISSING = "–"


def render_page(
    template: str, *, title: str, command: str = "", models: Sequence[tuple[str, str]] = (), **values: Any
) -> str:
    """A page that extends `page.html.j2`: one file, no network, light or dark, any width.

    Its script (`page.js`, for sorting, filtering, copying and enlarging) is the only one that the page's
    security policy lets run, by its hash.

    Args:
        template: Name of a template of this folder.
        title: Of the page.
        command: What wrote it, for the last line; the whole command line where it was one.
        models: (judge, its model and identity), for the last line.
        **values: For the template.

    Returns:
        HTML; everything in it is escaped, and an undefined name is an error.
    """
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (
        plain,
        number,
        fixed,
        signed,
        change,
        share,
        whole,
        points,
        span,
        words,
        duration,
        provenance_sentence,
    )
    found.filters |= {function.__name__: function for function in filters}
    found.globals |= found.filters | {"rail": rail}
    origin: dict[str, Any] = {
        "command": command_line() or command,
        "version": visalign_version(),
        "models": list(models),
    }
    day = datetime.now(tz=UTC).date().isoformat()
    script = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    origin |= {"date": day, "script": Markup(script), "script_hash": f"sha256-{digest}"}
    return found.get_template(template).render(title=title, **origin, **values)


def command_line() -> str:
    """The command that this process runs, as a shell takes it; empty where it is another program."""
    path = Path(sys.argv[0])
    ours = path.name == "visalign" or (path.name == "__main__.py" and path.parent.name == "visalign")
    return shlex.join(["visalign", *sys.argv[1:]]) if ours else ""


def model_name(identity: Mapping[str, Any]) -> str:
    """Model and identity of a judge in a few words, from what results keep of it."""
    model, digest = identity.get("model"), str(identity.get("digest") or "")[:12]
    return ", ".join(part for part in (model and str(model), digest and f"identity {digest}") if part)


def provenance_sentence(label: str, told: str) -> str:
    """Whose numbers a judge's are, in a sentence that says no name twice.

    >>> provenance_sentence("hpsv3", "hpsv3: shapes-hpsv3"), provenance_sentence("mine", "hpsv3: FOLDER")
    ('hpsv3: shapes-hpsv3.', 'mine is hpsv3: FOLDER.')
    """
    return f"{told}." if told.startswith(f"{label}: ") else f"{label} is {told}."


def data_uri(image: NDArray[np.uint8]) -> str:
    """An image [H, W, 3] as a data: URI: PNG when small, JPEG when larger than `PIXELATED_SIDE`."""
    kind = "png" if max(image.shape[:2]) <= PIXELATED_SIDE else "jpeg"
    buffer = io.BytesIO()
    Image.fromarray(image).save(
        buffer, format=kind, **({"optimize": True} if kind == "png" else {"quality": 88})
    )
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def embedded(image: Tensor, *, side: int = LARGEST_SIDE) -> dict[str, Any]:
    """An image as a page shows it.

    Args:
        image: [3, H, W] float in [0, 1].
        side: Longest side in pixels.

    Returns:
        `source`, a data: URI; `width` and `height` of the image itself; `pixelated`, whether it is small
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
    return {name: escape_control("/".join(own[shared:])) for name, own in zip(unique, parts, strict=True)}


def plain(value: float | None, digits: int = 3) -> str:
    """So many significant digits without an exponent for ordinary sizes; a dash where there is no number.

    >>> plain(0.5), plain(0.0123), plain(1234.56), plain(None), plain(-2.0)
    ('0.500', '0.0123', '1235', '–', '−2.00')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}".replace("-", "−")
    first = math.floor(math.log10(abs(value))) if value else -1
    return f"{value:.{min(max(0, digits - 1 - first), 5)}f}".replace("-", "−")


def number(value: float | None) -> str:
    """Four significant digits.

    >>> number(28.456), number(0.0)
    ('28.46', '0')
    """
    return "0" if value == 0 else plain(value, 4)


def fixed(value: float | None) -> str:
    """Three decimals, for numbers that stand in one column."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.3f}".replace("-", "−")


def signed(value: float | None, decimals: int = 2) -> str:
    """A change with its sign.

    >>> signed(0.25), signed(-1.0), signed(0.0), signed(None)
    ('+0.25', '−1.00', '0.00', '–')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:+.{decimals}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def change(value: float | None) -> str:
    """A change with its sign and three significant digits.

    >>> change(0.25), change(-1234.0), change(0.0)
    ('+0.250', '−1234', '0')
    """
    return "0" if value == 0 else ("+" if value is not None and 0 < value < math.inf else "") + plain(value)


def share(value: float | None, decimals: int = 1) -> str:
    """A share in percent.

    >>> share(0.123), share(None)
    ('12.3\\xa0%', '–')
    """
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.{decimals}f}\u00a0%"


def whole(value: float | None) -> str:
    """A share in whole percent."""
    return share(value, 0)


def points(value: float | None) -> str:
    """A difference of shares in signed percentage points."""
    return signed(None if value is None else 100 * value, 1)


def span(interval: Any, form: Any = signed, between: str = " to ") -> str:
    """The ends of an interval.

    Args:
        interval: Has `low` and `high`, as an `Interval` or as JSON; None has none.
        form: Writes an end; a percent sign is left out.
        between: Stands between the ends.

    >>> span({"low": -0.5, "high": 0.25}), span({"low": None, "high": None})
    ('−0.50 to +0.25', 'no interval')
    """
    low, high = (_part(interval, end) for end in ("low", "high"))
    if low is None or not math.isfinite(low):
        return "no interval"
    return between.join(form(end).removesuffix("\u00a0%") for end in (low, high))


def _part(interval: Any, name: str) -> float | None:
    if interval is None or isinstance(interval, Mapping):
        return (interval or {}).get(name)
    return getattr(interval, name)


def rail(interval: Any, low: float, high: float, *, key: str = "estimate", side: str = "after") -> Markup:
    """An interval on a track, placed in percent so that it is legible at any width; what is beyond is cut.

    Args:
        interval: Has `key`, `low` and `high`, as an `Interval` or as JSON; None draws nothing.
        low: Left end of the track.
        high: Right end.
        key: Of the estimate.
        side: Colour: "after" or "before".
    """
    estimate, start, end = (_part(interval, name) for name in (key, "low", "high"))
    if estimate is None or not math.isfinite(estimate):
        return Markup("")

    def place(value: float) -> float:
        return min(max(100 * (value - low) / (high - low), 0.0), 100.0)

    dot = Markup('<span class="dot {0}" style="left:{1:.2f}%"></span>').format(side, place(estimate))
    if start is None or end is None or not math.isfinite(start):
        return dot
    drawn = '<span class="ci {0}" style="left:{1:.2f}%;width:{2:.2f}%"></span>'
    return Markup(drawn).format(side, place(start), place(end) - place(start)) + dot


def words(name: str) -> str:
    """A key as words."""
    return name.replace("_", " ")


def duration(seconds: float) -> str:
    """Seconds as 41 s, 5 min 12 s or 1 h 04 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def setting(value: Any) -> str:
    """A configuration value as YAML would show it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
