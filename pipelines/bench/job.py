# SPDX-License-Identifier: Apache-2.0
"""A bench: its sides scored part by part, resumable and divided among processes, then every two compared."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from visalign.data.sets.prompt_files import record_key
from visalign.errors import UserError
from visalign.evaluation.heldout.result import HeldoutResult, joined, load_heldout
from visalign.locks import LOCK, hold_lock
from visalign.model_files import read_object
from visalign.pipelines.sample.job import TABLE, write_lines
from visalign.pipelines.score.log import score_key
from visalign.pipelines.score.provenance import domain_note, provenance, reward_identity
from visalign.pipelines.score.score import check_batch_size
from visalign.pipelines.shared.run_folder import pretty, write_once
from visalign.training.loop.checkpoint import check_same_config

from .result import bench_record, write_bench
from .sides import Side
from .suites import Suite

SETTINGS, IMAGES, PARTS = "settings.json", "images", "parts"
POLL = 0.5  # Seconds between two looks for the files of other processes


def run_bench(
    sides: Sequence[Side],
    suite: Suite | None,
    rewards: Mapping[str, Any],
    output: Path,
    *,
    part_size: int,
    on_part: Callable[[int], object] = lambda count: None,
) -> dict[str, Any] | None:
    """Score what the folder lacks, compare every two sides, and write JSON, tables and page; return the JSON.

    The sides are scored in parts of `part_size` samples. Of n processes of torchrun each scores every n-th part, and
    those after the first return None.
    """
    folders = {side.facts.get("images") or Path(side.rows[0].image).parent for side in sides}
    if len(folders) < len(sides):
        remedy = "" if "images" in sides[0].facts else ", or add ,name=NAME"
        raise UserError(f"Two have one name: {', '.join(s.label for s in sides)}. Leave one out{remedy}.")
    for name, reward in rewards.items():
        check_batch_size(name, reward, len(sides[0].rows), part_size)
    rank, started = int(os.environ.get("RANK", "0")), time.perf_counter()
    facts: dict[str, Any] = {"sides": {side.label: side.facts for side in sides}, "part_size": part_size}
    keys = [record_key(row.metadata or {"prompt": row.prompt}) for row in sides[0].rows]
    facts |= {"prompts": [" ".join([*key, str(row.seed)]) for key, row in zip(keys, sides[0].rows, strict=True)]}
    facts |= {"rewards": {name: reward_identity(reward).digest for name, reward in rewards.items()}}
    facts |= {"order": [side.label for side in sides], "correctness": suite and suite.correctness}
    facts["records"] = [score_key([], "", {"rows": [row.metadata for row in side.rows]}) for side in sides]
    facts, path = json.loads(json.dumps(facts, default=str)), output / SETTINGS
    with nullcontext() if rank else hold_lock(output / LOCK, what=f"The output folder '{output}'"):
        while rank and not path.is_file():
            time.sleep(POLL)  # until the first process has found the folder in order
        failed = [part for part in (output / PARTS).glob("*/*.npz") if path.is_file() and _has_failed(part)]
        if path.is_file():
            tried = [(side, int(part.stem)) for part in failed for side in sides[int(part.parent.name) :][:1]]
            # an image that could not be scored may have been repaired
            free = {f"sides.{s.label}.files.{row.image}" for s, n in tried for row in s.rows[n : n + part_size]}
            remedy = "Give the same models, suite, rewards and --batch-size to resume, or another --output."
            check_same_config(read_object(path), facts, free=free, where=f"The bench in '{output}'", remedy=remedy)
        elif set(os.listdir(output)) - {LOCK}:
            raise UserError(f"There is no bench in '{output}' to resume: it has no {SETTINGS}. Give another --output.")
        # the first process alone scores failed parts again: it would not wait for one that is there
        again = [] if rank else failed
        write_once(path, pretty(facts))
        parts = [
            _score(side, output / PARTS / str(k), part_size, rank, on_part, again) for k, side in enumerate(sides)
        ]
        results = {side.label: result for side, result in zip(sides, parts, strict=True) if result is not None}
        if not results:
            return None
        for side in (side for side in sides if Path(side.rows[0].image).is_relative_to(output / IMAGES)):
            names = ("prompt", "seed", "metadata")
            rows = [{"image": Path(row.image).name} | {n: getattr(row, n) for n in names} for row in side.rows]
            write_lines(Path(side.rows[0].image).with_name(TABLE), rows)
        prompts = [row.prompt for row in sides[0].rows]
        about = {n: {"provenance": provenance(r), "warning": domain_note(r, prompts)} for n, r in rewards.items()}
        result = {"suite": suite and asdict(suite), "rewards": about, **bench_record(results, sides)}
        write_bench(output, result := result | {"seconds": round(time.perf_counter() - started, 3)})
    return result


def _has_failed(part: Path) -> bool:
    return any(np.isnan(scores).any() for scores in load_heldout(part).scores.values())


def _score(
    side: Side, folder: Path, size: int, rank: int, on_part: Callable[[int], object], again: Sequence[Path]
) -> HeldoutResult | None:
    """Score this process's parts that the folder lacks, and those `again` that are there with failed scores.

    The first process waits for all and returns the result.
    """
    parts = [slice(start, min(start + size, len(side.rows))) for start in range(0, len(side.rows), size)]
    paths = [folder / f"{part.start:06d}.npz" for part in parts]
    mine = range(rank, len(parts), int(os.environ.get("WORLD_SIZE", "1")))
    missing = [n for n, path in enumerate(paths) if (n in mine and not path.is_file()) or path in again]
    for number, result in zip(missing, side.score(parts[number] for number in missing), strict=True):
        result.save(paths[number])  # atomically: a part that is there is complete
        on_part(len(result))
    while not rank and not all(path.is_file() for path in paths):
        time.sleep(POLL)
    return None if rank else joined([load_heldout(path) for path in paths])
