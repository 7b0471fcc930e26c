# SPDX-License-Identifier: Apache-2.0
"""Run the page of `visalign collect` on this machine, or for all that reach it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from functools import partial

from visalign.pipelines.serve_reward import call_when_ready, check_port_free, is_loopback

from .store import VoteStore


def serve_votes(
    store: VoteStore, *, host: str = "127.0.0.1", port: int = 8080, on_ready: Callable[[str], object]
) -> None:
    """Serve the page until interrupted; `on_ready` gets its address when the server listens.

    On a host that others reach, new voters need the invitation that is a part of the page's address. It is
    another at each start; registered voters stay in.
    """
    from uvicorn import Server

    from visalign.rewards.serve.connections import server_config

    from .server import vote_server

    check_port_free(host, port)
    local = is_loopback(host)
    invite = None if local else secrets.token_urlsafe(9)
    hosts = ["127.0.0.1", "localhost", "[::1]", host] if local else None
    app = vote_server(store, invite=invite, hosts=hosts)
    server = Server(server_config(app, host, port, connections=256, idle=30.0))
    address = _own_address() if host in ("0.0.0.0", "::") else host
    url = f"http://{address}:{port}/" + (f"?invite={invite}" if invite else "")
    call_when_ready(server, partial(on_ready, url))
    server.run()


def _own_address() -> str:
    """Find the address by which others reach this machine, as the system would choose it; else its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: an address of documentation, RFC 5737
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()
