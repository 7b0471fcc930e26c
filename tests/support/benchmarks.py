# SPDX-License-Identifier: Apache-2.0
"""What the scripts of tests/benchmarks share: arguments, runs of `visalign`, tables of JSON lines."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help has the script's docstring as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=raw)


def run_visalign(*arguments: str) -> None:
    """Run `visalign` with arguments that end with the output folder; an existing training is resumed."""
    resume = ["--resume"] * (arguments[0].startswith("train") and Path(arguments[-1]).is_dir())
    command = [sys.executable, "-m", "visalign", *arguments, *resume]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"visalign {' '.join(arguments)}: {process.stderr[-2000:]}")


def read_rows(table: Path) -> list[dict[str, Any]]:
    """The records of a table of JSON lines."""
    return [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]


def write_rows(table: Path, rows: Iterable[Any]) -> Path:
    """Write a table of JSON lines; its path."""
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return table
