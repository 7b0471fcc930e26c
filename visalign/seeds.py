# SPDX-License-Identifier: Apache-2.0
"""Seeds as a function of (seed, name, numbers), so that every draw can be made again."""

from __future__ import annotations

import hashlib


def sample_seed(*parts: int | str) -> int:
    """A seed in [0, 2⁶³) that is a hash of `parts`, e.g. (run seed, iteration, sample id).

    Neighbouring numbers give unrelated seeds, and the result is the same on every machine.

    Raises:
        ValueError: When no part is given.
    """
    if not parts:
        raise ValueError(
            "sample_seed needs at least one number, e.g. sample_seed(run_seed, iteration, sample_id)."
        )
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
