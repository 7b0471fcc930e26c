# SPDX-License-Identifier: Apache-2.0
"""`visalign score --engine ray` beside plain processes of the local engine, with a worker killed on the way.

    python tests/benchmarks/score_on_ray.py --count 10000 --workers 2

Needs `visalign[ray]`. The same Parquet files of shapes, 64 pixels, are scored by as many plain processes as
there are workers, each its share of the files; by Ray; and by Ray when kill -9 ends one worker once half of
the files are done. Every row must be there once and have the plain processes' number, but for the rounding of
what a judge computes for a prompt in other company. Said are the seconds of the commands, and the rate
without what each takes to start, which a run of a few pictures measures.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyarrow
import pyarrow.parquet
from PIL import Image

from visalign.data.shapes.preferences import ShapesPreferences
from visalign.data.shapes.render import render

WORKER = b"ray::MapWorker(MapBatches(Judge))"
"""How the process of a worker calls itself."""


def make(folder: Path, count: int, size: int) -> list[Path]:
    """Parquet files of pictures with their prompts: so many in all, and so many in each."""
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


def timed(commands: Sequence[Sequence[str]], *, kill_after: tuple[Path, int] | None = None) -> float:
    """Seconds of commands that start together; a worker is killed when a folder has so many files."""
    begun = time.perf_counter()
    running = [subprocess.Popen([sys.executable, "-m", "visalign", "score", *c]) for c in commands]
    while any(process.poll() is None for process in running):
        time.sleep(0.05)
        if kill_after and len(list(kill_after[0].glob("*.parquet"))) >= kill_after[1]:
            worker = workers_of(running[0].pid)[0]
            os.kill(worker, signal.SIGKILL)
            print(f"killed worker {worker} after {time.perf_counter() - begun:.1f} s", flush=True)
            kill_after = None
    seconds = time.perf_counter() - begun
    if any(process.returncode for process in running) or kill_after:
        raise SystemExit("A command failed, or nothing was killed.")
    return seconds


def workers_of(parent: int) -> list[int]:
    """Numbers of the processes that judge, among those that descend from one."""
    parents, found = {}, []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if (place / "cmdline").read_bytes().startswith(WORKER):
                found.append(int(place.name))
    return [number for number in found if parent in ancestors(number, parents)]


def ancestors(number: int, parents: dict[int, int]) -> list[int]:
    """From the process itself up."""
    return [number, *(ancestors(parents[number], parents) if number in parents else [])]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--reward", default="clip_score")
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": sys.path[0]}
    root = Path(tempfile.mkdtemp())
    reward = ["-r", options.reward]
    ray = [*reward, "--engine", "ray", "--workers", str(options.workers), "-o"]
    paths = make(root / "data", options.count, options.size)
    few = make(root / "few", 2 * options.workers, 2)

    def plain(name: str, files: Sequence[Path]) -> float:
        shares = [[str(path) for path in files[n :: options.workers]] for n in range(options.workers)]
        return timed([[*own, *reward, "-o", f"{root}/{name}{n}.jsonl"] for n, own in enumerate(shares)])

    starts = {
        "plain": plain("few", few),
        "ray": timed([[str(few[0].parent), *ray, f"{root}/few-out"]]),
    }
    seconds = {"plain": plain("plain", paths), "ray": timed([[str(paths[0].parent), *ray, f"{root}/ray"]])}
    killed = root / "killed"
    command = [str(paths[0].parent), *ray, str(killed)]
    seconds["killed"] = timed([command], kill_after=(killed, len(paths) // 2))
    expected = {}
    for number in range(options.workers):
        for line in (root / f"plain{number}.jsonl").read_text().splitlines():
            row = json.loads(line)
            expected[row["image"]] = row["value"]
    for name in ("ray", "killed"):
        rows = [row for path in (root / name).glob("*.parquet") for row in read(path)]
        unique = len({row["image"] for row in rows})
        off = [abs(row["value"] / expected[row["image"]] - 1) for row in rows]
        print(f"{name}: {len(rows)} rows, {unique} unique, {off.count(0)} bit for bit, worst {max(off):.1g}")
        if not options.count == len(rows) == unique or max(off) > 1e-5:
            return 1
    for name, took in seconds.items():
        start = starts["plain" if name == "plain" else "ray"]
        rate, bare = options.count / took, options.count / (took - start)
        print(
            f"{name}: {took:.1f} s, {rate:.1f} a second ({seconds['plain'] / took:.2f} of plain); "
            f"without {start:.1f} s to start {bare:.1f} a second "
            f"({bare / options.count * (seconds['plain'] - starts['plain']):.2f})"
        )
    shutil.rmtree(root)
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of scores."""
    return pyarrow.parquet.read_table(path, columns=["image", "value"]).to_pylist()


if __name__ == "__main__":
    sys.exit(main())
