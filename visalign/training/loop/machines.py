# SPDX-License-Identifier: Apache-2.0
"""A machine of a run that vanishes: the kernels probe idle connections, and the other processes end."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
import warnings
from contextlib import suppress

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

IDLE, INTERVAL, PROBES = 20, 10, 4
"""Seconds until the first probe, seconds between two, and unanswered ones that end the run: 60 s in all."""
GREETING_SECONDS = 30.0
"""Longest wait for a connection, and for what is said on it first."""


def watch_machines(accelerator: Accelerator) -> None:
    """End this process, with a message and exit code 1, once another one's machine has been silent for 60 s.

    Every process holds an idle connection to the first one. TCP's keepalive probes it, which the kernel of a
    machine answers whatever its processes do: a judge that takes hours, or holds the interpreter's lock, is
    not lost, nor is a stopped process. One that ends is noticed by its collectives (`report_lost_process`).

    All processes call it. On Linux alone; where all are on one machine there is nothing to watch.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    if sys.platform != "linux" or os.environ.get("LOCAL_WORLD_SIZE", "1") == str(world):
        return
    server = None
    if rank == 0:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=world)
    port = None if server is None else server.getsockname()[1]
    port, token = broadcast_object_list([port, secrets.token_hex(16)])
    if server is not None:
        threading.Thread(target=_greet, args=(server, token, world), daemon=True).start()
        return
    address = os.environ.get("MASTER_ADDR", "localhost"), port
    try:
        connection = socket.create_connection(address, timeout=GREETING_SECONDS)
        connection.sendall(f"{token}{rank:8d}".encode())
        if not connection.recv(1):
            return connection.close()  # it has ended
    except OSError as error:
        warnings.warn(
            f"Process {rank} cannot reach the first one at {address[0]}:{port} ({error}), perhaps for a "
            "firewall: a lost machine is noticed after twelve hours only. Open the ports between machines.",
            stacklevel=2,
        )
        return
    threading.Thread(target=_hold, args=(connection, "0", []), daemon=True).start()


def _greet(server: socket.socket, token: str, world: int) -> None:
    """In the first process: take the connections of the others, and of nobody else."""
    held: list[socket.socket] = []
    while len(held) < world - 1:
        connection, _ = server.accept()
        connection.settimeout(GREETING_SECONDS)
        said = ""
        with suppress(OSError), connection.makefile("rb") as greeting:
            said = greeting.read(len(token) + 8).decode("latin-1")
        if said.startswith(token):
            with suppress(OSError):  # it has ended
                connection.sendall(b"+")
            held.append(connection)
            threading.Thread(target=_hold, args=(connection, said[-8:].strip(), held), daemon=True).start()
        else:
            connection.close()
    server.close()


def _hold(connection: socket.socket, rank: str, others: list[socket.socket]) -> None:
    """Wait on the connection to a process, for an error of the kernel or word of another one that is lost."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    try:
        said = connection.recv(256).decode()
    except OSError as error:
        said = f"process {rank} ({error.strerror})"
    if not said:  # it has ended
        return connection.close()
    for other in others:
        with suppress(OSError):  # itself, or one that has ended
            other.sendall(said.encode())
    print(
        f"The machine of {said} of this run is lost, or the network to it, and this process ends too. The "
        "checkpoints stand: start all processes again with --resume, as many as you like.",
        file=sys.stderr,
        flush=True,
    )
    time.sleep(0.5)  # the others hear it before their collectives fail
    os._exit(1)
