# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the scripts of tests/benchmarks: arguments, runs, tables, intervals, memory of processes."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from visalign.evaluation.statistics.intervals import paired_bootstrap

ROOT = Path(__file__).resolve().parents[2]


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Build a parser whose help has the script's docstring as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=raw)


def run_parser(description: str | None, *, seeds: Sequence[int] = (0, 1, 2)) -> argparse.ArgumentParser:
    """Build the parser of a script that trains: --output and --seeds."""
    parser = argument_parser(description)
    parser.add_argument("--output", type=absolute_path, required=True, help="runs that are there are not repeated")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    return parser


def absolute_path(path: str) -> Path:
    """Return a path from the root: `run_visalign` works in the checkout."""
    return Path(path).resolve()


def run_visalign(*arguments: str) -> None:
    """Run `visalign` with arguments that end with the output folder; an existing training is resumed."""
    resume = ["--resume"] * (arguments[0].startswith("train") and Path(arguments[-1]).is_dir())
    command = [sys.executable, "-m", "visalign", *arguments, *resume]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"visalign {' '.join(arguments)}: {process.stderr[-2000:]}")


def train_once(folder: Path, *arguments: str, command: str = "train") -> None:
    """Train into a folder, unless it has the summary of an earlier run."""
    if not (folder / "summary.json").is_file():
        run_visalign(command, *arguments, "-o", str(folder))


def read_rows(table: Path) -> list[dict[str, Any]]:
    """Read a table of JSON lines."""
    return [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]


def write_rows(table: Path, rows: Iterable[Any]) -> Path:
    """Write a table of JSON lines; its path."""
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return table


def first_pairs(world: Any, size: int, condition: Callable[[Any], bool]) -> list[Any]:
    """Return the first pairs of a world that meet a condition."""
    return list(islice(filter(condition, map(world.pair, count())), size))


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table whose columns are their keys."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*keys, title=title)
    for row in rows:
        table.add_row(*(_cell(row.get(key, "")) for key in keys))
    Console(width=220).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(entry)}" for name, entry in value.items())
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)


def interval_text(value: Any, low: Any, high: Any, form: str = "+.3f") -> str:
    """Write a number with its interval."""
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def quantile_text(value: Any, draws: Any, form: str = "+.3f") -> str:
    """Write a number with the 95 % interval of its bootstrap draws."""
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return interval_text(value, low, high, form)


def lead_text(after: Any, before: Any, prompts: Sequence[str]) -> str:
    """Write the mean lead of `after` over `before`, paired, with 95 % by bootstrap over the prompts."""
    lead = paired_bootstrap(before, after, prompts, generator=torch.Generator().manual_seed(0))
    return interval_text(lead.estimate, lead.low, lead.high)


def process_memory(field: str, pid: int | str = "self") -> int:
    """Return bytes of a process: VmRSS now, VmHWM at the peak; 0 of a process that is gone."""
    try:
        match = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def ask_child(process: subprocess.Popen[str], *, go: bool) -> dict[str, Any]:
    """Read the next answer of a process that prints JSON lines; with `go` it is first told to take a round."""
    assert process.stdin is not None and process.stdout is not None
    if go:
        process.stdin.write("\n")
        process.stdin.flush()
    line = process.stdout.readline()
    return json.loads(line) if line else {"error": "the process ended; see above"}
