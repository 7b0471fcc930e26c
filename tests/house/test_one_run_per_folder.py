# SPDX-License-Identifier: Apache-2.0
"""Two processes in one folder, and processes that are told to end: what is refused, what is saved."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.forks import Fork, visalign
from visalign.locks import LOCK, FolderInUseError, check_unlocked, hold_lock
from visalign.pipelines.cli.app import app
from visalign.pipelines.score.log import ScoreLog
from visalign.pipelines.score.score import ScoreRow
from visalign.pipelines.shared.run_folder import check_run_folder
from visalign.signals import InterruptFlag, Stopped, raise_on_sigterm

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no locks of files and no SIGTERM there")

ROOT = Path(__file__).resolve().parents[2]
HOLDS = (
    "import sys, time\nfrom pathlib import Path\nfrom visalign.locks import hold_lock\n"
    "with hold_lock(Path(sys.argv[1]), what='x'):\n    print('held', flush=True)\n    time.sleep(600)\n"
)


@contextmanager
def held_elsewhere(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a lock."""
    command = [sys.executable, "-c", HOLDS, str(lock)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        yield other
    finally:
        other.kill()
        other.wait()
        assert other.stdout is not None
        other.stdout.close()


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "run" / LOCK
    with held_elsewhere(lock) as other:
        message = rf"^The run is in use by process {other.pid} on .+ since \d{{4}}-.+ \(-c .*\)\. Wait until"
        with pytest.raises(FolderInUseError, match=message), hold_lock(lock, what="The run"):
            pass
        with pytest.raises(FolderInUseError, match=rf"The output folder '.*run' is in use by process {other.pid}"):
            check_run_folder(tmp_path / "run", resume=True)
    assert lock.is_file()  # left by a killed holder: it means nothing now
    check_run_folder(tmp_path / "run", resume=False)
    with hold_lock(lock, what="The run"), hold_lock(lock, what="The run"):
        assert lock.read_text().startswith(f"process {os.getpid()} on ")
    assert not lock.exists()


def test_scores_of_one_file_are_written_by_one_process(tmp_path: Path) -> None:
    path = tmp_path / "scores.json.part"
    with held_elsewhere(path.with_name(path.name + LOCK)) as other:
        for resume in (True, False):
            with pytest.raises(FolderInUseError, match=rf"'.*scores\.json\.part' is in use by process {other.pid}"):
                ScoreLog(path, {}, ScoreRow, resume=resume)
    log = ScoreLog(path, {}, ScoreRow)
    assert len(os.listdir(tmp_path)) == 2
    log.close()
    assert os.listdir(tmp_path) == [path.name]
    path.write_text("no scores of ours\n")
    with pytest.raises(ValueError, match="holds no scores of ours"):
        ScoreLog(path, {}, ScoreRow)
    assert os.listdir(tmp_path) == [path.name], "the lock is let go of after the refusal"


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.warns(UserWarning, match="The run cannot be locked .No locks available.. See that no second"):
        with hold_lock(tmp_path / LOCK, what="The run"):
            pass
    check_unlocked(tmp_path / LOCK, what="The run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_flag_and_the_second_stops(number: signal.Signals) -> None:
    messages: list[str] = []
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    with InterruptFlag(messages.append) as flag:
        assert not flag.raised
        os.kill(os.getpid(), number)
        assert flag.raised and flag.by == number
        again = "press again" if number == signal.SIGINT else "SIGTERM: .*send it again"
        assert re.match(f".*{again} to stop at once", messages[0])
        with pytest.raises(Stopped):
            os.kill(os.getpid(), number)
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before


def test_sigterm_ends_forks_of_the_process_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    with raise_on_sigterm():
        reading, writing = os.pipe()
        if (fork := os.fork()) == 0:
            os.write(writing, b"up")  # Python forgets a signal that comes before
            time.sleep(60)
            os._exit(0)
        assert os.read(reading, 2) == b"up"
        os.kill(fork, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 143
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_sigterm_saves_a_run_and_a_second_run_in_its_folder_is_refused(tmp_path: Path) -> None:
    """With the command line, as a scheduler does it."""
    small = (
        "data.tasks=[add]",
        "data.size=20",
        "data.heldout_per_task=1",
        "rollout.prompts_per_iteration=2",
        "rollout.group_size=2",
        "rollout.max_new_tokens=16",
        "run.device=cpu",
        "run.threads=1",
        "run.iterations=100000",
        "run.checkpoint_every=100000",
    )
    folder = tmp_path / "run"
    command = ["train", "text_grpo", *small, "-o", str(folder)]
    first = Fork(visalign, *command)
    try:
        end = time.monotonic() + 120
        metrics = folder / "metrics.jsonl"
        while not (metrics.is_file() and metrics.stat().st_size):
            assert time.monotonic() < end and first.process.is_alive(), first.output.read_text()
            time.sleep(0.1)
        second = CliRunner().invoke(app, [*command, "--resume"], env={"COLUMNS": "1000"})
        assert second.exit_code == 2
        assert f"is in use by process {first.pid} on" in second.output and "text_grpo" in second.output
        assert not list(folder.glob("checkpoints/step_*"))
        first.process.terminate()
        code, output = first.wait(120)
    finally:
        first.process.kill()
    assert code == 143, output
    assert "SIGTERM: finishing this iteration and saving it" in output
    assert "Stopped by SIGTERM. Continue with:" in output and output.rstrip().endswith("--resume")
    assert len(list(folder.glob("checkpoints/step_*"))) == 1 and not (folder / LOCK).exists()
