# SPDX-License-Identifier: Apache-2.0
"""`visalign serve-reward`: one judge behind HTTP, in a process of its own."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Mapping
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
    max_wait: float = 0.005,
    timeout: float = 120.0,
    threads: int | None = None,
    on_ready: Callable[[], object] | None = None,
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
        on_ready: called when the judge is loaded and the server listens.

    Raises:
        UserError: no token where one is needed, the address cannot be listened on, or uvicorn is not
            installed.
        RewardError: the judge cannot be loaded.
    """
    token = _token(host, token_env)
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise UserError(
            "A reward server needs uvicorn, which is not installed: python -m pip install 'visalign[serve]'."
        ) from error
    _check_free(host, port)
    from visalign.rewards.serve.server import Limits, judge_server
    from visalign.rewards.serve.worker import JudgeWorker

    worker = JudgeWorker(name, options, threads=threads)
    try:
        limits = Limits(timeout=timeout)
        app = judge_server(
            worker, worker.card, token=token, limits=limits, max_batch=max_batch, max_wait=max_wait
        )
        config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_keep_alive=30)
        server = uvicorn.Server(config)
        _end_in_order(server, app, worker)
        if on_ready is not None:
            _say_ready(server, on_ready)
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


def _check_free(host: str, port: int) -> None:
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
        return token
    if not _is_loopback(host):
        raise UserError(
            f"--host is {host}, which other machines can reach, and there is no token. Put one into an "
            "environment variable and name it with --token-env, or listen on 127.0.0.1."
        )
    return None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
