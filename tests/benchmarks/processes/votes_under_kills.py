# SPDX-License-Identifier: Apache-2.0
"""Voters at once while the server is killed: every vote that was answered for is in the file, once.

    python tests/benchmarks/processes/votes_under_kills.py --voters 8 --seconds 120 --kills 10

Each voter does as the page does: asks for the next task, gets its images, sends its vote under one name
until it is kept. Refuted by a vote that was kept and is not in the file, that is there twice, or by a
task with more votes than were wanted.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[3]
PORT = 8093
TASKS = 20_000
URL = f"http://127.0.0.1:{PORT}"


class Voter(threading.Thread):
    """One person in a hurry."""

    def __init__(self, name: str, until: float) -> None:
        super().__init__(daemon=True)
        self.name_, self.until, self.kept, self.waits = name, until, dict[str, str](), list[float]()
        self.client = httpx.Client(base_url=URL, timeout=30)

    def ask(self, place: str, body: dict[str, object]) -> dict[str, object]:
        """Until it is answered, as the page does; a refusal ends the thread."""
        while True:
            began = time.monotonic()
            try:
                found = self.client.post(place, json=body)
            except httpx.TransportError:
                time.sleep(0.2)
                continue
            self.waits.append(time.monotonic() - began)
            found.raise_for_status()
            return found.json()

    def run(self) -> None:
        draws = random.Random(self.name_)
        self.ask("/join", {"name": self.name_})
        while time.monotonic() < self.until:
            shown = self.ask("/next", {})
            if "assignment" not in shown:
                return
            choice = draws.choice(["left", "right", "tie"])
            client = f"{self.name_}-{shown['assignment']}"
            vote = {
                "client": client,
                "assignment": shown["assignment"],
                "answer": {"choice": choice},
                "seconds": 1,
            }
            self.ask("/vote", vote)
            self.kept[client] = choice
        self.client.close()


def start(path: Path, *sources: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "visalign", "collect", str(path), *sources, "--port", str(PORT)]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    line = server.stderr.readline()
    if "Vote at" not in line:
        raise SystemExit(line + server.stderr.read())
    return server


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--voters", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draws = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        table, path = Path(folder) / "pairs.jsonl", Path(folder) / "votes.sqlite"
        row = '{{"prompt": "p{0}", "image_left": "{1}left", "image_right": "{1}right"}}\n'
        table.write_text("".join(row.format(n, f"shapes://heldout/0/pair/{n}/") for n in range(TASKS)))
        server = start(path, str(table))
        until = time.monotonic() + given.seconds
        voters = [Voter(f"voter {number}", until) for number in range(given.voters)]
        for voter in voters:
            voter.start()
        moments = sorted(draws.uniform(2, given.seconds - 5) for _ in range(given.kills))
        began = until - given.seconds
        for moment in moments:
            time.sleep(max(0.0, began + moment - time.monotonic()))
            server.kill()
            server.wait()
            server = start(path)
        for voter in voters:
            voter.join()
        server.kill()
        server.wait()
        kept = {client: choice for voter in voters for client, choice in voter.kept.items()}
        db = sqlite3.connect(path)
        there = Counter(client for (client,) in db.execute("SELECT client FROM votes"))
        again = db.execute("SELECT COUNT(*) FROM votes WHERE revision > 1").fetchone()[0]
        most = db.execute(
            "SELECT MAX(n) FROM (SELECT COUNT(*) AS n FROM assignments a JOIN votes v ON v.assignment = a.id "
            "WHERE NOT a.again GROUP BY a.task)"
        ).fetchone()[0]
        lost = kept.keys() - there.keys()
        waits = sorted(wait for voter in voters for wait in voter.waits)
        doubled = sum(count > 1 for count in there.values()) + again
        unheard = len(there.keys() - kept.keys())
        print(f"{len(kept)} votes kept by {given.voters} voters in {given.seconds:g} s, {given.kills} kills")
        print(f"lost {len(lost)}, doubled {doubled}, most on a task {most} of 3 wanted, unheard {unheard}")
        middle, late = waits[len(waits) // 2], waits[int(0.99 * len(waits))]
        print(f"seconds until an answer: median {middle:.3f}, 99 % {late:.3f}")
        if lost or again or most > 3:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
