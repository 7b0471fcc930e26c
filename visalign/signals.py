# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: save the iteration first, or close files and say how to resume."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class InterruptFlag:
    """Turn the first Ctrl-C or SIGTERM into a flag that the loop reads; a second one stops at once.

    Forked workers of a data loader ignore Ctrl-C and end at SIGTERM. `notice` gets a sentence at the first signal.
    """

    def __init__(self, notice: Callable[[str], object] = print) -> None:
        self.raised = False
        self.by: int | None = None
        """Number of the first signal."""
        self._notice = notice
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> InterruptFlag:
        # elsewhere Python allows no signal handlers, so signals keep their usual meaning
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _handle(self, number: int, _frame: object) -> None:
        if os.getpid() != self._process:
            return None if number == signal.SIGINT else os._exit(128 + number)
        if self.raised:
            raise Stopped(number)
        self.raised, self.by = True, number
        again = "press again" if number == signal.SIGINT else "send it again"
        self._notice(f"{signal_name(number)}: finishing this iteration and saving it; {again} to stop at once.")


class Stopped(KeyboardInterrupt):
    """Raised by a signal that ends the process; `signal` is its number."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.signal = number


def signal_name(number: int) -> str:
    """Return the name of a signal as users know it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise `Stopped` at SIGTERM inside the block, so that files are closed and a message can be printed."""
    process = os.getpid()

    def stop(number: int, _frame: object) -> None:
        if os.getpid() != process:
            os._exit(128 + number)
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
