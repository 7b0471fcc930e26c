# SPDX-License-Identifier: Apache-2.0
"""Base of all pages: the template environment, formatting of numbers, embedded images."""

from __future__ import annotations

import base64
import hashlib
import html
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

from visalign.errors import escape_control
from visalign.versions import visalign_version

FOLDER = Path(__file__).parent
LARGEST_SIDE = 768
"""Images are shrunk to this many pixels on their longer side before they go into a page."""
PIXELATED_SIDE = 128
"""Images up to this side are stored losslessly and enlarged as squares; larger ones are photographs."""
MOST_LETTERS = 1200
"""Letters of a text that are shown where images stand."""
MISSING = "–"


def render_page(
    template: str,
    *,
    title: str,
    command: str = "",
    models: Sequence[tuple[str, str]] = (),
    banners: Sequence[str] = (),
    **values: Any,
) -> str:
    """Render a page that extends `page.html.j2`: one file, no network, any width, everything escaped.

    Its script (`page.js`) is the only one that its security policy lets run, by its hash. `models` are (reward, its
    model and identity) for the footer, as is `command` unless a command line runs; `banners` are warnings above all.
    """
    filters = (
        plain, number, fixed, signed, change, share, whole_percent, points, span, words, duration, provenance_sentence,
    )  # fmt: skip
    environment = page_environment()
    environment.filters |= {function.__name__: function for function in filters}
    environment.globals |= environment.filters | {"rail": rail}
    script, script_hash = page_script("page.js")
    return environment.get_template(template).render(
        title=title,
        command=command_line() or command,
        version=visalign_version(),
        models=list(models),
        date=datetime.now(tz=UTC).date().isoformat(),  # the zone of a reader is not known
        script=script,
        script_hash=script_hash,
        banners=banners,
        **values,
    )


def page_environment() -> Environment:
    """Return an environment for the templates of this folder, in which an undefined name is an error."""
    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, **options)


def page_script(name: str) -> tuple[Markup, str]:
    """Read a script of this folder, and the hash by which a page's security policy lets it run."""
    script = (FOLDER / name).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Markup(script), f"sha256-{digest}"


def command_line() -> str:
    """Return the command of this process, quoted for a shell; empty in another program."""
    path = Path(sys.argv[0])
    ours = path.name == "visalign" or (path.name == "__main__.py" and path.parent.name == "visalign")
    return shlex.join(["visalign", *sys.argv[1:]]) if ours else ""


def model_name(identity: Mapping[str, Any]) -> str:
    """Return the model and identity of a reward in a few words."""
    model, digest = identity.get("model"), str(identity.get("digest") or "")[:12]
    return ", ".join(part for part in (model and str(model), digest and f"identity {digest}") if part)


def provenance_sentence(label: str, provenance: str) -> str:
    """Say where a reward's numbers come from, in a sentence that repeats no name.

    >>> provenance_sentence("hpsv3", "hpsv3: shapes-hpsv3"), provenance_sentence("mine", "hpsv3: FOLDER")
    ('hpsv3: shapes-hpsv3.', 'mine is hpsv3: FOLDER.')
    """
    return f"{provenance}." if provenance.startswith(f"{label}: ") else f"{label} is {provenance}."


