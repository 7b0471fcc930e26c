# SPDX-License-Identifier: Apache-2.0
"""Load test of the reward server on loopback.

    python tests/benchmarks/processes/reward_server.py --seconds 120

First throughput at full batches, directly and through the server in turns on as many threads: "wall" is of
the medians of seconds, "cpu" of the processor seconds of all processes together. Then the load: requests of
random size whose answers are known, clients and the judge's process killed now and then; lost and mixed answers
are counted.

With --memory GIB instead: the largest requests that are allowed while the judge's process is killed, the
memory beyond idle against the budget; then 300 silent connections at 256 open files beside one client.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import ROOT, argument_parser, process_memory
from tests.support.servers.rewards import serving
from visalign.rewards import load_judge
from visalign.rewards.serve.client import RemoteReward
from visalign.rewards.serve.server import judge_server
from visalign.rewards.serve.worker import JudgeWorker

_CUT = """
import http.client, sys
line = http.client.HTTPConnection(sys.argv[1].split("//")[1], timeout=30)
line.putrequest("POST", "/v1/score")
line.putheader("Content-Type", "application/x-safetensors")
line.putheader("Content-Length", "100000")
line.endheaders()
line.send(b"x" * 5000)
print("sent", flush=True)
import time; time.sleep(60)
"""


def brightness_client(url: str, number: int, stop: float, out: dict[str, list[float]]) -> None:
    """Send images whose brightness is known, and check each answer."""
    rng = random.Random(number)
    remote = RemoteReward(url, attempts=8)
    while time.monotonic() < stop:
        count = rng.randint(1, 12)
        begun = time.monotonic()
        lost, mixed = ask_known(remote, rng, number, count, 64)
        measures = {"seconds": time.monotonic() - begun, "images": count, "lost": lost, "mixed": mixed}
        for name, value in measures.items():
            out[name].append(value)
    remote.close()


def ask_known(remote: RemoteReward, rng: random.Random, number: int, count: int, side: int) -> tuple[int, int]:
    """Score even images of known levels; return how many answers are lost, and how many are another image's."""
    levels = [rng.randrange(256) for _ in range(count)]
    images = torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, side, side).contiguous()
    scores = remote.score(images, [f"{number}"] * count)
    right = (scores.value * 255 - torch.tensor(levels)).abs() < 0.01
    return int((~scores.valid).sum()), int((scores.valid & ~right).sum())


def load(seconds: float, clients: int) -> dict[str, float]:
    """All clients at once, with killed clients and workers."""
    worker = JudgeWorker("brightness", threads=1)
    out: dict[str, list[float]] = {"seconds": [], "images": [], "lost": [], "mixed": []}
    killed = {"clients": 0, "workers": 0}
    with serving(judge_server(worker, worker.card, max_batch=128)) as url:
        stop = time.monotonic() + seconds
        finished = threading.Event()

        def kill() -> None:
            while not finished.wait(max(2.0, seconds / 12)):
                child = subprocess.Popen([sys.executable, "-c", _CUT, url], stdout=subprocess.PIPE)
                assert child.stdout is not None
                child.stdout.readline()
                child.kill()
                child.wait()
                child.stdout.close()
                killed["clients"] += 1
                if killed["clients"] % 3 == 0 and worker.pid:
                    os.kill(worker.pid, signal.SIGKILL)
                    killed["workers"] += 1

        killer = threading.Thread(target=kill)
        killer.start()
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda n: brightness_client(url, n, stop, out), range(clients)))
        finished.set()
        killer.join()
    worker.close()
    times = sorted(out["seconds"])
    return {
        "clients": clients,
        "seconds": seconds,
        "requests": len(times),
        "images": sum(out["images"]),
        "lost": sum(out["lost"]),
        "mixed": sum(out["mixed"]),
        "killed clients": killed["clients"],
        "killed workers": killed["workers"],
        "median seconds": statistics.median(times),
        "99 % seconds": times[int(0.99 * len(times))],
    }


def judges_of(pid: int) -> list[int]:
    """The processes in which the server judges."""
    pids = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):  # each thread has those that it started
        with suppress(OSError):  # a thread, or a process, that went meanwhile
            for child in path.read_text().split():
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    pids.append(int(child))
    return pids


