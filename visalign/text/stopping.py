# SPDX-License-Identifier: Apache-2.0
"""End of a completion: end tokens, stop strings, the length limit, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

StopReason = Literal["eos", "stop string", "length", "prompt too long", "tool failed"]
"""Why a completion ended; "prompt too long" was not generated, of "tool failed" a call got no answer."""


@dataclass(frozen=True, kw_only=True)
class StoppingCriteria:
    """Conditions that end a completion."""

    max_new_tokens: int = 256
    """Most tokens of a completion, its end token included; fewer where the model's context ends."""
    strings: tuple[str, ...] = ()
    """The completion ends with the token that completes one of these, which stays in tokens and text."""
    eos_ids: tuple[int, ...] | None = None
    """Ids that end the completion; None is the model's own and its chat template's, () none at all."""


class StopStrings:
    """Search for stop strings at a completion's end; `decode` must keep special tokens and blanks."""

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.strings = tuple(strings)
        self._decode = decode
        # A character is at most four tokens (bytes of UTF-8); two more for what decoding does at a start.
        self._window = 4 * max((len(string) for string in strings), default=0) + 2

    def found(self, ids: Sequence[int]) -> bool:
        """Check if the newest token completed a stop string; there was none before it."""
        if not self.strings:
            return False
        tail = self._decode(list(ids[-self._window :]))
        return any(string in tail for string in self.strings)
