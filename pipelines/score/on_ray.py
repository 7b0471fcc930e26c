# SPDX-License-Identifier: Apache-2.0
"""Scores of very many images by Ray Data: a file of scores for each file of images, judged by many workers.

Tasks read the files, batch by batch; a pool of actors judges the batches as `score_rows` does; this process
collects what belongs to one file and writes it whole. Nothing is kept but finished files: those are what a
stopped scoring goes on after, so that no list of all finished rows is ever held.
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
from .parts import Asking, Part, check_part, columns_of, parts_of, read_batches
from .score import ScoreRow, score_rows
from .whose import judge_identity

DEATHS = 3
"""How often a batch may end the worker that judges it before its rows count as failed."""
WAIT = 5.0
"""Seconds in which a cluster's address has to answer."""
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client of gRPC begins (RFC 9113, section 3.4); a server answers with a frame of type 4, settings."""
KEPT = b"visalign"
"""The key under which a file of scores says what was judged by whom."""
READING = 0.5
"""Logical CPUs of a task that reads a file."""


def finished(output: Path, parts: Sequence[Part], asking: Asking, judges: Mapping[str, str]) -> set[int]:
    """Places of the parts whose scores stand in the folder, by these judges, of the files as they are.

    Raises:
        UserError: A file there is not of ours, or holds scores of other judges.
    """
    import pyarrow.parquet

    done = set()
    for place, part in enumerate(parts):
        path = output / part.output
        if not path.is_file():
            continue
        columns_of(path)
        said: Any = None
        with suppress(ValueError):
            said = json.loads((pyarrow.parquet.read_schema(path).metadata or {}).get(KEPT, b"{}"))
        if not isinstance(said, dict) or not said.keys() >= {"judges", "input"}:
            raise UserError(f"'{path}' holds no scores of ours. Give another --output, or remove it.")
        if said["judges"] != dict(judges):
            raise UserError(
                f"'{path}' holds scores of {', '.join(said['judges'])}, which are other judges or other "
                f"versions than {', '.join(judges)} now. Remove it, or give another --output."
            )
        if said["input"] == state_of(part, asking):
            done.add(place)
    return done


def state_of(part: Part, asking: Asking) -> str:
    """What the scores of a part are of: it changes with the files and with how they are read."""
    files = part.source if isinstance(part.source, tuple) else (part.source,)
    return score_key([str(path) for path in files], asking.prompt or "", asking.names)


def write_scores(path: Path, rows: Sequence[ScoreRow], kept: Mapping[str, Any]) -> None:
    """Rows as Parquet, a line per image and reward, whole or not at all; `kept` is for `finished`."""
    import pyarrow
    import pyarrow.parquet

    words = ("image", "reward", "unit", "reason", "prompt", "text", "judge")
    columns: dict[str, Any] = {name: pyarrow.string() for name in words}
    columns |= dict.fromkeys(("value", "std"), pyarrow.float64())
    columns["parts"] = pyarrow.map_(pyarrow.string(), pyarrow.float64())
    schema = pyarrow.schema([(name, columns[name]) for name in ScoreRow.__dataclass_fields__])
    table = pyarrow.Table.from_pylist(
        [asdict(row) | {"parts": list(row.parts.items())} for row in rows],
        schema=schema.with_metadata({KEPT: json.dumps(kept).encode()}),
    )
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    write_atomic(path, file.getvalue())


class Tries:
    """Counts how often each batch was begun and not ended."""

    def __init__(self) -> None:
        self._begun: Counter[tuple[int, int | None]] = Counter()

    def begin(self, place: int, start: int, ended: int | None = None) -> int:
        """Count once more; how often it is by now. The worker has ended the batch at `ended` before."""
        self._begun.pop((place, ended), None)
        self._begun[place, start] += 1
        return self._begun[place, start]


class Judge:
    """A worker: it loads the rewards once and judges batches.

    What a reward raises comes back as words, so that the message is the reward's and not Ray's. A batch that
    ends its worker is given to another by Ray, for ever; after `DEATHS` its rows are failures.

    Args:
        asking: The rewards.
        folder: Where the command runs, which relative paths in options start at.
        begin: `Tries.begin`, of all workers.
    """

    def __init__(self, asking: Asking, folder: str, begin: Callable[[int, int, int | None], int]) -> None:
        self._asking, self._begin = asking, begin
        self._rewards: dict[str, Any] = {}
        with suppress(OSError):  # another machine, which has no such folder
            os.chdir(folder)

    def __call__(self, batch: Any) -> Any:
        """An item of `read_batches`, as an Arrow table, with the scores in place of the rows."""
        [item] = batch.to_pylist()
        rows: list[ImageRow] = pickle.loads(item["rows"])
        scores: list[ScoreRow] = []
        stop, ended, size = "", None, self._asking.batch_size
        try:
            self._rewards = self._rewards or self._load()
            for at in range(0, len(rows), size):
                start, some = item["start"] + at, rows[at : at + size]
                if self._begin(item["place"], start, ended) > DEATHS:
                    why = f"the worker that judged it died {DEATHS} times, by it or by another of its batch"
                    some = [replace(row, reason=row.reason or why) for row in some]
                scores += score_rows(some, self._rewards, batch_size=size)
                ended = start
        except (RewardError, UserError) as error:
            stop = str(error)
        item |= {"rows": pickle.dumps(scores), "stop": stop}
        return {name: [value] for name, value in item.items()}

    def _load(self) -> dict[str, Any]:
        device = "cuda:0" if loaded_ray().get_gpu_ids() else None
        return load_each(self._asking.rewards, self._asking.options, partial(load_reward, run_device=device))


@dataclass(kw_only=True)
class Done:
    """What a scoring did."""

    before: int = 0
    """Files of scores that stood there already, of these judges and these files of images."""
    files: int = 0
    """Files of scores that were written."""
    rows: int = 0
    failed: int = 0
    """Of the rows, those without a value."""
    unread: dict[str, str] = field(default_factory=dict)
    """A file that could not be read to its end -> why; nothing is written for it."""


def score_on_ray(
    items: Sequence[Path],
    output: Path,
    asking: Asking,
    rewards: Mapping[str, Any],
    *,
    resume: bool = False,
    workers: int = 1,
    address: str | None = None,
    on_part: Callable[[int, int], object] = lambda done, total: None,
) -> Done:
    """Score files of images into a folder, a Parquet file for each.

    Args:
        items: As `parts_of` takes them.
        output: A new folder, or with `resume` one whose finished files stay.
        asking: How they are read and judged.
        rewards: Label -> reward, asked here only who it is; each worker loads its own.
        resume: Go on with what was stopped in the folder.
        workers: Processes that judge.
        address: HOST:PORT of a cluster's head; None starts a Ray on this machine.
        on_part: Called with the number of finished files and of all.

    Raises:
        UserError: Something given cannot be used; nothing was judged then.
        RewardError: A reward raised; finished files stay.
    """
    output = output.absolute()
    if above := [item for item in items if item.is_dir() and output.is_relative_to(item.absolute())]:
        raise UserError(f"The output '{output}' lies in '{above[0]}', which is to be scored. Give another.")
    check_run_folder(output, resume=resume)
    if whole := [label for label, r in rewards.items() if with_capabilities(r).capabilities.needs_batch]:
        raise UserError(
            f"{', '.join(whole)} judges all images of a call together, and --engine ray judges them in "
            "batches of each file. Leave --engine ray out."
        )
    parts = parts_of(items, clips=asking.clips)
    for part in parts:
        check_part(part, asking)
    judges = {label: judge_identity(reward).digest for label, reward in rewards.items()}
    with hold_lock(output / LOCK, what=f"The output folder '{output}'"):
        before = finished(output, parts, asking, judges)
        done, todo = Done(before=len(before)), {n: p for n, p in enumerate(parts) if n not in before}

        def count(rows: Sequence[ScoreRow]) -> None:
            done.files, done.rows = done.files + 1, done.rows + len(rows)
            done.failed += sum(row.value is None for row in rows)
            on_part(done.before + done.files, len(parts))

        if todo:
            with ray_running(address):
                done.unread = score_parts(todo, output, asking, judges, workers=workers, on_part=count)
    return done


def score_parts(
    parts: Mapping[int, Part],
    output: Path,
    asking: Asking,
    judges: Mapping[str, str],
    *,
    workers: int,
    on_part: Callable[[Sequence[ScoreRow]], object],
) -> dict[str, str]:
    """Judge parts on the Ray that runs, and write the scores of each when it is done.

    Args:
        parts: Place -> part.
        output: The folder of the scores.
        asking: How parts are read and judged.
        judges: Label -> digest of the judge's identity.
        workers: Actors that judge. Where there are GPUs, they share them; CPUs are shared so that half of the
            logical ones stay free for reading, without which a pool starves and waits forever.
        on_part: Called with the scores of each part when they are written.

    Returns:
        File that could not be read -> why; nothing is written for it.

    Raises:
        RewardError: A reward raised, or Ray could not go on.
    """
    found: dict[int, dict[int, list[ScoreRow]]] = {place: {} for place in parts}
    last: dict[int, int] = {}
    unread: dict[str, str] = {}
    states = {place: state_of(part, asking) for place, part in parts.items()}
    ray = loaded_ray()
    try:
        for item in _judged(parts, asking, workers).iter_rows():
            place, start = item["place"], item["start"]
            if item["stop"]:
                raise RewardError(item["stop"])
            if item["unread"]:
                unread[str(parts[place].source)] = item["unread"]
                found.pop(place, None)
            if place not in found:
                continue
            found[place][start] = pickle.loads(item["rows"])
            if item["is_last"]:
                last[place] = item["number"]
            if place in last and len(found[place]) == last[place] + 1:
                rows = [row for _, batch in sorted(found.pop(place).items()) for row in batch]
                kept = {"input": states[place], "judges": dict(judges)}
                write_scores(output / parts[place].output, rows, kept)
                on_part(rows)
    except ray.exceptions.RayError as error:
        said = [line for line in str(error).splitlines() if line.strip()] or ["no reason given"]
        raise RewardError(f"Ray stopped ({said[-1].strip()}); what is finished stays.") from error
    return unread


def _judged(parts: Mapping[int, Part], asking: Asking, workers: int) -> Any:
    """The data set of judged batches; nothing runs before it is asked for rows."""
    ray = loaded_ray()
    tries = ray.remote(num_cpus=0)(Tries).remote()
    items = [{"place": place, "part": pickle.dumps(part)} for place, part in parts.items()]
    batches = ray.data.from_items(items, override_num_blocks=len(items)).flat_map(
        read_batches, fn_kwargs={"asking": asking}, num_cpus=READING
    )
    return batches.map_batches(
        Judge,
        batch_size=1,
        batch_format="pyarrow",
        fn_constructor_args=(asking, os.getcwd(), partial(_begin, tries)),
        compute=ray.data.ActorPoolStrategy(size=workers),
        **shares(workers, ray.cluster_resources()),
    )


def _begin(tries: Any, place: int, start: int, ended: int | None) -> int:
    return loaded_ray().get(tries.begin.remote(place, start, ended))


def shares(workers: int, resources: Mapping[str, float]) -> dict[str, Any]:
    """Logical CPUs, and GPUs where there are some, of each worker.

    >>> shares(2, {"CPU": 4}), shares(4, {"CPU": 4}), shares(3, {"CPU": 16, "GPU": 2})
    ({'num_cpus': 1.0}, {'num_cpus': 0.5}, {'num_cpus': 1.0, 'num_gpus': 0.5})
    """
    cpus, gpus = resources.get("CPU", 1.0), int(resources.get("GPU", 0))
    found = {"num_cpus": int(10000 * min(1.0, cpus / 2 / workers)) / 10000}
    return found | ({"num_gpus": 1 / -(-workers // gpus)} if gpus else {})


def loaded_ray() -> Any:
    """The library, which says little here, and nothing to its makers.

    Raises:
        ModuleNotFoundError: It is not installed; the command line says then which extra brings it.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 leaves a worker nothing beside other work
    import ray  # type: ignore[import-not-found]  # optional
    import ray.data  # type: ignore[import-not-found]  # optional

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


