# SPDX-License-Identifier: Apache-2.0
"""Scores of very many images with Ray: actors read and score whole files of images, this process writes a
Parquet file of scores for each. A stopped scoring goes on after its finished files.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from visalign.errors import UserError
from visalign.interfaces import with_capabilities
from visalign.locks import LOCK, hold_lock
from visalign.pipelines.shared.reward_options import load_each
from visalign.pipelines.shared.run_folder import check_run_folder
from visalign.rewards.base.contract import RewardError
from visalign.rewards.catalogue import load_reward

from .parts import Part, ScoringOptions, check_part, find_parts, finished_parts, part_metadata, read_part, write_scores
from .provenance import reward_identity
from .score import ScoreRow, score_rows

DEATHS = 3  # Workers that a file of images may end before it counts as unreadable


class Worker:
    """Actor that loads the rewards once and scores files of images."""

    def __init__(self, options: ScoringOptions, folder: str) -> None:
        with suppress(OSError):  # another machine, which has no such folder
            os.chdir(folder)  # where relative paths in the rewards' options start
        device = "cuda:0" if loaded_ray().get_gpu_ids() else None
        self._options = options
        self._rewards = load_each(options.rewards, options.options, load_reward, device)

    def score(self, part: Part) -> list[ScoreRow] | UserError | RewardError:
        """Score a part batch by batch; returned errors keep their message, raised ones get Ray's."""
        size, scores = self._options.batch_size, []
        rows = read_part(part, self._options)
        try:
            while batch := list(islice(rows, size)):
                scores += score_rows(batch, self._rewards, batch_size=size)
        except (UserError, RewardError) as error:
            return error
        return scores


@dataclass(kw_only=True)
class RayResult:
    before: int = 0  # Files of scores from an earlier run
    files: int = 0  # Files of scores that were written
    rows: int = 0
    failed: int = 0  # Rows without a value
    unread: dict[str, str] = field(default_factory=dict)
    """A file that could not be read to its end -> reason; nothing is written for it."""


def score_on_ray(
    items: Sequence[Path],
    output: Path,
    options: ScoringOptions,
    rewards: Mapping[str, Any],
    *,
    resume: bool = False,
    workers: int = 1,
    address: str | None = None,
    on_part: Callable[[int, int], object] = lambda done, total: None,
) -> RayResult:
    """Score files of images (`find_parts`) into a folder, a Parquet file for each.

    `rewards` are used for their identities: each worker loads its own. `on_part` gets the numbers of finished files
    and of all. Without an address Ray is started on this machine.
    """
    output = output.absolute()
    if parents := [item for item in items if item.is_dir() and output.is_relative_to(item.absolute())]:
        raise UserError(f"The output '{output}' lies in '{parents[0]}', which is to be scored. Give another.")
    check_run_folder(output, resume=resume)
    if names := [name for name, r in rewards.items() if with_capabilities(r).capabilities.compares_samples]:
        raise UserError(f"{', '.join(names)} scores images against each other. Leave --engine ray out.")
    parts = find_parts(items, clips=options.clips, prompt=options.prompt)
    for part in parts:
        check_part(part, options)
    digests = {label: reward_identity(reward).digest for label, reward in rewards.items()}
    with hold_lock(output / LOCK, what=f"The output folder '{output}'"):
        finished = finished_parts(output, parts, options, digests)
        result = RayResult(before=len(finished))
        waiting = [part for part in parts if part not in finished]
        if not waiting:
            return result
        metadata = {part: part_metadata(part, options, digests) for part in waiting}  # before they are read
        with ray_running(address):
            for part, scores in _score_parts(waiting, options, workers):
                if isinstance(scores, str):
                    result.unread[part.output if isinstance(part.source, tuple) else str(part.source)] = scores
                    continue
                write_scores(output / part.output, scores, metadata[part])
                result.files, result.rows = result.files + 1, result.rows + len(scores)
                result.failed += sum(row.value is None for row in scores)
                on_part(result.before + result.files, len(parts))
    return result


def _score_parts(parts: Sequence[Part], options: ScoringOptions, workers: int) -> Iterator[tuple[Part, Any]]:
    """Yield parts with their scores as they finish, or with the reason of a part that cannot be read."""
    ray = loaded_ray()
    resources = worker_resources(workers, ray.cluster_resources())
    actor = ray.remote(max_restarts=-1, max_task_retries=DEATHS - 1, **resources)(Worker)
    idle = [actor.remote(options, os.getcwd()) for _ in range(min(workers, len(parts)))]
    waiting, running = list(reversed(parts)), {}
    try:
        while waiting or running:
            while waiting and idle:
                part, worker = waiting.pop(), idle.pop()
                running[worker.score.remote(part)] = part, worker
            [done], _ = ray.wait(list(running), num_returns=1)
            part, worker = running.pop(done)
            idle.append(worker)
            try:
                answer = ray.get(done)
            except ray.exceptions.ActorUnavailableError:  # the actor itself is started again
                answer = UserError(f"its reading or judging ended {DEATHS} workers.")
            if isinstance(answer, RewardError):
                raise answer
            yield part, str(answer) if isinstance(answer, UserError) else answer
    except ray.exceptions.RayError as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[-1]
        raise RewardError(f"Ray stopped ({reason}); what is finished stays.") from error


def worker_resources(workers: int, resources: Mapping[str, float]) -> dict[str, Any]:
    """Divide the logical CPUs, and GPUs where there are some, among the workers.

    >>> worker_resources(2, {"CPU": 4}), worker_resources(3, {"CPU": 2, "GPU": 2})
    ({'num_cpus': 1.0}, {'num_cpus': 0.6666, 'num_gpus': 0.5})
    """
    cpus, gpus = resources.get("CPU", 1.0), int(resources.get("GPU", 0))
    share = {"num_cpus": int(10000 * min(1.0, cpus / workers)) / 10000}  # Ray takes four digits
    return share | ({"num_gpus": 1 / -(-workers // gpus)} if gpus else {})


def loaded_ray() -> Any:
    """Import Ray with few messages and no usage reports."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 leaves a worker nothing next to other work
    import ray  # type: ignore[import-not-found]  # optional

    return ray


@contextmanager
def ray_running(address: str | None) -> Iterator[None]:
    """Run a Ray on this machine for the block, or connect to the cluster of an address (HOST:PORT)."""
    ray = loaded_ray()
    handler = signal.getsignal(signal.SIGTERM)  # Ray sets its own, which does not mention --resume
    local = {} if address else {"include_dashboard": False}
    try:
        if address is not None:  # Ray itself waits much longer for an address that does not answer
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **local)
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        where = address or "this machine"
        raise UserError(f"No Ray at {where}: {error}. --address takes HOST:PORT of a cluster's head.") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()
