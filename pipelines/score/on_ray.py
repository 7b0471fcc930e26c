# SPDX-License-Identifier: Apache-2.0
"""Scores of very many images by Ray Data: a file of scores for each file of images, by many workers.

Tasks read the files, batch by batch; a pool of actors scores the batches as `score_rows` does; this process
collects the batches of one file and writes it whole. A stopped scoring goes on after its finished files, so
that no list of all finished rows is ever held.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from visalign.atomic import write_atomic
from visalign.errors import UserError
from visalign.interfaces import with_capabilities
from visalign.locks import LOCK, hold_lock
from visalign.pipelines.shared.reward_options import load_each
from visalign.pipelines.shared.run_folder import check_run_folder
from visalign.rewards.base.contract import RewardError
from visalign.rewards.catalogue import load_reward

from .image_rows import ImageRow
from .log import score_key
from .parts import Part, ScoringOptions, check_part, find_parts, parquet_columns, read_batches
from .provenance import reward_identity
from .score import ScoreRow, score_rows

DEATHS = 3
"""Workers that a batch may end before its rows count as failed."""
WAIT = 5.0
"""Seconds in which a cluster's address has to answer."""
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of a gRPC client (RFC 9113, section 3.4); a server answers with a frame of type 4, settings."""
METADATA_KEY = b"visalign"
"""Key of the Parquet metadata that name the inputs and the rewards of a file of scores."""
READING = 0.5
"""Logical CPUs of a task that reads a file."""


def finished_parts(
    output: Path, parts: Sequence[Part], options: ScoringOptions, digests: Mapping[str, str]
) -> set[int]:
    """Find the parts whose scores are in the folder, by these rewards, for the files' current content."""
    import pyarrow.parquet

    finished = set()
    for index, part in enumerate(parts):
        path = output / part.output
        if not path.is_file():
            continue
        parquet_columns(path)  # refuses a damaged file
        metadata: Any = None
        with suppress(ValueError):
            metadata = json.loads((pyarrow.parquet.read_schema(path).metadata or {}).get(METADATA_KEY, b"{}"))
        if not isinstance(metadata, dict) or not metadata.keys() >= {"judges", "input"}:
            raise UserError(f"'{path}' holds no scores of ours. Give another --output, or remove it.")
        if metadata["judges"] != dict(digests):
            raise UserError(
                f"'{path}' holds scores of {', '.join(metadata['judges'])}, which are other rewards or other "
                f"versions than {', '.join(digests)} now. Remove it, or give another --output."
            )
        if metadata["input"] == input_digest(part, options):
            finished.add(index)
    return finished


def input_digest(part: Part, options: ScoringOptions) -> str:
    """Hash a part's files and the way they are read."""
    files = part.source if isinstance(part.source, tuple) else (part.source,)
    return score_key([str(path) for path in files], options.prompt or "", options.names)


def write_scores(path: Path, rows: Sequence[ScoreRow], metadata: Mapping[str, Any]) -> None:
    """Write rows atomically as Parquet, a line per image and reward, with metadata for `finished_parts`."""
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = dict.fromkeys(ScoreRow.__dataclass_fields__, pyarrow.string())
    columns |= dict.fromkeys(("value", "std"), pyarrow.float64())
    columns["parts"] = pyarrow.map_(pyarrow.string(), pyarrow.float64())
    table = pyarrow.Table.from_pylist(
        [asdict(row) | {"parts": list(row.parts.items())} for row in rows],
        schema=pyarrow.schema(columns).with_metadata({METADATA_KEY: json.dumps(metadata).encode()}),
    )
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    write_atomic(path, file.getvalue())


class Attempts:
    """Counter of the batches that were begun and not ended."""

    def __init__(self) -> None:
        self._begun: Counter[tuple[int, int | None]] = Counter()

    def begin(self, place: int, start: int, ended: int | None = None) -> int:
        """Count one more attempt and return their number; `ended` is the batch that the worker finished."""
        self._begun.pop((place, ended), None)
        self._begun[place, start] += 1
        return self._begun[place, start]


