# SPDX-License-Identifier: Apache-2.0
"""Derive reproducible seeds from a run seed and the position of a draw."""

from __future__ import annotations

import hashlib


def sample_seed(*parts: int | str) -> int:
    """Hash `parts`, such as (run seed, iteration, sample id), to an unrelated seed in [0, 2⁶³), on any machine."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)  # 1 and "1" are different draws
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1
