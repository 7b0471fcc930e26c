# SPDX-License-Identifier: Apache-2.0
"""`visalign serve-reward`: one judge behind HTTP, in a process of its own."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from visalign.errors import UserError

if TYPE_CHECKING:
    from visalign.rewards.serve.limits import RequestLimits


def serve_reward(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_env: str | None = None,
    max_batch: int = 64,
    max_wait: float = 0.005,
    timeout: float = 120.0,
    threads: int | None = None,
    memory: float | None = None,
    max_pixels: int | None = None,
    max_connections: int = 256,
    idle: float = 30.0,
    on_ready: Callable[[RequestLimits], object] | None = None,
) -> None:
    """Serve until interrupted.

    Then what is being judged is finished and what waits is refused with 503; a second Ctrl-C ends both.

    Args:
        name: of the judge, for `visalign.rewards.load_judge`.
        options: of the judge.
        host: address to listen on; one that others can reach needs a token.
        port: to listen on.
        token_env: environment variable that holds the token.
        max_batch: images judged together.
        max_wait: seconds that the first request of a batch waits for others.
        timeout: seconds that a batch may take.
        threads: CPU threads of the judge's process.
        memory: GiB for requests and for the judge's work on them, beside what both processes take when they
            idle; half of what is free when None. Limits follow from it
            (`visalign.rewards.serve.limits.limits_for`).
        max_pixels: of a request and of what is judged together, instead.
        max_connections: at once; fewer where the limit of open files is lower.
        idle: seconds after which a connection that asks nothing is closed.
        on_ready: called with the limits when the judge is loaded and the server listens.

    Raises:
        UserError: no token where one is needed, or one that cannot be sent; the address cannot be listened
            on; too little memory or too few open files; or uvicorn is not installed.
        RewardError: the judge cannot be loaded.
    """
    token = _token(host, token_env)
    if importlib.util.find_spec("uvicorn") is None:
        raise UserError(
            "A reward server needs uvicorn, which is not installed: python -m pip install 'visalign[serve]'."
        )
    check_port_free(host, port)
    from uvicorn import Server

    from visalign.rewards.serve.connections import connections_allowed, server_config
    from visalign.rewards.serve.limits import limits_for
    from visalign.rewards.serve.server import judge_server
    from visalign.rewards.serve.worker import JudgeWorker

    connections = connections_allowed(max_connections)
    worker = JudgeWorker(name, options, threads=threads)
    try:
        chosen = {"timeout": timeout} | ({} if max_pixels is None else {"max_pixels": max_pixels})
        limits = limits_for(memory, connections=connections, **chosen)
        app = judge_server(
            worker, worker.card, token=token, limits=limits, max_batch=max_batch, max_wait=max_wait
        )
        server = Server(server_config(app, host, port, connections=connections, idle=idle))
        _end_in_order(server, app, worker)
        if on_ready is not None:
            _say_ready(server, partial(on_ready, limits))
        server.run()
    finally:
        worker.close()


def _say_ready(server: Any, on_ready: Callable[[], object]) -> None:
    """Call when the server listens, which is after the judge is loaded."""
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
            f"Nothing can listen on {host}, port {port}: {error.strerror or error}. Give another --port or "
            "--host, or end what listens there."
        ) from error


def _token(host: str, token_env: str | None) -> str | None:
    if token_env is not None:
        token = os.environ.get(token_env)
        if not token:
            raise UserError(
                f"--token-env names {token_env}, which is empty or not set. Set it: export {token_env}=…"
            )
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise UserError(
                f"--token-env names {token_env}, whose value holds characters that no HTTP header may hold, "
                "a line break, a space or an umlaut perhaps. Use printable ASCII without spaces."
            )
        return token
    if not is_loopback(host):
        raise UserError(
            f"--host is {host}, which other machines can reach, and there is no token. Put one into an "
            "environment variable and name it with --token-env, or listen on 127.0.0.1."
        )
    return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
