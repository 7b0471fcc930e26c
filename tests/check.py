# SPDX-License-Identifier: Apache-2.0
"""All checks in one command: format, lint, types, import contract, tests.

python tests/check.py             everything
python tests/check.py --fast      without the tests marked slow
python tests/check.py --no-tests  format, lint, types and imports only
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    """Result of one check."""

    name: str
    state: str
    """"passed", "failed" or "not available"."""
    seconds: float
    note: str = ""


def commands(*, fast: bool, tests: bool) -> dict[str, list[str]]:
    """Return name -> command line; every tool is that of the running Python's environment."""
    python = [sys.executable, "-m"]
    scripts = str(Path(sys.executable).parent)
    checks = {
        "format": [*python, "ruff", "format", "--check", "."],
        "lint": [*python, "ruff", "check", "."],
        "types": [*python, "pyright", "--pythonpath", sys.executable],
        "imports": [shutil.which("lint-imports", path=scripts) or "lint-imports", "--no-logo"],
    }
    if tests:
        checks["tests"] = [*python, "pytest", "-q", *(["-m", "not slow"] if fast else [])]
    return checks


def run(name: str, command: list[str]) -> Outcome:
    """Run one check, with its output on the terminal."""
    print(f"\n== {name}: {' '.join(command)}", flush=True)
    begun = time.perf_counter()
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    try:
        if name == "types":
            return _types(command, environment, begun)
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    except FileNotFoundError:
        note = 'not installed; run: python -m pip install -e ".[test]"'
        return Outcome(name, "failed", time.perf_counter() - begun, note)
    return Outcome(name, "failed" if code else "passed", time.perf_counter() - begun)


def _types(command: list[str], environment: dict[str, str], begun: float) -> Outcome:
    """Pyright runs on node, which `pyright[nodejs]` brings; without either no types are checked."""
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(process.stdout, process.stderr, sep="", flush=True)
    seconds = time.perf_counter() - begun
    lines = [line for line in (process.stdout + process.stderr).splitlines() if line.strip()]
    if not any(" errors, " in line or " error, " in line for line in lines):
        message = lines[-1].strip() if lines else "pyright said nothing"
        note = f'{message}; run: python -m pip install -e ".[test]"'
        return Outcome("types", "not available", seconds, note)
    return Outcome("types", "failed" if process.returncode else "passed", seconds)


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and print a summary."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--fast", action="store_true", help="leave out the tests marked slow")
    parser.add_argument("--no-tests", action="store_true", help="leave out the tests")
    parser.add_argument("--strict", action="store_true", help="fail when a check is not available here")
    options = parser.parse_args(arguments)
    selected = commands(fast=options.fast, tests=not options.no_tests)
    outcomes = [run(name, command) for name, command in selected.items()]
    print("\n== summary")
    for outcome in outcomes:
        note = f"  {outcome.note}" if outcome.note else ""
        print(f"{outcome.name:<8} {outcome.state:<14} {outcome.seconds:7.1f} s{note}")
    bad = {"failed", "not available"} if options.strict else {"failed"}
    return int(any(outcome.state in bad for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
