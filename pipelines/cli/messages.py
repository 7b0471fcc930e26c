# SPDX-License-Identifier: Apache-2.0
"""Error messages of the command line; unexpected errors keep their traceback."""

from __future__ import annotations

import dis
import errno
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from visalign.errors import escape_control
from visalign.signals import Stopped, raise_on_sigterm, signal_name

USER_ERROR = 2  # Exit code for input that cannot be used

_FIXABLE = "EEXIST EISDIR ELOOP EIO EMFILE ENOSPC EDQUOT EACCES EPERM EROFS ENOTDIR ENAMETOOLONG"
"""Errors of the system that are reported as a message: the user can fix them."""
_NUL = ("embedded null byte", "embedded null character")
"""Python's errors for paths that no file can have; they come from tables and configurations."""


@contextmanager
def user_messages(*, resume: str | None = None, folder: Path | None = None) -> Iterator[None]:
    """Turn errors meant for the user into a message and an exit code; Ctrl-C and SIGTERM print `resume`.

    A command that was stopped before it made its `folder` has nothing to resume, and begins anew.
    """
    form = warnings.formatwarning
    if not os.environ.get("VISALIGN_TRACEBACK"):
        warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}\n"
    try:
        with raise_on_sigterm():
            yield
    except KeyboardInterrupt as stop:
        number = stop.signal if isinstance(stop, Stopped) else signal.SIGINT
        if resume and folder is not None and not folder.is_dir():
            resume = resume.removesuffix(" --resume")
        then = f" Continue with:\n\n  {resume}" if resume else ""
        show_message(f"Stopped by {signal_name(number)}.{then}", title="Interrupted", style="yellow")
        raise typer.Exit(128 + number) from None
    except (ValueError, RuntimeError, TypeError, OSError, ArithmeticError, MemoryError) as error:
        if os.environ.get("VISALIGN_TRACEBACK") or not is_deliberate(error):
            raise
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        then = f" Free some space, then continue with:\n\n  {resume}" if full and resume else ""
        show_message(f"{describe(error)}.{then}" if then else describe(error), title="Error", style="red")
        raise typer.Exit(USER_ERROR) from None
    finally:
        warnings.formatwarning = form


def is_deliberate(error: BaseException) -> bool:
    """Return whether an error is a message of ours or a fault of the system, not a bug three calls below us."""
    if type(error).__module__.split(".")[0] == "visalign":
        return True
    if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in _FIXABLE.split():
        return True
    if _is_out_of_memory(error) or str(error) in _NUL:
        return True
    trace = error.__traceback__
    if type(error).__module__ != "builtins" or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    is_ours = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0] == "visalign"
    return is_ours and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]  # a `raise` of ours


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, NumPy or torch could not allocate memory; torch has no class for that of the CPU."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator: can't alloc" in str(error)


def describe(error: BaseException) -> str:
    """Describe an error: its message, or its type if the message is empty."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename!s:.300}" if error.filename else error.strerror
    if _is_out_of_memory(error):
        return f"Out of memory ({str(error).partition(chr(10))[0]:.300}). Give smaller numbers, batches or images."
    return "A path holds a NUL character. Remove it." if str(error) in _NUL else str(error) or type(error).__name__


def show_message(message: str, *, title: str, style: str) -> None:
    """Print to the error stream: a framed message in a terminal, else `title: message` on one line."""
    console, message = Console(stderr=True), escape_control(message)
    if console.is_terminal:
        console.print(Panel(Text(message), title=title, title_align="left", border_style=style))
    else:
        console.print(f"{title}: {message}", soft_wrap=True, markup=False, highlight=False)
