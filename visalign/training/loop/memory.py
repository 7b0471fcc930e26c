# SPDX-License-Identifier: Apache-2.0
"""Explain an out-of-memory error: which setting bounds the memory, and what to try."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from visalign.config import flatten
from visalign.errors import UserError

from .runtime import PhaseClock, is_out_of_memory

BOUNDS = {
    "rollout": ("while sampling", ("rollout.batch_size", "model.generate_batch")),
    "decode": ("while decoding or encoding images", ("model.decode_batch",)),
    "replay": ("while recomputing log-probs", ("model.score_batch", "optimizer.micro_batch")),
    "update": ("in an update", ("optimizer.micro_batch", "data.micro_batch")),
    "evaluation": (
        "in an evaluation",
        ("evaluation.batch_size", "evaluation.batch", "model.generate_batch"),
    ),
}
"""Phase -> (when that is, settings that bound its memory, of which the first in the configuration counts)."""
_REQUEST = re.compile(r"tried to allocate [\d.]+ \w+", re.I)


class OutOfMemory(UserError):
    """Too much went through the network together."""


@contextmanager
def explain_out_of_memory(
    clock: PhaseClock, config: Mapping[str, Any], free: Collection[str]
) -> Iterator[None]:
    """Raise `OutOfMemory` with the setting that bounds the memory which ran out in the block, if one does.

    Args:
        clock: names the phase in which memory ran out.
        config: of the run, as JSON values.
        free: dotted keys of it that may differ on resume.
    """
    clock.out_of_memory = None
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        when, keys = BOUNDS.get(clock.out_of_memory or "", ("", ()))
        values = flatten(config)
        key = next((key for key in keys if key in values), None)
        if key is None or not is_out_of_memory(error):
            raise
        request = _REQUEST.search(str(error))
        size = f" ({request[0]})" if request else ""
        advice = _advice(key, values[key], key in free)
        raise OutOfMemory(f"Out of memory {when}{size}. {advice}") from error


def _advice(key: str, value: int | None, is_free: bool) -> str:
    if value == 1:
        return (
            f"{key} is 1 already. Take model.dtype=bfloat16, train a LoRA, take smaller images "
            "(model.image_size, rollout.image_sizes), or a larger device."
        )
    if is_free:
        harmless = "It bounds memory only: samples and updates stay the same. "
        again = "and --resume: it continues from the last checkpoint, or starts where there is none."
    else:
        harmless, again = "", "and another --output: a run is resumed with the value that it started with."
    current, lower = ("null, the model's own number", 1) if value is None else (value, value // 2)
    return f"{key} is {current}. {harmless}Start the same command again with {key}={lower} {again}"
