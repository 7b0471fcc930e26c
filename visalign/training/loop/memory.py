# SPDX-License-Identifier: Apache-2.0
"""Memory that ran out while a training went on: which setting bounds what lay in it, and what to try."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from visalign.errors import UserError

from .checkpoint import flatten
from .runtime import PhaseClock, is_out_of_memory

BOUNDS = {
    "rollout": ("while samples were made", ("rollout.batch_size", "model.generate_batch")),
    "decode": ("while images were decoded or encoded", ("model.decode_batch",)),
    "replay": ("while log-probs were computed again", ("model.score_batch", "optimizer.micro_batch")),
    "update": ("in an update", ("optimizer.micro_batch", "data.micro_batch")),
    "evaluation": (
        "in an evaluation",
        ("evaluation.batch_size", "evaluation.batch", "model.generate_batch"),
    ),
}
"""Phase -> (when that is, settings that bound its memory: the first that a configuration has is its own)."""
_ASKED = re.compile(r"tried to allocate [\d.]+ \w+", re.I)


class OutOfMemory(UserError):
    """Too much went through the network together."""


@contextmanager
def explain_out_of_memory(
    clock: PhaseClock, config: Mapping[str, Any], free: Collection[str]
) -> Iterator[None]:
    """Inside, memory that runs out in a phase of `BOUNDS` raises `OutOfMemory` with what to set.

    Args:
        clock: whose phases the work is done in.
        config: of the run, as JSON values.
        free: dotted keys of it that may differ on resume.
    """
    clock.out_of_memory = None
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        when, keys = BOUNDS.get(clock.out_of_memory or "", ("", ()))
        given = flatten(config)
        key = next((key for key in keys if key in given), None)
        if key is None or not is_out_of_memory(error):
            raise
        asked = _ASKED.search(str(error))
        said = f" ({asked[0]})" if asked else ""
        raise OutOfMemory(f"Out of memory {when}{said}. {_instead(key, given[key], key in free)}") from error


def _instead(key: str, value: int | None, is_free: bool) -> str:
    alone = "It bounds memory alone: samples and updates stay the same. " if is_free else ""
    if value == 1:
        less = (
            "smaller images (model.image_size, rollout.image_sizes)"
            if key == "model.decode_batch"
            else "train a LoRA"
        )
        return f"{key} is {value} already. Take model.dtype=bfloat16, {less}, or take a larger device."
    again = (
        "and --resume: it goes on from the last checkpoint, or begins where there is none."
        if is_free
        else "and another --output: a run is resumed with the one that it began with."
    )
    said, smaller = ("null, the model's own number", 1) if value is None else (value, value // 2)
    return f"{key} is {said}. {alone}Start the same command again with {key}={smaller} {again}"
