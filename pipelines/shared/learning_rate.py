# SPDX-License-Identifier: Apache-2.0
"""optimizer.lr=find: short runs with five learning rates, and the whole run with the best of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from visalign.config import load_config
from visalign.errors import UserError
from visalign.model_files import read_object

from .run_folder import RunSummary, check_run_folder, pretty, write_config, write_once
from .sections import HeldoutConfig, RewardsConfig

KEY, FIND = "optimizer.lr", "find"
FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Learning rates that are compared, in those of the configuration."""
LEAST_ITERATIONS = 5
"""Fewest iterations of each; else a tenth of the run's."""
FOLDER = "learning_rate"
"""Folder of the short runs in that of the run, and name of the file with their table."""
WEIGHTS = ("checkpoints", "lora", "model", "judge")
"""Folders that are deleted from a short run, since they would fill the disk."""
BEFORE = ("before.npz", "before.json")
"""Files of the measurement before training, which is the same for all rates."""
RULE = (
    "Highest held-out change; of equal ones the lowest rate. The configuration's own rate where none improved on the "
    "start."
)


def requested(content: Mapping[str, Any], overrides: Sequence[str], schema: Any) -> tuple[bool, list[str]]:
    """Return whether a configuration asks to find its learning rate, and overrides with the rate to begin from.

    Args:
        content: of the configuration's file.
        overrides: `key=value` over it.
        schema: dataclass of the configuration.
    """
    section = content.get("optimizer")
    finds, remaining = isinstance(section, Mapping) and section.get("lr") == FIND, list[str]()
    if finds:
        [default] = [field.default_factory for field in fields(schema) if field.name == "optimizer"]
        remaining.append(f"{KEY}={default().lr!r}")  # type: ignore[operator]  # a factory of every schema with this field
    for item in overrides:
        key, _, value = item.partition("=")
        if key.strip() == KEY:
            finds = value.strip() == FIND
        if key.strip() != KEY or not finds:
            remaining.append(item)
    return finds, remaining


def plan_search(config: Any) -> dict[str, Any]:
    """Return the rates of a search and its iterations, for the plan of a job."""
    iterations = _iterations(config)
    rates = [f"{rate:g}" for rate in _rates(config)]
    return {"rates": ", ".join(rates), "iterations_each": iterations, "more_iterations": iterations * len(rates)}


def run_with_found_rate(
    config: Any, output: Path, resume: bool = False, *, run: Callable[..., RunSummary]
) -> RunSummary:
    """Find the learning rate of a job by short runs in its folder, then run it; `config.yaml` gets the rate.

    All begin from the same weights with the same seeds, so that the choice can be repeated. With `resume` the
    short runs that have ended are not repeated.
    """
    check_run_folder(output, resume=resume)
    saved = output / "config.yaml"
    if saved.is_file():
        rate = load_config(type(config), saved).optimizer.lr
    else:
        rate = _find(config, output, run)
    chosen = replace(config, optimizer=replace(config.optimizer, lr=rate))
    if not saved.is_file():
        write_config(output, chosen)
    return run(chosen, output=output, resume=True)


