# SPDX-License-Identifier: Apache-2.0
"""Load test of the reward server on loopback: `python tests/benchmarks/reward_server.py --seconds 120`.

Clients send requests of random size, each image carrying its own expected answer; some clients are killed
in the middle of a request, and the judge's process is killed now and then. Counts lost and mixed answers,
and compares throughput at full batches with the same judge called directly.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.reward_servers import serving  # noqa: E402
from visalign.rewards import load_judge  # noqa: E402
from visalign.rewards.judge_server import judge_server  # noqa: E402
from visalign.rewards.judge_worker import JudgeWorker  # noqa: E402
from visalign.rewards.remote_reward import RemoteReward  # noqa: E402

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
    """Send pictures whose brightness is known, and check each answer."""
    rng = random.Random(number)
    remote = RemoteReward(url, attempts=8)
    while time.monotonic() < stop:
        count = rng.randint(1, 12)
        levels = [rng.randrange(256) for _ in range(count)]
        images = torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 64, 64).contiguous()
        begun = time.monotonic()
        scores = remote.score(images, [f"{number}"] * count)
        out["seconds"].append(time.monotonic() - begun)
        out["images"].append(count)
        right = (scores.value * 255 - torch.tensor(levels)).abs() < 0.01
        out["lost"].append(int((~scores.valid).sum()))
        out["mixed"].append(int((scores.valid & ~right).sum()))
    remote.close()


def load(seconds: float, clients: int) -> dict[str, float]:
    """All clients at once, with killed clients and workers."""
    worker = JudgeWorker("brightness", threads=1)
    out: dict[str, list[float]] = {"seconds": [], "images": [], "lost": [], "mixed": []}
    killed = {"clients": 0, "workers": 0}
    with serving(judge_server(worker, worker.card, max_batch=128)) as url:
        stop = time.monotonic() + seconds
        done = threading.Event()

        def kill() -> None:
            while not done.wait(max(2.0, seconds / 12)):
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
        done.set()
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


def throughput(name: str, batch: int, rounds: int, size: int) -> dict[str, float]:
    """Images a second at full batches, the server's and the direct call's in turns."""
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8)
    prompts = [f"a red circle {n}" for n in range(batch)]
    torch.set_num_threads(1)
    direct = load_judge(name)
    worker = JudgeWorker(name, threads=1)
    times: dict[str, list[float]] = {"direct": [], "server": []}
    with serving(judge_server(worker, worker.card, max_batch=batch, max_wait=0.0)) as url:
        remote = RemoteReward(url)
        for turn in range(rounds + 1):
            fresh = images.roll(turn, 0) ^ turn
            for label, judge in (("direct", direct), ("server", remote)):
                begun = time.perf_counter()
                judge.score(fresh, prompts)  # type: ignore[union-attr]
                if turn:
                    times[label].append(time.perf_counter() - begun)
    worker.close()
    medians = {label: statistics.median(values) for label, values in times.items()}
    return {
        "judge": name,  # type: ignore[dict-item]
        "batch": batch,
        "direct images/s": batch / medians["direct"],
        "server images/s": batch / medians["server"],
        "server / direct": medians["direct"] / medians["server"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--judge", default="clip_score")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, default=64)
    given = parser.parse_args()
    print(json.dumps(throughput(given.judge, given.batch, given.rounds, given.size), indent=1))
    if given.seconds:
        print(json.dumps(load(given.seconds, given.clients), indent=1))


if __name__ == "__main__":
    main()
