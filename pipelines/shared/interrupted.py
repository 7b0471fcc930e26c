# SPDX-License-Identifier: Apache-2.0
"""How a job says that Ctrl-C ended it."""

from __future__ import annotations


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C: the iteration was finished and saved; the command line says how to go on and exits with 130."""