class Scorer:
    """A worker that loads the rewards once and scores batches.

    Errors of a reward come back as text, so that the message is the reward's and not Ray's. Ray gives a batch
    that ends its worker to another one without end; after `DEATHS` its rows are failures.

    Args:
        options: The rewards and how batches are scored.
        folder: Working directory of the command, where relative paths in options start.
        begin: `Attempts.begin`, shared by all workers.
    """

    def __init__(
        self, options: ScoringOptions, folder: str, begin: Callable[[int, int, int | None], int]
    ) -> None:
        self._options, self._begin = options, begin
        self._rewards: dict[str, Any] = {}
        with suppress(OSError):  # another machine, which has no such folder
            os.chdir(folder)

    def __call__(self, batch: Any) -> Any:
        """Replace the rows of an item of `read_batches`, an Arrow table, by their scores."""
        [item] = batch.to_pylist()
        rows: list[ImageRow] = pickle.loads(item["rows"])
        scores: list[ScoreRow] = []
        stop, ended, size = "", None, self._options.batch_size
        try:
            self._rewards = self._rewards or self._load()
            for offset in range(0, len(rows), size):
                start, chunk = item["start"] + offset, rows[offset : offset + size]
                if self._begin(item["place"], start, ended) > DEATHS:
                    why = f"the worker that judged it died {DEATHS} times, by it or by another of its batch"
                    chunk = [replace(row, reason=row.reason or why) for row in chunk]
                scores += score_rows(chunk, self._rewards, batch_size=size)
                ended = start
        except (RewardError, UserError) as error:
            stop = str(error)
        item |= {"rows": pickle.dumps(scores), "stop": stop}
        return {name: [value] for name, value in item.items()}

    def _load(self) -> dict[str, Any]:
        device = "cuda:0" if loaded_ray().get_gpu_ids() else None
        load = partial(load_reward, run_device=device)
        return load_each(self._options.rewards, self._options.options, load)


@dataclass(kw_only=True)
class RayResult:
    """Counts of a scoring with Ray."""

    before: int = 0
    """Files of scores from an earlier run, of these rewards and these files of images."""
    files: int = 0
    """Files of scores that were written."""
    rows: int = 0
    failed: int = 0
    """Rows without a value."""
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
    """Score files of images into a folder, a Parquet file for each.

    Args:
        items: As in `find_parts`.
        output: A new folder, or with `resume` one whose finished files stay.
        options: How images are read and scored.
        rewards: Label -> reward, used only for its identity; each worker loads its own.
        resume: Go on with a stopped scoring in the folder.
        workers: Number of processes that score.
        address: HOST:PORT of a cluster's head; None starts a Ray on this machine.
        on_part: Called with the number of finished files and of all.
    """
    output = output.absolute()
    if parents := [item for item in items if item.is_dir() and output.is_relative_to(item.absolute())]:
        raise UserError(f"The output '{output}' lies in '{parents[0]}', which is to be scored. Give another.")
    check_run_folder(output, resume=resume)
    if batch_rewards := [
        label for label, r in rewards.items() if with_capabilities(r).capabilities.needs_batch
    ]:
        raise UserError(
            f"{', '.join(batch_rewards)} judges all images of a call together, and --engine ray judges them "
            "in batches of each file. Leave --engine ray out."
        )
    parts = find_parts(items, clips=options.clips)
    for part in parts:
        check_part(part, options)
    digests = {label: reward_identity(reward).digest for label, reward in rewards.items()}
    with hold_lock(output / LOCK, what=f"The output folder '{output}'"):
        finished = finished_parts(output, parts, options, digests)
        result = RayResult(before=len(finished))
        remaining = {index: part for index, part in enumerate(parts) if index not in finished}

        def count(rows: Sequence[ScoreRow]) -> None:
            result.files, result.rows = result.files + 1, result.rows + len(rows)
            result.failed += sum(row.value is None for row in rows)
            on_part(result.before + result.files, len(parts))

        if remaining:
            with ray_running(address):
                result.unread = _score_parts(remaining, output, options, digests, workers, count)
    return result


