# SPDX-License-Identifier: Apache-2.0
"""The command that takes up a stopped run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def resume_command(config: str, overrides: Sequence[str], folder: Path) -> str:
    """The command line that continues a run, quoted for a shell.

    Args:
        config: name or path of the configuration.
        overrides: items `key.sub=value`.
        folder: the run's folder.

    >>> resume_command("shapes_quickstart", ["seed=1"], Path("my runs"))
    "visalign train shapes_quickstart seed=1 --output 'my runs' --resume"
    """
    return shlex.join(["visalign", "train", config, *overrides, "--output", str(folder), "--resume"])