@contextmanager
def ray_running(address: str | None) -> Iterator[None]:
    """A Ray of this machine for the block, or the cluster of an address.

    Args:
        address: HOST:PORT of the cluster's head; None starts one here.

    Raises:
        UserError: The address does not answer, or is no cluster for this Python and Ray.
    """
    if address is not None:
        check_address(address)
    ray = loaded_ray()
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    before = signal.getsignal(signal.SIGTERM)  # Ray puts a handler of its own there, which knows no --resume
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
        signal.signal(signal.SIGTERM, before)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.target_max_block_size = 1  # a block is an item of `read_batches`
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Refuse an address that does not answer within seconds; Ray itself waits much longer.

    Raises:
        UserError: It is no HOST:PORT, or nobody listens there.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host.strip("[]") or "/" in host or not port.isdigit():
        raise UserError(
            f"--address is {address!r}; needed is HOST:PORT of the cluster's head, such as 10.0.0.1:6379, "
            "given on a machine of the cluster."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=WAIT) as line:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # it speaks after a handshake alone
            line.sendall(HELLO)
            answer = b""
            while len(answer) < 4 and (more := line.recv(4 - len(answer))):
                answer += more
            if answer[3:] != b"\4":
                raise ConnectionError("what listens there is no Ray")
    except (OSError, OverflowError) as error:
        raise UserError(
            f"No Ray cluster answers at {address} ({error}). Start its head with 'ray start --head', or "
            "leave --address away to score on this machine."
        ) from error
