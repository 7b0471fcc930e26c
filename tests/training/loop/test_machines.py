# SPDX-License-Identifier: Apache-2.0
"""A machine that vanishes ends the processes of the others; one that is busy or stopped does not."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
from accelerate import Accelerator

from tests.support.training.processes import in_forks
from visalign.training.loop import machines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="keepalive by socket is Linux's")

ATTACH_FILTER = 26
"""SO_ATTACH_FILTER of Linux."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds in all."""
    for name in ("IDLE", "INTERVAL"):
        monkeypatch.setattr(machines, name, 1)
    monkeypatch.setattr(machines, "PROBES", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # accelerate warns without it


def unplug(connection: socket.socket) -> None:
    """Let the kernel drop every packet that comes in on a connection, as if the other machine were gone."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    connection.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(drop)))


@pytest.mark.slow
def test_a_machine_that_vanishes_ends_all_processes(tmp_path: Path, capfd, monkeypatch) -> None:
    """Three processes; the others wait in a collective for the last one, whose connection is cut."""

    def work() -> None:
        accelerator = Accelerator(cpu=True)
        last, hold = accelerator.process_index == 2, machines._watch
        if last:  # it hears nothing, and does not notice
            monkeypatch.setattr(machines, "IDLE", 1000)
            monkeypatch.setattr(machines, "_watch", lambda link, *more: (unplug(link), hold(link, *more)))
        machines.watch_machines(accelerator)
        if last:
            time.sleep(8)  # the others notice after 3 s
            os._exit(1)
        accelerator.wait_for_everyone()

    assert not in_forks(tmp_path, 3, work)
    output = capfd.readouterr().err
    assert output.count("The machine of process 2 (Connection timed out) of this run is lost") == 2, output


def test_only_processes_of_the_run_are_let_in(monkeypatch) -> None:
    ranks: list[str] = []
    monkeypatch.setattr(machines, "_watch", lambda link, rank, links: ranks.append(rank) or link.close())
    with socket.create_server(("127.0.0.1", 0)) as server:
        greeting = threading.Thread(target=machines._accept, args=(server, "token", 2))
        greeting.start()
        for message in (b"GET / HTTP/1.1", b"", b"token       1"):
            with socket.create_connection(server.getsockname()) as link:
                link.sendall(message)
        greeting.join()
    while not ranks:
        time.sleep(0.01)
    assert ranks == ["1"]


def test_a_port_that_is_closed_is_told(monkeypatch) -> None:
    class Other:
        process_index, num_processes = 1, 2

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(machines, "broadcast_object_list", lambda _: [port, "token"])
    with pytest.warns(UserWarning, match=rf"cannot reach the first one at 127.0.0.1:{port} .*twelve hours"):
        machines.watch_machines(Other())  # type: ignore[arg-type]


def test_processes_of_one_machine_are_not_watched(monkeypatch) -> None:
    class Both:
        process_index, num_processes = 1, 2

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    broadcasts: list[object] = []
    monkeypatch.setattr(machines, "broadcast_object_list", lambda objects: broadcasts.append(objects) or objects)
    machines.watch_machines(Both())  # type: ignore[arg-type]
    assert broadcasts == []
