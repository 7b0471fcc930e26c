# SPDX-License-Identifier: Apache-2.0
"""Identity of a judge: everything that its scores depend on, for cards, caches and comparisons."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

_FILES = "*.safetensors *.bin *.pt *.pth *config.json tokenizer.json vocab.* merges.txt chat_template.*".split()
_FULL_BYTES = 64 << 20  # Bytes up to which a file is read whole
_BLOCK, _BLOCKS = 1 << 16, 512  # Of a larger file, so many blocks evenly spread


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Two judges with equal identity give equal scores to the same image and prompt."""

    judge: str  # Name of the kind of judge, e.g. "hpsv3"
    model: str  # Folder name or hub id of the weights
    weights: str = ""  # Fingerprint of the weight files (`fingerprint`), or "" where there are none or they are remote
    revision: str = ""
    """Commit of the hub's repository, or ""; no part of the digest, since the fingerprint says the same."""
    template: str | None = None  # The prompt template as text, if the judge has one
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    """Size, resampling, mean and std, patch size: all that happens between pixels and the model."""
    dtype: str = "float32"  # Of the tower; heads and scores are float32 always
    options: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that moves a score: position ids, mode, number of answers, seed."""

    @property
    def digest(self) -> str:
        """SHA-256 of the record, 64 hex digits."""
        record = {name: value for name, value in asdict(self).items() if name != "revision"}
        return hashlib.sha256(_canonical(record).encode()).hexdigest()

    @property
    def line(self) -> str:
        """Provenance of scores in a line: judge, model, its revision or fingerprint, and the digest."""
        parts = re.findall(r"\w+", self.weights)  # a base, an adapter, a head: all count, not the base alone
        combined = hashlib.sha256(self.weights.encode()).hexdigest() if len(parts) > 1 else self.weights
        weights = f"revision {self.revision[:12]}" if self.revision and len(parts) < 2 else f"weights {combined[:12]}"
        source = f", {weights}" if self.revision or self.weights.strip("+ ") else ""
        return f"{self.judge}: {self.model}{source}, identity {self.digest[:12]}"

    def differences(self, other: Identity) -> list[str]:
        mine, theirs = asdict(self), asdict(other)
        return [name for name in mine if _canonical(mine[name]) != _canonical(theirs[name])]


def with_options(identity: Any, **options: Any) -> Identity | None:
    """Add options to the identity of a judge that is used in another way; None where it has none."""
    return replace(identity, options={**identity.options, **options}) if isinstance(identity, Identity) else None


def fingerprint(folder: str | Path) -> str:
    """Hash name, size and content of a folder's weights, configs and tokenizer to 32 hex digits; "" without any.

    Of a file above 64 MiB only 512 blocks of 64 KiB are read: a change that lies between two blocks is not seen.
    """
    path = Path(folder)
    files = [path] if path.is_file() else sorted({file for pattern in _FILES for file in path.rglob(pattern)})
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path) if path.is_dir() else file.name}:{size}:".encode())
        with file.open("rb") as content:
            if size <= _FULL_BYTES:
                digest.update(content.read())
                continue
            for block in range(_BLOCKS):
                content.seek((size - _BLOCK) * block // (_BLOCKS - 1))
                digest.update(content.read(_BLOCK))
    return digest.hexdigest()[:32] if files else ""


def _canonical(value: Any) -> str:
    """JSON with sorted keys; tuples are lists, and what JSON does not have is written as its `str`."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
