# SPDX-License-Identifier: Apache-2.0
"""optimizer.lr=find: short runs with five learning rates, and the whole run with the best of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from visalign.config import load_config
from visalign.errors import UserError
from visalign.model_files import read_object

from .run_folder import RunSummary, check_run_folder, pretty, write_config, write_once
from .sections import HeldoutConfig, RewardsConfig

KEY, FIND = "optimizer.lr", "find"
FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)  # Learning rates that are compared, in those of the configuration
FOLDER = "learning_rate"  # Folder of the short runs in that of the run, and name of the file with their table
WEIGHTS = ("checkpoints", "lora", "model", "judge")
"""Folders that are deleted from a short run, since they would fill the disk."""
BEFORE = ("before.npz", "before.json")  # Files of the measurement before training, which is the same for all rates
RULE = "Highest held-out change; of equal ones the lowest rate. The configuration's own rate where none improved."


def split_search(overrides: Sequence[str]) -> tuple[bool, list[str]]:
    """Return whether overrides ask to find the learning rate, and those that the configuration takes."""
    rates = [item.partition("=")[2].strip() for item in overrides if item.partition("=")[0].strip() == KEY]
    return rates[-1:] == [FIND], [item for item in overrides if item.replace(" ", "") != f"{KEY}={FIND}"]


def plan_search(config: Any, plan: Callable[[Any], Mapping[str, Any]]) -> dict[str, Any]:
    """Extend the plan of a job by the rates of a search and its iterations."""
    iterations, rates = _iterations(config), _rates(config)
    search = {"rates": ", ".join(f"{rate:g}" for rate in rates), "iterations_each": iterations}
    return {**plan(config), "learning_rate": search | {"more_iterations": iterations * len(rates)}}


def run_with_found_rate(config: Any, output: Path, resume: bool = False, *, run: Callable[..., Any]) -> RunSummary:
    """Find the learning rate by short runs from the same weights and seeds, then run the job with it.

    `config.yaml` gets the rate. With `resume` the short runs that have ended are not repeated.
    """
    check_run_folder(output, resume=resume)
    saved = output / "config.yaml"
    rate = load_config(type(config), saved).optimizer.lr if saved.is_file() else _find(config, output, run)
    chosen = replace(config, optimizer=replace(config.optimizer, lr=rate))
    if not saved.is_file():
        write_config(output, chosen)
    return run(chosen, output=output, resume=True)


def _find(config: Any, output: Path, run: Callable[..., RunSummary]) -> float:
    from rich.console import Console
    from rich.table import Table

    evaluation = config.evaluation
    if isinstance(evaluation, HeldoutConfig) and evaluation.correctness is None and not _curve(config):
        raise UserError("optimizer.lr=find compares held-out numbers, and evaluation.rewards is empty. Name a reward.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("optimizer.lr=find runs in one process. Find the rate first, then start several with it.")
    rates = _rates(config)
    rows = [{"lr": rate, **_short_run(config, rate, output, run)} for rate in rates]
    valid = [row for row in rows if row["change"] is not None and row["note"] == ""]
    best = max(valid, key=lambda row: (row["change"], -row["lr"]), default={"change": 0.0})
    chosen = best["lr"] if best["change"] > 0 else config.optimizer.lr
    table, console = Table("learning rate", "held-out change", ""), Console()
    for row in rows:
        change = "-" if row["change"] is None else f"{row['change']:+.4f}"
        table.add_row(f"{row['lr']:g}", change, "chosen" if row["lr"] == chosen else row["note"])
    console.print(table)
    console.print(f"{RULE} Chosen: optimizer.lr={chosen:g}.", highlight=False, soft_wrap=True)
    if chosen in (rates[0], rates[-1]):
        console.print("It is at the end of the range: rates beyond it were not tried.", highlight=False)
    write_once(output / f"{FOLDER}.json", pretty({"rates": rows, "chosen": chosen, "rule": RULE}))
    return chosen


def _short_run(config: Any, rate: float, output: Path, run: Callable[..., RunSummary]) -> dict[str, Any]:
    from visalign.training.loop.trainer import Diverged

    iterations, folder = _iterations(config), output / FOLDER / f"{rate:g}"
    length = {"iterations": iterations, "checkpoint_every": iterations, "max_seconds": None}
    quiet = {"best_by": None, "patience": None, "trackers": [], "push_to_hub": None}
    short = replace(config, optimizer=replace(config.optimizer, lr=rate), run=replace(config.run, **length, **quiet))
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, short)
    _copy_missing(output, folder)
    print(f"Learning rate {rate:g}", flush=True)
    try:
        summary = folder / "summary.json"
        row = measure_change(config, read_object(summary) if summary.is_file() else run(short, folder, resume=True))
    except Diverged:
        row = {"change": None, "note": "diverged"}
    for part in WEIGHTS:  # only now: an interrupted run goes on from its checkpoints
        shutil.rmtree(folder / part, ignore_errors=True)
    _copy_missing(folder, output)
    return row


def _copy_missing(source: Path, target: Path) -> None:
    for name in BEFORE:
        if (source / name).is_file() and not (target / name).is_file():
            shutil.copy(source / name, target / name)


def measure_change(config: Any, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the held-out change of a short run, and why it does not count."""
    gain, before, after = summary.get("gain"), summary["before"], summary["after"]
    if gain is None:  # of a reward: the first measure that it has
        name = next((name for name in ("accuracy", "srcc") if after.get(name) is not None), None)
        change = None if name is None else after[name] - before[name]
    elif config.evaluation.correctness is not None:
        change = gain["estimate"]
    else:
        changes = {n: row["estimate"] for n, row in summary["changes"]["rewards"].items()}
        curve = {name: weight for name, weight in _curve(config).items() if name in changes}
        weights = {name: w if before["rewards"][name]["higher_is_better"] else -w for name, w in curve.items()}
        is_measured = bool(weights) and all(changes[name] is not None for name in weights)
        change = sum(weight * changes[name] for name, weight in weights.items()) if is_measured else None
    note = "stopped by the monitor" if summary["stopped"] == "monitor" else ""
    return {"change": change, "note": note if change is not None else "no held-out number"}


def _curve(config: Any) -> dict[str, float]:
    """Return the rewards whose held-out means are compared, with their weights."""
    section = vars(config).get("rewards")  # supervised jobs have none
    terms = section.terms if isinstance(section, RewardsConfig) else {}
    curve = config.evaluation.curve([name for name, term in terms.items() if term.largest_weight > 0])
    return {name: terms[name].largest_weight if name in terms else 1.0 for name in curve}


def _rates(config: Any) -> list[float]:
    return [float(f"{config.optimizer.lr * factor:.2g}") for factor in FACTORS]


def _iterations(config: Any) -> int:
    return min(config.run.iterations, max(5, config.run.iterations // 10))