def _find(config: Any, output: Path, run: Callable[..., RunSummary]) -> float:
    """Run each rate, print and write their table, and return the chosen one."""
    from rich.console import Console
    from rich.table import Table

    from visalign.training.loop.trainer import Diverged

    if (
        isinstance(config.evaluation, HeldoutConfig)
        and config.evaluation.correctness is None
        and not _curve(config)[0]
    ):
        raise UserError(
            "optimizer.lr=find compares held-out numbers, and evaluation.rewards is empty. Name a reward there, "
            "or give a number."
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "optimizer.lr=find runs in one process. Find the rate in one, then start several with optimizer.lr=NUMBER."
        )
    console, rates, rows = Console(), _rates(config), list[dict[str, Any]]()
    for number, rate in enumerate(rates, start=1):
        folder = output / FOLDER / f"{rate:g}"
        console.print(f"Learning rate {rate:g} ({number} of {len(rates)})", highlight=False)
        try:
            ended = read_object(folder / "summary.json") if (folder / "summary.json").is_file() else None
            row = measure_change(config, ended or run(*_prepared(config, rate, folder, output), resume=True))
        except Diverged:
            row = {"change": None, "note": "diverged"}
        rows.append({"lr": rate, **row})
        for part in WEIGHTS:
            shutil.rmtree(folder / part, ignore_errors=True)
        for name in BEFORE:
            if (folder / name).is_file() and not (output / name).is_file():
                shutil.copy(folder / name, output / name)
    valid = [row for row in rows if row["change"] is not None and row["note"] == ""]
    best = max(valid, key=lambda row: (row["change"], -row["lr"]), default={"change": 0.0, "lr": config.optimizer.lr})
    chosen = best["lr"] if best["change"] > 0 else config.optimizer.lr
    table = Table("learning rate", "held-out change", "")
    for row in rows:
        change = "-" if row["change"] is None else f"{row['change']:+.4f}"
        table.add_row(f"{row['lr']:g}", change, "chosen" if row["lr"] == chosen else row["note"])
    console.print(table)
    console.print(f"{RULE} Chosen: optimizer.lr={chosen:g}.", highlight=False, soft_wrap=True)
    if chosen in (rates[0], rates[-1]):
        console.print("It is at the end of the range: rates beyond it were not tried.", highlight=False)
    write_once(output / f"{FOLDER}.json", pretty({"rates": rows, "chosen": chosen, "rule": RULE}))
    return chosen


def _prepared(config: Any, rate: float, folder: Path, output: Path) -> tuple[Any, Path]:
    """Return configuration and folder of a short run; what is measured before training is copied from another."""
    iterations = _iterations(config)
    length = {"iterations": iterations, "checkpoint_every": iterations, "max_seconds": None}
    quiet = {"best_by": None, "trackers": [], "push_to_hub": None}
    short = replace(config, optimizer=replace(config.optimizer, lr=rate), run=replace(config.run, **length, **quiet))
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, short)
    for name in BEFORE:
        if (output / name).is_file():
            shutil.copy(output / name, folder / name)
    return short, folder


def measure_change(config: Any, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the held-out change of a short run, and why it does not count."""
    note = "stopped by the monitor" if summary["stopped"] == "monitor" else ""
    gain, before, after = summary.get("gain"), summary["before"], summary["after"]
    if gain is None:  # of a reward: the first measure that it has
        name = next((name for name in ("accuracy", "srcc") if after.get(name) is not None), None)
        change = None if name is None else after[name] - before[name]
    elif config.evaluation.correctness is not None:
        change = gain["estimate"]
    else:
        curve, weights = _curve(config)
        changes = summary["changes"]["rewards"]
        signs = {name: 1 if before["rewards"][name]["higher_is_better"] else -1 for name in changes}
        values = [(signs[name] * weights[name], changes[name]["estimate"]) for name in curve if name in changes]
        valid = bool(values) and all(value is not None for _, value in values)
        change = sum(factor * value for factor, value in values) if valid else None
    return {"change": change, "note": note if change is not None else "no held-out number"}


def _curve(config: Any) -> tuple[list[str], dict[str, float]]:
    """Return the rewards whose held-out means are compared, with their weights."""
    section = vars(config).get("rewards")  # supervised jobs have none
    terms = section.terms if isinstance(section, RewardsConfig) else {}
    curve = config.evaluation.curve([name for name, term in terms.items() if term.weight > 0])
    return curve, {name: terms[name].weight if name in terms else 1.0 for name in curve}


def _rates(config: Any) -> list[float]:
    return [float(f"{config.optimizer.lr * factor:.2g}") for factor in FACTORS]


def _iterations(config: Any) -> int:
    return min(config.run.iterations, max(LEAST_ITERATIONS, config.run.iterations // 10))