@contextmanager
def command(*options: str, files: int = 1024) -> Iterator[tuple[str, int, Path]]:
    """`visalign serve-reward brightness`: its address, process and log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    line = [sys.executable, "-m", "visalign", "serve-reward", "brightness", "--threads", "1", "--port", port]
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files, files))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as out:
            server = subprocess.Popen([*line, *options], stderr=out, stdout=out, cwd=ROOT, preexec_fn=limit)
        try:
            while b"Ready on" not in log.read_bytes():
                assert server.poll() is None, log.read_text()
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}", server.pid, log
        finally:
            server.terminate()
            server.wait(30)


def largest(seconds: float, clients: int, memory: float) -> dict[str, Any]:
    """Every client with the largest requests, the judge's process killed now and then."""
    report: dict[str, Any] = {"clients": clients, "seconds": seconds, "kills": 0, "requests": 0}
    report |= {"lost": 0, "mixed": 0, "server peak": 0, "judge peak": 0}
    counting, finished = threading.Lock(), threading.Event()
    with command("--memory", str(memory)) as (url, pid, log):
        limits = httpx.get(f"{url}/health").json()["limits"]
        side = int((limits["max_pixels"] / 4) ** 0.5)
        judge = judges_of(pid)[0]
        idle = {"server": process_memory("VmRSS", pid), "judge": process_memory("VmRSS", judge)}
        stop = time.monotonic() + seconds

        def watch() -> None:
            killed_at = time.monotonic()
            while not finished.wait(0.05):
                for own in judges_of(pid):
                    report["judge peak"] = max(report["judge peak"], process_memory("VmHWM", own))
                    if time.monotonic() > killed_at + 15 < stop - 10:
                        with suppress(ProcessLookupError):
                            os.kill(own, signal.SIGKILL)
                        report["kills"] += 1
                        killed_at = time.monotonic()
                report["server peak"] = max(report["server peak"], process_memory("VmHWM", pid))

        def ask(number: int) -> None:
            rng, remote = random.Random(number), RemoteReward(url, attempts=8)
            while time.monotonic() < stop:
                lost, mixed = ask_known(remote, rng, number, 4, side)
                with counting:
                    report["requests"] += 1
                    report["lost"] += lost
                    report["mixed"] += mixed
            remote.close()

        with ThreadPoolExecutor(clients + 1) as pool:
            watching = pool.submit(watch)
            try:
                list(pool.map(ask, range(clients)))
            finally:
                finished.set()
            watching.result()
        report["bytes of a request"] = 12 * side * side
        report["log bytes"] = log.stat().st_size
    mega = 2**20
    report["budget of each, MiB"] = memory * 512
    report["of it requests, MiB"] = limits["max_total_bytes"] / mega
    for name in idle:
        report[f"{name} beyond idle, MiB"] = round((report.pop(f"{name} peak") - idle[name]) / mega, 1)
    return report


def silent(seconds: float, connections: int = 300) -> dict[str, Any]:
    """Connections that say nothing at 256 open files, made anew as they are closed, beside one client."""
    with command("--memory", "0.25", files=256) as (url, _, log):
        address, lines, opened = urlsplit(url), list[socket.socket](), 0
        times, stop = list[float](), time.monotonic() + seconds
        images = torch.full((8, 3, 64, 64), 51, dtype=torch.uint8)
        while time.monotonic() < stop:
            while len(lines) < connections:
                lines.append(socket.create_connection((address.hostname or "", address.port or 0), timeout=10))
                opened += 1
            begun = time.monotonic()
            remote = RemoteReward(url)  # a client that comes while they are there
            assert remote.score(images, ["a"] * 8).valid.all()
            remote.close()
            times.append(time.monotonic() - begun)
            ended = set(select.select(lines, [], [], 0)[0])
            for line in ended:
                line.close()
            lines = [line for line in lines if line not in ended]
        for line in lines:
            line.close()
        return {
            "silent connections": opened,
            "clients served": len(times),
            "slowest, s": round(max(times), 2),
            "log bytes": log.stat().st_size,
        }


def processor_seconds(pid: int | None) -> float:
    """Of another process, its threads together; Linux counts in hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Images a second at full batches, the server's and the direct call's in turns."""
    count = options.batch * options.requests
    images = torch.randint(0, 256, (count, 3, options.size, options.size), dtype=torch.uint8)
    prompts = [f"a red circle {n}" for n in range(count)]
    torch.set_num_threads(options.threads)
    direct = load_judge(options.judge)
    worker = JudgeWorker(options.judge, threads=options.threads)
    wall: dict[str, list[float]] = {"direct": [], "server": []}
    cpu: dict[str, list[float]] = {"direct": [], "server": []}
    with serving(judge_server(worker, worker.card, max_batch=options.batch, max_wait=0.0)) as url:
        remote = RemoteReward(url)
        judges = [("direct", direct), ("server", remote)]
        for turn in range(options.rounds + 1):
            fresh = images.roll(turn, 0) ^ turn
            for label, judge in judges if turn % 2 else judges[::-1]:
                used, begun = time.process_time() + processor_seconds(worker.pid), time.perf_counter()
                scores = judge.score(fresh, prompts)  # type: ignore[union-attr]
                seconds = time.perf_counter() - begun
                if turn:
                    wall[label].append(seconds)
                    cpu[label].append(time.process_time() + processor_seconds(worker.pid) - used)
                assert scores.valid.all()
    worker.close()
    report: dict[str, Any] = {"judge": options.judge, "batch": options.batch, "threads": options.threads}
    for name, times in (("wall", wall), ("cpu", cpu)):
        medians = {label: statistics.median(values) for label, values in times.items()}
        report |= {f"{label} images/s ({name})": round(count / medians[label], 1) for label in medians}
        report[f"server / direct ({name})"] = round(medians["direct"] / medians["server"], 3)
    return report


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--judge", default="clip_score")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", type=float)
    options = parser.parse_args()
    if options.memory is not None:
        print(json.dumps(largest(options.seconds, options.clients, options.memory), indent=1), flush=True)
        print(json.dumps(silent(options.seconds / 4), indent=1))
        return
    print(json.dumps(throughput(options), indent=1))
    if options.seconds:
        print(json.dumps(load(options.seconds, options.clients), indent=1))


if __name__ == "__main__":
    main()
