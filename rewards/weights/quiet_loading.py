# SPDX-License-Identifier: Apache-2.0
"""Loading and saving a judge without transformers' bars of weights; downloads keep theirs, a user's
settings stay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_BARS = ("Loading weights", "Writing model shards")
_lock = threading.Lock()
_held: list[Any] = []
"""One entry for each `quiet_loading` that is open; the first is the hook that the user had."""


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Show no bar while transformers reads or writes weight files.

    The hook on transformers' bars that was there before is asked for all other bars, and is put back when the
    last of several loads, in whatever threads, is through.
    """
    from transformers.utils import logging

    replace = getattr(logging, "set_tqdm_hook", None)
    if replace is None:  # transformers before it had the hook
        yield
        return
    with _lock:
        if not _held:
            before = replace(None)
            _held.append(before)
            replace(lambda factory, args, kwargs: _bar(before, factory, args, kwargs))
        else:
            _held.append(None)
    try:
        yield
    finally:
        with _lock:
            before = _held[0]
            _held.pop()
            if not _held:
                replace(before)


def _bar(
    before: Callable[..., Any] | None, factory: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """What stands for a bar."""
    if kwargs.get("desc") in _BARS:
        kwargs = {**kwargs, "disable": True}
    return factory(*args, **kwargs) if before is None else before(factory, args, kwargs)
