# SPDX-License-Identifier: Apache-2.0
"""`visalign watch`: one page on runs that have not begun, are training, or ended; it reloads by itself."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml

from visalign.errors import UserError
from visalign.evaluation.pages.watch_page import watch_page
from visalign.locks import LOCK, FolderInUseError, check_unlocked
from visalign.model_files import read_object
from visalign.pipelines.serve_reward import check_port_free
from visalign.pipelines.shared.grids import FOLDER as SAMPLES
from visalign.pipelines.shared.learning_rate import FOLDER as RATES
from visalign.pipelines.shared.run_folder import END, resume_command
from visalign.training.loop.metrics import read_metrics

HOST, RELOAD, REPORT = "127.0.0.1", 5, "report.html"
GRIDS = 6  # Largest number of sample grids of a run on the page: the first and the newest


class State(NamedTuple):
    state: str  # A key of `visalign.evaluation.pages.watch_page.STATES`
    sentence: str


def run_state(folder: Path) -> State:
    """Find out from its folder whether a run has begun, is training, or how it ended."""
    try:
        check_unlocked(folder / LOCK, what=str(folder))
    except FolderInUseError:
        return State("training", "")
    config = folder / "config.yaml"
    if not config.is_file():
        if (folder / "metrics.jsonl").is_file():
            return State("unknown", "The folder has no config.yaml, so only its metrics are shown.")
        if (folder / RATES).is_dir():
            return State("waiting", f"Learning rates are compared by short runs in {folder / RATES}.")
        start = shlex.join(["visalign", "train", "CONFIG", "--output", str(folder)])
        return State("waiting", f"No run has begun here. Start it: {start}. This page shows it when it begins.")
    # a run that is resumed with more iterations has its earlier summary, too
    path, summary, done = folder / END, folder / "summary.json", len(read_metrics(folder / "metrics.jsonl"))
    if summary.is_file() and not path.is_file() and read_object(summary).get("iterations", done) >= done:
        return State("finished", "")
    ended = ("ended", "", "The process ended without a result, as when it is killed or the machine restarts.")
    name, _, message = path.read_text(encoding="utf-8").partition("\n") if path.is_file() else ended
    return State(name, f"{message.strip()} Continue with: {resume_command(str(config), [], folder)}".strip())


def read_run(folder: Path) -> dict[str, Any]:
    """Read what the page shows of a run: state, iterations, metrics, and the files of the sample grids."""
    state, path = run_state(folder), folder / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    metrics = read_metrics(folder / "metrics.jsonl")
    run, done, left = config.get("run") or {}, len(metrics), None
    total, budget = run.get("iterations"), run.get("max_seconds") or float("inf")
    seconds = [row["seconds"] for row in metrics if row.get("seconds")]
    if state.state == "training" and seconds and total:
        left = max(0.0, min(fmean(seconds[-50:]) * (total - done), budget - sum(seconds)))
    grids = sorted((folder / SAMPLES).glob("*.png"))
    newest = [(int(file.stem), file) for file in [*grids[:1], *grids[1:][1 - GRIDS :]][::-1]]
    progress = {"folder": str(folder), **state._asdict(), "done": done, "total": total, "left": left}
    return {**progress, "metrics": metrics, "grids": newest, "has_report": (folder / REPORT).is_file()}


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """List run folders; a folder without a run stands for the runs inside, where there are any."""
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"'{folder}' is a file. Give the folder that visalign train writes (--output).")
    inside = [sorted(path.parent for path in folder.glob("*/config.yaml")) for folder in folders]
    has_run = [(folder / "config.yaml").is_file() or (folder / LOCK).is_file() for folder in folders]
    listed = [[f] if is_run or not runs else runs for f, is_run, runs in zip(folders, has_run, inside, strict=True)]
    return list(dict.fromkeys(folder for part in listed for folder in part))


def build_page(folders: Sequence[Path], *, reload: int = 0) -> str:
    """Render the page of runs, reloading every `reload` seconds; 0: never."""
    return watch_page([read_run(folder) for folder in run_folders(folders)], reload=reload)


def serve_page(folders: Sequence[Path], *, port: int, on_ready: Callable[[str], object]) -> None:
    """Serve the page to this machine until interrupted; `on_ready` gets its address."""
    run_folders(folders)
    check_port_free(HOST, port)
    with ThreadingHTTPServer((HOST, port), _handler(folders)) as server:
        on_ready(f"http://{HOST}:{port}/")
        server.serve_forever()


def _handler(folders: Sequence[Path]) -> type[BaseHTTPRequestHandler]:
    pages: dict[Any, bytes] = {}

    def page() -> bytes:
        """Render again only where a file of the runs has changed: long runs have long curves."""
        names = ("config.yaml", "metrics.jsonl", SAMPLES, END, "summary.json", LOCK, REPORT)
        runs = run_folders(folders)
        files = [path for run in runs for name in names if (path := run / name).exists()]
        key = tuple((str(path), path.stat().st_mtime_ns) for path in files), tuple(run_state(run) for run in runs)
        if key not in pages:
            pages.clear()
            pages[key] = build_page(folders, reload=RELOAD).encode()
        return pages[key]

    def report(number: str) -> bytes | None:
        runs = run_folders(folders)
        path = runs[int(number)] / REPORT if number.isdecimal() and int(number) < len(runs) else Path()
        return path.read_bytes() if path.is_file() else None

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (HOST, "localhost"):  # a name that another site points here must not read the runs
                return self.send_error(403, f"Open http://{HOST} instead")
            parts = self.path.strip("/").split("/")
            content = page() if self.path == "/" else report(parts[0]) if parts[1:] == [REPORT] else None
            if content is None:
                return self.send_error(404)
            self.send_response(200)
            headers: Mapping[str, str] = {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store"}
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing for each reload."""

    return Handler