def _score_parts(
    parts: Mapping[int, Part],
    output: Path,
    options: ScoringOptions,
    digests: Mapping[str, str],
    workers: int,
    on_part: Callable[[Sequence[ScoreRow]], object],
) -> dict[str, str]:
    """Score parts on the running Ray and write each when it is complete; return {unreadable file: reason}."""
    batches: dict[int, dict[int, list[ScoreRow]]] = {place: {} for place in parts}
    last: dict[int, int] = {}
    unread: dict[str, str] = {}
    inputs = {place: input_digest(part, options) for place, part in parts.items()}
    ray = loaded_ray()
    try:
        for item in _scored_batches(parts, options, workers).iter_rows():
            place, start = item["place"], item["start"]
            if item["stop"]:
                raise RewardError(item["stop"])
            if item["unread"]:
                unread[str(parts[place].source)] = item["unread"]
                batches.pop(place, None)
            if place not in batches:
                continue
            batches[place][start] = pickle.loads(item["rows"])
            if item["is_last"]:
                last[place] = item["number"]
            if place in last and len(batches[place]) == last[place] + 1:
                rows = [row for _, batch in sorted(batches.pop(place).items()) for row in batch]
                metadata = {"input": inputs[place], "judges": dict(digests)}
                write_scores(output / parts[place].output, rows, metadata)
                on_part(rows)
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or ["no reason given"]
        raise RewardError(f"Ray stopped ({lines[-1].strip()}); what is finished stays.") from error
    return unread


def _scored_batches(parts: Mapping[int, Part], options: ScoringOptions, workers: int) -> Any:
    """Build the lazy data set of scored batches."""
    ray = loaded_ray()
    attempts = ray.remote(num_cpus=0)(Attempts).remote()
    items = [{"place": place, "part": pickle.dumps(part)} for place, part in parts.items()]
    batches = ray.data.from_items(items, override_num_blocks=len(items)).flat_map(
        read_batches, fn_kwargs={"options": options}, num_cpus=READING
    )
    return batches.map_batches(
        Scorer,
        batch_size=1,
        batch_format="pyarrow",
        fn_constructor_args=(options, os.getcwd(), partial(_begin, attempts)),
        compute=ray.data.ActorPoolStrategy(size=workers),
        **worker_resources(workers, ray.cluster_resources()),
    )


def _begin(attempts: Any, place: int, start: int, ended: int | None) -> int:
    return loaded_ray().get(attempts.begin.remote(place, start, ended))


def worker_resources(workers: int, resources: Mapping[str, float]) -> dict[str, Any]:
    """Divide the logical CPUs, and GPUs where there are some, among the workers.

    Half of the CPUs stay free for reading, without which a pool starves and waits forever.

    >>> worker_resources(2, {"CPU": 4}), worker_resources(4, {"CPU": 4})
    ({'num_cpus': 1.0}, {'num_cpus': 0.5})
    >>> worker_resources(3, {"CPU": 16, "GPU": 2})
    {'num_cpus': 1.0, 'num_gpus': 0.5}
    """
    cpus, gpus = resources.get("CPU", 1.0), int(resources.get("GPU", 0))
    share = {"num_cpus": int(10000 * min(1.0, cpus / 2 / workers)) / 10000}
    return share | ({"num_gpus": 1 / -(-workers // gpus)} if gpus else {})


def loaded_ray() -> Any:
    """Import Ray with few messages and no usage reports."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 leaves a worker nothing next to other work
    import ray  # type: ignore[import-not-found]  # optional
    import ray.data  # type: ignore[import-not-found]  # optional

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


@contextmanager
def ray_running(address: str | None) -> Iterator[None]:
    """Run a Ray on this machine for the block, or connect to the cluster of an address (HOST:PORT)."""
    if address is not None:
        check_address(address)
    ray = loaded_ray()
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    handler = signal.getsignal(signal.SIGTERM)  # Ray sets its own, which does not mention --resume
    try:
        if address is None:
            ray.init("local", include_dashboard=False, **quiet)
        else:
            ray.init(address, **quiet)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"No Ray at {address or 'this machine'}: {error}. A cluster may want a token (RAY_AUTH_TOKEN)."
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.target_max_block_size = 1  # a block is an item of `read_batches`
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Refuse an address that does not answer within seconds; Ray itself waits much longer."""
    host, colon, port = address.rpartition(":")
    if not colon or not host.strip("[]") or "/" in host or not port.isdigit():
        raise UserError(
            f"--address is {address!r}; needed is HOST:PORT of the cluster's head, such as 10.0.0.1:6379, "
            "given on a machine of the cluster."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # it answers only after a handshake
            connection.sendall(HELLO)
            answer = b""
            while len(answer) < 4 and (more := connection.recv(4 - len(answer))):
                answer += more
            if answer[3:] != b"\4":
                raise ConnectionError("the server there is no Ray")
    except (OSError, OverflowError) as error:
        raise UserError(
            f"No Ray cluster answers at {address} ({error}). Start its head with 'ray start --head', or "
            "leave --address out to score on this machine."
        ) from error
