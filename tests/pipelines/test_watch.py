# SPDX-License-Identifier: Apache-2.0
"""The page of runs: not begun, training, finished, interrupted, failed, killed; served to this machine alone."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from visalign.locks import LOCK, hold_lock
from visalign.pipelines import watch
from visalign.pipelines.cli.app import app
from visalign.pipelines.shared.run_folder import END, record_end


def run_folder(folder: Path, iterations: int = 3) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {iterations: 4}\n")
    rows = [
        {"iteration": k, "seconds": 30.0, "reward_mean": k / 10, "heldout/mine": 0.5, "heldout/mine.low": 0.25,
         "heldout/mine.high": 0.75}
        for k in range(1, iterations + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"iterat')
    for number in range(9):
        Image.new("RGB", (8, 4)).save(folder / "samples" / f"{number:06d}.png")
    return folder


def test_a_run_that_trains(tmp_path, monkeypatch):
    run = run_folder(tmp_path / "run")
    monkeypatch.setattr(watch, "check_unlocked", lambda *_, **__: (_ for _ in ()).throw(watch.FolderInUseError("x")))
    page = watch.build_page([run], reload=5)
    assert "iteration 3 of 4 · about 30 s left" in page and 'data-reload="5"' in page
    (run / "config.yaml").write_text("run: {iterations: 4, max_seconds: 100}\n")
    assert "about 10 s left" in watch.build_page([run])
    assert "0.2500 to 0.7500, iteration 3" in page and "Held-out mine" in page
    assert page.count("data:image/png") == watch.GRIDS and "before training" in page and "iteration 8" in page
    (run / "metrics.jsonl").unlink()
    assert "No iteration has ended yet" in watch.build_page([run])


def test_metrics_alone_are_shown(tmp_path):
    run = run_folder(tmp_path / "run", 1)
    (run / "config.yaml").unlink()
    page = watch.build_page([run])
    assert "has no config.yaml, so only its metrics are shown" in page and ">1.0</text>" not in page
    (tmp_path / "search" / "learning_rate").mkdir(parents=True)
    assert "Learning rates are compared" in watch.build_page([tmp_path / "search"])


@pytest.mark.parametrize(
    ("error", "name", "sentence"),
    [(KeyboardInterrupt(2), "interrupted", ""), (ValueError("disk <full>"), "failed", "disk <full> "),
     (None, "ended", "The process ended without a result, as when it is killed")],
)  # fmt: skip
def test_runs_that_ended_say_how_and_how_to_go_on(tmp_path, error, name, sentence):
    run = run_folder(tmp_path / "run")
    record_end(run, type(error) if error else None, error, None)
    state = watch.run_state(run)
    assert state.state == name and state.sentence.startswith(sentence)
    assert state.sentence.endswith(f"Continue with: visalign train {run}/config.yaml --output {run} --resume")
    page = watch.build_page([run])
    assert ('<p class="banner" role="alert">' in page) == (name == "failed") and "<full>" not in page
    (run / "summary.json").write_text('{"iterations": 2}')
    assert watch.run_state(run).state == name, "resumed after it had finished"
    (run / END).unlink(missing_ok=True)
    (run / "summary.json").write_text('{"iterations": 3}')
    assert watch.run_state(run).state == "finished"


def test_what_has_not_begun_a_folder_of_runs_and_a_file(tmp_path):
    assert "Start it: visalign train CONFIG --output" in watch.build_page([tmp_path / "none"])
    runs = [run_folder(tmp_path / "runs" / name) for name in "ba"]
    assert watch.run_folders([tmp_path / "runs"]) == runs[::-1]
    with hold_lock(tmp_path / "runs" / LOCK, what="x"):  # a run that has only begun
        assert watch.run_folders([tmp_path / "runs"]) == [tmp_path / "runs"]
    result = CliRunner().invoke(app, ["watch", str(runs[0] / "config.yaml")])
    assert result.exit_code == 2 and "is a file. Give the folder that visalign train writes" in result.output
    assert "<h1>2 runs</h1>" in watch.build_page([tmp_path / "runs"])


@pytest.fixture
def url(tmp_path) -> Iterator[str]:
    run = run_folder(tmp_path / "run")
    (run / "report.html").write_text("the report")
    with ThreadingHTTPServer((watch.HOST, 0), watch._handler([run])) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{watch.HOST}:{server.server_port}"
        server.shutdown()


def read(url: str, host: str | None = None) -> tuple[int, str]:
    try:
        request = urllib.request.Request(url, headers={} if host is None else {"Host": host})
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_the_server_shows_changes_and_nothing_else(tmp_path, url):
    assert "Ended without a result" in read(url)[1]
    (tmp_path / "run" / END).write_text("interrupted\n")
    assert "Interrupted" in read(url)[1] and read(f"{url}/0/report.html") == (200, "the report")
    for path in ("/1/report.html", "/-1/report.html", "/0/config.yaml", "/../run/config.yaml"):
        assert read(url + path)[0] == 404
    assert read(url, "evil.example:80")[0] == 403
