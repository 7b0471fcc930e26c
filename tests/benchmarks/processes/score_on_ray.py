# SPDX-License-Identifier: Apache-2.0
"""`visalign score --engine ray` beside plain processes of the local engine, with a worker killed on the way.

    python tests/benchmarks/processes/score_on_ray.py --count 10000 --workers 2 --rounds 3

Needs `visalign[ray]`. The same Parquet files are scored by as many plain processes as there are workers and
by Ray, in turns; at last by Ray while one worker is killed once half of the files are done. Every row must be
there once with the plain processes' number, up to rounding. Printed are seconds, and the rate from the time
when a tenth of the rows is judged; medians of the rounds.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pyarrow
import pyarrow.parquet
from PIL import Image

from tests.support.benchmarks import argument_parser
from visalign.data.shapes.preferences import ShapesPreferences
from visalign.data.shapes.render import render

WORKER = b"ray::Worker"
"""Beginning of a worker's command line."""


def make(folder: Path, count: int, size: int) -> list[Path]:
    """Parquet files of images with their prompts: so many in all, and so many in each."""
    source = ShapesPreferences(0, split="train")
    folder.mkdir()
    paths = [folder / f"{start:06}.parquet" for start in range(0, count, size)]
    for file, path in enumerate(paths):
        rows = []
        for number in range(file * size, min((file + 1) * size, count)):
            content = io.BytesIO()
            scene = source.quality(number).scene
            Image.fromarray(render(scene)).save(content, "PNG")
            rows.append({"image": content.getvalue(), "prompt": scene.record["prompt"]})
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return paths


def timed(
    commands: Sequence[Sequence[str]], count: int, count_rows: Callable[[], int], *, kill: bool = False
) -> tuple[float, float]:
    """(seconds of commands that start together, rows a second from the first tenth on)."""
    begun = time.perf_counter()
    running = [subprocess.Popen([sys.executable, "-m", "visalign", "score", *c]) for c in commands]
    progress = [(0.0, 0)]
    while any(process.poll() is None for process in running):
        time.sleep(0.05)
        if (rows := count_rows()) > progress[-1][1]:
            progress.append((time.perf_counter() - begun, rows))
        if kill and rows >= count // 2:
            os.kill(workers_of(running[0].pid)[0], signal.SIGKILL)
            print(f"killed a worker after {progress[-1][0]:.1f} s", flush=True)
            kill = False
    seconds = time.perf_counter() - begun
    if any(process.returncode for process in running) or kill:
        raise SystemExit("A command failed, or nothing was killed.")
    start, first = next(point for point in progress if point[1] >= count // 10)
    return seconds, (progress[-1][1] - first) / (progress[-1][0] - start)


def workers_of(parent: int) -> list[int]:
    """Numbers of the processes that judge, among those that descend from one."""
    parents, workers = {}, []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if (entry / "cmdline").read_bytes().startswith(WORKER):
                workers.append(int(entry.name))
    return [number for number in workers if parent in ancestors(number, parents)]


def ancestors(number: int, parents: dict[int, int]) -> list[int]:
    """From the process itself up."""
    return [number, *(ancestors(parents[number], parents) if number in parents else [])]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--reward", default="clip_score")
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": sys.path[0]}
    root = Path(tempfile.mkdtemp())
    reward = ["-r", options.reward]
    ray = [*reward, "--engine", "ray", "--workers", str(options.workers), "-o"]
    paths = make(root / "data", options.count, options.size)
    shares = [[str(path) for path in paths[n :: options.workers]] for n in range(options.workers)]
    logs = [root / f"plain{n}.jsonl" for n in range(options.workers)]
    parts = [log.with_name(log.name + ".part") for log in logs]
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "ray": [], "killed": []}
    for number in range(options.rounds):
        commands = [[*own, *reward, "-o", str(log)] for own, log in zip(shares, logs, strict=True)]
        for log in logs:
            log.unlink(missing_ok=True)
        times["plain"].append(timed(commands, options.count, partial(rows_of_all, parts)))
        for name in ("ray", "killed") if number == options.rounds - 1 else ("ray",):
            folder = root / name
            shutil.rmtree(folder, ignore_errors=True)
            command = [str(paths[0].parent), *ray, str(folder)]
            count = partial(rows_in, folder)
            times[name].append(timed([command], options.count, count, kill=name == "killed"))
        print(
            f"round {number}: {[(name, *map(round, pairs[-1])) for name, pairs in times.items() if pairs]}", flush=True
        )
    expected = {}
    for log in logs:
        for line in log.read_text().splitlines():
            row = json.loads(line)
            expected[row["image"]] = row["value"]
    for name in ("ray", "killed"):
        rows = [row for path in (root / name).glob("*.parquet") for row in read(path)]
        unique = len({row["image"] for row in rows})
        off = [abs(row["value"] / expected[row["image"]] - 1) for row in rows]
        print(f"{name}: {len(rows)} rows, {unique} unique, {off.count(0)} bit for bit, worst {max(off):.1g}")
        if not options.count == len(rows) == unique or max(off) > 1e-5:
            return 1
    for name, pairs in times.items():
        seconds, rate = (median(values) for values in zip(*pairs, strict=True))
        share = median(rate / plain[1] for (_, rate), plain in zip(pairs[::-1], times["plain"][::-1], strict=False))
        print(f"{name}: {seconds:.1f} s in all; {rate:.1f} rows a second, {share:.2f} of plain")
    shutil.rmtree(root)
    return 0


def rows_of_all(parts: Sequence[Path]) -> int:
    """Of logs that are being written."""
    return sum(lines(part) - 1 for part in parts if part.is_file())


def lines(path: Path) -> int:
    """Of a file that may be gone by now."""
    with suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0


def rows_in(folder: Path) -> int:
    """Of all files of scores in a folder."""
    return sum(pyarrow.parquet.read_metadata(path).num_rows for path in folder.glob("*.parquet"))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of scores."""
    return pyarrow.parquet.read_table(path, columns=["image", "value"]).to_pylist()


if __name__ == "__main__":
    sys.exit(main())
