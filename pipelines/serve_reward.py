# SPDX-License-Identifier: Apache-2.0
"""`visalign serve-reward`: one judge behind HTTP, in a process of its own."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

from visalign.errors import UserError


def serve_reward(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_env: str | None = None,
    max_batch: int = 64,
    timeout: float = 120.0,
    threads: int | None = None,
    memory: float | None = None,
    max_pixels: int | None = None,
    max_connections: int = 256,
    on_ready: Callable[[Any], object] = lambda limits: None,
    on_load: Callable[[Any], object] = id,
) -> None:
    """Serve a judge (`visalign.rewards.load_judge`) until interrupted; the command explains the options.

    Ctrl-C finishes what is being judged and refuses what waits with 503; a second one ends both. `on_ready` gets the
    limits of requests (`visalign.rewards.serve.limits.limits_for`) when the server listens, `on_load` the judge.
    """
    token = _token(host, token_env)
    check_port_free(host, port)
    from uvicorn import Server

    from visalign.rewards.serve.connections import connections_allowed, server_config
    from visalign.rewards.serve.limits import limits_for
    from visalign.rewards.serve.server import judge_server
    from visalign.rewards.serve.worker import JudgeWorker

    connections = connections_allowed(max_connections)
    worker = JudgeWorker(name, options, threads=threads, on_load=on_load)
    try:
        chosen = {"timeout": timeout} | ({} if max_pixels is None else {"max_pixels": max_pixels})
        limits = limits_for(memory, connections=connections, **chosen)
        app = judge_server(worker, worker.card, token=token, limits=limits, max_batch=max_batch)
        server = Server(server_config(app, host, port, connections=connections, idle=30.0))
        _end_in_order(server, app, worker)
        call_when_ready(server, partial(on_ready, limits))
        server.run()
    finally:
        worker.close()


def call_when_ready(server: Any, on_ready: Callable[[], object]) -> None:
    """Have a uvicorn server call `on_ready` when it listens."""
    start = server.startup

    async def startup(sockets: Any = None) -> None:
        await start(sockets=sockets)
        if server.started:
            on_ready()

    server.startup = startup


def _end_in_order(server: Any, app: Any, worker: Any) -> None:
    """Have Ctrl-C refuse what waits, and a second one what is being judged, before the server goes."""
    end = server.handle_exit

    def interrupted(number: int, frame: FrameType | None) -> None:
        if server.should_exit:
            threading.Thread(target=worker.close, daemon=True).start()
            return
        app.state.stop()
        end(number, frame)

    server.handle_exit = interrupted


def check_port_free(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on before the judge is loaded, which may take minutes."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise UserError(
            f"Nothing can listen on {host}, port {port}: {error.strerror or error}. Give another --port or --host."
        ) from error


def _token(host: str, token_env: str | None) -> str | None:
    if token_env is None:
        if not is_loopback(host):
            raise UserError(
                f"--host is {host}, which other machines can reach. Name a variable with a token by --token-env."
            )
        return None
    token = os.environ.get(token_env)
    if not token:
        raise UserError(f"--token-env names {token_env}, which is empty or not set: export {token_env}=…")
    if not (token.isascii() and token.isprintable()) or " " in token:
        fault = "whose value holds characters that no HTTP header may hold. Use printable ASCII without spaces"
        raise UserError(f"--token-env names {token_env}, {fault}.")
    return token


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
