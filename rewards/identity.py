# SPDX-License-Identifier: Apache-2.0
"""What a judge's numbers depend on, as one record: for cards, caches, and comparing two judges."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_EDGE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Two judges with equal identity give equal scores to the same image and prompt."""

    judge: str
    """Name of the kind of judge, e.g. "hpsv3"."""
    model: str
    """Folder name or hub id of the weights."""
    weights: str = ""
    """Fingerprint of the weight files (`fingerprint`), or "" where there are none or they are remote."""
    template: str | None = None
    """The prompt template as text, if the judge has one."""
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    """Size, resampling, mean and std, patch size: all that happens between pixels and the model."""
    dtype: str = "float32"
    """Of the tower; heads and scores are float32 always."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that moves a score: position ids, mode, number of answers, seed."""

    @property
    def template_hash(self) -> str | None:
        """First 12 hex digits of the template's SHA-256, or None without a template."""
        return None if self.template is None else hashlib.sha256(self.template.encode()).hexdigest()[:12]

    @property
    def digest(self) -> str:
        """SHA-256 of the whole record, 64 hex digits."""
        return hashlib.sha256(_canonical(asdict(self)).encode()).hexdigest()

    def differences(self, other: Identity) -> list[str]:
        """Names of the fields in which two judges differ."""
        mine, theirs = asdict(self), asdict(other)
        return [name for name in mine if _canonical(mine[name]) != _canonical(theirs[name])]


def fingerprint(folder: str | Path) -> str:
    """A short hash of the weight files of a folder, read in milliseconds whatever their size.

    Args:
        folder: a model folder, or one weight file.

    Returns:
        32 hex digits over name, size, and the first and last MiB of each weight file; "" if there are none.
    """
    place = Path(folder)
    files = (
        [place]
        if place.is_file()
        else sorted({file for pattern in _WEIGHTS for file in place.rglob(pattern)})
    )
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(place) if place.is_dir() else file.name}:{size}:".encode())
        with file.open("rb") as content:
            digest.update(content.read(_EDGE))
            content.seek(max(0, size - _EDGE))
            digest.update(content.read(_EDGE))
    return digest.hexdigest()[:32]


def _canonical(value: Any) -> str:
    """JSON with sorted keys; tuples are lists, and what JSON does not have is written as its `str`."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