def data_uri(image: NDArray[np.uint8]) -> str:
    """Encode an image [H, W, 3] as a data: URI: PNG up to `PIXELATED_SIDE`, JPEG beyond."""
    is_small, buffer = max(image.shape[:2]) <= PIXELATED_SIDE, io.BytesIO()
    kind, options = ("png", {"optimize": True}) if is_small else ("jpeg", {"quality": 88})
    Image.fromarray(image).save(buffer, format=kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def text_image(text: str) -> tuple[bytes, int, int]:
    """Draw a text as an SVG image that the browser wraps: (content, width, height); a long text is cut."""
    printable = "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text[:MOST_LETTERS])
    printable += "…" * (len(text) > MOST_LETTERS)
    width, height = 480, 24 + 20 * sum(1 + len(line) // 56 for line in printable.split("\n"))
    style = "font:14px/20px sans-serif;white-space:pre-wrap;overflow-wrap:anywhere;padding:10px;background:#fff"
    content = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"><foreignObject width="100%" '
        f'height="100%"><div xmlns="http://www.w3.org/1999/xhtml" style="{style}">{html.escape(printable)}</div>'
        "</foreignObject></svg>"
    )
    return content.encode(), width, height


def embedded_text(text: str) -> dict[str, Any]:
    """Encode a text for a page where images stand, with the keys of `embedded`."""
    content, width, height = text_image(text)
    source = f"data:image/svg+xml;base64,{base64.b64encode(content).decode('ascii')}"
    return {"source": source, "width": width, "height": height, "pixelated": False}


def embedded(image: Tensor, *, side: int = LARGEST_SIDE) -> dict[str, Any]:
    """Encode an image [3, H, W] in [0, 1] for a page, its longest side at most `side` pixels.

    Returns `source`, a data: URI, its `width` and `height`, and whether it is `pixelated`, small enough for squares.
    """
    height, width = image.shape[1:]
    pixels = image.detach().float().cpu()
    if max(height, width) > side:
        factor = side / max(height, width)
        size = (max(1, round(height * factor)), max(1, round(width * factor)))
        (pixels,) = F.interpolate(pixels[None], size=size, mode="bilinear", antialias=True)
    levels = pixels.mul(255).round().clamp(0, 255).byte().permute(1, 2, 0).contiguous().numpy()
    return {
        "source": data_uri(np.asarray(levels)),
        "width": width,
        "height": height,
        "pixelated": max(height, width) <= PIXELATED_SIDE,
    }


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Shorten file names for a page: without the folder that all of them share.

    >>> short_names(["runs/a/1.png", "runs/b/1.png"])
    {'runs/a/1.png': 'a/1.png', 'runs/b/1.png': 'b/1.png'}
    >>> short_names(["runs/a.png"]), short_names(["/a.png", "b.png"])
    ({'runs/a.png': 'a.png'}, {'/a.png': '/a.png', 'b.png': 'b.png'})
    """
    unique = list(dict.fromkeys(names))
    parts = [name.split("/") for name in unique]
    shared = 0
    while parts and all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return {name: escape_control("/".join(part[shared:])) for name, part in zip(unique, parts, strict=True)}


def plain(value: float | None, digits: int = 3) -> str:
    """Format significant digits without an exponent for ordinary sizes; a dash without a number.

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
    """Format four significant digits.

    >>> number(28.456), number(0.0)
    ('28.46', '0')
    """
    return "0" if value == 0 else plain(value, 4)


def fixed(value: float | None) -> str:
    """Format three decimals, for numbers in one column."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.3f}".replace("-", "−")


def signed(value: float | None, decimals: int = 2) -> str:
    """Format a change with its sign.

    >>> signed(0.25), signed(-1.0), signed(0.0), signed(None)
    ('+0.25', '−1.00', '0.00', '–')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:+.{decimals}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def change(value: float | None) -> str:
    """Format a change with its sign and three significant digits.

    >>> change(0.25), change(-1234.0), change(0.0)
    ('+0.250', '−1234', '0')
    """
    return "0" if value == 0 else ("+" if value is not None and 0 < value < math.inf else "") + plain(value)


def share(value: float | None, decimals: int = 1) -> str:
    """Format a share in percent.

    >>> share(0.123), share(None)
    ('12.3\\xa0%', '–')
    """
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.{decimals}f}\u00a0%"


def whole_percent(value: float | None) -> str:
    return share(value, 0)


def points(value: float | None) -> str:
    """Format a difference of shares in signed percentage points."""
    return signed(None if value is None else 100 * value, 1)


def span(interval: Any, form: Any = signed, between: str = " to ") -> str:
    """Format the ends of an `Interval`, or of a mapping with `low` and `high`; percent signs are left out.

    >>> span({"low": -0.5, "high": 0.25}), span({"low": None, "high": None})
    ('−0.50 to +0.25', 'no interval')
    """
    low, high = (_part(interval, end) for end in ("low", "high"))
    if low is None or not math.isfinite(low):
        return "no interval"
    return between.join(form(end).removesuffix("\u00a0%") for end in (low, high))  # the estimate has the sign


def with_span(number: Mapping[str, Any], form: Any = signed, ends: Any = None) -> str:
    """Format an estimate with its interval in parentheses, whose ends may have a shorter form.

    >>> with_span({"estimate": 0.5, "low": 0.25, "high": 0.75}, share, whole_percent)
    '50.0\\xa0% (25 to 75)'
    """
    return f"{form(number['estimate'])} ({span(number, ends or form)})"


def _part(interval: Any, name: str) -> float | None:
    if interval is None or isinstance(interval, Mapping):
        return (interval or {}).get(name)
    return getattr(interval, name)


def rail(interval: Any, low: float, high: float, *, key: str = "estimate", side: str = "after") -> Markup:
    """Draw an interval (`Interval`, its mapping, or None) on a track from `low` to `high`; `side` names its colour."""
    estimate, start, end = (_part(interval, name) for name in (key, "low", "high"))
    if estimate is None or not math.isfinite(estimate):
        return Markup("")

    def position(value: float) -> float:
        return min(max(100 * (value - low) / (high - low), 0.0), 100.0)

    dot = Markup('<span class="dot {0}" style="left:{1:.2f}%"></span>').format(side, position(estimate))
    if start is None or end is None or not math.isfinite(start):
        return dot
    drawn = '<span class="ci {0}" style="left:{1:.2f}%;width:{2:.2f}%"></span>'
    return Markup(drawn).format(side, position(start), position(end) - position(start)) + dot


def words(name: str) -> str:
    return name.replace("_", " ")


def duration(seconds: float) -> str:
    """Format seconds as 41 s, 5 min 12 s or 1 h 04 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def setting(value: Any) -> str:
    """Format a configuration value as YAML would."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
